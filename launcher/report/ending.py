"""Judges how a run ended, from the last messages of its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.node.exit_description import first_failure
from launcher.node.peers.model import nobody_left
from launcher.node.spec import Crew
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.last_attempt import LastAttempt
from launcher.report.outcome import Outcome
from launcher.report.report import Lost, RunReport, excluded_names

_AT_ONCE = 5.0  # seconds between the last heartbeats of nodes that were lost by one cut; each sends one a second


def _hub_was_cut_off(results: Mapping[int, Mapping[str, Any]], nodes: int, hub: int) -> bool:
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


def conclude(report: RunReport, plan: LaunchPlan, seconds: float, offsets: Mapping[int, float] | None = None) -> None:
    """Complete a report: how the run and each of its processes ended, with all times by this machine's clock.

    ``seconds``: duration of the run. ``offsets``: for each node, its clock minus this machine's, in seconds, as
    preflight measured it.
    """
    results, nodes = report.results, plan.nodes
    attempt = LastAttempt.of(results, plan.lead)
    hub = attempt.hub
    # The nodes that the lead node reports lost, and went on without, only because it was cut off itself; a node that it
    # lost earlier is not among them.
    seen_alone: set[int] = set()
    if _hub_was_cut_off(results, len(nodes), hub):
        since_when = {int(k): float(lost["since"]) for k, lost in nodes_reported_lost(results[hub]).items()}
        seen_alone = {k for k, when in since_when.items() if max(since_when.values()) - when < _AT_ONCE}
    gone = attempt.gone - seen_alone

    def measured_here(k: int) -> float:
        return (offsets or {}).get(k, report.clocks.get(k, 0.0))

    def offset(k: int) -> float:
        """Return the clock of node ``k`` minus this machine's, in seconds."""
        to_hub = results.get(k, {}).get("clock_offset")
        return measured_here(k) if to_hub is None or plan.serve_only else float(to_hub) + measured_here(hub)

    # Restarts, with notes on the nodes that they left out, and on why there was no further one.
    report.restarts = tuple({**one, "t": one["t"] - offset(hub)} for one in attempt.restarts)
    without = [k for one in report.restarts for k in one["without"] if k < len(nodes)]
    notes = [f"{nodes[k].label} was lost; the run went on without it" for k in without]
    notes += [f"no restart: {why}"] if (why := attempt.report.get("no_restart")) else []
    report.notes[:0] = notes

    # The findings of all nodes, each once; those that ended the run came after the last restart.
    for finding in (one for result in results.values() for one in result.get("findings") or ()):
        if finding not in report.findings:
            report.findings.append(finding)
    report.findings = [
        one for one in report.findings if not (one["kind"] == "server-lost" and one["node_rank"] in seen_alone)
    ]
    report.findings.sort(key=lambda one: float(one["t"]))
    since = max((one["t"] for one in report.restarts), default=0.0)
    ending = [one for one in report.findings if one.get("stop")]
    ending = [one for one in ending if not since or one["t"] - offset(one["node_rank"]) > since]

    # The run is done if all needed nodes are. The lead node is done only after all others, even those out of reach.
    needed = {node.node_rank for node in nodes} - gone
    states = {k: result["state"] for k, result in results.items() if k in needed}
    unreachable = {k for k in needed - set(states) if k in report.lost and report.lost[k].out_of_reach}
    done = set(states.values()) == {"done"} and needed == {*states, *unreachable}
    done = done and (not unreachable or hub in states)

    # Who asked for a stop. A server that was lost just before, and that the run could do without, was not missed.
    asked_by = _asked_by(results)
    lost = _lost_nodes(report, len(nodes), hub, offset)
    if done:
        lost = {k: how for k, how in lost.items() if k in gone}
    spared = set(gone)
    if asked_by:
        for k in lost:
            spared |= {k} & set(Crew(plan.lead, plan.nodes).spare(spared))

    # How each process ended; the outcome of a lost node follows those of the processes on it.
    outcomes: list[Outcome] = []
    for node in nodes:
        k = node.node_rank
        records = results[k]["outcomes"] if k in results else report.records.get(k, ())
        own = [Outcome.from_record(record, node.target, offset(k)) for record in records]
        own += _node_outcomes(node, results, lost, records, bool(ending), offset)
        for outcome in own:
            if k in spared:
                outcome = replace(outcome, done_without=True)
            elif outcome.failed and not outcome.stopped and outcome.name in ("server", "node"):
                # a graph server or a node: its note names the parts that no other node holds
                note = outcome.note + nobody_left(k, Crew(plan.lead, plan.nodes), gone)
                outcome = replace(outcome, note=note.removeprefix("; "))
            outcomes.append(outcome)
    for finding in ending:
        k = finding["node_rank"]
        host = nodes[k].target if k < len(nodes) else "unknown"
        outcomes.append(Outcome.of_finding(finding, host, finding["t"] - offset(k)))

    # The state of the run, and what came first.
    failed = [one for one in outcomes if one.failed]
    failed_itself = any(not one.stopped and not one.done_without for one in failed)
    asked_by = report.interrupted or ("" if failed_itself else asked_by)
    report.state = "done" if done else "stopped" if asked_by else "failed"
    report.stopped_by = asked_by if report.state == "stopped" else ""
    report.outcomes = tuple(outcomes)
    if report.state == "failed":
        report.first_failure = first_failure(failed, lambda one: one.failure)
    report.seconds = seconds
    report.bundled = not plan.own_command and not plan.serve_only
    away = {k for k, one in report.lost.items() if one.out_of_reach and k not in results}
    report.out_of_reach = excluded_names(nodes, away)


