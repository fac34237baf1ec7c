"""Batches of the bundled models: one rank's seeds, sampled blocks, and rows of nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.batch_cost import Cost
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType


@dataclass(frozen=True)
class Block:
    """The bipartite graph of one layer, as CSR with one row per target node.

    The targets are the first ``num_dst`` of the ``num_src`` source nodes. Ids are positions in the batch's list of
    nodes.
    """

    indptr: Tensor  #: int32 [num_dst + 1]
    indices: Tensor  #: int32 [num_edges], the source of each edge
    num_src: int  #: number of source nodes
    edge_attr: Tensor | None = None  #: float32 [num_edges, d], features of the edges, if the loader gathers them
    #: float32 [num_edges], scores of the neighbours, if a rule chose them: descending for each target
    edge_weight: Tensor | None = None
    hops: Tensor | None = None  #: int64 [num_edges], distance at which the rule met each neighbour

    @property
    def num_dst(self) -> int:
        return len(self.indptr) - 1

    def to(self, device: torch.device, non_blocking: bool = False) -> Block:
        # torch_geometric's ``Data.to`` calls this method too.
        tensors = {
            name: value.to(device, non_blocking=non_blocking)
            for name in ("indptr", "indices", "edge_attr", "edge_weight", "hops")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **tensors)

    def tokens(self, k: int) -> Tokens:
        """Return the first ``k`` neighbours of each target as a sequence, padded to the same length."""
        count = self.indptr.diff()[:, None]
        place = torch.arange(k, device=self.indptr.device)
        mask = place < count
        slot = (self.indptr[:-1, None] + place).where(mask, 0).long()

        def rows(values: Tensor) -> Tensor:
            found = values[slot] if len(values) else values.new_zeros(slot.shape)
            return found.masked_fill(~mask, 0)

        ones = torch.ones(len(self.indices), device=self.indptr.device)
        return Tokens(
            rows(self.indices).long(), mask, rows(ones if self.edge_weight is None else self.edge_weight),
            rows(torch.ones_like(self.indices) if self.hops is None else self.hops).long(),
        )  # fmt: skip


@dataclass(frozen=True)
class Tokens:
    """The neighbours of each seed as a sequence, best first. Places after the last neighbour have ``mask`` False."""

    node: Tensor  #: int64 [seeds, k], position of each neighbour in the batch's list of nodes; 0 where masked
    mask: Tensor  #: bool [seeds, k]
    scores: Tensor  #: float32 [seeds, k], 1 for neighbours that were drawn; 0 where masked
    hops: Tensor  #: int64 [seeds, k], distance from the seed, 1 for neighbours that were drawn; 0 where masked
    types: Tensor | None = None  #: int64 [seeds, k], number of the type of each node; None: one type


@dataclass(frozen=True)
class DeviceRows:
    """The rows of ``x`` of one node type that are cached on the device for the whole run."""

    slots: Array  #: int32 [num_nodes], on the host: index into ``rows`` for each global id, -1 if it is not cached
    rows: Tensor  #: float32 [k, f], on the device


@dataclass(frozen=True)
class KeptRows:
    """The rows of a batch that are cached on the device.

    Before ``Batch.to``, ``Batch.x`` contains only rows that are not cached.
    """

    slots: Tensor  #: int32 [n], index into ``rows`` for each node; -1 for rows that are in ``x``
    missing: Tensor  #: int64 [m], positions of the nodes whose rows are in ``x``: those with slot -1
    rows: Tensor  #: float [k, f], the cache on the device

    def joined(self, others: Tensor, non_blocking: bool = False) -> Tensor:
        """Return the rows of all nodes of the batch, float [n, f], on the device of ``rows``.

        ``others``: the rows that are not cached (slot -1), in node order.
        """
        others = others.to(self.rows.device, non_blocking=non_blocking)
        if len(self.rows) == 0:
            return others
        slots = self.slots.to(self.rows.device, non_blocking=non_blocking)
        missing = self.missing.to(self.rows.device, non_blocking=non_blocking)
        return self.rows[slots.clamp(min=0)].to(others.dtype).index_copy_(0, missing, others)


@dataclass(frozen=True)
class LinkEnds:
    """The links of a batch of link prediction, as positions among the seed nodes of their types.

    The seed nodes are the ends of the links, and the negatives. ``num_seeds`` is the number of links. Without times,
    each seed node is in the batch once. With times, the batch has a copy of both ends for each link. The links are
    divided into groups of similar time, and the batch has a copy of the negatives for each group.

    With ``relation``, links are of several edge types, and ``src``, ``dst`` and ``negatives`` are positions in the rows
    of all ``types``, one type after the other. A link is a query for its target, and may be a second one for its
    source: such queries follow those of the links, in the same order, with both ends exchanged. The groups are the
    types of what is asked for.
    """

    source: NodeType
    target: NodeType
    src: Tensor  #: int64 [num_seeds], source of each link
    dst: Tensor  #: int64 [num_seeds], target of each link
    #: int64 [m], other nodes of the target type, the same for all links of the step; with ``group``: [groups, m]
    negatives: Tensor
    group: Tensor | None = None  #: int64 [num_seeds], row of ``negatives`` of each link
    #: bool [num_seeds, m], which negatives are the link's target, or known targets of its source; None: equal positions
    equal: Tensor | None = None
    #: float32 [num_seeds + m], log of how often each link's target, then each negative, is drawn; None: no correction
    log_q: Tensor | None = None
    attr: Tensor | None = None  #: float32 [num_seeds, d], features of the edges whose labels are learned
    own: Tensor | None = None  #: int64 [num_seeds, k], further negatives of each link alone; -1 for none
    #: int64 [queries], edge type of each query; plus the number of edge types if its answer is the link's source
    relation: Tensor | None = None
    types: tuple[NodeType, ...] = field(default=(), kw_only=True)  #: with ``relation``: node types of the seeds
    per_link: int = field(default=1, kw_only=True)  #: with ``relation``: queries per link

    def is_target(self) -> Tensor:
        """Return which negatives are left out for each link, as they are its target: bool [num_seeds, m].

        With ``own``, [num_seeds, m + k].
        """
        equal = self.dst[:, None] == self.negatives[None] if self.equal is None else self.equal
        return equal if self.own is None else torch.cat([equal, self.own < 0], 1)

    def to(self, device: torch.device, non_blocking: bool = False) -> LinkEnds:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        names = ("src", "dst", "negatives", "group", "equal", "log_q", "attr", "own", "relation")
        return replace(self, **{name: moved(getattr(self, name)) for name in names})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batch:
    """One rank's share of one training step on a homogeneous graph.

    ``blocks[0]`` is the input of the first layer (the outermost hop). The first ``num_seeds`` nodes are the seeds.
    """

    step: int
    key: int  #: uint64 hash of (seed, epoch, step); samples and dropout masks are drawn from it
    num_seeds: int  #: seeds of this rank
    global_seeds: int  #: seeds of this step over all ranks
    n_id: Tensor  #: int64 [n], original ids
    x: Tensor  #: float32 [n, f]; before ``to``, only the rows that are not in ``kept``
    y: Tensor | None  #: [num_seeds, …]
    input_id: Tensor  #: int64 [num_seeds], positions in the split's seed list
    blocks: tuple[Block, ...]
    degree: Tensor | None = None  #: int64 [n], in-degree in the graph without self loops; for models that need it
    kept: KeptRows | None = None  #: rows that are cached on the device and not copied
    cost: Cost = Cost()  #: bytes, rows and seconds spent on making the batch
    links: LinkEnds | None = None  #: in link prediction; seeds are then links, and ``y`` is None
    categories: Tensor | None = None  #: int64 [n, columns], codes of columns of categories, -1 for missing values

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Return the batch with all tensors on ``device``, and with the cached rows in ``x``."""
        if device.type == "cpu" and self.kept is None and not self.n_id.is_cuda:
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            n_id=moved(self.n_id),
            x=moved(self.x) if self.kept is None else self.kept.joined(self.x, non_blocking),
            kept=None,
            y=None if self.y is None else moved(self.y),
            input_id=moved(self.input_id),
            blocks=tuple(block.to(device, non_blocking) for block in self.blocks),
            degree=None if self.degree is None else moved(self.degree),
            categories=None if self.categories is None else moved(self.categories),
            links=self.links and self.links.to(device, non_blocking),
        )

    def typed(self) -> HeteroBatch:
        """Return the batch with one node type and one edge type."""
        return HeteroBatch(
            step=self.step,
            key=self.key,
            num_seeds=self.num_seeds,
            global_seeds=self.global_seeds,
            target=HOMO_NODE,
            n_id={HOMO_NODE: self.n_id},
            x={HOMO_NODE: self.x},
            y=self.y,
            input_id=self.input_id,
            blocks=tuple({HOMO_EDGE: block} for block in self.blocks),
            num_nodes={HOMO_NODE: (*(block.num_dst for block in reversed(self.blocks)), len(self.n_id))},
            cost=self.cost,
            links=self.links,
            categories={} if self.categories is None else {HOMO_NODE: self.categories},
            degree={} if self.degree is None else {HOMO_NODE: self.degree},
        )


