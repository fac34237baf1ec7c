"""Full-graph inference: computes each layer for all nodes, with all their neighbours.

The rows of a layer are stored on the disk of the rank that computed them, and other ranks request them over
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.arrays import Array, Ids
from trainer.core.batch import AnyBatch, Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup
from trainer.core.rng import batch_key
from trainer.core.row_exchange import exchange_rows
from trainer.core.schema import EdgeType, NodeType
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import (
    BatchLoader,
    BlockLoader,
    LoaderSettings,
    block_of,
    category_codes,
    edge_columns,
    edge_rows,
    timed_seeds,
)
from trainer.nn.edge_model import EdgeModel
from trainer.nn.graph_facts import LayerNeed
from trainer.nn.hetero_models import HeteroModel
from trainer.nn.lightgcn import LightGCN, NodeRows
from trainer.nn.link_model import LinkModel
from trainer.nn.models import BlockModel
from trainer.sampler.multi_hop import sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.types import RowRequest, SampleSettings, SeedSet, TimeRule
from trainer.store.manifest import LOOPLESS_DEGREE


@dataclass(frozen=True)
class NodeRange:
    """A contiguous range of nodes of one part that one rank computes."""

    part_id: int
    rank: int
    first: int  #: global ids first … last - 1
    last: int
    row: int  #: position of ``first`` in the rank's own rows


class _NodeShares:
    """Assignment of the nodes of one type to ranks.

    The nodes of a part are divided evenly among the ranks on the hosts of the part.
    """

    def __init__(self, offsets: Sequence[int], layout: RankLayout):
        ranges, counts = list[NodeRange](), [0] * layout.world_size
        for part_id, (first, last) in enumerate(zip(offsets, offsets[1:], strict=False)):
            # If no rank runs on a host of the part, another rank computes its nodes.
            ranks = layout.ranks_of_part[part_id] or (part_id % layout.world_size,)
            bounds = [first + (last - first) * place // len(ranks) for place in range(len(ranks) + 1)]
            for rank, begin, end in zip(ranks, bounds, bounds[1:], strict=False):
                if begin < end:
                    ranges.append(NodeRange(part_id, rank, begin, end, counts[rank]))
                    counts[rank] += end - begin
        self.ranges = tuple(ranges)
        self._starts = np.array([of.first for of in self.ranges], np.int64)
        self._ranks = np.array([of.rank for of in self.ranges], np.int64)
        self._rows = np.array([of.row for of in self.ranges], np.int64)

    def own(self, rank: int) -> tuple[NodeRange, ...]:
        return tuple(of for of in self.ranges if of.rank == rank)

    def owned(self, rank: int) -> int:
        return sum(of.last - of.first for of in self.own(rank))

    def owners(self, ids: Ids) -> Ids:
        return self._ranks[self._at(ids)]

    def rows(self, ids: Ids) -> Ids:
        """Return, for each global id, the index of its row in the ``LayerRows`` of its rank: int64 [n]."""
        at = self._at(ids)
        return self._rows[at] + ids - self._starts[at]

    def _at(self, ids: Ids) -> Ids:
        return np.searchsorted(self._starts, ids, side="right") - 1


@dataclass(frozen=True)
class LayerRows:
    """Result of one layer for the nodes of one type. Each rank stores its own rows."""

    shares: _NodeShares
    values: Array  #: float32 [own nodes, f]

    def fetch(self, ids: Ids) -> Tensor:
        """Return the rows of any nodes by global id, float32 [n, f]. Collective."""
        owners = torch.from_numpy(self.shares.owners(ids))
        return exchange_rows(
            torch.from_numpy(ids), owners, lambda own: torch.from_numpy(self.values[self.shares.rows(own.numpy())])
        )  # fmt: skip


_TypeRows = Mapping[NodeType, Tensor]

Blocks = Mapping[EdgeType, Block]


class LayerStack(Protocol):
    """The layers of a model in evaluation mode. Implement this protocol for your own model to use ``WholeGraph``."""

    @property
    def needs(self) -> tuple[LayerNeed, ...]:
        """Node and edge types that each layer reads and writes, first layer first."""

    @property
    def needs_degree(self) -> bool:
        """Whether layers need the in-degrees in the whole graph, without self loops."""

    def begin(self, batch: HeteroBatch) -> _TypeRows:
        """Compute the input of the first layer from features and ids: [n, f] for each of the layer's source types."""

    def layer(
        self, number: int, blocks: Blocks, rows: _TypeRows, num_dst: Mapping[NodeType, int],
        degree: Mapping[NodeType, Tensor],
    ) -> _TypeRows:  # fmt: skip
        """Compute the output of layer ``number`` (from 0) for each target type; for the last layer, the model's output.

        ``rows``: input by source type. ``num_dst``: number of targets by type. ``degree``: in-degrees of the source
        nodes by type, without self loops, if ``needs_degree``.
        """


