"""The interface to what watches a run and tells others of it: people, experiment trackers, monitoring.

Nothing of it can end a run: what fails is a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.node.child_process import Loop
from launcher.node.peers.model import MAX_TEXT, Cause, Peers
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.journal import Journal

Finding = dict[str, Any]


@dataclass(frozen=True)
class Sight:
    """What an observer sees of a run at one moment."""

    spec: NodeSpec  #: of this attempt
    peers: Peers
    state: Mapping[str, Any]  #: content of state.json
    findings: list[Finding]  #: all that this node knows; state.json has the newest


@dataclass(frozen=True)
class End:
    """How a run has ended on this node."""

    state: str  #: done, failed or stopped
    cause: Cause | None  #: first cause of the run's end, as far as it is known; None if it is done
    now: bool = False  #: whether it must end without delay
    left: bool = False  #: whether the run may go on without this node
    report: Mapping[str, Any] = field(default_factory=dict)  #: further words and figures, for people


class Observer:
    """An observer of one node, registered in ``OBSERVERS`` of ``supervisor.py``. Its methods return findings.

    spec: content of node.json. loop: copies the output of its processes. idle: waits for so many seconds.
    """

    kind = ""  #: of its findings
    mark = ""  #: ``NAME=value`` in the environment of its processes, which outlive attempts; '' without processes

    def __init__(self, spec: NodeSpec, journal: Journal, loop: Loop, idle: Callable[[float], object]) -> None:
        self.first, self.journal, self.loop, self.idle = spec, journal, loop, idle
        self.signs: dict[str, Any] = {}  #: fields of the report to the hub that observers of other nodes need

    @staticmethod
    def wanted(spec: NodeSpec) -> bool:
        """Whether the run has this kind of observer."""
        raise NotImplementedError

    def begin(self, spec: NodeSpec, restart: Mapping[str, Any] | None) -> None:
        """An attempt begins. restart: record of the automatic restart that leads to it, None for the first attempt."""

    def look(self, sight: Sight) -> list[Finding]:
        """Called with each heartbeat."""
        return []

    def conclude(self, end: End) -> None:
        """This node has ended; other nodes may still run."""

    def ended(self, sight: Sight, end: End) -> list[Finding]:
        """The run has ended, and result.json is about to be written; takes some seconds at most."""
        return []

    def close(self) -> list[Finding]:
        """The result is written, and this supervisor leaves."""
        return []

    def finding(self, text: str) -> Finding:
        about = {"t": time.time(), "kind": self.kind, "node_rank": self.first.node_rank, "rank": None}
        return {**about, "text": text[:MAX_TEXT], "stop": False}
