"""GraphSAINT: a batch is the subgraph induced by nodes that were drawn, with coefficients that undo the bias.

Zeng et al., "GraphSAINT: Graph Sampling Based Inductive Learning Method", ICLR 2020.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.rng import batch_key
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.loader.arguments import AttrNames, OutputOptions, load_options, wanted_attrs, whole_number
from trainer.loader.in_memory import as_graph
from trainer.loader.induced import Ends, check_homogeneous, induced_settings
from trainer.loader.open import Graph
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import PyGLoader, Seeded
from trainer.loader.saint_draws import EdgeDraw, NodeDraw, visited_by_walks
from trainer.loader.saint_norm import saint_norm
from trainer.loader.seed_order import OTHER_STREAM, RankLayout, Share
from trainer.sampler.subgraph import SeedSet

_NORMS = ("node_norm", "edge_norm")


class GraphSAINTSampler(PyGLoader):
    """What the three samplers share, with torch_geometric's arguments, meaning, defaults and batches.

    Each rank gets ``num_steps`` subgraphs an epoch. The subgraph of a rank's step is number
    ``step * world_size + rank`` of the epoch and a function of (graph, seed, epoch, number): one rank with
    ``num_steps = W * n`` gets what W ranks with ``num_steps = n`` get together.

    Args:
        data: an opened graph (``trainer.open``), or ``Data`` or stores in memory; homogeneous.
        batch_size: samples per subgraph (nodes, edges or walks); repeats count once.
        num_steps: subgraphs per epoch and rank.
        sample_coverage: how often each node is sampled, on average, to estimate the normalisation; 0: none.
            Ranks of a process group share the work (all of them must make the loader); else each does all of it.
        save_dir: keep the normalisation here, and use what was kept for the same graph, settings and coverage.
        log: say what the normalisation took, on rank 0.
        transform, attrs, seed, threads, prefetch, deadline, rank, layout: as in ``DistNeighborLoader``;
            likewise kwargs of torch's ``DataLoader``, where shuffle has no effect.

    Batches hold the drawn nodes by id, once each, and all edges between them; with ``sample_coverage`` also
    ``node_norm`` and ``edge_norm`` (float32). Memory on every rank: the normalisation takes 4 bytes a node and an
    edge, 32 bytes an edge while it is computed or read. Raises ``SettingsError`` for arguments that make
    no sense, ``ServiceError`` when another host fails.
    """

    def __init__(
        self, data: Any, batch_size: int, num_steps: int = 1, sample_coverage: int = 0,
        save_dir: str | Path | None = None, log: bool = True, *, transform: Callable[[Any], Any] | None = None,
        attrs: AttrNames | None = None, seed: int | None = None, threads: int | None = None,
        prefetch: int | None = None, deadline: float = 120.0, rank: int | None = None,
        layout: RankLayout | None = None, **kwargs: Any,
    ):  # fmt: skip
        self.num_samples = whole_number("batch_size", batch_size, 1)
        self.num_steps = whole_number("num_steps", num_steps, 1)
        self.sample_coverage = whole_number("sample_coverage", sample_coverage, 0)
        options = load_options(kwargs, seed=seed, threads=threads, prefetch=prefetch, deadline=deadline)
        graph = as_graph(data)
        _check_graph(graph)
        world_size = 1 if options.local else (layout or graph.layout).world_size
        super().__init__(
            graph, self.num_steps * world_size, f"{self.draws} {self.sample_coverage}",
            induced_settings(graph.manifest), wanted_attrs(graph, attrs),
            replace(options, batch_size=1, shuffle=False, drop_last=False), OutputOptions("induced", transform),
            rank=rank, layout=RankLayout.everywhere(world_size, graph.manifest.num_parts),
        )  # fmt: skip
        ends = self.prepare()
        self._norm = None
        if self.sample_coverage:
            self._same.check()
            ends = ends or Ends.of(graph)
            self._norm = saint_norm(self, ends, self.sample_coverage, save_dir, log and self.rank == 0)

    @property
    def draws(self) -> str:
        """What is drawn, and how much: all that a subgraph depends on besides graph, seed, epoch and number."""
        return f"{type(self).__name__} {self.num_samples}"

    def prepare(self) -> Ends | None:
        """Get what ``draw_nodes`` needs; returns the edges if they had to be read."""
        return None

    @abstractmethod
    def draw_nodes(self, key: int) -> Ids:
        """Global ids of a subgraph's nodes, distinct, by original id: int64 [n]. Raises ``ServiceError``."""

    def shares(self, epoch: int) -> Iterator[Share]:
        for share in super().shares(epoch):
            yield replace(share, key=self.key(epoch, int(share.positions[0])))

    def key(self, epoch: int, number: int) -> int:
        """Of the draws of one subgraph."""
        return batch_key(self.options.seed, OTHER_STREAM, epoch, number)

    def part_of(self, positions: Ids) -> Ids:
        """Any: a subgraph lives nowhere in particular."""
        return positions * 0

    def seeds(self, share: Share) -> Seeded:
        return Seeded(SeedSet({HOMO_NODE: self.draw_nodes(share.key)}), None)

    def annotate(self, data: Any, out: Output) -> None:
        if self._norm is not None:
            data.node_norm, data.edge_norm = self._norm.node[out.node], self._norm.edge[out.edge]

    def __call__(self, index: Any) -> Any:
        raise SettingsError(f"{type(self).__name__} draws its nodes itself, there are no inputs to choose; iterate it")


