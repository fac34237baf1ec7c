"""What goes wrong on real hosts: one clear message, the right exit status and first cause, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launching import REPOSITORY, Launched, Running, launch, write_config
from netns import NetCluster
from netns_tools import Process

#: Trains nothing, but all ranks meet in every step, as in data-parallel training.
STEPS = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(10000):
    dist.all_reduce(torch.ones(1000))
    print("step", step, flush=True)
    if step == 20 and sys.argv[1:] == ["raise", str(dist.get_rank())]:
        raise ValueError("no such column: age")
    time.sleep(0.05)
"""
WAITS = "import os, time; print('here is rank', os.environ['RANK'], flush=True); time.sleep(300)\n"
#: What a run may leave on a node: whole files, and `.part` files that the next sync goes on with.
STATE_OF = "find ~ /tmp /dev/shm -path ~/.ssh -prune -o -type f -print 2>/dev/null | sort"


@pytest.fixture(scope="module")
def cluster() -> Iterator[NetCluster]:
    """Three hosts that share nothing and also take a password."""
    with NetCluster(3, password=True) as made:
        yield made


@dataclass
class Scene:
    """A cluster.yml over three nodes (one, two and one process) in a folder of the test's own."""

    cluster: NetCluster
    folder: Path
    parts: Path
    nodes: list[dict] = field(default_factory=list)
    run: dict = field(default_factory=dict)
    data: dict = field(default_factory=dict)
    train: dict = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = [
            {"host": host.address, "user": "root", "procs": procs, "python": sys.executable}
            for host, procs in zip(self.cluster.hosts, (1, 2, 1), strict=True)
        ]
        for name, text in (("steps.py", STEPS), ("waits.py", WAITS)):
            (self.folder / name).write_text(text)

    @property
    def config(self) -> Path:
        data = {"folder": str(self.parts)} | self.data
        return write_config(self.folder, self.nodes, data=data, train=self.train, run=self.run)

    def host(self, k: int) -> str:
        return self.cluster.hosts[k].address

    def launch(self, *words: str) -> Launched:
        return launch(self.config, *words, env=self.cluster.environment(**self.env))

    def running(self, *words: str) -> Running:
        return Running(self.config, *words, env=self.cluster.environment(**self.env))

    def own_home(self, *, hosts_known: bool = True) -> Path:
        """A home without the cluster's key, for the operator."""
        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True)
        if hosts_known:
            shutil.copy(self.cluster.operator_ssh_config.with_name("known_hosts"), home / ".ssh/known_hosts")
        self.env["HOME"] = str(home)
        return home

    def give_keys(self, *ranks: int) -> None:
        for k in ranks:
            self.nodes[k]["key"] = str(self.cluster.identity)

    def files(self, k: int) -> str:
        """All files on host k."""
        return self.cluster.hosts[k].run(["bash", "-c", STATE_OF], check=False).stdout

    def processes(self, k: int, words: str) -> list[Process]:
        """Processes of host k whose command begins with a Python and these words."""
        return [each for each in self.cluster.hosts[k].processes() if each.cmdline.partition(" ")[2].startswith(words)]

    def left_behind(self) -> list[str]:
        """Processes of any kind, tmux sessions included, and locks."""
        hosts = [host for host in self.cluster.hosts if host.init_pid]
        found = [f"{host.name}: {process}" for host in hosts for process in host.processes()]
        return found + [line for k in range(len(hosts)) for line in self.files(k).splitlines() if line.endswith("lock")]


