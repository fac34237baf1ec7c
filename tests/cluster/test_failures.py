"""Tests of failures on real hosts: message, exit status, first failure, and nothing left behind."""

from __future__ import annotations

import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from failure_kit import Scene, assert_one_message, mount, unmount
from launcher.plan.files import code_files
from launching import Launched
from operator_kit import await_stage
from ssh_nodes import WORKDIR
from waiting import stretched, wait_until

#: Seconds within which a failed run must have ended; ranks that wait for lost peers give up after 60 s.
ENDS_WITHIN = 40

# --- during sync -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_missing_part_and_a_flipped_byte_are_named_in_one_message(scene: Scene, local_runs: dict) -> None:
    # With `mode: verify`, the parts are on the nodes already; here one node lacks a part and another has a damaged one.
    scene.nodes = scene.nodes[:2]
    scene.data = {"mode": "verify", "folder": "/tmp/parts"}
    folders = [host.root_path("/tmp/parts") for host in scene.cluster.hosts[:2]]
    try:
        for folder in folders:
            shutil.copytree(local_runs["two"].folder / "parts", folder)
        shutil.rmtree(folders[0] / "part0")
        damaged = folders[1] / "part1/nodes/node/attrs/x.npy"
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        done = scene.launch("--", "python", "waits.py")
    finally:
        for folder in folders:
            shutil.rmtree(folder)
    missing = f"node0 (root@{scene.host(0)}): /tmp/parts/part0 is missing, with all its 7 files"
    flipped = f"node1 (root@{scene.host(1)}): /tmp/parts/part1/nodes/node/attrs/x.npy differs from the manifest"
    assert_one_message(done, 1, missing, flipped, "Copy these files to the nodes again")
    assert scene.left_behind() == []


