"""Follows a run to its end, collects its files and reports it, for launches and for ``gnnfleet follow``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.config.schema import RunConfig
from launcher.errors import OutOfReach
from launcher.plan.model import LaunchPlan
from launcher.report.ending import conclude
from launcher.report.events import EventLog
from launcher.report.last_attempt import checkpoint_node
from launcher.report.launch_file import Stage
from launcher.report.report import RunReport, excluded_names, print_report, resume_command
from launcher.run.interrupts import InterruptPrompt, Interrupts
from launcher.run.live_log import LiveLog
from launcher.run.live_table import Board
from launcher.run.monitor import RunFollower
from launcher.run.tmux_session import how_to_stop
from launcher.sync.collect import collect
from launcher.transport.base import Transport

_TAIL = 10  # lines of each log shown first by ``gnnfleet follow``

_Starts = Mapping[int, Callable[[], None]]


@dataclass
class RunContext:
    """A run in the process that launches it (``launch.LaunchContext``) or only follows it."""

    limits: RunConfig  #: time limits, and what the first Ctrl-C does
    folder: Path  #: run folder on this machine
    started: float  #: seconds since the epoch, by this machine's clock
    events: EventLog
    console: Console
    plain: bool = False  #: no live view

    def enter_stage(self, stage: Stage, *, detached: bool = False) -> None:
        """Record that ``stage`` begins; the launcher does, and others who follow the run do not."""


def conduct(
    context: RunContext,
    plan: LaunchPlan,
    transports: Mapping[int, Transport],
    interrupts: Interrupts,
    *,
    starts: _Starts | None = None,
    offsets: Mapping[int, float] | None = None,
    leave_when_trained: bool = False,
) -> RunReport:
    """Follow a run to its end, collect its files, and print and return its report.

    ``starts``: functions that start the nodes, by node_rank; None if this process only views a run that has been
    started before. Then an exception in this process, such as a closed output, does not end the run.
    ``offsets``: clock of each node minus this machine's, in seconds, as preflight measured them.
    ``leave_when_trained``: detach once training has begun.

    The report of a detached run has the state ``detached``. Raises OutOfReach when no node has answered for
    ``run.lost_after`` seconds.
    """
    interrupts.exit_message = "\n  ".join(
        ["exited immediately; processes of the run may still be running.", *map(how_to_stop, plan.nodes)]
    )
    report = RunReport(plan.run_id, context.folder)
    board = Board.of(plan, time.time() - context.started)
    with LiveLog(context.console, plan, plain=context.plain, board=board) as live:
        follower = RunFollower(
            plan,
            transports,
            context.limits,
            live,
            context.events,
            report,
            starts=starts,
            leave_when_trained=leave_when_trained,
            tail=None if starts else _TAIL,
            on_training=lambda: context.enter_stage("train"),
        )
        try:
            follower.follow(interrupts, InterruptPrompt(live, context.limits.on_interrupt, viewer=starts is None))
        except BaseException:
            follower.leave() if starts is None else follower.abandon()
            raise

    if report.detached:
        context.events.add("detached", why=report.detached)
        if report.detached == "unreachable":
            raise OutOfReach(_out_of_reach(context.limits.lost_after, plan, report))
        run_id, verb = plan.run_id, {"trained": "trains", "queued": "is queued"}.get(report.detached, "goes on")
        for line in (
            f"\nDetached: run {run_id} {verb} ({board.summary()}).",
            f"  gnnfleet follow {run_id}    follow the run to its end",
            f"  gnnfleet status {run_id}    show its state; also: logs, attach, stop, collect",
        ):
            context.console.print(Text(line), soft_wrap=True)
        report.seconds = time.time() - context.started
        return report

    # The run has ended on all nodes: its files are collected. The report is completed even if that is interrupted.
    interrupts.ignore_hangup = True
    interrupts.message = interrupts.exit_message = (
        "interrupted while collecting; the run has ended on all nodes. "
        f"`gnnfleet collect {plan.run_id}` fetches the remaining files"
    )
    context.enter_stage("collect")
    try:
        collect(report, plan, transports, checkpoint_node(report.results, plan.lead))
    except KeyboardInterrupt:
        report.notes.append(interrupts.message)
        raise
    finally:
        from launcher.report.html.render import write_report

        conclude(report, plan, time.time() - context.started, offsets)
        write_report(report)
    context.events.add("end", state=report.state, exit_status=report.exit_status, seconds=report.seconds)
    print_report(report, context.console)
    return report


def _out_of_reach(lost_after: float, plan: LaunchPlan, report: RunReport) -> str:
    # With ``run.restarts``, a node may have ended because it could not reach the others either.
    run_id, waited = plan.run_id, f"for {lost_after:g} s (run.lost_after)"
    follow = f"gnnfleet follow {run_id}"
    ended = [k for k, result in report.results.items() if result.get("no_restart")]
    if not ended:
        return (
            f"no node of {run_id} has been reachable {waited}; the run goes on without this machine. "
            f"When the nodes can be reached again: {follow}"
        )
    others = [node for node in plan.nodes if node.node_rank not in {*report.results, *report.lost}]
    names = ", ".join(node.label for node in others)
    away = excluded_names(plan.nodes, [node.node_rank for node in others])
    why = report.results[ended[0]]["no_restart"]
    first = plan.nodes[ended[0]].label
    return (
        f"no other node of {run_id} has been reachable {waited}; {first} has ended ({why}). If {names} "
        f"{'go' if len(others) > 1 else 'goes'} on: {follow}; if switched off: {resume_command(run_id, away)}"
    )
