"""Tests of ``gnnfleet status``, ``stop`` and ``resume`` after a launcher was killed at any stage."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from failure_kit import COUNTS
from launching import Running, write_config
from netns import NetCluster
from operator_kit import Operator, await_stage, run_processes, stage_in
from ssh_nodes import ssh_nodes
from waiting import DEADLINE

QUICK = "print('hello from a rank', flush=True)\n"


@pytest.fixture
def config(cluster: NetCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/steps.py").write_text(COUNTS)
    (tmp_path / "project/quick.py").write_text(QUICK)
    parts = tmp_path_factory.getbasetemp() / "operate-parts"
    return write_config(
        tmp_path / "project", ssh_nodes(cluster, (1, 1)), data={"folder": str(parts)}, run={"connect_timeout": 3}
    )


def killed_at(stage: str, running: Running) -> str:
    """Kill the launcher once it reaches ``stage``; return the stage at which it died."""
    await_stage(running.folder, stage)
    running.send(signal.SIGKILL).process.wait(DEADLINE)
    return stage_in(running.folder)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["connect", "preflight", "sync", "start", "train", "collect"])
def test_launcher_killed_at_any_stage(cluster: NetCluster, config: Path, tmp_path: Path, stage: str) -> None:
    # `gnnfleet status` in another folder is correct, and `gnnfleet stop` leaves no process behind.
    operator = Operator(cluster, tmp_path / "home")
    script = "quick.py" if stage == "collect" else "steps.py"
    at = killed_at(stage, Running(config, "--", "python", script, env=operator.env))
    status = operator.status()
    if at in ("connect", "preflight", "partition", "sync"):
        assert status["state"] == "never started" and f"died while {DOING[at]}" in status["sentence"]
        assert run_processes(cluster) == []
    elif at == "start":
        assert (status["state"] == "never started") == (run_processes(cluster) == []), status
    else:
        assert status["state"] == ("done" if at in ("collect", "end") else "running"), status
    stopped = operator.gnnfleet("stop")
    assert stopped.status == 0, stopped.output
    assert run_processes(cluster) == []
    assert operator.status()["state"] != "running"


DOING = {"connect": "connecting to its nodes", "preflight": "checking its nodes", "partition": "making its parts"}
DOING["sync"] = "sending files to its nodes"


@pytest.mark.slow
def test_from_another_machine_and_resumed_where_it_was_launched(
    cluster: NetCluster, config: Path, tmp_path: Path
) -> None:
    operator, other_operator = Operator(cluster, tmp_path / "home"), Operator(cluster, tmp_path / "other")
    running = Running(config, "--", "python", "steps.py", env=operator.env).await_line("rank1 | step 20")
    running.send(signal.SIGKILL).process.wait(DEADLINE)
    status = other_operator.status("--config", str(config))
    assert status["state"] == "running" and [node["state"] for node in status["nodes"]] == ["training", "training"]
    lines = other_operator.gnnfleet("logs", "--config", str(config), "-n", "4").output.splitlines()
    assert len(lines) == 4 and all(line.startswith(("node0/rank0 | step", "node1/rank1 | step")) for line in lines)
    refused = operator.gnnfleet("resume", status["run_id"])
    assert refused.status == 2 and "still runs" in refused.output
    stopped = other_operator.gnnfleet("stop", "--config", str(config))
    assert stopped.status == 0, stopped.output
    assert (other_operator.cwd / "runs" / status["run_id"] / "logs/node1/rank1.log").exists(), (
        "logs are collected to the other machine"
    )
    assert "stop requested by " in operator.status()["sentence"]
    again = operator.gnnfleet("resume", status["run_id"], "--detach")
    assert again.status == 0, again.output
    newest = operator.status()
    assert newest["state"] == "running" and newest["run_id"] != status["run_id"]
    assert operator.gnnfleet("stop", "--now").status == 0
    assert run_processes(cluster) == []


@pytest.mark.slow
def test_a_host_that_cannot_be_reached(cluster: NetCluster, config: Path, tmp_path: Path) -> None:
    # The launcher has been killed; status and stop are called in another folder.
    operator = Operator(cluster, tmp_path / "home")
    killed_at("train", Running(config, "--", "python", "steps.py", env=operator.env))
    assert operator.status()["state"] == "running"
    cluster.hosts[1].cut_network()
    try:
        status = operator.status()
        assert status["nodes"][1]["state"] == "unreachable" and status["state"] in ("running", "stopping", "unknown")
        assert any("cannot be reached from here" in note for note in status["notes"])
        stopped = operator.gnnfleet("stop")
        assert stopped.status == 1 and "node1" in stopped.output and "the run may go on there" in stopped.output
    finally:
        cluster.hosts[1].restore_network()
    stopped = operator.gnnfleet("stop")
    assert stopped.status == 0, stopped.output
    assert run_processes(cluster) == []
    assert operator.status()["state"] != "running"
