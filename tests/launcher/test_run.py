"""A run followed to its end: lost lines, failing nodes, Ctrl-C; on the fake transport and with real processes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fake_transport import FakeTransport, printed
from launcher import follow as follow_module
from launcher import run as run_module
from launcher.errors import ConnectionLost, SessionError
from launcher.events import EventLog
from launcher.follow import Followed, Limits, RunFollower
from launcher.logs import LiveLog
from launcher.node import procs
from launcher.plan import LaunchPlan
from launcher.run import with_service_key
from launcher.script import Command
from launcher.transport.base import OnLine
from run_kit import make_launch, make_node, make_parts

ROOT = Path(__file__).resolve().parents[2]
Script = list[Any]  #: what a stream does: lines to tell, an exception to raise, an Event to wait for


def line(**message: Any) -> str:
    return json.dumps(message)


def ended(node_rank: int, state: str = "done", **outcome: Any) -> str:
    record = {"name": f"rank{node_rank}", "node_rank": node_rank, "rank": node_rank, "returncode": 0, "signal": None}
    record |= {"started": 1.0, "ended": 2.0, "failed": False, "traceback": [], "tail": [], **outcome}
    return line(result={"node_rank": node_rank, "state": state, "outcomes": [record]})


class FakeNode(FakeTransport):
    """Streams what its scripts say, one script a connection; ``stop`` makes it tell that it stopped."""

    def __init__(self, node_rank: int, *scripts: Script):
        super().__init__(target=f"host{node_rank}", node_rank=node_rank)
        self.scripts = list(scripts)
        self.stopped = threading.Event()
        self.offsets: list[dict[str, int]] = []
        self.on("control.py", self._stop)

    def _stop(self, command: Command, stdin: bytes) -> Any:
        self.stopped.set()
        return printed('{"stopped": true, "killed": [], "leftovers": []}')

    def stream(self, command: Command, on_line: OnLine, stop: threading.Event) -> int:
        self._check()
        self.offsets.append(json.loads(command.argv[command.argv.index("--offsets") + 1]))
        for step in self.scripts.pop(0) if self.scripts else [ConnectionLost("no route", host=self.target)]:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, threading.Event):
                assert step.wait(10)
            else:
                on_line(step)
        return 0

    @property
    def stops(self) -> int:
        return sum(1 for call in self.lines() if "control.py stop" in call)


class Scene:
    """A plan over fake nodes, and what following it said and logged."""

    def __init__(self, tmp_path: Path, *nodes: FakeNode, lost_after: float = 5.0):
        self.nodes = nodes
        self.plan: LaunchPlan = make_launch([make_node(Path("/w"), node.node_rank or 0, []) for node in nodes])
        self.events = tmp_path / "events.jsonl"
        self.console = Console(file=io.StringIO(), width=200)
        lines = {node.node_rank or 0: node for node in nodes}
        live, log = LiveLog(self.console, self.plan), EventLog(self.events)
        self.follower = RunFollower(self.plan, lines, Limits(lost_after, 1.0, 1.0), live, log)

    def follow(self) -> Followed:
        return self.follower.follow()

    @property
    def said(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_RETRY_EVERY", 0.05)
    monkeypatch.setattr(follow_module, "_LAST_WORDS", 0.3)


def test_all_nodes_done_and_nothing_left_behind(tmp_path: Path) -> None:
    log = line(file="logs/rank0.log", offset=9, lines=["2026-11-20T21:00:00.123Z hello"])
    scene = Scene(tmp_path, FakeNode(0, [log, ended(0)]), FakeNode(1, [ended(1)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "done"}
    assert followed.notes == [] and not followed.lost
    assert "node0/rank0  | hello\n" in scene.said
    assert [node.stops for node in scene.nodes] == [1, 1], "each node is swept once"


def test_a_lost_line_is_taken_up_from_the_offsets_and_no_line_is_told_twice(tmp_path: Path) -> None:
    first = line(file="logs/rank0.log", offset=30, lines=["one", "two"])
    rest = line(file="logs/rank0.log", offset=60, lines=["three"])
    node = FakeNode(0, [first, ConnectionLost("connection lost", host="host0")], [rest, ended(0)])
    scene = Scene(tmp_path, node)
    assert scene.follow().results[0]["state"] == "done"
    assert node.offsets == [{}, {"logs/rank0.log": 30}]
    assert [text.split("| ")[1] for text in scene.said.splitlines() if "|" in text] == ["one", "two", "three"]
    assert "node0 (local): line lost (connection lost); trying to get it back" in scene.said


def test_a_node_out_of_contact_for_too_long_is_lost_and_the_others_are_stopped(tmp_path: Path) -> None:
    away, other = FakeNode(0), FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped", stopped=True)]]
    away.on("control.py", ConnectionLost("no route to host", host="host0", node_rank=0))
    followed = Scene(tmp_path, away, other, lost_after=0.3).follow()
    assert followed.lost[0].reason.startswith("no contact for") and followed.lost[0].host == "local"
    assert followed.results[1]["state"] == "stopped"
    assert "may still run" in followed.notes[0] and "tmux kill-session -t '=gnnfleet-r1-node0'" in followed.notes[0]


def test_the_first_process_that_fails_stops_every_other_node_at_once(tmp_path: Path) -> None:
    failing, other = FakeNode(0), FakeNode(1)
    event = {"t": 1.0, "kind": "process-exit", "node_rank": 0, "name": "rank0", "rank": 0, "failed": True}
    told = line(file="events.jsonl", offset=5, lines=[json.dumps(event)])
    failing.scripts = [[told, other.stopped, ended(0, "failed", failed=True, returncode=1)]]
    other.scripts = [[other.stopped, ended(1, "stopped", stopped=True)]]
    scene = Scene(tmp_path, failing, other)
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "failed", 1: "stopped"}
    assert "a process failed: rank0 of node0 (local); stopping every node" in scene.said
    kinds = [json.loads(text)["kind"] for text in scene.events.read_text().splitlines()]
    assert kinds[:2] == ["process-exit", "stop"]


def test_a_supervisor_that_dies_ends_the_run(tmp_path: Path) -> None:
    other = FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped")]]
    gone = line(lost={"reason": "the supervisor (pid 7) is gone", "state": None})
    followed = Scene(tmp_path, FakeNode(0, [gone]), other).follow()
    assert followed.lost[0].reason == "the supervisor (pid 7) is gone"
    assert other.stops == 1


def test_a_node_that_could_not_be_started_ends_the_others(tmp_path: Path) -> None:
    other = FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped")]]
    scene = Scene(tmp_path, FakeNode(0, []), other)
    scene.follower.never_started({0: SessionError("node0 (local): tmux is not installed there")})
    followed = scene.follow()
    assert followed.lost[0].reason == "tmux is not installed there"
    assert followed.results[1]["state"] == "stopped"


def test_a_stopped_node_that_says_nothing_more_is_not_waited_for(tmp_path: Path) -> None:
    never = FakeNode(0, [threading.Event()])
    scene = Scene(tmp_path, never)
    scene.follower.interrupt()
    started = time.monotonic()
    followed = scene.follow()
    assert followed.interrupted and followed.silent == {0}
    assert time.monotonic() - started < 5


def test_all_nodes_get_the_same_service_key_and_it_never_shows(tmp_path: Path) -> None:
    from launcher.planned import PlannedFile

    key = PlannedFile("/w/run/service.key", 0, mode=0o600, secret=True)
    plan = with_service_key(make_launch([make_node(tmp_path, k, [key]) for k in range(2)]))
    one, two = (node.files[0].content for node in plan.nodes)
    assert one == two and set(json.loads(one)) == {"public", "secret"}
    assert json.loads(one)["secret"] not in repr(plan) + run_module.to_json(plan)


# Real processes: launch.py, tmux, torch.distributed.run and an own script on two ranks of one node.

OWN_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
local, parts = os.environ["LOCAL_RANK"], os.environ["GNNFLEET_PART_IDS"]
print(f"rank {rank} of {dist.get_world_size()}, local {local}, parts {parts}")
dist.barrier()
if how == "raise" and rank == 1:
    raise ValueError("rank 1 does not like this")
if how == "wait":
    Path(os.environ["PID_FOLDER"], f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(120)
dist.barrier()
"""


