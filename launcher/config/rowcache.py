"""How many rows are kept (``data.cache``, ``train.device_cache``), as ``trainer.core.remote_access.CacheSize`` reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(%|B|KB|MB|GB|TB)", re.IGNORECASE)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class CacheSize:
    """A share of some rows, or bytes."""

    share: float = 0.0  #: 0 to 1
    bytes: int | None = None  #: instead of a share

    @classmethod
    def parse(cls, text: str, rows: str = "the remote rows") -> CacheSize:
        """``10%``, ``512MB``, or ``0`` for none. ValueError has words for the user; ``rows``: of what a share is."""
        if text.strip() in ("0", "none"):
            return cls()
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"expected a share of {rows} (10%), a size (512MB) or 0, found `{text}`")
        number, unit = float(found[1]), found[2].upper()
        if unit != "%":
            return cls(bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise ValueError(f"the most there is of {rows} is 100%, found `{text}`")
        return cls(share=number / 100)

    def of_rows(self, num_remote: float, row_bytes: float) -> int:
        """Bytes kept at most of ``num_remote`` rows of ``row_bytes`` bytes."""
        there = num_remote * row_bytes
        return round(self.share * there if self.bytes is None else min(self.bytes, there))
