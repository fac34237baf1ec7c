"""Test kit for stalls and stragglers: simulated ranks on two nodes."""

from __future__ import annotations

from typing import Any

from launcher.node.diagnostics.stall_detector import StallDetector

LABELS = ("node0 (gnn1)", "node1 (gnn2)")


class Cluster:
    """Two simulated nodes with two ranks each, and a simulated clock. ``findings`` are those of ``StallDetector``."""

    def __init__(self, stall_after: float | str = "auto", at: bool = True, **more: Any) -> None:
        self.judge = StallDetector(stall_after, LABELS, **more)
        self.at, self.now, self.findings = at, 1000.0, list[dict[str, Any]]()
        self.ranks: dict[int, dict[str, Any]] = {}

    def rank(self, rank: int, step: int, phase: str = "load", **more: Any) -> None:
        at = [2, step, phase] if self.at else None
        line = {"epoch": 2, "step": step, "kind": "step", "t": self.now, "at": at, "ended": False}
        self.ranks[rank] = {**line, "own_s": None, "step_s": None, "batch_s": None, "remote_share": None, **more}

    def all(self, step: int, **more: Any) -> None:
        for rank in range(4):
            self.rank(rank, step, **more)

    def wait(self, seconds: float) -> list[dict[str, Any]]:
        """Let ``seconds`` pass without progress of any rank; return the new findings."""
        found = []
        for _ in range(round(seconds)):
            self.now += 1
            nodes = {node: {str(rank): self.ranks[rank] for rank in self.ranks if rank // 2 == node} for node in (0, 1)}
            found += self.judge.look(self.now, nodes)
        self.findings += found
        return found

    def steps(self, first: int, last: int, every: float = 1.0) -> list[dict[str, Any]]:
        found = []
        for step in range(first, last + 1):
            self.all(step)
            found += self.wait(every)
        return found


def pace(run: Cluster, seconds: int, **of_rank_3: Any) -> list[dict[str, Any]]:
    """Let all ranks train for ``seconds`` with 0.5 s per step; return the new findings.

    of_rank_3: other values that rank 3 reports, such as ``step_s``.
    """
    found = []
    for _ in range(seconds):
        for rank in range(4):
            mine = of_rank_3 if rank == 3 else {}
            values = {"own_s": 0.2, "step_s": 0.5, "batch_s": 0.02, **mine}
            run.rank(rank, round(run.now), **values)
        found += run.wait(1)
    return found
