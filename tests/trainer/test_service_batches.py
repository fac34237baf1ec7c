"""Tests of a server that samples whole batches: equal to local sampling, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from load_kit import homo_data, parts_of
from raw_peer import RawPeer
from service_kit import client_of, rows_of, serving
from test_batches import HOMO, ME, flat, sample, stored
from trainer.core.batch_cost import Cost
from trainer.core.errors import ServiceError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.requests import Endpoints, Gather, SampleHops
from trainer.sampler.types import HopRequest, RowRequest
from trainer.service import client as pieces
from trainer.service import messages
from trainer.service.client import HostClient
from trainer.service.messages import BatchRequest, ClientName, ServerAddress, SharedSlice
from trainer.wire.frames import Flag, Kind, Message, Status, decode, encode
from waiting import stretched, wait_until

WORK = HOMO["attributes and labels"]


@pytest.fixture(scope="module")
def graph():
    return parts_of(homo_data(), 3)


@contextlib.contextmanager
def batch_server(graph, **options):
    with serving(graph.access.local, routed=graph.access, **options) as server:
        yield server


@pytest.fixture
def server(graph):
    with batch_server(graph) as server:
        yield server


def peer_of(server):
    # a raw connection acknowledges no batch
    return RawPeer(server.endpoint)


def ask(peer, request_id, work=WORK, client=ME):
    peer.send(*encode(BatchRequest(work, client).message(), request_id=request_id))


def answer_of(peer, seconds=30.0, kind=Kind.BATCH):
    until = time.monotonic() + seconds
    while parts := peer.receive(max(0, until - time.monotonic())):
        message = decode(parts)
        if message.kind == kind:
            return message
    raise AssertionError("no answer")


def same_batch(there, here) -> bool:
    return flat(dataclasses.replace(there, cost=Cost())) == flat(dataclasses.replace(here, cost=Cost()))


@pytest.mark.parametrize("name", HOMO)
def test_batches_equal_those_sampled_here(graph, server, name: str) -> None:
    with client_of(server.endpoint, route=True) as client:
        there = client.ask(BatchRequest(HOMO[name], ME))
    assert same_batch(there, sample(graph, HOMO[name]))
    assert all(array.flags.writeable for rows in there.rows.values() for array in rows.values())


def test_batches_are_acknowledged_and_counted(server) -> None:
    with client_of(server.endpoint, route=True) as client:
        for _ in range(5):
            client.ask(BatchRequest(WORK, ME))
        wait_until(lambda: server._scheduler.status().buffer_bytes == 0)
    (shown,) = server._scheduler.status().clients
    assert (shown.name, shown.batches) == (ME.name, 5) and shown.bytes > 5 * 1000


def test_an_invalid_batch_request_is_an_error_and_the_connection_stays_usable(graph, server) -> None:
    seeds = dataclasses.replace(WORK.seeds, nodes={HOMO_NODE: np.array([5, 10**9])})
    negative = dataclasses.replace(WORK.seeds, nodes={HOMO_NODE: np.array([-1])})
    wrong = {
        "seed 1000000000 at position 1": dataclasses.replace(WORK, seeds=seeds, labels=("", ())),
        "seed -1 at position 0": dataclasses.replace(WORK, seeds=negative),
        "no attribute 'nothing'": dataclasses.replace(WORK, attrs={HOMO_NODE: ("nothing",)}),
        "no edge type has the weight attribute": dataclasses.replace(
            WORK, settings=dataclasses.replace(WORK.settings, weight="nothing")
        ),
    }
    with client_of(server.endpoint, route=True) as client:
        for cause, work in wrong.items():
            with pytest.raises(ServiceError, match=f"batch failed: .*{cause}"):
                client.ask(BatchRequest(work, ME))
        assert same_batch(client.ask(BatchRequest(WORK, ME)), sample(graph, WORK))
    assert server.stats().errors == 4


def test_giant_fanouts_and_batches_are_refused_before_allocation(graph, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 30)  # request all rows in one piece
    giant = dataclasses.replace(
        WORK.settings, fanouts={HOMO_EDGE: (2**31 - 1, 2**31 - 1)}, replace=True, edge_ids=False
    )
    with batch_server(graph, max_answer=1 << 20) as server, client_of(server.endpoint, route=True) as client:
        with pytest.raises(ServiceError, match="could take .* over the limit of 1048576; make batches"):
            client.ask(BatchRequest(dataclasses.replace(WORK, settings=giant), ME))
        many = dataclasses.replace(giant, fanouts={HOMO_EDGE: (60_000,)})
        with pytest.raises(ServiceError, match="could take .* over the limit of 1048576; make batches"):
            client.ask(BatchRequest(dataclasses.replace(WORK, settings=many), ME))
        with pytest.raises(ServiceError, match="the answer takes 1600000 bytes, over the limit of 1048576"):
            rows_of(client, np.zeros(100_000, np.int64))
        assert len(rows_of(client, np.arange(5))["x"]) == 5


def test_a_client_without_parts_is_answered_for_the_whole_graph(graph) -> None:
    first, rest = parts_of(homo_data(), 3, only=[0]), parts_of(homo_data(), 3, only=[1, 2])
    nodes = np.arange(60)
    hop = HopRequest(HOMO_EDGE, nodes, 3, 0, 5, with_edge=True)
    with serving(rest.access.local) as other, client_of(other.endpoint, parts=(1, 2)) as between:
        with serving(first.access.local, routed=type(first.access)(first.access.local, {1: between})) as server:
            with client_of(server.endpoint, route=True) as client:
                np.testing.assert_array_equal(rows_of(client, nodes)["x"], rows_of(graph.access, nodes)["x"])
                (there,), (here,) = client.sample_hops([hop]), graph.access.sample_hops([hop])
                np.testing.assert_array_equal(there.src, here.src)
                np.testing.assert_array_equal(there.edge, here.edge)
                ends = graph.access.endpoints(HOMO_EDGE, np.arange(graph.manifest.edges[HOMO_EDGE].num_edges))
                assert client.has_edges(HOMO_EDGE, *(graph.store.to_global(HOMO_NODE, side) for side in ends)).all()
                assert same_batch(client.ask(BatchRequest(WORK, ME)), sample(graph, WORK))
            with client_of(server.endpoint) as client, pytest.raises(ServiceError, match=r"holds parts \[0\]"):
                rows_of(client, nodes)


def test_shared_arrays_and_ids(graph, server) -> None:
    seeds = graph.store.seeds(HOMO_NODE, "train")
    with client_of(server.endpoint) as client:
        there = client.ask(SharedSlice(HOMO_NODE, "train", 3, len(seeds) - 3))
        np.testing.assert_array_equal(there, seeds[3:])
        ids = np.array([7, 0, 59])
        found = client.ask(messages.ToGlobal(HOMO_NODE, ids))
        np.testing.assert_array_equal(found, graph.store.to_global(HOMO_NODE, ids))
        assert found.dtype == np.int64
        for asked, cause in (
            (SharedSlice(HOMO_NODE, "train", 0, 10**6), "39 rows, but 1000000 rows from row 0 on were requested"),
            (SharedSlice(HOMO_NODE, "none", 0, 1), "no split 'none'"),
            (SharedSlice(None, "none", 0, 1), "no attribute 'none' of the graph"),
        ):
            with pytest.raises(ServiceError, match=cause):
                client.ask(asked)
        for of, wrong, cause in (
            (HOMO_NODE, [60], "valid ids are 0 to 59"), (HOMO_NODE, [-1], "valid ids are"), ("x", [0], "no node type"),
        ):  # fmt: skip
            with pytest.raises(ServiceError, match=cause):
                client.ask(messages.ToGlobal(of, np.array(wrong)))


def test_hello_lists_all_servers(graph) -> None:
    places = (
        ServerAddress("node1 (a)", 1, "a", "tcp://10.0.0.1:5", (0, 1)),
        ServerAddress("node2", 2, "b", "tcp://b:5", ()),
    )
    with serving(graph.access.local, topology=lambda: (7, places)) as server, client_of(server.endpoint) as client:
        info = client.greet().result()
    assert (info.version, info.servers) == (7, places)


def test_a_server_without_the_whole_graph_refuses_batches(graph) -> None:
    with serving(graph.access.local) as server, client_of(server.endpoint, route=True) as client:
        with pytest.raises(ServiceError, match="only its own parts"):
            client.ask(BatchRequest(WORK, ME))


def test_clients_with_open_batches_get_signs_of_life(server) -> None:
    with peer_of(server) as peer:
        ask(peer, 1)
        assert answer_of(peer).request_id == 1
        sign = answer_of(peer, kind=Kind.ALIVE)
        assert (sign.status, sign.request_id) == (Status.OK, 0)
        peer.send(*encode(messages.acknowledgement(1)))
        wait_until(lambda: server._scheduler.status().buffer_bytes == 0)
        while peer.receive(0.1):
            pass
        assert not peer.receive(1.5)


def test_batches_of_a_disconnected_client_are_freed_within_seconds(server) -> None:
    with peer_of(server) as peer:
        for number in range(10):
            ask(peer, number, client=ClientName(9, "leaver"))
        wait_until(lambda: server._scheduler.status().batches > 0)
    wait_until(lambda: server._scheduler.status().buffer_bytes == 0 and server._scheduler.status().queue == 0, 4)
    with client_of(server.endpoint, route=True) as client:
        client.ask(BatchRequest(WORK, ME))
    assert server.running


def test_clients_that_acknowledge_nothing_block_no_other_and_the_buffer_is_bounded(graph) -> None:
    asked = BatchRequest(WORK, ME)
    one = sum(map(len, encode(asked.reply(asked.message(), sample(graph, WORK), stored))))
    highest = 0
    with batch_server(graph, buffer_bytes=10 * one) as server, contextlib.ExitStack() as peers:
        hogs = [peers.enter_context(peer_of(server)) for _ in range(20)]
        with client_of(server.endpoint, route=True) as client:
            client.ask(BatchRequest(WORK, ME))
            for number, hog in enumerate(hogs):
                ask(hog, number, client=ClientName(9, "hog"))
            for _ in range(50):
                assert same_batch(client.ask(BatchRequest(WORK, ME)), sample(graph, WORK))
                highest = max(highest, server._scheduler.status().buffer_bytes)
        hog = next(shown for shown in server._scheduler.status().clients if shown.name == "hog")
        assert hog.queue and 2 * one < hog.buffer_bytes <= 5.5 * one
    assert highest <= 10 * one


def test_twenty_clients_at_once_have_equal_shares(graph) -> None:
    # One client in four keeps four times as many batches in flight.
    done, stop = dict.fromkeys(range(20), 0), threading.Event()

    def work(number: int) -> None:
        client, name = HostClient(place, 60.0, route=True), ClientName(number, f"client{number}")
        under_way = deque(client.submit(BatchRequest(WORK, name)) for _ in range(12 if number % 4 == 0 else 3))
        while not stop.is_set():
            under_way.popleft().result()
            done[number] += 1
            under_way.append(client.submit(BatchRequest(WORK, name)))
        for batch in under_way:
            batch.result()
        client.close()

    with batch_server(graph, batch_threads=1) as server, ThreadPoolExecutor(20) as pool:
        place = ServerAddress("node1", 1, "h", server.endpoint, (0, 1, 2))
        running = [pool.submit(work, number) for number in range(20)]
        wait_until(lambda: min(done.values()) > 0)
        before = dict(done)  # the client that started first had the server to itself
        wait_until(lambda: sum(done.values()) > sum(before.values()) + 400)
        got = {number: done[number] - before[number] for number in done}
        stop.set()
        for one in running:
            one.result(60)
    mean = sum(got.values()) / 20
    assert all(abs(count - mean) < 0.5 * mean for count in got.values()), got


def invalid_messages() -> list[list[bytes]]:
    return [
        encode(messages.alive()), encode(messages.acknowledgement(4711)), encode(Message(Kind.ACK, Status.OK, 1)),
        encode(Message(Kind.ALIVE, Status.REQUEST, 1)), encode(Message(Kind.BATCH, Status.OK, 1)),
        encode(Message(Kind.GATHER, Status.ERROR, 1)), encode(messages.acknowledgement(1))[:1] + [b""] * 5000,
        encode(Message(Kind.ACK, Status.REQUEST, 1, (np.arange(9),))), [b""] * 3, [b"GNFS"],
    ]  # fmt: skip


def requests_that_fail() -> list[Message]:
    arrays = tuple(np.arange(3) for _ in range(4096))
    return [
        Message(Kind.BATCH, Status.REQUEST, 1), Message(Kind.BATCH, Status.REQUEST, 1, arrays, bytes(999)),
        *(Message(kind, Status.REQUEST, 1, arrays, b"\xff" * 64, flags)
          for kind in Kind if kind not in (Kind.ACK, Kind.ALIVE, Kind.HELLO, Kind.STATS, Kind.MANIFEST)
          for flags in (Flag.NONE, Flag.ROUTE, Flag.ROUTE | Flag.INT8)),
        SampleHops([HopRequest(HOMO_EDGE, np.array([2**40, -5]), 2**31 - 1, 0, 1)]).message(),
        Gather([RowRequest(HOMO_NODE, np.array([-1]), ("x",))]).message(),
        Endpoints(HOMO_EDGE, np.array([2**60, -5])).message(),
    ]  # fmt: skip


def test_hostile_messages_do_not_stop_the_server(graph, server) -> None:
    wrong, failing = invalid_messages(), list(map(encode, requests_that_fail()))
    harmless = encode(messages.acknowledgement(4711))
    with client_of(server.endpoint, route=True) as client:
        for parts in wrong:
            with peer_of(server) as peer:
                peer.send(*parts)
                assert parts == harmless or peer.hung_up(30)
        with peer_of(server) as peer:
            for parts in failing:
                peer.send(*parts)
                while Kind.ALIVE == (answer := decode(peer.receive(60))).kind:
                    pass
                assert answer.status == Status.ERROR
        assert same_batch(client.ask(BatchRequest(WORK, ME)), sample(graph, WORK))
        assert server.stats().errors == len(failing)
        assert server.stats().malformed == len(wrong) - 1
    assert server.running


def test_a_request_that_is_too_large_is_refused_at_once(graph, monkeypatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 30)
    many = np.zeros(50_000, np.int64)
    with batch_server(graph, max_request=100_000) as server, client_of(server.endpoint, route=True) as client:
        start = time.monotonic()
        with pytest.raises(ServiceError, match=r"gather failed: the request takes 200\d\d\d bytes, over 100000"):
            rows_of(client, many)
        with pytest.raises(ServiceError, match="has_edges failed: the request takes"):
            client.has_edges(HOMO_EDGE, many, many)
        assert time.monotonic() - start < stretched(30) and len(rows_of(client, many[:9])["x"]) == 9


def test_the_stats_file_has_load_clients_and_peers(graph, tmp_path) -> None:
    path, peers = tmp_path / "stats.json", [{"name": "node2 (b)", "state": "down"}]
    with batch_server(graph, stats_file=path, peers=lambda: peers) as server:
        with client_of(server.endpoint, route=True) as client:
            for _ in range(20):
                client.ask(BatchRequest(WORK, ME))
            wait_until(lambda: path.exists() and json.loads(path.read_text())["batches"] == 20)
    shown = json.loads(path.read_text())
    assert set(shown) == {
        "time", "endpoint", "node_rank", "parts", "uptime_s", "busy", "requests", "errors", "malformed", "refused",
        "bytes_in", "bytes_out", "bytes_in_s", "bytes_out_s", "batches", "batches_s", "queue", "buffer_bytes",
        "buffer_limit", "memory", "clients", "peers",
    }  # fmt: skip
    assert shown["requests"] >= 20 and shown["batches_s"] > 0 and 0 < shown["busy"] <= 1
    assert shown["memory"] > 10**7 and shown["peers"] == peers and shown["clients"][0]["name"] == ME.name
