"""Measures sampling and gathering of rows on one machine: gnnfleet's kernels, plain numpy and torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch

from graphs import BATCH, CACHE, FANOUTS, partitioned
from table import Row, median_seconds
from trainer.core import slabs
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import sample_multi_hop
from trainer.sampler.relabel import DirectTable, HashTable, PositionTable, RelabelTables
from trainer.sampler.types import RowRequest, SampledSubgraph, SampleSettings, SeedSet, TimeRule
from trainer.store.manifest import AttrSpec
from trainer.store.part_store import PartStore

Work = Callable[[SeedShare], SampledSubgraph]


def run(small: bool) -> list[Row]:
    with open_graph(partitioned(small, 1)) as graph:
        shares = shares_of(graph, HOMO_NODE)
        return [
            *sampling(graph, shares), *positions(graph, shares, small), *steered(graph, shares), *hetero(small),
            *gathering(graph, shares), *epoch(graph),
        ]  # fmt: skip


def shares_of(graph: Graph, target: NodeType) -> list[SeedShare]:
    settings = LoaderSettings("train", FANOUTS, BATCH, target=target)
    return list(islice(BatchLoader(graph, settings, 0, RankLayout.single(1)).shares(0), 8))


def sampler(store: PartStore, target: NodeType, fanouts: dict[EdgeType, tuple[int, ...]], **kind: Any) -> Work:
    """Return a function that samples the neighbourhoods of seeds in the calling thread.

    kind: further fields of ``SampleSettings``. With ``time``, all seeds have time 500.
    """
    graph, tables, split = LocalGraph(store), RelabelTables(store.manifest), store.seeds(target, "train")
    settings = SampleSettings(fanouts, **kind)

    def sample(share: SeedShare) -> SampledSubgraph:
        seeds, times = split[share.positions], np.full(len(share.positions), 500)
        chosen = SeedSet({target: seeds}, {target: share.places}, {target: times} if settings.time else {})
        return sample_multi_hop(graph, store.manifest, chosen, settings, share.key, tables)

    return sample


def speed(work: Work, shares: list[SeedShare]) -> float:
    """Return the sampling speed in millions of edges per second."""
    edges = sum(len(found.src) for share in shares for found in work(share).edges.values())
    return edges / 1e6 / median_seconds(lambda: [work(share) for share in shares])


def sampling(graph: Graph, shares: list[SeedShare]) -> list[Row]:
    fanouts = {HOMO_EDGE: FANOUTS}
    works = [sampler(graph.store, HOMO_NODE, fanouts) for _ in range(2)]
    million = sum(len(works[0](share).edges[HOMO_EDGE].src) for share in shares) / 1e6
    ours = median_seconds(lambda: [works[0](share) for share in shares])
    split = graph.store.seeds(HOMO_NODE, "train")
    theirs = median_seconds(lambda: [numpy_sample(graph, split[share.positions]) for share in shares], repeats=3)

    def half(which: int) -> None:
        for share in shares[which::2]:
            works[which](share)

    with ThreadPoolExecutor(2) as pool:
        two = median_seconds(lambda: list(pool.map(half, range(2))))
    return [
        Row("sampling, 1 thread", million / ours, "M edges/s", "numpy, with replacement", million / theirs, "more"),
        Row("sampling, 2 threads", million / two, "M edges/s", "1 thread", million / ours, "more"),
    ]


def positions(graph: Graph, shares: list[SeedShare], small: bool) -> list[Row]:
    """Compare the CPU times of numbering a batch's nodes by a hash table and by an array indexed by node id."""
    # node ids are spread, to simulate graphs of up to 333 times the size
    work = sampler(graph.store, HOMO_NODE, {HOMO_EDGE: FANOUTS})
    edges = [work(share) for share in shares[:4]]
    met = [found.nodes[HOMO_NODE].ids[found.edges[HOMO_EDGE].src] for found in edges]  # in the order of sampling
    num_nodes = graph.manifest.nodes[HOMO_NODE].num_nodes
    rng, rows = np.random.default_rng(0), []
    for more in (1, 10) if small else (1, 10, 100, 333):
        spread = np.arange(num_nodes) * more + rng.integers(more, size=num_nodes)
        ids = [spread[drawn].astype(np.int32) for drawn in met]
        tables: tuple[PositionTable, ...] = (HashTable(), DirectTable(num_nodes * more))
        hashed, direct = alternately([partial(place_all, table, ids) for table in tables])
        rows.append(
            Row(f"positions in a batch, {num_nodes * more / 1e6:.3g}M nodes, hashed", 1e3 * hashed / len(ids), "CPU ms",
                "an entry for each", 1e3 * direct / len(ids))
        )  # fmt: skip
    return rows


def place_all(table: PositionTable, batches: list[np.ndarray]) -> None:
    for ids in batches:
        local, new = slabs.empty(len(ids), np.int32), slabs.empty(len(ids), np.int64)
        found = table.relabel(ids, 0, local, new)
        table.clean([new[:found]])


