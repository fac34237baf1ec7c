"""The launcher's terminal is closed, or its machine goes down, at any moment: what is said from elsewhere is true,
and the run can be taken up, stopped or launched again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from failure_kit import COUNTS
from launching import Running, write_config
from netns import NetCluster
from operator_kit import Operator, await_stage, run_processes
from ssh_nodes import ssh_nodes
from terminal import Terminal

#: A good run, whose output takes a while to be collected over a slow line.
QUICK = """
import os
folder = os.environ["GNNFLEET_RUN_DIR"] + "/output"
os.makedirs(folder, exist_ok=True)
open(f"{folder}/rows.bin", "wb").write(os.urandom(1_500_000))
print("hello from rank", os.environ["RANK"], flush=True)
"""
WORDS = ("--config", "cluster.yml", "--", "python", "job.py")
#: Closed while it trains, on this machine: tests/launcher/test_failures_local.py.
pytestmark = pytest.mark.slow
BEFORE_NODES = ("preflight", "partition", "sync")


@pytest.fixture
def here(cluster: NetCluster, tmp_path: Path) -> Operator:
    return Operator(cluster, tmp_path / "home")


@pytest.fixture
def project(cluster: NetCluster, tmp_path: Path) -> Path:
    """Folder with a cluster.yml whose parts have yet to be made, and a script."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text(QUICK)
    options = {"num_nodes": 2000, "num_features": 200}
    write_config(folder, ssh_nodes(cluster, (1, 1)), data={"options": options}, train={"epochs": 400})
    return folder


@pytest.mark.parametrize("stage", ["preflight", "partition", "sync", "start", "train", "collect"])
def test_a_closed_terminal(cluster: NetCluster, here: Operator, project: Path, stage: str) -> None:
    """Nothing runs on the nodes yet: the launch ends; afterwards the run goes on, or is collected to its end."""
    if stage in ("sync", "collect"):
        for host in cluster.hosts:
            host.slow_link("4mbit")
    (project / "job.py").write_text(COUNTS if stage in ("start", "train") else QUICK)
    with Terminal(*WORDS, cwd=project, env=here.env) as terminal:
        await_stage(project, stage)
        terminal.hang_up()
        terminal.process.wait(60)
    told = here.status()
    if stage in BEFORE_NODES or (stage == "start" and told["state"] == "stopped"):  # before any node was told to
        assert told["state"] == "stopped" and "interrupted" in told["sentence"], told
        assert run_processes(cluster) == []
        resumed(here, project, told["run_id"])
    elif stage == "collect":
        assert told["state"] == "done", told
        assert len(list(project.glob("runs/*/output/node*/rows.bin"))) == 2, "collected although nobody looked"
    else:
        assert told["state"] == "running" and "detached at" in told["sentence"], told
        stopped = here.say("stop")
        assert stopped.status == 0, stopped.output
        assert here.status()["state"] == "stopped"
    assert run_processes(cluster) == []


@pytest.mark.parametrize("stage", ["sync", "train"])
def test_resume_after_the_launcher_died(cluster: NetCluster, here: Operator, project: Path, stage: str) -> None:
    (project / "job.py").write_text(COUNTS)
    running = Running(project / "cluster.yml", "--", "python", "job.py", env=here.env)
    await_stage(project, stage)
    running.send(signal.SIGKILL).process.wait(10)
    told = here.status()
    assert told["state"] == ("running" if stage == "train" else "never started"), told
    if stage == "train":
        assert "still runs" in here.say("resume", told["run_id"]).output
        assert here.say("stop", "--now").status == 0
    resumed(here, project, told["run_id"])
    assert run_processes(cluster) == []


def resumed(here: Operator, project: Path, run_id: str) -> None:
    """The run is launched again from elsewhere, this time to a good end."""
    (project / "job.py").write_text(QUICK)
    again = here.say("resume", run_id)
    assert again.status == 0 and "Done in" in again.output, again.output


def test_a_launch_that_prepares_is_seen_and_stopped_from_elsewhere(
    cluster: NetCluster, here: Operator, project: Path
) -> None:
    config = project / "cluster.yml"
    config.write_text(config.read_text().replace("num_features: 200", "num_features: 800"))  # half a minute of sync
    for host in cluster.hosts:
        host.slow_link("1mbit")
    running = Running(config, "--", "python", "job.py", env=here.env)
    await_stage(project, "sync")
    told = here.status()
    assert told["state"] == "preparing" and "sending files to its nodes" in told["sentence"], told
    stopped = here.say("stop")
    assert stopped.status == 0 and "nothing had been started on the nodes" in stopped.output, stopped.output
    assert running.end().status == 130
    assert here.status()["state"] == "stopped" and run_processes(cluster) == []


def test_a_run_stopped_without_a_launcher_goes_on_from_its_checkpoint(
    cluster: NetCluster, here: Operator, project: Path
) -> None:
    running = Running(project / "cluster.yml", env=here.env).await_line("epoch 3/400")
    running.send(signal.SIGKILL).process.wait(10)
    stopped = here.say("stop")
    assert stopped.status == 0, stopped.output
    (folder,) = (project / "runs").iterdir()
    assert (folder / "checkpoints/last.pt").exists()
    done = max(line["epoch"] for line in metrics_of(folder, "checkpoint"))
    again = here.say("resume", folder.name, "--epochs", str(done + 2), "--run-id", "again")
    assert again.status == 0, again.output
    epochs = [line["epoch"] for line in metrics_of(project / "runs/again", "epoch") if line["rank"] == 0]
    assert epochs == [done + 1, done + 2], "what was trained before is not trained again"


def metrics_of(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