class Launched:
    """launch.py as a process of its own, on a private tmux server."""

    def __init__(self, folder: Path, *own: str):
        self.folder = folder
        self.env = {**os.environ, "TMUX_TMPDIR": str(folder), "PID_FOLDER": str(folder)}
        words = ["--config", "cluster.yml", "--run-id", "r1", "--", "python", "train_mine.py", *own]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *words],
            cwd=folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, timeout: float = 60.0) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def pid_of(self, rank: int) -> int:
        """Of the training script, once it waits."""
        file = self.folder / f"pid{rank}"
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline and self.process.poll() is None, "the script did not get to wait"
            time.sleep(0.05)
        return int(file.read_text())

    def nothing_is_left(self) -> bool:
        sessions = subprocess.run(["tmux", "ls"], env=self.env, capture_output=True, text=True, timeout=10)
        spec = json.loads((self.folder / "work/runs/r1/node0/node.json").read_text())
        left = procs.with_token(procs.node_token(spec["token"], 0))
        return "gnnfleet" not in sessions.stdout and left == []

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "runs/r1/result.json").read_text())
        return result


@pytest.fixture
def start() -> Iterator[Callable[..., Launched]]:
    """Starts launch.py in a new folder with one node of two processes and an own script."""
    folder = Path(tempfile.mkdtemp(prefix="gf-"))  # short, for tmux's socket
    launched: list[Launched] = []
    make_parts(folder / "parts", 1)
    (folder / "train_mine.py").write_text(OWN_SCRIPT)
    (folder / "cluster.yml").write_text(
        "transport: local\nnodes: 1\ndefaults: {procs: 2, workdir: " + str(folder / "work") + "}\n"
        "data: {dataset: toy, folder: parts, mode: verify}\nrun: {grace: 2}\n"
    )

    def begin(*own: str) -> Launched:
        launched.append(Launched(folder, *own))
        return launched[0]

    yield begin
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
        subprocess.run(["tmux", "kill-server"], env=one.env, capture_output=True, timeout=10)
    shutil.rmtree(folder, ignore_errors=True)