def stack_of(model: nn.Module) -> LayerStack | None:
    """Return the layers of a model of the bundled trainer, or of the encoder of a model of links or edges.

    None for a class of the user that cannot be run layer by layer. Raises ``SettingsError`` for any other model.
    """
    if isinstance(model, LinkModel | EdgeModel):
        return stack_of(model.encoder)
    if isinstance(model, BlockModel | HeteroModel | LightGCN | NodeRows):
        return model
    if callable(layer_stack := getattr(model, "layer_stack", None)):  # ``OwnModel``, whose import takes seconds
        return layer_stack()  # type: ignore[no-any-return]
    raise SettingsError(
        f"{type(model).__name__} is not a bundled model; implement a LayerStack for it, see"
        " trainer/nn/layerwise_inference.py"
    )


class _GivenSeeds(BatchLoader):
    """Loader of batches whose seeds are given, by global id."""

    def __init__(self, graph: Graph, settings: LoaderSettings, rank: int, layout: RankLayout):
        BlockLoader.__init__(self, graph, settings, rank, layout, 0, (settings.target, ()))

    def batch_of(self, seeds: Ids, trees: Ids | None = None, times: Ids | None = None) -> AnyBatch:
        """``trees``, ``times`` [n]: keys of the trees around the seeds, and their times; default: as in the graph."""
        of, places = self.settings.target, np.arange(len(seeds))
        key = batch_key(self.settings.seed, 0, 0, 0)  # the same for all batches: nodes are sampled alike in each
        share = SeedShare(0, key, len(seeds), places, places, places)
        seed_set = SeedSet({of: seeds})
        if trees is not None and times is not None:
            seed_set = SeedSet({of: seeds}, {of: trees}, {of: times})
        elif self.settings.time_attr is not None:
            (rows,) = self.graph.access.gather([RowRequest(of, seeds, ("orig_id",))])
            seed_set = timed_seeds(self.graph, self.settings, seeds, np.asarray(rows["orig_id"], np.int64))
        return self._made(share, seed_set)


_EDGES_PER_NODE = 64  #: a chunk of several nodes has at most about ``nodes_at_once`` times this number of edges

LayerResults = dict[NodeType, LayerRows]


@dataclass(frozen=True)
class _NodeChunk:
    """A chunk of nodes of one type, with all their neighbours by the edge types that one layer reads."""

    ids: Mapping[NodeType, Ids]  #: global ids of every source type's rows; the nodes themselves come first
    blocks: Mapping[EdgeType, Block]
    num_dst: Mapping[NodeType, int]  #: number of targets by type; 0 for all types but one


