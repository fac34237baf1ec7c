"""Describes the state of a run in one sentence, and suggests the next commands."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launcher.node.diagnostics.vitals import IDLE
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.ending import conclude
from launcher.report.events import nan_finding, nan_words
from launcher.report.last_attempt import LastAttempt
from launcher.report.launch_file import BEFORE_NODES, LaunchFile
from launcher.report.metrics import metric_of, score_text
from launcher.report.report import Lost, RunReport, excluded_names, resume_command
from launcher.report.run_folder import FoundRun, attempts, last_sign
from launcher.report.waiting import waiting_words
from launcher.text import clock_time, count, seconds_words


@dataclass(frozen=True)
class NodeView:
    """Answer of one node of a run to a status request."""

    node: NodePlan
    state: Mapping[str, Any] | None = None  #: content of state.json
    result: Mapping[str, Any] | None = None  #: content of result.json
    lost: str = ""  #: why the node will not write a result; '' if it may
    absent: bool = False  #: no file of the run was ever sent to the node
    unreachable: str = ""  #: why the node did not answer; '' if it did
    now: float = 0.0  #: the node's clock when it answered
    offset: float = 0.0  #: the node's clock minus this machine's, in seconds
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)  #: last lines of the requested files, by name

    @property
    def reached(self) -> bool:
        return not self.unreachable

    @property
    def alive(self) -> bool:
        return self.reached and self.state is not None and self.result is None and not self.lost

    @property
    def word(self) -> str:
        if self.unreachable:
            return "unreachable"
        if self.result is not None:
            return str(self.result["state"])
        if self.lost:
            return "lost"
        return str(self.state["state"]) if self.state is not None else "not started"

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since the supervisor last wrote its state, by the node's clock; None if no supervisor runs."""
        return max(0.0, self.now - self.state["time"]) if self.alive and self.state else None

    @property
    def report(self) -> Mapping[str, Any]:
        """The content of result.json, else of state.json; empty if the node has neither."""
        return self.result or self.state or {}

    @property
    def ranks(self) -> Mapping[str, Mapping[str, Any]]:
        """The last step of each rank on the node, by rank."""
        return (self.state or {}).get("ranks") or {}

    @property
    def cluster_offset(self) -> float:
        """The node's clock minus the lead node's in seconds, as the supervisors measured it; 0 if not measured."""
        offset = (self.result or {}).get("clock_offset")
        return float(offset if offset is not None else (self.state or {}).get("clock_offset") or 0.0)


State = Literal["preparing", "waiting", "running", "stopping", "done", "failed", "stopped", "never started", "unknown"]

_Views = Mapping[int, NodeView]

#: Exit status of ``gnnfleet status`` by state.
EXIT_STATUS: Mapping[State, int] = {
    "preparing": 0,
    "waiting": 0,
    "running": 0,
    "stopping": 0,
    "done": 0,
    "failed": 1,
    "never started": 1,
    "stopped": 130,
    "unknown": 3,
}

_ENDED: tuple[State, ...] = ("done", "failed", "stopped")  #: states in result.json of a run that has ended


@dataclass(frozen=True)
class Verdict:
    """State of a run as far as this machine can determine it, with suggested commands."""

    state: State
    sentence: str
    notes: tuple[str, ...] = ()  #: further facts for the user, one sentence each
    next: tuple[str, ...] = ()  #: commands the user can run next, complete with arguments
    alarm: bool = False  #: the run is not as well as its state: it makes no progress, or its loss is NaN

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.state]


def known_without_nodes(found: FoundRun) -> bool:
    """Return whether to determine the state of a run without asking its nodes.

    True if all its processes have certainly ended, if none can have started, or if the run has no plan, which names
    the nodes.
    """
    if found.plan is None:
        return True
    launch, result = found.launch, found.result
    if result is not None and result["state"] in _ENDED and not (result["notes"] and result["nodes"]):
        return True  # notes of a started run may report processes that are left, so its nodes are asked
    return launch is not None and launch.stage in BEFORE_NODES and launch.alive() is not None


def from_here(found: FoundRun) -> Verdict:
    """Return the verdict on a run from its folder alone. Requires ``known_without_nodes(found)``."""
    if found.result is not None and found.result["state"] in _ENDED:
        return _over_by_result(found, found.result)
    if found.plan_is_missing:
        return Verdict("unknown", found.without_plan())
    if found.launch is not None and found.launch.alive() is None:
        sentence = (
            f"run {found.run_id} had not started when its launcher last updated its state: {_launcher_words(found)}"
        )
        return Verdict("unknown", sentence, (), (f"gnnfleet status {found.words}",))
    if found.launch is not None and found.launch.alive():
        return _preparing(found, found.launch)
    return _never_started(found, "it has no processes on the nodes")


