"""Full-graph inference: layer by layer for all nodes with all their neighbours.

Sampled inference computes a node's row once for every seed that reaches it; here each layer computes it
once. A layer's rows stay on the disk of the rank that computed them, and who needs some asks that rank over
torch.distributed: hosts share no disk, and graph servers serve what a partition holds, not what a run makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array, Ids
from trainer.core.batch import Block, HeteroBatch
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType, NodeType
from trainer.loader.open import Graph
from trainer.loader.pyg_batch import as_tensor
from trainer.loader.seed_order import RankLayout
from trainer.nn.graph_facts import LayerNeed
from trainer.sampler.multi_hop import cut_block, sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.subgraph import SampleSettings, SeedSet
from trainer.sampler.types import RowRequest
from trainer.train.shares import LayerRows, Range, Shares
from trainer.train.stack import LayerStack

EDGES_PER_NODE = 64  #: a chunk of n nodes has about this many times n edges at most, or a single node

Computed = dict[NodeType, LayerRows]


@dataclass(frozen=True)
class Chunk:
    """Some nodes of one type with all their neighbours, by one layer's edge types."""

    ids: Mapping[NodeType, Ids]  #: global ids of every source type's rows; the nodes themselves come first
    blocks: Mapping[EdgeType, Block]
    num_dst: Mapping[NodeType, int]  #: of every type; 0 but for one


