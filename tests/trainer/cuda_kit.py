"""Test kit: samples on the CPU and with the CUDA kernels, and compares bit for bit.

Usage: ``python tests/trainer/cuda_kit.py CHECK SEED... CHECK SEED...``. The kernels run on a GPU, or in numba's
simulator if ``NUMBA_ENABLE_CUDASIM=1`` is set.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_kit import hosts
from oracle import assert_identical
from partition_kit import with_nodes
from partitions import random_graph, store_of
from sample_kit import KINDS, WRITES, random_seeds, random_settings, some_key, to_global, typed_graph
from train_kit import job, sample_on
from trainer.core.errors import DataError, TrainingError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.cuda import gather_kernels
from trainer.cuda.array_ops import TorchOps
from trainer.cuda.availability import simulator_wanted
from trainer.cuda.hop_sampling import DeviceHops
from trainer.cuda.relabel import DeviceTables
from trainer.cuda.shared_memory import HostArrays
from trainer.cuda.topology import load_topology, topology_arrays
from trainer.graph.cache_fill import device_rows
from trainer.graph.open import open_graph
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.loader.edge_endpoints import all_times
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_seeds import link_inputs
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import block_edges, cut_block, sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.types import SampleSettings, SeedSet
from trainer.sources.load import load_dataset
from trainer.train.job import batch_plan, train

CPU = torch.device("cpu")
DEVICE = CPU if simulator_wanted() else torch.device("cuda", 0)


def sources_of(store, settings):
    """Return two pairs (graph, relabelling tables) to sample with: for the CPU, and for the kernels."""
    place = "pinned" if store.manifest.num_parts == 2 else "device"
    arrays = HostArrays.alone(topology_arrays(store, [settings]))
    arrays.fill()
    topology = load_topology(store, [settings], DEVICE, arrays.lock(DEVICE) if place == "pinned" else None)
    hops = DeviceHops(topology, store, DEVICE)
    tables = DeviceTables(store.manifest, TorchOps(DEVICE))
    return (LocalGraph(store), RelabelTables(store.manifest)), (hops, tables)


def both(store, seeds, settings, key):
    """Sample one subgraph twice: by the CPU, and by the kernels."""
    return [
        sample_multi_hop(source, store.manifest, seeds, settings, key, tables)
        for source, tables in sources_of(store, settings)
    ]


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
    """Assert that two subgraphs, sampled with ``settings``, have equal values and dtypes.

    Only the dtypes of edge ids may differ.
    """
    for (name, one), (_, other) in zip(arrays_of(cpu, settings), arrays_of(device, settings), strict=True):
        other = other.cpu().numpy() if isinstance(other, torch.Tensor) else other
        assert one.shape == other.shape, (name, one.shape, other.shape)
        assert np.array_equal(one, other), name
        assert one.dtype == other.dtype or "edges" in name, (name, one.dtype, other.dtype)


def check_hetero(seed):
    """Compare all kinds of sampling on one random heterogeneous graph."""
    rng = np.random.default_rng(seed)
    graph = typed_graph(seed)
    for more, exclude in product(KINDS.values(), [False, True]):
        store = graph.store(1 + seed % 3)
        settings = random_settings(rng, graph.edges, **more, ask_again=bool(rng.integers(2)))
        seeds = to_global(store, random_seeds(rng, graph, exclude))
        same(*both(store, seeds, settings, some_key(seed)), settings)


def check_homo(seed):
    """Compare sampling without and with replacement, and disjoint sampling, on one random homogeneous graph."""
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
    """Compare the sampling of nodes with so many drawn edges that a kernel needs global memory for them."""
    rng = np.random.default_rng(seed)
    edge_index = np.stack([rng.integers(0, 40, 400), rng.integers(0, 2, 400)])
    store = store_of(edge_index, 40, 2)
    for fanouts in ((70, -1), (-1, 66), (100, 150)):
        settings = SampleSettings({HOMO_EDGE: fanouts}, edge_ids=True)
        same(*both(store, SeedSet({HOMO_NODE: np.array([0, 1, 5])}), settings, some_key(seed)), settings)


def check_errors(seed):
    """Compare the errors for a negative weight."""
    rng = np.random.default_rng(seed)
    graph = typed_graph(seed)
    graph.edge_attrs[WRITES]["w"][rng.integers(60)] = -1
    store, settings = graph.store(2), SampleSettings({WRITES: (2,)}, weight="w")
    seeds = SeedSet({"p": np.arange(15)})
    texts = []
    for source, tables in sources_of(store, settings):
        with pytest.raises(DataError) as raised:
            sample_multi_hop(source, store.manifest, seeds, settings, 1, tables)
        texts.append(str(raised.value))
    assert texts[0] == texts[1] and "has the weight -1.0" in texts[0], texts


def check_wrong_batch(seed):
    """Let a kernel write wrong rows, and check that ``choose_sampling`` refuses the device."""
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        graph = open_graph(folder_of(root, seed, "synthetic", "float32", 1))
        loader = BatchLoader(graph, LoaderSettings("train", (2,), 3, seed=seed), 0, graph.layout)
        patch.setattr(gather_kernels, "take_rows", lambda items, sources, host, scales, cached, out: out.fill_(0.5))
        with pytest.raises(TrainingError, match="the first batch that the GPU sampled differs from the CPU's"):
            sample_on(graph, {"train": loader}, "cuda", RankGroup(Ranks(), DEVICE))
        assert not (loader.load(next(loader.shares(1))).x == 0.5).all(), "the device still samples"


def features_of(kind, data):
    """Return a dataset, and the argument ``rows`` with which ``write_partition`` stores its ``x`` as ``kind``."""
    of = next(of for of, nodes in data.nodes.items() if "x" in nodes.attrs)
    rows = data.nodes[of].attrs["x"]
    if kind == "bfloat16":
        bits = torch.from_numpy(rows).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return with_nodes(data, of, attrs={**data.nodes[of].attrs, "x": bits}, bfloat16=frozenset({"x"})), "stored"
    if kind in ("float64", "uint8"):
        changed = (rows * 7.123456789).astype(kind)
        return with_nodes(data, of, attrs={**data.nodes[of].attrs, "x": changed}), "stored"
    return data, {"float32": "stored"}.get(kind, kind)


def folder_of(root, seed, name, kind, num_parts, **options):
    """Write a small partition whose ``x`` is stored as ``kind``. Returns its folder."""
    given = {"num_nodes": 40, "avg_degree": 4, "num_features": 5, "num_classes": 3, "edge_weight": True, **options}
    data, rows = features_of(kind, load_dataset(name, options={**given, "time": True, "seed": seed}))
    folder = Path(root) / f"{name}-{seed}-{kind}"
    write_partition(data, assign_parts(data, num_parts, "hash"), folder, rows=rows)
    return folder


def same_batches(make, graph, cache="0", limit=None):
    """Assert that two loaders give equal batches: one samples on the CPU, the other with the kernels.

    ``make(graph)`` returns a loader. ``cache``: share of the rows that the second loader caches on the device.
    ``limit``: number of batches to compare, or None for those of a whole epoch.
    """
    plain, loader = make(graph), make(graph)
    if cache != "0":
        loader.keep(device_rows(graph, batch_plan(graph, loader), CacheSize.parse(cache), DEVICE))
    choice = sample_on(graph, {"train": loader}, "cuda", RankGroup(Ranks(), DEVICE))
    assert choice.on_device, choice
    for share in islice(plain.shares(1), limit):
        assert_identical(loader.load(share).to(CPU), plain.load(share))


def check_batches(seed):
    """Compare batches with several dtypes of rows, cached rows, rows of another host, in-degrees and edge features."""
    kinds = ("float32", "float16", "bfloat16", "float64", "uint8", "int8")
    kind, more = (
        kinds[seed % len(kinds)],
        [{}, {"edge_attr": ("edge_time", "edge_weight")}, {"weight": "edge_weight"}][seed % 3],
    )
    with tempfile.TemporaryDirectory() as root:
        folder = folder_of(root, seed, "synthetic", kind, 2)
        for graph, cache in ((open_graph(folder), "30%"), (hosts(folder, 2, "replicated")[0], "20%")):
            settings = LoaderSettings("train", (3, 2), 7, want_degree=True, seed=seed, **more)
            same_batches(lambda one, given=settings: BatchLoader(one, given, 0, one.layout), graph, cache, 1)
        graph = open_graph(folder_of(root, seed, "synthetic-hetero", kind, 2))
        settings = LoaderSettings("train", (2, 2), 7, target="paper", seed=seed, **more)
        same_batches(lambda one: BatchLoader(one, settings, 0, one.layout), graph, "0", 1)


def check_links(seed):
    """Compare batches of links, without and with times. A batch's links are left out of its sampled edges."""
    with tempfile.TemporaryDirectory() as root:
        graph = open_graph(folder_of(root, seed, "synthetic", "float32", 1))
        for attr in (None, "edge_time"):
            times = None if attr is None else all_times(graph, HOMO_EDGE, attr)
            links = link_inputs(graph, None, edge_label_time=times)
            settings = LoaderSettings("train", (3, 2), 9, seed=seed, time_attr=attr)
            same_batches(partial(_link_loader, links, settings), graph, limit=1)


