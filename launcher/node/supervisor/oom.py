"""Detects that the kernel killed a process for memory, from its cgroup or the kernel log."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.node.exit_description import size

_WINDOW = 15.0  # seconds before the end of a process in which a kill counts as its own; a large one takes a while to go

_KERNEL_LOG = "/dev/kmsg"

_RECORD = 1 << 13  # bytes of a kernel log record, at most

_KILLED = re.compile(r"Killed process (\d+) ")

_OF_ALL = ("/sys/fs/cgroup/memory/memory.oom_control", "/proc/vmstat")  # these count for the whole machine

_NO_LIMIT = 1 << 60  # bytes; version 1 says a number about as large where there is none


class OomWatch:
    """Notices kills for memory while a process runs: ``look`` now and then, ``killed`` at its end."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int | None]] = deque()
        self.look()

    def look(self) -> None:
        """Note the count of now; one before the window is kept."""
        now = time.monotonic()
        self._counts.append((now, oom_kills()))
        while len(self._counts) > 1 and self._counts[1][0] < now - _WINDOW:
            self._counts.popleft()

    def killed(self, pid: int) -> bool:
        """Whether the kernel has just killed this process for memory."""
        before, now = self._counts[0][1], oom_kills()
        counted = before is not None and now is not None and now > before
        if counted and counts_our_group():
            return True
        log = list(kernel_log())
        return pid in killed_for_memory(log) or (counted and not log)  # the machine's count may be another program's

    def words(self, pid: int) -> dict[str, Any]:
        """What an outcome record says of a process that ended by SIGKILL."""
        allowed = limit()
        if not self.killed(pid):
            return {}
        return {"oom": True, "note": f"limit {size(allowed)}" if allowed is not None else ""}


def oom_kills(files: Sequence[str] = ()) -> int | None:
    """Processes the kernel has killed for memory, by the first of ``files`` that tells.

    By default those of this process's cgroup, else of the whole machine.
    """
    return _counted(files)[1]


def counts_our_group(files: Sequence[str] = ()) -> bool:
    """Whether what ``oom_kills`` counts are kills in this process's own cgroup."""
    return _counted(files)[0] not in ("", *_OF_ALL)


def _counted(files: Sequence[str]) -> tuple[str, int | None]:
    """The first file that tells, and its count; ("", None) where none does."""
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
    """Bytes this process's cgroup may use, by the first of ``files`` that tells; None without a limit."""
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
    """Pids that lines of the kernel's log name as killed for memory."""
    return {int(found[1]) for line in lines if "ut of memory" in line and (found := _KILLED.search(line))}


def kernel_log(path: str = _KERNEL_LOG) -> Iterator[str]:
    """Lines of the kernel's log as far as this user may read them."""
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
    """The next record; b"" after the last. Those overwritten meanwhile are passed over."""
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
    """Files of this process's memory cgroup and those above it, innermost first, by either version's name."""
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
