"""The loader of the bundled trainer. Its batches consist of blocks, one per layer."""

from __future__ import annotations

import difflib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Columns, Ids
from trainer.core.batch import AnyBatch, Batch, Block, DeviceRows, HeteroBatch, KeptRows
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import silent_types
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType, type_name, types_with_messages
from trainer.graph.device import as_tensor, tensor_of
from trainer.graph.open import Graph
from trainer.graph.prefetch import Sampler, ordered_ahead
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedOrder, SeedShare, shares
from trainer.loader.arguments import time_and_top
from trainer.sampler.multi_hop import block_edges, cut_block
from trainer.sampler.rule_types import Rule
from trainer.sampler.rules import check_rule, num_requests, rule_edges, without_silent
from trainer.sampler.settings import check_settings, check_times
from trainer.sampler.subgraph_sampler import SampledBatch, SubgraphSampler
from trainer.sampler.types import RowRequest, SampledSubgraph, SampleSettings, SeedSet
from trainer.store.manifest import LOOPLESS_DEGREE, AttrSpec, Manifest


@dataclass(frozen=True)
class LoaderSettings:
    """Settings of ``BatchLoader``.

    Args:
        split: Name of the seed list: ``"train"``, ``"val"`` or ``"test"``.
        fanouts: Number of neighbours per hop, starting at the seeds; -1 takes all. A tuple, or a mapping over edge
            types.
        global_batch: Seeds per step over all ranks.
        seed: Random seed of the order and of all draws.
        replace: Draw neighbours with replacement.
        shuffle: Shuffle the seeds in each epoch.
        threads: Number of sampler threads.
        prefetch: Batches in memory at once per rank, including the one in use; must be above ``threads``.
        want_degree: Also gather the in-degrees in the whole graph, without self loops (for GCN); homogeneous graphs
            only.
        deadline: Seconds that one request to another host may take.
        target: Node type of the seeds.
        weight: Edge attribute; the chance of a neighbour is proportional to it.
        time_attr: Integer attribute of nodes or edges; neighbours later than their seed are not sampled. If the seeds
            have no such attribute, their own is ``time``.
        last: With ``time_attr``: take the latest neighbours instead of drawing.
        top: Take the heaviest neighbours instead of drawing, or without ``weight`` the latest.
        disjoint: Sample a separate subgraph for each seed. Implied by ``time_attr``.
        edge_attr: Edge attribute [E] or [E, d] that blocks get as ``edge_attr``, for the edge types that have it.
            Several: side by side, in this order; each edge type has those of them that it has.
        categories: Integer node attributes [N] that batches get side by side as ``categories``, by node type.
        ages: Node types with the attribute ``time_attr`` of which batches get ``age``.
        rule: A rule that chooses the neighbours, with scores, instead of draws among the edges.
        silent: Edge types that are not sampled, and neither are their reverses.
        ends: With ``rule``: node types of the seeds, if they are links. Default: ``target``.
    """

    split: str
    fanouts: tuple[int, ...] | Mapping[EdgeType, tuple[int, ...]]
    global_batch: int
    seed: int = 0
    replace: bool = False
    shuffle: bool = True
    threads: int = 1
    prefetch: int = 2
    want_degree: bool = False
    deadline: float = 120.0
    target: NodeType = HOMO_NODE
    weight: str | None = None
    time_attr: str | None = None
    last: bool = False
    top: bool = False
    disjoint: bool = False
    edge_attr: str | tuple[str, ...] | None = None
    categories: Mapping[NodeType, tuple[str, ...]] = field(default_factory=dict)
    ages: tuple[NodeType, ...] = ()
    rule: Rule | None = None
    silent: tuple[EdgeType, ...] = ()
    ends: tuple[NodeType, ...] = ()