@pytest.fixture
def scene(cluster: NetCluster, tmp_path: Path, parts: Path) -> Iterator[Scene]:
    yield (made := Scene(cluster, tmp_path, parts))
    for host in cluster.hosts:
        for process in host.processes():  # a test that failed must not fail the next one too
            host.run(["kill", "-9", str(process.pid)], check=False)
    del made


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts are made by the first launch that gets that far."""
    return tmp_path_factory.mktemp("parts") / "synthetic"


def said_once(done: Launched, status: int, *words: str) -> None:
    """Ended with ``status``, and one message that holds ``words``."""
    assert done.status == status, done.output
    assert done.output.count("error:") == 1, done.output
    assert "Traceback" not in done.output
    for word in words:
        assert word in done.output, f"{word!r} is not in:\n{done.output}"


# --- before anything runs: preflight refuses, and has changed nothing -----------------------------


def unreachable(scene: Scene) -> None:
    scene.nodes[1]["host"] = f"{scene.cluster.prefix}.77"
    scene.run["connect_timeout"] = 2


def wrong_key(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1]["key"] = make_key(scene.folder / "other", "")


def encrypted_key(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1]["key"] = make_key(scene.folder / "encrypted", "hush")


def make_key(path: Path, passphrase: str) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True)
    return str(path)


def no_tmux(scene: Scene) -> None:
    scene.cluster.hosts[1].hide("/usr/bin/tmux")


def other_torch(scene: Scene) -> None:
    host = scene.cluster.hosts[1]
    host.write("/tmp/odd/torch-2.4.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1\n")
    host.write("/tmp/odd/python", f'#!/bin/sh\nPYTHONPATH=/tmp/odd exec {sys.executable} "$@"\n', mode=0o755)
    scene.nodes[1]["python"] = "/tmp/odd/python"


def wrong_python(scene: Scene) -> None:
    scene.nodes[1]["python"] = "/opt/none/bin/python"


def no_cuda(scene: Scene) -> None:
    del scene.nodes[1]["procs"]
    scene.nodes[1]["devices"] = [0, 99]


def small_disk(scene: Scene) -> None:
    mount(scene, "200k")
    scene.nodes[1]["workdir"] = "/mnt/small/work"


def mount(scene: Scene, size: str) -> None:
    script = f"mkdir -p /mnt/small && mount -t tmpfs -o size={size} tmpfs /mnt/small"
    scene.cluster.hosts[1].run(["bash", "-c", script])


def unmount(scene: Scene) -> None:
    scene.cluster.hosts[1].run(["bash", "-c", "umount /mnt/small 2>/dev/null; rm -rf /mnt/small"])


REFUSED: dict[str, tuple[Callable[[Scene], None], list[str]]] = {
    "unreachable host": (unreachable, ["no answer on port 22 within 2 s", "is the machine up"]),
    "wrong key": (wrong_key, ["no key was accepted for root", "other", "ssh-copy-id root@"]),
    "encrypted key without agent": (encrypted_key, ["is encrypted and no ssh-agent is running", "ssh-add"]),
    "no tmux": (no_tmux, ["tmux is not installed", "apt-get install -y tmux"]),
    "other torch": (other_torch, ["torch 2.4.1, but", "on node0", "-m pip install torch=="]),
    "wrong python": (wrong_python, ["cannot run /opt/none/bin/python", "set `python`, `venv` or `conda`"]),
    "no CUDA device": (no_cuda, ["devices", "99" if shutil.which("nvidia-smi") else "nvidia-smi shows none"]),
    "small disk": (small_disk, ["needed at /mnt/small, 205 kB free", "set `workdir` to another disk"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_preflight_names_the_node_and_what_to_do(name: str, scene: Scene) -> None:
    trouble, words = REFUSED[name]
    trouble(scene)
    before = [scene.files(k) for k in range(3)]
    try:
        done = scene.launch()
        after = [scene.files(k) for k in range(3)]
    finally:
        scene.cluster.hosts[1].unhide()
        unmount(scene)
    said_once(done, 3, *words, "nothing was changed there", f"node1 ({scene.nodes[1]['host']})")
    assert "node0 (" not in done.output.split("What to do:")[1], "the other nodes are well"
    assert after == before and scene.left_behind() == []
    assert not (scene.folder / "runs").exists()


def test_an_unknown_host_key_is_shown_whole(scene: Scene) -> None:
    """Also on a narrow terminal: the fingerprint is there to be compared."""
    home = scene.own_home(hosts_known=False)
    scene.give_keys(0, 1, 2)
    scene.env["COLUMNS"] = "80"
    done = scene.launch()
    said_once(done, 3, f"ssh-keyscan {scene.host(1)} >> {home}/.ssh/known_hosts", "accept-new")
    cells = "".join(line.split("│")[-2].strip() for line in done.output.splitlines() if line.startswith("│"))
    for host in scene.cluster.hosts:
        shown = subprocess.run(["ssh-keygen", "-lf", host.folder / "etc/host_key.pub"], capture_output=True, text=True)
        assert shown.stdout.split()[1] in cells
    assert not (home / ".ssh/known_hosts").exists() and scene.left_behind() == []


def test_a_wrong_password_is_refused_and_not_shown(scene: Scene) -> None:
    scene.own_home()
    scene.give_keys(0, 2)
    scene.nodes[1] |= {"user": "worker", "password": True}
    status, output = answer_prompts(scene.config, "not-this-one", scene.cluster.environment(**scene.env, COLUMNS="200"))
    said_once(Launched(status, output, scene.folder), 3, "password of worker was not accepted", "check user and")
    assert "not-this-one" not in output and output.count("Password for worker@") == 1
    assert scene.left_behind() == [] and not (scene.folder / "runs").exists()


def answer_prompts(config: Path, answer: str, env: dict[str, str]) -> tuple[int, str]:
    """launch.py on a terminal of its own, ``answer`` typed whenever it asks; exit status and what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(config.parent)
        os.execve(sys.executable, [sys.executable, str(REPOSITORY / "launch.py"), "--config", config.name], env)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other end has closed
        while data := os.read(terminal, 4096):
            shown += data
            if b"Password for" in data:
                os.write(terminal, answer.encode() + b"\n")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_a_busy_master_port_is_named_with_who_holds_it(scene: Scene) -> None:
    host = scene.cluster.hosts[0]
    listens = "import os, socket, time; s = socket.create_server(('', 29555)); os.fork() or time.sleep(60)"
    host.run(["bash", "-c", f'{sys.executable} -c "{listens}" >/dev/null 2>&1'])
    (holder,) = host.processes()
    done = scene.launch("--master_port", "29555")
    assert host.processes() == [holder]
    host.kill(holder.pid)
    said_once(done, 3, f"port 29555 in use (pid {holder.pid}: ", f"node0 ({host.address})", "`run.master_port`")


