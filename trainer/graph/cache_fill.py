"""Fills the row cache of a host, and the cache of a device, with the rows that ``cache_policy`` chooses."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch import DeviceRows
from trainer.core.errors import PartitionError, SettingsError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.graph.cache_policy import (
    BatchPlan,
    CachedColumns,
    Prediction,
    RowCounts,
    budget_of,
    count_remote_rows,
    counted_steps,
    most_requested,
    predict,
    presample,
)
from trainer.graph.device import as_tensor
from trainer.graph.seed_order import OTHER_STREAM, STREAMS, RankLayout, SeedOrder, shares
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.settings import check_settings, row_spec
from trainer.sampler.subgraph_sampler import SubgraphSampler
from trainer.sampler.types import RowRequest, SampleSettings, SeedSet
from trainer.store.manifest import Manifest
from trainer.store.part_store import PartStore
from trainer.store.row_cache import CachedRows, RowCache

if TYPE_CHECKING:
    from trainer.service.remote_graph import Gateway

_FETCH_BYTES = 64 << 20  #: bytes of rows per request


class _OpenedGraph(Protocol):
    """The members of ``graph.open.Graph`` that this module uses."""

    @property
    def store(self) -> PartStore: ...
    @property
    def access(self) -> DistGraph | Gateway: ...
    @property
    def gateway(self) -> Gateway | None: ...
    @property
    def ranks(self) -> Ranks: ...
    @property
    def layout(self) -> RankLayout: ...
    @property
    def manifest(self) -> Manifest: ...


def fill_cache(
    access: object, store: PartStore, plan: BatchPlan, node: str, size: CacheSize, folder: Path, ranks: RankGroup
) -> Prediction | None:
    """Cache the rows of other hosts that this host's ranks request most. All ranks must call this.

    The first rank of each host samples some of its batches in advance, without gathering rows. It writes the rows that
    these batches request most to files in ``folder``. All ranks of the host memory-map the files. Then the files are
    unlinked.

    ``plan``: the batches. ``node``: identifies the host. ``ranks``: the group of all ranks.

    Returns None if all parts are on this host, and in clients. Raises ``TrainerError`` on all ranks if one of them
    fails.
    """
    places = ranks.gather((node, tuple(store.parts)))
    leader = places.index(places[ranks.rank])
    with _temporary_folders() as scratch:
        made = ranks.agree(
            lambda: _fill(access, store, plan, size, folder, scratch) if leader == ranks.rank else (None, None)
        )
        own = (asdict(made[0]) if made[0] else None, str(made[1]) if made[1] else None)
        values, path = ranks.gather(own)[leader]
        ranks.agree(lambda: _use(access, Path(path) if path else None))
    return Prediction(**values) if values else None


def cache_rows(
    graph: _OpenedGraph, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str, batch_size: int,
    size: str, node_type: NodeType | None, replace: bool, attrs: Mapping[NodeType, Sequence[str]] | None,
) -> Prediction | None:  # fmt: skip
    ranks = RankGroup.of_process(graph.ranks)
    plan, limit = ranks.agree(
        lambda: (_plan(graph, fanouts, split, batch_size, node_type, replace, attrs), CacheSize.parse(size))
    )
    if ranks.size != graph.layout.world_size:
        raise SettingsError(
            f"cache_rows: the graph is read by {graph.layout.world_size} ranks, but torch.distributed has"
            f" {ranks.size}; call torch.distributed.init_process_group before gnnfleet.open"
        )
    folder = Path(os.environ.get("GNNFLEET_RUN_DIR") or tempfile.gettempdir())
    node = f"{graph.ranks.node_rank} {graph.ranks.host}"
    return fill_cache(graph.access, graph.store, plan, node, limit, folder, ranks)


def _fill(
    access: object, store: PartStore, plan: BatchPlan, size: CacheSize, folder: Path, scratch: list[Path]
) -> tuple[Prediction | None, Path | None]:
    """Choose, fetch and save the rows to cache. Returns the predicted traffic and the path of the saved cache.

    The path is None if no rows are cached. Both are None if this process has no parts or all parts. The cache is saved
    in a new temporary folder, which is appended to ``scratch``.
    """
    if not isinstance(access, DistGraph) or not 0 < len(store.parts) < store.manifest.num_parts:
        return None, None
    columns, steps = CachedColumns.of(plan, store), presample(access, plan)
    budget, chosen = budget_of(size, store, columns.row_bytes), {}
    if budget:
        counts = count_remote_rows(access, counted_steps(steps, plan), columns)
        others = [part for part in range(store.manifest.num_parts) if part not in store.parts]
        chosen = most_requested(
            counts, columns.row_bytes, budget, lambda of: [store.books[of].range_of(part) for part in others]
        )
    cached: dict[NodeType, CachedRows] = {}
    for of, ids in chosen.items():
        if not len(ids):
            continue
        names = columns.names[of]
        specs = {name: row_spec(store, of, name) for name in names}
        rows = {name: np.empty((len(ids), *shape), dtype) for name, (dtype, shape) in specs.items()}
        step = max(1, _FETCH_BYTES // columns.row_bytes[of])
        for start in range(0, len(ids), step):
            (found,) = access.gather([RowRequest(of, ids[start : start + step], names)])
            for name in names:
                rows[name][start : start + step] = found[name]
        cached[of] = CachedRows.of(ids, rows, store.manifest.nodes[of].num_nodes)
    cache = RowCache(cached)
    prediction = predict(access, plan, steps, cache if cache.num_rows else None)
    access.take_cost()  # the cost is discarded, as it belongs to no batch
    if not cache.num_rows:
        return prediction, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch.append(Path(tempfile.mkdtemp(prefix="cache-", dir=folder)))
    except OSError as error:
        raise PartitionError(f"the row cache cannot be written to {folder}: {error.strerror}") from error
    path = scratch[0] / "rows"
    cache.save(path)
    return prediction, path


def _use(access: object, path: Path | None) -> None:
    if isinstance(access, DistGraph):
        access.use_cache(None if path is None else RowCache.open(path))


@contextmanager
def _temporary_folders() -> Iterator[list[Path]]:
    scratch: list[Path] = []
    try:
        yield scratch
    finally:
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(
    graph: _OpenedGraph, fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]], split: str, batch_size: int,
    node_type: NodeType | None, replace: bool, attrs: Mapping[NodeType, Sequence[str]] | None,
) -> BatchPlan:  # fmt: skip
    given = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(graph.manifest.edges, fanouts)
    hops = {of: tuple(values) for of, values in given.items()}
    check_settings(graph.manifest, SampleSettings(hops, replace=replace))
    if not node_type:
        types = sorted(of for of, name in graph.store.splits if name == split)
        if not types:
            known = sorted({name for _, name in graph.store.splits})
            raise SettingsError(f"cache_rows: no node type has a split {split!r}; the graph has {known}")
        if len(types) > 1:
            raise SettingsError(f"cache_rows: node_type must be one of {types}, each has a split {split!r}")
        (node_type,) = types
    nodes, target = graph.manifest.nodes, node_type
    # Random seed 0, because that of the loader is not known here.
    seeds, book = graph.store.seeds(target, split), graph.store.books[target]
    order = SeedOrder(len(seeds), batch_size * graph.layout.world_size, 0, stream=STREAMS.get(split, OTHER_STREAM))
    chosen = {of: tuple(spec.attrs) if attrs is None else tuple(attrs.get(of, ())) for of, spec in nodes.items()}
    of_edges = {of: tuple(graph.manifest.edges[of].attrs) for of in hops}
    gathered: dict[AnyType, tuple[str, ...]] = dict([*chosen.items(), *of_edges.items()])
    # With replicated topology, only multi-dimensional edge attributes come from other hosts.
    wide = any(len(spec.shape) > 1 for of in hops for spec in graph.manifest.edges[of].attrs.values())
    edge_ids = wide or not graph.store.whole_topology
    settings = SampleSettings(hops, replace=replace, edge_ids=edge_ids, ask_again=False)

    def requests(epoch: int) -> Iterator[list[RowRequest]]:
        assert isinstance(graph.access, DistGraph)
        sampler = SubgraphSampler(graph.access, graph.manifest, settings, gathered)
        for share in shares(order, lambda at: book.part_of(seeds[at]), graph.ranks.rank, graph.layout, epoch):
            yield sampler.requests(SeedSet({target: seeds[share.positions]}), share.key)

    return BatchPlan(order, {of: ("orig_id", *names) for of, names in chosen.items()}, requests)


_MOST_ROWS = 2**31 - 1  #: row numbers of cached rows are int32


def device_rows(
    graph: _OpenedGraph, plan: BatchPlan, size: CacheSize, device: torch.device
) -> dict[NodeType, DeviceRows]:
    """Copy the rows of ``x`` that this rank's batches request most to ``device``, as float32.

    ``size``: bytes, or a share of all rows of ``x`` in the graph. If it is 0, the result is {}. Raises
    ``SettingsError`` in a client, and ``ServiceError`` if a host does not answer.
    """
    budget, nodes = cache_bytes(graph, size), graph.manifest.nodes
    if not budget:
        return {}
    if graph.gateway:
        raise SettingsError("a client node cannot cache rows on its device: graph servers send it whole batches")
    requested: dict[NodeType, list[Ids]] = {}
    for request in (request for step in presample(graph.access, plan) for request in step.requests):
        if isinstance(request.of, str) and "x" in request.attrs:
            requested.setdefault(request.of, []).append(request.ids)
    counts = {of: RowCounts.of(ids) for of, ids in requested.items()}
    widths = {of: 4 * _row_width(graph, of) for of, spec in nodes.items() if "x" in spec.attrs}
    found = {}
    for of, chosen in most_requested(counts, widths, budget, lambda of: [(0, nodes[of].num_nodes)]).items():
        ids, spec = chosen[:_MOST_ROWS], nodes[of].attrs["x"]
        if not len(ids):
            continue
        rows = torch.empty((len(ids), *spec.shape[1:]), dtype=torch.float32, device=device)
        step = max(1, _FETCH_BYTES // max(1, rows[:1].nbytes))
        for start in range(0, len(ids), step):
            (gathered,) = graph.access.gather([RowRequest(of, ids[start : start + step], ("x",))])
            rows[start : start + step] = as_tensor(gathered["x"], spec).reshape(-1, *spec.shape[1:])
        found[of] = DeviceRows(CachedRows.of(ids, {}, nodes[of].num_nodes).slots, rows)
    graph.access.take_cost()  # the cost is discarded, as it belongs to no batch
    return found


def cache_bytes(graph: _OpenedGraph, size: CacheSize) -> int:
    """Return ``size`` in bytes, at most those of all rows of ``x`` as float32, to which percents refer."""
    nodes = graph.manifest.nodes
    every = sum(4 * _row_width(graph, of) * spec.num_nodes for of, spec in nodes.items() if "x" in spec.attrs)
    return round(size.share * every) if size.bytes is None else min(size.bytes, every)


def _row_width(graph: _OpenedGraph, of: NodeType) -> int:
    """Return the number of elements of a row of ``x``."""
    return int(np.prod(graph.manifest.nodes[of].attrs["x"].shape[1:]))
