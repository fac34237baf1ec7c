"""Tests of abandoned requests: a batch that nobody waits for is removed from the server's buffer."""

from __future__ import annotations

import time

import pytest

from load_kit import homo_data, parts_of
from service_kit import client_of, serving
from test_batches import HOMO, ME
from trainer.core.errors import ServiceError

WORK = HOMO["attributes and labels"]


@pytest.fixture
def server(monkeypatch):
    graph = parts_of(homo_data(), 3)
    with serving(graph.access.local, routed=graph.access) as server:
        batch, slow = server._handlers.batch, [1.0]

        def made(*words):
            time.sleep(slow.pop() if slow else 0)
            return batch(*words)

        monkeypatch.setattr(server._handlers, "batch", made)
        yield server


def test_a_batch_whose_client_timed_out_leaves_the_buffer(server) -> None:
    with client_of(server.endpoint, route=True) as client:
        client.hello()
        with pytest.raises(ServiceError, match="no answer within .* to batch"):
            client.submit_batch(WORK, ME).result(0.03)
        until = time.monotonic() + 20
        while server.scheduler_status().batches < 1 or server.scheduler_status().buffer_bytes:
            assert time.monotonic() < until, server.scheduler_status()
            time.sleep(0.02)


def test_a_connection_still_works_after_an_abandoned_batch(server) -> None:
    with client_of(server.endpoint, route=True) as client:
        client.hello()
        with pytest.raises(ServiceError):
            client.submit_batch(WORK, ME).result(0.03)
        made = client.submit_batch(WORK, ME).result(60)
        assert len(made.subgraph.nodes) and made.rows
        assert client.hello().node_rank == server._info.node_rank
