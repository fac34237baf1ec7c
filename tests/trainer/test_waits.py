"""Tests that timeouts of gloo, torch's store and graph servers are recognised and reported to the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from forked import Forked
from ports import free_port
from trainer.core import waits
from trainer.core.errors import PeerError, ServerGone, ServiceError
from trainer.core.ranks import Ranks, run_store
from trainer.core.waits import Wait, expired_wait, report_error

SERVER = "graph server of node3 (h3) at tcp://10.0.0.3:29600, parts 3"


def test_a_graph_server_that_does_not_answer() -> None:
    text = f"{SERVER}: no answer within 12 s to sample (connected, but the server is slow or stuck); check"
    wait = Wait("server", 12.0, "sample", 3)
    assert expired_wait(ServiceError(text)) == expired_wait(ServerGone(text)) == wait
    # another server waited for it, or another rank did
    assert expired_wait(ServiceError(f"graph server of node0 (h0) at tcp://a:1, parts 0: batch failed: {text}")) == wait
    assert expired_wait(PeerError(f"rank 5 (node2, h2): {text}")) == Wait("server", 12.0, "sample", 3, rank=5)
    lost = f"part 3: no graph server that holds it came back within 60 s (run.server_wait)\n{text}"
    assert expired_wait(ServiceError(lost)) == replace(wait, seconds=60.0)


@pytest.mark.parametrize("cluster", ["products", "my-graph_2.x"])
def test_a_graph_server_of_a_serving_cluster_is_no_node_of_the_run(cluster: str) -> None:
    name = f"node0 (gpu1) of {cluster}"
    text = f"graph server of {name} at tcp://10.0.0.3:29600, parts 0,1: no answer within 2.1 s to batch (no connection)"
    lost = f"parts 0, 1: no graph server that holds them came back within 60 s (run.server_wait)\n{text}"
    assert expired_wait(ServerGone(text)) == Wait("server", 2.1, "batch", None, name)
    assert expired_wait(PeerError(f"rank 5 (node2, h2): {lost}")) == Wait("server", 60.0, "batch", None, name, 5)


def test_errors_without_an_expired_wait() -> None:
    assert expired_wait(ServiceError(f"{SERVER}: gather failed: no such attribute")) is None
    assert expired_wait(ValueError("timed out")) is None
    assert expired_wait(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:1")) is None


def test_a_store_that_nobody_joins() -> None:
    with pytest.raises(PeerError) as raised:
        run_store(Ranks(0, 2, master_addr="127.0.0.1", master_port=free_port()), 1.0)
    wait = expired_wait(raised.value)
    assert wait is not None and wait.of == "ranks"


def _reduce(port: int, rank: int, folder: str) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=2))
    if rank == 1:
        time.sleep(60)
    try:
        import torch

        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        (Path(folder) / "text").write_text(str(error))
        os.environ.update(GNNFLEET_RUN_DIR=folder, RANK="0", GNNFLEET_SUPERVISOR="1:1")
        waits.REPORTED_FOR = 0.1
        report_error(error)
    os._exit(0)


def test_an_all_reduce_that_another_rank_does_not_join(tmp_path: Path) -> None:
    (tmp_path / "procs").mkdir()
    port = free_port()
    ranks = [Forked(_reduce, (port, rank, str(tmp_path)), {}) for rank in range(2)]
    file = tmp_path / "procs" / "wait-rank0.json"
    until = time.monotonic() + 60
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(ranks[1].pid, signal.SIGKILL)
    found = json.loads(file.read_text())
    assert (found["rank"], found["of"], found["seconds"]) == (0, "ranks", 2.0), (tmp_path / "text").read_text()
    assert any("test_waits.py" in line and line.endswith("in _reduce") for line in found["stack"])


UNCAUGHT = """
import os
from trainer.core import waits
from trainer.core.errors import ServiceError
waits.REPORTED_FOR = 0.2
waits.report_uncaught()
waits.report_uncaught()
def ask():
    raise ServiceError("graph server of node1 (h) at tcp://a:1, parts 1: no answer within 9 s to gather (x)")
ask()
"""


@pytest.mark.parametrize("supervised", [True, False])
def test_a_script_that_ends_by_the_error(supervised: bool, tmp_path: Path) -> None:
    (tmp_path / "procs").mkdir()
    env = {**os.environ, "GNNFLEET_RUN_DIR": str(tmp_path), "RANK": "2"}
    env |= {"GNNFLEET_SUPERVISOR": "1:1"} if supervised else {}
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("ServiceError: graph server of node1") == 1
    files = sorted((tmp_path / "procs").iterdir())
    assert [file.name for file in files] == (["error-rank2.json", "wait-rank2.json"] if supervised else [])
    if supervised:
        error, found = (json.loads(file.read_text()) for file in files)
        assert error == {"type": "ServiceError", "follow_up": True}
        assert (found["rank"], found["of"], found["node_rank"], found["request"]) == (2, "server", 1, "gather")


def test_a_full_disk_is_no_reason_to_fail(tmp_path: Path) -> None:
    env = {"GNNFLEET_RUN_DIR": str(tmp_path / "absent"), "RANK": "0", "GNNFLEET_SUPERVISOR": "1:1"}
    began = time.monotonic()
    report_error(ServiceError(f"{SERVER}: no answer within 1 s to hello (no connection)"), env)
    assert time.monotonic() - began < 2