@pytest.mark.parametrize("place", ["code", "data"])
@pytest.mark.slow
def test_a_disk_that_fills_up_during_sync_is_named(scene: Scene, place: str) -> None:
    # Either the code passes preflight but does not fit, because each file uses whole pages, or the parts do not fit.
    sizes = [file.stat().st_size for file in code_files()]
    in_pages = sum(-(-size // 4096) * 4096 for size in sizes)
    size = f"{int(1.15 * sum(sizes)) if place == 'code' else in_pages + sum(sizes) // 2}"
    scene.parts = scene.folder / "parts"  # not made yet, so that preflight does not know their size
    scene.data = {"options": {"num_nodes": 40_000}}  # parts larger than the code
    mount(scene, size)
    scene.nodes[1]["workdir"] = "/tmp/small/home"
    try:
        done = scene.launch("--", "python", "waits.py")
    finally:
        unmount(scene)
    assert_one_message(done, 1, f"node1 (root@{scene.host(1)}): disk full at /tmp/small/home/{place}/", "Make room")
    assert done.result["state"] == "failed" and scene.left_behind() == []


@pytest.mark.slow
def test_a_full_disk_does_not_hide_the_first_cause(scene: Scene) -> None:
    # A rank is killed on a node whose disk is full: the report still names this rank as the first cause. test_soak
    # has a full disk that is itself the cause.
    host = scene.cluster.hosts[1]
    host.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", WORKDIR])
    try:
        running = scene.running("--", "python", "steps.py").await_line("step 3")
        host.run(["bash", "-c", f"cat /dev/zero > {WORKDIR}/filler"], check=False)
        (rank,) = scene.processes(1, "steps.py")[:1]
        host.kill(rank.pid)
        done = running.end()
    finally:
        host.run(["umount", "-l", WORKDIR])
    left = scene.left_behind()
    assert done.status == 137 and left == [], done.output
    first = done.result["first_failure"]
    assert first["name"] in ("rank1", "rank2") and first["reason"] == "was killed by signal 9 (SIGKILL)"
    assert "step 3" in (done.run_dir / first["log"]).read_text()


@pytest.mark.slow
def test_ctrl_c_during_sync_leaves_only_files_that_the_next_sync_reuses(scene: Scene) -> None:
    earlier = scene.running("--", "python", "waits.py").await_line("here is rank 1")  # places the code on the nodes
    shutil.rmtree(earlier.send(signal.SIGINT).end().run_dir)
    scene.parts = scene.folder / "parts"
    scene.data = {"options": {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 2000}}
    before_it = data_files(scene)
    for host in scene.cluster.hosts:
        host.slow_link("1mbit")
    try:
        running = scene.running("--", "python", "waits.py").await_event("stage", stage="sync")
        # of 24 MB, which take a minute
        wait_until(lambda: sum(data_files(scene).values()) > sum(before_it.values()) + 3_000_000)
        before = time.monotonic()
        done = running.send(signal.SIGINT).end()
        seconds = time.monotonic() - before
    finally:
        for host in scene.cluster.hosts:
            host.full_speed()
    assert done.status == 130 and "Traceback" not in done.output, done.output
    assert seconds < stretched(30) and "the next launch reuses the files that have been sent" in done.output
    assert done.result["state"] == "stopped" and scene.left_behind() == []
    new = {at: size for at, size in data_files(scene).items() if at not in before_it}
    assert not any(name.endswith("manifest.json") for _, name in new)
    partial = sum(new.values())
    assert partial > 3_000_000
    again = scene.running("--", "python", "waits.py").await_line("here is rank 1")
    again.send(signal.SIGINT).end()
    sent = sum(event["bytes"] for event in again.events("synced"))
    assert sent < total_bytes(scene.parts) - partial / 2, "files that had arrived must not be sent again"


def data_files(scene: Scene) -> dict[tuple[int, str], int]:
    """Return the bytes of each file of parts on the hosts, by number of the host and path."""
    command = ["find", f"{WORKDIR}/data", "-type", "f", "-printf", "%s %p\\n"]
    found = [(k, host.run(command, check=False).stdout) for k, host in enumerate(scene.cluster.hosts)]
    lines = [(k, *line.split(" ", 1)) for k, text in found for line in text.splitlines()]
    return {(k, name): int(size) for k, size, name in lines}


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.npy"))


# --- during the run: the first cause leads the report, everything else ends soon -----------------


def failed(scene: Scene, done: Launched, name: str, reason: str, *, node_rank: int = 1, status: int = 1) -> None:
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"], first["reason"]) == (name, node_rank, reason), done.output
    assert first["host"] == f"root@{scene.host(node_rank)}"
    (head,) = (line for line in done.output.splitlines() if line.startswith("The run failed:"))
    rank = f"rank {first['rank']} on " if first["rank"] is not None else ""
    assert head.startswith(f"The run failed: {rank}node{node_rank} (root@{scene.host(node_rank)}) {reason}")
    assert f"runs/{done.run_dir.name}/logs/node{node_rank}/{name}.log" in done.output
    accounted_for(done, head)
    own = [each["returncode"] for each in outcomes(done) if each["failed"] and not each["stopped"]]
    assert done.status == max(own) >= status, "highest status among processes that failed on their own"
    assert (done.run_dir / "result.json").stat().st_mtime - first["ended"] < ENDS_WITHIN
    assert scene.left_behind() == []


def outcomes(done: Launched) -> list[dict]:
    return [outcome for node in done.result["nodes"] for outcome in node["outcomes"]]


def accounted_for(done: Launched, head: str) -> None:
    others = [each for each in outcomes(done) if each != done.result["first_failure"]]
    assert sorted(each["name"] for each in others if each["name"] == "server") == ["server"] * 3
    assert len(others) == 6, "three more ranks and three servers"
    echoes = sum(each["failed"] and not each["stopped"] for each in others)
    assert not echoes or re.search(rf"(, [\d.]+ s before|;) {echoes} follow-up errors?$", head), head
    stopped = sum(each["stopped"] for each in others)
    stopped_after = re.search("^stopped after it: (.*)$", done.output, re.M)
    assert sum(map(int, re.findall(r"\d+", stopped_after[1] if stopped_after else "0"))) == stopped, done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "script"),
    [("1", "counts.py"), ("1", "steps.py"), ("3", "steps.py")],
)
def test_a_rank_that_raises_leads_the_report(scene: Scene, rank: str, script: str) -> None:
    # Ranks of steps.py fail after another one.
    done = scene.launch("--", "python", script, "raise", rank)
    node_rank = {"1": 1, "3": 2}[rank]
    reported = done.output[done.output.index("The run failed:") :]
    assert 'raise ValueError("no such column: age")' in reported and reported.count("Traceback") == 1
    failed(scene, done, f"rank{rank}", "raised ValueError: no such column: age", node_rank=node_rank)


