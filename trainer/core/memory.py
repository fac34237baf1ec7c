"""Parses and formats memory sizes, and measures how much memory is available."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.core.errors import DataError, SettingsError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(B|[KMGT]B?)", re.IGNORECASE)

_UNITS = {"B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_MEMINFO = Path("/proc/meminfo")

_OWN_GROUPS = Path("/proc/self/cgroup")

_GROUPS = Path("/sys/fs/cgroup")


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as ``512MB`` or ``4G`` (decimal units). Raises ``SettingsError``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"{text!r} is not a size; write a number and a unit, such as 512MB or 4GB")
    return int(float(found[1]) * _UNITS[found[2][0].upper()])


def size_text(size: int) -> str:
    """Return a number of bytes as text, such as ``4.2 GB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def available_memory() -> int | None:
    """Return the bytes of memory that this process can still allocate, or None if the system does not report them.

    Considers MemAvailable and the limits of the process's control groups. Page cache counts as available.
    """
    free = None
    with suppress(OSError, ValueError, IndexError):
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    return None if free is None else max(0, min([free, *_from_groups()]))


def check_unpacked(path: Path, advice: str) -> None:
    """Raise ``DataError`` if the files in a zip archive take more than the available memory when they are unpacked.

    A small archive can unpack to a thousand times its size. ``advice``: what to do, for the message. Files that are no
    zip archives pass. Raises ``OSError`` if the file cannot be read, and ``BadZipFile`` if it is damaged.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        needed, free = sum(member.file_size for member in archive.infolist()), available_memory()
    if free is not None and needed > free:
        raise DataError(
            f"{path}: its arrays take {size_text(needed)} when unpacked, but only {size_text(free)} of memory are "
            f"available; {advice}"
        )


def _from_groups() -> Iterator[int]:
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _left(_GROUPS, path, "memory.max", ("anon", "shmem"))
            elif "memory" in controllers.split(","):
                yield from _left(_GROUPS / "memory", path, "memory.limit_in_bytes", ("total_rss", "total_shmem"))


def _left(top: Path, path: str, limit_file: str, used: tuple[str, ...]) -> Iterator[int]:
    """Yield the bytes left in control group ``path`` and in each group that contains it.

    ``top``: the folder at which control groups are mounted. ``limit_file``: name of the file with the limit in bytes.
    ``used``: the keys in memory.stat for the bytes in use; the first must be there.
    """
    folder = top / path.lstrip("/")
    for group in [folder, *folder.parents]:
        with suppress(OSError, ValueError, KeyError):  # no such file, or "max"
            limit = int((group / limit_file).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit - int(stat[used[0]]) - sum(int(stat.get(key, 0)) for key in used[1:])
        if group == top:
            return
