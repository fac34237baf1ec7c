"""Tests of serving clusters on this machine: real supervisors, graph servers and runs that attach to them."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.node.procs import alive
from launching import Launched
from serving_kit import ServingKit
from waiting import DEADLINE, wait_until


@pytest.fixture(scope="module", autouse=True)
def private_tmux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMUX_TMPDIR", str(tmp_path_factory.mktemp("tmux")))
        yield


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory, local_workdirs: Path) -> ServingKit:
    return ServingKit(tmp_path_factory.mktemp("serving"), local_workdirs)


@pytest.fixture(scope="module")
def toy(kit: ServingKit) -> Iterator[str]:
    config = kit.serving("toy", 2, run={"encrypt": "on"})
    done = kit.gnnfleet("serve", "--config", str(config))
    assert done.status == 0, done.err + done.out
    assert "serving cluster toy is up: 2 servers, 2 parts" in done.out
    yield "toy"
    done = kit.gnnfleet("serve", "stop", "toy")
    assert done.status == 0, done.err + done.out
    assert "run toy: no process of it is left on its" in done.out


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = {line["epoch"]: line["step_loss"] for line in lines if line["kind"] == "epoch" and "step_loss" in line}
    return [loss for epoch in sorted(epochs) for loss in epochs[epoch]]


def guests(kit: ServingKit) -> list[str]:
    return sorted(path.name for path in (kit.run_dir("toy", 0) / "clients").glob("*.key"))


@pytest.mark.slow
def test_serving_again_leaves_running_servers_alone(kit: ServingKit, toy: str) -> None:
    before = kit.state(toy, 0)["pid"]
    done = kit.gnnfleet("serve", "--config", "toy.yml", "--json")
    assert (done.status, done.json["started"], done.json["version"]) == (0, [], 1)
    assert kit.state(toy, 0)["pid"] == before


@pytest.mark.slow
def test_a_run_attaches_by_name_and_leaves_no_key(kit: ServingKit, toy: str, local_runs: dict[str, Launched]) -> None:
    # The run has the same losses as a run whose own nodes hold the graph.
    kit.training("one", toy, clients=1)
    done = kit.gnnfleet("--config", "one.yml", "--run-id", "run-one")
    assert done.status == 0, done.err + done.out
    assert "attached to serving cluster toy: 2 servers, 2 parts" in done.out
    assert guests(kit) == []
    expected = [loss for epoch in (1, 2) for loss in local_runs["one"].step_losses(epoch)]
    assert losses(kit.folder / "runs/run-one") == pytest.approx(expected, rel=1e-4)
    assert kit.gnnfleet("serve", "status", "toy", "--json").json["exit_status"] == 0


@pytest.mark.slow
def test_a_run_that_is_killed_disturbs_neither_the_servers_nor_another_run(kit: ServingKit, toy: str) -> None:
    kit.training("victim", toy, clients=1, train={"epochs": 500})
    kit.training("other", toy, clients=1, train={"epochs": 10})
    pid = kit.state(toy, 0)["pid"]
    victim = kit.start("--config", "victim.yml", "--run-id", "run-victim", "--plain")
    other = kit.start("--config", "other.yml", "--run-id", "run-other", "--plain")
    state = kit.workdirs / "node0/runs/run-victim/node0/state.json"
    wait_until(lambda: state.exists() and json.loads(state.read_text()).get("ranks"))
    assert {"run-other.key", "run-victim.key"} == set(guests(kit))
    try:
        wait_until(lambda: any("run-victim" in name for name in clients(kit)))
    finally:
        victim.kill()
        for process in json.loads(state.read_text())["processes"]:
            os.kill(process["pid"], signal.SIGKILL)
    out, err = other.communicate(timeout=DEADLINE)
    assert other.returncode == 0, out + err
    assert kit.state(toy, 0)["pid"] == pid
    victim.communicate()
    assert guests(kit) == ["run-victim.key"]
    kit.gnnfleet("stop", "run-victim")
    assert guests(kit) == [], "the key of the killed launcher has been revoked"


def clients(kit: ServingKit) -> list[str]:
    """Return the names of the clients of the graph servers, also of those that have left."""
    nodes = kit.gnnfleet("serve", "status", "toy", "--json").json["nodes"]
    return [client["name"] for node in nodes for client in node["stats"].get("clients", ())]


@pytest.mark.slow
def test_a_dead_server_is_started_again_at_its_address(kit: ServingKit, toy: str) -> None:
    # A server that still runs is not restarted; it only gets the new list of servers.
    old = kit.cluster(toy, 1)
    key = (kit.run_dir(toy, 1) / "service.key").read_text()
    pid = kit.state(toy, 0)["pid"]
    kill_server(kit)
    done = kit.gnnfleet("serve", "status", "toy")
    assert done.status == 1
    assert "1 of 2 servers down; no server has part 1" in done.out
    assert "node1 (local): the supervisor" in done.out and "is gone" in done.out
    bobs_turn = Path(f"{kit.run_dir(toy, 1)}.starting")
    bobs_turn.write_text("bob@desk")
    plan = (kit.folder / "runs" / toy / "run.json").read_text()
    done = kit.gnnfleet("serve", "--config", "toy.yml")
    assert done.status == 1 and "bob@desk is starting serving cluster toy" in done.err
    assert (kit.folder / "runs" / toy / "run.json").read_text() == plan, "the plan of a failed start is not recorded"
    bobs_turn.unlink()
    done = kit.gnnfleet("serve", "--config", "toy.yml", "--json")
    assert done.status == 0, done.err + done.out
    assert (done.json["started"], done.json["version"]) == ([1], old["version"] + 1)
    assert kit.cluster(toy, 0) == kit.cluster(toy, 1) == {**old, "version": old["version"] + 1}
    assert (kit.run_dir(toy, 1) / "service.key").read_text() == key
    assert kit.state(toy, 0)["pid"] == pid


def kill_server(kit: ServingKit) -> None:
    os.kill(kit.state("toy", 1)["pid"], signal.SIGKILL)
    time.sleep(1)


@pytest.mark.slow
def test_a_server_whose_port_is_taken_gets_another_one(kit: ServingKit, toy: str) -> None:
    old, pid = kit.cluster(toy, 1), kit.state(toy, 0)["pid"]
    kill_server(kit)
    host, port = old["nodes"][1]["endpoint"].removeprefix("tcp://").split(":")
    held: list[socket.socket] = []

    def taken() -> bool:
        with suppress(OSError):  # the graph server of the killed supervisor ends a moment later
            held.append(socket.create_server((host, int(port))))
        return bool(held)

    wait_until(taken)
    with held[0]:
        done = kit.gnnfleet("serve", "--config", "toy.yml", "--json")
        assert done.status == 0, done.err + done.out
        assert done.json["started"] == [1]
    new = kit.cluster(toy, 0)
    assert new == kit.cluster(toy, 1) and new["nodes"][0] == old["nodes"][0]
    assert new["nodes"][1]["endpoint"] != old["nodes"][1]["endpoint"]
    assert kit.state(toy, 0)["pid"] == pid
    log = kit.run_dir(toy, 0) / "logs/server.log"
    wait_until(lambda: f"cluster.json version {new['version']}: graph servers are" in log.read_text())


def test_a_running_cluster_is_not_changed(kit: ServingKit, toy: str) -> None:
    before = [kit.state(toy, k)["pid"] for k in range(2)]
    kit.serving("toy", 3, run={"encrypt": "off"})
    done = kit.gnnfleet("serve", "--config", "toy.yml")
    kit.serving("toy", 2, run={"encrypt": "on"})
    assert done.status == 2 and done.err == (
        "error: serving cluster toy runs, and this config differs from it (nodes: local added; run.encrypt: off, and "
        "it is encrypted). To change it, `gnnfleet serve stop toy` first; or choose another --name\n"
    )
    assert [kit.state(toy, k)["pid"] for k in range(2)] == before


@pytest.mark.slow
def test_a_stopped_cluster_is_created_again_with_other_nodes(kit: ServingKit) -> None:
    kit.serving("grows", 1)
    assert kit.gnnfleet("serve", "--config", "grows.yml").status == 0
    assert kit.gnnfleet("serve", "stop", "grows").status == 0
    try:
        kit.serving("grows", 2)
        done = kit.gnnfleet("serve", "--config", "grows.yml")
        assert done.status == 0, done.err + done.out
        assert "does not run, and this config differs from it (nodes: local added): it is created again" in done.out
        assert [node["parts"] for node in kit.cluster("grows", 1)["nodes"]] == [[0], [1]]
        assert kit.run_dir("grows", 0).with_name("node0-before").is_dir()
    finally:
        assert kit.gnnfleet("serve", "stop", "grows").status == 0


def test_a_key_for_a_notebook(kit: ServingKit, toy: str) -> None:
    done = kit.gnnfleet("serve", "key", "toy", "-o", "toy.key", "--for", "ann")
    assert done.status == 0, done.err
    path = kit.folder / "toy.key"
    values = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert values["endpoints"] == [node["endpoint"] for node in kit.cluster(toy, 0)["nodes"] if node["parts"]]
    assert values["server"] == json.loads((kit.run_dir(toy, 0) / "service.key").read_text())["public"]
    (admitted,) = (kit.run_dir(toy, 0) / "clients").glob("ann-*.key")
    assert admitted.read_text() == values["public"] + "\n"
    for k in range(2):
        (kit.run_dir(toy, k) / "clients" / admitted.name).unlink()


@pytest.mark.slow
def test_another_machine_finds_the_cluster_on_the_hosts_of_its_file(kit: ServingKit, toy: str, tmp_path: Path) -> None:
    # A machine that did not start the cluster has no entry for it in its list of clusters; it finds the cluster by
    # asking the hosts of its config file.
    other_kit = ServingKit(tmp_path, kit.workdirs)
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    config = other_kit.serving("toy", 2, run={"encrypt": "on"}, data={"folder": str(kit.folder / "parts")})
    assert "is not known on this machine" in other_kit.gnnfleet("serve", "status", "toy", env=env).err
    done = other_kit.gnnfleet("serve", "status", "toy", "--config", str(config), env=env)
    assert "serving cluster toy is up: 2 servers, 2 parts" in done.out, done.err
    done = other_kit.gnnfleet("serve", "--config", str(config), "--json", env=env)
    assert (done.status, done.json["started"]) == (0, []), done.err


@pytest.mark.slow
def test_a_server_that_fails_to_start_is_the_reason_and_no_process_is_left(kit: ServingKit, tmp_path: Path) -> None:
    config = kit.serving("broken", 2, run={"start_timeout": 0.2})
    done = kit.gnnfleet("serve", "--config", str(config))
    assert done.status == 1
    assert "(local): " in done.err and "run.start_timeout" in done.err
    wait_until(lambda: not any(supervisor_runs(kit, k) for k in range(2)))  # a server that started late ends by itself


def supervisor_runs(kit: ServingKit, server: int) -> bool:
    path = kit.run_dir("broken", server) / "state.json"
    state = json.loads(path.read_text()) if path.exists() else {}
    return bool(state) and alive(state["pid"], state["start_ticks"])


@pytest.mark.slow
def test_an_attached_run_starts_again_after_a_failure(kit: ServingKit, toy: str) -> None:
    train = {"epochs": 12, "checkpoint_seconds": 0.2}
    kit.training("whole", toy, clients=1, train=train)
    done = kit.gnnfleet("--config", "whole.yml", "--run-id", "run-whole")
    assert done.status == 0, done.err + done.out
    kit.training("again", toy, clients=2, train=train, run={"restarts": 2, "grace": 1, "peer_timeout": 3})
    before = kit.state(toy, 0)["pid"]
    running = kit.start("--config", "again.yml", "--run-id", "run-again", "--plain")
    node = kit.workdirs / "node1/runs/run-again/node1"
    wait_until(lambda: (node / "progress-rank1").exists() and _epoch(node) >= 3)
    os.kill(json.loads((node / "procs/rank1.json").read_text())["pid"], signal.SIGKILL)
    out, err = running.communicate(timeout=DEADLINE)
    assert running.returncode == 0, out + err
    assert "restart 1 of 2: rank 1 on node1 (local) was killed by signal 9 (SIGKILL); going on with 2 of 2 nodes" in out
    assert losses(kit.folder / "runs/run-again") == pytest.approx(losses(kit.folder / "runs/run-whole"), rel=1e-4)
    assert kit.state(toy, 0)["pid"] == before, "the serving cluster was not touched"
    assert guests(kit) == [], "the key of the run was valid until its end"


def _epoch(node: Path) -> int:
    words = (node / "progress-rank1").read_text().split()
    return int(words[0]) if words else 0
