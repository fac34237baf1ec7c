"""Tests of the graph service: answers equal those of direct calls, and every failure gives an error by the deadline."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from raw_peer import PING, RawPeer, framed
from service_kit import (
    INFO,
    ArithmeticGraph,
    assert_same_sample,
    client_of,
    free_endpoint,
    new_keys,
    place_of,
    rows_of,
    server_process,
    serving,
)
from trainer.core.errors import ServiceError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.requests import Gather, SampleHops
from trainer.sampler.types import HopRequest, RowRequest
from trainer.service import client as pieces
from trainer.service import network_thread
from trainer.service import server as server_module
from trainer.service.client import HostClient
from trainer.service.messages import Hello, Stats
from trainer.service.stats import resident_bytes
from trainer.service.stream import MAX_FRAMES
from trainer.wire.frames import Kind, Message, Status, decode, encode
from waiting import DEADLINE, stretched, wait_until

NODES = np.array([5, 0, 17, 5, 900], np.int64)


def request_of(nodes=NODES, fanout=7, key=3, **options) -> HopRequest:
    return HopRequest(HOMO_EDGE, nodes, fanout, 2, key, **options)


def one_hop(graph, request: HopRequest):
    return graph.sample_hops([request])[0]


def submit_rows(client, nodes, attr="x"):
    return client.submit(Gather([RowRequest(HOMO_NODE, nodes, (attr,))]))


@pytest.fixture
def server():
    with serving() as server:
        yield server


@pytest.fixture
def client(server):
    with client_of(server.endpoint) as client:
        yield client


def test_answers_equal_direct_calls(client) -> None:
    graph = ArithmeticGraph()
    for request in (request_of(), request_of(with_edge=True), request_of(NODES[:0]), request_of(NODES + 2**40)):
        assert_same_sample(one_hop(client, request), one_hop(graph, request))
    rows = rows_of(client, NODES)["x"]
    np.testing.assert_array_equal(rows, rows_of(graph, NODES)["x"])
    assert rows.dtype == np.float32
    assert client.greet().result() == INFO


def test_several_threads_with_several_requests_in_flight(server, client) -> None:
    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            asked = [request_of(rng.integers(0, 10**6, rng.integers(1, 3000)), with_edge=True) for _ in range(4)]
            pending = [client.submit(SampleHops([request])) for request in asked]
            rows = submit_rows(client, asked[0].nodes)
            for request, answer in reversed(list(zip(asked, pending, strict=True))):
                assert_same_sample(answer.result()[0], one_hop(ArithmeticGraph(), request))
            np.testing.assert_array_equal(rows.result()[0]["x"][:, 0], asked[0].nodes)
        return seed

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [0, 1, 2, 3]
    stats = client.ask(Stats())
    assert stats.requests == 4 * 40 * 5 and stats.errors == stats.malformed == 0
    assert 0 < client.bytes_received - stats.bytes_out < 2000  # the answer to stats itself
    assert stats.seconds["sample"] > 0


def test_another_thread_may_await_an_answer(client) -> None:
    pending = [submit_rows(client, np.array([k])) for k in range(20)]
    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda one: one.result()[0]["x"][0, 0], pending))
    assert found == list(range(20))


def test_connections_of_ended_threads_are_reused(client) -> None:
    for _ in range(5):
        thread = threading.Thread(target=lambda: client.greet().result())
        thread.start()
        thread.join(10)
    assert len(client._channels) == 1


def test_hundreds_of_connections(server) -> None:
    # 64 hosts with several threads each need more than 1024 open files.
    clients = [HostClient(place_of(server.endpoint, rank, "h", [1]), 20.0) for rank in range(30)]
    together = threading.Barrier(12, timeout=20)

    def ask_all() -> int:
        together.wait()
        found = sum(client.greet().result() == INFO for client in clients)
        together.wait()  # all threads are alive here, so none takes over another's connection
        return found

    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask_all) for _ in range(12)]
        assert [answer.result(30) for answer in answers] == [30] * 12
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("attr", "cause"),
    [("raises", "ValueError: row 7 is broken"), ("objects", "dtype object cannot be sent"), ("y", "no node attribute")],
)
def test_a_failing_handler_answers_at_once_and_the_server_lives(client, attr: str, cause: str) -> None:
    start = time.monotonic()
    with pytest.raises(ServiceError, match=rf"node1 \(10.0.0.2\) at tcp://.*, parts 1,3: gather failed: .*{cause}"):
        rows_of(client, NODES, [attr])
    assert time.monotonic() - start < stretched(4)  # the client's deadline is 5 s
    assert client.greet().result() == INFO and client.ask(Stats()).errors == 1


def test_a_slow_request_delays_no_other_and_misses_its_deadline(client) -> None:
    slow = submit_rows(client, NODES, "sleep4")
    start = time.monotonic()
    rows_of(client, NODES)
    client.deadline = 0.5
    with pytest.raises(ServiceError, match=r"no answer within [\d.]+ s to gather \(connected, but the server is slow"):
        slow.result()
    assert 0.45 < time.monotonic() - start < stretched(4)
    np.testing.assert_array_equal(slow.result(timeout=60)[0]["sleep4"], NODES)


def test_an_absent_server_is_an_error_at_the_deadline() -> None:
    with client_of(free_endpoint(), deadline=0.7) as client:
        start = time.monotonic()
        with pytest.raises(ServiceError, match=r"node1 \(10.0.0.2\) at tcp.*parts 1,3: .*[\d.]+ s to hello "
                                               r"\(no connection\).*see logs/server.log of node1"):  # fmt: skip
            client.greet().result()
        assert 0.65 < time.monotonic() - start < stretched(20)


def test_a_client_waits_for_a_server_that_starts_late() -> None:
    endpoint = free_endpoint()
    with client_of(endpoint, deadline=10) as client:
        pending = client.greet()
        time.sleep(0.5)
        with serving(endpoint=endpoint):
            assert pending.result() == INFO


def test_a_killed_server_is_named_by_the_deadline() -> None:
    endpoint = free_endpoint()
    with server_process(endpoint) as process, client_of(endpoint, deadline=1.5) as client:
        client.greet().result()
        pending = submit_rows(client, NODES, "sleep30")
        process.kill()
        start = time.monotonic()
        with pytest.raises(ServiceError, match=r"graph server of node1 \(10.0.0.2.*connection lost"):
            pending.result()
        assert 1.4 < time.monotonic() - start < stretched(20)


def test_a_restarted_server_answers_requests_in_flight() -> None:
    endpoint = free_endpoint()
    with client_of(endpoint, deadline=20) as client:
        with server_process(endpoint) as process:
            client.greet().result()
            pending = [submit_rows(client, NODES, "sleep1"), submit_rows(client, NODES, "x")]
            time.sleep(0.1)
            process.kill()
            process.wait(5)
        with server_process(endpoint):
            np.testing.assert_array_equal(pending[0].result()[0]["sleep1"], NODES)
            np.testing.assert_array_equal(pending[1].result()[0]["x"][:, 0], NODES)
            assert client.greet().result() == INFO


def test_connections_that_close_with_queued_requests_do_no_harm() -> None:
    # With libzmq, whose heartbeats met a full queue, such clients aborted the server, whether they read or not.
    endpoint = free_endpoint()
    request = Gather([RowRequest(HOMO_NODE, NODES, ("sleep0.01",))]).message()
    with server_process(endpoint) as process, client_of(endpoint, deadline=60) as client:
        for reads in (True, False):
            with contextlib.ExitStack() as closing:
                peers = [closing.enter_context(RawPeer(endpoint)) for _ in range(20)]
                for peer in peers:
                    peer.sock.sendall(framed([bytes(part) for part in encode(request)]) * 100)
                for number, peer in enumerate(peers if reads else ()):
                    assert peer.receive(DEADLINE), f"peer {number}; server: {process.poll()} {process.output}"
            for number in range(5):
                np.testing.assert_array_equal(rows_of(client, NODES + number)["x"][:, 0], NODES + number)
        assert process.poll() is None


def test_close_wakes_waiting_threads(client) -> None:
    failures: list[str] = []

    def wait() -> None:
        try:
            rows_of(client, NODES, ["sleep4"])
        except ServiceError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    client.close()
    for thread in threads:
        thread.join(30)
    assert time.monotonic() - start < stretched(3)
    assert len(failures) == 2 and all("was closed" in failure for failure in failures)
    with pytest.raises(ServiceError, match="was closed"):
        client.greet().result()


def test_too_large_an_answer_is_refused_with_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(pieces, "PIECE", 1 << 30)  # request all rows in one piece
    with serving(max_answer=100_000) as server, client_of(server.endpoint) as client:
        with pytest.raises(ServiceError, match="200000 bytes, over the limit of 100000; ask for fewer nodes"):
            rows_of(client, np.arange(25_000))
        assert len(rows_of(client, np.arange(10_000))["x"]) == 10_000


def test_malformed_messages_close_only_their_connection_and_are_counted(server, client) -> None:
    rng = random.Random(0)
    request = Gather([RowRequest(HOMO_NODE, np.arange(3000), ("x",))]).message()
    good = [bytes(part) for part in encode(request)]
    answered = 0
    for number in range(300):
        parts = list(good)
        victim = rng.randrange(2)
        cut = rng.randrange(len(parts[victim]))
        parts[victim] = parts[victim][:cut] + rng.randbytes(rng.randrange(1, 40))
        with RawPeer(server.endpoint) as peer:
            peer.send(*parts[: rng.randint(1, 2)], *[b""] * rng.randint(0, 2))
            answered += peer.receive(60) is not None  # a few mutants are still valid requests
        if number % 20 == 0:
            np.testing.assert_array_equal(rows_of(client, NODES)["x"][:, 0], NODES)
    assert answered < 10 and client.ask(Stats()).malformed == 300 - answered


def test_random_bytes_on_the_port_do_no_harm() -> None:
    junk = (b"GET / HTTP/1.0\r\n\r\n", random.Random(1).randbytes(5000), b"\xff" + bytes(8) + b"\x7f" * 500)
    with serving() as server, client_of(server.endpoint) as client:
        for words in junk:
            with RawPeer(server.endpoint, greets=False) as peer:
                peer.sock.sendall(words)
                assert peer.receive(60) is None and peer.hung_up(60)
        assert client.greet().result() == INFO
        assert client.ask(Stats()).refused == len(junk)


@pytest.mark.parametrize("sizes", [[2**64 - 1], [2**40, 1], [2**63, 2**63]])
def test_announced_sizes_take_no_memory(sizes: list[int]) -> None:
    with serving() as server, RawPeer(server.endpoint) as peer, client_of(server.endpoint) as client:
        before = resident_bytes()
        peer.sock.sendall(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes) + bytes(100_000))
        assert client.greet().result() == INFO
        assert resident_bytes() - before < 64 << 20


def test_a_request_over_the_limit_is_refused_and_the_connection_stays_open() -> None:
    with serving(max_request=100_000) as server, RawPeer(server.endpoint) as peer:
        head, body = encode(Message(Kind.GATHER, Status.REQUEST, 7, (np.zeros(200_000, np.uint8),)))
        peer.send(head, body)
        refused = decode(peer.receive(60))
        assert (refused.request_id, refused.status) == (7, Status.ERROR) and "over 100000" in refused.failure.cause
        peer.send(*encode(replace(Hello().message(), request_id=8)))
        assert decode(peer.receive(60)).request_id == 8


def test_too_many_parts_in_a_message_close_the_connection(server, client) -> None:
    with RawPeer(server.endpoint) as peer:
        peer.sock.sendall(struct.pack("<I", MAX_FRAMES + 1))
        assert peer.hung_up(60)
    assert client.ask(Stats()).malformed == 1


def test_pings_are_answered_but_a_flood_of_them_closes_the_connection(server, client) -> None:
    with RawPeer(server.endpoint) as peer:
        peer.sock.recv(1 << 16)  # the server's greeting
        peer.sock.sendall(PING)
        assert peer.sock.recv(1 << 16) == PING
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            peer.sock.sendall(PING * 1_000_000)
        assert peer.hung_up(60)
    assert client.greet().result() == INFO and client.ask(Stats()).malformed == 1


def test_a_client_without_a_greeting_is_disconnected(monkeypatch) -> None:
    monkeypatch.setattr(network_thread, "HANDSHAKE_TIME", 0.3)
    with serving() as server, RawPeer(server.endpoint, greets=False) as silent, client_of(server.endpoint) as client:
        assert client.greet().result() == INFO
        assert silent.hung_up(60)
        assert client.greet().result() == INFO and client.ask(Stats()).refused == 1


def test_strangers_make_room_when_there_are_too_many_connections(monkeypatch) -> None:
    monkeypatch.setattr(network_thread, "MAX_CONNECTIONS", 5)
    with serving() as server, contextlib.ExitStack() as open_ones:
        strangers = [open_ones.enter_context(RawPeer(server.endpoint, greets=False)) for _ in range(9)]
        with client_of(server.endpoint) as client:
            assert client.greet().result() == INFO
            assert client.ask(Stats()).refused >= 5
        assert strangers[0].hung_up(60)


def test_requests_that_never_end_are_bounded_by_host(monkeypatch) -> None:
    monkeypatch.setattr(network_thread, "HOST_REQUESTS", 1 << 20)
    prefix = struct.pack("<IQQ", 2, 1000, 500_000)
    with serving() as server, contextlib.ExitStack() as open_ones, client_of(server.endpoint) as client:
        peers = [open_ones.enter_context(RawPeer(server.endpoint)) for _ in range(6)]
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sock.sendall(prefix + bytes(400_000))
        wait_until(lambda: client.ask(Stats()).malformed >= 3)  # the server's order of reading decides which requests
        assert any(peer.hung_up(1) for peer in peers)
        assert len(rows_of(client, np.arange(3000))["x"]) == 3000


def test_a_thread_that_dies_ends_the_server(server, monkeypatch) -> None:
    assert server.running
    monkeypatch.setattr(server, "_receive", None)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with RawPeer(server.endpoint) as peer:
        peer.send(*encode(Hello().message()))
        wait_until(lambda: not server.running)


def test_a_stats_thread_that_dies_ends_the_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(server_module.StatsReport, "make", lambda self: 1 / 0)
    with serving(stats_file=tmp_path / "stats.json") as server:
        wait_until(lambda: not server.running)


def test_port_in_use_is_one_clear_message(server) -> None:
    with pytest.raises(ServiceError, match="tcp://127.0.0.1:.* is in use by another process"):
        with serving(endpoint=server.endpoint):
            pass
    for address in ("203.0.113.1", "gpu1..lan"):
        with pytest.raises(ServiceError, match=f"cannot listen at tcp://{address}:5555"):
            with serving(endpoint=f"tcp://{address}:5555"):
                pass


def test_stop_frees_the_port_at_once(server) -> None:
    server.stop()
    with serving(endpoint=server.endpoint) as second, client_of(second.endpoint) as client:
        assert client.greet().result() == INFO


def test_encrypted_service_answers_only_the_runs_key() -> None:
    keys, other = new_keys(), new_keys()
    with serving(keys=keys) as server:
        with client_of(server.endpoint, keys=keys) as client:
            np.testing.assert_array_equal(rows_of(client, NODES)["x"][:, 0], NODES)
        for wrong in (other, None):
            with client_of(server.endpoint, deadline=1.2, keys=wrong) as client:
                start = time.monotonic()
                with pytest.raises(ServiceError, match="node1.*do both nodes have this run's service.key"):
                    client.greet().result()
                assert time.monotonic() - start < stretched(20)
        knows_the_server = replace(other, server=keys.public)
        with pytest.raises((OSError, EOFError)), RawPeer(server.endpoint, knows_the_server) as stranger:
            while True:  # with TLS 1.3 a client sees its refusal with the first answer
                stranger.send(*encode(Hello().message()))
                stranger.sock.recv(1)
        with client_of(server.endpoint, keys=keys) as client:
            stats = client.ask(Stats())
    assert stats.refused >= 3 and stats.requests == 1 and stats.malformed == 0


def test_a_refused_client_connects_once_the_right_server_runs() -> None:
    endpoint, keys = free_endpoint(), new_keys()
    with client_of(endpoint, deadline=10, keys=keys) as client:
        with serving(endpoint=endpoint):
            with pytest.raises(ServiceError, match="service.key"):
                client.greet().result(timeout=0.8)
            pending = client.greet()
        with serving(endpoint=endpoint, keys=keys):
            assert pending.result() == INFO


def test_an_unread_connection_that_ends_uses_no_cpu(monkeypatch) -> None:
    # Its end is reported repeatedly by the poller until the server handles it.
    monkeypatch.setattr(network_thread, "MAX_QUEUED", 1)
    with serving(threads=1) as server, client_of(server.endpoint, 60) as client:
        with RawPeer(server.endpoint) as peer:
            slow = Gather([RowRequest(HOMO_NODE, np.arange(3), ("sleep1",))]).message()
            for _ in range(4):
                peer.send(*encode(slow))
            peer.sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )  # a reset, as when the process is killed
        assert client.greet().result() == INFO
        busy = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - busy < 0.3
