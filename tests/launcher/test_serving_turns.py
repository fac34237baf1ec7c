"""Tests of the lock that lets one launcher at a time start the servers of a serving cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.resolve import resolve_serving
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import FleetError
from launcher.node import procs
from launcher.plan.build import make_plan
from launcher.plan.model import LaunchPlan
from launcher.report.launch_file import user_at_host
from launcher.serving import start_stop
from launcher.serving.start_stop import start_lock
from launcher.transport import open_transport
from launcher.transport.base import Transport
from waiting import wait_until


@pytest.fixture
def plan(tmp_path: Path) -> LaunchPlan:
    nodes = tuple(NodeConfig("localhost", workdir=str(tmp_path / f"node{k}"), role="server") for k in range(2))
    config = ClusterConfig(nodes, DataConfig("synthetic"), transport="local")
    return make_plan(resolve_serving(config), run_id="products", code_digest="abc")


@pytest.fixture
def transports(plan: LaunchPlan) -> Iterator[dict[int, Transport]]:
    config = ClusterConfig(tuple(NodeConfig("localhost") for _ in plan.nodes), DataConfig("synthetic"))
    opened = {k: open_transport(replace(config, transport="local"), k) for k in range(2)}
    yield opened
    for line in opened.values():
        line.close()


def folders(plan: LaunchPlan) -> list[Path]:
    return [Path(node.run_dir) for node in plan.nodes]


def test_only_one_launcher_starts_servers_at_a_time(plan: LaunchPlan, transports: dict[int, Transport]) -> None:
    only_second = replace(plan, nodes=plan.nodes[1:])
    with start_lock(only_second, transports):
        pattern = r"node1 \(local\): .+@.+ is starting serving cluster products at this moment; run `gnnfleet serve`"
        with pytest.raises(FleetError, match=pattern), start_lock(plan, transports):
            pytest.fail("two at once")
    with start_lock(plan, transports):
        assert all(Path(f"{folder}.starting").exists() for folder in folders(plan))
    assert not any(Path(f"{folder}.starting").exists() for folder in folders(plan))


def test_the_lock_of_a_dead_launcher_on_another_machine_expires_after_90_seconds(
    plan: LaunchPlan, transports: dict[int, Transport]
) -> None:
    left = Path(f"{folders(plan)[0]}.starting")
    left.parent.mkdir(parents=True)
    left.write_text(f"bob@desk {os.getpid()} 1 {procs.boot_id()}")
    with pytest.raises(FleetError, match=r"bob@desk is starting .* or after 90 s if it was killed"):
        with start_lock(plan, transports):
            pytest.fail("bob's lock is still valid")
    assert left.exists(), "another user's lock is not ours to remove"
    os.utime(left, (time.time() - 100, time.time() - 100))
    with start_lock(plan, transports):
        assert not left.read_text().startswith("bob@desk")


def test_the_lock_of_a_dead_launcher_on_this_machine_is_ignored(
    plan: LaunchPlan, transports: dict[int, Transport]
) -> None:
    left = Path(f"{folders(plan)[0]}.starting")
    left.parent.mkdir(parents=True)
    left.write_text(f"{user_at_host()} {os.getpid()} 1 {procs.boot_id()}")
    with start_lock(plan, transports):
        assert left.read_text() != f"{user_at_host()} {os.getpid()} 1 {procs.boot_id()}"


def test_a_lock_is_renewed_while_it_is_in_use(
    plan: LaunchPlan, transports: dict[int, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_stop, "_TOUCH_EVERY", 0.05)
    mark = Path(f"{folders(plan)[0]}.starting")
    with start_lock(plan, transports):
        os.utime(mark, (1.0, 1.0))
        wait_until(lambda: mark.stat().st_mtime > 1.0)


def test_servers_started_by_another_launcher_are_not_started_again(
    plan: LaunchPlan, transports: dict[int, Transport]
) -> None:
    folder = folders(plan)[1]
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    with pytest.raises(FleetError, match=r"node1 \(local\): another command has started its graph server; run"):
        with start_lock(plan, transports):
            pytest.fail("it runs")
    assert not Path(f"{folder}.starting").exists()
    (folder / "result.json").write_text("{}")
    with start_lock(plan, transports):
        pass


def test_a_server_killed_a_moment_ago_can_be_started_again(plan: LaunchPlan, transports: dict[int, Transport]) -> None:
    folder = folders(plan)[1]
    folder.mkdir(parents=True)
    killed = subprocess.Popen(["sleep", "60"])
    process = procs.look(killed.pid)
    assert process is not None
    state = json.dumps({"state": "running", "pid": killed.pid, "processes": [{"pid": os.getpid()}]})
    (folder / "state.json").write_text(state)
    with pytest.raises(FleetError, match="another command has started its graph server"):
        with start_lock(plan, transports):
            pytest.fail("it runs")
    killed.kill()
    wait_until(lambda: not procs.alive(killed.pid, process.start_ticks))  # a zombie, as its parent has not reaped it
    for _ in range(2):
        (folder / "state.json").write_text(state)
        with start_lock(plan, transports):
            pass
        killed.wait()
