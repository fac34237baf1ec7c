"""GraphSAINT: a batch is the subgraph induced by nodes that were drawn, with coefficients that undo the bias.

Zeng et al., "GraphSAINT: Graph Sampling Based Inductive Learning Method", ICLR 2020.
"""

from __future__ import annotations

import hashlib
import io
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.files import write_whole
from trainer.core.ranks import RankGroup
from trainer.core.rng import GOLDEN, batch_key, fractions, hashed
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, edge_salt
from trainer.graph.in_memory import as_graph
from trainer.graph.open import Graph
from trainer.graph.prefetch import ordered_ahead
from trainer.graph.seed_order import OTHER_STREAM, RankLayout, SeedShare
from trainer.loader.arguments import AttrNames, OutputOptions, load_options, wanted_attrs, whole_number
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.loader.subgraph_loaders import EdgeEnds, check_homogeneous, induced_settings
from trainer.sampler.types import HopRequest, RowRequest, SeedSet


@dataclass(frozen=True)
class SaintNodeDraw:
    """Draws nodes by out-degree, with replacement."""

    running: Ids  #: int64 [N] out-edges of all nodes up to this one

    @classmethod
    def of(cls, ends: EdgeEnds, num_nodes: int) -> SaintNodeDraw:
        return cls(np.cumsum(np.bincount(ends.src, minlength=num_nodes)))

    def __call__(self, key: int, count: int) -> Ids:
        """The distinct nodes among ``count`` draws, ascending original ids."""
        return np.unique(np.searchsorted(self.running, uniform(key, count, int(self.running[-1])), "right"))


@dataclass(frozen=True)
class SaintEdgeDraw:
    """Draws edges with replacement, by in-degree of the source plus out-degree of the target."""

    ends: EdgeEnds
    running: Ids  #: int64 [E] weights of all edges up to this one

    @classmethod
    def of(cls, ends: EdgeEnds, num_nodes: int) -> SaintEdgeDraw:
        in_degree, out_degree = (np.bincount(side, minlength=num_nodes) for side in (ends.dst, ends.src))
        weights = in_degree[ends.src] + out_degree[ends.dst]
        return cls(ends, np.cumsum(weights if weights.any() else np.ones_like(weights)))

    def __call__(self, key: int, count: int) -> Ids:
        """The distinct ends of ``count`` draws, ascending original ids."""
        edges = self.edges(key, count)
        return np.unique(np.concatenate([self.ends.src[edges], self.ends.dst[edges]])).astype(np.int64)

    def edges(self, key: int, count: int) -> Ids:
        """Original ids of the edges drawn: int64 [count]."""
        return np.searchsorted(self.running, uniform(key, count, int(self.running[-1])), "right")


def visited_by_walks(graph: Graph, key: int, num_walks: int, walk_length: int) -> Ids:
    """Global ids of all nodes on the walks, start included: int64, distinct, by original id.

    Raises ``ServiceError``. A step goes from a node to the source of one of its in-edges; it is one request to
    each owner.
    """
    num_nodes = graph.manifest.nodes[HOMO_NODE].num_nodes
    at = graph.store.to_global(HOMO_NODE, uniform(key, num_walks, num_nodes))
    visited = [at]
    for step in range(walk_length):
        places = np.arange(step * num_walks, (step + 1) * num_walks)  # each step of each walk draws anew
        request = HopRequest(HOMO_EDGE, at, 1, 0, key ^ edge_salt(HOMO_EDGE), trees=places)
        (sample,) = graph.access.sample_hops([request])
        at = at.copy()
        at[sample.counts > 0] = sample.src
        visited.append(at)
    distinct = np.unique(np.concatenate(visited))
    (rows,) = graph.access.gather([RowRequest(HOMO_NODE, distinct, ("orig_id",))])
    return distinct[np.argsort(rows["orig_id"])]


def uniform(key: int, count: int, bound: int) -> Ids:
    """Numbers in [0, bound): int64 [count]."""
    draws = fractions(hashed(np.arange(count, dtype=np.uint64) * GOLDEN + np.uint64(key)))
    return np.minimum((draws * bound).astype(np.int64), bound - 1)  # rounded up, where bound is huge