def alternately(works: list[Callable[[], None]], repeats: int = 9) -> list[float]:
    """Call the functions in turn. Return the median CPU seconds of each, without its first call."""
    taken: list[list[float]] = [[] for _ in works]
    for _ in range(repeats + 1):
        for work, seconds in zip(works, taken, strict=True):
            began = time.thread_time()
            work()
            seconds.append(time.thread_time() - began)
    return [median(seconds[1:]) for seconds in taken]


def steered(graph: Graph, shares: list[SeedShare]) -> list[Row]:
    store = with_columns(graph.store)
    kinds: dict[str, dict[str, Any]] = {
        "weighted": {"weight": "weight"},
        "weighted, with replacement": {"weight": "weight", "replace": True},
        "disjoint": {"disjoint": True},
        "temporal, disjoint": {"time": TimeRule("time", "edge")},
        "temporal, last": {"time": TimeRule("time", "edge", last=True)},
        "induced": {"induced": True},
    }
    plain = speed(sampler(store, HOMO_NODE, {HOMO_EDGE: FANOUTS}), shares)
    return [
        Row(f"sampling, {name}", speed(sampler(store, HOMO_NODE, {HOMO_EDGE: FANOUTS}, **kind), shares), "M edges/s",
            "plain", plain, "more")
        for name, kind in kinds.items()
    ]  # fmt: skip


def with_columns(store: PartStore) -> PartStore:
    (part,) = store.parts.values()
    edges, spec, rng = part.edges[HOMO_EDGE], store.manifest.edges[HOMO_EDGE], np.random.default_rng(0)
    columns = {
        "weight": rng.random(edges.num_edges, np.float32),
        "time": rng.integers(0, 1000, edges.num_edges),
    }
    specs = {name: AttrSpec(values.dtype.name, values.shape) for name, values in columns.items()}
    manifest = replace(store.manifest, edges={HOMO_EDGE: replace(spec, attrs=specs)})
    return replace(store, manifest=manifest, parts={0: replace(part, edges={HOMO_EDGE: replace(edges, attrs=columns)})})


def hetero(small: bool) -> list[Row]:
    folder = CACHE / f"{'small' if small else 'large'}-hetero"
    options = {"num_nodes": "10000" if small else "200000", "avg_degree": "20", "all_features": "true"}
    make_partition(PartitionSpec("synthetic-hetero", str(folder), None, options, 1, "random", force=True))
    with open_graph(folder) as graph:
        work = sampler(graph.store, "paper", dict.fromkeys(graph.manifest.edges, (10, 5)))
        return [Row("sampling, 8 edge types", speed(work, shares_of(graph, "paper")), "M edges/s")]


def numpy_sample(graph: Graph, seeds: np.ndarray) -> np.ndarray:
    """Sample ``FANOUTS`` hops with replacement, with numpy operations on whole arrays."""
    (part,) = graph.store.parts.values()
    indptr, indices = part.edges[HOMO_EDGE].indptr, part.edges[HOMO_EDGE].indices
    rng = np.random.default_rng(0)
    nodes = frontier = seeds
    for fanout in FANOUTS:
        degree = indptr[frontier + 1] - indptr[frontier]
        frontier, degree = frontier[degree > 0], degree[degree > 0]
        picks = indptr[frontier, None] + (rng.random((len(frontier), fanout)) * degree[:, None]).astype(np.int64)
        frontier = np.setdiff1d(indices[picks.ravel()], nodes)
        nodes = np.concatenate([nodes, frontier])
    return nodes


def gathering(graph: Graph, shares: list[SeedShare]) -> list[Row]:
    """Measure GB/s of gathering feature rows, compared with torch's ``index_select``."""
    work = sampler(graph.store, HOMO_NODE, {HOMO_EDGE: FANOUTS})
    nodes = [work(share).nodes[HOMO_NODE].ids for share in shares]
    (part,) = graph.store.parts.values()
    x = torch.from_numpy(np.array(part.nodes[HOMO_NODE].attrs["x"]))
    size = sum(map(len, nodes)) * x.shape[1] * x.element_size() / 1e9
    ours = median_seconds(lambda: [graph.access.gather([RowRequest(HOMO_NODE, ids, ("x",))]) for ids in nodes])
    torch.set_num_threads(1)
    theirs = median_seconds(lambda: [x.index_select(0, torch.from_numpy(ids)) for ids in nodes])
    return [Row("gather, 1 thread", size / ours, "GB/s", "torch index_select, 1 thread", size / theirs, "more")]


def epoch(graph: Graph) -> list[Row]:
    def load(threads: int) -> float:
        loader = BatchLoader(graph, LoaderSettings("train", FANOUTS, BATCH, threads=threads), 0, RankLayout.single(1))
        return median_seconds(lambda: [batch.num_seeds for batch in loader.epoch(0)], repeats=3)

    one, two = load(1), load(2)
    return [
        Row("loader epoch, 1 sampler thread", one, "s"),
        Row("loader epoch, 2 sampler threads", two, "s", "1 sampler thread", one),
    ]
