"""``gnnfleet init``: connects, examines hosts, chooses, writes cluster.yml and checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launcher.errors import ConfigError, NodeError, PreflightRefused, UnreachableError, UsageError
from launcher.files import write_whole
from launcher.init.choose import choose, graph_of, shares_of
from launcher.init.discover import Discovery, discover
from launcher.init.draft import Draft, is_unedited, text_of
from launcher.init.questions import ask_access, ask_environment, common_cure, reason, reasons
from launcher.init.request import InitRequest, config_of, in_flags
from launcher.node.exit_description import size
from launcher.node.programs import packages
from launcher.preflight.finding import Finding
from launcher.run.options import LaunchOptions, read_config
from launcher.text import OWN_VENV, count, new_venv
from launcher.transport import Opened, close_all, connect_all
from launcher.transport.base import Transport


@dataclass(frozen=True)
class InitOptions:
    """How to go about it."""

    console: Console
    ask: bool  #: somebody is at the terminal
    check: bool
    as_json: bool
    program: str = "gnnfleet"  #: how this program is called


def write_config(request: InitRequest, dest: Path, manner: InitOptions) -> int:
    """Write ``dest``; 0 when a launch could go on, 3 when a host is left out or something is in the way."""
    with _reached(request, manner) as (request, looked, opened):
        if not looked.looks:
            raise _nobody(request, looked)
        request = ask_environment(request, looked) if manner.ask else request
        draft = _draft(request, looked, dest, manner.program)
        text = text_of(draft)
        _refuse_mistakes(text, dest)
        write_whole(dest, text)
        told = _told(draft)
        _show(draft, manner.console)
        checked = _check(draft, dest, opened, manner) if manner.check else {}
    if manner.as_json:
        click.echo(json.dumps({"file": str(dest), "hosts": told, **checked}, indent=1))
    _say_next(dest, manner, bool(checked.get("blocked")))
    return 3 if looked.errors or checked.get("blocked") else 0


def _refuse_mistakes(text: str, dest: Path) -> None:
    """Flags may contradict each other in ways that only the whole file shows; raises ConfigError before it is there."""
    with NamedTemporaryFile("w", dir=dest.absolute().parent, prefix=".", suffix=".yml") as file:
        file.write(text)
        file.flush()
        try:
            read_config(LaunchOptions(Path(file.name)))
        except ConfigError as error:
            raise in_flags(error.problems) from None


def _say_next(dest: Path, manner: InitOptions, blocked: bool) -> None:
    command = f"{manner.program} check --config {dest}" if blocked else f"{manner.program} --config {dest}"
    first = "Repair what is named above" if blocked else "Read it"
    manner.console.print(f"Wrote [bold]{escape(str(dest))}[/]. {first}, then: {escape(command)}", soft_wrap=True)


def _draft(request: InitRequest, looked: Discovery, dest: Path, program: str) -> Draft:
    chosen = choose(request, looked.looks)
    hosts = dict(enumerate(node.host for node in config_of(request).nodes))
    devices = shares_of(looked.looks, hosts, looked.looks, chosen)
    graph = graph_of(request.dataset or "synthetic", request.source)
    if graph.source:
        graph = replace(graph, source=_as_seen_from(dest.absolute().parent, graph.source))
    return Draft(request, looked, chosen, devices, graph, dest.name, program)


def _as_seen_from(folder: Path, source: str) -> str:
    """Relative where it lies below the file, so that both can be moved together."""
    path = Path(source).expanduser()
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else source


@contextmanager
def _reached(request: InitRequest, manner: InitOptions) -> Iterator[tuple[InitRequest, Discovery, Opened]]:
    """All hosts looked at, as far as they can be reached; at a terminal with what was answered about the rest."""
    opened = _connected(request, {}, manner)
    try:
        while manner.ask:
            errors = {k: error for k, error in opened.items() if isinstance(error, NodeError)}
            more = ask_access(request, errors, manner.console)
            if more == request:
                break
            close_all(opened)
            request = more
            opened = _connected(request, opened, manner)
        with manner.console.status(f"Looking at {count(len(request.hosts), 'host')} …"):
            looked = discover(request, config_of(request), opened)
        yield request, looked, opened
    finally:
        close_all(opened)


def _connected(request: InitRequest, before: Opened, manner: InitOptions) -> Opened:
    """A line to each host, or why there is none; hosts that did not answer ``before`` are not waited for again."""
    config = config_of(request)
    ranks = [k for k in range(len(config.nodes)) if not isinstance(before.get(k), UnreachableError)]
    chosen = replace(config, nodes=tuple(config.nodes[k] for k in ranks))
    asks = request.password  # for a password, on the line where the spinner would be
    with nullcontext() if asks else manner.console.status(f"Connecting to {count(len(ranks), 'host')} …"):
        opened = connect_all(chosen)
    return {**before, **{ranks[i]: line for i, line in opened.items()}}


def _nobody(request: InitRequest, looked: Discovery) -> PreflightRefused:
    lines = "\n  ".join(reasons(request, looked.errors))
    cure = common_cure(request, looked.errors)
    return PreflightRefused(
        f"no host could be looked at, so nothing was written:\n  {lines}"
        + (f"\nTo know these keys, {cure}" if cure else "")
    )


# -- what is told --------------------------------------------------------


def _told(draft: Draft) -> list[dict[str, Any]]:
    """For --json, a host each."""
    return [
        {"host": host, "error": reason(draft.request, k, draft.looked.errors[k])}
        if k in draft.looked.errors
        else {
            "host": host,
            "environment": {one.key: one.path, "versions": dict(one.versions)} if (one := draft.chosen[k]) else None,
            "devices": list(draft.devices[k]),
            "cpus": draft.looked.looks[k].cpus,
            "memory": draft.looked.looks[k].memory,
        }
        for k, host in enumerate(draft.request.hosts)
    ]


def _show(draft: Draft, console: Console) -> None:
    table = Table("Host", "CPUs", "Memory", "GPUs", "Python", box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for k, host in enumerate(draft.request.hosts):
        table.add_row(escape(host), *map(escape, _cells(draft, k)), style="red" if k in draft.looked.errors else "")
    console.print(table)
    for line in reasons(draft.request, draft.looked.errors):
        console.print(f"[bold red]left out[/] {escape(line)}", soft_wrap=True)
    if cure := common_cure(draft.request, draft.looked.errors):
        console.print(f"To know these keys, {escape(cure)}", soft_wrap=True)
    if not draft.shared_as_wished:
        console.print(
            f"[yellow]{escape(str(draft.request.shared))} is not one folder[/] on all hosts, or not writable there"
        )
    lacking = [draft.request.hosts[k] for k, one in draft.chosen.items() if one is None or one.lacking]
    if lacking:
        console.print(f"[yellow]No Python with all packages[/] on {escape(', '.join(lacking))}. There:", soft_wrap=True)
        console.print(f"  {escape(_install(draft))}", soft_wrap=True)


def _cells(draft: Draft, k: int) -> tuple[str, ...]:
    if k in draft.looked.errors:
        return ("–", "–", "–", "left out, see below")
    look, chosen = draft.looked.looks[k], draft.chosen[k]
    used = ", ".join(map(str, draft.devices[k])) if draft.devices[k] else "none used"
    gpus = f"{used} of {len(look.gpus)} × {look.gpus[0].name}" if look.gpus else "none"
    python = f"{chosen.path}: torch {chosen.versions['torch']}" if chosen else "none with torch"
    return str(look.cpus), size(look.memory), gpus, python


def _install(draft: Draft) -> str:
    """The command that makes an environment with the versions of the other hosts, else with those of this machine."""
    pattern = next((one.versions for one in draft.chosen.values() if one and one.complete), packages.versions())
    pins = [f"{name}=={version.partition('+')[0]}" for name in packages.PACKAGES if (version := pattern.get(name))]
    cpu = not any(look.gpus for look in draft.looked.looks.values())
    return new_venv(draft.request.venv or OWN_VENV, pins, "cpu" if cpu else "")


def _check(draft: Draft, dest: Path, opened: Opened, manner: InitOptions) -> dict[str, Any]:
    """``gnnfleet check`` of the new file, over the lines that are open; {"blocked", "findings"}."""
    from dataclasses import asdict

    from launcher.preflight.preflight_report import print_findings
    from launcher.run.launch import check_over

    options = LaunchOptions(dest)
    config = read_config(options)
    lines: Opened = {}
    for k, old in enumerate(draft.looked.looks):
        line = opened[old]
        assert isinstance(line, Transport)
        lines[k] = line
    report = check_over(config, options, lines)
    report = replace(report, findings=tuple(_in_order(draft, finding) for finding in report.findings))
    print_findings(report, manner.console)
    return {"blocked": report.blocked, "findings": [asdict(finding) for finding in report.findings]}


def _in_order(draft: Draft, finding: Finding) -> Finding:
    """Where an environment is yet to be made, the file says already where, or a second ``init`` does."""
    chosen = draft.chosen[list(draft.looked.looks)[finding.node_rank]]
    if chosen is not None or finding.check not in ("python", "packages"):
        return finding
    again = f"the same `{draft.program} init` again" + (
        "" if draft.request.environment else " (--venv DIR if it is elsewhere)"
    )
    remedy = f"make the environment as above, then {again}; or name another one in the file"
    return replace(finding, remedy=remedy, command="", login=())


def check_writable(dest: Path, force: bool, ask: bool) -> None:
    """Raises UsageError where ``dest`` must not be written; at a terminal a file that is there may be replaced."""
    if dest.is_dir():
        raise UsageError(f"{dest} is a folder; name a file with -o")
    if not dest.absolute().parent.is_dir():
        raise UsageError(f"no folder {dest.parent}; make it first, or name another file with -o")
    if not dest.exists() or force or is_unedited(dest):
        return
    if not (ask and click.confirm(f"{dest} is there already. Replace it?")):
        raise UsageError(f"{dest} is there already and was left as it is; --force replaces it, -o names another file")
