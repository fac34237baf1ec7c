"""Detects from the cgroup or the kernel log that the kernel's OOM killer has killed a process."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.node.exit_description import size

# Seconds between the count of an OOM kill by the kernel and the end of the process; large processes end slowly.
_WINDOW = 15.0

_KERNEL_LOG = "/dev/kmsg"

_RECORD = 1 << 13  # bytes of a kernel log record, at most

_KILLED = re.compile(r"Killed process (\d+) ")

_OF_ALL = ("/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")  # files with the OOM kills of the whole machine

_NO_LIMIT = 1 << 60  # bytes; cgroup v1 reports "no limit" as a number of about this size


class OomWatch:
    """Detects whether the kernel's OOM killer has killed a process.

    Call ``look`` regularly while the process runs, and ``killed`` when it has ended.
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int | None]] = deque()
        self.look()

    def look(self) -> None:
        now = time.monotonic()
        self._counts.append((now, oom_kills()))
        while len(self._counts) > 1 and self._counts[1][0] < now - _WINDOW:
            self._counts.popleft()

    def killed(self, pid: int) -> bool:
        """Whether the kernel's OOM killer has just killed this process."""
        before, now = self._counts[0][1], oom_kills()
        counted = before is not None and now is not None and now > before
        if counted and counts_our_group():
            return True
        log = list(kernel_log())
        # Without a readable kernel log, an OOM kill counted on the machine is attributed to this process.
        return pid in killed_for_memory(log) or (counted and not log)

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
    for path in files or (*_cgroup_files("memory.events", "memory.oom_control"), "/proc/vmstat"):
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


def killed_for_memory(lines: Iterator[str] | Sequence[str]) -> set[int]:
    """Return the pids of processes that the OOM killer has killed, according to lines of the kernel log."""
    return {int(found[1]) for line in lines if "ut of memory" in line and (found := _KILLED.search(line))}


def kernel_log(path: str = _KERNEL_LOG) -> Iterator[str]:
    """Yield the lines of the kernel log, from /dev/kmsg or dmesg; none when this user may read neither."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        yield from _dmesg()
        return
    try:
        while data := _record(log):
            yield data.decode("utf-8", "replace")
    finally:
        os.close(log)


def _record(log: int) -> bytes:
    """Return the next record of /dev/kmsg; b"" after the last one. Skips records that were overwritten meanwhile."""
    while True:
        try:
            return os.read(log, _RECORD)
        except BrokenPipeError:
            continue
        except OSError:
            return b""


def _dmesg() -> Iterator[str]:
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=3, check=False)
    except (OSError, subprocess.TimeoutExpired):  # not installed, or not answering
        return
    yield from done.stdout.decode("utf-8", "replace").splitlines()


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
