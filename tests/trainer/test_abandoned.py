"""Tests of abandoned requests: a batch that nobody waits for is removed from the server's buffer."""

from __future__ import annotations

import threading
import time

import pytest

from load_kit import homo_data, parts_of
from service_kit import client_of, serving
from test_batches import HOMO, ME
from trainer.core.errors import ServiceError
from trainer.service.messages import BatchRequest
from waiting import DEADLINE

WORK = HOMO["attributes and labels"]


@pytest.fixture
def server_at_work(monkeypatch):
    """Yield a server whose first batch takes a second, and events that are set once this batch has begun and ended."""
    graph = parts_of(homo_data(), 3)
    with serving(graph.access.local, routed=graph.access) as server:
        batch, begun, ended = server._handlers.batch, threading.Event(), threading.Event()

        def made(*words):
            if not begun.is_set():
                begun.set()
                time.sleep(1.0)
            try:
                return batch(*words)
            finally:
                ended.set()

        monkeypatch.setattr(server._handlers, "batch", made)
        yield server, begun, ended


def abandon(client, begun) -> None:
    """Request a batch, and stop waiting for it while the server makes it."""
    batch = client.submit(BatchRequest(WORK, ME))
    assert begun.wait(20)
    with pytest.raises(ServiceError, match="no answer within .* to batch"):
        batch.result(0.03)


def test_a_batch_whose_client_timed_out_leaves_the_buffer(server_at_work) -> None:
    server, begun, ended = server_at_work
    with client_of(server.endpoint, route=True) as client:
        client.greet().result()
        abandon(client, begun)
        until = time.monotonic() + DEADLINE
        assert ended.wait(DEADLINE)
        while server._scheduler.status().queue or server._scheduler.status().buffer_bytes:
            assert time.monotonic() < until, server._scheduler.status()
            time.sleep(0.02)


def test_a_connection_still_works_after_an_abandoned_batch(server_at_work) -> None:
    server, begun, _ = server_at_work
    with client_of(server.endpoint, route=True) as client:
        client.greet().result()
        abandon(client, begun)
        made = client.submit(BatchRequest(WORK, ME)).result(60)
        assert len(made.subgraph.nodes) and made.rows
        assert client.greet().result().node_rank == server._info.node_rank
