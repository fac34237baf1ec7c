"""Test kit: fake nodes that stream scripted messages, and a launcher that follows a run on these nodes."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_transport import FakeTransport, printed
from launcher.command import Command
from launcher.config.schema import RunConfig
from launcher.errors import ConnectionLost
from launcher.plan.model import LaunchPlan
from launcher.report.events import EventLog
from launcher.report.report import RunReport
from launcher.run.live_log import LiveLog
from launcher.run.monitor import RunFollower
from launcher.text import PlainConsole
from launcher.transport.base import OnLine
from run_kit import make_launch, make_node

#: The steps of a stream, in order. A step is a line to send, an exception to raise, an Event to wait for, or a function
#: to call.
Script = list[Any]


def line(**message: Any) -> str:
    return json.dumps(message)


def state(word: str = "training", **more: Any) -> str:
    return line(state={"state": word, "time": time.time(), "pid": 7, "start_ticks": 1, "processes": [], **more})


def event(kind: str, k: int = 0, **more: Any) -> str:
    logged = {"t": time.time(), "kind": kind, "node_rank": k, **more}
    return line(file="events.jsonl", offset=1, lines=[json.dumps(logged)])


def ended(node_rank: int, state: str = "done", more: dict[str, Any] | None = None, **outcome: Any) -> str:
    record = {"name": f"rank{node_rank}", "node_rank": node_rank, "rank": node_rank, "returncode": 0, "signal": None}
    record |= {"started": 1.0, "ended": 2.0, "failed": False, "traceback": [], "tail": [], **outcome}
    return line(result={"node_rank": node_rank, "state": state, "outcomes": [record], **(more or {})})


def step(rank: int, number: int = 0, **more: Any) -> str:
    metric = {"kind": "step", "rank": rank, "epoch": 1, "step": number, "steps": 50, "t": time.time()}
    metric |= {"loss": 1.25, "seeds": 512, "seeds_per_s": 1000.0, "wait_s": 0.0, **more}
    return line(file=f"metrics-rank{rank}.jsonl", offset=1, lines=[json.dumps(metric)])


class FakeNode(FakeTransport):
    """A fake node that streams the next of ``scripts`` on each connection. A stop request sets ``stopped``."""

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
                while not step.wait(0.02):
                    if stop.is_set():
                        return -1
            elif callable(step):
                step()
            else:
                on_line(step)
        return 0

    @property
    def stops(self) -> int:
        return sum(1 for call in self.lines() if "control.py stop" in call)


class Scene:
    def __init__(
        self,
        tmp_path: Path,
        *nodes: FakeNode,
        lost_after: float = 5.0,
        start_timeout: float = 1.0,
        restarts: int = 0,
        starts: dict[int, Callable[[], None]] | None = None,
        own_command: tuple[str, ...] = (),
        **more: Any,
    ):
        self.nodes = nodes
        plan = make_launch([make_node(Path("/w"), node.node_rank or 0, []) for node in nodes])
        self.plan: LaunchPlan = replace(plan, own_command=own_command)
        self.events = tmp_path / "events.jsonl"
        self.console = PlainConsole(file=io.StringIO(), width=200)
        transports = {node.node_rank or 0: node for node in nodes}
        self.live, log = LiveLog(self.console, self.plan), EventLog(self.events)
        limits = RunConfig(
            lost_after=lost_after,
            grace=1.0,
            connect_timeout=1.0,
            start_timeout=start_timeout,
            peer_timeout=0.1,
            restarts=restarts,
        )
        self.report = RunReport("r1", tmp_path)
        self.follower = RunFollower(self.plan, transports, limits, self.live, log, self.report, starts=starts, **more)

    def follow(self, *how: Any) -> RunReport:
        self.follower.follow(*how)
        return self.report

    @property
    def output(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()

    @property
    def kinds(self) -> list[str]:
        return [json.loads(text)["kind"] for text in self.events.read_text().splitlines()]
