"""Tests of ``await_own_server``: a rank waits for the graph server of its own node."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from trainer.core.errors import ServiceError
from trainer.graph.environment import await_own_server


def test_it_returns_once_the_ready_file_exists(tmp_path: Path) -> None:
    ready = tmp_path / "server.ready"
    waiter = threading.Thread(target=await_own_server, args=({"GNNFLEET_SERVER_READY": str(ready)},))
    waiter.start()
    time.sleep(0.1)
    assert waiter.is_alive()
    ready.touch()
    waiter.join(60)
    assert not waiter.is_alive()


def test_it_returns_at_once_without_a_graph_server() -> None:
    await_own_server({"GNNFLEET_SERVER_READY": ""})
    await_own_server({})


def test_a_server_that_never_becomes_ready(tmp_path: Path) -> None:
    environment = {"GNNFLEET_SERVER_READY": str(tmp_path / "no"), "GNNFLEET_START_TIMEOUT": "0.1", "NODE_RANK": "2"}
    message = "node2: its graph server was not ready within 0.1 s (run.start_timeout)"
    with pytest.raises(ServiceError, match=re.escape(message)):
        await_own_server(environment)
