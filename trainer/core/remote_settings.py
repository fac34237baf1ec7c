"""Settings for access to parts on other hosts: timeout, topology, size of the row cache, rounding of sent rows."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from trainer.core.errors import SettingsError

Topology = Literal["partitioned", "replicated"]

WireRows = Literal["stored", "float16", "int8"]

SERVER_WAIT = 60.0  #: seconds to wait for a lost graph server when no other host has its parts

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *(%|B|KB|MB|GB|TB)", re.IGNORECASE)

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class CacheSize:
    """Size of a row cache: a share of all rows that it may hold, such as those of other hosts, or a number of bytes."""

    share: float = 0.0  #: share of all rows, 0 to 1; ignored when ``bytes`` is set
    bytes: int | None = None  #: size in bytes

    @classmethod
    def parse(cls, text: str, rows: str = "the remote rows") -> CacheSize:
        """Parse a share such as ``10%``, a number of bytes such as ``512MB``, or ``0`` for no cache.

        ``rows``: what the share refers to, for messages. Raises ``SettingsError`` for other text.
        """
        if text.strip() in ("0", "none"):
            return cls()
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise SettingsError(f"expected a share of {rows} (10%), a size (512MB) or 0, found {text!r}")
        number, unit = float(found[1]), found[2].upper()
        if unit != "%":
            return cls(bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise SettingsError(f"expected at most 100% of {rows}, found {text!r}")
        return cls(share=number / 100)

    def of_rows(self, num_rows: float, row_bytes: float) -> int:
        """Return the size in bytes of a cache for ``num_rows`` rows of ``row_bytes`` bytes each."""
        total = num_rows * row_bytes
        return round(self.share * total if self.bytes is None else min(self.bytes, total))

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.bytes is None else f"{self.bytes}B"


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as ``500GB``. Raises ``SettingsError``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2] == "%":
        raise SettingsError(f"expected a size (500GB), found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass(frozen=True)
class RemoteAccess:
    """Settings for access to parts on other hosts. They must be equal on all ranks of a run."""

    server_wait: float = SERVER_WAIT  #: seconds to wait for a lost graph server
    topology: Topology = "partitioned"  #: replicated: this host has the edges of all parts and requests only rows
    cache: CacheSize = CacheSize(share=0.1)  #: size of the cache for rows of other hosts
    wire_rows: WireRows = "stored"  #: type that floating-point rows are rounded to on the wire; stored: not rounded

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> RemoteAccess:
        """Read the settings from the environment variables that the launcher sets. Raises ``SettingsError``."""
        return cls(
            server_wait=float(environ.get("GNNFLEET_SERVER_WAIT") or cls.server_wait),
            topology=cast(Topology, _one_of(environ, "GNNFLEET_TOPOLOGY", get_args(Topology))),
            cache=CacheSize.parse(environ.get("GNNFLEET_CACHE") or str(cls.cache)),
            wire_rows=cast(WireRows, _one_of(environ, "GNNFLEET_WIRE_ROWS", get_args(WireRows))),
        )


def _one_of(environ: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = environ.get(name) or choices[0]
    if value not in choices:
        raise SettingsError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
    return value
