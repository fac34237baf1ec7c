"""Sampling and gathering on one machine: our kernels beside plain numpy and torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch

from graphs import BATCH, FANOUTS, partitioned
from table import Row, median_seconds
from trainer.load.loader import BatchLoader, LoaderSettings, Share
from trainer.load.open import Graph, open_graph
from trainer.load.seeds import RankLayout
from trainer.sample.multi_hop import RelabelTable, sample_multi_hop


def run(small: bool) -> list[Row]:
    with open_graph(partitioned(small, 1)) as graph:
        settings = LoaderSettings("train", FANOUTS, BATCH)
        loader = BatchLoader(graph, settings, 0, RankLayout.single(1))
        shares = list(islice(loader.shares(0), 8))
        return [*sampling(graph, shares), *gathering(graph, shares), *epoch(graph)]


def sampling(graph: Graph, shares: list[Share]) -> list[Row]:
    """Edges per second of multi-hop sampling, against numpy doing the same hops with whole-array operations."""
    table = RelabelTable(graph.manifest.num_nodes)
    edges = sum(len(sample_multi_hop(graph.access, s.seeds, FANOUTS, s.key, table).edges) for s in shares)
    ours = median_seconds(lambda: [sample_multi_hop(graph.access, s.seeds, FANOUTS, s.key, table) for s in shares])
    theirs = median_seconds(lambda: [numpy_sample(graph, s.seeds) for s in shares], repeats=3)
    tables = [RelabelTable(graph.manifest.num_nodes) for _ in range(2)]

    def half(which: int) -> None:
        for share in shares[which::2]:
            sample_multi_hop(graph.access, share.seeds, FANOUTS, share.key, tables[which])

    with ThreadPoolExecutor(2) as pool:
        two = median_seconds(lambda: list(pool.map(half, range(2))))
    million = edges / 1e6
    return [
        Row("sampling, 1 thread", million / ours, "M edges/s", "numpy, with replacement", million / theirs, "more"),
        Row("sampling, 2 threads", million / two, "M edges/s", "1 thread", million / ours, "more"),
    ]


def numpy_sample(graph: Graph, seeds: np.ndarray) -> np.ndarray:
    """The same fanouts by whole-array numpy, which has to draw with replacement."""
    (part,) = graph.store.parts.values()
    rng = np.random.default_rng(0)
    nodes = frontier = seeds
    for fanout in FANOUTS:
        degree = part.indptr[frontier + 1] - part.indptr[frontier]
        frontier, degree = frontier[degree > 0], degree[degree > 0]
        picks = part.indptr[frontier, None] + (rng.random((len(frontier), fanout)) * degree[:, None]).astype(np.int64)
        frontier = np.setdiff1d(part.indices[picks.ravel()], nodes)
        nodes = np.concatenate([nodes, frontier])
    return nodes


def gathering(graph: Graph, shares: list[Share]) -> list[Row]:
    """GB/s of feature rows, against torch's index_select on the same memory."""
    table = RelabelTable(graph.manifest.num_nodes)
    nodes = [sample_multi_hop(graph.access, s.seeds, FANOUTS, s.key, table).nodes for s in shares]
    (part,) = graph.store.parts.values()
    x = torch.from_numpy(np.array(part.attrs["x"]))
    size = sum(map(len, nodes)) * x.shape[1] * x.element_size() / 1e9
    ours = median_seconds(lambda: [graph.access.gather(ids, ["x"]) for ids in nodes])
    torch.set_num_threads(1)
    theirs = median_seconds(lambda: [x.index_select(0, torch.from_numpy(ids)) for ids in nodes])
    return [Row("gather, 1 thread", size / ours, "GB/s", "torch index_select, 1 thread", size / theirs, "more")]


def epoch(graph: Graph) -> list[Row]:
    """Seconds for one epoch of finished batches, by one sampler thread and by two."""

    def load(threads: int) -> float:
        loader = BatchLoader(graph, LoaderSettings("train", FANOUTS, BATCH, threads=threads), 0, RankLayout.single(1))
        return median_seconds(lambda: [batch.num_seeds for batch in loader.epoch(0)], repeats=3)

    one, two = load(1), load(2)
    return [
        Row("loader epoch, 1 sampler thread", one, "s"),
        Row("loader epoch, 2 sampler threads", two, "s", "1 sampler thread", one),
    ]
