"""Tests that a graph server limits the work and memory of a request before they are spent."""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from partitions import random_graph, store_of
from service_kit import client_of, serving
from trainer.core.errors import ServiceError, WireError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.in_edges import InEdgesOf
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.requests import Gather
from trainer.sampler.rule_types import PPR, Walks
from trainer.sampler.rules import MOST_CHOSEN
from trainer.sampler.subgraph_sampler import BatchWork, SubgraphSampler
from trainer.sampler.types import HopRequest, HopSample, RowRequest, SampleSettings, SeedSet
from trainer.service import handlers
from trainer.service.handlers import BoundedGraph
from trainer.service.messages import BatchRequest, ClientName
from trainer.service.stream import SCRATCH, MessageReader
from trainer.wire.frames import SMALL
from waiting import wait_until

NODES = 300


class Counted(LocalGraph):
    """A graph that counts what it is asked to sample."""

    def __init__(self, graph: LocalGraph) -> None:
        super().__init__(graph.store)
        self.asked: list[int] = []

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        self.asked += [len(request.nodes) for request in requests]
        return super().sample_hops(requests)


@pytest.fixture(scope="module")
def graph() -> LocalGraph:
    edge_index, _ = random_graph(5, NODES, 30_000)
    weights = {"w": np.random.default_rng(1).random(edge_index.shape[1]).astype(np.float32)}
    attrs = {"x": np.ones((NODES, 4), np.float32), "nothing": np.ones((NODES, 0), np.float32)}
    return LocalGraph(store_of(edge_index, NODES, 2, attrs=attrs, edge_attrs=weights))


def test_a_few_bytes_do_not_allocate_what_they_announce() -> None:
    size = 64 << 20
    for head in (struct.pack("<IQ", 1, size), struct.pack("<IQQ", 2, 100, size - 100) + bytes(100)):
        reader = MessageReader(size)
        tracemalloc.start()
        reader.read(_source(head))
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 4 * SCRATCH
    sent = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8).tobytes()
    reader = MessageReader(size)
    data = struct.pack("<IQQ", 2, 200_000, len(sent)) + sent[:200_000] + sent
    source = _source(data)
    while not reader.messages:
        reader.read(source)
    (message,) = reader.messages
    assert [bytes(frame) for frame in message.frames] == [sent[:200_000], sent]


def test_many_small_frames_are_refused_before_they_are_read() -> None:
    # Of a message, arrays of so few bytes are in the first frame. A frame of one byte takes a hundred.
    reader = MessageReader(1 << 20)
    with pytest.raises(WireError, match="a frame after the first has 1 bytes"):
        reader.read(_source(struct.pack("<I3Q", 3, 100, SMALL + 1, 1)))


def _source(data: bytes) -> Any:
    rest = memoryview(data)

    def receive(target: memoryview) -> int:
        nonlocal rest
        count = min(len(rest), len(target), 77_777)
        target[:count] = rest[:count]
        rest = rest[count:]
        return count

    return receive


def test_many_records_about_the_same_nodes_are_refused_at_once(graph: LocalGraph) -> None:
    counted = Counted(graph)
    nodes = np.zeros(1 << 20, np.int64)
    with serving(counted) as server, client_of(server.endpoint, 60.0) as client:
        for more in ({}, {"exclude": (nodes, nodes)}, {"sources": nodes}):
            asked = HopRequest(HOMO_EDGE, nodes[:1], 0, 0, 1, **more)
            asked = asked if more else HopRequest(HOMO_EDGE, nodes, 0, 0, 1)
            with pytest.raises(ServiceError, match="ask for fewer"):
                client.sample_hops([asked] * 2000)
        with pytest.raises(ServiceError, match="could take .* over the limit"):  # the answer is large without any edge
            client.sample_hops([HopRequest(HOMO_EDGE, nodes, 0, 0, 1)] * 30)
        with pytest.raises(ServiceError, match="ask for fewer"):  # rows without values
            client._submit(Gather([RowRequest(HOMO_NODE, nodes, ("nothing",) * 100)])).result()
        with pytest.raises(ServiceError, match="ask for fewer"):  # nothing of many nodes, again and again
            client._submit(Gather([RowRequest(HOMO_NODE, nodes, ())] * 100)).result()
        with pytest.raises(ServiceError, match="fewer pairs"):
            client.has_edges(HOMO_EDGE, *[np.zeros(6 << 20, np.int64)] * 2)
    assert counted.asked == []


def test_a_batch_is_refused_before_it_is_sampled(graph: LocalGraph) -> None:
    counted = Counted(graph)
    seeds = SeedSet({HOMO_NODE: np.arange(1000) % NODES})
    with (
        serving(counted, routed=DistGraph(counted, {}), max_answer=2 << 20) as server,
        client_of(server.endpoint, 60.0, route=True) as client,
    ):
        for fanouts, replaces in (((-1,), False), ((2**31 - 1,), True), ((5000, 5000), True)):
            settings = SampleSettings({HOMO_EDGE: fanouts}, replace=replaces, disjoint=True, edge_ids=True)
            with pytest.raises(ServiceError, match="could take .* over the limit of 2097152"):
                client.submit(BatchRequest(BatchWork(settings, seeds, 1, {}), ClientName(1, "a"))).result()
        assert counted.asked == []
        work = BatchWork(SampleSettings({HOMO_EDGE: (5, 2)}), seeds, 1, {})
        assert client.ask(BatchRequest(work, ClientName(1, "a"))).subgraph.num_hops == 2


