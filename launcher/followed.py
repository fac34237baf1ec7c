"""How following a run ended, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Detached = Literal["", "asked", "trained", "unreachable"]


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds."""

    lost_after: float  #: without a line to any node, until following is given up
    grace: float  #: between SIGTERM and SIGKILL
    connect_timeout: float
    start_timeout: float = 120.0
    peer_timeout: float = 6.0  #: in which the supervisors notice that one of them has gone


@dataclass(frozen=True)
class Lost:
    """A node that has ended without a result, as far as we can tell."""

    why: str
    when: float  #: by this machine's clock
    out_of_reach: bool = False  #: it may live; nobody here could ask


@dataclass
class Followed:
    """How the run ended, node by node; or why it is not followed any more although it goes on."""

    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)  #: result.json
    lost: dict[int, Lost] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  #: nodes that were stopped and said nothing more
    notes: list[str] = field(default_factory=list)  #: what may still run, and where
    findings: list[Mapping[str, Any]] = field(default_factory=list)
    clocks: dict[int, float] = field(default_factory=dict)  #: node clock minus ours, as heartbeats tell: s, roughly
    interrupted: str = ""  #: what ended it from here: Ctrl-C, SIGTERM
    detached: Detached = ""

    @property
    def ended(self) -> set[int]:
        return set(self.results) | set(self.lost) | self.silent


def node0_was_cut_off(results: Mapping[int, Mapping[str, Any]], nodes: int) -> bool:
    """Whether node 0 lost all other nodes, two or more, and they lost it: its own network failed, not all of theirs."""
    others = set(map(str, range(1, nodes)))
    if len(others) < 2 or 0 not in results or set(results[0].get("lost") or {}) != others:
        return False
    told = [result for k, result in results.items() if k != 0]
    return len(told) > 1 and all("0" in (result.get("lost") or {}) for result in told)