def judge(found: FoundRun, views: _Views) -> Verdict:
    """Return the verdict on a run from its folder and from the answers of its nodes."""
    everyone = list(views.values())
    alive = [view for view in everyone if view.alive]
    unreachable = [view for view in everyone if not view.reached]
    if alive:
        return _running(found, everyone, alive, unreachable)
    if unreachable:
        if found.result is not None and found.result["state"] in _ENDED:
            return _over_by_result(found, found.result, unreachable)
        reached = [view for view in everyone if view.reached]
        sentence = f"run {found.run_id} may still run: none of its nodes can be reached from here"
        if reached:
            rest = "the other nodes have" if len(reached) > 1 else f"node{reached[0].node.node_rank} has"
            names = ", ".join(view.node.label for view in unreachable)
            sentence = f"run {found.run_id} may still run: {names} cannot be reached from here; {rest} ended"
        hub = _last_attempt(found, everyone).hub
        notes = [
            *_unreachable_notes(unreachable, reached),
            *(_ended_note(view) for view in reached),
            _launcher_words(found),
        ]
        lead_has_result = any(view.result is not None and view.node.node_rank == hub for view in reached)
        first = "collect" if lead_has_result else "status"  # the lead node ends last, with the result of the run
        commands = (f"gnnfleet {first} {found.words}", f"gnnfleet stop {found.words}")
        return Verdict("unknown", sentence, tuple(notes), commands)
    if all(view.result is None and not view.lost for view in everyone):
        if found.launch is not None and found.launch.alive() and found.launch.stage in (*BEFORE_NODES, "start"):
            return _preparing(found, found.launch)
        return _never_started(found, "its nodes answered that it has no processes there")
    if found.result is not None and found.result["state"] in _ENDED:
        return _over_by_result(found, found.result)

    # It has ended, and its result is not here.
    report = RunReport(found.run_id, found.folder or Path())
    fill_from(report, {view.node.node_rank: view for view in everyone})
    conclude(report, found.needed_plan, 0.0)
    state: State = report.state  # type: ignore[assignment]
    verb = {"done": "is done", "failed": "has failed", "stopped": "was stopped"}[state]
    stops = [cause for one in report.results.values() if (cause := one.get("cause")) and cause["kind"] == "stop"]
    failure = report.first_failure
    why = failure.sentence if failure else str(stops[0]["reason"]) if stops else ""
    sentence = f"run {found.run_id} {verb} ({_size(found.needed_plan)})" + (f": {why}" if why else "")
    # Nodes that neither the sentence is about, nor ended because of that.
    about = failure.node_rank if failure else None
    others = [view for view in everyone if view.word != "done" and view.node.node_rank != about]
    notes = [_ended_note(view) for view in others if not (view.report.get("cause") or view.report.get("asked"))]
    return Verdict(state, f"{sentence}; {_launcher_words(found)}", tuple(notes), _after(found, state))


def _running(found: FoundRun, everyone: list[NodeView], alive: list[NodeView], unreachable: list[NodeView]) -> Verdict:
    plan, attempt = found.needed_plan, _last_attempt(found, everyone)
    # Without an answer of the lead node, the others know which nodes the run can lose, but not which it has lost.
    by = attempt.report or alive[0].report
    spare = {*map(int, by.get("gone") or ()), *(by.get("spare") or ())}
    if any("restarts" in view.report for view in alive):
        spare = {view.node.node_rank for view in everyone}
    broken = not plan.serve_only and any(
        view.reached and view.word in ("failed", "lost") for view in everyone if view.node.node_rank not in spare
    )
    words = {view.word for view in alive}
    state: State = "stopping" if broken or "stopping" in words else "running"
    line = {view.node.node_rank: view.state for view in alive if view.state is not None}
    if state == "stopping":
        verb = "is failing" if broken else "is stopping"
    elif "queued" in words:
        state, verb = "waiting", f"is {waiting_words(line)}" if waiting_words(line) else "waits for its nodes"
    elif "deciding" in words:
        verb = "prepares a restart"
    elif "training" in words:
        verb = f"has trained no step for {idle:.0f} s" if (idle := idle_of(alive)) else "trains"
    else:
        trains = any(view.node.ranks for view in alive)
        verb = "serves" if not trains and words <= {"serving", "restarting"} else "is starting"
    where = progress_words(found, alive)
    verb += f" after {attempt.words}" if attempt.words else ""
    size = _size(plan)
    if attempt.restarts:
        ranks = [own for own in attempt.ranks(view.node for view in everyone).values() if own]
        size = f"{count(len(ranks), 'training node')}, {count(sum(map(len, ranks)), 'rank')}"
    sentence = f"run {found.run_id} {verb}: {size}" + (f", {where}" if where else "") + f"; {_launcher_words(found)}"
    notes = [
        *_unreachable_notes(unreachable, alive),
        *(_ended_note(view) for view in everyone if view.reached and not view.alive),
    ]
    here = found.words
    watch = f"gnnfleet serve status {found.run_id}" if plan.serve_only else f"gnnfleet follow {here}"
    following = () if state == "stopping" else (f"gnnfleet logs {here} -f", f"gnnfleet stop {here}")
    findings = [finding for view in everyone for finding in view.report.get("findings") or ()]
    alarm = bool(idle_of(alive) or nan_finding(findings))
    return Verdict(state, sentence, tuple(notes), (watch, *following), alarm)


