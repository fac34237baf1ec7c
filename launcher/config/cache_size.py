"""Parses sizes in the config: of row caches, in percent or bytes, and of disk space, in bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(%|B|KB|MB|GB|TB)", re.IGNORECASE)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class CacheSize:
    """Maximum size of a row cache: a share of the rows, or a number of bytes."""

    share: float = 0.0  #: 0 to 1; ignored if ``bytes`` is given
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str, rows: str = "the remote rows") -> CacheSize:
        """Parse ``10%``, ``512MB``, or ``0`` for no cache.

        ``rows``: what the percentage refers to, for error messages. Raises ValueError for other text.
        """
        if text.strip() in ("0", "none"):
            return cls()
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"expected a share of {rows} (10%), a size (512MB) or 0, found `{text}`")
        number, unit = float(found[1]), found[2].upper()
        if unit != "%":
            return cls(bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise ValueError(f"expected at most 100% of {rows}, found `{text}`")
        return cls(share=number / 100)

    def of_rows(self, num_remote: float, row_bytes: float) -> int:
        """Return the maximum size in bytes of a cache for ``num_remote`` rows of ``row_bytes`` bytes each."""
        total = num_remote * row_bytes
        return round(self.share * total if self.bytes is None else min(self.bytes, total))


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``500GB``. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] == "%":
        raise ValueError(f"expected a size (500GB), found `{text}`")
    return int(float(found[1]) * _UNITS[found[2].upper()])
