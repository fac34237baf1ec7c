"""Shows the plan of ``gnnfleet setup``: a table of the hosts, changed packages, and what is left to the user."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from launcher.errors import NodeError
from launcher.setup.plan import Change, HostPlan, SetupPlan
from launcher.setup.survey import minor
from launcher.text import count

_SHOWN = 6  # changes that are listed for one host

_NAMED = ("torch", "numba-cuda")  # packages that a row of a new environment names

_STYLES = {"make": "green", "repair": "yellow", "refused": "bold red"}


def print_plan(plan: SetupPlan, errors: Sequence[NodeError], console: Console) -> None:
    """Print what is to be done on each host, and what the user has to do.

    ``errors``: one error for each host that could not be queried.
    """
    table = Table("Node", "Environment", "Python", "To do", box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for host in plan.hosts:
        cells = (host.state.label, host.state.environment or "–", f"{_python(host)}{_place(host)}", _words(host))
        table.add_row(*map(escape, cells), style=_STYLES.get(host.action, ""))
    if plan.hosts:
        console.print(table)
    for error in errors:
        console.print(Text(str(error), "bold red"), soft_wrap=True)
    noted: dict[str, list[str]] = {}  # by note: the hosts to which it applies
    for host in plan.hosts:
        if host.note:
            noted.setdefault(host.note, []).append(host.state.label)
    lines = [f"{', '.join(labels)}: {note}" for note, labels in noted.items()]
    for state in plan.without_tmux:
        install = state.tmux_line or "install tmux with the host's package manager"
        lines.append(f"{state.label} has no tmux, which runs need. On the host: {install}")
    for line in lines:
        console.print(Text(line, "yellow"), soft_wrap=True)


def _python(host: HostPlan) -> str:
    if host.action == "make" and host.lock:
        return host.lock.target.python
    return minor(host.state.installed.python) if host.state.installed else "–"


def _place(host: HostPlan) -> str:
    """Return where the Python of a new environment is, unless it belongs to the system."""
    path, home = host.base, host.state.home.rstrip("/")
    if not path or posixpath.dirname(path) in ("/usr/bin", "/bin", "/usr/local/bin"):
        return ""
    return f" of ~{path[len(home) :]}" if home and path.startswith(f"{home}/") else f" of {path}"


def _words(host: HostPlan) -> str:
    if host.action == "make" and host.lock:
        shown = [f"{name} {host.lock.versions[name]}" for name in _NAMED if name in host.lock.versions]
        return f"make it: {', '.join([count(len(host.changes), 'package'), *shown])}{_source(host)}"
    if host.action == "repair":
        return f"install {shown_changes(host.changes)}{_source(host)}"
    if host.action == "shared":
        return host.why
    return "nothing" if host.action == "none" else host.why


def _source(host: HostPlan) -> str:
    if not host.sent:
        return "; the host downloads them" if host.fetched else ""
    if not host.fetched:
        return "; sent from this machine"
    return f"; the host downloads {len(host.fetched)}, this machine sends {count(len(host.sent), 'wheel')}"


def shown_changes(changes: Sequence[Change]) -> str:
    """Return the first changes as text."""
    more = [f"{len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
    return ", ".join([*map(str, changes[:_SHOWN]), *more])


def to_json(plan: SetupPlan, errors: Sequence[NodeError], failed: dict[int, str]) -> dict[str, Any]:
    """Return the plan and its result for --json. ``failed``: errors of the installation by node_rank."""
    return {
        "hosts": [
            {
                "node_rank": host.state.node_rank,
                "node": host.state.label,
                "environment": host.state.environment,
                "action": host.action,
                "why": host.why,
                "note": host.note,
                "python": _python(host),
                "base": host.base,
                "packages": {change.name: change.wanted for change in host.changes},
                "sent": [wheel.file for wheel in host.sent],
                "tmux": host.state.tmux,
                "error": failed.get(host.state.node_rank, ""),
            }
            for host in plan.hosts
        ],
        "errors": [str(error) for error in errors],
    }
