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
    """Size of the row cache: a share of all rows that other hosts own, or a number of bytes."""

    share: float = 0.0  #: share of all remote rows, 0 to 1; ignored when ``bytes`` is set
    bytes: int | None = None  #: size in bytes

    @classmethod
    def parse(cls, text: str) -> CacheSize:
        """Parse a share such as ``10%``, a number of bytes such as ``512MB``, or ``0``. Raises ``SettingsError``."""
        if text.strip() in ("0", "none"):
            return cls()
        found = _SIZE.fullmatch(text.strip())
        if found is None:
            raise SettingsError(
                f"{text!r} is not a cache size; write a share of the remote rows (10%), a size (512MB), or 0"
            )
        number, unit = float(found[1]), found[2].upper()
        if unit != "%":
            return cls(bytes=int(number * _UNITS[unit]))
        if number > 100:
            raise SettingsError(f"cache size {text} of the remote rows is too large; the maximum is 100%")
        return cls(share=number / 100)

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.bytes is None else f"{self.bytes}B"


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
