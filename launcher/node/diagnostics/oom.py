"""Detects from the kernel log or the cgroup that the kernel's OOM killer has killed a process."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from launcher.node.exit_description import size

# Seconds between the count of an OOM kill by the kernel and the end of the process; large processes end slowly.
_WINDOW = 15.0

_KERNEL_LOG = "/dev/kmsg"

_RECORD = 1 << 13  # bytes of a kernel log record, at most

_KILLED = re.compile(r"Killed process (\d+) ")

# Files with the OOM kills of the whole machine. In cgroup v2 the root has no such file.
_OF_ALL = ("/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")

_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the number is fixed: PROC_PID_INIT_INO of linux/proc_ns.h

_SHORT = 0.1  # share of the memory that was available when the whole machine ran out of it, at most

_NO_LIMIT = 1 << 60  # bytes; cgroup v1 reports "no limit" as a number of about this size


class OomWatch:
    """Detects whether the kernel's OOM killer has killed a process.

    Create it before the process starts, call ``look`` regularly while the process runs, and ``killed`` when it has
    ended. The OOM killer may have killed another process at that time, while this one was killed by ``kill -9``. So the
    kernel log decides where it can be read, except in a container, which sees other pids. Else the count of this
    process's cgroup decides, or the count of the whole machine, if memory was short then.
    """

    def __init__(self, log: str = _KERNEL_LOG) -> None:
        self._looks: deque[tuple[float, int | None, float]] = deque()
        self._killed: set[int] = set()
        self._log: int | None = None
        with contextlib.suppress(OSError):
            if os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE:
                self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._log, 0, os.SEEK_END)  # an earlier process may have had the same pid
        self.look()

    def __del__(self) -> None:
        if self._log is not None:
            os.close(self._log)

    def look(self) -> None:
        now = time.monotonic()
        self._looks.append((now, oom_kills(), available_share()))
        while len(self._looks) > 1 and self._looks[1][0] < now - _WINDOW:
            self._looks.popleft()

    def killed(self, pid: int) -> bool:
        """Whether the kernel's OOM killer has just killed this process."""
        if self._log is not None:
            self._killed |= killed_for_memory(_records(self._log))
            return pid in self._killed
        before, now = self._looks[0][1], oom_kills()
        if before is None or now is None or now == before:
            return False
        return counts_our_group() or min(share for _, _, share in self._looks) < _SHORT

    def outcome_fields(self, pid: int) -> dict[str, Any]:
        """Return ``oom`` and ``note`` for the outcome of a process ended by SIGKILL.

        {} if it was not the OOM killer that ended the process.
        """
        allowed = limit()
        if not self.killed(pid):
            return {}
        return {"oom": True, "note": f"limit {size(allowed)}" if allowed is not None else ""}


def oom_kills(files: Sequence[str] = ()) -> int | None:
    """Return how many processes the OOM killer has killed; None if this is unknown.

    Reads the first of ``files`` that contains this number. Default: the files of this process's cgroup, then
    /proc/vmstat, which counts for the whole machine.
    """
    return _counted(files)[1]


def counts_our_group(files: Sequence[str] = ()) -> bool:
    """Whether the number returned by ``oom_kills`` counts only this process's cgroup, not the whole machine."""
    return _counted(files)[0] not in ("", *_OF_ALL)


def _counted(files: Sequence[str]) -> tuple[str, int | None]:
    # memory.events also counts for the groups below: those of containers, for example.
    names = ("memory.events.local", "memory.events")
    groups = [path for name in names for path in _cgroup_files(name, "memory.oom_control")]
    for path in files or (*groups, "/proc/vmstat"):
        try:
            with open(path, encoding="ascii") as file:
                counters = dict(line.split()[:2] for line in file)
        except OSError:
            continue
        if "oom_kill" in counters:
            return path, int(counters["oom_kill"])
    return "", None


def limit(files: Sequence[str] = ()) -> int | None:
    """Return the memory limit of this process's cgroup in bytes; None if there is no limit.

    Reads the first of ``files`` that contains a limit. Default: the files of the cgroup, then of its ancestors.
    """
    for path in files or _cgroup_files("memory.max", "memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def available_share() -> float:
    """Return the share of the machine's memory that is available, between 0 and 1; 1 if this is unknown."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = {words[0]: int(words[1]) for words in map(str.split, file)}
        return sizes["MemAvailable:"] / sizes["MemTotal:"]
    except (OSError, KeyError):
        return 1.0


def killed_for_memory(lines: Iterable[str]) -> set[int]:
    """Return the pids of processes that the OOM killer has killed, according to lines of the kernel log."""
    return {int(found[1]) for line in lines if "ut of memory" in line and (found := _KILLED.search(line))}


def _records(log: int) -> Iterable[str]:
    """Yield the further records of /dev/kmsg. Skips records that were overwritten before they were read."""
    while True:
        try:
            record = os.read(log, _RECORD)
        except BrokenPipeError:
            continue
        except OSError:  # no further one
            return
        if not record:
            return
        yield record.decode("utf-8", "replace")


def _cgroup_files(unified: str, version1: str) -> list[str]:
    """Return the files of this process's memory cgroup and of its ancestors, innermost first.

    unified, version1: name of the file in cgroup v2 and in v1.
    """
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except FileNotFoundError:  # a kernel without cgroups
        return []
    files: list[str] = []
    for _, controllers, path in entries:
        if not controllers:
            files += _upwards("/sys/fs/cgroup", path, unified)
        elif "memory" in controllers.split(","):
            files += _upwards("/sys/fs/cgroup/memory", path, version1)
    return files


def _upwards(root: str, path: str, name: str) -> list[str]:
    words = [word for word in path.split("/") if word]
    return ["/".join([root, *words[:count], name]) for count in range(len(words), -1, -1)]
