"""Tests of a launcher whose terminal is closed, or that is killed, at any stage of a launch."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from failure_kit import COUNTS
from launching import Running, write_config
from netns import NetCluster
from operator_kit import Operator, await_stage, run_processes
from ssh_nodes import ssh_nodes
from terminal import Terminal
from waiting import DEADLINE

#: A user script that succeeds at once; collecting its output takes a while over a slow connection.
QUICK = """
import os
folder = os.environ["GNNFLEET_RUN_DIR"] + "/output"
os.makedirs(folder, exist_ok=True)
open(f"{folder}/rows.bin", "wb").write(os.urandom(1_500_000))
print("hello from rank", os.environ["RANK"], flush=True)
"""
WORDS = ("--config", "cluster.yml", "--", "python", "job.py")
#: Slow; tests/launcher/test_failures_local.py always tests a terminal that is closed during training, on one machine.
pytestmark = pytest.mark.slow
BEFORE_NODES = ("preflight", "partition", "sync")


@pytest.fixture
def operator(cluster: NetCluster, tmp_path: Path) -> Operator:
    return Operator(cluster, tmp_path / "home")


@pytest.fixture
def project(cluster: NetCluster, tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.py").write_text(QUICK)
    options = {"num_nodes": 2000, "num_features": 200}
    write_config(folder, ssh_nodes(cluster, (1, 1)), data={"options": options}, train={"epochs": 400})
    return folder


@pytest.mark.parametrize("stage", ["preflight", "partition", "sync", "start", "train", "collect"])
def test_a_closed_terminal(cluster: NetCluster, operator: Operator, project: Path, stage: str) -> None:
    # If the terminal closes before any node was started, the launch ends. Later, the run continues on the nodes; if the
    # run has ended, the launcher still collects its files.
    if stage in ("sync", "collect"):
        for host in cluster.hosts:
            host.slow_link("4mbit")
    (project / "job.py").write_text(COUNTS if stage in ("start", "train") else QUICK)
    with Terminal(*WORDS, cwd=project, env=operator.env) as terminal:
        await_stage(project, stage)
        terminal.hang_up()
        terminal.process.wait(DEADLINE)
    status = operator.status()
    if stage in BEFORE_NODES or (stage == "start" and status["state"] == "stopped"):  # before any node was started
        assert status["state"] == "stopped" and "interrupted" in status["sentence"], status
        assert run_processes(cluster) == []
        resumed(operator, project, status["run_id"])
    elif stage == "collect":
        assert status["state"] == "done", status
        assert len(list(project.glob("runs/*/output/node*/rows.bin"))) == 2, "a detached run is still collected"
    else:
        assert status["state"] == "running" and "detached at" in status["sentence"], status
        stopped = operator.gnnfleet("stop")
        assert stopped.status == 0, stopped.output
        assert operator.status()["state"] == "stopped"
    assert run_processes(cluster) == []


@pytest.mark.parametrize("stage", ["sync", "train"])
def test_resume_after_the_launcher_died(cluster: NetCluster, operator: Operator, project: Path, stage: str) -> None:
    (project / "job.py").write_text(COUNTS)
    running = Running(project / "cluster.yml", "--", "python", "job.py", env=operator.env)
    await_stage(project, stage)
    running.send(signal.SIGKILL).process.wait(DEADLINE)
    status = operator.status()
    assert status["state"] == ("running" if stage == "train" else "never started"), status
    if stage == "train":
        assert "still runs" in operator.gnnfleet("resume", status["run_id"]).output
        assert operator.gnnfleet("stop", "--now").status == 0
    resumed(operator, project, status["run_id"])
    assert run_processes(cluster) == []


def resumed(operator: Operator, project: Path, run_id: str) -> None:
    (project / "job.py").write_text(QUICK)
    again = operator.gnnfleet("resume", run_id)
    assert again.status == 0 and "Done in" in again.output, again.output


def test_a_preparing_launch_is_shown_and_stopped_from_elsewhere(
    cluster: NetCluster, operator: Operator, project: Path
) -> None:
    config = project / "cluster.yml"
    config.write_text(
        config.read_text().replace("num_features: 200", "num_features: 800")
    )  # syncing takes half a minute
    for host in cluster.hosts:
        host.slow_link("1mbit")
    running = Running(config, "--", "python", "job.py", env=operator.env)
    await_stage(project, "sync")
    status = operator.status()
    assert status["state"] == "preparing" and "sending files to its nodes" in status["sentence"], status
    stopped = operator.gnnfleet("stop")
    assert stopped.status == 0 and "nothing had been started on the nodes" in stopped.output, stopped.output
    assert running.end().status == 130
    assert operator.status()["state"] == "stopped" and run_processes(cluster) == []


def test_a_run_stopped_without_a_launcher_resumes_from_its_checkpoint(
    cluster: NetCluster, operator: Operator, project: Path
) -> None:
    running = Running(project / "cluster.yml", env=operator.env).await_epoch(3, cluster.path_on)
    running.send(signal.SIGKILL).process.wait(DEADLINE)
    stopped = operator.gnnfleet("stop")
    assert stopped.status == 0, stopped.output
    (folder,) = (project / "runs").iterdir()
    # The run may have been stopped between the checkpoint and its line in the metrics.
    done = torch.load(folder / "checkpoints/last.pt", weights_only=True)["epoch"]
    again = operator.gnnfleet("resume", folder.name, "--epochs", str(done + 2), "--run-id", "again")
    assert again.status == 0, again.output
    epochs = [line["epoch"] for line in metrics_of(project / "runs/again", "epoch") if line["rank"] == 0]
    assert epochs == [done + 1, done + 2], "steps before the checkpoint are not trained again"


def metrics_of(folder: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]
