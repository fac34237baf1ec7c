"""How following a run ended, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.plan.build import LaunchPlan

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


class Spares:
    """Nodes that may fail without harm to the run, or have: by the hub's word; until it is heard any node knows. In a
    serving cluster each lives by itself."""

    def __init__(self, plan: LaunchPlan):
        self._lead = plan.lead
        self._all = plan.serve_only
        self._heard = False
        self._nodes: set[int] = set()

    def __contains__(self, k: int) -> bool:
        return self._all or k in self._nodes

    def take(self, k: int, state: Mapping[str, Any]) -> None:
        """What node ``k``'s ``state.json`` says."""
        if k == self._lead or not self._heard:
            self._heard = k == self._lead
            self._nodes = {*(state.get("spare") or ()), *map(int, state.get("gone") or ())}

    def discard(self, k: int) -> None:
        """A node that was never there, so that the run is not as it was planned."""
        self._nodes.discard(k)


def hub_was_cut_off(results: Mapping[int, Mapping[str, Any]], nodes: int, hub: int) -> bool:
    """Whether the lead node lost all other nodes, two or more, and they lost it: its own network failed, not theirs."""
    others = {str(k) for k in range(nodes) if k != hub}
    if len(others) < 2 or hub not in results or set(missed_by(results[hub])) != others:
        return False
    told = [result for k, result in results.items() if k != hub]
    return len(told) > 1 and all(str(hub) in (result.get("lost") or {}) for result in told)


def missed_by(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Nodes that a node's ``result.json`` says were lost, by node_rank, whether or not the run went on without them."""
    return {**(result.get("gone") or {}), **(result.get("lost") or {})}
