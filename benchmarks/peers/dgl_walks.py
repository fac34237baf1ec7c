"""Prints how many seeds per second DGL's sampler of PinSAGE has. Runs in DGL's environment, for bench_rules.py.

``RandomWalkNeighborSampler`` is the sampler of which ``PinSAGESampler`` is the form for two node types.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import dgl
import numpy as np
import torch

folder, (threads, k, batch, walks, length), restart = sys.argv[1], map(int, sys.argv[2:7]), float(sys.argv[7])
torch.set_num_threads(1)
indptr, indices, seeds = (torch.from_numpy(np.load(f"{folder}/dgl-{n}.npy")) for n in ("indptr", "indices", "seeds"))
targets = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
graph = dgl.graph((targets, indices.long()), num_nodes=len(indptr) - 1).formats(["csr", "csc"])  # walks follow edges
graph.create_formats_()
sampler = dgl.sampling.RandomWalkNeighborSampler(graph, length, restart, walks, k)
sampler(seeds[:batch])


def run() -> float:
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(sampler, seeds.split(batch)))
    return len(seeds) / (time.perf_counter() - begun)


print(max(run() for _ in range(2)))
