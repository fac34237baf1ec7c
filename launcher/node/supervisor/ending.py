"""How all processes of a run on one node are ended: politely first, then by group, then whatever is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from launcher.node import procs
from launcher.node.child_process import Child
from launcher.node.supervisor.outcomes import Book

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