def _asked_by(results: Mapping[int, Mapping[str, Any]]) -> str:
    """Return who requested the stop of the run, as ``alice@laptop (gnnfleet stop)``; '' if nobody did."""
    ordered = [result for _, result in sorted(results.items())]
    causes = [result["cause"] for result in ordered if result.get("cause")]
    stops = [(cause.get("asked"), cause["reason"]) for cause in causes if cause["kind"] == "stop"]
    stops += [(result["asked"], result["reason"]) for result in ordered if result.get("asked")]
    for asked, reason in stops:
        why = f" ({asked['why']})" if asked and asked.get("why") else ""
        return f"{asked['by']}{why}" if asked and asked.get("by") else str(reason)
    return ""


def _lost_nodes(report: RunReport, nodes: int, hub: int, offset: Callable[[int], float]) -> dict[int, Lost]:
    """Return the nodes that the launcher or the lead node reports lost.

    If the lead node has no result or its network failed, its report is not used. The lead node itself is then returned,
    too, if another node reports it lost.
    """
    found, results = dict(report.lost), report.results
    trust_hub = hub in results and not _hub_was_cut_off(results, nodes, hub)
    for reporter, result in sorted(results.items()):
        for key, lost in nodes_reported_lost(result).items():
            k = int(key)
            if (lost.get("how", "lost") == "lost") and (reporter == hub if trust_hub else k == hub):
                reported = Lost(lost["why"], lost["since"] - offset(reporter))
                seen = found.get(k)
                known = seen is not None and not seen.out_of_reach
                found[k] = Lost(seen.why, min(seen.when, reported.when)) if seen and known else reported
    return found


def _node_outcomes(
    node: NodePlan,
    results: Mapping[int, Mapping[str, Any]],
    lost: Mapping[int, Lost],
    records: Sequence[Mapping[str, Any]],
    by_finding: bool,
    offset: Callable[[int], float],
) -> Iterator[Outcome]:
    """Yield how a node itself ended, and a failure of one of its processes that only other nodes report.

    ``records``: outcomes of its processes. ``by_finding``: a finding ended the run.
    """
    k, result = node.node_rank, results.get(node.node_rank, {})
    reason, cause = result.get("reason", ""), result.get("cause") or {}
    # Processes that ended by themselves, and had not failed, may have done so long before the node.
    own = [record for record in records if record["ended"]]
    last = max((record["ended"] for record in own), default=time.time() + offset(k))
    when = min((one["ended"] for one in own if one.get("stopped") or one.get("failed")), default=last)
    if k in lost:
        yield Outcome.of_node(k, node.target, lost[k].why, lost[k].when)
    elif result.get("state") == "failed" and not (by_finding or any(record["failed"] for record in records)):
        yield Outcome.of_node(k, node.target, reason, when - offset(k))
    elif result.get("state") in ("stopped", "done") and reason and not (cause or result.get("asked")):  # by a signal
        yield Outcome.of_node(k, node.target, reason, when - offset(k))
    for by, other in sorted(results.items()):
        cause = other.get("cause") or {}
        if cause.get("node_rank") == k and cause["kind"] == "failure":
            if k not in results and cause["name"] not in {record["name"] for record in records}:
                yield Outcome.of_cause(cause, node.target, cause["t"] - offset(by))
            break
