"""``gnnfleet stop``: stops a run on every node, even if its launcher has ended, and collects its files."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.errors import FleetError, Interrupted, TransportError, reason_of
from launcher.manage.collect_run import CollectResult, collect_run, folder_for
from launcher.manage.node_views import OpenRun, if_run_exists, run_was_absent
from launcher.plan.model import NodePlan
from launcher.report.launch_file import LaunchFile
from launcher.report.run_folder import FoundRun
from launcher.report.verdict import from_here, known_without_nodes
from launcher.run.tmux_session import STOP_EXTRA, STOP_SLACK, how_to_stop, stop_command, stop_report
from launcher.text import count
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.slurm_client import cancel, job_status

_NOW = 5.0  # seconds used instead of run.grace + STOP_EXTRA with --now, in which the supervisor kills all processes

_JOB_WAIT = 60.0  # seconds for a cancelled Slurm job to end

_LAUNCHER_WAIT = 15.0  # seconds for a launcher to exit after SIGTERM


@dataclass(frozen=True)
class NodeStopResult:
    node: NodePlan
    was: str  #: state of the node before, as in ``NodeView.word``; '' if unknown
    killed: tuple[str, ...] = ()  #: ``pid command`` of processes that were killed
    leftovers: tuple[str, ...] = ()  #: ``pid command`` of processes that survived SIGKILL
    trouble: str = ""  #: why it could not be stopped

    @property
    def clean(self) -> bool:
        """Whether no process of the run is left on the node."""
        return not self.leftovers and not self.trouble

    @property
    def sentence(self) -> str:
        if self.trouble:
            return f"{self.node.label}: not stopped: {self.trouble}; the run may go on there. {how_to_stop(self.node)}"
        if self.leftovers:
            return f"{self.node.label}: still running after SIGKILL: {', '.join(self.leftovers)}"
        if self.was == "not started":
            return f"{self.node.label}: the run was never started there"
        if self.was in ("done", "failed", "stopped") and not self.killed:
            return f"{self.node.label}: had ended already ({self.was})"
        forced = f"; killed: {', '.join(self.killed)}" if self.killed else ""
        return f"{self.node.label}: stopped{forced}"

    def to_json(self) -> dict[str, Any]:
        values = {"node_rank": self.node.node_rank, "target": self.node.target, "was": self.was, "clean": self.clean}
        return values | {"killed": list(self.killed), "leftovers": list(self.leftovers), "trouble": self.trouble}


def _stop_run(run: OpenRun, *, now: bool) -> list[NodeStopResult]:
    """Stop all nodes of the run in parallel. ``now``: kill processes without waiting ``run.grace`` seconds."""
    nodes = run.nodes
    grace = run.found.config.run.grace if run.found.config else 5.0
    timeout = _NOW if now else grace + STOP_EXTRA
    answers = on_nodes(nodes, lambda k: _stop_node(nodes[k], run.attempts[k], timeout, now))
    troubles = {
        k: NodeStopResult(nodes[k], "unreachable" if k in run.errors else "", trouble=reason_of(error))
        for k, error in answers.errors.items()
    }
    stopped = answers.values | troubles
    return [stopped[k] for k in sorted(stopped)]


def _stop_node(node: NodePlan, transport: Transport | TransportError, timeout: float, now: bool) -> NodeStopResult:
    if isinstance(transport, TransportError):
        raise transport
    command = if_run_exists(node, stop_command(node, timeout, "gnnfleet stop", now=now))
    done = transport.run(command, timeout=timeout + STOP_SLACK)
    if run_was_absent(done):
        return NodeStopResult(node, "not started")
    report = stop_report(done, node)
    return NodeStopResult(node, report.was, report.killed, report.leftovers)


def _stop_launcher(launch: LaunchFile) -> bool:
    """End a launcher on this machine that has started nothing on the nodes yet; returns whether it ended."""
    try:
        os.kill(launch.pid, signal.SIGTERM)
    except ProcessLookupError:
        return True
    except PermissionError:
        raise FleetError(
            f"the launcher (pid {launch.pid}) belongs to {launch.who}; only that user can stop it"
        ) from None
    end = time.monotonic() + _LAUNCHER_WAIT
    while launch.alive():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def summary(found: FoundRun, stopped: list[NodeStopResult]) -> str:
    dirty = [one for one in stopped if not one.clean]
    if not dirty:
        return f"run {found.run_id}: no process of it is left on its {count(len(stopped), 'node')}"
    names = ", ".join(one.node.label for one in dirty)
    return f"run {found.run_id}: {count(len(dirty), 'node')} of {len(stopped)} may still run processes of it: {names}"


@dataclass(frozen=True)
class StopResult:
    run_id: str
    message: str  #: the result in one sentence
    nodes: tuple[NodeStopResult, ...]
    clean: bool  #: no process of the run is left on any node
    collected: CollectResult | None  #: None if this command collected nothing

    @property
    def exit_status(self) -> int:
        return 0 if self.clean else 1

    def to_json(self) -> dict[str, Any]:
        values = {"run_id": self.run_id, "told": self.message, "exit_status": self.exit_status}
        folder = str(self.collected.folder) if self.collected else None
        return values | {"nodes": [node.to_json() for node in self.nodes], "folder": folder}


def end_run(run: OpenRun, runs_dir: Path, console: Console, *, now: bool) -> StopResult:
    """Stop the run, print the result of each node and collect the run's files.

    If the run's launcher still runs, the launcher collects the files instead.
    """
    if known_without_nodes(run.found):
        ended = _end_here(run.found)
        console.print(Text(ended.message), soft_wrap=True)
        return ended
    try:
        stopped = _stop_run(run, now=now)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; nodes that have received the stop request will stop. "
            f"To stop the others: gnnfleet stop {run.found.words}"
        ) from None
    for one in stopped:
        console.print(Text(one.sentence, "" if one.clean else "bold red"), soft_wrap=True)
    message = summary(run.found, stopped)
    console.print(Text(message, "bold"), soft_wrap=True)
    clean = all(one.clean for one in stopped)
    launch = run.found.launch
    if launch is not None and launch.alive():  # two processes must not write the same result.json
        console.print(Text(f"its launcher ({launch.process}) collects and reports"), soft_wrap=True)
        return StopResult(run.found.run_id, message, tuple(stopped), clean, None)
    collected = collect_run(run, folder_for(run, runs_dir))
    for line in (collected.message, *collected.notes, f"run folder: {collected.folder}"):
        if line:
            console.print(Text(line), soft_wrap=True)
    return StopResult(run.found.run_id, message, tuple(stopped), clean, collected)


def _end_here(found: FoundRun) -> StopResult:
    # No process on a node: only its launcher may still run, on this machine.
    if found.plan_is_missing:
        raise FleetError(found.without_plan.replace("gnnfleet status", "gnnfleet stop"))
    launch = found.launch
    if found.result is None and launch is not None and launch.alive() and launch.slurm_job:
        _end_job(launch.slurm_job)
        message = (
            f"run {found.run_id}: Slurm job {launch.slurm_job} was cancelled; nothing had been started on the nodes"
        )
        return StopResult(found.run_id, message, (), True, None)
    if launch is not None and launch.requeued:
        _end_job(launch.slurm_job)
        message = f"run {found.run_id}: Slurm job {launch.slurm_job} was cancelled, which would have resumed it"
        return StopResult(found.run_id, message, (), True, None)
    if found.result is None and launch is not None and launch.alive():
        if not _stop_launcher(launch):
            raise FleetError(
                f"the launcher of run {found.run_id} (pid {launch.pid}) did not end; kill it: kill -9 {launch.pid}"
            )
        message = (
            f"run {found.run_id}: its launcher (pid {launch.pid}) was stopped; nothing had been started on the nodes"
        )
        return StopResult(found.run_id, message, (), True, None)
    return StopResult(found.run_id, f"nothing to stop: {from_here(found).sentence}", (), True, None)


def _end_job(job: str) -> None:
    """Cancel a Slurm job that has no processes on its nodes, and wait for its end."""
    cancel(job)
    end = time.monotonic() + _JOB_WAIT
    while not job_status(job).ended:
        if time.monotonic() > end:
            raise FleetError(f"Slurm job {job} did not end within {_JOB_WAIT:g} s; see `squeue -j {job}`")
        time.sleep(0.5)
