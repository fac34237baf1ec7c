"""Operating runs on real hosts: the launcher killed at any stage, and asked about from elsewhere."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from failure_kit import STEPS
from launching import REPOSITORY, Launched, Running, write_config
from netns import NetCluster

QUICK = "print('hello from a rank', flush=True)\n"


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    with NetCluster(2) as made:
        yield made


@pytest.fixture
def config(cluster: NetCluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster.yml in a folder of its own, with two scripts; the parts are made once for all tests."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project/steps.py").write_text(STEPS)
    (tmp_path / "project/quick.py").write_text(QUICK)
    nodes = [{"host": host.address, "user": "root", "python": sys.executable} for host in cluster.hosts]
    parts = tmp_path_factory.getbasetemp() / "operate-parts"
    return write_config(tmp_path / "project", nodes, data={"folder": str(parts)}, run={"connect_timeout": 3})


@pytest.fixture(autouse=True)
def nothing_left(cluster: NetCluster) -> Iterator[None]:
    """A test that fails must not fail the next one too."""
    yield
    for host in cluster.hosts:
        for process in host.processes():
            host.run(["kill", "-9", str(process.pid)], check=False)


class Operator:
    """Somebody at a machine of their own: a home with the cluster's key, and a folder that knows nothing."""

    def __init__(self, cluster: NetCluster, home: Path):
        self.cwd = home / "somewhere"
        self.cwd.mkdir(parents=True)
        shutil.copytree(cluster.operator_home / ".ssh", home / ".ssh", dirs_exist_ok=True)
        self.env = cluster.environment(HOME=str(home), XDG_STATE_HOME=str(home / ".local/state"), COLUMNS="200")

    def say(self, *words: str, timeout: float = 90) -> Launched:
        """``gnnfleet words``."""
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        done = subprocess.run(argv, cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=timeout)
        return Launched(done.returncode, done.stdout + done.stderr, self.cwd)

    def status(self, *words: str) -> dict:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), "status", "--json", *words]
        done = subprocess.run(argv, cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=60)
        told: dict = json.loads(done.stdout)
        assert told["exit_status"] == done.returncode, done.stderr
        return told


def killed_at(stage: str, running: Running) -> str:
    """Kill the launcher with -9 when it has got to ``stage``; the stage it was really at."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.process.poll() is None:
        if stage_of(running) == stage:
            running.send(signal.SIGKILL)
            running.process.wait(10)
            return stage_of(running)
        time.sleep(0.002)
    raise AssertionError(f"the launcher has not come to stage {stage}:\n{running.output}")


def stage_of(running: Running) -> str:
    found = list((running.folder / "runs").glob("*/launch.json"))
    return str(json.loads(found[0].read_text())["stage"]) if found else ""


def run_processes(cluster: NetCluster) -> list[str]:
    """What of runs lives on the hosts."""
    return [f"{host.name}: {process}" for host in cluster.hosts for process in host.processes()]


@pytest.mark.parametrize("stage", ["connect", "preflight", "sync", "start", "train", "collect"])
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
    assert "asked for it (gnnfleet stop)" in here.status()["sentence"]
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
        assert stopped.status == 1 and "node1" in stopped.output and "what runs there may go on" in stopped.output
    finally:
        cluster.hosts[1].restore_network()
    assert here.say("stop").status == 0
    assert run_processes(cluster) == []
