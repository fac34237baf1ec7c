"""``gnnfleet check``: preflight alone."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console

from launcher.config import ClusterConfig
from launcher.options import LaunchOptions
from launcher.preflight import run_preflight
from launcher.preflight_table import print_findings
from launcher.transport import close_all, connect_all


def run_check(config: ClusterConfig, options: LaunchOptions, console: Console) -> int:
    """Check every node, print what was found; 0 when a launch could go on, else 3."""
    attempts = connect_all(config)
    try:
        report = run_preflight(config, attempts, own_command=bool(options.own_command), run_id=options.run_id or "")
    finally:
        close_all(attempts)
    print_findings(report, console)
    if options.as_json:
        click.echo(json.dumps(asdict(report), indent=1))
    return 3 if report.blocked else 0
