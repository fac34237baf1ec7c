"""Where graph servers are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerPlace:
    """A graph server, as others find it."""

    name: str  #: in messages: ``node2 (gpu3)``, or ``node0 (gpu1) of products`` of a serving cluster
    node_rank: int  #: in its own run
    host: str
    endpoint: str  #: tcp://address:port
    parts: tuple[int, ...]