class DistGraphSAINTNodeSampler(GraphSAINTSampler):
    """torch_geometric's ``GraphSAINTNodeSampler``: the sources of ``batch_size`` edges drawn with replacement.

    Nodes are drawn by out-degree: each rank reads all edges once, and keeps 8 bytes a node. The arguments
    are those of ``GraphSAINTSampler``.
    """

    def prepare(self) -> Ends:
        self._check_edges()
        ends = Ends.of(self.graph)
        self._nodes = NodeDraw.of(ends, self.graph.manifest.nodes[HOMO_NODE].num_nodes)
        return ends

    def draw_nodes(self, key: int) -> Ids:
        return self.graph.store.to_global(HOMO_NODE, self._nodes(key, self.num_samples))

    def _check_edges(self) -> None:
        if self.graph.manifest.edges[HOMO_EDGE].num_edges == 0:
            raise SettingsError(
                f"{type(self).__name__} draws edges, but the graph has none; use DistGraphSAINTRandomWalkSampler"
            )


class DistGraphSAINTEdgeSampler(DistGraphSAINTNodeSampler):
    """torch_geometric's ``GraphSAINTEdgeSampler``: both ends of ``batch_size`` edges drawn with replacement.

    As there, an edge's chance goes with the in-degree of its source plus the out-degree of its target. Each rank reads
    all edges once, and keeps 16 bytes an edge (24 beyond 2^31 nodes). The arguments are those of ``GraphSAINTSampler``.
    """

    def prepare(self) -> Ends:
        self._check_edges()
        ends = Ends.of(self.graph)
        self._edges = EdgeDraw.of(ends, self.graph.manifest.nodes[HOMO_NODE].num_nodes)
        return ends

    def draw_nodes(self, key: int) -> Ids:
        return self.graph.store.to_global(HOMO_NODE, self._edges(key, self.num_samples))


class DistGraphSAINTRandomWalkSampler(GraphSAINTSampler):
    """torch_geometric's ``GraphSAINTRandomWalkSampler``: all nodes on ``batch_size`` walks of ``walk_length`` steps.

    Walks start at nodes drawn with replacement and go from an edge's *target* to its source, since in-edges are what a
    part holds; torch_geometric's go from source to target. On graphs with every edge in both directions, GraphSAINT's
    case, that is the same; for others store the edges reversed. A walk stays where it cannot go on.
    The arguments are those of ``GraphSAINTSampler``, and ``walk_length``.
    """

    def __init__(self, data: Any, batch_size: int, walk_length: int, num_steps: int = 1, sample_coverage: int = 0,
                 save_dir: str | Path | None = None, log: bool = True, **kwargs: Any):  # fmt: skip
        self.walk_length = whole_number("walk_length", walk_length, 0)
        super().__init__(data, batch_size, num_steps, sample_coverage, save_dir, log, **kwargs)

    @property
    def draws(self) -> str:
        return f"{super().draws} {self.walk_length}"

    @property
    def num_requests(self) -> int:
        return super().num_requests + self.walk_length + 1

    def draw_nodes(self, key: int) -> Ids:
        return visited_by_walks(self.graph, key, self.num_samples, self.walk_length)


def _check_graph(graph: Graph) -> None:
    check_homogeneous(graph, "GraphSAINT")
    spec, edges = graph.manifest.nodes[HOMO_NODE], graph.manifest.edges[HOMO_EDGE]
    if spec.num_nodes == 0:
        raise SettingsError("GraphSAINT: the graph has no nodes to draw")
    if taken := [name for name in _NORMS if name in spec.attrs or name in edges.attrs]:
        raise SettingsError(f"GraphSAINT sets {taken[0]!r} in every batch, but the graph has that attribute; rename it")