@dataclass(frozen=True)
class HeteroBatch:
    """One rank's share of one training step on a heterogeneous graph. The seeds are nodes of type ``target``, or links.

    ``blocks[0]`` is the input of the first layer: one block per edge type, empty for a type without sampled edges.
    ``num_nodes[t][h]`` is the number of nodes of type t in the batch after hop h.
    """

    step: int
    key: int  #: uint64 hash of (seed, epoch, step); samples and dropout masks are drawn from it
    num_seeds: int  #: seeds of this rank
    global_seeds: int  #: seeds of this step over all ranks
    target: NodeType
    n_id: Mapping[NodeType, Tensor]  #: int64 [n_t], original ids, for every type
    x: Mapping[NodeType, Tensor]  #: float32 [n_t, f_t], for types with features; before ``to`` as in ``Batch``
    y: Tensor | None  #: [num_seeds, …]
    input_id: Tensor  #: int64 [num_seeds], positions in the split's seed list
    blocks: tuple[Mapping[EdgeType, Block], ...]  #: per layer, a block for every edge type with a fanout
    num_nodes: Mapping[NodeType, tuple[int, ...]]  #: [hops + 1] for each type, cumulative
    kept: Mapping[NodeType, KeptRows] = field(default_factory=dict)  #: rows that are cached on the device
    cost: Cost = Cost()  #: bytes, rows and seconds spent on making the batch
    links: LinkEnds | None = None  #: in link prediction; seeds are then links, and ``y`` is None
    #: int64 [n_t, columns], codes of columns of categories, -1 for missing values, for types that have some
    categories: Mapping[NodeType, Tensor] = field(default_factory=dict)
    degree: Mapping[NodeType, Tensor] = field(default_factory=dict)  #: int64 [n_t], as in ``Batch``, by all edge types
    #: float32 [n_t], how much earlier each node is than the seed of its tree, for types with times
    age: Mapping[NodeType, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device, non_blocking: bool = False) -> HeteroBatch:
        """Return the batch with all tensors on ``device``, and with the cached rows in ``x``."""
        if device.type == "cpu" and not self.kept and not any(ids.is_cuda for ids in self.n_id.values()):
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return replace(
            self,
            n_id={of: moved(ids) for of, ids in self.n_id.items()},
            x={
                of: self.kept[of].joined(rows, non_blocking) if of in self.kept else moved(rows)
                for of, rows in self.x.items()
            },
            kept={},
            categories={of: moved(codes) for of, codes in self.categories.items()},
            degree={of: moved(counts) for of, counts in self.degree.items()},
            age={of: moved(ages) for of, ages in self.age.items()},
            y=None if self.y is None else moved(self.y),
            input_id=moved(self.input_id),
            blocks=tuple({of: block.to(device, non_blocking) for of, block in layer.items()} for layer in self.blocks),
            links=self.links and self.links.to(device, non_blocking),
        )

    def typed(self) -> HeteroBatch:
        return self


AnyBatch: TypeAlias = Batch | HeteroBatch
