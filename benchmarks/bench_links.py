"""Compares loaders that read the ends of edges batch by batch with loaders that hold all edges in memory.

Times are CPU seconds of one sampler thread; memory is the peak of numpy's arrays.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import Any

from graphs import partitioned
from table import Row
from trainer.core.rng import shuffled
from trainer.core.schema import HOMO_EDGE
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import KeyedPermutation
from trainer.loader.graph_saint import DistGraphSAINTEdgeSampler, DistGraphSAINTNodeSampler
from trainer.loader.link_loader import DistLinkNeighborLoader
from trainer.loader.pyg_loader import PyGLoader
from trainer.loader.saint_draws import SaintEdgeDraw
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph

STEPS = 12


def run(small: bool) -> list[Row]:
    with open_graph(partitioned(small, 1)) as stored:
        held = without_endpoints(stored)
        return [
            *compared("links", lambda graph: links(graph), stored, held),
            *compared("links, excluded with reverses", lambda graph: links(graph, exclude="both"), stored, held),
            *compared("GraphSAINT by nodes", lambda graph: DistGraphSAINTNodeSampler(graph, 6000, STEPS), stored, held),
            *compared("GraphSAINT by edges", lambda graph: DistGraphSAINTEdgeSampler(graph, 6000, STEPS), stored, held),
            *few_sums(stored, held),
            first_order(1 << 20 if small else 1 << 24),
        ]


def without_endpoints(graph: Graph) -> Graph:
    """Return the graph without its stored (source, target) pairs, so that loaders read all edges into memory."""
    spec = replace(graph.manifest.edges[HOMO_EDGE], endpoints=False)
    store = replace(graph.store, manifest=replace(graph.manifest, edges={HOMO_EDGE: spec}))
    return Graph(store, DistGraph(LocalGraph(store), {}))


def links(graph: Graph, **more: Any) -> DistLinkNeighborLoader:
    return DistLinkNeighborLoader(graph, [10, 5], batch_size=1024, shuffle=True, neg_sampling="binary", **more)


def compared(name: str, make: Callable[[Graph], PyGLoader], *graphs: Graph) -> list[Row]:
    (stored, own, made), (held, all_edges, read) = (measured(make, graph) for graph in graphs)
    ours, theirs = step_seconds(stored, held)
    return [
        Row(f"{name}: step", 1e3 * ours, "CPU ms", "all edges in memory", 1e3 * theirs),
        Row("… made in", made, "s", "all edges in memory", read),
        Row("… memory, at most", own / 1e6, "MB", "all edges in memory", all_edges / 1e6),
    ]


def measured(make: Callable[[Graph], PyGLoader], graph: Graph) -> tuple[PyGLoader, int, float]:
    """Make a loader. Return the loader, peak bytes of numpy's arrays up to its first batch, and the seconds taken."""
    tracemalloc.start()
    began = time.perf_counter()
    loader = make(graph)
    seconds = time.perf_counter() - began
    loader.share(next(iter(loader.work_items(0, 0))))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return loader, most, seconds


def step_seconds(*loaders: PyGLoader) -> list[float]:
    """Return the median CPU seconds of a step of each loader, without its first step."""
    taken: list[list[float]] = [[] for _ in loaders]
    every = [list(islice(loader.work_items(0, 0), STEPS)) for loader in loaders]
    for items in zip(*every, strict=True):
        for loader, item, seconds in zip(loaders, items, taken, strict=True):
            began = time.thread_time()
            loader.work(loader.share(item))
            seconds.append(time.thread_time() - began)
    return [median(seconds[1:]) for seconds in taken]


def few_sums(stored: Graph, held: Graph) -> list[Row]:
    # a running sum of the weights at every 64th edge only, as for 2^31 edges
    few, every = (DistGraphSAINTEdgeSampler(graph, 6000, STEPS) for graph in (stored, held))
    num_nodes = stored.manifest.num_nodes
    few._edges = SaintEdgeDraw.of(few._edges.ends, num_nodes, -(-stored.manifest.num_edges // 64))
    ours, theirs = step_seconds(few, every)
    return [
        Row(f"GraphSAINT by edges, a sum for {few._edges.width}", 1e3 * ours, "CPU ms", "for every edge", 1e3 * theirs)
    ]


def first_order(num_edges: int) -> Row:
    began = time.perf_counter()
    shuffled(num_edges, 5)[:1024]
    by_sort, began = time.perf_counter() - began, time.perf_counter()
    KeyedPermutation(num_edges, 5)[:1024]
    return Row(
        f"first batch of {num_edges:,} shuffled", 1e3 * (time.perf_counter() - began), "ms", "sort", 1e3 * by_sort
    )
