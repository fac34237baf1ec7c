"""The last attempt of a run by the reports of its nodes. After a restart it has other ranks, and may lack nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.node.spec import Crew
from launcher.plan.model import LaunchPlan, NodePlan

#: ``state.json`` or ``result.json`` by node_rank; empty or None for a node without one.
_Reports = Mapping[int, Mapping[str, Any] | None]


@dataclass(frozen=True)
class LastAttempt:
    hub: int  #: node_rank of its lead node
    report: Mapping[str, Any]  #: of the lead node or, if missing, another node's newest report; {} without any

    @staticmethod
    def of(reports: _Reports, lead: int) -> LastAttempt:
        """Find the last attempt in ``reports``. ``lead``: lead node of the first attempt."""
        known = {k: report for k, report in reports.items() if report and report.get("restarts")}
        if not known:
            named = [report["hub"] for report in reports.values() if report and report.get("hub") is not None]
            hub = lead if lead in named or not named or reports.get(lead) else max(set(named), key=named.count)
            return LastAttempt(hub, reports.get(hub) or {})
        newest = max(known.values(), key=lambda report: (report.get("generation", 0), not report.get("left")))
        hub = int(newest.get("hub", lead))
        return LastAttempt(hub, reports.get(hub) or newest)

    @property
    def restarts(self) -> Sequence[Mapping[str, Any]]:
        """The restarts of the run, as in its report; () without any."""
        return self.report.get("restarts") or ()

    @property
    def gone(self) -> set[int]:
        """The nodes that the run goes on without."""
        return set(map(int, self.report.get("gone") or ()))

    @property
    def words(self) -> str:
        """``restart 1 of 3`` for a run that has started again, else ''."""
        return f"restart {self.restarts[-1]['generation']} of {self.restarts[-1]['of']}" if self.restarts else ""

    def ranks(self, nodes: Iterable[NodePlan]) -> dict[int, tuple[int, ...]]:
        """Return the ranks of each of ``nodes``, by node_rank; () for a node that takes no part."""
        if not self.restarts:
            return {node.node_rank: node.ranks for node in nodes}
        ranks = self.restarts[-1]["ranks"]
        return {node.node_rank: tuple(ranks.get(str(node.node_rank), ())) for node in nodes}


def checkpoint_node(reports: _Reports, lead: int) -> int | None:
    """Return the node from which the checkpoint of a run with ``run.restarts`` is fetched; None for other runs.

    This is the node of rank 0 in the last attempt or, without a report from it, another node of that attempt.
    ``lead``: lead node of the first attempt.
    """
    heard = [k for k, report in sorted(reports.items()) if report and "restarts" in report]
    if not heard:
        return None
    restarts = LastAttempt.of(reports, lead).restarts
    ranks = {int(k): own for k, own in restarts[-1]["ranks"].items()} if restarts else {lead: [0]}
    first = next((k for k, own in ranks.items() if 0 in own), lead)
    return first if first in heard else next((k for k in heard if k in ranks or not restarts), None)


class ExpendableNodes:
    """The expendable nodes of a run: the run continues if one of them is lost. Includes nodes already lost.

    The nodes report which nodes are expendable. The reports of the lead node are used; before its first report, the
    latest report of any node. In a serving cluster all nodes are expendable. With ``run.restarts`` all nodes are
    expendable until the run has ended.

    A node that has only lost the lead node does not know whether the run goes on: its end is that of one node.
    """

    def __init__(self, plan: LaunchPlan, restarts: int = 0):
        self._lead, self._crew = plan.lead, Crew(plan.lead, plan.nodes)
        self._all = plan.serve_only
        self._restarts = bool(restarts)
        self._heard = self._over = False
        self._nodes: set[int] = set()
        self._never: set[int] = set()  # nodes that did not start
        self._alone: set[int] = set()  # nodes that have ended since they lost the lead node
        self.gone: set[int] = set()  #: nodes that the run goes on without, as reported
        self._generation = 0  # number of the attempt to which ``gone`` refers

    def __contains__(self, k: int) -> bool:
        if self._restarts:
            return k in self.gone or not (self._over or k in self._never)
        if self._all or self._over:
            return self._all
        others = self._alone - self.gone - {k}  # the lead node may be out of reach, and not tell that they are lost
        spare = k in self._nodes and (not others or self._crew.can_lose_all({*others, k}, self.gone))
        return spare or k in self.gone

    @property
    def left_behind(self) -> set[int]:
        """With restarts: the nodes that were missing when the run ended; empty until it has ended."""
        return set(self.gone) if self._restarts and self._over else set()

    def take_result(self, k: int, result: Mapping[str, Any]) -> None:
        """Process the ``result.json`` of node ``k``, which may show that the run has ended."""
        if self._restarts:
            self._take_gone(result)
            self._over = self._over or not result.get("left")
            return
        cause = result.get("cause")
        if k != self._lead and _lost_its_hub(result):
            self._alone.add(k)
        elif cause:
            self._over = self._over or k == self._lead or cause["node_rank"] != k or cause["kind"] == "stop"
        else:
            self._over = self._over or k == self._lead or result["state"] == "done"

    def take(self, k: int, state: Mapping[str, Any]) -> None:
        if self._restarts:
            self._take_gone(state)
        elif k == self._lead or not self._heard:
            self._heard = k == self._lead
            self.gone = set(map(int, state.get("gone") or ()))
            self._nodes = {*(state.get("spare") or ()), *self.gone}

    def _take_gone(self, report: Mapping[str, Any]) -> None:
        generation, gone = report.get("generation", 0), set(map(int, report.get("gone") or ()))
        if generation >= self._generation:
            self.gone = gone | (self.gone if generation == self._generation else set())
            self._generation = generation

    def discard(self, k: int) -> None:
        """Mark node ``k``, which never started, as not expendable. A run cannot begin without all of its nodes."""
        self._nodes.discard(k)
        self._never.add(k)


def _lost_its_hub(result: Mapping[str, Any]) -> bool:
    """Whether a member of a run ended because it lost its hub. It does not know whether the others have gone on."""
    cause, lost = result.get("cause"), result.get("lost") or {}
    return bool(lost) and (cause is None or (cause["kind"] == "lost" and str(cause["node_rank"]) in lost))