def _link_loader(links, settings, graph):
    return LinkBlockLoader(graph, settings, links, LinkBlockSettings(4, True), 0, graph.layout)


def check_training(seed):
    """Compare the losses of a run that samples on the CPU with those of a run that samples with the kernels."""
    with tempfile.TemporaryDirectory() as root:
        folder = folder_of(root, seed, "synthetic", "float32", 1)
        given = {"batch_size": 6, "fanouts": (2, 2), "eval_batch_size": 12, "hidden": 4, "epochs": 1, "seed": seed}
        curves = [
            train(job(folder, Path(root) / where, sampling=where, **given)).step_loss for where in ("cpu", "cuda")
        ]
        assert torch.equal(*(curve[0] for curve in curves))


CHECKS = {
    "hetero": check_hetero, "homo": check_homo, "hubs": check_hubs, "errors": check_errors,
    "batches": check_batches, "wrong-batch": check_wrong_batch, "links": check_links, "training": check_training,
}  # fmt: skip


def main(words):
    """Run checks. ``words``: the name of a check, its random seeds, the next name and so on."""
    check = None
    for word in words:
        if word in CHECKS:
            check = CHECKS[word]
        else:
            check(int(word))
    print("same")


if __name__ == "__main__":
    main(sys.argv[1:])
