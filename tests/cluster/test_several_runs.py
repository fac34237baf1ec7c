"""Several runs at once on the same hosts, all with the same command: none is touched by another's end, and a CUDA
device belongs to one of them."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from failure_kit import STEPS
from launching import Running, write_config
from netns import Machine, NetCluster
from operator_kit import Operator, end_processes, run_processes
from ssh_nodes import ssh_nodes

#: Two devices that nobody uses; asked for processes on them it says nothing.
NVIDIA_SMI = """#!/bin/sh
case "$*" in *--query-gpu*) for gpu in 0 1; do
  echo "$gpu, GPU-$gpu, NVIDIA H100, 81559, 4, Default, Disabled, 0, 550.54"; done;; esac
"""
TRAINS = "rank1 | step 9"
#: Leases of devices, without launches: tests/launcher/test_lease.py.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    path = {"SetEnv": "PATH=/tmp/bin:/usr/local/bin:/usr/bin:/bin"}
    with NetCluster(2, machines={k: Machine(sshd=path) for k in range(2)}) as made:
        for host in made.hosts:
            host.write("/tmp/bin/nvidia-smi", NVIDIA_SMI, mode=0o755)
        yield made


@pytest.fixture
def here(cluster: NetCluster, tmp_path: Path) -> Iterator[Operator]:
    yield Operator(cluster, tmp_path / "home")
    end_processes(cluster)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("several") / "parts")


def config_in(folder: Path, cluster: NetCluster, parts: str, devices: int | None = None) -> Path:
    """A cluster.yml over both hosts, with or without a CUDA device."""
    folder.mkdir()
    (folder / "steps.py").write_text(STEPS)
    nodes = ssh_nodes(cluster)
    if devices is not None:
        nodes = [{**node, "devices": [devices]} for node in nodes]
        for node in nodes:
            del node["procs"]
    return write_config(folder, nodes, data={"folder": parts, "options": {"num_nodes": 400, "num_features": 4}})


def started(config: Path, run_id: str, here: Operator) -> Running:
    return Running(config, "--run-id", run_id, "--", "python", "steps.py", env=here.env)


def steps_on(running: Running) -> None:
    """It makes further steps."""
    made = sum(" | step " in line for line in running.lines)
    deadline = time.monotonic() + 30
    while sum(" | step " in line for line in running.lines) < made + 6:
        assert time.monotonic() < deadline and running.process.poll() is None, running.output
        time.sleep(0.05)


def processes(cluster: NetCluster, run_id: str) -> list[str]:
    """Of a run, on all hosts."""
    return [str(each) for host in cluster.hosts for each in host.processes() if f"/runs/{run_id}/" in each.cmdline]


def test_ending_one_run_leaves_the_others_alone(
    cluster: NetCluster, here: Operator, tmp_path: Path, parts: str
) -> None:
    config = config_in(tmp_path / "project", cluster, parts)
    kept = started(config, "kept", here).await_line(TRAINS)
    interrupted = started(config, "interrupted", here).await_line(TRAINS)
    stopped = started(config, "stopped", here).await_line(TRAINS)
    assert interrupted.send(signal.SIGINT).end().status == 130
    steps_on(kept)
    steps_on(stopped)
    asked = here.say("stop", "stopped")
    done = stopped.end()
    assert asked.status == 0 and done.status == 130, asked.output + done.output
    assert re.search(r"Stopped by \S+@\S+ \(gnnfleet stop\)", done.output), done.output
    for gone in ("interrupted", "stopped"):
        assert processes(cluster, gone) == []
    steps_on(kept)
    assert here.status("kept")["state"] == "running"
    assert kept.send(signal.SIGTERM).end().status == 130
    assert run_processes(cluster) == []


def test_a_failing_run_fails_alone(cluster: NetCluster, here: Operator, tmp_path: Path, parts: str) -> None:
    config = config_in(tmp_path / "project", cluster, parts)
    kept = started(config, "kept2", here).await_line(TRAINS)
    failing = Running(config, "--run-id", "failing", "--", "python", "steps.py", "raise", "1", env=here.env)
    assert failing.end(90).status in (1, 134), failing.output  # gloo may abort it on its way out
    steps_on(kept)
    assert kept.send(signal.SIGINT).end().status == 130


def test_a_held_device_is_refused_with_who_holds_it_and_since_when(
    cluster: NetCluster, here: Operator, tmp_path: Path, parts: str
) -> None:
    first = config_in(tmp_path / "first", cluster, parts, devices=0)
    holder = started(first, "holder", here).await_line(TRAINS)
    refused = started(first, "second", here).end()
    assert refused.status == 3, refused.output
    holds = r"CUDA device 0 is held by run holder of root( \(\S+\))? since [\d-]{10} [\d:]{8} UTC \(pid \d+\)"
    for word in (holds, "gnnfleet stop holder", "because of node0–node1; nothing was changed"):
        assert re.search(word, refused.output), f"{word!r} is not in:\n{refused.output}"
    steps_on(holder)
    other = started(config_in(tmp_path / "other", cluster, parts, devices=1), "beside", here).await_line(TRAINS)
    assert other.send(signal.SIGINT).end().status == 130
    steps_on(holder)
    assert here.say("stop", "holder").status == 0
    assert holder.end().status == 130
    after = started(first, "after", here).await_line(TRAINS)
    assert after.send(signal.SIGINT).end().status == 130, "what was held is free again"


def test_of_two_runs_that_want_a_device_at_once_one_gets_it(
    cluster: NetCluster, here: Operator, tmp_path: Path, parts: str
) -> None:
    """Preflight cannot see it yet: the leases on the nodes decide, and a run that got only some of its nodes ends."""
    config = config_in(tmp_path / "project", cluster, parts, devices=0)
    both = [started(config, f"racer{number}", here) for number in (1, 2)]
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not any(racer.process.poll() is not None for racer in both):
        time.sleep(0.1)
    losers = [racer for racer in both if racer.process.poll() is not None]
    assert losers
    for loser in losers:  # both, where each was first on one node
        done = loser.end()
        assert done.status in (1, 3) and "CUDA device 0 is held by run racer" in done.output, done.output
    for winner in (racer for racer in both if racer not in losers):
        assert winner.await_line(TRAINS).send(signal.SIGINT).end().status == 130
    assert run_processes(cluster) == []
