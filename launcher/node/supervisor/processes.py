"""Starts the rank runners of a node, and ends all processes of the run.

They get the variables that torch.distributed.run would set, so that ``init_process_group("env://")`` and what builds
on it work; rank 0 then holds the store at MASTER_ADDR:MASTER_PORT itself. Nothing else of it is needed here: the
supervisors find each other, judge and end the ranks.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.node import procs
from launcher.node.child_process import Child
from launcher.node.supervisor.outcomes import Book
from launcher.node.supervisor.spec import NodeSpec

Start = Callable[[str, Mapping[str, Any], str], Child]


def rank_environment(spec: NodeSpec, local_rank: int) -> dict[str, str]:
    """What tells a rank which one it is. The command's own variables name the run's size and the master."""
    rank = str(spec.ranks[local_rank])
    return {
        "RANK": rank,
        "ROLE_RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(len(spec.ranks)),
    }


class Runners:
    """Those of one node. ``begin`` starts them; a rank's own end is in the ``Book``."""

    def __init__(self, spec: NodeSpec, book: Book, start: Start) -> None:
        self._spec, self._book, self._start = spec, book, start
        self.children: dict[int, Child] = {}  #: by rank

    def begin(self) -> None:
        """Start all of them; raises what ``start`` does."""
        command = self._spec.trainer
        assert command is not None
        env = dict(command.get("env", {}))
        if len(self._spec.ranks) > 1 and "OMP_NUM_THREADS" not in {**os.environ, **env}:
            env["OMP_NUM_THREADS"] = "1"  # else each rank computes with a thread for every core
        for local_rank, rank in enumerate(self._spec.ranks):
            own = {**command, "env": {**env, **rank_environment(self._spec, local_rank)}}
            self.children[rank] = self._start(f"runner{rank}", own, "runners")

    def running(self) -> bool:
        """Whether one of them does."""
        return any(child.running() for child in self.children.values())

    def ended_badly(self) -> Child | None:
        """One that has ended unasked and not well, though its rank has not failed; look only once the book has."""
        for rank, child in self.children.items():
            known = self._book.outcomes.get(f"rank{rank}", {})
            if not child.running() and child.status[0] != 0 and not child.asked and not known.get("failed"):
                return child
        return None


_MARGIN = 1.5  # seconds rank runners get beyond the grace to write their outcomes

_LEFTOVER_GRACE = 2.0  # seconds that what escaped from the process groups gets after SIGTERM

_LEAST = 0.3  # seconds of grace in which a rank runner learns that its rank is told to stop

Idle = Callable[[float], object]


def end_processes(children: list[Child], book: Book, token: str, grace: float, idle: Idle) -> list[procs.Process]:
    """End everything; returns what outlived even SIGKILL. ``idle`` waits a moment and keeps the supervisor going."""
    book.stopping = True
    for child in children:
        child.terminate()

    def ended() -> bool:
        return not any(child.running() for child in children)

    _wait(ended, max(grace, _LEAST), idle)
    stubborn = not ended()
    if stubborn:
        _kill_groups(children, book)
        _wait(ended, _MARGIN, idle)
    left = procs.end(
        lambda: procs.run_processes(f"{procs.TOKEN}={token}", os.getpid()),
        0.0 if stubborn else min(grace, _LEFTOVER_GRACE),
        lambda: idle(0.05),
    )
    idle(0.0)  # takes in the last that ended; not every machine's init does
    return left


def _kill_groups(children: list[Child], book: Book) -> None:
    """The ranks and the server themselves; runners then write what became of their ranks, and end."""
    book.look()
    ranks = book.rank_pids().values()
    for pid in ranks:
        procs.send_group(pid, signal.SIGKILL)
    runners = book.runner_pids()
    for child in children:
        if child.running() and child.pid not in runners:
            procs.send_group(child.pid, signal.SIGKILL)


def _wait(ended: Callable[[], bool], seconds: float, idle: Idle) -> None:
    deadline = time.monotonic() + seconds
    while not ended() and time.monotonic() < deadline:
        idle(0.05)