class BlockLoader(ABC):
    """Base of loaders that yield the batches of one rank: ``Batch`` for a homogeneous graph, else ``HeteroBatch``."""

    def __init__(
        self, graph: Graph, settings: LoaderSettings, rank: int, layout: RankLayout, num_seeds: int,
        labels: tuple[NodeType, tuple[str, ...]],
    ):  # fmt: skip
        """``num_seeds``: length of the seed list. ``labels``: a node type, and its attributes to gather for seeds."""
        layout.check(rank, graph.manifest.num_parts)
        self.graph, self.settings, self.rank, self.layout = graph, settings, rank, layout
        stream = STREAMS.get(settings.split, OTHER_STREAM)
        self.order = SeedOrder(num_seeds, settings.global_batch, settings.seed, settings.shuffle, stream)
        sampling = sampling_of(graph, settings)
        check_settings(graph.manifest, sampling)
        # every request has its own deadline
        self._patience = graph.patience(settings.deadline, num_requests(graph.manifest, sampling))
        self._kept: dict[NodeType, DeviceRows] = {}
        self.sampler = graph.sampler(sampling, columns_of(graph, settings), labels)
        self._device_sampler: Sampler | None = None
        self._making: Callable[[], AbstractContextManager[object]] = nullcontext

    def __len__(self) -> int:
        return self.order.num_steps

    def keep(self, rows: Mapping[NodeType, DeviceRows]) -> None:
        """Make batches without the rows of ``x`` that the device caches. ``rows``: the cached rows.

        ``Batch.to`` adds the cached rows when it copies a batch to the device.

        Raises:
            SettingsError: This process is a client.
        """
        if not isinstance(self.sampler, SubgraphSampler):
            raise SettingsError("a client node cannot cache rows on its device: graph servers send it whole batches")
        self._kept = dict(rows)
        self.sampler.kept = {of: kept.slots for of, kept in rows.items()}

    @property
    def kept(self) -> Mapping[NodeType, DeviceRows]:
        """The rows of ``x`` that are cached on the device."""
        return self._kept

    @property
    def host_sampler(self) -> SubgraphSampler:
        """The sampler that runs on the CPU. Not available in a client."""
        assert isinstance(self.sampler, SubgraphSampler)
        return self.sampler

    def sample_with(
        self, sampler: Sampler | None, making: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:  # fmt: skip
        """Make batches with ``sampler``, which samples on a device. None: with this loader's own sampler.

        ``making``: returns a context in which each batch is made: the stream of the device on which all of its tensors
        are computed. On another stream, a tensor's memory could be used again before the stream has read it.
        """
        self._device_sampler, self._making = sampler, making

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        """Yield the batches of one epoch, from ``first_step`` on.

        Raises:
            ServiceError: Another host fails.
        """
        s, work = self.settings, self.shares(epoch, first_step)
        threads = self.graph.threads(s.threads, s.prefetch)
        return ordered_ahead(self.load, work, threads=threads, ahead=s.prefetch, deadline=self._patience)

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[SeedShare]:
        """Yield the seeds of this rank for every step of an epoch, from ``first_step`` on."""
        return shares(self.order, self._part_of, self.rank, self.layout, epoch, first_step)

    def load(self, share: SeedShare) -> AnyBatch:
        """Return this rank's batch of one step."""
        with self._making():
            return self._load(share)

    def _load(self, share: SeedShare) -> AnyBatch:
        return self._made(share, self._seed_set(share))

    def _made(self, share: SeedShare, seeds: SeedSet) -> AnyBatch:
        """Return the batch of ``seeds``, with the ages of nodes if the loader gathers their times."""
        sampled = self.make(seeds, share.key)
        batch, attr = self._batch(share, sampled), self.settings.time_attr
        timed = [of for of in self.settings.ages if sampled.subgraph.nodes[of].tree is not None]
        if attr is None or not timed or not isinstance(batch, HeteroBatch):
            return batch
        seed_times = np.concatenate([seeds.times[of] for of in seeds.nodes])
        ages = {of: seed_times[sampled.subgraph.nodes[of].tree] - sampled.rows[of][attr] for of in timed}
        return replace(batch, age={of: torch.from_numpy(each.astype(np.float32)) for of, each in ages.items()})

    def make(self, seeds: SeedSet, key: int) -> SampledBatch:
        """Return the subgraph and the attributes of ``seeds``: tensors if sampled on a device, else numpy arrays."""
        return (self._device_sampler or self.sampler).sample(seeds, key)

    def requests(self, epoch: int) -> Iterator[list[RowRequest]]:
        """Sample each batch of an epoch, and yield its requests for attributes without sending them.

        Not available in a client.
        """
        sampler = replace(self.host_sampler, _local=threading.local())  # a copy, to free its relabel tables
        return (sampler.requests(self._seed_set(share), share.key) for share in self.shares(epoch))

    @abstractmethod
    def _seed_set(self, share: SeedShare) -> SeedSet: ...

    @abstractmethod
    def _part_of(self, positions: Ids) -> Ids: ...

    def _batch(self, share: SeedShare, sampled: SampledBatch) -> AnyBatch:
        manifest, settings, nodes, rows = self.graph.manifest, self.settings, sampled.subgraph.nodes, sampled.rows
        columns = edge_columns(manifest, settings.edge_attr)
        edges = {of: edge_rows(rows[of], specs) for of, specs in columns.items() if of in rows}
        x = {of: as_tensor(rows[of]["x"], manifest.nodes[of].attrs["x"]).float() for of in nodes if "x" in rows[of]}
        y = None
        if "y" in sampled.labels:
            y = as_label(as_tensor(sampled.labels["y"], manifest.nodes[settings.target].attrs["y"]))
        kept = {
            of: KeptRows(torch.from_numpy(slots), torch.from_numpy(np.flatnonzero(slots < 0)), self._kept[of].rows)
            for of, slots in sampled.kept.items()
        }
        n_id = {of: tensor_of(rows[of]["orig_id"]) for of in nodes}
        degree = {of: tensor_of(rows[of][LOOPLESS_DEGREE]) for of in nodes if LOOPLESS_DEGREE in rows[of]}
        categories = category_codes(settings.categories, rows)
        if not manifest.hetero:
            return Batch(
                step=share.step,
                key=share.key,
                num_seeds=len(share.positions),
                global_seeds=share.global_seeds,
                n_id=n_id[HOMO_NODE],
                x=x[HOMO_NODE] if x else torch.empty(len(n_id[HOMO_NODE]), 0),
                y=y,
                input_id=torch.from_numpy(share.positions),
                blocks=homo_blocks(sampled.subgraph, edges),
                degree=degree.get(HOMO_NODE),
                kept=kept.get(HOMO_NODE),
                cost=sampled.cost,
                categories=categories.get(HOMO_NODE),
            )
        return HeteroBatch(
            step=share.step,
            key=share.key,
            num_seeds=len(share.positions),
            global_seeds=share.global_seeds,
            target=settings.target,
            n_id=n_id,
            x=x,
            y=y,
            input_id=torch.from_numpy(share.positions),
            blocks=hetero_blocks(sampled.subgraph, edges),
            num_nodes={of: tuple(np.cumsum(found.per_hop).tolist()) for of, found in nodes.items()},
            kept=kept,
            cost=sampled.cost,
            categories=categories,
            degree=degree,
        )


class BatchLoader(BlockLoader):
    """Loader that yields the batches of one rank: ``Batch`` for a homogeneous graph, else ``HeteroBatch``.

    Every rank yields the same number of batches; some may have no seeds.

    Args:
        graph: An opened graph.
        settings: What to sample, and how many batches to prefetch.
        rank: Rank of this process in ``layout``.
        layout: For each part, the ranks on hosts that store it.

    Raises:
        SettingsError: The settings do not fit the graph.
        PartitionError: The graph has no such split.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        settings = gf.LoaderSettings("train", fanouts=(10, 5), global_batch=512)
        loader = gf.BatchLoader(graph, settings, graph.ranks.rank, graph.layout)
        for batch in loader.epoch(1):
            x, blocks = batch.x, batch.blocks
        ```
    """

    def __init__(self, graph: Graph, settings: LoaderSettings, rank: int, layout: RankLayout):
        if settings.target not in graph.manifest.nodes:
            raise SettingsError(f"no node type {settings.target!r}; the graph has {list(graph.manifest.nodes)}")
        self._seeds = graph.store.seeds(settings.target, settings.split)
        labels = settings.target, (("y",) if "y" in graph.manifest.nodes[settings.target].attrs else ())
        super().__init__(graph, settings, rank, layout, len(self._seeds), labels)

        timed_seeds(graph, settings, np.empty(0, np.int64), np.empty(0, np.int64))  # raises if they have no times

    def _seed_set(self, share: SeedShare) -> SeedSet:
        return timed_seeds(self.graph, self.settings, self._seeds[share.positions], share.places)

    def _part_of(self, positions: Ids) -> Ids:
        return self.graph.store.books[self.settings.target].part_of(self._seeds[positions])


def timed_seeds(graph: Graph, settings: LoaderSettings, seeds: Ids, trees: Ids) -> SeedSet:
    """Return seeds with their times, if ``settings`` has a ``time_attr``. ``trees``: keys of the trees around them.

    Raises ``SettingsError`` if the seeds have neither this attribute nor ``time``.
    """
    of, attrs = settings.target, graph.manifest.nodes[settings.target].attrs
    if settings.time_attr is None:
        return SeedSet({of: seeds}, {of: trees})
    name = settings.time_attr if settings.time_attr in attrs else "time"
    if name not in attrs:
        raise SettingsError(f"time_attr: the seeds' node type {of!r} has no attribute {settings.time_attr!r}")
    check_times(name, of, attrs[name])
    (rows,) = graph.access.gather([RowRequest(of, seeds, (name,))])
    return SeedSet({of: seeds}, {of: trees}, {of: rows[name].astype(np.int64)})


def sampling_of(graph: Graph, settings: LoaderSettings) -> SampleSettings:
    given, rule = settings.fanouts, settings.rule
    silent = silent_types(settings.silent, graph.manifest.edges, graph.manifest.graph_attrs)
    types = types_with_messages(graph.manifest.edges, silent)
    if rule is not None:
        rule, ends = without_silent(rule, graph.manifest, silent), settings.ends or (settings.target,)
        check_rule(graph.manifest, rule, ends)
        types = rule_edges(rule, graph.manifest, ends, len(given))
    every = {of: tuple(given) for of in types} if not isinstance(given, Mapping) else dict(given)
    time, top = time_and_top(graph.manifest, settings.time_attr, settings.weight, last=settings.last, top=settings.top)
    return SampleSettings(
        every, replace=settings.replace, disjoint=settings.disjoint or time is not None, weight=settings.weight,
        top=top, time=time, edge_ids=bool(settings.edge_attr), rule=rule,
    )  # fmt: skip


def columns_of(graph: Graph, settings: LoaderSettings) -> dict[AnyType, tuple[str, ...]]:
    """Return the attributes to gather for all nodes and edges, by type."""
    wanted: dict[AnyType, tuple[str, ...]] = {
        of: ("x",) for of, spec in graph.manifest.nodes.items() if "x" in spec.attrs
    }
    if settings.want_degree:
        wanted |= {of: (*wanted.get(of, ()), LOOPLESS_DEGREE) for of in graph.manifest.nodes}
    for of in settings.ages if settings.time_attr is not None else ():
        wanted[of] = (*wanted.get(of, ()), settings.time_attr or "")
    for of, names in settings.categories.items():
        wanted[of] = (*wanted.get(of, ()), *names)
    wanted |= {of: tuple(specs) for of, specs in edge_columns(graph.manifest, settings.edge_attr).items()}
    return wanted


EdgeColumns = Mapping[str, AttrSpec]  #: attributes of an edge type that are its features side by side, by name


def edge_columns(manifest: Manifest, names: str | Sequence[str] | None) -> dict[EdgeType, EdgeColumns]:
    """Return dtype and shape of the edge attributes ``names``, in this order, for the edge types that have some.

    Raises ``SettingsError`` if no edge type has one of them, or one is neither [E] nor [E, d] of real numbers.
    """
    if not names:
        return {}
    names = (names,) if isinstance(names, str) else names
    known = sorted({each for spec in manifest.edges.values() for each in spec.attrs})
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}? There is" if near else "there is"
            raise SettingsError(
                f"edge_attr: no edge type has an attribute {name!r}; {hint} {', '.join(known) or 'none'}"
            )
    found = {
        of: {name: spec.attrs[name] for name in names if name in spec.attrs} for of, spec in manifest.edges.items()
    }
    for of, specs in found.items():
        for name, spec in specs.items():
            if len(spec.shape) > 2 or spec.dtype.startswith("complex"):
                raise SettingsError(
                    f"edge_attr: {name} of {type_name(of)} is {spec.dtype} {list(spec.shape)}; expected real numbers, "
                    "one row per edge"
                )
    return {of: specs for of, specs in found.items() if specs}


