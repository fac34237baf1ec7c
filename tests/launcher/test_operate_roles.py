"""Tests of ``gnnfleet status``, ``stop`` and other commands for server-client runs and for serving clusters."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run
from launcher.command import Command
from launcher.plan.serialize import run_json
from node_kit import PYTHON
from operate_kit import TRAINS, LocalRun
from peers_kit import SERVE
from ports import free_port
from waiting import wait_until

SERVER = Command((PYTHON, "-c", SERVE))


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    yield (local_run := LocalRun(tmp_path))
    local_run.kill()


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def serving(local_run: LocalRun, *servers: int) -> LocalRun:
    """Start all supervisors, with nodes ``servers`` as graph servers without ranks, and wait for these servers."""
    nodes = tuple(
        replace(node, ranks=(), trainer=None, server=SERVER, role="server") if node.node_rank in servers else node
        for node in local_run.plan.nodes
    )
    trainers = [node.node_rank for node in nodes if node.ranks]
    local_run.plan = replace(local_run.plan, nodes=nodes, world_size=len(trainers), lead=min(trainers, default=0))
    lead, port = local_run.plan.lead, free_port()
    everyone: list[dict[str, Any]] = [
        {"label": f"node{k}", "role": "server", "parts": [0]}
        if k in servers
        else {"label": f"node{k}", "role": "client", "ranks": [k]}
        for k in range(len(nodes))
    ]
    if trainers:
        everyone[lead] |= {"address": "127.0.0.1", "bind": "127.0.0.1", "control_port": port}
    for k, node in enumerate(local_run.nodes):
        (node.path / "run.json").write_text(run_json(local_run.plan))
        node.token = node.spec["token"] = local_run.nodes[0].token
        node.spec |= {"hub": lead, "nodes": everyone}
        if k in servers:
            node.spec["server"] = {"argv": SERVER.argv, "env": {}, "cwd": str(node.path)}
            node.start()
        else:
            node.rank([PYTHON, "-c", TRAINS], {"RANK": str(k), "GNNFLEET_RUN_DIR": str(node.path)})
            node.own["ranks"] = [k]
            node.start()
    for k in servers:
        wait_until(local_run.nodes[k].says("server", "serving"))
        path = local_run.nodes[k].path / "state.json"
        wait_until(lambda path=path: path.exists() and json.loads(path.read_text())["state"] == "serving")
    return local_run.launched("train", detached=True)


def test_a_serving_cluster_is_reported_and_is_done_when_stopped(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(local_run, 0, 1)
    status, output = run_cli(capsys, "resume", "r1")
    assert status == 2 and "r1 is a serving cluster" in output and "gnnfleet serve --config FILE --name r1" in output
    status, output = run_cli(capsys, "status", "r1")
    lines = output.splitlines()
    assert status == 0 and lines[0].startswith("run r1 serves: 2 nodes; its launcher (alice@")
    assert [line.split()[:4] for line in lines[2:4]] == [[f"node{k}", "(local)", "–", "serving"] for k in range(2)]
    assert "2 nodes serving" in run_cli(capsys, "runs")[1]
    status, output = run_cli(capsys, "logs", "r1", "--rank", "0")
    assert status == 2 and "the run has no ranks, only graph servers" in output
    status, output = run_cli(capsys, "logs", "r1")
    assert status == 0 and "node0/server | serving" in output and "node1/server | serving" in output
    status, output = run_cli(capsys, "stop", "r1")
    assert status == 0 and "node1 (local): stopped" in output
    status, output = run_cli(capsys, "status", "r1")
    assert status == 0 and output.startswith("run r1 is done after")
    assert json.loads((local_run.folder / "result.json").read_text())["state"] == "done"


def test_following_a_serving_cluster_until_it_is_stopped(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(local_run, 0, 1)
    for node in local_run.nodes:
        (node.path / "control" / "stop").write_text('{"by": "bob@desk", "why": "gnnfleet stop", "now": false}')
    status, output = run_cli(capsys, "follow", "r1", "--plain")
    assert status == 0 and "Done in" in output and "failed" not in output


@pytest.mark.slow
def test_following_a_serving_cluster_that_loses_a_server_leaves_the_other_running(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(local_run, 0, 1)
    os.kill(local_run.nodes[1].supervisor.pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_until(lambda: local_run.nodes[1].supervisor.poll() is not None)  # type: ignore[union-attr]
    status, output = run_cli(capsys, "status", "r1")
    assert status == 0 and output.startswith("run r1 serves: 2 nodes"), output
    assert "note: node1 (local): lost" in output
    ended: list[bool] = []

    def stop_the_other() -> None:
        time.sleep(3)
        ended.append((local_run.nodes[0].path / "result.json").exists())
        (local_run.nodes[0].path / "control" / "stop").write_text(
            '{"by": "bob@desk", "why": "gnnfleet stop", "now": false}'
        )

    threading.Thread(target=stop_the_other).start()
    status, output = run_cli(capsys, "follow", "r1", "--plain")
    assert ended == [False], "the remaining server ran until bob stopped it"
    assert "node1 (local) is lost" in output and "every node stops" not in output


@pytest.mark.slow
def test_a_run_that_continues_without_a_server_does_not_fail(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    local_run.kill()
    local_run = LocalRun(local_run.top / "three", num_nodes=3)
    try:
        serving(local_run, 0, 1)
        local_run.await_training(2)
        os.kill(local_run.nodes[0].supervisor.pid, signal.SIGKILL)  # type: ignore[union-attr]
        wait_until(lambda: "0" in local_run.nodes[2].json("state.json")["gone"])
        status, output = run_cli(capsys, "status", "r1")
        assert status == 0 and output.startswith("run r1 trains: 3 nodes, 1 rank"), output
        assert "finding: server node0 was lost at" in output and "part 0 is served by node1" in output
    finally:
        local_run.kill()
