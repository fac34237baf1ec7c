"""Golden test of the launcher's messages while it follows a run, asks, detaches, or gives up on a node."""

from __future__ import annotations

import dataclasses
import io
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from follow_kit import FakeNode, Scene, ended, event, line, state, step
from golden_kit import check_lines
from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import ConnectionLost, OutOfReach, SessionError, UsageError
from launcher.report.events import EventLog
from launcher.report.report import RunReport
from launcher.run import interrupts, lifecycle, node_stream
from launcher.run import monitor as follow_module
from launcher.run.interrupts import InterruptPrompt, Interrupts
from launcher.run.launch import LaunchContext
from launcher.run.lifecycle import RunContext, conduct
from launcher.run.live_table import Board
from launcher.run.options import LaunchOptions
from launcher.run.start_progress import StartProgress
from run_kit import make_launch, make_node
from trainer.core.train_config import TrainConfig

BROKEN = ConnectionLost("connection lost", host="host0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "RETRY_EVERY", 0.02)
    for name, value in {"_LAST_RESULT": 0.2, "_CHECK_EVERY": 0.03, "_POLL": 0.01, "_LOST_TO_PEERS": 0.2}.items():
        monkeypatch.setattr(follow_module, name, value)


def followed(folder: Path, *nodes: FakeNode, **more: Any) -> str:
    scene = Scene(folder, *nodes, **more)
    result = scene.follow()
    return scene.output + "".join(f"note: {note}\n" for note in result.notes)


def connection_lost_and_back(folder: Path) -> str:
    return followed(folder, FakeNode(0, [state(), BROKEN], [state(), ended(0)]))


def connection_never_back(folder: Path) -> str:
    other = FakeNode(1, [state(), ended(1)])
    return followed(folder, FakeNode(0, [state(), BROKEN]), other, lost_after=0.3)


def failed_process(folder: Path) -> str:
    gone = event("process-exit", name="rank0", rank=0, failed=True, returncode=1)
    node = FakeNode(0, [state(), gone, ended(0, "failed", failed=True, returncode=1)])
    return followed(folder, node, FakeNode(1, [ended(1, "stopped", stopped=True)]))


def supervisor_gone(folder: Path) -> str:
    other = FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped")]]
    gone = line(lost={"reason": "the supervisor (pid 7) is gone; its last sign of life was 1 s ago", "state": None})
    return followed(folder, FakeNode(0, [gone]), other)


def not_started(folder: Path) -> str:
    def refuse() -> None:
        raise SessionError(
            "node0 (local): tmux is not installed on the node; install it (apt install tmux) and launch again"
        )

    return followed(folder, FakeNode(0), starts={0: refuse})


def stopped_elsewhere(folder: Path) -> str:
    reason = {"reason": "stop requested by alice@laptop (gnnfleet stop)"}
    return followed(folder, FakeNode(0, [state(), ended(0, "stopped", reason)]))


def finding(folder: Path) -> str:
    text = "the loss of rank 0 on node0 is nan at epoch 3 step 17; the last finite one was 0.4512"
    record = {"t": 1.0, "kind": "nan", "node_rank": 0, "rank": 0, "text": text, "stop": False}
    return followed(folder, FakeNode(0, [state(findings=[record]), ended(0)]))


def started(folder: Path) -> str:
    node = FakeNode(0, [event("process-start", name="rank0", rank=0, pid=9), step(0, 16), ended(0)])
    return followed(folder, node)


def late_servers(folder: Path) -> str:
    server = Command(("server",))
    nodes = [dataclasses.replace(make_node(folder, k, []), server=server) for k in range(4)]
    starting = StartProgress(make_launch(nodes))
    starting.add(2, {"kind": "server-ready"}, 4.0)
    messages = [starting.late(5.0), starting.late(8.0)]
    reason = (
        "/home/a/.cache/gnnfleet/kernels cannot be written, so compiled kernels are kept in /tmp/gnnfleet-kernels-7"
    )
    messages += [starting.add(0, {"kind": "server-compiles", "reason": reason}, 6.0)]
    for k in (0, 1):
        starting.add(k, {"kind": "server-compiles"}, 6.1)
    messages += [starting.late(9.0), starting.late(61.0), starting.late(200.0, over={3})]
    messages += [starting.add(k, {"kind": "server-ready"}, 201.0) for k in (0, 1, 3)]
    return "".join(f"{line}\n" for line in [*messages, starting.late(400.0)] if line)


class Signals(InterruptPrompt):
    def __init__(self, scene: Scene, *numbers: int, can_ask: bool = False, keys: str = ""):
        super().__init__(scene.live, "ask", can_ask=can_ask)
        self.numbers, self.typed = list(numbers), keys
        self.live.board.epochs = 10

    def answer(self) -> Any:
        if self._keys is not None and (action := super().answer()):
            return action
        if self._keys is None and not self.numbers and self.typed:
            self.numbers, self.typed = [signal.SIGTERM], ""
        if self.numbers and self.live.board.stepping() and (self._keys is None or not self.typed):
            return self.signal(self.numbers.pop(0), time.monotonic())
        return None


def signalled(folder: Path, *numbers: int, can_ask: bool = False, keys: str = "") -> str:
    node = FakeNode(0)
    node.scripts = [[state(), step(0, 16), node.stopped, ended(0, "stopped", stopped=True)]]
    scene = Scene(folder, node)
    prompt = Signals(scene, *numbers, can_ask=can_ask, keys=keys)
    with patch.object(interrupts, "Keys", lambda: Typed(keys)):
        scene.follow(Interrupts(), prompt)
    return scene.output.split("ranks\n", 1)[1]


class Typed:
    def __init__(self, keys: str):
        self.keys = list(keys)

    def pressed(self) -> str:
        return self.keys.pop(0) if self.keys else ""

    def __enter__(self) -> Typed:
        return self

    def __exit__(self, *error: object) -> None:
        return


def detaching_early(folder: Path) -> str:
    wait = threading.Event()
    scene = Scene(folder, FakeNode(0, [state(), threading.Event()]), starts={0: lambda: wait.wait(0.3)})
    prompt = InterruptPrompt(scene.live, "detach", can_ask=False)
    prompt.answer = lambda: "detach" if scene.follower._detaching == "" else None  # type: ignore[method-assign]
    scene.follow(Interrupts(), prompt)
    return scene.output


def detached(folder: Path, why: str) -> str:
    console = Console(file=io.StringIO(), width=200)
    scene = Scene(folder, FakeNode(0))
    context = RunContext(RunConfig(), folder, 0.0, EventLog(folder / "e.jsonl"), console)
    board = Board.of(dataclasses.replace(scene.plan, train=TrainConfig(epochs=10)))
    board.metric({"kind": "step", "rank": 0, "epoch": 1, "step": 0, "steps": 50})
    try:
        report = RunReport("r1", folder, detached=why)  # type: ignore[arg-type]
        with (
            patch.object(lifecycle, "RunFollower"),
            patch.object(lifecycle, "RunReport", return_value=report),
            patch.object(Board, "of", return_value=board),
        ):
            conduct(context, scene.plan, {}, Interrupts())
    except OutOfReach as error:
        return f"error: {error}"
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().strip()


def no_folder(folder: Path) -> str:
    (folder / "file").write_text("")
    config = ClusterConfig(
        (NodeConfig("a"),), DataConfig("synthetic"), run=RunConfig(runs_dir=str(folder / "file" / "runs"))
    )
    with pytest.raises(UsageError) as raised:
        LaunchContext(config, LaunchOptions(Path("cluster.yml")), "r1", Console(file=io.StringIO()))
    return f"error: {raised.value}".replace(str(folder), "/data")


CASES: dict[str, Callable[[Path], str]] = {
    "all ranks have started, and the first line of progress": started,
    "graph servers take long": late_servers,
    "a line breaks and comes back": connection_lost_and_back,
    "a line breaks for good while the other node ends": connection_never_back,
    "a process fails": failed_process,
    "a supervisor is killed": supervisor_gone,
    "a node cannot be started": not_started,
    "somebody else stops the run": stopped_elsewhere,
    "a finding of the supervisors": finding,
    "Ctrl-C on a terminal, answered with Enter, and then SIGTERM": lambda folder: signalled(
        folder, signal.SIGINT, can_ask=True, keys="\n"
    ),
    "Ctrl-C twice": lambda folder: signalled(folder, signal.SIGINT, signal.SIGINT, can_ask=True),
    "SIGTERM": lambda folder: signalled(folder, signal.SIGTERM),
    "detaching before all nodes have started": detaching_early,
    "--detach": lambda folder: detached(folder, "trained"),
    "the answer d": lambda folder: detached(folder, "asked"),
    "no node within reach": lambda folder: detached(folder, "unreachable"),
    "the runs folder cannot be made": no_folder,
}


def test_messages(tmp_path: Path) -> None:
    messages = {}
    for how, provoke in CASES.items():
        folder = tmp_path / str(len(messages))
        folder.mkdir()
        messages[how] = re.sub(r"\b\d+(\.\d)? s\b(?! \()", "N s", provoke(folder))
    check_lines("launch", messages)