@pytest.mark.parametrize("edge_ids", [False, True])
@pytest.mark.parametrize("disjoint", [False, True])
def test_a_batch_counts_what_it_takes(graph: LocalGraph, disjoint: bool, edge_ids: bool, monkeypatch: Any) -> None:
    counted: list[BoundedGraph] = []

    class Watched(BoundedGraph):
        def __init__(self, *args: Any):
            super().__init__(*args)
            counted.append(self)

    monkeypatch.setattr(handlers, "BoundedGraph", Watched)
    settings = SampleSettings({HOMO_EDGE: (50, 40)}, replace=True, disjoint=disjoint, edge_ids=edge_ids)
    work = BatchWork(settings, SeedSet({HOMO_NODE: np.arange(60)}), 1, {})
    with (
        serving(graph, routed=DistGraph(graph, {})) as server,
        client_of(server.endpoint, 60.0, route=True) as client,
    ):
        for _ in range(2):  # the first batch prepares tables, too
            tracemalloc.start()
            try:
                client.ask(BatchRequest(work, ClientName(1, "a")))
                (_, peak), used = tracemalloc.get_traced_memory(), counted[-1]._used
            finally:
                tracemalloc.stop()
    assert 0.7 < peak / used < 1.3


def test_conditions_do_not_hide_work(graph: LocalGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    # A draw by weight looks at all edges of a node, however small the fanout is.
    counted, nodes = Counted(graph), np.arange(NODES)
    monkeypatch.setattr(handlers, "MAX_LOOKS", 20_000)
    bounded = BoundedGraph(counted, counted, 1 << 30, lambda: True)
    with pytest.raises(ServiceError, match="the nodes have 30000 edges, over the limit of 20000"):
        bounded.sample_hops([HopRequest(HOMO_EDGE, nodes, 1, 0, 1, weight="w")])
    assert counted.asked == []
    with pytest.raises(ServiceError, match="looks at more than 20000 edges"):
        BoundedGraph(counted, counted, 1 << 30, lambda: True).has_edges(HOMO_EDGE, nodes, nodes)
    some = np.repeat(nodes[:50], 100)
    found = BoundedGraph(counted, counted, 1 << 30, lambda: True).has_edges(HOMO_EDGE, nodes[some], some)
    np.testing.assert_array_equal(found, graph.has_edges(HOMO_EDGE, nodes[some], some))
    bounded = BoundedGraph(counted, counted, 1 << 30, lambda: True)
    assert bounded.sample_hops([HopRequest(HOMO_EDGE, nodes[:100], 1, 0, 1)])[0].counts.sum() == 100


def test_excluded_edges_do_not_hide_work(graph: LocalGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    # They are sorted again for each hop, and for each few seeds of a rule.
    monkeypatch.setattr(handlers, "MAX_LOOKS", 20_000)
    counted, schema = Counted(graph), graph.store.manifest
    pairs = np.ones(1000, np.int64), np.arange(1000) % NODES
    seeds = SeedSet({HOMO_NODE: np.array([0])}, exclude={HOMO_EDGE: pairs})
    for settings in (
        SampleSettings({HOMO_EDGE: (1, 2, 3)}),
        SampleSettings({HOMO_EDGE: (1, 1)}, rule=PPR(eps=1e-5)),
    ):
        bounded = BoundedGraph(DistGraph(counted, {}), counted, 1 << 30, lambda: True)
        sampler = SubgraphSampler(bounded, schema, settings, {}, in_edges=InEdgesOf(graph.store))
        with pytest.raises(ServiceError, match="looks at more than 20000 edges"):
            sampler.subgraph(seeds, 1)
    assert len(counted.asked) <= 1


@pytest.fixture(scope="module")
def sparse() -> LocalGraph:
    return LocalGraph(store_of(random_graph(5, NODES, 2 * NODES)[0], NODES, 2))


def test_neighbours_that_a_rule_chooses_count(sparse: LocalGraph) -> None:
    schema, seeds = sparse.store.manifest, SeedSet({HOMO_NODE: np.arange(2000) % NODES})
    for rule in (PPR(eps=0.01), Walks(num_walks=2, length=2)):
        settings = SampleSettings({HOMO_EDGE: (MOST_CHOSEN,)}, rule=rule)
        for limit, refused in ((100_000, True), (1 << 30, False)):
            bounded = BoundedGraph(DistGraph(sparse, {}), sparse, limit, lambda: True)
            sampler = SubgraphSampler(bounded, schema, settings, {}, in_edges=InEdgesOf(sparse.store))
            tracemalloc.start()
            try:
                with pytest.raises(ServiceError, match="over the limit") if refused else nullcontext():
                    found = sampler.subgraph(seeds, 1)
                    assert 2000 < len(found.edges[HOMO_EDGE].src) < 2000 * 250
                assert tracemalloc.get_traced_memory()[1] < 2000 * MOST_CHOSEN * 8  # no table of seeds and neighbours
            finally:
                tracemalloc.stop()


def test_a_request_that_fails_does_not_mix_up_the_nodes_of_later_ones(sparse: LocalGraph) -> None:
    # Rows of in-edges are kept for all requests of a server. The connection of one is closed while it numbers nodes.
    class Access(DistGraph):
        fails = True

        def gather(self, requests: Sequence[RowRequest]) -> Any:
            if self.fails:
                raise ServiceError("the connection was closed")
            return super().gather(requests)

    access = Access(sparse, {})
    part = replace(sparse.store, parts={0: sparse.store.parts[0]})  # as on one of two hosts

    def sampler() -> SubgraphSampler:
        settings = SampleSettings({HOMO_EDGE: (20,)}, rule=PPR(eps=0.01))
        return SubgraphSampler(access, sparse.store.manifest, settings, {}, in_edges=InEdgesOf(part))

    kept, seeds = sampler(), SeedSet({HOMO_NODE: np.arange(5)})
    with pytest.raises(ServiceError, match="closed"):
        kept.subgraph(SeedSet({HOMO_NODE: np.arange(50, 150)}), 1)
    Access.fails = False
    expected, found = sampler().subgraph(seeds, 1), kept.subgraph(seeds, 1)
    np.testing.assert_array_equal(found.nodes[HOMO_NODE].ids, expected.nodes[HOMO_NODE].ids)
    np.testing.assert_array_equal(found.edges[HOMO_EDGE].src, expected.edges[HOMO_EDGE].src)


@pytest.mark.parametrize("more", [{}, {"weight": "w"}, {"with_edge": True}, {"sources": np.arange(0, NODES, 2)}])
def test_pieces_give_the_same_sample(graph: LocalGraph, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(graph)
    request = HopRequest(HOMO_EDGE, np.random.default_rng(3).integers(0, NODES, 500), -1, 3, 9, **more)
    monkeypatch.setattr(handlers, "_PIECE_NODES", 64)
    monkeypatch.setattr(handlers, "_PIECE_LOOKS", 1024)
    (sample,) = BoundedGraph(counted, counted, 1 << 30, lambda: True).sample_hops([request])
    assert len(counted.asked) > 5 and sum(counted.asked) == 500
    (expected,) = graph.sample_hops([request])
    np.testing.assert_array_equal(sample.counts, expected.counts)
    np.testing.assert_array_equal(sample.src, expected.src)
    assert (sample.edge is None) == (expected.edge is None)
    if expected.edge is not None:
        np.testing.assert_array_equal(sample.edge, expected.edge)


def test_work_for_a_closed_connection_ends(graph: LocalGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_PIECE_NODES", 64)
    begun, closed = threading.Event(), threading.Event()

    class Slow(Counted):
        def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
            begun.set()
            assert closed.wait(60)
            return super().sample_hops(requests)

    slow = Slow(graph)
    with serving(slow, threads=1) as server:
        with client_of(server.endpoint, 60.0) as client:
            asked = HopRequest(HOMO_EDGE, np.zeros(6400, np.int64), -1, 0, 1)
            asking = threading.Thread(target=lambda: pytest.raises(ServiceError, client.sample_hops, [asked]))
            asking.start()
            assert begun.wait(60)
        asking.join(60)
        network = server._network
        wait_until(lambda: not network._by_peer, 60)
        closed.set()
        with client_of(server.endpoint, 60.0) as client:  # served by the only thread
            assert client.gather([RowRequest(HOMO_NODE, np.arange(3), ("x",))])[0]["x"].shape == (3, 4)
    assert len(slow.asked) == 1


def test_no_free_descriptor_does_not_make_the_server_spin(graph: LocalGraph) -> None:
    class Exhausted:
        """A listener that finds no free file descriptor."""

        calls = 0

        def __init__(self, listener: Any) -> None:
            self.listener = listener

        def fileno(self) -> int:
            return int(self.listener.fileno())

        def accept(self) -> Any:
            Exhausted.calls += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with (
        serving(graph) as server,
        client_of(server.endpoint, 60.0) as before,
        client_of(server.endpoint, 60.0) as client,
    ):
        assert before.greet().result().node_rank == server._info.node_rank
        network = server._network
        listener, network._listener = network._listener, Exhausted(network._listener)  # type: ignore[assignment]
        pending = client.greet()
        wait_until(lambda: Exhausted.calls > 0, 60)
        seen, since = Exhausted.calls, time.monotonic()
        time.sleep(1.0)
        assert Exhausted.calls - seen <= 5 * (time.monotonic() - since)
        assert before.greet().result().node_rank == server._info.node_rank  # admitted connections are served
        network._listener = listener
        assert pending.result().node_rank == server._info.node_rank
