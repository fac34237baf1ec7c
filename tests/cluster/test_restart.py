"""Tests of runs on several hosts that restart after a host was lost, with and without their launcher."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from failure_kit import Scene
from launching import Running
from netns import NetCluster
from ssh_nodes import WORKDIR
from waiting import DEADLINE, stretched, wait_until

pytestmark = pytest.mark.slow
GO = "/tmp/go"

#: A user script whose ranks average a number in each step, as in data-parallel training; every node writes checkpoints.
AVERAGES = """
import hashlib, json, os, pathlib, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, run = dist.get_rank(), pathlib.Path(os.environ["GNNFLEET_RUN_DIR"])
resume = os.environ.get("GNNFLEET_RESUME")
begin = torch.tensor([int(pathlib.Path(resume).read_bytes()[:-73]) if resume and rank == 0 else 0])
dist.broadcast(begin, 0)
step, loss = int(begin), 0.0
print("begins at", step, "of", dist.get_world_size(), flush=True)
while True:
    go = torch.tensor([float(os.path.exists(sys.argv[1])), 1.0 / (step + 1)])
    dist.all_reduce(go)
    if go[0] > 0:
        break
    step += 1
    line = {"t": time.time(), "kind": "step", "rank": rank, "epoch": 1, "step": step, "steps": 9999}
    with open(run / f"metrics-rank{rank}.jsonl", "a") as file:
        print(json.dumps({**line, "loss": float(go[1]) / dist.get_world_size()}), file=file)
    if os.environ["LOCAL_RANK"] == "0":
        data = str(step).encode()
        comment = b"sha256:" + hashlib.sha256(data).hexdigest().encode()
        (run / f"checkpoints/epoch-0000-step-{step:06d}.pt").write_bytes(data + b"G\\0" + comment)
    time.sleep(0.05)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def begun(scene: Scene) -> Iterator[Running]:
    (scene.folder / "train.py").write_text(AVERAGES)
    scene.run = {"restarts": 3, "connect_timeout": 3, "lost_after": 20}
    scene.data = {"replicas": 2}
    for host in scene.cluster.hosts:  # another file's test may have had a run of this name
        host.run(["rm", "-rf", f"{WORKDIR}/runs/again"])
    running = scene.running("--run-id", "again", "--", "python", "train.py", GO)
    await_checkpoints(scene, running)
    yield running
    running.process.kill()
    for host in scene.cluster.hosts:
        if not host.init_pid:
            host.power_on()
            host.wait_until_up()
        host.run(["rm", "-f", GO])
        for process in host.processes():
            host.run(["kill", "-9", str(process.pid)], check=False)
        host.run(["rm", "-rf", f"{WORKDIR}/runs/again"])


def await_checkpoints(scene: Scene, running: Running) -> None:
    """Wait until every host has written a checkpoint of the run."""
    running.await_line("begins at 0 of 4")
    places = [f"{WORKDIR}/runs/{running.run_dir.name}/node{k}/checkpoints" for k in range(3)]
    wait_until(lambda: all(any(scene.cluster.hosts[k].root_path(places[k]).glob("*.pt")) for k in range(3)))


def await_again(cluster: NetCluster, hosts: list[int], world: int, seconds: float = DEADLINE) -> float:
    """Wait until the hosts train in a group of ``world`` ranks; return the seconds it took."""
    since = time.monotonic()
    text = f"begins at [1-9][0-9]* of {world}$"
    while time.monotonic() - since < seconds:
        found = [
            cluster.hosts[k].run(
                ["bash", "-c", f"grep -qsE '{text}' {WORKDIR}/runs/again/node*/logs/rank*.log"], check=False
            )
            for k in hosts
        ]
        if all(done.returncode == 0 for done in found):
            return time.monotonic() - since
        time.sleep(0.3)
    raise AssertionError(f"no ranks have begun again within {seconds:g} s")


def finish(scene: Scene, hosts: list[int]) -> None:
    for k in hosts:
        scene.cluster.hosts[k].run(["touch", GO])


