"""``gnnfleet check``: preflight alone."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console

from launcher.config.roles import carried_out
from launcher.config.schema import ClusterConfig
from launcher.plan.build import LaunchPlan
from launcher.plan.offline import offline_plan
from launcher.preflight.preflight import PreflightReport, run_preflight
from launcher.preflight.preflight_report import print_findings
from launcher.run.options import LaunchOptions
from launcher.transport import Opened, close_all, connect_all


def bytes_needed(draft: LaunchPlan) -> dict[int, int]:
    """What the plan stores on each node, as far as the parts are there already."""
    return {node.node_rank: sum(file.bytes for file in node.files) for node in draft.nodes}


def run_check(config: ClusterConfig, options: LaunchOptions, console: Console) -> int:
    """Check every node, print what was found; 0 when a launch (of servers alone: a serve) could go on, else 3."""
    config, draft = _drafted(config, options)
    attempts = connect_all(config)
    try:
        report = _checked(config, draft, options, attempts)
    finally:
        close_all(attempts)
    print_findings(report, console)
    if options.as_json:
        click.echo(json.dumps(asdict(report), indent=1))
    return 3 if report.blocked else 0


def check_over(config: ClusterConfig, options: LaunchOptions, attempts: Opened) -> PreflightReport:
    """The same over lines that are open already."""
    config, draft = _drafted(config, options)
    return _checked(config, draft, options, attempts)


def _drafted(config: ClusterConfig, options: LaunchOptions) -> tuple[ClusterConfig, LaunchPlan]:
    serve_only = not config.world_size
    config = carried_out(config, serve_only=serve_only)
    return config, offline_plan(config, options.run_id or "check", options.own_command, serve_only=serve_only)


def _checked(config: ClusterConfig, draft: LaunchPlan, options: LaunchOptions, attempts: Opened) -> PreflightReport:
    return run_preflight(
        config,
        attempts,
        own_command=bool(options.own_command),
        bytes_needed=bytes_needed(draft),
        run_id=options.run_id or "",
    )
