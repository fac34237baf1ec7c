"""What preflight found, for a person: one table, equal hosts folded, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.errors import node_label
from launcher.findings import Finding

if TYPE_CHECKING:
    from launcher.preflight import PreflightReport

_STYLES = {"ok": "green", "warn": "yellow", "block": "bold red"}


def print_findings(report: PreflightReport, console: Console) -> None:
    """One table of all findings, nodes with the same row folded; then what to do, per node."""
    table = Table("Nodes", "Hosts", "Check", "", "Finding", title="Preflight", title_justify="left")
    for column in table.columns:
        column.overflow = "fold"  # a fingerprint or a path is no use when its end is cut off
    for row, ranks in _folded(report.findings).items():
        check, severity, message = row
        hosts = {finding.host for finding in report.findings if finding.node_rank in ranks}
        shown = hosts.pop() if len(hosts) == 1 else f"{len(ranks)} nodes"
        style = _STYLES[severity]
        table.add_row(node_ranges(ranks), escape(shown), check, f"[{style}]{severity}[/]", escape(message))
    console.print(table)
    for severity, title in (("warn", "Worth a look:"), ("block", "What to do:")):
        rows = [finding for finding in report.findings if finding.severity == severity and finding.remedy]
        if rows:
            console.print(f"[{_STYLES[severity]}]{title}[/]")
        for finding in rows:
            text = f"  {node_label(finding.node_rank, finding.host)}, {finding.check}: {finding.remedy}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _folded(findings: tuple[Finding, ...]) -> dict[tuple[str, str, str], list[int]]:
    """node_ranks per (check, severity, message), blocking rows last, where the eye is."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    order = list(_STYLES)
    for finding in sorted(findings, key=lambda finding: order.index(finding.severity)):
        rows.setdefault((finding.check, finding.severity, finding.message), []).append(finding.node_rank)
    return rows


def node_ranges(ranks: list[int]) -> str:
    """``node0–node7, node9`` for sorted node_ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"node{run[0]}" if len(run) == 1 else f"node{run[0]}–node{run[-1]}" for run in runs)
