"""Neighbours by PageRank and random walks: seeds per second on two threads, beside torch_geometric and DGL.

All choose up to 64 neighbours of each seed. torch_geometric's ``get_ppr`` counts without sorting the edges, without its
first compilation, without the conversion of its result and without a choice of the best. DGL runs only if
``benchmarks/peers/envs.py dgl`` has installed it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numba
import numpy as np

import gnnfleet as gf
from graphs import partitioned
from peers.envs import DGL
from table import Row
from trainer.core.schema import HOMO_EDGE

THREADS, K, BATCH = 2, 64, 512
ALPHA, EPS = 0.15, (1e-4, 1e-5)
WALKS, LENGTH, RESTART = 50, 4, 0.15


def run(small: bool) -> list[Row]:
    rows = []
    with gf.open(partitioned(small, 1)) as graph:
        seeds = graph.store.seeds("node", "train")
        for eps in EPS:
            few = seeds[: len(seeds) if eps > 1e-5 else len(seeds) // 8]
            ours = speed(lambda few=few, eps=eps: gf.DistPPRLoader(graph, K, few, alpha=ALPHA, eps=eps, **options()))
            theirs = get_ppr_speed(graph, few if eps > 1e-5 else few[: len(few) // 8], eps)
            what = f"PageRank, alpha {ALPHA:g}, eps {eps:g}, {len(few):,} seeds"
            rows.append(Row(what, ours, "seeds/s", "get_ppr of torch_geometric", theirs, "more"))
        ours = speed(
            lambda: gf.DistWalkLoader(graph, K, seeds, num_walks=WALKS, length=LENGTH, restart=RESTART, **options())
        )
        theirs = dgl_speed(graph, seeds)
        rows.append(Row(f"{WALKS} walks of {LENGTH} steps", ours, "seeds/s", "DGL" if theirs else "", theirs, "more"))
    return rows


def options() -> dict[str, object]:
    return {"batch_size": BATCH, "attrs": [], "threads": THREADS, "prefetch": THREADS + 1}


def speed(make: object) -> float:
    loader = make()
    loader(np.arange(8))  # compiles
    begun = time.perf_counter()
    for _ in loader:
        pass
    return len(loader.dataset) / (time.perf_counter() - begun)


def get_ppr_speed(graph: gf.Graph, seeds: np.ndarray, eps: float) -> float:
    from torch_geometric.utils import ppr

    (part,) = graph.store.parts.values()
    edges = part.edges[HOMO_EDGE]
    indptr, indices = np.array(edges.indptr), np.array(edges.indices).astype(np.int64)
    kernel = ppr._get_ppr_numba = ppr._get_ppr_numba or numba.jit(nopython=True, parallel=True)(ppr._get_ppr)
    numba.set_num_threads(THREADS)
    kernel(indptr, indices, ALPHA, 0.1, seeds[:2])
    begun = time.perf_counter()
    kernel(indptr, indices, ALPHA, eps, seeds)
    return len(seeds) / (time.perf_counter() - begun)


def dgl_speed(graph: gf.Graph, seeds: np.ndarray) -> float | None:
    if not (DGL.folder / "ready").exists():
        return None
    (part,) = graph.store.parts.values()
    edges, folder = part.edges[HOMO_EDGE], graph.store.folder
    np.save(folder / "dgl-indptr.npy", edges.indptr)
    np.save(folder / "dgl-indices.npy", edges.indices)
    np.save(folder / "dgl-seeds.npy", seeds)
    numbers = [THREADS, K, BATCH, WALKS, LENGTH, RESTART]
    script = Path(__file__).parent / "peers" / "dgl_walks.py"
    words = [DGL.folder / "bin/python", script, folder, *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        print(f"without DGL: {done.stderr[-300:]}", file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])
