"""Resumes the run of a Slurm job that was requeued, in the second and later starts of its batch script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from launcher.config.schema import ClusterConfig
from launcher.manage.collect_run import collect_run
from launcher.manage.node_views import OpenRun
from launcher.manage.resume import prepare_offline
from launcher.report.run_folder import FoundRun, attempts, read_folder
from launcher.run.options import LaunchOptions, run_folder
from launcher.transport.local import LocalTransport


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
    found = _collected(read_folder(begun[-1]))
    asked = LaunchOptions(
        config=Path(),
        run_id=f"{options.run_id}-r{count}",
        own_command=options.own_command,
        as_json=options.as_json,
        plain=options.plain,
    )
    again = prepare_offline(found, asked)
    return again.options, f"job {config.slurm_job} was requeued: {again.message}"


def _collected(found: FoundRun) -> FoundRun:
    """Collect the files of ``found``, an earlier run of this job, unless its launcher has collected them."""
    assert found.folder is not None
    if found.plan is None or (found.result is not None and not found.result["notes"]):
        return found
    run = OpenRun(found, {node.node_rank: LocalTransport(node.node_rank) for node in found.plan.nodes})
    collect_run(run, found.folder)
    return replace(read_folder(found.folder), launch=found.launch)