def edge_rows(rows: Columns, specs: EdgeColumns) -> Tensor:
    """Return gathered attributes of edges side by side, float32 [e, d]."""
    columns = []
    for name, spec in specs.items():
        values = rows[name] if isinstance(rows[name], Tensor) else np.ascontiguousarray(rows[name])
        columns.append(as_tensor(values, spec).float().reshape(len(values), math.prod(spec.shape[1:])))
    return columns[0] if len(columns) == 1 else torch.cat(columns, 1)


def category_codes(
    names: Mapping[NodeType, tuple[str, ...]], rows: Mapping[Any, Columns]
) -> dict[NodeType, Tensor]:  # fmt: skip
    """Return the codes of columns of categories side by side, int64 [n, columns], by node type.

    ``names``: the columns by node type. ``rows``: gathered attributes by type.
    """
    return {
        of: torch.stack([torch.from_numpy(np.asarray(rows[of][name], np.int64)) for name in columns], 1)
        for of, columns in names.items()
        if of in rows
    }


def as_label(labels: Tensor) -> Tensor:
    """Convert integer labels to int64, as cross entropy needs, and return other labels unchanged."""
    whole = not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)
    return labels.long() if whole else labels


EdgeRows = Mapping[EdgeType, Tensor]  #: edge features of a subgraph, float32 [e, d]


