"""Tests that a partitioned graph gives equal answers with local and with remote parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from partitions import random_graph, store_of
from service_kit import assert_same_sample, client_of, rows_of, serving
from trainer.core.errors import ServiceError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import HopRequest
from trainer.store.part_store import EdgePart, NodePart, Part, PartStore


def test_a_homogeneous_graph_answers_the_same_over_the_wire() -> None:
    edge_index, num_nodes = random_graph(0, 300, 4000)
    attrs = {"x": np.random.default_rng(1).normal(size=(num_nodes, 8)).astype(np.float32)}
    whole = LocalGraph(store_of(edge_index, num_nodes, 4, attrs=attrs))
    mine = LocalGraph(store_of(edge_index, num_nodes, 4, attrs=attrs, only=[0, 2]))
    theirs = LocalGraph(store_of(edge_index, num_nodes, 4, attrs=attrs, only=[1, 3]))
    nodes = np.random.default_rng(2).integers(0, num_nodes, 500)
    with serving(theirs) as server, client_of(server.endpoint) as client:
        routed = DistGraph(mine, {1: client})
        for fanout, with_replacement in ((5, False), (-1, False), (4, True)):
            asked = [
                HopRequest(HOMO_EDGE, nodes, fanout, 2, 2**64 - 7, replace=with_replacement, with_edge=with_edge)
                for with_edge in (True, False)
            ]
            for there, here in zip(routed.sample_hops(asked), whole.sample_hops(asked), strict=True):
                assert_same_sample(there, here)
        names = ["x", "orig_id", "in_degree"]
        here, there = rows_of(whole, nodes, names), rows_of(routed, nodes, names)
        for name in names:
            np.testing.assert_array_equal(there[name], here[name])
        foreign = HopRequest(HOMO_EDGE, np.array([whole.books[HOMO_NODE].range_of(0)[0]]), 3, 2, 1)
        with pytest.raises(ServiceError, match=r"node1 \(10.0.0.2\) .*parts 1,3: sample failed: asked for ids"):
            client.sample_hops([foreign])
        with pytest.raises(ServiceError, match="no attribute 'z' of 'node'"):
            rows_of(client, nodes[:0], ["z"])


def test_ids_beyond_32_bits_locally_and_over_the_wire() -> None:
    far, far_edge = 2**33, 2**40
    manifest = store_of(np.empty((2, 0), np.int64), 1).manifest
    nodes = replace(manifest.nodes[HOMO_NODE], num_nodes=far + 3, offsets=(0, far, far + 3))
    edges = replace(manifest.edges[HOMO_EDGE], num_edges=far_edge + 4, offsets=(0, far_edge, far_edge + 4))
    manifest = replace(manifest, num_parts=2, nodes={HOMO_NODE: nodes}, edges={HOMO_EDGE: edges})
    sources, edge_ids = np.array([far, 5, far + 2, 2**31]), np.array([7, 2**41, 8, 9])
    part = Part(
        1,
        {HOMO_NODE: NodePart(far, np.array([10, 2**32, 2**34]), {})},
        {HOMO_EDGE: EdgePart(far_edge, np.array([0, 1, 4, 4]), sources, edge_ids, {}, {})},
    )
    local = LocalGraph(PartStore(Path("in memory"), manifest, {1: part}, {}, {}))
    asked = np.array([far + 1, far + 2, far])
    with serving(local) as server, client_of(server.endpoint) as client:
        for graph in (local, client):
            (sample,) = graph.sample_hops([HopRequest(HOMO_EDGE, asked, -1, 0, key=1, with_edge=True)])
            assert sample.counts.tolist() == [3, 0, 1] and sample.src.tolist() == [5, far + 2, 2**31, far]
            assert sample.edge is not None and sample.edge.tolist() == [far_edge + k for k in (1, 2, 3, 0)]
            found = rows_of(graph, sample.edge, ["orig_id"], HOMO_EDGE)["orig_id"]
            assert found.tolist() == [2**41, 8, 9, 7]
            assert rows_of(graph, asked, ["orig_id"])["orig_id"].tolist() == [2**32, 2**34, 10]


def test_the_answer_to_a_small_request_is_bounded_before_sampling() -> None:
    # The answer to a request of a few hundred bytes could take gigabytes.
    edge_index, num_nodes = random_graph(5, 300, 3000)
    graph = LocalGraph(store_of(edge_index, num_nodes, 1))
    nodes = np.repeat(np.arange(300), 40)
    with serving(graph, max_answer=400_000) as server, client_of(server.endpoint) as client:
        for fanout, replaces in ((2**31 - 1, True), (-1, False)):
            with pytest.raises(ServiceError, match="the answer could take .* bytes, over the limit of 400000"):
                client.sample_hops([HopRequest(HOMO_EDGE, nodes, fanout, 0, 1, replace=replaces)])
