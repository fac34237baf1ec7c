"""Tests of when a client treats a graph server as gone."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raw_peer import PING, framed
from service_kit import INFO, free_endpoint, server_process, serving
from trainer.core.errors import ServerGone, ServiceError
from trainer.core.schema import HOMO_NODE
from trainer.sampler.requests import Gather
from trainer.sampler.types import RowRequest
from trainer.service import channel
from trainer.service.client import HostClient
from trainer.service.messages import Hello, ServerAddress
from trainer.service.stream import GREETING_BYTES, MessageReader, greeting
from trainer.wire.frames import Kind, Message, Status, decode, encode
from waiting import stretched, wait_until


@contextlib.contextmanager
def client_of(endpoint, deadline, gone_after=None):
    place = ServerAddress("node1 (h1)", 1, "h1", endpoint, (1, 3))
    client = HostClient(place, deadline, gone_after=gone_after)
    try:
        yield client
    finally:
        client.close()


def seconds_until_gone(client) -> float:
    start = time.monotonic()
    with pytest.raises(ServerGone, match=r"graph server of node1 \(h1\) at tcp://.*parts 1,3"):
        client.greet().result()
    return time.monotonic() - start


def test_a_host_that_refuses_connections_counts_as_gone_sooner_than_a_silent_one() -> None:
    with client_of(free_endpoint(), 20, gone_after=1.6) as client:
        assert 0.7 < seconds_until_gone(client) < 10
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts connections but sends nothing
        with client_of(f"tcp://127.0.0.1:{mute.getsockname()[1]}", 20, gone_after=1.6) as client:
            assert 1.5 < seconds_until_gone(client) < 10


def test_the_client_reconnects_to_a_restarted_server() -> None:
    endpoint = free_endpoint()
    with client_of(endpoint, 20, gone_after=1) as client:
        with serving(endpoint=endpoint):
            client.greet().result()
        seconds_until_gone(client)
        with serving(endpoint=endpoint):
            until = time.monotonic() + 60
            greeting = client.greet()
            while True:
                with contextlib.suppress(ServiceError):
                    assert replace(greeting.result(0), servers=()) == INFO
                    break
                assert time.monotonic() < until
                time.sleep(0.02)


@contextlib.contextmanager
def busy_server(answer_after: float):
    """Serve one connection: send ALIVE every 0.05 s, and answer after ``answer_after`` seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(greeting(encrypted=False) + PING)
                assert sock.recv(GREETING_BYTES, socket.MSG_WAITALL) == greeting(encrypted=False)
                reader = MessageReader(1 << 20)
                while not reader.messages:
                    reader.read(sock.recv_into)
                request, start = decode(reader.messages.popleft().frames), time.monotonic()
                while not stop.wait(0.05):
                    if time.monotonic() - start < answer_after:
                        sock.sendall(framed(encode(Message(Kind.ALIVE, Status.OK, 0))))
                    else:
                        sock.sendall(framed(encode(Hello().reply(request, INFO, lambda of, name: "stored"))))
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            thread.join(5)


@pytest.mark.slow
def test_a_stopped_server_is_pinged_and_counts_as_gone(monkeypatch) -> None:
    monkeypatch.setattr(channel, "_PING_AFTER", 0.1)
    monkeypatch.setattr(channel, "_STOPPED_AFTER", 0.6)
    endpoint = free_endpoint()
    with server_process(endpoint) as process, client_of(endpoint, 20, gone_after=1) as client:
        slow = client.submit(Gather([RowRequest(HOMO_NODE, np.arange(3), ("sleep1.5",))]))
        assert len(slow.result()[0]["sleep1.5"]) == 3  # sends nothing by itself, but answers pings
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        assert seconds_until_gone(client) < 10
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: answers(client))


def answers(client) -> bool:
    with contextlib.suppress(ServiceError):
        return client.greet().result() == INFO
    return False


def test_the_deadline_restarts_while_the_server_is_alive() -> None:
    with busy_server(answer_after=2.5) as endpoint, client_of(endpoint, 1.2) as client:
        assert client.greet().result() == INFO


@pytest.mark.slow
def test_the_wait_for_a_server_that_is_alive_but_never_answers_is_bounded() -> None:
    with busy_server(answer_after=60) as endpoint, client_of(endpoint, 0.3) as client:
        start = time.monotonic()
        with pytest.raises(ServiceError, match="connected; the server is alive but busy"):
            client.greet().result()
        assert 2.9 < time.monotonic() - start < stretched(30)
