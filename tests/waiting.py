"""Helpers that wait for other processes and check whether they run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Seconds after which a wait for an event fails. It only matters when something is broken, so it bears a busy machine.
DEADLINE = 300.0


def wait_until(true: Callable[[], Any], timeout: float = DEADLINE) -> Any:
    """Call ``true`` until its result is true, and return the result. Fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := true()):
        assert time.monotonic() < deadline, f"did not come true within {timeout} s"
        time.sleep(0.02)
    return value


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def stretched(seconds: float) -> float:
    """Return a limit of ``seconds`` for an idle machine as a limit for this one: times its load for each processor."""
    average, _, _, running, *_ = Path("/proc/loadavg").read_text().split()
    load = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, load / (os.cpu_count() or 1))
