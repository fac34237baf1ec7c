"""Preflight before a launch, and ``gnnfleet check``."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.config.resolve import ResolvedConfig, resolve
from launcher.config.schema import ClusterConfig
from launcher.errors import FleetError
from launcher.plan.build import make_plan, offline_plan
from launcher.plan.model import LaunchPlan
from launcher.preflight.finding import Finding, Severity
from launcher.preflight.preflight import run_preflight
from launcher.preflight.preflight_report import PreflightReport, print_findings, verdict
from launcher.report.explain import hint
from launcher.run.options import LaunchOptions
from launcher.text import count
from launcher.transport import Opened, close_all, connect_all
from launcher.transport.base import Transport

_SHOWN = 4  # differences of parts that are shown for each node


def run_check(
    config: ClusterConfig, options: LaunchOptions, console: Console, *, notify: bool = False, speed: bool = False
) -> int:
    """Run preflight and print the findings; return the exit status: 0, or 3 if a finding blocks the run.

    notify: also send a test message to ``run.notify``. speed: also measure the hosts. Raises UsageError, before any
    connection, if the bundled trainer would refuse the graph or the user's model class.
    """
    resolved, draft = _drafted(config, options, to_train=not resolve(config).serve_only)
    connections = connect_all(resolved)
    try:
        report = run_preflight(resolved, connections, draft, run_id=options.run_id or "", notify=notify, speed=speed)
        if resolved.data.mode == "verify" and not resolved.data.serving and not report.blocked:
            with console.status("comparing the files of the parts with their manifest"):
                found = _compared_parts(resolved, options, report, connections)
            report = replace(report, findings=(*report.findings, *found))
    finally:
        close_all(connections)
    show_findings(report, options.config, console)
    console.print(Text(verdict(report, len(resolved.nodes)), "bold red" if report.blocked else "bold green"))
    if options.as_json:
        click.echo(json.dumps(asdict(report), indent=1))
    return 3 if report.blocked else 0


def _compared_parts(
    config: ResolvedConfig, options: LaunchOptions, report: PreflightReport, connections: Opened
) -> list[Finding]:
    from launcher.sync.verify_parts import PartsDiffer, verify

    plan = make_plan(config, run_id=options.run_id or "check", facts=report.facts, own_command=options.own_command)
    holding = [node.node_rank for node in plan.nodes if node.parts]

    def finding(k: int, severity: Severity, message: str, remedy: str = "") -> Finding:
        return Finding(k, config.nodes[k].host, severity, "parts", message, remedy)

    try:
        checked = verify(plan, {k: one for k, one in connections.items() if isinstance(one, Transport)})
    except PartsDiffer as error:
        found = []
        for k, texts in error.by_node.items():
            more = [f"… and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
            found.append(finding(k, "block", "\n".join([*texts[:_SHOWN], *more]), error.REMEDY))
        return found
    except FleetError as error:
        return [finding(holding[0], "block", str(error))]
    text = f"all {count(checked.files, 'file')} ({decimal(checked.bytes)}) match the manifest"
    return [finding(k, "ok", text) for k in holding]


def check_over(config: ClusterConfig, options: LaunchOptions, connections: Opened) -> PreflightReport:
    """Run preflight over open ``connections`` and return its report; prints nothing."""
    resolved, draft = _drafted(config, options)
    return run_preflight(resolved, connections, draft, run_id=options.run_id or "")


def _drafted(
    config: ClusterConfig, options: LaunchOptions, to_train: bool = False
) -> tuple[ResolvedConfig, LaunchPlan]:  # fmt: skip
    resolved = resolve(config)
    return resolved, offline_plan(resolved, options.run_id or "check", options.own_command, to_train=to_train)


def show_findings(report: PreflightReport, file: Path, console: Console) -> None:
    """Print findings, the command that installs packages, and ``gnnfleet explain`` for findings that block the run.

    ``file``: the cluster file; it may not exist.
    """
    print_findings(report, console)
    repairable = any(one.severity != "ok" and one.check in ("python", "packages") for one in report.findings)
    if repairable and file.is_file():
        text = f"To install the versions of this machine on all hosts: gnnfleet setup --config {file}"
        console.print(Text(text, "bold"), soft_wrap=True)
    if more := hint(finding.code for finding in report.findings if finding.severity == "block"):
        console.print(Text(more, "dim"))