# --- while files are brought ----------------------------------------------------------------------


def test_a_missing_part_and_a_flipped_byte_on_a_node_are_named(scene: Scene) -> None:
    """Mode verify: the parts are on the nodes already."""
    made_parts(scene)
    scene.data = {"mode": "verify", "folder": "/tmp/parts"}
    for host in scene.cluster.hosts:
        shutil.copytree(scene.parts, host.root_path("/tmp/parts"))
    folder = scene.cluster.hosts[1].root_path("/tmp/parts/part1")
    try:
        folder.rename(folder.with_name("away"))
        missing = scene.launch("--run-id", "missing", "--", "python", "waits.py")
        folder.with_name("away").rename(folder)
        content = (folder / "nodes/x.npy").read_bytes()
        (folder / "nodes/x.npy").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        flipped = scene.launch("--run-id", "flipped", "--", "python", "waits.py")
    finally:
        for host in scene.cluster.hosts:
            host.run(["rm", "-rf", "/tmp/parts"])
    place = f"node1 (root@{scene.host(1)}): /tmp/parts/part1"
    said_once(missing, 1, f"{place} is missing, with all its 6 files", "Bring these files over again")
    said_once(flipped, 1, f"{place}/nodes/x.npy differs from the manifest", "Bring these files over again")
    assert "node0 (" not in flipped.output.split("error:")[1]
    assert scene.left_behind() == []


def made_parts(scene: Scene) -> None:
    """See to it that the parts are there, made for this scene's config."""
    words = ["partition", "make", "--config", str(scene.config)]
    subprocess.run([sys.executable, str(REPOSITORY / "launch.py"), *words], check=True, capture_output=True)


def test_a_disk_that_fills_up_during_sync_is_named(scene: Scene) -> None:
    scene.parts = scene.folder / "parts"  # not made yet, so that preflight cannot know their size
    mount(scene, "700k")
    scene.nodes[1]["workdir"] = "/mnt/small/work"
    try:
        done = scene.launch("--", "python", "waits.py")
    finally:
        unmount(scene)
    said_once(done, 1, f"node1 (root@{scene.host(1)}): disk full at /mnt/small/work/data/", "Make room")
    assert done.result["state"] == "failed" and scene.left_behind() == []


