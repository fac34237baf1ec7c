"""Builds the report of a run from the last messages of its nodes, with all times by this machine's clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher.errors import node_label
from launcher.node.first_failure import first_failure
from launcher.node.peers.model import Crew, nobody_left
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.metrics import Metrics
from launcher.report.outcome import Outcome
from launcher.report.report import RunReport, RunState, excluded_names


@dataclass(frozen=True)
class Collected:
    metrics: Metrics
    outcomes: Mapping[int, tuple[Mapping[str, Any], ...]]  #: outcome records by node_rank
    notes: tuple[str, ...]  #: nodes whose files are missing, with the reason


Detached = Literal["", "asked", "trained", "unreachable"]


@dataclass(frozen=True)
class Limits:
    """Time limits, in seconds, for following a run and for ending it."""

    lost_after: float  #: the launcher gives up after this time without a connection to any node
    grace: float  #: between SIGTERM and SIGKILL
    connect_timeout: float
    start_timeout: float = 120.0
    peer_timeout: float = 6.0  #: after which supervisors report a silent supervisor lost
    restarts: int = 0  #: how often the supervisors may start the run again


@dataclass(frozen=True)
class Lost:
    """Why and when a node was lost: it ended without a result, or could not be reached."""

    why: str
    when: float  #: seconds since the epoch, by this machine's clock
    out_of_reach: bool = False  #: the launcher could not reach the node, which may still run


@dataclass
class Followed:
    """Observations of the launcher about a run. Keys of the mappings are node_ranks."""

    results: dict[int, Mapping[str, Any]] = field(default_factory=dict)  #: content of result.json
    lost: dict[int, Lost] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)  #: nodes that were stopped and sent no result
    notes: list[str] = field(default_factory=list)  #: processes that may still run
    findings: list[Mapping[str, Any]] = field(default_factory=list)
    clocks: dict[int, float] = field(default_factory=dict)  #: node clock minus ours in seconds, estimated by heartbeats
    interrupted: str = ""  #: what interrupted the run on this machine: Ctrl-C, SIGTERM
    detached: Detached = ""

    @property
    def ended(self) -> set[int]:
        """Nodes from which the launcher expects no more messages."""
        return set(self.results) | set(self.lost) | self.silent


class ExpendableNodes:
    """The expendable nodes of a run: the run continues if one of them is lost. Includes nodes already lost.

    The nodes report which nodes are expendable. The reports of the lead node are used; before its first report, the
    latest report of any node. In a serving cluster all nodes are expendable. With ``run.restarts`` all nodes are
    expendable until the run has ended.

    A node that has only lost the lead node does not know whether the run goes on: its end is that of one node.
    """

    def __init__(self, plan: LaunchPlan, restarts: int = 0):
        self._lead, self._crew = plan.lead, crew_of(plan)
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
        if k != self._lead and lost_its_hub(result):
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


def lost_its_hub(result: Mapping[str, Any]) -> bool:
    """Whether a member of a run ended because it lost its hub. It does not know whether the others have gone on."""
    cause, lost = result.get("cause"), result.get("lost") or {}
    return bool(lost) and (cause is None or (cause["kind"] == "lost" and str(cause["node_rank"]) in lost))


def crew_of(plan: LaunchPlan) -> Crew:
    return Crew(plan.lead, tuple(node.role for node in plan.nodes), tuple(node.parts for node in plan.nodes))


def hub_was_cut_off(results: Mapping[int, Mapping[str, Any]], nodes: int, hub: int) -> bool:
    """Whether the lead node was cut off: it reports all other nodes lost, and they report it lost.

    False unless at least two other nodes have a result. ``results``: content of ``result.json`` by node_rank.
    ``nodes``: number of nodes of the run. ``hub``: node_rank of the lead node.
    """
    others = {str(k) for k in range(nodes) if k != hub}
    if len(others) < 2 or hub not in results or set(nodes_reported_lost(results[hub])) != others:
        return False
    others_results = [result for k, result in results.items() if k != hub]
    return len(others_results) > 1 and all(str(hub) in (result.get("lost") or {}) for result in others_results)


def nodes_reported_lost(result: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the nodes that a ``result.json`` reports lost, by node_rank.

    Includes nodes without which the run continued.
    """
    return {**(result.get("gone") or {}), **(result.get("lost") or {})}


def last_attempt(reports: Mapping[int, Mapping[str, Any] | None], lead: int) -> tuple[int, Mapping[str, Any]]:
    """Return the hub of the last attempt of a run, and the hub's report or, if missing, another node's newest report.

    ``reports``: ``state.json`` or ``result.json`` by node_rank. ``lead``: hub of the first attempt.
    """
    known = {k: report for k, report in reports.items() if report and report.get("restarts")}
    if not known:
        named = [report["hub"] for report in reports.values() if report and report.get("hub") is not None]
        hub = lead if lead in named or not named or reports.get(lead) else max(set(named), key=named.count)
        return hub, reports.get(hub) or {}
    newest = max(known.values(), key=lambda report: (report.get("generation", 0), not report.get("left")))
    hub = int(newest.get("hub", lead))
    return hub, reports.get(hub) or newest


