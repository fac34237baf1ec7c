"""Parses and formats memory sizes, and measures how much memory is available."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.core.errors import SettingsError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(B|[KMGT]B?)", re.IGNORECASE)

_UNITS = {"B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as ``512MB`` or ``4G`` (decimal units). Raises ``SettingsError``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise SettingsError(f"{text!r} is not a size; write a number and a unit, such as 512MB or 4GB")
    return int(float(found[1]) * _UNITS[found[2][0].upper()])


def size_text(size: int) -> str:
    """Return a number of bytes as text, such as ``4.2 GB``."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def available_memory() -> int:
    """Return the bytes of memory available to this process: ``MemAvailable``, at most the limit of its cgroup."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    available = int(line.split()[1]) * 1024
    for path in _LIMITS:
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            available = min(available, int(text))
    return available