def test_a_disk_that_fills_up_while_running_is_named(scene: Scene) -> None:
    mount(scene, "3m")
    scene.nodes[1]["workdir"] = "/mnt/small/work"
    try:
        running = scene.running("--", "python", "steps.py").await_line("step 3")
        scene.cluster.hosts[1].run(["bash", "-c", "cat /dev/zero > /mnt/small/filler"], check=False)
        (rank,) = scene.processes(1, "steps.py")[:1]
        scene.cluster.hosts[1].kill(rank.pid)
        done = running.end()
        left = scene.left_behind()
    finally:
        unmount(scene)
    assert done.status == 1 and left == [], done.output
    assert f"node1 (root@{scene.host(1)})" in done.output and "is full" in done.output, done.output


def test_ctrl_c_during_sync_leaves_only_what_the_next_sync_takes_up(scene: Scene) -> None:
    scene.parts = scene.folder / "parts"
    scene.data = {"options": {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 500}}
    before_it = [set(scene.files(k).split()) for k in range(3)]
    for host in scene.cluster.hosts:
        host.slow_link("1mbit")
    try:
        running = scene.running("--", "python", "waits.py").await_line("sync:")
        before = time.monotonic()
        done = running.send(signal.SIGINT).end()
        seconds = time.monotonic() - before
    finally:
        for host in scene.cluster.hosts:
            host.full_speed()
    assert done.status == 130 and "Traceback" not in done.output, done.output
    assert seconds < 5 and "taken up by the next launch" in done.output
    assert done.result["state"] == "interrupted" and scene.left_behind() == []
    new = {k: set(scene.files(k).split()) - before_it[k] for k in range(3)}
    data = {k: [name for name in names if "/data/" in name] for k, names in new.items()}
    assert not any(name.endswith("manifest.json") for names in data.values() for name in names)
    partial = sum(scene.cluster.hosts[k].root_path(name).stat().st_size for k, names in data.items() for name in names)
    assert partial > 0
    again = scene.running("--", "python", "waits.py").await_line("here is rank 1")
    again.send(signal.SIGINT).end()
    there = [event["bytes"] for event in events(again, "synced")]
    assert sum(there) < total_bytes(scene.parts) - partial / 2, "what had arrived is not sent again"


