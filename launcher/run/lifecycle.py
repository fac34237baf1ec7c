"""The part of a run that a launch and ``gnnfleet follow`` share: monitor it, collect its files, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.config.schema import RunConfig
from launcher.errors import Interrupted, OutOfReach, TransportError
from launcher.plan.model import LaunchPlan
from launcher.report.ending import Collected, Ending, Followed, Limits
from launcher.report.events import EventLog
from launcher.report.html.render import written
from launcher.report.metrics import Metrics
from launcher.report.report import RunReport, print_report
from launcher.report.run_folder import Stage
from launcher.run.interrupts import Interrupts, OnInterrupt, Talking
from launcher.run.live_log import LiveLog
from launcher.run.live_state import Board
from launcher.run.monitor import RunFollower
from launcher.run.tmux_session import how_to_stop
from launcher.sync.collect import collect
from launcher.text import count
from launcher.transport.base import Transport

_TAIL = 10  # lines of each log that a run taken up again begins with

Starts = Mapping[int, Callable[[], None]]


@dataclass(frozen=True)
class View:
    """How a run is shown, and what the first Ctrl-C does."""

    console: Console
    on_interrupt: OnInterrupt = "ask"
    plain: bool = False  #: no live view


@dataclass(frozen=True)
class FollowContext:
    """Context shared by following, collecting and reporting a run."""

    plan: LaunchPlan
    transports: Mapping[int, Transport]
    run: RunConfig
    folder: Path  #: the operator's
    started: float  #: by this machine's clock
    view: View
    events: EventLog
    offsets: Mapping[int, float] | None = None  #: node clocks minus ours, as preflight measured them: seconds
    at_stage: Callable[[Stage], None] = lambda stage: None

    @property
    def limits(self) -> Limits:
        run = self.run
        return Limits(run.lost_after, run.grace, run.connect_timeout, run.start_timeout, run.peer_timeout)


def conduct(
    context: FollowContext,
    interrupts: Interrupts,
    *,
    starts: Starts | None = None,
    leave_when_trained: bool = False,
) -> RunReport:
    """Start the nodes (``starts``) or take the run up again, follow it to its end, collect and report.

    A run left to itself is reported as ``detached``. Raises OutOfReach when no node answers any more. Whoever takes
    a run up again is a viewer: signals and closed outputs end the watching, not the run.
    """
    interrupts.last_words = "\n  ".join(
        ["left at once; parts of the run may still be running.", *map(how_to_stop, context.plan.nodes)]
    )
    board = Board.of(context.plan, time.time() - context.started)
    with LiveLog(context.view.console, context.plan, plain=context.view.plain, board=board) as live:
        follower = RunFollower(
            context.plan,
            context.transports,
            context.limits,
            live,
            context.events,
            starts=starts,
            leave_when_trained=leave_when_trained,
            tail=None if starts else _TAIL,
            on_training=lambda: context.at_stage("train"),
        )
        try:
            followed = follower.follow(interrupts, Talking(live, context.view.on_interrupt, viewer=starts is None))
        except BaseException:
            follower.leave() if starts is None else follower.abandon()
            raise
    if followed.detached:
        return left_alone(context, followed, board)
    return finish(context, followed, interrupts)


def finish(context: FollowContext, followed: Followed, interrupts: Interrupts) -> RunReport:
    """Bring everything here, make the report, write it, print it."""
    interrupts.keeps_on = True
    interrupts.meaning = (
        "interrupted while collecting; nothing of the run is left running. "
        f"`gnnfleet collect {context.plan.run_id}` brings the rest here"
    )
    interrupts.last_words = interrupts.meaning
    context.at_stage("collect")
    try:
        collected = collect(context.plan, context.transports, context.folder)
    except KeyboardInterrupt:
        nothing: Mapping[int, tuple[Mapping[str, object], ...]] = {node.node_rank: () for node in context.plan.nodes}
        written(_report(context, followed, Collected(Metrics(), nothing, (interrupts.meaning,))))
        raise
    report = written(_report(context, followed, collected))
    context.events.add("end", state=report.state, exit_status=report.exit_status, seconds=report.seconds)
    print_report(report, context.view.console)
    return report


def _report(context: FollowContext, followed: Followed, collected: Collected) -> RunReport:
    return Ending(context.plan, followed, collected, context.offsets or {}).report(
        context.folder, time.time() - context.started
    )


def left_alone(context: FollowContext, followed: Followed, board: Board) -> RunReport:
    """Say how to come back to a run that goes on without us; raises OutOfReach when that was no one's wish."""
    run_id = context.plan.run_id
    context.events.add("detached", why=followed.detached)
    if followed.detached == "unreachable":
        raise OutOfReach(
            f"no node of {run_id} has been within reach for {context.run.lost_after:g} s (run.lost_after); the run "
            f"goes on without this machine. When the nodes are back: gnnfleet follow {run_id}"
        )
    what = "trains" if followed.detached == "trained" else "goes on"
    lines = [
        f"\nDetached: run {run_id} {what} ({board.what_runs()}).",
        f"  gnnfleet follow {run_id}    watch it again, to its end",
        f"  gnnfleet status {run_id}    how it is; also: logs, attach, stop, collect",
    ]
    for line in lines:
        context.view.console.print(Text(line), soft_wrap=True)
    seconds = time.time() - context.started
    return RunReport(run_id, "detached", (), None, Metrics(), seconds, context.folder)


def rejoin(
    plan: LaunchPlan,
    transports: Mapping[int, Transport | TransportError],
    *,
    run: RunConfig,
    folder: Path,
    started: float,
    view: View,
    events: EventLog,
) -> RunReport:
    """Follow a run that goes on already, or has ended meanwhile: same view, same ending, same exit status.

    ``transports`` need not be connected; a node with a TransportError instead cannot be asked at all. ``started``:
    seconds since the epoch. Raises Interrupted, OutOfReach, and the error of a node that has no transport.
    """
    for line in transports.values():
        if isinstance(line, TransportError):
            raise line
    usable = {k: line for k, line in transports.items() if isinstance(line, Transport)}
    context = FollowContext(plan, usable, run, folder, started, view, events)
    view.console.print(Text(f"run {plan.run_id}: taken up again on {count(len(plan.nodes), 'node')}"), soft_wrap=True)
    with Interrupts() as interrupts:
        try:
            return conduct(context, interrupts)
        except KeyboardInterrupt:
            raise Interrupted(interrupts.meaning) from None
