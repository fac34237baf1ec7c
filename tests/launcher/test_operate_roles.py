"""Tests of the run commands on runs with servers and clients, and on clusters that only serve."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.command import Command
from launcher.plan.serialize import run_json
from node_kit import PYTHON
from operate_kit import TRAINS, MadeRun
from peers_kit import SERVE, free_port
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
def made(tmp_path: Path) -> Iterator[MadeRun]:
    yield (made := MadeRun(tmp_path))
    made.kill()


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit status and everything that ``gnnfleet`` printed."""
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def serving(made: MadeRun, *servers: int) -> MadeRun:
    """Make these nodes serve without ranks; each node runs on its own if all nodes serve."""
    nodes = tuple(
        replace(node, ranks=(), nproc=0, trainer=None, server=SERVER, role="server")
        if node.node_rank in servers
        else node
        for node in made.plan.nodes
    )
    trainers = [node.node_rank for node in nodes if node.ranks]
    made.plan = replace(made.plan, nodes=nodes, world_size=len(trainers), lead=min(trainers, default=0))
    roles = ["server" if k in servers else "client" for k in range(len(nodes))]
    control = {"node_rank": made.plan.lead, "address": "127.0.0.1", "bind": "127.0.0.1", "port": free_port()}
    for k, node in enumerate(made.nodes):
        (node.path / "run.json").write_text(run_json(made.plan))
        node.token = node.spec["token"] = made.nodes[0].token
        node.spec |= {"control": control} if trainers else {}
        node.spec |= {"role": roles[k], "roles": roles, "parts": [[0] if role == "server" else [] for role in roles]}
        if k in servers:
            node.spec["server"] = {"argv": SERVER.argv, "env": {}, "cwd": str(node.path)}
            node.start()
        else:
            node.rank([PYTHON, "-c", TRAINS], {"RANK": str(k), "GNNFLEET_RUN_DIR": str(node.path)})
            node.spec["ranks"] = [k]
            node.start()
    for k in servers:
        wait_until(made.nodes[k].says("server", "serving"))
        path = made.nodes[k].path / "state.json"
        wait_until(lambda path=path: path.exists() and json.loads(path.read_text())["state"] == "serving")
    return made.launched("train", detached=True)


def test_a_serving_cluster_is_reported_and_is_done_when_stopped(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(made, 0, 1)
    status, told = run_cli(capsys, "resume", "r1")
    assert status == 2 and "r1 is a serving cluster" in told and "gnnfleet serve --config FILE --name r1" in told
    status, told = run_cli(capsys, "status", "r1")
    lines = told.splitlines()
    assert status == 0 and lines[0].startswith("run r1 serves: 2 nodes; its launcher (alice@")
    assert [line.split()[:4] for line in lines[2:4]] == [[f"node{k}", "(local)", "–", "serving"] for k in range(2)]
    assert "2 nodes serving" in run_cli(capsys, "runs")[1]
    status, told = run_cli(capsys, "logs", "r1", "--rank", "0")
    assert status == 2 and "the run has no ranks, only graph servers" in told
    status, told = run_cli(capsys, "logs", "r1")
    assert status == 0 and "node0/server | serving" in told and "node1/server | serving" in told
    status, told = run_cli(capsys, "stop", "r1")
    assert status == 0 and "node1 (local): stopped" in told
    status, told = run_cli(capsys, "status", "r1")
    assert status == 0 and told.startswith("run r1 is done after")
    assert json.loads((made.folder / "result.json").read_text())["state"] == "done"


def test_following_a_serving_cluster_until_it_is_stopped(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    serving(made, 0, 1)
    for node in made.nodes:
        (node.path / "control" / "stop").write_text('{"by": "bob@desk", "why": "gnnfleet stop", "now": false}')
    status, told = run_cli(capsys, "follow", "r1", "--plain")
    assert status == 0 and "Done in" in told and "failed" not in told


@pytest.mark.slow
def test_following_a_serving_cluster_that_loses_a_server_leaves_the_other_running(
    made: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    serving(made, 0, 1)
    os.kill(made.nodes[1].supervisor.pid, signal.SIGKILL)  # type: ignore[union-attr]
    wait_until(lambda: made.nodes[1].supervisor.poll() is not None)  # type: ignore[union-attr]
    status, told = run_cli(capsys, "status", "r1")
    assert status == 0 and told.startswith("run r1 serves: 2 nodes"), told
    assert "note: node1 (local): lost" in told
    ended: list[bool] = []

    def stop_the_other() -> None:
        time.sleep(3)
        ended.append((made.nodes[0].path / "result.json").exists())
        (made.nodes[0].path / "control" / "stop").write_text('{"by": "bob@desk", "why": "gnnfleet stop", "now": false}')

    threading.Thread(target=stop_the_other).start()
    status, told = run_cli(capsys, "follow", "r1", "--plain")
    assert ended == [False], "the remaining server ran until bob stopped it"
    assert "node1 (local) is lost" in told and "every node stops" not in told


@pytest.mark.slow
def test_a_run_that_continues_without_a_server_does_not_fail(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.kill()
    made = MadeRun(made.top / "three", num_nodes=3)
    try:
        serving(made, 0, 1)
        made.await_training(2)
        os.kill(made.nodes[0].supervisor.pid, signal.SIGKILL)  # type: ignore[union-attr]
        wait_until(lambda: "0" in made.nodes[2].json("state.json")["gone"])
        status, told = run_cli(capsys, "status", "r1")
        assert status == 0 and told.startswith("run r1 trains: 3 nodes, 1 rank"), told
        assert "finding: server node0 was lost at" in told and "part 0 is served by node1" in told
    finally:
        made.kill()
