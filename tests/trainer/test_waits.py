"""Tests that timeouts of gloo, torch's store and graph servers are recognised and reported to the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import astuple, replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from forked import Forked
from ports import free_port
from service_kit import ArithmeticGraph, client_of, rows_of, serving
from trainer.core import waits
from trainer.core.errors import PeerError, ServiceError, Wait
from trainer.core.ranks import RankGroup, Ranks, run_store
from trainer.core.waits import expired_wait, report_error
from trainer.service.client import HostClient
from trainer.service.messages import ServerAddress
from waiting import stretched

WAIT = Wait("server", 12.0, "sample", 3)


@pytest.mark.parametrize(
    ("name", "cluster"), [("node3 (h3)", ""), ("node3 (h3) of my-graph_2.x", "my-graph_2.x"), ("", "")]
)
def test_a_graph_server_that_does_not_answer(name: str, cluster: str) -> None:
    place = ServerAddress(name, 3, "h3", f"tcp://127.0.0.1:{free_port()}", (3,), cluster)
    with pytest.raises(ServiceError, match="no answer within .* s to hello") as raised:
        HostClient(place, 0.2).greet().result()
    wait = expired_wait(raised.value)
    if not name:  # which server it is, is not known
        assert wait is None
    else:  # a server of a serving cluster is no node of the run
        node, server = (None, name) if cluster else (3, "")
        assert wait is not None and 0 < wait.seconds < 10
        assert replace(wait, seconds=0.0) == Wait("server", 0.0, "hello", node, server)


def test_a_server_that_has_waited_for_another_one_says_so() -> None:
    class Waits(ArithmeticGraph):
        def gather(self, requests):
            raise ServiceError("no answer from node3", wait=WAIT)

    with serving(Waits()) as server, client_of(server.endpoint) as client:
        with pytest.raises(ServiceError, match="gather failed: no answer from node3") as raised:
            rows_of(client, np.arange(3))
    assert expired_wait(raised.value) == WAIT


def test_the_wait_of_another_rank_or_of_a_cause_is_found() -> None:
    class Pair(RankGroup):
        def gather(self, value):
            return [value, ("rank 1 (node0, h): no answer", astuple(WAIT))]

        def settle(self) -> None:
            pass

    with pytest.raises(PeerError, match="no answer") as raised:
        Pair(Ranks(0, 2)).agree(lambda: None)
    assert expired_wait(raised.value) == replace(WAIT, rank=1)
    error = ValueError("wrong")
    error.__cause__ = ServiceError("no answer", wait=WAIT)
    assert expired_wait(error) == WAIT


def test_errors_without_an_expired_wait() -> None:
    assert expired_wait(ServiceError("graph server of node1: no answer within 9 s to gather")) is None
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
from trainer.core.errors import ServiceError, Wait
waits.REPORTED_FOR = 0.2
waits.report_uncaught()
waits.report_uncaught()
def ask():
    raise ServiceError("graph server of node1 (h) at tcp://a:1: no answer", wait=Wait("server", 9.0, "gather", 1))
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
        text = "graph server of node1 (h) at tcp://a:1: no answer"
        assert error == {"type": "ServiceError", "follow_up": True, "message": text}
        assert (found["rank"], found["of"], found["node_rank"], found["request"]) == (2, "server", 1, "gather")


def test_a_full_disk_is_no_reason_to_fail(tmp_path: Path) -> None:
    env = {"GNNFLEET_RUN_DIR": str(tmp_path / "absent"), "RANK": "0", "GNNFLEET_SUPERVISOR": "1:1"}
    began = time.monotonic()
    report_error(ServiceError("no answer", wait=WAIT), env)
    assert time.monotonic() - began < stretched(2)
