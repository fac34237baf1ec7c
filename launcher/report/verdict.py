"""The state of a run in one sentence, with what the user can do next, from its folder and its nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launcher.node.peers import model
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.ending import hub_was_cut_off
from launcher.report.report import excluded_names, resume_command
from launcher.report.run_folder import BEFORE_NODES, FoundRun, LaunchFile, last_sign
from launcher.text import count


@dataclass(frozen=True)
class NodeView:
    """One node of a run, as it answered just now."""

    node: NodePlan
    state: Mapping[str, Any] | None = None  #: state.json
    result: Mapping[str, Any] | None = None  #: result.json
    lost: str = ""  #: why no result can be expected any more
    absent: bool = False  #: nothing of the run has ever been sent there
    unreachable: str = ""  #: why it could not be asked
    now: float = 0.0  #: its clock when it answered
    offset: float = 0.0  #: its clock minus ours, seconds
    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)  #: of the files asked for

    @property
    def reached(self) -> bool:
        return not self.unreachable

    @property
    def alive(self) -> bool:
        """Its supervisor works."""
        return self.reached and self.state is not None and self.result is None and not self.lost

    @property
    def word(self) -> str:
        """Its state in a word or two."""
        if self.unreachable:
            return "unreachable"
        if self.result is not None:
            return str(self.result["state"])
        if self.lost:
            return "lost"
        return str(self.state["state"]) if self.state is not None else "not started"

    @property
    def heartbeat_age(self) -> float | None:
        """Seconds since its supervisor last wrote; by its own clock, whatever that shows."""
        return max(0.0, self.now - self.state["time"]) if self.alive and self.state else None

    @property
    def ranks(self) -> Mapping[str, Mapping[str, Any]]:
        """Last step of each of its ranks, by rank."""
        return (self.state or {}).get("ranks") or {}

    @property
    def cluster_offset(self) -> float:
        """Its clock minus the lead node's, as the nodes have measured it; 0 when they have not."""
        told = (self.result or {}).get("clock_offset")
        return float(told if told is not None else (self.state or {}).get("clock_offset") or 0.0)


State = Literal["preparing", "running", "stopping", "done", "failed", "stopped", "never started", "unknown"]

Views = Mapping[int, NodeView]

#: Of ``gnnfleet status``.
EXIT_STATUS: Mapping[State, int] = {
    "preparing": 0,
    "running": 0,
    "stopping": 0,
    "done": 0,
    "failed": 1,
    "never started": 1,
    "stopped": 130,
    "unknown": 3,
}

_DOING = {
    "connect": "connecting to its nodes",
    "preflight": "checking its nodes",
    "partition": "making its parts",
    "sync": "sending files to its nodes",
    "start": "starting the run",
    "train": "following the run",
    "collect": "collecting its results",
    "end": "ending",
}

_FROM_RESULT: Mapping[str, State] = {"done": "done", "failed": "failed", "interrupted": "stopped"}


@dataclass(frozen=True)
class Verdict:
    """The truth about a run, as far as it can be known from here."""

    state: State
    sentence: str
    notes: tuple[str, ...] = ()  #: what else a person should know
    next: tuple[str, ...] = ()  #: commands that go on from here, to paste

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.state]


def known_without_nodes(found: FoundRun) -> bool:
    """Whether what is written here already is the whole truth: the run is over, or nothing of it can have started."""
    if found.plan is None:
        return True
    launch, result = found.launch, found.result
    if result is not None and result["state"] in _FROM_RESULT and not (result["notes"] and result["nodes"]):
        return True  # a note on a run that was started may say that something of it is left
    return launch is not None and launch.stage in BEFORE_NODES and launch.alive() is not None


def from_here(found: FoundRun) -> Verdict:
    """The verdict where ``known_without_nodes``."""
    if found.result is not None and found.result["state"] in _FROM_RESULT:
        return _over_by_result(found, found.result)
    if found.plan_is_missing:
        return Verdict("unknown", found.without_plan)
    if found.launch is not None and found.launch.alive() is None:
        told = f"run {found.run_id} had not started when last heard of: {launcher_words(found)}"
        return Verdict("unknown", told, (), (f"gnnfleet status {found.words}",))
    if found.launch is not None and found.launch.alive():
        return _preparing(found, found.launch)
    return _never_started(found, "nothing of it runs on the nodes")