_NORM_EPOCH = -1  #: the "epoch" of the subgraphs that statistics are made from

_FORMAT = "gnnfleet-saint-norm 1"


@dataclass(frozen=True)
class SaintNorm:
    """Coefficients by original id."""

    node: Tensor  #: float32 [N] weight of a node's loss
    edge: Tensor  #: float32 [E] weight of an edge's message


def saint_norm(
    loader: GraphSAINTSampler, ends: EdgeEnds, coverage: int, save_dir: str | Path | None, log: bool, group: RankGroup
) -> SaintNorm:  # fmt: skip
    """The normalisation of a loader's subgraphs; from ``save_dir`` if it was made for the same.

    Numbers and formulas are torch_geometric's. A collective call of ``group``, which shares the work. Raises
    ``ServiceError``, and ``SettingsError`` for a file or folder that cannot be read or written; on the other ranks
    ``PeerError``.
    """
    key, path, kept = group.agree(lambda: _kept(loader, ends, coverage, save_dir))
    if all(group.gather(kept is not None)):
        assert kept is not None
        return kept
    norm, num_subgraphs = _estimated(loader, ends, coverage, group)
    group.agree(lambda: None if path is None else _write(path, key, norm))
    if log:
        print(f"GraphSAINT normalisation: {num_subgraphs} subgraphs, {coverage} samples a node", file=sys.stderr)
    return norm


def _estimated(loader: GraphSAINTSampler, ends: EdgeEnds, coverage: int, group: RankGroup) -> tuple[SaintNorm, int]:
    """Subgraphs are drawn in rounds of one epoch's over all ranks, until they have enough nodes."""
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    nodes, edges = torch.zeros(num_nodes, dtype=torch.int32), torch.zeros(len(ends.src), dtype=torch.int32)
    sampler = loader.graph.sampler(loader.settings, {})

    def found(number: int) -> tuple[Ids, Ids]:
        key = loader.key(_NORM_EPOCH, number)
        rows = sampler.sample(SeedSet({HOMO_NODE: loader.draw_nodes(key)}), key).rows
        return rows[HOMO_NODE]["orig_id"], rows[HOMO_EDGE]["orig_id"]

    o, graph, num_subgraphs, total = loader.options, loader.graph, 0, 0
    work = ordered_ahead(
        found, count(group.rank, group.size), threads=graph.threads(o.threads, o.prefetch), ahead=o.prefetch,
        deadline=graph.patience(o.deadline, loader.num_requests),
    )  # fmt: skip

    def sample_round() -> int:
        own = 0
        for _ in range(len(loader) * loader.layout.world_size // group.size):
            node_ids, edge_ids = next(work)
            nodes.numpy()[node_ids] += 1
            edges.numpy()[edge_ids] += 1
            own += len(node_ids)
        return own

    while total < num_nodes * coverage:
        total += sum(group.gather(group.agree(sample_round)))
        num_subgraphs += len(loader) * loader.layout.world_size
    return _norm_of(group.sum(nodes), group.sum(edges), ends, num_subgraphs), num_subgraphs


def _norm_of(nodes: Tensor, edges: Tensor, ends: EdgeEnds, num_subgraphs: int) -> SaintNorm:
    """From how many of the subgraphs each node and edge was in."""
    node, edge = nodes.float(), edges.float()
    ratio = (node[torch.from_numpy(ends.src)] / edge).clamp(0, 1e4)
    ratio[ratio.isnan()] = 0.1
    node[node == 0] = 0.1
    return SaintNorm(num_subgraphs / node / len(node), ratio)


def _kept(
    loader: GraphSAINTSampler, ends: EdgeEnds, coverage: int, save_dir: str | Path | None
) -> tuple[str, Path | None, SaintNorm | None]:
    """What the normalisation is made for, its file, and what that holds."""
    key = _identity(loader, ends, coverage)
    path = None if save_dir is None else Path(save_dir) / f"{type(loader).__name__.lower()}_{coverage}_{key[:16]}.pt"
    return key, path, None if path is None else _read(path, key)


def _identity(loader: GraphSAINTSampler, ends: EdgeEnds, coverage: int) -> str:
    """Equal for equal graphs, settings and coverage: hex."""
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    digest = hashlib.sha256(
        f"{loader.draws} {loader.options.seed} {loader.order.num_seeds} {coverage} {num_nodes}".encode()
    )
    digest.update(ends.src.data)
    digest.update(ends.dst.data)
    return digest.hexdigest()


def _read(path: Path, key: str) -> SaintNorm | None:
    if not path.exists():
        return None
    try:
        kept = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    except Exception as error:  # torch.load raises whatever its zip reader or unpickler meets
        raise SettingsError(f"save_dir: {path} cannot be read ({type(error).__name__}); delete it") from error
    if not isinstance(kept, dict) or kept.get("format") != _FORMAT or kept.get("made_for") != key:
        raise SettingsError(f"save_dir: {path} is not the normalisation its name says; delete it")
    return SaintNorm(kept["node_norm"], kept["edge_norm"])


def _write(path: Path, key: str, norm: SaintNorm) -> None:
    """Other ranks may write the same."""
    kept = {"format": _FORMAT, "made_for": key, "node_norm": norm.node, "edge_norm": norm.edge}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: torch.save(kept, file))
    except OSError as error:
        raise SettingsError(f"save_dir: {path} cannot be written: {error.strerror or error}") from error


