"""Tests of clients, which have no part: batches equal those of a graph opened from a folder."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from gateway_kit import HALVES, client_graph, serving_parts, worker_graphs, written
from load_kit import CITES, WRITES, hetero_data, homo_data, parts_of
from oracle import assert_identical
from partitions import write_store
from trainer import (
    DistClusterLoader,
    DistGraphSAINTEdgeSampler,
    DistGraphSAINTNodeSampler,
    DistGraphSAINTRandomWalkSampler,
    DistLinkNeighborLoader,
    DistNeighborLoader,
    DistPPRLoader,
    DistShaDowKHopSampler,
    DistWalkLoader,
)
from trainer.core.errors import PartitionError
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.service.cluster import Cluster, ClusterNode
from trainer.store.manifest import AttrSpec

ODD = torch.arange(1, 60, 2)
LINKS = torch.stack([ODD, ODD - 1])
BOTH = {"batch_size": 20, "shuffle": True, "seed": 4}

HOMO_LOADERS = {
    "split": lambda g: DistNeighborLoader(g, [4, 3], "train", **BOTH),
    "ids, with replacement": lambda g: DistNeighborLoader(g, [4, 3], ODD, replace=True, **BOTH),
    "all, bidirectional": lambda g: DistNeighborLoader(g, [3, 2], subgraph_type="bidirectional", **BOTH),
    "induced": lambda g: DistNeighborLoader(g, [3, 2], "train", subgraph_type="induced", **BOTH),
    "weighted, disjoint": lambda g: DistNeighborLoader(
        g, [4, -1], "train", disjoint=True, weight_attr="edge_weight", **BOTH
    ),
    "times of nodes": lambda g: DistNeighborLoader(g, [4, 3], "train", time_attr="time", **BOTH),
    "times of edges, last": lambda g: DistNeighborLoader(
        g, [4, 3], ODD, input_time=ODD % 50, time_attr="edge_time", temporal_strategy="last", **BOTH
    ),
    "top until a time": lambda g: DistNeighborLoader(
        g, [4, 3], ODD, input_time=ODD % 50, time_attr="edge_time", weight_attr="edge_weight", neighbors="top", **BOTH
    ),
    "ranks": lambda g: DistPPRLoader(g, [4, 3], "train", weight_attr="edge_weight", **BOTH),
    "ranks, tokens, times": lambda g: DistPPRLoader(g, 4, "train", time_attr="time", output="tokens", **BOTH),
    "ranks, subgraph": lambda g: DistPPRLoader(g, 4, "train", output="subgraph", **BOTH),
    "walks": lambda g: DistWalkLoader(g, [4, 3], "train", num_walks=9, **BOTH),
    "some attributes": lambda g: DistNeighborLoader(g, [4], "train", attrs=["half", "edge_attr"], **BOTH),
    "links, binary": lambda g: DistLinkNeighborLoader(
        g, [4, 3], neg_sampling="binary", avoid_links=True, exclude="both", **BOTH
    ),
    "links, triplets, disjoint": lambda g: DistLinkNeighborLoader(
        g, [4, 3], LINKS, disjoint=True, neg_sampling="triplet", **BOTH
    ),
    "links with times": lambda g: DistLinkNeighborLoader(
        g,
        [4],
        torch.stack([ODD, ODD - 1]),
        edge_label_time=ODD * 0 + 49,
        time_attr="time",
        neg_sampling="binary",
        **BOTH,
    ),
    "shadow": lambda g: DistShaDowKHopSampler(g, 2, 3, "train", **BOTH),
    "saint, nodes": lambda g: DistGraphSAINTNodeSampler(g, 12, 3, 2, log=False),
    "saint, edges": lambda g: DistGraphSAINTEdgeSampler(g, 12, 3, 2, log=False),
    "saint, walks": lambda g: DistGraphSAINTRandomWalkSampler(g, 6, 2, 3, 2, log=False),
    "clusters": lambda g: DistClusterLoader(g, batch_size=2, shuffle=True),
}
HETERO_LOADERS = {
    "split": lambda g: DistNeighborLoader(g, [4, 3], ("paper", "train"), **BOTH),
    "several types": lambda g: DistNeighborLoader(g, [4, 3], {"paper": "train", "author": None}, **BOTH),
    "times": lambda g: DistNeighborLoader(g, [4, 3], ("paper", "train"), time_attr="time", **BOTH),
    "induced": lambda g: DistNeighborLoader(g, [3, 2], ("author", None), subgraph_type="induced", **BOTH),
    "links": lambda g: DistLinkNeighborLoader(g, [4, 3], (WRITES, None), neg_sampling="binary", exclude="both", **BOTH),
    "links, one type": lambda g: DistLinkNeighborLoader(
        g, [4], CITES, neg_sampling="triplet", avoid_links=True, **BOTH
    ),
    "clusters": lambda g: DistClusterLoader(g, batch_size=2),
}


@pytest.fixture(scope="module")
def homo(tmp_path_factory):
    with both_ways(tmp_path_factory.mktemp("homo"), homo_data()) as graphs:
        yield graphs


@pytest.fixture(scope="module")
def hetero(tmp_path_factory):
    with both_ways(tmp_path_factory.mktemp("hetero"), hetero_data()) as graphs:
        yield graphs


@contextmanager
def both_ways(folder, data):
    """Yield the graph opened from its folder, the graph opened as a client of two servers, and the servers."""
    with serving_parts(written(folder, data)) as servers, open_graph(folder) as local, client_graph(servers) as client:
        yield local, client, servers


@pytest.mark.parametrize("loader", HOMO_LOADERS)
def test_every_loader_gives_the_same_batches(homo, loader):
    local, client, _ = homo
    expected, got = HOMO_LOADERS[loader](local), HOMO_LOADERS[loader](client)
    for _ in range(2):
        assert_identical(list(got), list(expected))


@pytest.mark.parametrize("loader", HETERO_LOADERS)
def test_every_loader_gives_the_same_batches_of_several_types(hetero, loader):
    local, client, _ = hetero
    expected, got = HETERO_LOADERS[loader](local), HETERO_LOADERS[loader](client)
    for _ in range(2):
        assert_identical(list(got), list(expected))


def test_a_batch_by_position_and_rows_that_a_transform_requests(homo):
    def more(out):
        out.node = torch.cat([out.node, torch.tensor([59])])
        return out

    local, client, _ = homo
    for options in ({}, {"transform_sampler_output": more}):
        expected, got = (DistNeighborLoader(graph, [3, 2], "train", **options) for graph in (local, client))
        assert_identical(got([3, 1, 2]), expected([3, 1, 2]))


def test_a_remote_graph_equals_an_opened_one(homo, hetero):
    for local, client, _ in (homo, hetero):
        assert client.manifest == local.manifest and client.digest == local.digest
        assert (client.near_parts, client.layout) == ((0, 1), local.layout)
        for of, spec in client.manifest.nodes.items():
            everyone = np.arange(spec.num_nodes)
            for ids in (everyone[3:9], everyone, everyone[:1]):
                np.testing.assert_array_equal(client.store.to_global(of, ids), local.store.to_global(of, ids))
            for split in spec.splits:
                seeds = client.store.seeds(of, split)
                assert seeds.dtype == np.int64
                np.testing.assert_array_equal(seeds, local.store.seeds(of, split))
        for of, spec in client.manifest.edges.items():
            ours, theirs = (graph.access.endpoints(of, np.arange(spec.num_edges)) for graph in (client, local))
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(PartitionError, match=r"no split 'tset' of 'node'; there are \['train'\]"):
        homo[1].store.seeds("node", "tset")


def test_graph_attributes_are_sent_to_clients(tmp_path):
    store = parts_of(homo_data(), 2).store
    given = {
        "names": np.arange(7.0),
        "scalar": np.array(3, np.int16),
        "table": np.arange(6, dtype=np.uint8).reshape(3, 2),
    }
    specs = {name: AttrSpec(values.dtype.name, values.shape) for name, values in given.items()}
    write_store(tmp_path, replace(store, manifest=replace(store.manifest, graph_attrs=specs)))
    (tmp_path / "shared" / "graph").mkdir()
    for name, values in given.items():
        np.save(tmp_path / "shared" / "graph" / f"{name}.npy", values)
    with serving_parts(tmp_path, ((0,), (1,))) as servers, client_graph(servers) as client:
        (batch,) = DistNeighborLoader(client, [1], [0])
        assert all(torch.equal(batch[name], torch.from_numpy(values)) for name, values in given.items())


def test_prefetched_batches_are_requested_concurrently(homo):
    # One sampler thread requests four batches at once; the barrier would time out otherwise.
    local, _, servers = homo
    together = threading.Barrier(4, timeout=10)
    with client_graph(servers) as client:
        sample = client.access.sample_batch
        client.access.sample_batch = lambda work: (together.wait(), sample(work))[1]
        loader = DistNeighborLoader(client, [4, 3], "train", batch_size=9, threads=1, prefetch=4, drop_last=True)
        expected = DistNeighborLoader(local, [4, 3], "train", batch_size=9, drop_last=True)
        assert len(loader) % 4 == 0, "the last batches would wait at the barrier"
        assert_identical(list(loader), list(expected))


SPLITS = {
    "plain": (homo_data, {"fanouts": (4, 3), "want_degree": True}),
    "weighted, with replacement": (homo_data, {"fanouts": (4, 3), "replace": True, "weight": "edge_weight"}),
    "times": (homo_data, {"fanouts": (4, 3), "time_attr": "time"}),
    "hetero": (hetero_data, {"fanouts": (4, 3), "target": "paper"}),
    "hetero, last times": (hetero_data, {"fanouts": (4, 3), "target": "paper", "time_attr": "time", "last": True}),
}


@pytest.mark.parametrize("split", fast_cases(SPLITS, "plain", "hetero, last times"))
def test_workers_and_clients_give_every_rank_the_same_batches(tmp_path, split):
    # Each worker or client has two ranks; shares of the seeds and batches are equal, shuffled and in order.
    make, options = SPLITS[split]
    layout = RankLayout.from_cluster(cluster_of("worker"))
    assert RankLayout.from_cluster(cluster_of("server")) == layout
    with serving_parts(written(tmp_path, make())) as servers, worker_graphs(servers) as workers:
        for rank in range(4):
            with client_graph(servers, home=rank // 2) as client:
                for shuffle, epochs in ((True, 2), (False, 1)):
                    settings = LoaderSettings("train", global_batch=13, seed=7, shuffle=shuffle, **options)
                    ours, theirs = (
                        BatchLoader(graph, settings, rank, layout) for graph in (client, workers[rank // 2])
                    )
                    for epoch in range(epochs):
                        assert_identical(list(ours.epoch(epoch)), list(theirs.epoch(epoch)))


def cluster_of(mode):
    """Return a cluster of four ranks, with two nodes that have two parts each.

    mode: with "worker", the ranks run on these nodes, else on two further nodes.
    """
    servers = [ClusterNode(k, f"h{k}", mode, f"tcp://h{k}:1", HALVES[k], ()) for k in (0, 1)]
    ranks = [(0, 1), (2, 3)]
    if mode == "worker":
        return Cluster("r", 4, 1, tuple(replace(node, ranks=ranks[node.node_rank]) for node in servers))
    clients = [ClusterNode(k + 2, f"h{k + 2}", "client", None, (), ranks[k]) for k in (0, 1)]
    return Cluster("r", 4, 1, (*servers, *clients))