@pytest.mark.slow
def test_a_rank_killed_with_9_leads_the_report(scene: Scene) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    scene.cluster.hosts[1].kill(scene.processes(1, "steps.py")[0].pid)
    done = running.end()
    first = done.result["first_failure"]["name"]
    assert first in ("rank1", "rank2")
    failed(scene, done, first, "was killed by signal 9 (SIGKILL)", status=137)


def run_processes(scene: Scene) -> list[str]:
    words = ("steps.py", "supervisor.py", "trainer serve", "tmux")
    return [line for line in scene.left_behind() if any(word in line for word in words)]


@pytest.mark.slow  # test_failures_local has Ctrl-C on one machine
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_every_node(scene: Scene, signum: int) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    assert run_processes(scene)
    before = time.monotonic()
    running.send(signum)
    while (left := run_processes(scene)) and time.monotonic() - before < ENDS_WITHIN:
        time.sleep(0.1)
    assert left == [], "all of a run ends soon"
    done = running.end()  # logs are collected, too
    assert done.status == 130 and "Traceback" not in done.output, done.output
    by = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
    assert done.output.count(f"Stopped by {by} after") == 1
    assert done.result["state"] == "stopped" and done.result["first_failure"] is None
    assert (done.run_dir / "logs/node1/rank1.log").stat().st_size > 0
    assert scene.left_behind() == []


@pytest.mark.slow
def test_a_run_id_in_use_on_nodes_is_refused_and_the_other_run_continues(scene: Scene) -> None:
    # The run id is in use: node1 has a tmux session of that name, node2 a run folder.
    live, ended = scene.cluster.hosts[1:]
    live.run(["tmux", "new-session", "-d", "-s", "gnnfleet-mine-node1", "sleep 60"])
    ended.run(["mkdir", "-p", f"{WORKDIR}/runs/mine/node2"])
    before = [scene.files(k) for k in range(3)]
    try:
        done = scene.launch("--run-id", "mine", "--", "python", "waits.py")
        sessions = live.run(["tmux", "list-sessions", "-F", "#S"]).stdout.split()
    finally:
        live.run(["tmux", "kill-server"], check=False)
        ended.run(["rm", "-r", f"{WORKDIR}/runs/mine"])
    assert_one_message(
        done, 3, f"node1 ({live.address})", "the run id is already in use: tmux session gnnfleet-mine-node1 exists"
    )
    assert_one_message(done, 3, f"the run id is already in use: {WORKDIR}/runs/mine/node2", "choose another --run-id")
    assert sessions == ["gnnfleet-mine-node1"], "existing processes and files are not touched"
    assert [scene.files(k) for k in range(3)] == before and scene.left_behind() == []


@pytest.mark.slow
def test_a_closed_tmux_session_is_the_cause_not_the_ranks_that_lost_peers(scene: Scene) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    scene.cluster.hosts[1].run(["tmux", "kill-server"])
    done = running.end()
    first = done.result["first_failure"]
    assert done.status >= 1 and (first["name"], first["node_rank"]) == ("node", 1), done.output
    assert f"The run failed: node1 (root@{scene.host(1)}): its supervisor got SIGHUP" in done.output
    assert scene.left_behind() == []


@pytest.mark.slow
def test_killing_a_rank_of_the_bundled_trainer_leads_the_report(scene: Scene) -> None:
    # The other ranks fail as well, some of them before the supervisor notices that the killed process has ended.
    scene.train = {"epochs": 5000}
    running = scene.running().await_epoch(3, scene.cluster.path_on)
    scene.cluster.hosts[2].kill(scene.processes(2, "-m trainer train")[0].pid)
    done = running.end()
    assert done.status == 137, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"]) == ("rank3", 2), done.output
    assert first["reason"].startswith("was killed by signal 9 (SIGKILL)")
    assert (done.run_dir / "result.json").stat().st_mtime - first["ended"] < ENDS_WITHIN
    assert scene.left_behind() == []


@pytest.mark.slow
def test_a_killed_graph_server_of_a_worker_is_restarted_and_the_run_goes_on(scene: Scene) -> None:
    scene.train = {"epochs": 40}
    running = scene.running().await_epoch(3, scene.cluster.path_on)
    scene.cluster.hosts[2].kill(scene.processes(2, "-m trainer serve")[0].pid)
    done = running.end()
    assert done.status == 0 and done.result["state"] == "done", done.output
    assert "server-restart: server of node2" in done.output and "restart 1 of 3" in done.output, done.output
    assert scene.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["power", "network"])