def checkpoint_node(reports: Mapping[int, Mapping[str, Any] | None], lead: int) -> int | None:
    """Return the node from which the checkpoint of a run with ``run.restarts`` is fetched; None for other runs.

    This is the node of rank 0 in the last attempt or, without a report from it, another node of that attempt.
    ``reports``: ``state.json`` or ``result.json`` by node_rank. ``lead``: hub of the first attempt.
    """
    heard = [k for k, report in sorted(reports.items()) if report and "restarts" in report]
    if not heard:
        return None
    restarts = last_attempt(reports, lead)[1].get("restarts") or ()
    ranks = {int(k): own for k, own in restarts[-1]["ranks"].items()} if restarts else {lead: [0]}
    first = next((k for k, own in ranks.items() if 0 in own), lead)
    others = [k for k in heard if k in ranks or not restarts]
    return first if first in heard else next(iter(others), None)


class Ending:
    """Merges the reports of all nodes about the end of one run.

    ``offsets``: for each node, its clock minus this machine's in seconds, as preflight measured it.
    """

    def __init__(self, plan: LaunchPlan, followed: Followed, collected: Collected, offsets: Mapping[int, float]):
        self.plan, self.followed, self.collected = plan, followed, collected
        self.results = followed.results
        self._offsets = offsets

    def report(self, folder: Path, seconds: float) -> RunReport:
        """Build the report of the run without writing it; ``seconds``: duration of the run."""
        outcomes = tuple(self._outcomes())
        failed = [one for one in outcomes if one.failed]
        failed_itself = any(not one.stopped and not one.done_without for one in failed)
        asked_by = self.followed.interrupted or ("" if failed_itself else self._asked_by())
        state: RunState = "done" if self._all_done() else "stopped" if asked_by else "failed"
        return RunReport(
            self.plan.run_id,
            state,
            outcomes,
            first_failure(failed, lambda one: one.failure) if state == "failed" else None,
            self.collected.metrics,
            seconds,
            folder,
            notes=(*self._restart_notes(), *self.followed.notes, *self.collected.notes),
            findings=tuple(self.findings()),
            stopped_by=asked_by if state == "stopped" else "",
            out_of_reach=excluded_names(
                self.plan.nodes,
                {k for k, lost in self.followed.lost.items() if lost.out_of_reach and k not in self.results},
            ),
            restarts=self.restarts,
            bundled=not self.plan.own_command and not self.plan.serve_only,
        )

    @property
    def hub(self) -> int:
        return last_attempt(self.results, self.plan.lead)[0]

    @property
    def restarts(self) -> tuple[Mapping[str, Any], ...]:
        """The restarts of the run, with times by this machine's clock."""
        hub, report = last_attempt(self.results, self.plan.lead)
        found = report.get("restarts") or ()
        return tuple({**one, "t": one["t"] - self.clock_offset(hub)} for one in found)

    def _restart_notes(self) -> Iterator[str]:
        """Yield a note for each node that a restart left out, and on why there was no further restart."""
        labels = [node.label for node in self.plan.nodes]
        for one in self.restarts:
            yield from (f"{labels[k]} was lost; the run went on without it" for k in one["without"] if k < len(labels))
        if why := last_attempt(self.results, self.plan.lead)[1].get("no_restart"):
            yield f"no restart: {why}"

    def clock_offset(self, k: int) -> float:
        """Return the clock of node ``k`` minus this machine's, in seconds."""
        to_hub = self.results.get(k, {}).get("clock_offset")
        if to_hub is None or self.plan.serve_only:
            return self._measured_here(k)
        return float(to_hub) + self._measured_here(self.hub)

    def findings(self) -> list[Mapping[str, Any]]:
        """Return the findings of all nodes in order of time, each only once."""
        found: list[Mapping[str, Any]] = []
        for finding in [*self.followed.findings, *(f for r in self.results.values() for f in r.get("findings") or ())]:
            if finding not in found:
                found.append(finding)
        return sorted(found, key=lambda finding: float(finding["t"]))

    def lost(self) -> dict[int, Lost]:
        """Return the nodes that the launcher or the lead node reports lost.

        If the lead node has no result or its network failed, its report is not used. The lead node itself is then
        returned, too, if another node reports it lost.
        """
        found, hub = dict(self.followed.lost), self.hub
        trust_hub = hub in self.results and not hub_was_cut_off(self.results, len(self.plan.nodes), hub)
        for reporter, result in sorted(self.results.items()):
            for key, lost in nodes_reported_lost(result).items():
                k = int(key)
                if (lost.get("how", "lost") == "lost") and (reporter == hub if trust_hub else k == hub):
                    reported = Lost(lost["why"], lost["since"] - self.clock_offset(reporter))
                    seen = found.get(k)
                    known = seen is not None and not seen.out_of_reach
                    found[k] = Lost(seen.why, min(seen.when, reported.when)) if seen and known else reported
        return found

    def _measured_here(self, k: int) -> float:
        return self._offsets.get(k, self.followed.clocks.get(k, 0.0))

    def _all_done(self) -> bool:
        # The lead node is done only after all others, even those that cannot be reached.
        needed = {node.node_rank for node in self.plan.nodes} - self.gone
        states = {k: result["state"] for k, result in self.results.items() if k in needed}
        if set(states.values()) != {"done"}:
            return False
        unreachable = {
            k for k in needed - set(states) if k in self.followed.lost and self.followed.lost[k].out_of_reach
        }
        return needed == set(states) | unreachable and (not unreachable or self.hub in states)

    @property
    def gone(self) -> set[int]:
        return set(map(int, last_attempt(self.results, self.plan.lead)[1].get("gone") or ()))

    def _asked_by(self) -> str:
        """Return who requested the stop of the run, as ``alice@laptop (gnnfleet stop)``; '' if nobody did."""
        results = [result for _, result in sorted(self.results.items())]
        causes = [result["cause"] for result in results if result.get("cause")]
        stops = [(cause.get("asked"), cause["reason"]) for cause in causes if cause["kind"] == "stop"]
        stops += [(result["asked"], result["reason"]) for result in results if result.get("asked")]
        for asked, reason in stops:
            why = f" ({asked['why']})" if asked and asked.get("why") else ""
            return f"{asked['by']}{why}" if asked and asked.get("by") else str(reason)
        return ""

    def _outcomes(self) -> Iterator[Outcome]:
        # The outcome of a lost node follows those of the processes on it.
        lost, gone = self.lost(), self.gone
        if self._all_done():
            lost = {k: how for k, how in lost.items() if k in gone}
        if self._asked_by():  # a stop that came before the loss of an expendable node was noticed
            for k in lost:
                gone = gone | ({k} & set(crew_of(self.plan).spare(gone)))
        for node in self.plan.nodes:
            k = node.node_rank
            for outcome in self._outcomes_of(node, lost.get(k)):
                yield replace(outcome, done_without=True) if k in gone else self._with_parts(outcome)
        for finding in self._stopping:
            k = finding["node_rank"]
            host = self.plan.nodes[k].target if k < len(self.plan.nodes) else "unknown"
            when = finding["t"] - self.clock_offset(finding["node_rank"])
            yield Outcome.of_finding(finding, host, when)

    def _with_parts(self, outcome: Outcome) -> Outcome:
        """If a graph server or a node failed, add to its note the parts that no other node holds.

        Returns other outcomes unchanged.
        """
        if not outcome.failed or outcome.stopped or outcome.name not in ("server", "node"):
            return outcome
        labels = [node_label(node.node_rank, node.target) for node in self.plan.nodes]
        note = outcome.note + nobody_left(outcome.node_rank, crew_of(self.plan), labels, self.gone)
        return replace(outcome, note=note.removeprefix("; "))

    def _outcomes_of(self, node: NodePlan, lost: Lost | None) -> Iterator[Outcome]:
        k = node.node_rank
        records = self.results[k]["outcomes"] if k in self.results else self.collected.outcomes[k]
        for record in records:
            yield Outcome.from_record(record, node.target, self.clock_offset(k))
        yield from self._node_outcomes(node, records, lost)
        yield from self._reported_by_others(node, records)

    @property
    def _stopping(self) -> list[Mapping[str, Any]]:
        since = max((one["t"] for one in self.restarts), default=0.0)
        found = [finding for finding in self.findings() if finding.get("stop")]
        return [one for one in found if not since or one["t"] - self.clock_offset(one["node_rank"]) > since]

    def _node_outcomes(self, node: NodePlan, records: Any, lost: Lost | None) -> Iterator[Outcome]:
        k = node.node_rank
        result = self.results.get(k, {})
        if lost is not None:
            yield Outcome.of_node(k, node.target, lost.why, lost.when)
        elif result.get("reason", "").startswith("SIG"):
            yield Outcome.of_stopped_node(k, node.target, result["reason"], self._when(k, records))
        elif result.get("state") == "failed" and not (self._stopping or any(record["failed"] for record in records)):
            yield Outcome.of_node(k, node.target, result["reason"], self._when(k, records))

    def _when(self, k: int, records: Any) -> float:
        cause = self.results[k].get("cause") or {}
        if cause.get("node_rank") == k:
            return float(cause["t"]) - self.clock_offset(k)
        ended = [record["ended"] for record in records if record["ended"]]
        return min(ended) - self.clock_offset(k) if ended else time.time()

    def _reported_by_others(self, node: NodePlan, records: Any) -> Iterator[Outcome]:
        """If a process on ``node`` failed and thereby ended the run, yield its Outcome as another node reports it.

        Yields nothing if ``node`` has a result, or if ``records``, the outcomes that ``node`` recorded, include this
        process.
        """
        causes = [
            (by, result["cause"])
            for by, result in sorted(self.results.items())
            if (result.get("cause") or {}).get("node_rank") == node.node_rank and result["cause"]["kind"] == "failure"
        ]
        for by, cause in causes[:1]:
            if node.node_rank not in self.results and cause["name"] not in {record["name"] for record in records}:
                when = cause["t"] - self.clock_offset(by)
                yield Outcome.of_cause(cause, node.target, when)
