"""Tests of simultaneous runs on the same hosts: no run affects another, and a CUDA device serves one run at a time."""

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
from waiting import DEADLINE, wait_until

#: A stub of nvidia-smi: it lists two idle devices, and no processes.
NVIDIA_SMI = """#!/bin/sh
case "$*" in *--query-gpu*) for gpu in 0 1; do
  echo "$gpu, GPU-$gpu, NVIDIA H100, 81559, 4, Default, Disabled, 0, 550.54"; done;; esac
"""
TRAINS = "rank1 | step 9"
#: Slow; tests/launcher/test_lease.py tests leases of devices without launches.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    path = {"SetEnv": "PATH=/tmp/bin:/usr/local/bin:/usr/bin:/bin"}
    with NetCluster(2, machines={k: Machine(sshd=path) for k in range(2)}) as made:
        for host in made.hosts:
            host.write("/tmp/bin/nvidia-smi", NVIDIA_SMI, mode=0o755)
        yield made


@pytest.fixture
def operator(cluster: NetCluster, tmp_path: Path) -> Iterator[Operator]:
    yield Operator(cluster, tmp_path / "home")
    end_processes(cluster)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("several") / "parts")


def config_in(folder: Path, cluster: NetCluster, parts: str, devices: int | None = None) -> Path:
    """Write a cluster.yml with one node on each of two hosts.

    devices: CUDA device of each node, or None.
    """
    folder.mkdir()
    (folder / "steps.py").write_text(STEPS)
    nodes = ssh_nodes(cluster)
    if devices is not None:
        nodes = [{**node, "devices": [devices]} for node in nodes]
        for node in nodes:
            del node["procs"]
    return write_config(folder, nodes, data={"folder": parts, "options": {"num_nodes": 400, "num_features": 4}})


def started(config: Path, run_id: str, operator: Operator) -> Running:
    return Running(config, "--run-id", run_id, "--", "python", "steps.py", env=operator.env)


def steps_on(running: Running) -> None:
    made = sum(" | step " in line for line in running.lines)
    deadline = time.monotonic() + DEADLINE
    while sum(" | step " in line for line in running.lines) < made + 6:
        assert time.monotonic() < deadline and running.process.poll() is None, running.output
        time.sleep(0.05)


def processes(cluster: NetCluster, run_id: str) -> list[str]:
    return [str(each) for host in cluster.hosts for each in host.processes() if f"/runs/{run_id}/" in each.cmdline]


def test_ending_one_run_leaves_the_others_alone(
    cluster: NetCluster, operator: Operator, tmp_path: Path, parts: str
) -> None:
    config = config_in(tmp_path / "project", cluster, parts)
    kept = started(config, "kept", operator).await_line(TRAINS)
    interrupted = started(config, "interrupted", operator).await_line(TRAINS)
    stopped = started(config, "stopped", operator).await_line(TRAINS)
    assert interrupted.send(signal.SIGINT).end().status == 130
    steps_on(kept)
    steps_on(stopped)
    asked = operator.gnnfleet("stop", "stopped")
    done = stopped.end()
    assert asked.status == 0 and done.status == 130, asked.output + done.output
    assert re.search(r"Stopped by \S+@\S+ \(gnnfleet stop\)", done.output), done.output
    for gone in ("interrupted", "stopped"):
        assert processes(cluster, gone) == []
    steps_on(kept)
    assert operator.status("kept")["state"] == "running"
    assert kept.send(signal.SIGTERM).end().status == 130
    assert run_processes(cluster) == []


def test_a_failing_run_fails_alone(cluster: NetCluster, operator: Operator, tmp_path: Path, parts: str) -> None:
    config = config_in(tmp_path / "project", cluster, parts)
    kept = started(config, "kept2", operator).await_line(TRAINS)
    failing = Running(config, "--run-id", "failing", "--", "python", "steps.py", "raise", "1", env=operator.env)
    assert failing.end().status in (1, 134), failing.output  # gloo may abort the process when it ends
    steps_on(kept)
    assert kept.send(signal.SIGINT).end().status == 130


def test_a_leased_device_is_refused_with_its_holder_and_start_time(
    cluster: NetCluster, operator: Operator, tmp_path: Path, parts: str
) -> None:
    first = config_in(tmp_path / "first", cluster, parts, devices=0)
    holder = started(first, "holder", operator).await_line(TRAINS)
    refused = started(first, "second", operator).end()
    assert refused.status == 3, refused.output
    holds = r"CUDA device 0 is held by run holder of root( \(\S+\))? since [\d-]{10} [\d:]{8} UTC \(pid \d+\)"
    for word in (holds, "gnnfleet stop holder", "because of node0–node1; nothing was changed"):
        assert re.search(word, refused.output), f"{word!r} is not in:\n{refused.output}"
    steps_on(holder)
    other = started(config_in(tmp_path / "other", cluster, parts, devices=1), "beside", operator).await_line(TRAINS)
    assert other.send(signal.SIGINT).end().status == 130
    steps_on(holder)
    words = ("--run-id", "after", "--wait", "--", "python", "steps.py")
    after = Running(first, *words, env=operator.env).await_line("waiting for run holder of root on node0, node1 since")
    third = started(first, "third", operator).end()
    assert third.status == 3 and "CUDA device 0 is waited for by run after of root" in third.output, third.output
    assert operator.gnnfleet("stop", "holder").status == 0
    assert holder.end().status == 130
    assert after.await_line(TRAINS).send(signal.SIGINT).end().status == 130, "its turn has come"


def test_only_one_of_two_simultaneous_runs_gets_a_device(
    cluster: NetCluster, operator: Operator, tmp_path: Path, parts: str
) -> None:
    # When both runs pass preflight, neither has leased the device yet; the supervisor on each node gives the lease to
    # one of the runs. A run that did not get the device on every node ends.
    config = config_in(tmp_path / "project", cluster, parts, devices=0)
    both = [started(config, f"racer{number}", operator) for number in (1, 2)]
    # One trains on, or both end, if each got the device on one node.
    wait_until(lambda: all(TRAINS in racer.output or racer.process.poll() is not None for racer in both))
    losers = 0
    for racer in both:
        if TRAINS in racer.output:
            assert racer.send(signal.SIGINT).end().status == 130
        else:
            losers += 1
            done = racer.end()
            assert done.status in (1, 3) and "CUDA device 0 is held by run racer" in done.output, done.output
    assert losers
    assert run_processes(cluster) == []
