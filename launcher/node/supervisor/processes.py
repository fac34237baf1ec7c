"""Starts the rank runners of a node, and ends all processes of the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child
from launcher.node.environment import rank_environments
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.outcomes import OutcomeBook

Start = Callable[[str, Mapping[str, Any], str], Child]


class RankRunners:
    """Starts the rank runners of one node and checks whether they run."""

    def __init__(self, spec: NodeSpec, book: OutcomeBook, start: Start) -> None:
        self._spec, self._book, self._start = spec, book, start
        self.children: dict[int, Child] = {}  #: by rank

    def begin(self) -> None:
        """Start all rank runners; raises the exceptions of ``start``."""
        command = self._spec.trainer
        assert command is not None
        for rank, env in rank_environments(self._spec).items():
            self.children[rank] = self._start(f"runner{rank}", {**command, "env": env}, "runners")

    def running(self) -> bool:
        return any(child.running() for child in self.children.values())

    def ended_badly(self) -> Child | None:
        """Return a rank runner that failed although its rank did not; None if there is none.

        Leaves out rank runners that were stopped. Call ``OutcomeBook.look`` first: it reads the outcomes of the ranks.
        """
        for rank, child in self.children.items():
            known = self._book.outcomes.get(f"rank{rank}", {})
            if not child.running() and child.status[0] != 0 and not child.stop_sent and not known.get("failed"):
                return child
        return None


_MARGIN = 1.5  # seconds that rank runners get beyond the grace to write their outcomes

_LEFTOVER_GRACE = 2.0  # seconds between SIGTERM and SIGKILL for processes that left their process groups

_LEAST = 0.3  # seconds of grace at least, so that a rank runner can mark its rank as stopped

Idle = Callable[[float], object]  #: is called again and again while something takes long, with seconds to wait


def end_processes(
    children: list[Child], book: OutcomeBook, token: str, grace: float, idle: Idle, *, done: bool = False,
    spared: Sequence[str] = (),
) -> list[procs.Process]:  # fmt: skip
    """End all processes of the run on this node; return those that still run after SIGKILL.

    children: the supervisor's child processes. token: marks all processes of the run, in their environment. grace:
    seconds between SIGTERM and SIGKILL. ``idle(seconds)`` waits and keeps the supervisor's heartbeat running. done: no
    rank of the run needs a graph server any more. spared: variables and values (``NAME=value``) in the environment of
    processes that go on.
    """
    book.stopping = True
    for child in children:  # SIGINT ends a graph server at once, see ``trainer.service.serve``
        child.terminate(signal.SIGINT if done and child.name == "server" else signal.SIGTERM)

    def ended() -> bool:
        return not any(child.running() for child in children)

    _wait(ended, max(grace, _LEAST), idle)
    stubborn = not ended()
    if stubborn:
        # Rank runners live on: they write the outcomes of their ranks and end.
        book.look()
        ranks = book.rank_pids().values()
        for pid in ranks:
            procs.send_group(pid, signal.SIGKILL)
        runners = book.runner_pids()
        for child in children:
            if child.running() and child.pid not in runners:
                procs.send_group(child.pid, signal.SIGKILL)
        _wait(ended, _MARGIN, idle)

    def running() -> list[procs.Process]:
        found = procs.run_processes(f"{procs.TOKEN}={token}", os.getpid())
        kept = [process for mark in spared for process in procs.with_variable(mark, found)]
        return [process for process in found if process not in kept]

    left = procs.end(
        running,
        0.0 if stubborn else min(grace, _LEFTOVER_GRACE),
        lambda: idle(0.05),
    )
    idle(0.0)  # reaps the last orphans; not every container's init does
    return left


def _wait(ended: Callable[[], bool], seconds: float, idle: Idle) -> None:
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        idle(0.05)