def events(running: Running, kind: str) -> list[dict]:
    """Of the last run in this folder."""
    folder = max((running.folder / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def total_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.npy"))


# --- while it runs: the first cause leads, everything else ends, soon -----------------------------


def failed(scene: Scene, done: Launched, name: str, reason: str, *, node_rank: int = 1, within: float = 10.0) -> None:
    """The run failed at ``name`` on that node for ``reason``, and all ended ``within`` seconds after that."""
    assert done.status == 1, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"], first["reason"]) == (name, node_rank, reason), done.output
    assert first["host"] == f"root@{scene.host(node_rank)}"
    (head,) = (line for line in done.output.splitlines() if line.startswith("The run failed:"))
    assert f"node{node_rank} (root@{scene.host(node_rank)})" in head and head.endswith(reason)
    assert f"log: runs/{done.run_dir.name}/logs/node{node_rank}/{name}.log" in done.output
    assert re.search(r"^3 more ranks? and [23] more servers stopped or failed after it$", done.output, re.M)
    assert (done.run_dir / "result.json").stat().st_mtime - first["ended"] < within
    assert scene.left_behind() == []


@pytest.mark.parametrize("rank", ["1", "3"])
def test_a_rank_that_raises_leads_the_report(scene: Scene, rank: str) -> None:
    done = scene.launch("--", "python", "steps.py", "raise", rank)
    node_rank = {"1": 1, "3": 2}[rank]
    reported = done.output[done.output.index("The run failed:") :]
    assert 'raise ValueError("no such column: age")' in reported and reported.count("Traceback") == 1
    assert re.search(r"^3 more ranks and 3 more servers", reported, re.M)
    failed(scene, done, f"rank{rank}", "raised ValueError: no such column: age", node_rank=node_rank)


def test_a_rank_killed_with_9_leads_the_report(scene: Scene) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    scene.cluster.hosts[1].kill(scene.processes(1, "steps.py")[0].pid)
    done = running.end()
    first = done.result["first_failure"]["name"]
    assert first in ("rank1", "rank2")
    failed(scene, done, first, "killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_every_node(scene: Scene, signum: int) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    before = time.monotonic()
    done = running.send(signum).end()
    assert time.monotonic() - before < 8
    assert done.status == 130 and "Traceback" not in done.output, done.output
    assert done.output.count("Interrupted after") == 1
    assert done.result["state"] == "interrupted" and done.result["first_failure"] is None
    assert (done.run_dir / "logs/node1/rank1.log").stat().st_size > 0
    assert scene.left_behind() == []


def test_a_run_id_that_is_taken_on_a_node_is_refused_and_the_other_run_left_alone(scene: Scene) -> None:
    host = scene.cluster.hosts[1]
    host.run(["tmux", "new-session", "-d", "-s", "gnnfleet-mine-node1", "sleep 60"])
    before = [scene.files(k) for k in range(3)]
    try:
        live = scene.launch("--run-id", "mine", "--", "python", "waits.py")
        sessions = host.run(["tmux", "list-sessions", "-F", "#S"]).stdout.split()
    finally:
        host.run(["tmux", "kill-server"], check=False)
    host.run(["mkdir", "-p", f"{host.home}/gnnfleet/node1/runs/ended/node1"])
    ended = scene.launch("--run-id", "ended", "--", "python", "waits.py")
    said_once(live, 3, f"node1 ({host.address})", "the run id is taken: tmux session gnnfleet-mine-node1 exists")
    said_once(ended, 3, f"the run id is taken: {host.home}/gnnfleet/node1/runs/ended/node1", "take another --run-id")
    assert sessions == ["gnnfleet-mine-node1"], "what was there before is left alone"
    assert [scene.files(k) for k in range(3)] == before and scene.left_behind() == []


@pytest.mark.slow
def test_a_closed_tmux_session_is_the_cause_not_the_ranks_that_missed_their_peers(scene: Scene) -> None:
    running = scene.running("--", "python", "steps.py").await_line("step 9")
    scene.cluster.hosts[1].run(["tmux", "kill-server"])
    done = running.end()
    first = done.result["first_failure"]
    assert done.status == 1 and (first["name"], first["node_rank"]) == ("node", 1), done.output
    assert f"The run failed: node1 (root@{scene.host(1)}): its supervisor got SIGHUP" in done.output
    assert scene.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "command"), [("rank3", "-m trainer train"), ("server", "-m trainer serve")])
def test_killing_a_part_of_the_bundled_trainer_leads_the_report(scene: Scene, name: str, command: str) -> None:
    """The peers of a killed rank or graph server fail too, some of them earlier than it is noticed."""
    scene.train = {"epochs": 5000}
    running = scene.running().await_line("epoch 3/5000")
    scene.cluster.hosts[2].kill(scene.processes(2, command)[0].pid)
    done = running.end()
    assert done.status == 1, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"]) == (name, 2), done.output
    assert first["reason"] == "killed by signal 9 (SIGKILL)"
    assert (done.run_dir / "result.json").stat().st_mtime - first["ended"] < 10
    assert scene.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["power", "network"])
def test_a_node_that_falls_silent_is_given_up_and_the_others_stopped(scene: Scene, trouble: str) -> None:
    scene.run = {"lost_after": 8, "connect_timeout": 3}
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
    assert done.status == 1 and "Traceback" not in done.output, done.output
    first = done.result["first_failure"]
    assert (first["name"], first["node_rank"]) == ("node", 2) and "no contact for" in first["reason"], done.output
    assert f'ssh root@{host.address} "tmux kill-session' in done.output, "its processes cannot be reached"
    assert seconds < 30 and left == []
    while trouble == "network" and scene.left_behind() and time.monotonic() < deadline:
        time.sleep(1)
    assert scene.left_behind() == [], "once the network is back, its ranks notice that the others are gone"
