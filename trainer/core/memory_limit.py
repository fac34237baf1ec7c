"""The memory that this process can use, from the kernel and from control groups (Linux)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")

_OWN_GROUPS = Path("/proc/self/cgroup")

_GROUPS = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes that this process and the page cache of its files can use, or None if the system does not tell.

    That is the memory that the kernel estimates to be available, or less if a control group of this process has a
    limit (cgroup v1 or v2): the limit without the memory that its processes have allocated.
    """
    free = _from_kernel()
    if free is None:
        return None
    return max(0, min([free, *_from_groups()]))


def _from_kernel() -> int | None:
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _from_groups() -> Iterator[int]:
    """Yield the memory left in each control group of this process that has a limit."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _left(_GROUPS, path, "memory.max", "anon")
            elif "memory" in controllers.split(","):
                yield from _left(_GROUPS / "memory", path, "memory.limit_in_bytes", "total_rss")


def _left(top: Path, path: str, limit_file: str, used: str) -> Iterator[int]:
    """Yield the memory left in the group ``path`` and in the groups that contain it."""
    folder = top / path.lstrip("/")
    for group in [folder, *folder.parents]:
        with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            limit = int((group / limit_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit - int(stat[used])
        if group == top:
            return