def test_an_own_script_gets_its_ranks_and_ends_well(start: Callable[..., Launched]) -> None:
    run = start("end")
    output = run.output()
    assert run.process.returncode == 0, output
    for rank in (0, 1):
        assert f"node0/rank{rank}  | rank {rank} of 2, local {rank}, parts 0" in output
    assert run.result["state"] == "done"
    assert {path.name for path in (run.folder / "runs/r1/logs/node0").iterdir()} >= {"rank0.log", "rank1.log"}
    assert run.nothing_is_left()


def test_a_rank_that_raises_is_named_with_its_exception(start: Callable[..., Launched]) -> None:
    run = start("raise")
    output = run.output()
    assert run.process.returncode == 1, output
    assert "The run failed: rank 1 on node0 (local) raised ValueError: rank 1 does not like this" in output
    assert output.count("ValueError: rank 1") == 2, "once in the headline, once in the traceback"
    assert "Connection closed by peer" not in output, "what followed is folded"
    assert "1 more rank stopped or failed after it" in output
    assert run.result["first_failure"]["rank"] == 1
    assert run.nothing_is_left()


def test_a_rank_killed_with_9_is_told_in_words(start: Callable[..., Launched]) -> None:
    run = start("wait")
    os.kill(run.pid_of(1), signal.SIGKILL)
    output = run.output()
    assert run.process.returncode == 1, output
    assert "The run failed: rank 1 on node0 (local) killed by signal 9 (SIGKILL)" in output
    assert run.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_and_sigterm_stop_the_node_too(start: Callable[..., Launched], number: int) -> None:
    run = start("wait")
    for rank in (0, 1):
        run.pid_of(rank)
    run.process.send_signal(number)
    output = run.output(30)
    assert run.process.returncode == 130, output
    assert run.result["state"] == "interrupted"
    assert "Interrupted after" in output
    assert (run.folder / "runs/r1/logs/node0/rank0.log").exists()
    assert run.nothing_is_left()