def judge(found: FoundRun, views: Views) -> Verdict:
    """The verdict when the nodes have been asked."""
    everyone = list(views.values())
    alive = [view for view in everyone if view.alive]
    away = [view for view in everyone if not view.reached]
    if alive:
        return _running(found, everyone, alive, away)
    if away:
        if found.result is not None and found.result["state"] in _FROM_RESULT:
            return _over_by_result(found, found.result, away)
        return _cannot_know(found, everyone, away)
    if all(view.result is None and not view.lost for view in everyone):
        if found.launch is not None and found.launch.alive() and found.launch.stage in (*BEFORE_NODES, "start"):
            return _preparing(found, found.launch)
        return _never_started(found, "nothing of it runs on the nodes, which have been asked")
    return _over(found, everyone)


def _running(found: FoundRun, everyone: list[NodeView], alive: list[NodeView], away: list[NodeView]) -> Verdict:
    plan = found.needed_plan
    spare = done_without(everyone, plan.lead)
    broken = not plan.serve_only and any(
        view.reached and view.word in ("failed", "lost") for view in everyone if view.node.node_rank not in spare
    )
    state: State = "stopping" if broken or any(view.word == "stopping" for view in alive) else "running"
    if state == "stopping":
        verb = "is failing" if broken else "is stopping"
    else:
        verb = _what_it_does(alive)
    where = progress_words(found, alive)
    told = f"run {found.run_id} {verb}: {_size(plan)}" + (f", {where}" if where else "") + f"; {launcher_words(found)}"
    notes = [*_away_notes(away, alive), *(_ended_note(view) for view in everyone if view.reached and not view.alive)]
    here = found.words
    watch = f"gnnfleet serve status {found.run_id}" if plan.serve_only else f"gnnfleet follow {here}"
    following = () if state == "stopping" else (f"gnnfleet logs {here} -f", f"gnnfleet stop {here}")
    return Verdict(state, told, tuple(notes), (watch, *following))


def _cannot_know(found: FoundRun, everyone: list[NodeView], away: list[NodeView]) -> Verdict:
    reached = [view for view in everyone if view.reached]
    if not reached:
        told = f"whether run {found.run_id} still runs cannot be known: no node of it can be reached from here"
    else:
        rest = "the others have" if len(reached) > 1 else f"node{reached[0].node.node_rank} has"
        told = f"run {found.run_id}: {_names(away)} cannot be reached from here; {rest} nothing of it running any more"
    notes = [*_away_notes(away, reached), *(_ended_note(view) for view in reached), launcher_words(found)]
    lead_told = any(view.result is not None and view.node.node_rank == found.needed_plan.lead for view in reached)
    first = "collect" if lead_told else "status"  # the lead node ends last, and knows how
    return Verdict("unknown", told, tuple(notes), (f"gnnfleet {first} {found.words}", f"gnnfleet stop {found.words}"))


def _over(found: FoundRun, everyone: list[NodeView]) -> Verdict:
    if found.result is not None and found.result["state"] in _FROM_RESULT:
        return _over_by_result(found, found.result)
    plan = found.needed_plan
    size, gone = _size(plan), done_without(everyone, plan.lead, only_gone=True)
    words = {view.word for view in everyone if view.node.node_rank not in gone}
    if words == {"done"}:
        state, told = "done", f"run {found.run_id} is done ({size})"
    elif words & {"failed", "lost", "not started"}:
        state, told = "failed", f"run {found.run_id} has failed ({size})"
    else:
        state, told = "stopped", f"run {found.run_id} was stopped ({size})"
    why = first_cause(everyone, plan.lead)
    untold = [view for view in everyone if _why_ended(view) not in why and view.node.label not in why]
    notes = [_ended_note(view) for view in untold if view.word != "done"]
    told += f": {why}" if why else ""
    return Verdict(state, f"{told}; {launcher_words(found)}", tuple(notes), _after(found, state))  # type: ignore[arg-type]


