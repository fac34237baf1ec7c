"""What a model receives: blocks and rows of one rank's share of a global batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from trainer.core.batch_cost import Cost
from trainer.core.schema import EdgeType, NodeType


@dataclass(frozen=True)
class Block:
    """One layer's bipartite graph in CSR, grouped by target.

    Targets are the first ``num_dst`` of the ``num_src`` source nodes; all ids are positions in the
    batch's node list, so a layer maps rows ``[num_src, f]`` to rows ``[num_dst, g]``.
    """

    indptr: Tensor  #: int32 [num_dst + 1]
    indices: Tensor  #: int32 [num_edges] source of each edge
    num_src: int

    @property
    def num_dst(self) -> int:
        return len(self.indptr) - 1

    def to(self, device: torch.device, non_blocking: bool = False) -> Block:
        """The block on ``device``; torch_geometric's ``Data.to`` calls this too."""
        indptr, indices = (part.to(device, non_blocking=non_blocking) for part in (self.indptr, self.indices))
        return replace(self, indptr=indptr, indices=indices)


@dataclass(frozen=True)
class KeptRows:
    """Which of a batch's rows are on the device already, and not among its ``x``."""

    slots: Tensor  #: int32 [n] rows of ``rows``, -1 where ``x`` has them
    rows: Tensor  #: float [k, f], on the device

    def joined(self, others: Tensor, non_blocking: bool = False) -> Tensor:
        """All rows, float [n, f], on the device of ``rows``; ``others``, those missing here, are in their order."""
        slots = self.slots.to(self.rows.device, non_blocking=non_blocking).long()
        others = others.to(self.rows.device, non_blocking=non_blocking)
        if len(self.rows) == 0:
            return others
        joined = self.rows[slots.clamp(min=0)].to(others.dtype)
        joined[slots < 0] = others
        return joined


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. ``blocks[0]`` feeds the first layer (the outermost hop).

    ``len(n_id) == blocks[0].num_src``; the first ``num_seeds`` nodes are the seeds.
    """

    step: int
    key: int  #: uint64 of (seed, epoch, step): samples and dropout are drawn from it
    num_seeds: int
    global_seeds: int  #: seeds of this step over all ranks
    n_id: Tensor  #: int64 [n] original ids
    x: Tensor  #: float32 [n, f]; before ``to`` only the rows that ``kept`` lacks
    y: Tensor | None  #: [num_seeds, …]
    input_id: Tensor  #: int64 [num_seeds] positions in the split's seed list
    blocks: tuple[Block, ...]
    degree: Tensor | None = None  #: int64 [n] in-degree in the whole graph, when the model asks for it
    kept: KeptRows | None = None  #: rows that need not be copied to the device
    cost: Cost = Cost()  #: of making it

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch with its tensors, and all rows of ``x``, on ``device``."""
        if device.type == "cpu" and self.kept is None:
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
        )


@dataclass(frozen=True)
class HeteroBatch:
    """The same for a heterogeneous graph; seeds are of one type, ``target``.

    ``blocks[0]`` feeds the first layer. In a layer, type t has the rows known before the layer's hop
    as targets and those known after it as sources, whatever the edge type; an edge type without edges
    has a block with none. ``num_nodes[t][h]`` are the rows of type t known after hop h.
    """

    step: int
    key: int  #: uint64 of (seed, epoch, step): samples and dropout are drawn from it
    num_seeds: int
    global_seeds: int  #: seeds of this step over all ranks
    target: NodeType
    n_id: Mapping[NodeType, Tensor]  #: int64 [n_t] original ids, every type
    x: Mapping[NodeType, Tensor]  #: float32 [n_t, f_t] of the types that have features; before ``to`` as in ``Batch``
    y: Tensor | None  #: [num_seeds, …]
    input_id: Tensor  #: int64 [num_seeds] positions in the split's seed list
    blocks: tuple[Mapping[EdgeType, Block], ...]  #: every edge type with a fanout
    num_nodes: Mapping[NodeType, tuple[int, ...]]  #: [hops + 1] each, cumulative
    kept: Mapping[NodeType, KeptRows] = field(default_factory=dict)  #: rows that need not be copied to the device
    cost: Cost = Cost()  #: of making it

    def to(self, device: torch.device, non_blocking: bool = False) -> HeteroBatch:
        """The batch with its tensors, and all rows of ``x``, on ``device``."""
        if device.type == "cpu" and not self.kept:
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
            y=None if self.y is None else moved(self.y),
            input_id=moved(self.input_id),
            blocks=tuple({of: block.to(device, non_blocking) for of, block in layer.items()} for layer in self.blocks),
        )