_NORMS = ("node_norm", "edge_norm")


class GraphSAINTSampler(PyGLoader):
    """What the three samplers share, with torch_geometric's arguments, meaning, defaults and batches.

    Each rank gets ``num_steps`` subgraphs an epoch. The subgraph of a rank's step is number
    ``step * world_size + rank`` of the epoch and a function of (graph, seed, epoch, number): one rank with
    ``num_steps = W * n`` gets what W ranks with ``num_steps = n`` get together.

    Args:
        data: an opened graph (``gnnfleet.open``), or ``Data`` or stores in memory; homogeneous.
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
        self._norm = None
        if self.sample_coverage:
            group = self.group()
            ends = group.agree(self._checked_ends)
            self._norm = saint_norm(self, ends, self.sample_coverage, save_dir, log and self.rank == 0, group)
        else:
            self.prepare()

    def _checked_ends(self) -> EdgeEnds:
        self._same.check()
        return self.prepare() or EdgeEnds.of(self.graph)

    @property
    def draws(self) -> str:
        """What is drawn, and how much: all that a subgraph depends on besides graph, seed, epoch and number."""
        return f"{type(self).__name__} {self.num_samples}"

    def prepare(self) -> EdgeEnds | None:
        """Get what ``draw_nodes`` needs; returns the edges if they had to be read."""
        return None

    @abstractmethod
    def draw_nodes(self, key: int) -> Ids:
        """Global ids of a subgraph's nodes, distinct, by original id: int64 [n]. Raises ``ServiceError``."""

    def shares(self, epoch: int) -> Iterator[SeedShare]:
        for share in super().shares(epoch):
            yield replace(share, key=self.key(epoch, int(share.positions[0])))

    def key(self, epoch: int, number: int) -> int:
        """Of the draws of one subgraph."""
        return batch_key(self.options.seed, OTHER_STREAM, epoch, number)

    def part_of(self, positions: Ids) -> Ids:
        """Any: a subgraph lives nowhere in particular."""
        return positions * 0

    def seeds(self, share: SeedShare) -> BatchSeeds:
        return BatchSeeds(SeedSet({HOMO_NODE: self.draw_nodes(share.key)}), None)

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

    def prepare(self) -> EdgeEnds:
        self._check_edges()
        ends = EdgeEnds.of(self.graph)
        self._nodes = SaintNodeDraw.of(ends, self.graph.manifest.nodes[HOMO_NODE].num_nodes)
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

    def prepare(self) -> EdgeEnds:
        self._check_edges()
        ends = EdgeEnds.of(self.graph)
        self._edges = SaintEdgeDraw.of(ends, self.graph.manifest.nodes[HOMO_NODE].num_nodes)
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