def _over_by_result(found: FoundRun, result: Mapping[str, Any], away: Sequence[NodeView] = ()) -> Verdict:
    """By the report that lies here; ``away``: nodes out of reach now."""
    state = _FROM_RESULT[result["state"]]
    told = {"done": "is done", "failed": "has failed", "stopped": "was stopped"}[state]
    by = f" by {result['stopped_by']}" if result.get("stopped_by") else ""
    why, notes = result_words(result), tuple(result["notes"])
    if not result["nodes"]:  # given up before anything ran
        why, notes = "; ".join(notes), ()
    sentence = f"run {found.run_id} {told}{by} after {seconds_words(result['seconds'])}{f': {why}' if why else ''}"
    notes += tuple(
        note for view, note in zip(away, _away_notes(away, ()), strict=True) if view.node.label not in str(notes)
    )
    return Verdict(state, sentence, notes, _after(found, state, away, collected=True))


def _after(found: FoundRun, state: State, away: Sequence[NodeView] = (), *, collected: bool = False) -> tuple[str, ...]:
    """``resume`` where there is a checkpoint to go on from; of a run not collected, its report will say."""
    bring = () if collected else (f"gnnfleet collect {found.words}",)
    if found.plan is not None and found.plan.serve_only:
        return (*bring, f"gnnfleet serve --config FILE --name {found.run_id}")
    if state == "done":
        return bring
    report = (f"gnnfleet report {found.words}",) if (found.result or {}).get("nodes") else ()
    return (*bring, *_resume(found, away), *report)


def _resume(found: FoundRun, away: Sequence[NodeView]) -> tuple[str, ...]:
    if found.folder is None or not (found.folder / "checkpoints" / "last.pt").is_file():
        return ()
    nodes = found.plan.nodes if found.plan else ()
    return (resume_command(found.words, excluded_names(nodes, {view.node.node_rank for view in away})),)


def _preparing(found: FoundRun, launch: LaunchFile) -> Verdict:
    told = f"run {found.run_id} is being prepared: its launcher ({_launcher(launch)}) has been {_DOING[launch.stage]} "
    told += f"since {clock(launch.since)}; nothing of it runs on the nodes yet"
    return Verdict("preparing", told, (), (f"gnnfleet status {found.words}", f"gnnfleet stop {found.words}"))


def _never_started(found: FoundRun, nodes: str) -> Verdict:
    told = f"run {found.run_id} never started: {launcher_words(found)}; {nodes}"
    return Verdict("never started", told, (), _after(found, "failed", collected=True))


def launcher_words(found: FoundRun) -> str:
    """What became of the launcher, as a clause."""
    launch = found.launch
    if launch is None:
        return "it was launched from another machine"
    who, alive = _launcher(launch), launch.alive()
    if launch.stage == "end":
        return f"its launcher ({who}) has ended"
    if launch.detached:
        return f"its launcher ({who}) has left it to itself since {clock(launch.since)}"
    if alive:
        return f"its launcher ({who}) is {_DOING[launch.stage]}"
    if alive is None:
        return f"it was launched by {launch.who}, whose launcher cannot be seen from here"
    gone = clock(last_sign(found.folder)) if found.folder else clock(launch.since)
    return f"its launcher ({who}) died while {_DOING[launch.stage]} (last sign of it {gone})"


def _launcher(launch: LaunchFile) -> str:
    return f"{launch.who}, pid {launch.pid}"


def progress_words(found: FoundRun, views: Sequence[NodeView]) -> str:
    """``epoch 4 of 10, step 13 of 40``: where the slowest rank is; '' before the first step."""
    steps = [rank for view in views for rank in view.ranks.values() if place_of(rank)]
    if not steps:
        return ""
    slowest = min(steps, key=place_of)
    epoch, step = place_of(slowest)
    ours = found.launch is not None and not found.launch.own_command  # else the config here may not be the run's
    of = f" of {found.config.train.epochs}" if found.config and ours else ""
    done = min(step + 1, slowest["steps"])  # evaluation goes on counting
    return f"epoch {epoch}{of}, step {done} of {slowest['steps']}"