def homo_blocks(subgraph: SampledSubgraph, edge_rows: EdgeRows | None = None) -> tuple[Block, ...]:
    """Return the blocks of a homogeneous graph in layer order, the outermost hop first."""
    return tuple(block_of(subgraph, HOMO_EDGE, hop, edge_rows) for hop in reversed(range(subgraph.num_hops)))


def hetero_blocks(subgraph: SampledSubgraph, edge_rows: EdgeRows | None = None) -> tuple[dict[EdgeType, Block], ...]:
    """Return the blocks of each edge type that has fanouts, in layer order, the outermost hop first."""
    sampled = [of for of, edges in subgraph.edges.items() if edges.fanouts]
    hops = reversed(range(subgraph.num_hops))
    return tuple({of: block_of(subgraph, of, hop, edge_rows) for of in sampled} for hop in hops)


def block_of(subgraph: SampledSubgraph, edge_type: EdgeType, hop: int, edge_rows: EdgeRows | None = None) -> Block:
    """Return the block of one edge type and hop, with the features of its edges if ``edge_rows`` has them."""
    indptr, indices, num_src = cut_block(subgraph, edge_type, hop)
    block, edges = Block(tensor_of(indptr), tensor_of(indices), num_src), subgraph.edges[edge_type]
    rows = (edge_rows or {}).get(edge_type)
    if rows is None and edges.scores is None:
        return block
    at = block_edges(subgraph, edge_type, hop)
    if edges.scores is not None and edges.hops is not None:
        weight = tensor_of(edges.scores[at])
        block = replace(block, edge_attr=weight[:, None], edge_weight=weight, hops=tensor_of(edges.hops[at]).long())
    return block if rows is None else replace(block, edge_attr=rows[tensor_of(at).long()])
