"""Operating runs on real hosts: the launcher killed at any stage, and asked about from elsewhere."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from failure_kit import COUNTS
from launching import Running, write_config
from netns import NetCluster
from operator_kit import Operator, await_stage, run_processes, stage_in
from ssh_nodes import ssh_nodes

QUICK = "print('hello from a rank', flush=True)\n"


@pytest.fixture
def config(cluster: NetCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster.yml in a folder of its own, with two scripts; the parts are made once for all tests."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/steps.py").write_text(COUNTS)
    (tmp_path / "project/quick.py").write_text(QUICK)
    parts = tmp_path_factory.getbasetemp() / "operate-parts"
    return write_config(
        tmp_path / "project", ssh_nodes(cluster, (1, 1)), data={"folder": str(parts)}, run={"connect_timeout": 3}
    )


def killed_at(stage: str, running: Running) -> str:
    """Kill the launcher with -9 when it has got to ``stage``; the stage it was really at."""
    await_stage(running.folder, stage)
    running.send(signal.SIGKILL).process.wait(10)
    return stage_in(running.folder)


LONGER = [pytest.param(stage, marks=pytest.mark.slow) for stage in ("connect", "preflight", "sync", "start", "collect")]


@pytest.mark.parametrize("stage", ["train", *LONGER])
def test_launcher_killed_at_any_stage(cluster: NetCluster, config: Path, tmp_path: Path, stage: str) -> None:
    """Status from another folder tells the truth, and stop leaves nothing."""
    here = Operator(cluster, tmp_path / "home")
    script = "quick.py" if stage == "collect" else "steps.py"
    at = killed_at(stage, Running(config, "--", "python", script, env=here.env))
    told = here.status()
    if at in ("connect", "preflight", "partition", "sync"):
        assert told["state"] == "never started" and f"died while {DOING[at]}" in told["sentence"]
        assert run_processes(cluster) == []
    elif at == "start":
        assert (told["state"] == "never started") == (run_processes(cluster) == []), told
    else:
        assert told["state"] == ("done" if at in ("collect", "end") else "running"), told
    stopped = here.say("stop")
    assert stopped.status == 0, stopped.output
    assert run_processes(cluster) == []
    assert here.status()["state"] != "running"


DOING = {"connect": "connecting to its nodes", "preflight": "checking its nodes", "partition": "making its parts"}
DOING["sync"] = "sending files to its nodes"


@pytest.mark.slow
def test_from_another_machine_and_resumed_where_it_was_launched(
    cluster: NetCluster, config: Path, tmp_path: Path
) -> None:
    here, there = Operator(cluster, tmp_path / "home"), Operator(cluster, tmp_path / "other")
    running = Running(config, "--", "python", "steps.py", env=here.env).await_line("rank1 | step 20", 200)
    running.send(signal.SIGKILL).process.wait(10)
    told = there.status("--config", str(config))
    assert told["state"] == "running" and [node["state"] for node in told["nodes"]] == ["training", "training"]
    lines = there.say("logs", "--config", str(config), "-n", "4").output.splitlines()
    assert len(lines) == 4 and all(line.startswith(("node0/rank0 | step", "node1/rank1 | step")) for line in lines)
    refused = here.say("resume", told["run_id"])
    assert refused.status == 2 and "still runs" in refused.output
    stopped = there.say("stop", "--config", str(config))
    assert stopped.status == 0, stopped.output
    assert (there.cwd / "runs" / told["run_id"] / "logs/node1/rank1.log").exists(), "collected there"
    assert "stop requested by " in here.status()["sentence"]
    again = here.say("resume", told["run_id"], "--detach")
    assert again.status == 0, again.output
    newest = here.status()
    assert newest["state"] == "running" and newest["run_id"] != told["run_id"]
    assert here.say("stop", "--now").status == 0
    assert run_processes(cluster) == []


def test_a_host_that_cannot_be_reached(cluster: NetCluster, config: Path, tmp_path: Path) -> None:
    here = Operator(cluster, tmp_path / "home")
    done = Running(config, "--detach", "--", "python", "steps.py", env=here.env).end(120)
    assert done.status == 0, done.output
    cluster.hosts[1].cut_network()
    try:
        told = here.status()
        assert told["nodes"][1]["state"] == "unreachable" and told["state"] in ("running", "stopping", "unknown")
        assert any("cannot be reached from here" in note for note in told["notes"])
        stopped = here.say("stop")
        assert stopped.status == 1 and "node1" in stopped.output and "the run may go on there" in stopped.output
    finally:
        cluster.hosts[1].restore_network()
    assert here.say("stop").status == 0
    assert run_processes(cluster) == []
