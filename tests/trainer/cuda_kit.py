"""Test kit: samples on the CPU and with the CUDA kernels in numba's simulator, and compares bit for bit.

Run with ``NUMBA_ENABLE_CUDASIM=1`` in a process of its own: ``python tests/trainer/cuda_kit.py CHECK SEED...``.
"""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import torch

from partitions import random_graph, store_of
from sample_kit import KINDS, random_seeds, random_settings, some_key, to_global, typed_graph
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.cuda.array_ops import TorchOps
from trainer.cuda.hop_sampling import DeviceHops
from trainer.cuda.relabel import DeviceTables
from trainer.cuda.topology import load_topology
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import block_edges, cut_block, sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.types import SampleSettings, SeedSet

CPU = torch.device("cpu")


def both(store, seeds, settings, key):
    """Return the subgraph that the CPU samples, and that of the kernels."""
    ops = TorchOps(CPU)
    hops = DeviceHops(load_topology(store, [settings], CPU, "device"), store, CPU)
    return (
        sample_multi_hop(LocalGraph(store), store.manifest, seeds, settings, key, RelabelTables(store.manifest)),
        sample_multi_hop(hops, store.manifest, seeds, settings, key, DeviceTables(store.manifest, ops)),
    )


def arrays_of(subgraph, settings):
    """Yield a name and an array for everything in a subgraph and its blocks."""
    for of, nodes in subgraph.nodes.items():
        yield f"{of} ids", nodes.ids
        yield f"{of} per hop", np.array(nodes.per_hop)
        if nodes.tree is not None:
            yield f"{of} trees", nodes.tree
    for of, edges in subgraph.edges.items():
        yield f"{of} begin", edges.row_begin
        yield f"{of} count", edges.row_count
        yield f"{of} src", edges.src
        yield f"{of} per hop", np.array(edges.per_hop)
        if edges.edge is not None:
            yield f"{of} edges", edges.edge
        if edges.whole is not None:
            yield f"{of} whole", edges.whole.begin
        for hop in range(settings.num_hops):
            indptr, indices, num_src = cut_block(subgraph, of, hop)
            yield f"{of} block {hop} indptr", indptr
            yield f"{of} block {hop} indices", indices
            yield f"{of} block {hop} sources", np.array(num_src)
            yield f"{of} block {hop} edges", block_edges(subgraph, of, hop)


def same(cpu, device, settings):
    """Assert that two subgraphs have equal values, and equal dtypes except that ids may be wider or narrower."""
    for (name, one), (_, other) in zip(arrays_of(cpu, settings), arrays_of(device, settings), strict=True):
        other = np.asarray(other)
        assert one.shape == other.shape, (name, one.shape, other.shape)
        assert np.array_equal(one, other), name
        assert one.dtype == other.dtype or "edges" in name, (name, one.dtype, other.dtype)


def check_hetero(seed):
    """Compare all kinds of sampling on one random typed graph."""
    rng = np.random.default_rng(seed)
    graph = typed_graph(seed)
    for more, exclude in product(KINDS.values(), [False, True]):
        store = graph.store(1 + seed % 3)
        settings = random_settings(rng, graph.edges, **more, ask_again=bool(rng.integers(2)))
        seeds = to_global(store, random_seeds(rng, graph, exclude))
        same(*both(store, seeds, settings, some_key(seed)), settings)


def check_homo(seed):
    """Compare uniform, replacing and disjoint sampling on one random homogeneous graph."""
    rng = np.random.default_rng(seed)
    store = store_of(*random_graph(seed, int(rng.integers(10, 60)), int(rng.integers(10, 200))), 1 + seed % 3)
    for more in ({}, {"replace": True}, {"disjoint": True}):
        hops = int(rng.integers(1, 4))
        fanouts = {HOMO_EDGE: tuple(int(f) for f in rng.choice([-1, 0, 1, 2, 3, 5], hops))}
        settings = SampleSettings(fanouts, edge_ids=True, **more)
        ids = rng.integers(0, store.manifest.nodes[HOMO_NODE].num_nodes, 5)
        seeds = SeedSet({HOMO_NODE: ids}, trees={HOMO_NODE: rng.integers(0, 99, 5)})
        same(*both(store, seeds, settings, some_key(seed)), settings)


def check_hubs(seed):
    """Compare on nodes with more picks than a thread lists, which use work memory."""
    rng = np.random.default_rng(seed)
    edge_index = np.stack([rng.integers(0, 40, 400), rng.integers(0, 2, 400)])
    store = store_of(edge_index, 40, 2)
    for fanouts in ((70, -1), (-1, 66), (100, 150)):
        settings = SampleSettings({HOMO_EDGE: fanouts}, edge_ids=True)
        same(*both(store, SeedSet({HOMO_NODE: np.array([0, 1, 5])}), settings, some_key(seed)), settings)


CHECKS = {"hetero": check_hetero, "homo": check_homo, "hubs": check_hubs}

if __name__ == "__main__":
    for given in sys.argv[2:]:
        CHECKS[sys.argv[1]](int(given))
    print("same")
