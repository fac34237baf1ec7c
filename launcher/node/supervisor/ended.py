"""How one node's part of a run ends, and what keeps it from beginning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from launcher.node import leases
from launcher.node.peers.model import Cause
from launcher.node.supervisor.spec import NodeSpec


class Ended(Exception):
    """This node's part has ended, and how."""

    def __init__(self, state: str, reason: str, cause: Cause | None = None) -> None:
        super().__init__(reason)
        self.state, self.reason, self.cause = state, reason, cause

    def result(self, node_rank: int, cause: Cause | None) -> dict[str, Any]:
        """What ``result.json`` says of it; ``cause`` is what ended the run, wherever that was."""
        elsewhere = cause if cause is not None and cause["node_rank"] != node_rank else None
        asked = cause["asked"] if cause is not None else None
        return {
            "node_rank": node_rank,
            "state": self.state,
            "reason": self.reason,
            "cause": elsewhere,
            "asked": asked,
        }


def conflicts(spec: NodeSpec) -> list[leases.Lease]:
    """Take the node's leases; those that others hold already. Raises lease.LeaseError."""
    if not spec.leases:
        return []
    return leases.take(spec.leases, leases.this_process(spec.run_id, spec.node_rank, spec.operator))


def who_holds(theirs: Iterable[leases.Lease]) -> str:
    """``CUDA device 0 is held by run X of alice since …``."""
    return "; ".join(f"{leases.thing(one.resource)} is {leases.describe(one)}" for one in theirs)
