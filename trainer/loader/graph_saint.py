"""GraphSAINT: batches are subgraphs induced by randomly drawn nodes, with coefficients that correct the sampling bias.

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
from trainer.core.rng import batch_key
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.in_memory import as_graph
from trainer.graph.prefetch import ordered_ahead
from trainer.graph.seed_order import OTHER_STREAM, RankLayout, SeedShare
from trainer.loader.arguments import (
    AttrNames,
    OutputOptions,
    check_homogeneous,
    induced_settings,
    load_options,
    wanted_attrs,
    whole_number,
)
from trainer.loader.edge_endpoints import EdgeEndpoints, StoredEndpoints, edges_in_order
from trainer.loader.pyg_batch import Output
from trainer.loader.pyg_loader import BatchSeeds, PyGLoader
from trainer.loader.saint_draws import SaintEdgeDraw, SaintNodeDraw, visited_by_walks
from trainer.sampler.types import SeedSet

_NORM_EPOCH = -1  #: epoch number in the random keys of the subgraphs from which the normalisation is estimated

_FORMAT = "gnnfleet-saint-norm 1"


@dataclass(frozen=True)
class _SaintNorm:
    """GraphSAINT's normalisation coefficients of nodes and edges, indexed by original id."""

    node: Tensor  #: float32 [N] weight of each node's loss
    edge: Tensor  #: float32 [E] weight of each edge's message


def _saint_norm(
    loader: GraphSAINTSampler, ends: EdgeEndpoints, coverage: int, save_dir: str | Path | None, log: bool,
    group: RankGroup,
) -> _SaintNorm:  # fmt: skip
    """Return the normalisation coefficients for a loader's subgraphs. Reads them from ``save_dir`` if they are there.

    All ranks of ``group`` must call this function; they share the work.

    Raises:
        ServiceError: Another host fails.
        SettingsError: The file or folder cannot be read or written.
        PeerError: Another rank has raised one of these errors.
    """
    key, path, saved = group.agree(lambda: _saved(loader, ends, coverage, save_dir))
    if all(group.gather(saved is not None)):
        assert saved is not None
        return saved
    norm, num_subgraphs = _estimate(loader, ends, coverage, group)
    group.agree(lambda: None if path is None else _write(path, key, norm))
    if log:
        print(f"GraphSAINT normalisation: {num_subgraphs} subgraphs, {coverage} samples a node", file=sys.stderr)
    return norm


def _estimate(
    loader: GraphSAINTSampler, ends: EdgeEndpoints, coverage: int, group: RankGroup
) -> tuple[_SaintNorm, int]:
    """Estimate the normalisation coefficients from sampled subgraphs. Returns them and the number of subgraphs.

    Samples until the subgraphs contain each node of the graph ``coverage`` times on average.
    """
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    nodes, edges = torch.zeros(num_nodes, dtype=torch.int32), torch.zeros(len(ends), dtype=torch.int32)
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
    nodes, edges = group.sum(nodes), group.sum(edges)
    return group.agree(lambda: _norm_of(nodes, edges, ends, num_subgraphs)), num_subgraphs


def _norm_of(nodes: Tensor, edges: Tensor, ends: EdgeEndpoints, num_subgraphs: int) -> _SaintNorm:
    node, ratio = nodes.float(), edges.float()
    for first, src, _ in edges_in_order(ends):
        some = ratio[first : first + len(src)]
        some.copy_((node[torch.from_numpy(src)] / some).clamp(0, 1e4))
    ratio[ratio.isnan()] = 0.1
    node[node == 0] = 0.1
    return _SaintNorm(num_subgraphs / node / len(node), ratio)


