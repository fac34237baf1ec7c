"""Rehearses a run: launches its plan on this machine, with a smaller graph and, on request, a fault."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.config.loader import load_config, to_yaml
from launcher.config.resolve import resolve_run
from launcher.errors import FleetError, UsageError
from launcher.files import write_whole
from launcher.plan.build import offline_plan
from launcher.rehearse.faults import Fault, FaultInjector
from launcher.rehearse.local_config import local_config
from launcher.report.report import RunReport
from launcher.run.config_of_options import read_config
from launcher.run.launch import launch
from launcher.run.options import LaunchOptions, choose_run_id
from launcher.text import count


def rehearse(options: LaunchOptions, where: Path, vertices: int, fault: Fault | None, console: Console) -> RunReport:
    """Run a rehearsal to its end, and return the report of its run.

    Writes the config of the rehearsal to ``where/cluster.yml`` and launches a run from that file, like any other run.
    ``where``: also for the parts and the nodes' work folders. ``vertices``: largest number of vertices of the graph.
    Raises UsageError and ConfigError for mistakes of the user, and FleetError if the run has ended before the step of
    the fault.
    """
    folder = Path(os.path.expanduser(where)).absolute()
    if str(where).startswith("~") and folder == where.absolute():
        raise UsageError(f"--folder {where}: there is no such user, or no home folder, on this machine")
    config = read_config(options)
    file = folder / "cluster.yml"
    try:
        write_whole(file, to_yaml(local_config(config, folder, vertices)), private=True)
    except OSError as error:
        raise UsageError(
            f"{error.filename or file}: {error.strerror}; choose another folder for the rehearsal with --folder"
        ) from None
    rehearsed = load_config(file)
    resolved = resolve_run(rehearsed)
    if fault:
        fault.check(resolved)
    run_id = choose_run_id(rehearsed, options.run_id)
    if not config.local:
        shown = [f"node{k} stands for {node.host}" for k, node in enumerate(config.nodes[:8])]
        more = [f"{len(config.nodes) - 8} more"] if len(config.nodes) > 8 else []
        console.print(Text(f"rehearsal: {', '.join([*shown, *more])}"), soft_wrap=True)
    size = resolved.data.options.get("num_nodes") or resolved.data.options.get("subset")
    lines = [f"rehearsal: {resolved.data.dataset} with at most {size:,} vertices; its config is {file}"]
    cpus = os.cpu_count() or 1
    if resolved.world_size > cpus:
        processes = count(resolved.world_size, "training process", "es")
        lines.append(f"note: {processes} share {count(cpus, 'processor')}; times say nothing about the cluster")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    launched = replace(options, config=file, overrides=(), include=(), exclude=(), run_id=run_id)
    injector = None
    if fault is not None:
        injector = FaultInjector(fault, offline_plan(resolved, run_id, options.own_command), console)
    with injector or nullcontext():
        report = launch(rehearsed, launched, console)
    if injector and not injector.happened and report.state == "done":
        raise FleetError(
            f"the fault {fault} did not happen: the run ended after {count(injector.steps, 'step')}; name an "
            "earlier step, or train more epochs (--epochs)"
        )
    return report
