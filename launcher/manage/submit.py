"""Submits a run as a Slurm job, and follows the job through the queue to the end of the run.

The job's batch script launches the run with its config. This process opens no connection to a node: it asks Slurm for
the state of the job, and prints the output of the launch from ``slurm.log`` in the run folder. The run folder must be
on a file system that all nodes share with this machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launcher.config.loader import to_yaml
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError, UsageError
from launcher.files import write_whole
from launcher.manage.collect_run import collect_run
from launcher.manage.node_views import OpenRun
from launcher.manage.resume import prepare_offline
from launcher.plan.build import offline_plan
from launcher.plan.sbatch import sbatch_script
from launcher.report.run_folder import attempts, read_folder, read_result, register
from launcher.run.options import LaunchOptions, choose_run_id, run_folder
from launcher.text import count
from launcher.transport.local import LocalTransport
from launcher.transport.slurm_client import JobStatus, job_status, submit

LOG, SCRIPT, CONFIG = "slurm.log", "job.sh", "submitted.yml"  #: files of the run folder

_POLL = 0.5  # seconds between two looks at the log

_ASK_FIRST, _ASK_LAST = 1.0, 10.0  # seconds between two questions to Slurm, growing

_CONFIRM = 8.0  # seconds for which a job that may be requeued must stay in an ended state


@dataclass(frozen=True)
class SubmittedRun:
    """A run whose launch is a Slurm job."""

    run_id: str
    folder: Path
    job: str


def in_queue(config: ClusterConfig) -> bool:
    """Whether a launch submits a Slurm job: with transport ``slurm``, outside a job that provides the nodes."""
    return config.in_job_steps and config.slurm_job is None


def script_of(config: ClusterConfig, options: LaunchOptions, run_id: str) -> str:
    """Return the batch script that launches the run ``run_id``. Raises UsageError for an invalid option of sbatch."""
    folder = run_folder(config, run_id).absolute()
    program = (sys.executable, os.path.abspath(sys.argv[0]))
    words = ("launch", "--config", str(folder / CONFIG), "--run-id", run_id, "--runs-dir", str(folder.parent))
    resumed = ("--resumed-from", options.resumed_from) if options.resumed_from else ()
    own = ("--", *options.own_command) if options.own_command else ()
    command = (*program, *words, "--plain", *resumed, *own)
    name = f"gnnfleet-{config.name}"
    return sbatch_script(config, run_id=run_id, command=command, cwd=Path.cwd(), log=folder / LOG, job_name=name)


def follow_job(run: SubmittedRun, console: Console) -> dict[str, Any]:
    """Print the state of the job and the output of its launch until the job has ended; returns the run's result.json.

    Raises FleetError if the job ended without a result.
    """
    shown, at, wait, ask_at = "", 0, _ASK_FIRST, 0.0
    log = run.folder / LOG
    ended_at: float | None = None  # when the job was first seen in an ended state
    while True:
        now = time.monotonic()
        status = None
        if now >= ask_at:
            status = job_status(run.job)
            line = _words(status)
            wait = _ASK_FIRST if line != shown else min(_ASK_LAST, wait * 1.5)
            ask_at = now + wait
            if line != shown and not status.ended:
                console.print(Text(line, "dim"), soft_wrap=True)
            shown = line
        at = _print_new(log, at, console)
        if status is not None:
            ended_at = (ended_at or now) if status.ended else None
            # a job that is being requeued may look cancelled or failed for a moment
            final = status.state in ("COMPLETED", "UNKNOWN") or not status.may_requeue
            if ended_at is not None and (final or now - ended_at >= _CONFIRM):
                break
        time.sleep(_POLL)
    _print_new(log, at, console)
    result = newest_result(run)
    if result is None:
        raise FleetError(
            f"job {run.job} of run {run.run_id} ended ({status.state.lower()}) without a result; its output is in {log}"
        )
    return result


def newest_result(run: SubmittedRun) -> dict[str, Any] | None:
    """Return the newest result.json of the job; None if there is none.

    The job has a run folder for its first start, and another one for each time that Slurm requeued it.
    """
    results = [read_result(folder) for folder in attempts(run.folder)]
    return next((result for result in reversed(results) if result is not None), None)


def _words(status: JobStatus) -> str:
    again = f", requeued {count(status.restarts, 'time')}" if status.restarts else ""
    if status.state == "PENDING":
        start = f"starts about {status.start}" if status.start else ""
        details = ", ".join(filter(None, (status.reason, start, again.removeprefix(", "))))
        return f"job {status.job} waits in the queue{f' ({details})' if details else ''}"
    on = f" on {status.nodes}" if status.nodes else ""
    return f"job {status.job} is {status.state.lower().replace('_', ' ')}{on}{again}"


def _print_new(log: Path, at: int, console: Console) -> int:
    """Print the complete lines of ``log`` from byte offset ``at`` on; return the offset after the last one."""
    try:
        with log.open("rb") as file:
            file.seek(at)
            data = file.read()
    except FileNotFoundError:
        return at
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        console.print(Text(line), soft_wrap=True)
    return at + len(whole)


def submit_and_follow(config: ClusterConfig, options: LaunchOptions, console: Console) -> int:
    """Submit a run as a Slurm job and, unless ``options.detach``, follow it; returns the exit status.

    Ctrl-C ends only the output; the job goes on. Raises ConfigError, UsageError for mistakes that can be found without
    the nodes, and FleetError if sbatch refuses.
    """
    # Check the config, write the batch script into a new run folder, and submit it.
    resolved = resolve_run(config)
    run_id = choose_run_id(config, options.run_id)
    plan = offline_plan(resolved, run_id, options.own_command, to_train=True)
    folder = run_folder(config, run_id).absolute()
    script = script_of(config, options, run_id)
    try:
        write_whole(folder / CONFIG, to_yaml(config), private=True)
        write_whole(folder / SCRIPT, script)
        try:
            job = submit(folder / SCRIPT)
        except FleetError:
            for name in (CONFIG, SCRIPT):
                (folder / name).unlink()
            with suppress(OSError):  # it has files of an earlier launch
                folder.rmdir()
            raise
        file = options.launch_file(run_id, config.name, job=job, stage="queue")
        if not (folder / "launch.json").exists():  # the job may have begun already
            file.write(folder)
    except OSError as error:
        raise UsageError(
            f"the run folder cannot be created: {error.filename or folder}: {error.strerror}; "
            "choose another folder with --runs-dir (or `run.runs_dir`)"
        ) from None
    if why := register(run_id, folder):
        console.print(Text(why, "yellow"), soft_wrap=True)
    nodes = count(len(plan.nodes), "node")
    text = f"submitted job {job}: run {run_id} on {nodes}; its output goes to {folder / LOG}"
    console.print(Text(text), soft_wrap=True)

    # Follow it.
    run = SubmittedRun(run_id, folder, job)
    result: Mapping[str, Any] = {"state": "detached", "exit_status": 0}
    try:
        if not options.detach:
            result = follow_job(run, console)
    except KeyboardInterrupt:
        pass  # detaches, as printed below
    if result["state"] == "detached":
        for line in (
            f"\nDetached: job {run.job} goes on.",
            f"  gnnfleet status {run.run_id}    show its state; also: logs, follow, stop",
        ):
            console.print(Text(line), soft_wrap=True)
    if options.as_json:
        print(json.dumps({"kind": "report", "run_id": run.run_id, "slurm_job": run.job, **result}), flush=True)
    return int(result["exit_status"])


def resumed_after_requeue(
    config: ClusterConfig, options: LaunchOptions, environ: Mapping[str, str]
) -> tuple[LaunchOptions, str]:
    """Return the options of a launch that resumes the run of a requeued job, and a message for the user.

    Returns ``options`` and '' if the job was not requeued, or if its run has not started yet.

    After requeue n, the batch script launches run ``<run id>-r<n>``, which resumes the job's last run from the newest
    checkpoint. The files of the last run are collected first, unless its launcher has collected them.
    """
    count = environ.get("SLURM_RESTART_COUNT", "0")
    if not config.slurm_job or not options.run_id or not count.isdecimal() or int(count) == 0:
        return options, ""
    begun = [folder for folder in attempts(run_folder(config, options.run_id)) if (folder / "config.yml").is_file()]
    if not begun:
        return options, ""
    found = read_folder(begun[-1])
    assert found.folder is not None
    if found.plan is not None and (found.result is None or found.result["notes"]):  # its launcher has not collected
        run = OpenRun(found, {node.node_rank: LocalTransport(node.node_rank) for node in found.plan.nodes})
        collect_run(run, found.folder)
        found = replace(read_folder(found.folder), launch=found.launch)
    asked = LaunchOptions(
        config=Path(),
        run_id=f"{options.run_id}-r{count}",
        own_command=options.own_command,
        as_json=options.as_json,
        plain=options.plain,
    )
    again = prepare_offline(found, asked)
    return again.options, f"job {config.slurm_job} was requeued: {again.message}"
