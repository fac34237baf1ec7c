"""A batch that its client no longer waits for leaves the server's buffer."""

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
    """Its first batch takes a second."""
    graph = parts_of(homo_data(), 3)
    with serving(graph.access.local, routed=graph.access) as server:
        batch, slow = server._handlers.batch, [1.0]

        def made(*words):
            time.sleep(slow.pop() if slow else 0)
            return batch(*words)

        monkeypatch.setattr(server._handlers, "batch", made)
        yield server


def test_a_batch_given_up_is_free_while_the_client_goes_on_elsewhere(server) -> None:
    with client_of(server.endpoint, route=True) as client:
        client.hello()
        with pytest.raises(ServiceError, match="no answer within .* to batch"):
            client.submit_batch(WORK, ME).result(0.03)
        until = time.monotonic() + 20
        while server.scheduler_status().batches < 1 or server.scheduler_status().buffer_bytes:
            assert time.monotonic() < until, server.scheduler_status()
            time.sleep(0.02)


def test_the_next_batch_on_the_same_line_comes(server) -> None:
    with client_of(server.endpoint, route=True) as client:
        client.hello()
        with pytest.raises(ServiceError):
            client.submit_batch(WORK, ME).result(0.03)
        made = client.submit_batch(WORK, ME).result(60)
        assert len(made.subgraph.nodes) and made.rows
        assert client.hello().node_rank == server._info.node_rank