def _over_by_result(found: FoundRun, result: Mapping[str, Any], unreachable: Sequence[NodeView] = ()) -> Verdict:
    """Return the verdict on an ended run from ``result``. ``unreachable``: nodes that cannot be reached now."""
    state: State = result["state"]
    verb = {"done": "is done", "failed": "has failed", "stopped": "was stopped"}[state]
    by = f" by {result['stopped_by']}" if result.get("stopped_by") else ""
    why, notes = result_words(result), tuple(result["notes"])
    if not result["nodes"]:  # the launch ended before any process started
        why, notes = "; ".join(notes), ()
    sentence = f"run {found.run_id} {verb}{by} after {seconds_words(result['seconds'])}{f': {why}' if why else ''}"
    notes += tuple(
        note
        for view, note in zip(unreachable, _unreachable_notes(unreachable, ()), strict=True)
        if view.node.label not in str(notes)
    )
    if state == "stopped" and found.launch is not None and found.launch.requeued:
        sentence += f"; {_launcher_words(found)}"
        return Verdict(state, sentence, notes, (f"gnnfleet status {found.words}", f"gnnfleet stop {found.words}"))
    alarm = nan_finding(result.get("findings") or ()) is not None
    return Verdict(state, sentence, notes, _after(found, state, unreachable, collected=True), alarm)


def _after(
    found: FoundRun, state: State, unreachable: Sequence[NodeView] = (), *, collected: bool = False
) -> tuple[str, ...]:
    """Return the commands to suggest for a run that has ended; ``gnnfleet resume`` excludes the nodes ``unreachable``.

    ``collected``: whether the results have been collected.
    """
    collect = () if collected else (f"gnnfleet collect {found.words}",)
    if found.plan is not None and found.plan.serve_only:
        return (*collect, f"gnnfleet serve --config FILE --name {found.run_id}")
    if state == "done":
        return collect
    later = attempts(found.folder)[1:] if found.folder is not None else []
    if later:  # its job was requeued
        return (*collect, f"gnnfleet status {later[-1].name}")
    resume: tuple[str, ...] = ()
    if found.folder is not None and (found.folder / "checkpoints" / "last.pt").is_file():
        nodes = found.plan.nodes if found.plan else ()
        resume = (resume_command(found.words, excluded_names(nodes, {view.node.node_rank for view in unreachable})),)
    report = (f"gnnfleet report {found.words}",) if (found.result or {}).get("nodes") else ()
    return (*collect, *resume, *report)


def _preparing(found: FoundRun, launch: LaunchFile) -> Verdict:
    sentence = f"run {found.run_id} is being prepared: its launcher ({launch.process}) has been {launch.doing} "
    sentence += f"since {clock_time(launch.since)}; it has no processes on the nodes yet"
    return Verdict("preparing", sentence, (), (f"gnnfleet status {found.words}", f"gnnfleet stop {found.words}"))


def _never_started(found: FoundRun, nodes: str) -> Verdict:
    sentence = f"run {found.run_id} never started: {_launcher_words(found)}; {nodes}"
    return Verdict("never started", sentence, (), _after(found, "failed", collected=True))


def _launcher_words(found: FoundRun) -> str:
    """Return a clause such as ``its launcher (alice@laptop, pid 71) has ended``."""
    if found.launch is None:
        return "it was launched from another machine"
    return found.launch.words(last_sign(found.folder) if found.folder else found.launch.since)