def place_of(rank: Mapping[str, Any]) -> tuple[int, ...]:
    """(epoch, step) a rank is at; () before its first step. ``at`` is newer than the last metrics line."""
    if any(rank.get(name) is None for name in ("epoch", "step", "steps")):
        return ()
    at = rank.get("at")
    return (at[0], at[1]) if at else (rank["epoch"], rank["step"])


def first_cause(views: Sequence[NodeView], hub: int) -> str:
    """Why the run ended, by the words of the node where it began; '' when all went well. ``views``: of all nodes."""
    gone = done_without(views, hub, only_gone=True)
    labels = tuple(view.node.label for view in views)
    results = {view.node.node_rank: view.result for view in views if view.result is not None}
    if hub_was_cut_off(results, len(views), hub):  # what it says of the others is not so
        views = [view for view in views if view.node.node_rank != hub]
    for view in views:
        cause = (view.result or {}).get("cause")
        if cause:
            return str(cause["reason"]) if cause["kind"] == "stop" else model.sentence(cause, labels)
    needed = [view for view in views if view.node.node_rank not in gone]
    told = [f"node{view.node.node_rank}: {why}" for view in needed if (why := _why_ended(view))]
    return told[0] if told else ""


def done_without(views: Sequence[NodeView], hub: int, *, only_gone: bool = False) -> set[int]:
    """Nodes that the run has gone on without, and those that it could: by the hub's word."""
    told = next((view.result or view.state or {} for view in views if view.node.node_rank == hub), {})
    gone = set(map(int, told.get("gone") or ()))
    return gone if only_gone else gone | set(told.get("spare") or ())


def _size(plan: LaunchPlan) -> str:
    nodes = count(len(plan.nodes), "node")
    return nodes if plan.serve_only else f"{nodes}, {count(plan.world_size, 'rank')}"


def _what_it_does(alive: Sequence[NodeView]) -> str:
    words = {view.word for view in alive}
    if "training" in words:
        return "trains"
    trainers = [view for view in alive if view.node.ranks]
    return "serves" if not trainers and words <= {"serving", "restarting"} else "is starting"


def result_words(result: Mapping[str, Any]) -> str:
    """A finished run in a few words: its accuracy, or its first failure."""
    first = result.get("first_failure")
    if first:
        return str(first.get("sentence") or first.get("reason", ""))  # older folders have no sentence
    told = {split: result.get("metrics", {}).get(f"{split}_accuracy") for split in ("test", "val")}
    return next((f"{split} accuracy {value:.4f}" for split, value in told.items() if value is not None), "")


def _why_ended(view: NodeView) -> str:
    if view.lost:
        return view.lost
    result = view.result or {}
    return str(result.get("reason", "")) if result.get("state") in ("failed", "stopped") else ""


def _ended_note(view: NodeView) -> str:
    why = _why_ended(view).rstrip(".")
    return f"{view.node.label}: {view.word}" + (f" ({why})" if why else "")


def _away_notes(away: Sequence[NodeView], others: Sequence[NodeView]) -> list[str]:
    """Of each node out of reach: why, and what the other nodes know of it."""
    notes = []
    for view in away:
        k = str(view.node.node_rank)
        heard = [other for other in others if k in ((other.state or {}).get("peers") or {})]
        told = f"{view.node.label} cannot be reached from here: {view.unreachable}"
        if heard:
            peer = heard[0].state["peers"][k]  # type: ignore[index]
            told += f"; node{heard[0].node.node_rank} last heard of it {peer['age']:.1f} s ago ({peer['state']})"
        notes.append(told)
    return notes


def _names(views: Sequence[NodeView]) -> str:
    return ", ".join(view.node.label for view in views)


def clock(when: float) -> str:
    """``12:03:11``, or with the date when that is another day; this machine's time zone."""
    then, today = time.localtime(when), time.localtime()
    same_day = then[:3] == today[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", then)


def seconds_words(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h 5 min``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