@dataclass
class WholeGraph:
    """All nodes of an opened graph, shared out over the ranks. ``nodes_at_once`` bounds memory."""

    graph: Graph
    layout: RankLayout
    group: RankGroup
    scratch: Path  #: folder for the rows of layers; 4 bytes * own nodes * width for each of two layers
    nodes_at_once: int = 4096
    weight: str | None = None  #: edge attribute; edges of weight 0 are left out, as in sampling by it
    shares: dict[NodeType, Shares] = field(init=False)
    _tables: RelabelTables = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.graph.manifest
        self.shares = {of: Shares(spec.offsets, self.layout) for of, spec in manifest.nodes.items()}
        self._tables = RelabelTables(manifest)

    @torch.no_grad()
    def run(self, stack: LayerStack) -> Computed:
        """What the last layer gives for every node of its target types; all ranks take part."""
        before: Computed = {}
        for number, need in enumerate(stack.needs):
            before = {of: self._layer(stack, number, need, of, before) for of in need.targets}
        return before

    def _layer(self, stack: LayerStack, number: int, need: LayerNeed, of: NodeType, before: Computed) -> LayerRows:
        """One layer for all own nodes of one type; ranks with fewer chunks go on with empty ones."""
        chunks = list(self._chunks(of, need))
        rows, done = None, 0
        for place in range(max(self.group.gather(len(chunks)))):
            ids = chunks[place] if place < len(chunks) else np.empty(0, np.int64)
            out = self._compute(stack, number, need, self._chunk(of, ids, need), before)[of].cpu().numpy()
            if rows is None:
                rows = self._file(f"layer{number}-{of}", self.shares[of].owned(self.group.rank), out.shape[1])
            rows[done : done + len(out)] = out
            done += len(out)
        return LayerRows(self.shares[of], np.empty((0, 0), np.float32) if rows is None else rows)

    def _compute(
        self, stack: LayerStack, number: int, need: LayerNeed, chunk: Chunk, before: Computed
    ) -> Mapping[NodeType, Tensor]:
        device = self.group.device
        if number == 0:
            rows = stack.begin(self._features(chunk).to(device))
        else:
            rows = {of: before[of].fetch(chunk.ids[of]).to(device) for of in need.sources}
        blocks = {of: block.to(device) for of, block in chunk.blocks.items()}
        degree = self._degree(chunk, need).to(device) if stack.needs_degree else None
        return stack.layer(number, blocks, rows, chunk.num_dst, degree)

    def _chunk(self, of: NodeType, ids: Ids, need: LayerNeed) -> Chunk:
        num_dst = {other: len(ids) if other == of else 0 for other in self.shares}
        if not need.edge_types:
            return Chunk({of: ids}, {}, num_dst)
        settings = SampleSettings(dict.fromkeys(need.edge_types, (-1,)), weight=self._weight(need))
        found = sample_multi_hop(
            self.graph.access, self.graph.manifest, SeedSet({of: ids}), settings, 0, self._tables
        )  # fmt: skip
        blocks = {}
        for edge_type in need.edge_types:
            indptr, indices, num_src = cut_block(found, edge_type, 0)
            blocks[edge_type] = Block(torch.from_numpy(indptr), torch.from_numpy(indices), num_src)
        return Chunk({other: found.nodes[other].ids for other in need.sources}, blocks, num_dst)

    def _weight(self, need: LayerNeed) -> str | None:
        specs = self.graph.manifest.edges
        return self.weight if any(self.weight in specs[of].attrs for of in need.edge_types) else None

    def _features(self, chunk: Chunk) -> HeteroBatch:
        """A chunk's original ids and features."""
        specs = self.graph.manifest.nodes
        wanted = [
            RowRequest(of, ids, ("orig_id", "x") if "x" in specs[of].attrs else ("orig_id",))
            for of, ids in chunk.ids.items()
        ]
        found = dict(zip(chunk.ids, self.graph.access.gather(wanted), strict=True))
        (target,) = [of for of, count in chunk.num_dst.items() if count] or list(chunk.ids)[:1]
        return HeteroBatch(
            step=0, key=0, num_seeds=chunk.num_dst[target], global_seeds=0, target=target,
            n_id={of: torch.from_numpy(np.asarray(rows["orig_id"], np.int64)) for of, rows in found.items()},
            x={of: as_tensor(rows["x"], specs[of].attrs["x"]).float() for of, rows in found.items() if "x" in rows},
            y=None, input_id=torch.empty(0, dtype=torch.int64), blocks=(chunk.blocks,),
            num_nodes={of: (chunk.num_dst[of], len(ids)) for of, ids in chunk.ids.items()},
        )  # fmt: skip

    def _degree(self, chunk: Chunk, need: LayerNeed) -> Tensor:
        (of,) = need.sources
        (rows,) = self.graph.access.gather([RowRequest(of, chunk.ids[of], ("in_degree",))])
        return torch.from_numpy(np.asarray(rows["in_degree"]))

    def _chunks(self, of: NodeType, need: LayerNeed) -> Iterator[Ids]:
        """Own nodes in pieces that fit into memory, in the order of own rows."""
        ending = [edge_type for edge_type in need.edge_types if edge_type[2] == of]
        for piece in self.shares[of].own(self.group.rank):
            cost = 1 / self.nodes_at_once + self._degrees(piece, of, ending) / (self.nodes_at_once * EDGES_PER_NODE)
            number = np.floor(np.cumsum(cost) - cost / 2).astype(np.int64)
            cuts = np.flatnonzero(np.diff(number)) + 1
            yield from np.split(np.arange(piece.first, piece.last), cuts)

    def _degrees(self, piece: Range, of: NodeType, ending: list[EdgeType]) -> Ids:
        """In-edges of own nodes: those by ``ending`` where the part is here, else all, as its server knows them."""
        part = self.graph.store.parts.get(piece.part_id)
        degrees = np.zeros(piece.last - piece.first, np.int64)
        if part is None and ending:
            ids = np.arange(piece.first, piece.last)
            (rows,) = self.graph.access.gather([RowRequest(of, ids, ("in_degree",))])
            return np.asarray(rows["in_degree"])
        if part is None:
            return degrees
        first, last = (at - part.nodes[of].start for at in (piece.first, piece.last))
        for edge_type in ending:
            degrees += np.diff(part.edges[edge_type].indptr[first : last + 1])
        return degrees

    def _file(self, name: str, count: int, width: int) -> Array:
        """A new array on disk: the page cache holds what fits of it."""
        if count * width == 0:
            return np.empty((count, width), np.float32)
        return np.lib.format.open_memmap(
            self.scratch / f"rank{self.group.rank}-{name}.npy", mode="w+", dtype=np.float32, shape=(count, width)
        )