def progress_words(found: FoundRun, views: Sequence[NodeView]) -> str:
    """Return the position of the slowest rank: ``epoch 4 of 10, step 13 of 40``; '' before the first step."""
    steps = [rank for view in views for rank in view.ranks.values() if place_of(rank)]
    if not steps:
        return ""
    slowest = min(steps, key=place_of)
    epoch, step = place_of(slowest)
    bundled = found.launch is not None and not found.launch.own_command  # only then do train.epochs apply
    of = f" of {found.config.train.epochs}" if found.config and bundled else ""
    done = min(step + 1, slowest["steps"])  # evaluation continues the count of steps
    return f"epoch {epoch}{of}, step {done} of {slowest['steps']}"


def idle_of(views: Sequence[NodeView]) -> float:
    """Return for how many seconds no rank has made progress; 0 before all have trained a step, and below ``IDLE``."""
    ranks = [rank for view in views for rank in view.ranks.values() if not rank.get("ended")]
    idle = min((float(rank.get("idle_s") or 0.0) if place_of(rank) else 0.0 for rank in ranks), default=0.0)
    return idle if idle >= IDLE else 0.0


def place_of(rank: Mapping[str, Any]) -> tuple[int, ...]:
    """Return (epoch, step) of a rank, as its supervisor reports it; () before its first step.

    The report's ``at`` is preferred: it is newer than ``epoch`` and ``step``, which come from the metrics.
    """
    if any(rank.get(name) is None for name in ("epoch", "step", "steps")):
        return ()
    at = rank.get("at")
    return (at[0], at[1]) if at else (rank["epoch"], rank["step"])


def fill_from(report: RunReport, views: Mapping[int, NodeView]) -> None:
    """Fill a report with what the nodes of a run that has ended have answered, as if it had been followed."""
    report.clocks = {k: view.offset for k, view in views.items() if view.now}
    for k, view in views.items():
        if view.result is not None:
            report.results[k] = view.result
        elif view.reached:
            last = view.state["time"] - view.offset if view.state else time.time()
            report.lost[k] = Lost(view.lost or "the run never started on this node", last)
        else:
            report.lost[k] = Lost(view.unreachable, time.time(), out_of_reach=True)


def _last_attempt(found: FoundRun, views: Sequence[NodeView]) -> LastAttempt:
    return LastAttempt.of({view.node.node_rank: view.report for view in views}, found.needed_plan.lead)


def _size(plan: LaunchPlan) -> str:
    nodes = count(len(plan.nodes), "node")
    return nodes if plan.serve_only else f"{nodes}, {count(plan.world_size, 'rank')}"


def result_words(result: Mapping[str, Any]) -> str:
    """Return the result of an ended run in a few words: its first failure, else its metric or last loss.

    ``NaN loss`` with its rank and step comes first if a loss was NaN or infinite.
    """
    first = result.get("first_failure")
    if first:
        return str(first.get("sentence") or first.get("reason", ""))  # older folders have no sentence
    metrics = result.get("metrics", {})
    metric = metric_of([metrics])
    names = {f"{split} {metric.title}": metric.of(metrics, split) for split in ("test", "val")}
    names["last loss"] = metrics.get("last_loss")
    scores = (f"{words} {score_text(value)}" for words, value in names.items() if value is not None)
    nan = nan_finding(result.get("findings") or ())
    return "; ".join([*([nan_words(nan)] if nan else []), *[*scores][:1]])


def _ended_note(view: NodeView) -> str:
    result = view.result or {}
    ended = str(result.get("reason", "")) if result.get("state") in ("failed", "stopped") else ""
    why = (view.lost or ended).rstrip(".")
    return f"{view.node.label}: {view.word}" + (f" ({why})" if why else "")


def _unreachable_notes(unreachable: Sequence[NodeView], others: Sequence[NodeView]) -> list[str]:
    """Return a note for each unreachable node: why, and when another node last heard from it."""
    notes = []
    for view in unreachable:
        k = str(view.node.node_rank)
        heard = [other for other in others if k in ((other.state or {}).get("peers") or {})]
        note = f"{view.node.label} cannot be reached from here: {view.unreachable}"
        if heard:
            peer = heard[0].state["peers"][k]  # type: ignore[index]
            note += f"; node{heard[0].node.node_rank} last heard from it {peer['age']:.1f} s ago ({peer['state']})"
        notes.append(note)
    return notes