@pytest.mark.parametrize("lost", [0, 2])
def test_a_host_without_power(scene: Scene, begun: Running, lost: int) -> None:
    left = [k for k in range(3) if k != lost]
    scene.cluster.hosts[lost].power_cut()
    seconds = await_again(scene.cluster, left, 3)
    begun.await_line(f"restart 1 of 3: node{lost} (root@{scene.host(lost)}): no sign of life for 6 s")
    assert seconds < stretched(30), "within 30 s beside the start of torch"
    finish(scene, left)
    done = begun.end()
    assert done.status == 0 and "Done in" in done.output, done.output
    assert done.result["state"] == "done"
    assert [(one["without"], one["generation"]) for one in done.result["restarts"]] == [([lost], 1)], done.output
    assert any(f"node{lost} " in note and "went on without it" in note for note in done.result["notes"])


def test_the_lead_host_without_power_and_no_launcher(scene: Scene, begun: Running, tmp_path: Path) -> None:
    begun.process.kill()
    scene.cluster.hosts[0].power_cut()
    await_again(scene.cluster, [1, 2], 3)
    finish(scene, [1, 2])
    for k in (1, 2):
        result = f"{WORKDIR}/runs/again/node{k}/result.json"
        wait_until(lambda k=k, result=result: _read(scene, k, result))
        assert '"state": "done"' in _read(scene, k, result)


def _read(scene: Scene, k: int, path: str) -> str:
    return scene.cluster.hosts[k].run(["cat", path], check=False).stdout


def test_a_cut_network_leads_to_one_run(scene: Scene, begun: Running) -> None:
    host = scene.cluster.hosts[2]
    host.cut_network()
    try:
        await_again(scene.cluster, [0, 1], 3)
    finally:
        host.restore_network()
    finish(scene, [0, 1])
    done = begun.end()
    assert done.status == 0 and done.result["state"] == "done", done.output
    result = f"{WORKDIR}/runs/again/node2/result.json"
    alone = wait_until(lambda: _read(scene, 2, result))  # it may wait for the others longer than these train
    # Which of the two depends on whether the network returned before node2 had waited for `lost_after` seconds.
    reasons = "the run has ended without this node|only 1 of 3 nodes can reach each other"
    assert re.search(f"no restart: ({reasons})", alone) and '"restarts": []' in alone, alone


def test_a_part_that_is_lost_with_its_host_ends_the_run(scene: Scene, tmp_path: Path) -> None:
    (scene.folder / "train.py").write_text(AVERAGES)
    scene.run = {"restarts": 3, "connect_timeout": 3, "lost_after": 20}
    running = scene.running("--", "python", "train.py", GO)
    await_checkpoints(scene, running)
    host = scene.cluster.hosts[1]
    host.power_cut()
    try:
        done = running.end()
    finally:
        host.power_on()
        host.wait_until_up()
    assert done.status == 1 and "no restart: no remaining node has part 1" in done.output, done.output
    assert f"The run failed: node1 (root@{scene.host(1)}): no sign of life" in done.output


def test_a_host_that_was_switched_off_joins_at_the_next_restart(scene: Scene, begun: Running) -> None:
    host = scene.cluster.hosts[2]
    host.power_cut()
    await_again(scene.cluster, [0, 1], 3)
    host.power_on()
    host.wait_until_up()
    begun.await_line(
        f"node2 (root@{scene.host(2)}): its supervisor was started again; it joins at the next restart", 90
    )
    state = f"{WORKDIR}/runs/again/node2/state.json"
    wait_until(lambda: '"state": "waiting"' in _read(scene, 2, state))
    (victim,) = scene.processes(0, "train.py")
    scene.cluster.hosts[0].run(["kill", "-9", str(victim.pid)])
    begun.await_line("going on with 3 of 3 nodes")
    await_again(scene.cluster, [0, 1, 2], 4)
    finish(scene, [0, 1, 2])
    done = begun.end()
    assert done.status == 0 and done.result["state"] == "done", done.output
    assert [one["without"] for one in done.result["restarts"]] == [[2], []], done.output


def test_two_of_three_hosts_without_power(scene: Scene, begun: Running) -> None:
    for k in (0, 1):
        scene.cluster.hosts[k].power_cut()
    done = begun.end()
    hosts = [f"node{k} (root@{scene.host(k)})" for k in range(3)]
    why = "only 1 of 3 nodes can reach each other, and the others may go on by themselves; no answer from "
    assert done.status == 1 and f"no restart: {why}{hosts[0]}, {hosts[1]}" in done.output, done.output
    for k in (0, 1):
        assert f"--exclude {scene.host(k)}" in done.output, done.output
