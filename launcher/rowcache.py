"""How many rows of other hosts a host keeps (``data.cache``), as ``trainer.reach.CacheSize`` reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(%|B|KB|MB|GB|TB)", re.IGNORECASE)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class CacheSize:
    """A share of the remote rows, or bytes."""

    share: float = 0.0  #: of all remote rows, 0 to 1
    bytes: int | None = None  #: instead of a share

    @classmethod
    def parse(cls, text: str) -> CacheSize:
        """``10%``, ``512MB``, or ``0`` for none. Raises ValueError with words for the user."""
        if text.strip() in ("0", "none"):
            return cls()
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"expected a share of the remote rows (10%), a size (512MB) or 0, found `{text}`")
        number, unit = float(found[1]), found[2].upper()
        if unit != "%":
            return cls(bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise ValueError(f"the most there is of the remote rows is 100%, found `{text}`")
        return cls(share=number / 100)

    def of_rows(self, num_remote: float, row_bytes: float) -> int:
        """Bytes kept at most of ``num_remote`` rows of ``row_bytes`` bytes."""
        there = num_remote * row_bytes
        return round(self.share * there if self.bytes is None else min(self.bytes, there))
