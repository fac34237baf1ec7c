"""Tests of splitting requests by host: an array that several requests share is split only once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cache_kit import ready
from partitions import typed_store
from requests_kit import PLAIN
from trainer.core.errors import ServiceError
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import HopSample, RowRequest, TimeBound

TYPES = [("a", f"r{k}", "b") for k in range(3)]


class Recorder:
    """A host that records its requests, and answers with zeros and no neighbours."""

    name = "recorder"

    def __init__(self, *part_ids):
        self.part_ids, self.asked = part_ids, []

    def submit(self, request):
        return ready(request.answer(self))

    def sample_hops(self, requests):
        self.asked.append(requests)
        return [HopSample(np.zeros(len(r.nodes), np.int32), np.empty(0, np.int32), None) for r in requests]

    def gather(self, requests):
        self.asked.append(requests)
        return [{name: np.zeros(len(r.ids), np.int64) for name in r.attrs} for r in requests]


def graph_of(*hosts):
    edges = dict.fromkeys(TYPES, np.empty((2, 0), np.int64))
    store = typed_store({"a": 12, "b": 12}, edges, 3, only=[0])  # global id v of b belongs to part v // 4
    return DistGraph(LocalGraph(store), dict(enumerate(hosts, 1)))


def test_shared_arrays_are_split_once_per_host() -> None:
    hosts = Recorder(1), Recorder(2)
    nodes, trees, sources = np.array([1, 5, 9, 6, 10, 2]), np.arange(6), np.arange(12)
    bound = TimeBound(np.arange(6) * 10, "t", "node")
    exclude = np.array([9, 1, 10]), np.array([3, 4, 5])
    asked = [
        replace(PLAIN, edge_type=of, nodes=nodes, trees=trees, bound=bound, exclude=exclude, sources=sources)
        for of in TYPES
    ]
    graph = graph_of(*hosts)
    graph.local.sample_hops = hosts[0].sample_hops  # no part has such times
    assert [sample.counts.tolist() for sample in graph.sample_hops(asked)] == [[0] * 6] * 3
    (ours, theirs), (others,) = hosts[0].asked[::-1], hosts[1].asked
    assert [request.nodes.tolist() for request in (ours[0], theirs[0], others[0])] == [[1, 2], [5, 6], [9, 10]]
    for requests in (ours, theirs, others):
        for read in (lambda r: r.nodes, lambda r: r.trees, lambda r: r.bound.times, lambda r: r.sources):
            assert len({id(read(request)) for request in requests}) == 1
    assert others[0].trees.tolist() == [2, 4] and others[0].bound.times.tolist() == [20, 40]
    assert theirs[0].exclude is None
    assert [array.tolist() for array in others[0].exclude] == [[9, 10], [3, 5]]
    assert others[0].exclude[1] is others[2].exclude[1] and others[0].sources is sources


def test_rows_of_one_owner_are_not_copied() -> None:
    host = Recorder(1, 2)
    nodes = np.array([5, 9, 5])
    graph = graph_of(host)
    rows = graph.gather([RowRequest("b", nodes, ("orig_id",)), RowRequest("a", nodes, ("in_degree", "orig_id"))])
    ((first, second),) = host.asked
    assert first.ids is second.ids is nodes
    assert [list(columns) for columns in rows] == [["orig_id"], ["in_degree", "orig_id"]]


def test_one_array_for_two_types_is_split_by_each() -> None:
    host, nodes = Recorder(2), np.array([4, 8])
    store = typed_store({"a": 9, "b": 18}, {}, 3, only=[0, 1])  # part 2 begins at id 6 of a and at id 12 of b
    graph = DistGraph(LocalGraph(store), {1: host})
    rows = graph.gather([RowRequest("a", nodes, ("orig_id",)), RowRequest("b", nodes, ("orig_id",))])
    ((only,),) = host.asked
    assert (only.of, only.ids.tolist()) == ("a", [8])
    assert rows[1]["orig_id"].tolist() == [12, 7]


def test_neighbours_that_are_no_nodes_are_refused() -> None:
    # Their positions would be written beside the table of the sampler.
    class Damaged(Recorder):
        def sample_hops(self, requests):
            return [HopSample(np.ones(len(r.nodes), np.int32), np.full(len(r.nodes), 1 << 30), None) for r in requests]

    graph = graph_of(Damaged(1, 2))
    request = replace(PLAIN, edge_type=TYPES[0], nodes=np.arange(graph.books["b"].size))
    with pytest.raises(ServiceError, match=r"recorder: sent neighbours by .* that are no 'a' nodes"):
        graph.sample_hops([request])