def _saved(
    loader: GraphSAINTSampler, ends: EdgeEndpoints, coverage: int, save_dir: str | Path | None
) -> tuple[str, Path | None, _SaintNorm | None]:
    if save_dir is None:
        return "", None, None
    num_nodes = loader.graph.manifest.nodes[HOMO_NODE].num_nodes
    digest = hashlib.sha256(
        f"{loader.draws} {loader.options.seed} {loader.order.num_seeds} {coverage} {num_nodes}".encode()
    )
    dtype = np.int32 if num_nodes < 2**31 else np.int64
    for side in (1, 2):  # all sources, then all targets
        for chunk in edges_in_order(ends):
            digest.update(np.ascontiguousarray(chunk[side], dtype).data)
    key = digest.hexdigest()
    path = Path(save_dir) / f"{type(loader).__name__.lower()}_{coverage}_{key[:16]}.pt"
    if not path.exists():
        return key, path, None
    try:
        saved = torch.load(io.BytesIO(path.read_bytes()), weights_only=True)
    except Exception as error:  # torch.load raises any error of its zip reader and unpickler
        raise SettingsError(f"save_dir: {path} cannot be read ({type(error).__name__}); delete it") from error
    if not isinstance(saved, dict) or saved.get("format") != _FORMAT or saved.get("made_for") != key:
        raise SettingsError(f"save_dir: {path} is not a normalisation for this graph and these settings; delete it")
    return key, path, _SaintNorm(saved["node_norm"], saved["edge_norm"])


def _write(path: Path, key: str, norm: _SaintNorm) -> None:
    saved = {"format": _FORMAT, "made_for": key, "node_norm": norm.node, "edge_norm": norm.edge}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: torch.save(saved, file))
    except OSError as error:
        raise SettingsError(f"save_dir: {path} cannot be written: {error.strerror or error}") from error


_NORMS = ("node_norm", "edge_norm")