def test_a_silent_node_is_reported_lost_and_the_others_are_stopped(scene: Scene, trouble: str) -> None:
    scene.run = {"connect_timeout": 3}
    host = scene.cluster.hosts[2]
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    before = time.monotonic()
    try:
        host.power_cut() if trouble == "power" else host.cut_network()
        done = running.end()
        seconds = time.monotonic() - before
        left = [line for line in scene.left_behind() if not line.startswith(host.name)]
    finally:
        if trouble == "power":
            host.power_on()
            host.wait_until_up()
        else:
            host.restore_network()
            deadline = time.monotonic() + 100
    assert done.status >= 1 and "Traceback" not in done.output, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"]) == ("node", 2), done.output
    assert "no sign of life for 6 s (run.peer_timeout)" in first["reason"], "the reason comes from its peers"
    assert f'ssh root@{host.address} "tmux kill-session' in done.output, "its processes cannot be reached"
    assert seconds < stretched(60) and left == []
    while trouble == "network" and scene.left_behind() and time.monotonic() < deadline:
        time.sleep(1)
    assert scene.left_behind() == [], "once the network is back, its ranks notice the loss of the others and end"


@pytest.mark.slow
def test_a_host_lost_before_its_node_is_started(scene: Scene) -> None:
    # The launcher waits for a host that does not answer at all no longer than about half a minute.
    host, running = scene.cluster.hosts[2], scene.running("--", "python", "waits.py")
    try:
        await_stage(scene.folder, "start")
        host.power_cut()
        cut = time.monotonic()
        done = running.end()
        seconds = time.monotonic() - cut
        left = scene.left_behind()
    finally:
        host.power_on()
        host.wait_until_up()
    assert done.status == 1 and "Traceback" not in done.output, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"]) == ("node", 2), done.output
    assert f"node2 (root@{host.address}) could not be started" in done.output, done.output
    assert seconds < stretched(120) and left == [], (seconds, left)
    assert (done.run_dir / "logs/node1").is_dir(), "logs of the other nodes are collected"


@pytest.mark.slow
def test_two_of_three_hosts_lost_at_once(scene: Scene) -> None:
    # Node 1 cannot report the loss of node 2, because it is connected to the lead node only.
    lost = [scene.cluster.hosts[k] for k in (0, 2)]
    scene.run = {"connect_timeout": 3, "lost_after": 200}
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    try:
        for host in lost:
            host.power_cut()
        cut = time.monotonic()
        done = running.end(300)
        seconds = time.monotonic() - cut
        left = scene.left_behind()
    finally:
        for host in lost:
            host.power_on()
            host.wait_until_up()
    assert done.status == 1 and "Traceback" not in done.output, done.output
    assert done.result["state"] == "failed" and done.result["first_failure"]["node_rank"] in (0, 2), done.output
    assert seconds < stretched(120) and left == [], (seconds, left)
    assert (done.run_dir / "logs/node1/rank1.log").stat().st_size > 0


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written(scene: Scene) -> None:
    # Host 1 cannot keep compiled kernels in ~/.cache. The launcher prints this at once. Kernels that were compiled
    # before are loaded from the folder that replaces it.
    host, scene.nodes = scene.cluster.hosts[1], scene.nodes[:2]
    kernels = Path(scene.nodes[1].pop("env")["GNNFLEET_KERNELS"])
    instead = host.root_path("/tmp/gnnfleet-kernels-0")
    words = "~/.cache/gnnfleet/kernels cannot be written, so compiled kernels are kept in /tmp/gnnfleet-kernels-0"
    host.run(["bash", "-c", "mkdir -p ~/.cache && mount -t tmpfs -o ro tmpfs ~/.cache"])
    try:
        running = scene.running().await_line(f"node1: {words.replace('~', host.home)}")
        assert "all graph servers are ready" not in running.output
        running.send(signal.SIGINT).end()
        shutil.rmtree(instead, ignore_errors=True)
        shutil.copytree(kernels, instead)
        instead.chmod(0o700)
        compiled = {path.name for path in instead.glob("*.nbc")}
        done = scene.launch()
        assert done.status == 0, done.output
        assert {path.name for path in instead.glob("*.nbc")} == compiled, "nothing is compiled again"
        assert words not in done.output and scene.left_behind() == []
    finally:
        host.run(["bash", "-c", "umount ~/.cache; rm -rf /tmp/gnnfleet-kernels-0"], check=False)
