"""Tests of server-client mode on five SSH hosts: two servers with two parts each, three clients with two ranks each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import launching
from launching import Launched
from netns import NetCluster
from operator_kit import end_processes
from server_client_kit import RESTARTS, SERVERS, STEPS, Stage, curves_of_one_process, every_seed_once, same_curves

SHARED_DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "debian"


@pytest.fixture(scope="module")
def five_hosts() -> Iterator[NetCluster]:
    with NetCluster(5) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def hosts(five_hosts: NetCluster, tmp_path_factory: pytest.TempPathFactory, local_workdirs: Path) -> Stage:
    folder = tmp_path_factory.mktemp("server-client")
    return Stage(five_hosts, folder, curves_of_one_process(folder / "alone", local_workdirs))


@pytest.fixture
def stage(hosts: Stage) -> Iterator[Stage]:
    yield hosts
    end_processes(hosts.cluster)  # a failed test must not make the next one fail


@pytest.mark.slow
def test_a_killed_server_is_restarted_and_no_seed_is_lost(
    five_hosts: NetCluster, tmp_path: Path, local_runs: dict[str, Launched]
) -> None:
    # The losses of two clients with one process each equal those of one process with one part.
    stage = Stage(five_hosts, tmp_path, [local_runs["one"].step_losses(epoch) for epoch in (1, 2)], procs=(1, 1))
    try:
        run = stage.run(pause=0.3, train=launching.TRAIN).await_step(1, 2)
        run.kill_server(1)
        done = run.end()
        same_curves(done, stage)
        every_seed_once(run)
        no_part_on_a_client(stage)
        assert "was killed by signal 9 (SIGKILL); restart 1 of 3 in 0.5 s" in done.output
        assert stage.left() == []
    finally:
        end_processes(five_hosts)


@pytest.mark.slow
def test_the_loss_curve_equals_one_process_and_clients_hold_no_part(stage: Stage) -> None:
    run = stage.run()
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    no_part_on_a_client(stage)
    assert stage.left() == []


def no_part_on_a_client(stage: Stage) -> None:
    for k, host in enumerate(stage.cluster.hosts):
        arrays = list((host.folder / "disk/data").rglob("part*/**/*.npy"))
        assert bool(arrays) == (k in SERVERS), f"node{k}"


# --- a server is lost ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_replicas_clients_do_not_wait_for_a_killed_server(stage: Stage) -> None:
    run = stage.run(replicas=2).await_step(2, 3)
    run.kill_server(0)
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    assert stage.left() == []


@pytest.mark.slow
def test_without_restarts_a_killed_server_ends_the_run_and_is_named_with_its_parts(stage: Stage) -> None:
    run = stage.run(server_restarts=0).await_step(1, 5)
    killed = time.time()
    run.kill_server(1)
    done = run.end()
    ended_by(done, stage, 1, "server", killed, 10, "was killed by signal 9", "no other node holds parts 2, 3")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_whose_host_is_powered_off(stage: Stage, replicas: int) -> None:
    host, run = stage.cluster.hosts[1], stage.run(replicas=replicas).await_step(2, 3)
    try:
        cut = time.time()
        host.power_cut()
        done = run.end()
        left = stage.left()
    finally:
        host.power_on()
        host.wait_until_up()
    if replicas == 1:
        return ended_by(done, stage, 1, "node", cut, 30, "no sign of life for 6 s", "no other node holds parts 2, 3")
    same_curves(done, stage)
    every_seed_once(run)
    assert "parts 0, 1, 2, 3 are served by node0" in done.output and left == []


@pytest.mark.slow
def test_clients_wait_for_a_suspended_server_as_long_as_configured(stage: Stage) -> None:
    # A suspended server is not restarted, because its process lives. Clients notice after 30 s that it does not answer.
    # The first failure in the report is the suspended server, and the rank that waited for it.
    run = stage.run(server_wait=8).await_step(1, 5)
    run.stop_server(1)
    stopped = time.time()
    done = run.end()
    first = done.result["first_failure"]
    assert done.status == 1 and (first["name"], first["node_rank"]) == ("node", 1), done.output
    server = f"the graph server of node1 (root@{stage.cluster.hosts[1].address})"
    assert first["note"].startswith(f"{server} is stopped (SIGSTOP or a debugger): rank "), first
    assert f" for {server} to answer a " in first["note"]
    assert "parts 2, 3: no graph server that holds them came back within 8 s (run.server_wait)" in done.output
    assert (done.run_dir / "result.json").stat().st_mtime - stopped < 30 + 8 + 30
    assert stage.left() == []


@pytest.mark.slow
def test_with_replicas_the_other_server_replaces_a_suspended_one(stage: Stage) -> None:
    run = stage.run(replicas=2, server_wait=8).await_step(2, 3)
    run.stop_server(1)
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    assert stage.left() == []


@pytest.mark.slow
def test_a_power_off_of_the_only_clients_host_ends_the_run_with_a_report(stage: Stage) -> None:
    # The run continues if any single server is lost, but must end if the host of its only client is lost.
    host, run = stage.cluster.hosts[2], replace(stage, procs=(2,), serial=100).run(replicas=2).await_step(1, 5)
    try:
        host.power_cut()
        cut = time.time()
        done = run.end()
        left = stage.left()
    finally:
        host.power_on()
        host.wait_until_up()
    assert done.status == 1 and done.result["state"] == "failed", done.output
    assert done.result["first_failure"]["node_rank"] == 2 and "no sign of life for 6 s" in done.output
    assert (done.run_dir / "result.json").stat().st_mtime - cut < 45
    assert all((done.run_dir / f"logs/node{k}/server.log").is_file() for k in SERVERS) and left == []


def ended_by(done: Launched, stage: Stage, k: int, name: str, since: float, seconds: float, *words: str) -> None:
    first = done.result["first_failure"]
    assert done.status >= 1 and (first["node_rank"], first["name"]) == (k, name), done.output
    (head,) = (line for line in done.output.splitlines() if line.startswith("The run failed:"))
    assert f"node{k} (root@{stage.cluster.hosts[k].address})" in head
    for word in words:
        assert word in head, done.output
    assert (done.run_dir / "result.json").stat().st_mtime - since < seconds
    assert stage.left() == []


# --- a client is lost ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_restarts_a_killed_client_trains_again(stage: Stage) -> None:
    run = stage.run(**RESTARTS).await_step(2, 25)
    run.kill_rank(3)
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    assert "going on with 5 of 5 nodes from epoch" in done.output and stage.left() == []


@pytest.mark.slow
def test_with_restarts_the_others_go_on_without_a_powered_off_client(stage: Stage) -> None:
    host, run = stage.cluster.hosts[4], stage.run(**RESTARTS).await_step(2, 25)
    try:
        host.power_cut()
        done = run.end()
        left = stage.left()
    finally:
        host.power_on()
        host.wait_until_up()
    same_curves(done, stage)
    every_seed_once(run)
    assert [one["without"] for one in done.result["restarts"]] == [[4]] and left == [], done.output


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["kill", "power"])
def test_by_default_a_lost_client_ends_the_run(stage: Stage, trouble: str) -> None:
    host, run = stage.cluster.hosts[3], stage.run().await_step(2, 3)
    since = time.time()
    try:
        run.kill_rank(3) if trouble == "kill" else host.power_cut()
        done = run.end()
    finally:
        if trouble == "power":
            host.power_on()
            host.wait_until_up()
    if trouble == "power":
        return ended_by(done, stage, 3, "node", since, 30, "no sign of life for 6 s")
    assert done.result["first_failure"]["name"] in ("rank2", "rank3")
    ended_by(done, stage, 3, done.result["first_failure"]["name"], since, 10, "was killed by signal 9 (SIGKILL)")


@pytest.mark.slow
def test_losing_the_lead_client_ends_the_run(stage: Stage) -> None:
    run = stage.run().await_step(2, 3)
    since = time.time()
    run.kill_rank(2)
    done = run.end()
    assert done.result["first_failure"]["name"] in ("rank0", "rank1")
    ended_by(done, stage, 2, done.result["first_failure"]["name"], since, 10, "was killed by signal 9 (SIGKILL)")


# --- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 2])
def test_a_network_cut_of_five_seconds_changes_nothing(stage: Stage, k: int) -> None:
    host, run = stage.cluster.hosts[k], stage.run().await_step(2, 3)
    host.cut_network()
    time.sleep(5)
    host.restore_network()
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    assert stage.left() == []


@pytest.mark.slow
def test_a_run_goes_on_without_a_server_that_was_cut_off_for_ten_seconds(stage: Stage) -> None:
    # When its network is back, the server says that it has lost the lead node.
    host, run = stage.cluster.hosts[1], stage.run(replicas=2, pause=0.3).await_step(1, 5)
    host.cut_network()
    time.sleep(10)
    host.restore_network()
    done = run.end()
    same_curves(done, stage)
    every_seed_once(run)
    assert "node1 (" in done.output and "failed (node2" in done.output, done.output
    assert done.result["state"] == "done" and stage.left() == []


@pytest.mark.slow
def test_a_server_behind_ten_megabits_only_slows_the_run(stage: Stage) -> None:
    host, run = stage.cluster.hosts[0], stage.run().await_step(1, 3)
    host.slow_link("10mbit")
    try:
        done = run.end()
    finally:
        host.full_speed()
    same_curves(done, stage)
    every_seed_once(run)
    assert stage.left() == []


@pytest.mark.slow
def test_a_server_and_two_clients_lost_one_after_the_other(stage: Stage) -> None:
    # The host of a server is powered off. One client is killed while the other clients still search for the parts of
    # that server, another client later, during evaluation.
    host, run = stage.cluster.hosts[1], stage.run(replicas=2, **RESTARTS).await_step(1, 10)
    try:
        host.power_cut()
        time.sleep(1)
        run.kill_rank(3)
        run.await_step(2, STEPS - 1)
        run.kill_rank(4)
        done = run.end()
        left = stage.left()
    finally:
        host.power_on()
        host.wait_until_up()
    same_curves(done, stage)
    every_seed_once(run)
    assert left == []


@pytest.mark.slow
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the debian graph is not beside the repository")
@pytest.mark.timeout(1800)
def test_the_loss_curve_on_the_real_graph_equals_one_process(stage: Stage, local_workdirs) -> None:
    # Train two epochs, once without faults and once with a server that is killed in the second epoch.
    data = {"dataset": "file", "source": str(SHARED_DATA), "options": {}}
    train = {"hidden": 64, "fanouts": [15, 10, 5], "batch_size": 1024, "epochs": 2, "lr": 0.004}
    curves = curves_of_one_process(stage.folder / "real-alone", local_workdirs, data, train)
    real = replace(stage, folder=stage.folder / "real", curves=curves)
    real.folder.mkdir()
    for killed in (False, True):
        run = real.run(pause=0, data=data, train=train)
        if killed:
            run.await_step(2, 5, timeout=600).kill_server(0)
        done = run.end(600)
        # Six ranks add gradients in another order than one: 1e-7 in the first step, about 1e-4 in the last (64th) step.
        same_curves(done, real, rel=1e-3)
        every_seed_once(run, seeds=31_833)
        assert real.left() == []