class GraphSAINTSampler(PyGLoader):
    """Base class of the three GraphSAINT samplers.

    Each rank gets ``num_steps`` subgraphs per epoch. Subgraph number ``step * world_size + rank`` of an epoch depends
    only on the graph, the seed, the epoch and this number.
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
        check_homogeneous(graph, "GraphSAINT")
        spec, edges = graph.manifest.nodes[HOMO_NODE], graph.manifest.edges[HOMO_EDGE]
        if spec.num_nodes == 0:
            raise SettingsError("GraphSAINT: the graph has no nodes to draw")
        if taken := [name for name in _NORMS if name in spec.attrs or name in edges.attrs]:
            raise SettingsError(
                f"GraphSAINT sets {taken[0]!r} in every batch, but the graph has that attribute; rename it"
            )
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
            self._norm = _saint_norm(self, ends, self.sample_coverage, save_dir, log and self.rank == 0, group)
        else:
            self.prepare()

    def _checked_ends(self) -> EdgeEndpoints:
        self._same.check()
        return self.prepare() or StoredEndpoints(self.graph, HOMO_EDGE)

    @property
    def draws(self) -> str:
        """Return the class name and the number of draws as text.

        A subgraph is determined by the graph, the seed, the epoch, the subgraph's number and this text.
        """
        return f"{type(self).__name__} {self.num_samples}"

    def prepare(self) -> EdgeEndpoints | None:
        """Prepare the data for ``draw_nodes``. Called when the loader is made.

        Returns the ends of all edges if it uses them, else None.
        """
        return None

    @abstractmethod
    def draw_nodes(self, key: int) -> Ids:
        """Draw the nodes of a subgraph: distinct global ids in the order of original ids, int64 [n].

        Raises ``ServiceError``.
        """

    def shares(self, epoch: int, first_step: int = 0) -> Iterator[SeedShare]:
        for share in super().shares(epoch, first_step):
            yield replace(share, key=self.key(epoch, int(share.positions[0])))

    def key(self, epoch: int, number: int) -> int:
        return batch_key(self.options.seed, OTHER_STREAM, epoch, number)

    def part_of(self, positions: Ids) -> Ids:
        return positions * 0

    def seeds(self, share: SeedShare) -> BatchSeeds:
        return BatchSeeds(SeedSet({HOMO_NODE: self.draw_nodes(share.key)}), None)

    def annotate(self, data: Any, out: Output) -> None:
        if self._norm is not None:
            data.node_norm, data.edge_norm = self._norm.node[out.node], self._norm.edge[out.edge]

    def __call__(self, index: Any) -> Any:
        raise SettingsError(f"{type(self).__name__} draws its own nodes and has no inputs to index; iterate it")


class DistGraphSAINTNodeSampler(GraphSAINTSampler):
    """Yield subgraphs induced by nodes drawn by out-degree, as torch_geometric's ``GraphSAINTNodeSampler``.

    A batch has the sources of ``batch_size`` edges that are drawn with replacement, and all edges between these nodes.
    Each node is in the batch once, and nodes are sorted by id. Memory: 8 bytes per node (16 while edges are read), and
    for the normalisation 4 bytes per node and edge (16 while it is computed).

    Args:
        data: An opened homogeneous graph (``gnnfleet.open``), or ``Data`` or stores in memory.
        batch_size: Number of nodes drawn per subgraph; repeats count once.
        num_steps: Number of subgraphs per epoch and rank.
        sample_coverage: How often each node is sampled on average to estimate the normalisation. With 0, batches have
            no normalisation. The ranks of a process group share the work, and all of them must make the loader.
        save_dir: Folder to save the normalisation in; a file for the same graph, settings and coverage is read instead.
        log: Print on rank 0 how many subgraphs were sampled to estimate the normalisation.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``: as in ``DistNeighborLoader``; ``shuffle`` and ``drop_last`` have
            no effect. ``local=True`` makes a loader of this process alone: it yields all subgraphs, and other ranks
            need not iterate it.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids, distinct; ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``; ``e_id``: int64 ``[edges]``
        - ``node_norm``: float32 ``[nodes]``, ``edge_norm``: float32 ``[edges]``, with ``sample_coverage``

    Raises:
        SettingsError: Arguments do not fit the graph, or the graph is heterogeneous.
        ServiceError: Another host fails, while making the loader or iterating it.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistGraphSAINTNodeSampler(graph, batch_size=500, num_steps=10, sample_coverage=5)
        for batch in loader:
            x, edge_index = batch.x, batch.edge_index
        ```
    """

    def prepare(self) -> EdgeEndpoints:
        self._check_edges()
        ends = StoredEndpoints(self.graph, HOMO_EDGE)
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
    """Yield subgraphs induced by the ends of drawn edges, as torch_geometric's ``GraphSAINTEdgeSampler``.

    A batch has both ends of ``batch_size`` edges that are drawn with replacement, and all edges between these nodes.
    Each node is in the batch once, and nodes are sorted by id. The chance of an edge is proportional to the in-degree
    of its source plus the out-degree of its target, as in torch_geometric. Memory: 8 bytes per node (16 from 2^31 edges
    on), 8 bytes per edge up to 256 MiB, and for the normalisation 4 bytes per node and edge (16 while it is computed).

    Args:
        data: An opened homogeneous graph (``gnnfleet.open``), or ``Data`` or stores in memory.
        batch_size: Number of draws per subgraph. An edge may be drawn more than once.
        num_steps: Number of subgraphs per epoch and rank.
        sample_coverage: How often each node is sampled on average to estimate the normalisation. With 0, batches have
            no normalisation. The ranks of a process group share the work, and all of them must make the loader.
        save_dir: Folder to save the normalisation in; a file for the same graph, settings and coverage is read instead.
        log: Print on rank 0 how many subgraphs were sampled to estimate the normalisation.
        transform: Function called with each batch; its result is yielded instead.
        attrs: Names of the attributes that batches have, or a mapping of types to names. Default: all.
        seed: Random seed of the order and of all draws; the same on every rank. Default: 0.
        threads: Number of sampler threads. Default: ``num_workers``, at least 1.
        prefetch: Number of batches to make ahead. Default: ``prefetch_factor`` (3) per thread.
        deadline: Seconds that one request to another host may take.
        rank: Rank of this process in ``layout``. Default: the rank of the process group.
        layout: For each part, the ranks on hosts that store it. Default: taken from the cluster file and the process
            group.
        **kwargs: Arguments of torch's ``DataLoader``: as in ``DistNeighborLoader``; ``shuffle`` and ``drop_last`` have
            no effect. ``local=True`` makes a loader of this process alone: it yields all subgraphs, and other ranks
            need not iterate it.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids, distinct; ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``; ``e_id``: int64 ``[edges]``
        - ``node_norm``: float32 ``[nodes]``, ``edge_norm``: float32 ``[edges]``, with ``sample_coverage``

    Raises:
        SettingsError: Arguments do not fit the graph, or the graph is heterogeneous.
        ServiceError: Another host fails, while making the loader or iterating it.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistGraphSAINTEdgeSampler(graph, batch_size=500, num_steps=10)
        for batch in loader:
            x, edge_index = batch.x, batch.edge_index
        ```
    """

    def prepare(self) -> EdgeEndpoints:
        self._check_edges()
        ends = StoredEndpoints(self.graph, HOMO_EDGE)
        self._edges = SaintEdgeDraw.of(ends, self.graph.manifest.nodes[HOMO_NODE].num_nodes)
        return ends

    def draw_nodes(self, key: int) -> Ids:
        return self.graph.store.to_global(HOMO_NODE, self._edges(key, self.num_samples))


class DistGraphSAINTRandomWalkSampler(GraphSAINTSampler):
    """Yield subgraphs induced by random walks, as torch_geometric's ``GraphSAINTRandomWalkSampler``.

    A batch has all nodes on ``batch_size`` walks of ``walk_length`` steps, and all edges between these nodes. Each node
    is in the batch once, and nodes are sorted by id. Walks start at nodes drawn with replacement, and end early at a
    node without in-edges. They go from the *target* of an edge to its source; torch_geometric's walks go from source to
    target. If edges do not exist in both directions, reverse the edges of the graph to get torch_geometric's walks. The
    normalisation takes 4 bytes per node and edge (16 while it is computed).

    Args:
        data: An opened homogeneous graph (``gnnfleet.open``), or ``Data`` or stores in memory.
        batch_size: Number of walks per subgraph.
        walk_length: Number of steps of each walk.
        num_steps: Number of subgraphs per epoch and rank.
        sample_coverage: How often each node is sampled on average to estimate the normalisation. With 0, batches have
            no normalisation. The ranks of a process group share the work, and all of them must make the loader.
        save_dir: Folder to save the normalisation in; a file for the same graph, settings and coverage is read instead.
        log: Print on rank 0 how many subgraphs were sampled to estimate the normalisation.
        **kwargs: ``transform``, ``attrs``, ``seed``, ``threads``, ``prefetch``, ``deadline``, ``rank``, ``layout`` and
            arguments of torch's ``DataLoader``, as in ``DistGraphSAINTNodeSampler``.

    Shapes:
        - ``n_id``: int64 ``[nodes]``, original ids, distinct; ``x``, ``y`` and other node attributes: ``[nodes, ...]``
        - ``edge_index``: int64 ``[2, edges]``; ``e_id``: int64 ``[edges]``
        - ``node_norm``: float32 ``[nodes]``, ``edge_norm``: float32 ``[edges]``, with ``sample_coverage``

    Raises:
        SettingsError: Arguments do not fit the graph, or the graph is heterogeneous.
        ServiceError: Another host fails, while making the loader or iterating it.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistGraphSAINTRandomWalkSampler(graph, batch_size=100, walk_length=2, num_steps=10)
        for batch in loader:
            x, edge_index = batch.x, batch.edge_index
        ```
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