@dataclass
class WholeGraph:
    """Runs the layers of a model on all nodes of a graph, one layer after the other, distributed over the ranks.

    Args:
        graph: An opened graph.
        layout: The ranks of each part: ``graph.layout``.
        group: The ranks that call ``run`` together.
        scratch: Folder for the rows of two layers at a time. Each layer takes 4 bytes · nodes of the rank · width.
        nodes_at_once: Number of nodes computed at a time; bounds memory.
        weight: Edge attribute; edges of weight 0 are left out, as in weighted sampling.
        edge_attr: Edge attribute that the layers read as features of edges; several: side by side.
        categories: Node attributes that the layers read as columns of categories, by node type.
        top: Number of neighbours of each hop, from the seeds outward: those of the highest ``weight``, or without it
            the latest by ``latest``. (): all.
        latest: With ``top``: the times by which neighbours are the latest.
    """

    graph: Graph
    layout: RankLayout
    group: RankGroup
    scratch: Path
    nodes_at_once: int = 4096
    weight: str | None = None
    edge_attr: str | tuple[str, ...] | None = None
    categories: Mapping[NodeType, tuple[str, ...]] = field(default_factory=dict)
    top: tuple[int, ...] = ()
    latest: TimeRule | None = None
    shares: dict[NodeType, _NodeShares] = field(init=False)
    _tables: RelabelTables = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.graph.manifest
        self.shares = {of: _NodeShares(spec.offsets, self.layout) for of, spec in manifest.nodes.items()}
        self._tables = RelabelTables(manifest)

    @torch.no_grad()
    def run_sampled(
        self, seed_rows: Callable[[Any], _TypeRows], targets: Sequence[NodeType], settings: LoaderSettings
    ) -> LayerResults:
        """Compute the output of a model for every node of the types ``targets``, on sampled neighbours. Collective.

        ``seed_rows``: returns the output for the seeds of a batch, by node type. ``settings``: what is sampled;
        ``global_batch`` is the number of nodes computed at a time. The samples are the same for any number of ranks.
        """
        results: LayerResults = {}
        for of in targets:

            def compute(batch: Any, of: NodeType = of) -> Tensor:
                return seed_rows(batch)[of]

            rows = self.run_seeds(compute, replace(settings, target=of), self.own(of))
            results[of] = LayerRows(self.shares[of], rows)
        return results

    def own(self, of: NodeType) -> Ids:
        """Return this rank's nodes of a type, int64 global ids, in the order of their rows."""
        own = self.shares[of].own(self.group.rank)
        return np.concatenate([np.empty(0, np.int64), *(np.arange(piece.first, piece.last) for piece in own)])

    @torch.no_grad()
    def run_seeds(
        self, compute: Callable[[Any], Tensor], settings: LoaderSettings, seeds: Ids, trees: Ids | None = None,
        times: Ids | None = None,
    ) -> Array:  # fmt: skip
        """Compute rows of seeds of the type ``settings.target`` on sampled neighbours, float32 [n, width]. Collective.

        ``compute``: returns the rows of a batch's seeds. ``seeds``: this rank's, global ids. ``trees``, ``times``: as
        for batches.
        """
        loader, size = _GivenSeeds(self.graph, settings, self.group.rank, self.layout), settings.global_batch
        rows = np.empty((0, 0), np.float32)
        for first in range(0, max(self.group.gather(len(seeds))), size):
            some = slice(first, first + size)
            given = [None if each is None else each[some] for each in (trees, times)]
            out = compute(loader.batch_of(seeds[some], *given).to(self.group.device))
            if not first:
                rows = self._file(f"sampled-{settings.target}", len(seeds), out.shape[1])
            rows[first : first + len(out)] = out.cpu().numpy()
        return rows

    @torch.no_grad()
    def run(self, stack: LayerStack) -> LayerResults:
        """Compute the last layer's output for every node of its target types. Collective."""
        before: LayerResults = {}
        for number, need in enumerate(stack.needs):
            before = {of: self._layer(stack, number, need, of, before) for of in need.targets}
        return before

    def _layer(self, stack: LayerStack, number: int, need: LayerNeed, of: NodeType, before: LayerResults) -> LayerRows:
        """Compute one layer for this rank's nodes of type ``of``. Collective.

        ``before``: output of the previous layer.
        """
        # Ranks with fewer chunks compute empty ones.
        chunks = list(self._chunks(of, need))
        rows, done = None, 0
        for place in range(max(self.group.gather(len(chunks)))):
            ids = chunks[place] if place < len(chunks) else np.empty(0, np.int64)
            hop = len(stack.needs) - 1 - number
            out = self._compute(stack, number, need, self._chunk(of, ids, need, hop), before)[of].cpu().numpy()
            if rows is None:
                rows = self._file(f"layer{number}-{of}", self.shares[of].owned(self.group.rank), out.shape[1])
            rows[done : done + len(out)] = out
            done += len(out)
        return LayerRows(self.shares[of], np.empty((0, 0), np.float32) if rows is None else rows)

    def _compute(
        self, stack: LayerStack, number: int, need: LayerNeed, chunk: _NodeChunk, before: LayerResults
    ) -> Mapping[NodeType, Tensor]:
        device = self.group.device
        if number == 0:
            rows = stack.begin(self._features(chunk).to(device))
        else:
            rows = {of: before[of].fetch(chunk.ids[of]).to(device) for of in need.sources}
        blocks = {of: block.to(device) for of, block in chunk.blocks.items()}
        degree: dict[NodeType, Tensor] = {}
        if stack.needs_degree:
            found = self.graph.access.gather([RowRequest(of, chunk.ids[of], (LOOPLESS_DEGREE,)) for of in need.sources])
            for of, columns in zip(need.sources, found, strict=True):
                degree[of] = torch.from_numpy(np.asarray(columns[LOOPLESS_DEGREE])).to(device)
        return stack.layer(number, blocks, rows, chunk.num_dst, degree)

    def _chunk(self, of: NodeType, ids: Ids, need: LayerNeed, hop: int) -> _NodeChunk:
        num_dst = {other: len(ids) if other == of else 0 for other in self.shares}
        if not need.edge_types:
            return _NodeChunk({of: ids}, {}, num_dst)
        specs = self.graph.manifest.edges
        weight = self.weight if any(self.weight in specs[of].attrs for of in need.edge_types) else None
        settings = SampleSettings(
            dict.fromkeys(need.edge_types, (self.top[hop] if self.top else -1,)), weight=weight,
            top=weight is not None and bool(self.top), time=self.latest, edge_ids=bool(self.edge_attr),
        )  # fmt: skip
        seeds = SeedSet({of: ids})
        if self.latest is not None:  # each node has a tree of its own, with neighbours of all times
            (rows,) = self.graph.access.gather([RowRequest(of, ids, ("orig_id",))])
            always = np.full(len(ids), np.iinfo(np.int64).max)
            seeds = SeedSet({of: ids}, {of: np.asarray(rows["orig_id"], np.int64)}, {of: always})
        found = sample_multi_hop(self.graph.access, self.graph.manifest, seeds, settings, 0, self._tables)
        every = edge_columns(self.graph.manifest, self.edge_attr)
        columns = {of: specs for of, specs in every.items() if of in need.edge_types}
        ids_of = {of: found.edges[of].edge for of in columns}
        wanted = [RowRequest(of, edges, tuple(columns[of])) for of, edges in ids_of.items() if edges is not None]
        answers = self.graph.access.gather(wanted)
        attrs = {of: edge_rows(rows, columns[of]) for of, rows in zip(columns, answers, strict=True)}
        blocks = {edge_type: block_of(found, edge_type, 0, attrs) for edge_type in need.edge_types}
        return _NodeChunk({other: found.nodes[other].ids for other in need.sources}, blocks, num_dst)

    def _features(self, chunk: _NodeChunk) -> HeteroBatch:
        specs = self.graph.manifest.nodes
        wanted = [
            RowRequest(of, ids, ("orig_id", *(["x"] if "x" in specs[of].attrs else []), *self.categories.get(of, ())))
            for of, ids in chunk.ids.items()
        ]
        found = dict(zip(chunk.ids, self.graph.access.gather(wanted), strict=True))
        (target,) = [of for of, count in chunk.num_dst.items() if count] or list(chunk.ids)[:1]
        return HeteroBatch(
            step=0, key=0, num_seeds=chunk.num_dst[target], global_seeds=0, target=target,
            n_id={of: torch.from_numpy(np.asarray(rows["orig_id"], np.int64)) for of, rows in found.items()},
            x={of: as_tensor(rows["x"], specs[of].attrs["x"]).float() for of, rows in found.items() if "x" in rows},
            y=None, input_id=torch.empty(0, dtype=torch.int64), blocks=(),
            num_nodes={of: (chunk.num_dst[of], len(ids)) for of, ids in chunk.ids.items()},
            categories=category_codes(self.categories, found),
        )  # fmt: skip

    def _chunks(self, of: NodeType, need: LayerNeed) -> Iterator[Ids]:
        ending = [edge_type for edge_type in need.edge_types if edge_type[2] == of]
        for piece in self.shares[of].own(self.group.rank):
            cost = 1 / self.nodes_at_once + self._degrees(piece, of, ending) / (self.nodes_at_once * _EDGES_PER_NODE)
            number = np.floor(np.cumsum(cost) - cost / 2).astype(np.int64)
            cuts = np.flatnonzero(np.diff(number)) + 1
            yield from np.split(np.arange(piece.first, piece.last), cuts)

    def _degrees(self, piece: NodeRange, of: NodeType, ending: list[EdgeType]) -> Ids:
        """Return the in-degree of each node of ``piece``, to limit the size of chunks.

        If this process has opened the part, counts only edges whose type is in ``ending``, else edges of all types.
        """
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
        if count * width == 0:
            return np.empty((count, width), np.float32)
        return np.lib.format.open_memmap(
            self.scratch / f"rank{self.group.rank}-{name}.npy", mode="w+", dtype=np.float32, shape=(count, width)
        )
