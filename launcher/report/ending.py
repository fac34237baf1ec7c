"""Builds the report of a run from its nodes' last messages: one clock, lost nodes as the others reported them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from launcher.errors import node_label
from launcher.node.peers.model import Crew, nobody_left
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.first_failure import first_failure
from launcher.report.metrics import Metrics
from launcher.report.outcome import Outcome
from launcher.report.report import RunReport, RunState, excluded_names


@dataclass(frozen=True)
class Collected:
    """What could be brought here."""

    metrics: Metrics
    outcomes: Mapping[int, tuple[Mapping[str, Any], ...]]  #: outcome records by node_rank
    notes: tuple[str, ...]  #: which node's files are missing, and why


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
        self._heard = self._over = False
        self._nodes: set[int] = set()

    def __contains__(self, k: int) -> bool:
        return self._all or (k in self._nodes and not self._over)

    def take_result(self, k: int, result: Mapping[str, Any]) -> None:
        """What node ``k``'s ``result.json`` says: of a run that is over nobody can be done without."""
        cause = result.get("cause")
        told = (cause["node_rank"] != k or cause["kind"] == "stop") if cause else result["state"] == "done"
        self._over = self._over or told or bool(result.get("lost"))

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


class Ending:
    """The end of one run. ``offsets``: node clocks minus this machine's in seconds, as preflight measured them."""

    def __init__(self, plan: LaunchPlan, followed: Followed, collected: Collected, offsets: Mapping[int, float]):
        self.plan, self.followed, self.collected = plan, followed, collected
        self.results = followed.results
        self._offsets = offsets

    def report(self, folder: Path, seconds: float) -> RunReport:
        """The report, not yet written."""
        outcomes = tuple(self._outcomes())
        state = self._state(outcomes)
        return RunReport(
            self.plan.run_id,
            state,
            outcomes,
            first_failure(outcomes) if state == "failed" else None,
            self.collected.metrics,
            seconds,
            folder,
            notes=(*self.followed.notes, *self.collected.notes),
            findings=tuple(self.findings()),
            stopped_by=self._asked_by() if state == "interrupted" and not self.followed.interrupted else "",
            out_of_reach=excluded_names(self.plan.nodes, self._away()),
        )

    def clock_offset(self, k: int) -> float:
        """A node's clock minus ours: to the hub as the supervisors measured it all the time, from there as we did."""
        to_hub = self.results.get(k, {}).get("clock_offset")
        if to_hub is None or self.plan.serve_only:
            return self._ours(k)
        return float(to_hub) + self._ours(self.plan.lead)

    def findings(self) -> list[Mapping[str, Any]]:
        """Of all nodes, each once, in order of time."""
        found: list[Mapping[str, Any]] = []
        for finding in [*self.followed.findings, *(f for r in self.results.values() for f in r.get("findings") or ())]:
            if finding not in found:
                found.append(finding)
        return sorted(found, key=lambda finding: float(finding["t"]))

    def lost(self) -> dict[int, Lost]:
        """Nodes that ended without a result, or went out of the others' sight: the hub's word counts, and of the hub
        the others' where it left none or was the one cut off."""
        found, hub = dict(self.followed.lost), self.plan.lead
        heed_hub = hub in self.results and not hub_was_cut_off(self.results, len(self.plan.nodes), hub)
        for told_by, told in sorted(self.results.items()):
            for key, lost in missed_by(told).items():
                k = int(key)
                if (lost.get("how", "lost") == "lost") and (told_by == hub if heed_hub else k == hub):
                    theirs = Lost(lost["why"], lost["since"] - self.clock_offset(told_by))
                    mine = found.get(k)
                    known = mine is not None and not mine.out_of_reach
                    found[k] = Lost(mine.why, min(mine.when, theirs.when)) if mine and known else theirs
        return found

    def _away(self) -> set[int]:
        """Nodes that left no word and that nobody here could reach any more."""
        return {k for k, lost in self.followed.lost.items() if lost.out_of_reach and k not in self.results}

    def _ours(self, k: int) -> float:
        return self._offsets.get(k, self.followed.clocks.get(k, 0.0))

    def _state(self, outcomes: tuple[Outcome, ...]) -> RunState:
        if self._all_done():
            return "done"
        if self.followed.interrupted or (self._asked_by() and not _failed_itself(outcomes)):
            return "interrupted"
        return "failed"

    def _all_done(self) -> bool:
        """All but those that the run could do without. The hub is done only when all others are, so that one out of
        our reach then is known to be."""
        needed = {node.node_rank for node in self.plan.nodes} - self.gone
        states = {k: result["state"] for k, result in self.results.items() if k in needed}
        if set(states.values()) != {"done"}:
            return False
        away = {k for k in needed - set(states) if k in self.followed.lost and self.followed.lost[k].out_of_reach}
        return needed == set(states) | away and (not away or self.plan.lead in states)

    @property
    def gone(self) -> set[int]:
        """Nodes that the run went on without, by the hub's word."""
        return set(map(int, self.results.get(self.plan.lead, {}).get("gone") or ()))

    def _asked_by(self) -> str:
        """Who asked a node to stop, as ``alice@laptop (gnnfleet stop)``."""
        stops = [(cause.get("asked"), cause["reason"]) for cause in self._causes() if cause["kind"] == "stop"]
        stops += [
            (result["asked"], result["reason"]) for _, result in sorted(self.results.items()) if result.get("asked")
        ]
        for asked, reason in stops:
            why = f" ({asked['why']})" if asked and asked.get("why") else ""
            return f"{asked['by']}{why}" if asked and asked.get("by") else str(reason)
        return ""

    def _causes(self) -> list[Mapping[str, Any]]:
        """What the nodes say ended the run."""
        return [result["cause"] for _, result in sorted(self.results.items()) if result.get("cause")]

    def _outcomes(self) -> Iterator[Outcome]:
        """Every process's end; a lost node's own end after those of its processes."""
        lost, gone = self.lost(), self.gone
        if self._all_done():
            lost = {k: how for k, how in lost.items() if k in gone}
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
        """With the parts that nobody holds since a server, or all of its node, failed."""
        if not outcome.failed or outcome.stopped or outcome.name not in ("server", "node"):
            return outcome
        nodes = self.plan.nodes
        crew = Crew(self.plan.lead, tuple(node.role for node in nodes), tuple(node.parts for node in nodes))
        labels = [node_label(node.node_rank, node.target) for node in nodes]
        told = outcome.note + nobody_left(outcome.node_rank, crew, labels, self.gone)
        return replace(outcome, note=told.removeprefix("; "))

    def _outcomes_of(self, node: NodePlan, lost: Lost | None) -> Iterator[Outcome]:
        k = node.node_rank
        records = self.results[k]["outcomes"] if k in self.results else self.collected.outcomes[k]
        for record in records:
            yield Outcome.from_record(record, node.target, self.clock_offset(k))
        yield from self._node_outcomes(node, records, lost)
        yield from self._told_by_others(node, records)

    @property
    def _stopping(self) -> list[Mapping[str, Any]]:
        """Findings that ended the run though no process had failed."""
        return [finding for finding in self.findings() if finding.get("stop")]

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
        """When a node as a whole ended, by our clock."""
        cause = self.results[k].get("cause") or {}
        if cause.get("node_rank") == k:
            return float(cause["t"]) - self.clock_offset(k)
        ended = [record["ended"] for record in records if record["ended"]]
        return min(ended) - self.clock_offset(k) if ended else time.time()

    def _told_by_others(self, node: NodePlan, records: Any) -> Iterator[Outcome]:
        """A failure there that ended the run, where the node itself cannot tell of it any more."""
        told = [
            (by, result["cause"])
            for by, result in sorted(self.results.items())
            if (result.get("cause") or {}).get("node_rank") == node.node_rank and result["cause"]["kind"] == "failure"
        ]
        for by, cause in told[:1]:
            if node.node_rank not in self.results and cause["name"] not in {record["name"] for record in records}:
                when = cause["t"] - self.clock_offset(by)
                yield Outcome.of_cause(cause, node.target, when)


def _failed_itself(outcomes: tuple[Outcome, ...]) -> bool:
    return any(outcome.failed and not outcome.stopped and not outcome.done_without for outcome in outcomes)
