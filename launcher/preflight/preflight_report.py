"""The preflight report: prints the findings of all nodes in one table, then what the user can do."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.errors import PreflightRefused
from launcher.plan.model import NodeFacts
from launcher.preflight.finding import Finding
from launcher.text import UNBOUNDED, count, spans


@dataclass(frozen=True)
class PreflightReport:
    """The result of preflight: facts about the nodes, and findings for the user."""

    facts: dict[int, NodeFacts] = field(default_factory=dict)  #: by node_rank, of the nodes that answered
    findings: tuple[Finding, ...] = ()

    @property
    def blocked(self) -> bool:
        return any(finding.severity == "block" for finding in self.findings)

    def to_wait(self) -> PreflightReport:
        """Return the report for a launch with --wait, which no finding refuses that only names another run."""
        remedy = "this run waits for it (--wait)"
        findings = (replace(one, severity="warn", remedy=remedy) if one.held_by else one for one in self.findings)
        return replace(self, findings=tuple(findings))

    def refuse_if_blocked(self) -> None:
        """Raise PreflightRefused with all blocking findings, if there are any."""
        if self.blocked:
            lines = finding_lines([finding for finding in self.findings if finding.severity == "block"])
            raise PreflightRefused("preflight refused the run:\n  " + "\n  ".join(lines))


_STYLES = {"ok": "green", "warn": "yellow", "block": "bold red"}

_TITLES = {"warn": "Worth a look:", "block": "What to do:"}

_LOOP = 3  # minimum number of hosts with the same command for which one shell loop is printed


def print_findings(report: PreflightReport, console: Console) -> None:
    """Print a table of all findings, then what the user can do about warnings and blocking findings.

    Equal findings of several nodes are in one row; blocking findings come last.
    """
    everyone = sorted({finding.node_rank for finding in report.findings} | set(report.facts))
    table = Table("", "Check", "Nodes", "Finding", title="Preflight", title_justify="left", box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"  # a fingerprint or a path must not be cut
    table.columns[2].max_width = 26 if console.width < UNBOUNDED else None
    for (severity, check, message), findings in _rows(report.findings).items():
        table.add_row(f"[{_STYLES[severity]}]{severity}[/]", check, _nodes_of(findings, everyone), escape(message))
    console.print(table)
    for severity, title in _TITLES.items():
        # One line for each remedy; commands are on lines of their own.
        same: dict[tuple[str, str, str], list[Finding]] = {}
        for one in report.findings:
            if one.severity == severity and (one.remedy or one.command):
                same.setdefault((one.check, one.remedy, one.command), []).append(one)
        if same:
            console.print(f"[{_STYLES[severity]}]{title}[/]")
        for (check, remedy, command), nodes in same.items():
            line = f"  {_nodes_of(nodes, everyone)}, {check}: {remedy}".rstrip(": ") + (":" if command else "")
            console.print(Text(line), soft_wrap=True)
            for pasted in _commands(nodes) if command else ():
                console.print(Text(f"    {pasted}"), soft_wrap=True)


def verdict(report: PreflightReport, num_nodes: int) -> str:
    """Return the last line of ``gnnfleet check``: ``Ready: 2 nodes, no errors, 1 warning``.

    Equal findings of several nodes count once.
    """
    severities = [severity for severity, _, _ in _rows(report.findings)]
    errors, warnings = severities.count("block"), severities.count("warn")
    more = f", {count(warnings, 'warning')}" if warnings else ""
    if errors:
        return f"Not ready: {count(num_nodes, 'node')}, {count(errors, 'error')}{more}"
    return f"Ready: {count(num_nodes, 'node')}, no errors{more}"


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, for an error message; equal findings of several nodes share a line."""
    same: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        same.setdefault((one.check, one.message, one.remedy, one.command), []).append(one)
    lines = []
    for nodes in same.values():
        if len(nodes) == 1:
            lines.append(nodes[0].line())
            continue
        commands = [f"`{line}`" for line in _commands(nodes)] if nodes[0].command else []
        remedy = "; ".join([*filter(None, [nodes[0].remedy]), *commands])
        lines.append(f"{spans(_ranks(nodes), 'node')}: {nodes[0].message}" + (f" – {remedy}" if remedy else ""))
    return lines


def _nodes_of(findings: Sequence[Finding], everyone: Sequence[int]) -> str:
    """Return the names of the nodes that have ``findings``: ``node3 (gnn4)``, ``all 64 nodes``, ranges, or ``all but
    …``.

    ``everyone``: all node_ranks.
    """
    ranks = _ranks(findings)
    if len(ranks) == 1:
        return f"node{ranks[0]} ({findings[0].host})"
    if ranks == list(everyone):
        return "both nodes" if len(ranks) == 2 else f"all {len(ranks)} nodes"
    named = spans(ranks, "node")
    others = f"all but {spans([k for k in everyone if k not in set(ranks)], 'node')}"
    return min(named, others, key=len)


def _rows(findings: Sequence[Finding]) -> dict[tuple[str, str, str], list[Finding]]:
    """Group findings by (severity, check, message), in the order ok, warn, block."""
    order = list(_STYLES)
    ordered = sorted(findings, key=lambda finding: order.index(finding.severity))
    rows: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in ordered:
        rows.setdefault((finding.severity, finding.check, finding.message), []).append(finding)
    return rows


def _commands(nodes: Sequence[Finding]) -> list[str]:
    logins = {node.login[:-1] for node in nodes}
    hosts = list(dict.fromkeys(node.login[-1] for node in nodes if node.login))
    if len(hosts) < _LOOP or len(logins) > 1:
        return list(dict.fromkeys(node.paste() for node in nodes))
    login, command = shlex.join(nodes[0].login[:-1]), shlex.quote(nodes[0].command)
    return [f'for host in {shlex.join(hosts)}; do {login} "$host" {command}; done']


def _ranks(findings: Sequence[Finding]) -> list[int]:
    return sorted({finding.node_rank for finding in findings})
