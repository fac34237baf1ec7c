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
from launcher.manage.node_views import OpenRun
from launcher.report.launch_file import LaunchFile
from launcher.report.verdict import from_here, known_without_nodes
from launcher.run.tmux_session import STOP_EXTRA, StopReport, stop_session
from launcher.text import count
from launcher.transport.fanout import on_nodes
from launcher.transport.slurm_client import cancel, job_status

_NOW = 5.0  # seconds used instead of run.grace + STOP_EXTRA with --now, in which the supervisor kills all processes

_JOB_WAIT = 60.0  # seconds for a cancelled Slurm job to end

_LAUNCHER_WAIT = 15.0  # seconds for a launcher to exit after SIGTERM


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


@dataclass(frozen=True)
class StopResult:
    run_id: str
    message: str  #: the result in one sentence
    nodes: tuple[StopReport, ...] = ()
    collected: CollectResult | None = None  #: None if this command collected nothing

    @property
    def exit_status(self) -> int:
        return 0 if all(node.clean for node in self.nodes) else 1

    def to_json(self) -> dict[str, Any]:
        values = {"run_id": self.run_id, "told": self.message, "exit_status": self.exit_status}
        folder = str(self.collected.folder) if self.collected else None
        return values | {"nodes": [node.to_json() for node in self.nodes], "folder": folder}


def end_run(run: OpenRun, runs_dir: Path, console: Console, *, now: bool) -> StopResult:
    """Stop the run, print the result of each node and collect the run's files.

    If the run's launcher still runs, the launcher collects the files instead.
    """
    found = run.found
    if known_without_nodes(found):
        # It has no process on a node: at most its launcher runs, on this machine.
        if found.plan_is_missing:
            raise FleetError(found.without_plan("stop"))
        launch = found.launch
        prepares = found.result is None and launch is not None and launch.alive()
        if launch is not None and launch.slurm_job and (prepares or launch.requeued):
            job = launch.slurm_job
            cancel(job)
            end = time.monotonic() + _JOB_WAIT
            while not job_status(job).ended:
                if time.monotonic() > end:
                    raise FleetError(f"Slurm job {job} did not end within {_JOB_WAIT:g} s; see `squeue -j {job}`")
                time.sleep(0.5)
            what = "; nothing had been started on the nodes" if prepares else ", which would have resumed it"
            message = f"run {found.run_id}: Slurm job {job} was cancelled{what}"
        elif launch is None or not prepares:
            message = f"nothing to stop: {from_here(found).sentence}"
        elif _stop_launcher(launch):
            stopped_it = f"its launcher (pid {launch.pid}) was stopped"
            message = f"run {found.run_id}: {stopped_it}; nothing had been started on the nodes"
        else:
            raise FleetError(
                f"the launcher of run {found.run_id} (pid {launch.pid}) did not end; kill it: kill -9 {launch.pid}"
            )
        console.print(Text(message), soft_wrap=True)
        return StopResult(found.run_id, message)

    # Stop all nodes in parallel.
    nodes = run.nodes
    timeout = _NOW if now else (found.config.run.grace if found.config else 5.0) + STOP_EXTRA

    def stop(k: int) -> StopReport:
        transport = run.connections[k]
        if isinstance(transport, TransportError):
            raise transport
        return stop_session(transport, nodes[k], timeout=timeout, why="gnnfleet stop", now=now, if_there=True)

    try:
        answers = on_nodes(nodes, stop)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted; nodes that have received the stop request will stop. "
            f"To stop the others: gnnfleet stop {found.words}"
        ) from None
    troubles = {
        k: StopReport(nodes[k], "unreachable" if k in run.errors else "", trouble=reason_of(error))
        for k, error in answers.errors.items()
    }
    stopped = tuple(one for _, one in sorted((answers.values | troubles).items()))
    for one in stopped:
        console.print(Text(one.sentence, "" if one.clean else "bold red"), soft_wrap=True)
    message = f"run {found.run_id}: no process of it is left on its {count(len(stopped), 'node')}"
    if dirty := [one.node.label for one in stopped if not one.clean]:
        left = f"{count(len(dirty), 'node')} of {len(stopped)} may still run processes of it"
        message = f"run {found.run_id}: {left}: {', '.join(dirty)}"
    console.print(Text(message, "bold"), soft_wrap=True)

    if found.launch is not None and found.launch.alive():  # two processes must not write the same result.json
        console.print(Text(f"its launcher ({found.launch.process}) collects and reports"), soft_wrap=True)
        return StopResult(found.run_id, message, stopped)
    collected = collect_run(run, folder_for(run, runs_dir))
    for line in (collected.message, *collected.notes, f"run folder: {collected.folder}"):
        if line:
            console.print(Text(line), soft_wrap=True)
    return StopResult(found.run_id, message, stopped, collected)
