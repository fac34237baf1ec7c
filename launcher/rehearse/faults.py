"""Faults of a rehearsal: a process of the run gets SIGKILL or SIGSTOP after a given number of training steps."""

from __future__ import annotations

import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import serves
from launcher.errors import UsageError
from launcher.node import procs
from launcher.node.diagnostics.vitals import LineTail, read_progress
from launcher.node.json_reader import record_in
from launcher.node.json_records import STARTED
from launcher.plan.model import LaunchPlan

_POLL = 0.002  # seconds; a step on a small graph takes several milliseconds

_FORM = re.compile(r"(rank|server)(\d{1,6}):(kill|freeze)@step(\d{1,9})")

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    target: Literal["rank", "server"]
    index: int  #: the rank, or the node_rank of the graph server
    action: Literal["kill", "freeze"]
    step: int  #: training steps, counted over all epochs, after which the fault happens

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse ``rank1:kill@step20``. Raises UsageError."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(
                f"--fault {text}: expected rankR or serverK (the graph server of node K), then :kill or :freeze, "
                "then @step and a number, such as rank1:kill@step20"
            )
        target, index, action, step = match.groups()
        return cls(target, int(index), action, int(step))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.name}:{self.action}@step{self.step}"

    @property
    def name(self) -> str:
        """Name of the process: ``rank1``, ``server0``."""
        return f"{self.target}{self.index}"

    @property
    def watched_rank(self) -> int:
        """The rank whose steps are counted."""
        return self.index if self.target == "rank" else 0

    def check(self, config: ResolvedConfig) -> None:
        """Raise UsageError if the run has no such process."""
        if self.target == "rank" and self.index >= config.world_size:
            raise UsageError(f"--fault {self}: the run has ranks 0 to {config.world_size - 1}")
        servers = [k for k in range(len(config.nodes)) if serves(config, k)]
        if self.target == "server" and self.index not in servers:
            found = ", ".join(f"server{k}" for k in servers) or "none, as a single node reads its own parts"
            raise UsageError(f"--fault {self}: that node has no graph server; the run has {found}")


class FaultInjector:
    """Context manager that carries out a fault of a run on this machine, at most once.

    A thread reads the progress of the watched rank from its run folder every 2 ms. It sends the signal as soon as it
    sees the step, in most cases before the next step has ended. A user's own script with ``StepLog`` reports its steps
    only once per second, so that the fault happens later.

    ``plan``: the plan of the run; its ports are not used.
    """

    def __init__(self, fault: Fault, plan: LaunchPlan, console: Console) -> None:
        self.fault, self.console = fault, console
        self.steps = 0  #: steps that the watched rank has completed
        self.happened = False
        rank = fault.watched_rank
        watched = Path(next(node.run_dir for node in plan.nodes if rank in node.ranks))
        self._progress, self._lines = str(watched / f"progress-rank{rank}"), str(watched / f"metrics-rank{rank}.jsonl")
        self._folder = watched if fault.target == "rank" else Path(plan.nodes[fault.index].run_dir)
        self._tail, self._per_epoch = LineTail(self._lines), 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fault", daemon=True)

    def __enter__(self) -> FaultInjector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not (self._over.is_set() or self.happened):
            # The progress file has the epoch and its step; only metrics lines have the number of steps per epoch.
            for line in self._tail.lines():
                if line["kind"] == "step" and _naturals(line.get("epoch"), line.get("step"), line.get("steps")):
                    self._per_epoch = line["steps"]
                    self.steps = max(self.steps, (line["epoch"] - 1) * self._per_epoch + line["step"] + 1)
            progress = read_progress(self._progress)
            if self._per_epoch and progress and progress[2] in ("load", "compute", "reduce"):
                self.steps = max(self.steps, (progress[0] - 1) * self._per_epoch + progress[1])
            pid = None
            if self.steps >= self.fault.step:
                pid = self._rank_pid() if self.fault.target == "rank" else self._server_pid()
            if pid is None:
                self._over.wait(_POLL)
                continue
            number = _SIGNALS[self.fault.action]
            procs.send(pid, number)
            self.happened = True
            text = f"fault: {number.name} sent to {self.fault.name} (pid {pid}) after {self.steps} steps"
            self.console.print(Text(text, "bold magenta"), soft_wrap=True)

    def _rank_pid(self) -> int | None:
        record = record_in(STARTED, str(self._folder / "procs" / f"{self.fault.name}.json"))
        return record["pid"] if record and procs.alive(record["pid"], record["start_ticks"]) else None

    def _server_pid(self) -> int | None:
        pid = 0
        for event in LineTail(str(self._folder / "events.jsonl")).lines():
            if event["kind"] == "process-start" and event.get("name") == "server" and _naturals(event.get("pid")):
                pid = event["pid"]  # of the last start
        return pid if procs.look(pid) is not None else None


def _naturals(*values: Any) -> bool:
    return all(isinstance(value, int) and value >= 0 for value in values)
