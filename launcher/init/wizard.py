"""``gnnfleet init``: connects to the hosts, queries them, writes cluster.yml and checks it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
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
from launcher.init.choose import Choice, choose, devices, graph_of
from launcher.init.discover import Discovery, HostFacts, discover
from launcher.init.draft import Draft, is_unedited, text_of
from launcher.init.questions import ask_access, ask_environment, common_remedy, reason, reasons
from launcher.init.request import InitRequest, config_of, in_flags
from launcher.node.exit_description import size
from launcher.run.config_of_options import read_config
from launcher.run.options import LaunchOptions
from launcher.text import count
from launcher.transport import Opened, close_all, connect_all
from launcher.transport.base import Transport


@dataclass(frozen=True)
class InitOptions:
    console: Console
    ask: bool  #: whether questions may be asked at a terminal
    check: bool  #: whether to run ``gnnfleet check`` on the new file
    as_json: bool  #: whether to print the result as JSON on stdout
    program: str = "gnnfleet"  #: command that starts gnnfleet, for messages


def write_config(request: InitRequest, dest: Path, options: InitOptions) -> int:
    """Query the hosts, write ``dest`` and check it; return the exit status.

    The status is 3 if a host was left out or the check found a problem that blocks a launch, else 0. Raises
    PreflightRefused if no host could be queried, and ConfigError for invalid flags; ``dest`` is then not written.
    """
    with _connected_hosts(request, options) as (request, discovery, opened):
        if not discovery.facts:
            lines = "\n  ".join(reasons(request, discovery.errors))
            remedy = common_remedy(request, discovery.errors)
            raise PreflightRefused(
                f"no host could be queried, so no file was written:\n  {lines}"
                + (f"\nTo accept the unknown keys, {remedy}" if remedy else "")
            )
        request = ask_environment(request, discovery) if options.ask else request
        chosen = choose(request, discovery.facts)
        names = dict(enumerate(node.host for node in config_of(request).nodes))
        device_ids = _device_ids(discovery.facts, names, discovery.facts, chosen)
        graph = graph_of(request.dataset or "synthetic", request.source)
        if graph.source:
            path, folder = Path(os.path.expanduser(graph.source)), dest.absolute().parent
            graph = replace(
                graph, source=str(path.relative_to(folder)) if path.is_relative_to(folder) else graph.source
            )
        draft = Draft(request, discovery, chosen, device_ids, graph, dest.name, options.program)
        text = text_of(draft)
        with NamedTemporaryFile("w", dir=dest.absolute().parent, prefix=".", suffix=".yml") as file:
            file.write(text)
            file.flush()
            try:
                read_config(LaunchOptions(Path(file.name)))
            except ConfigError as error:
                raise in_flags(error.problems) from None
        write_whole(dest, text)
        hosts = [
            {"host": host, "error": reason(draft.request, k, draft.discovery.errors[k])}
            if k in draft.discovery.errors
            else {
                "host": host,
                "environment": {one.key: one.path, "versions": dict(one.versions)}
                if (one := draft.chosen[k])
                else None,
                "devices": list(draft.devices[k]),
                "cpus": draft.discovery.facts[k].cpus,
                "memory": draft.discovery.facts[k].memory,
            }
            for k, host in enumerate(draft.request.hosts)
        ]
        _show(draft, options.console)
        checked = _check(draft, dest, opened, options) if options.check else {}
    if options.as_json:
        click.echo(json.dumps({"file": str(dest), "hosts": hosts, **checked}, indent=1))
    blocked, setup = bool(checked.get("blocked")), bool(_lacking(draft))  # setup: packages are missing on a host
    command = f"{options.program} --config {dest}"
    if blocked or setup:
        command = f"{options.program} {'setup' if setup else 'check'} --config {dest}"
    first = "Fix the problems above" if blocked and not setup else "Read it"
    options.console.print(f"Wrote [bold]{escape(str(dest))}[/]. {first}, then run: {escape(command)}", soft_wrap=True)
    return 3 if discovery.errors or blocked else 0


def _device_ids(
    ranks: Iterable[int], hosts: Mapping[int, str], facts: Mapping[int, HostFacts], chosen: Choice
) -> dict[int, tuple[int, ...]]:
    """Return the CUDA device ids of each node. Nodes on the same host get different GPUs."""
    of_host: dict[str, list[int]] = {}
    for k in ranks:
        of_host.setdefault(hosts[k].lower(), []).append(k)
    found = {}
    for same in of_host.values():
        for i, k in enumerate(same):
            ids = [gpu.index for gpu in devices(facts[k], chosen[k])]
            found[k] = tuple(ids[len(ids) * i // len(same) : len(ids) * (i + 1) // len(same)])
    return found


@contextmanager
def _connected_hosts(request: InitRequest, options: InitOptions) -> Iterator[tuple[InitRequest, Discovery, Opened]]:
    """Connect to the hosts and query them; at a terminal, ask about refused logins and unknown keys and try again.

    Yields the request with the answers, the facts, and the open connections. Closes the connections at the end.
    """
    opened = _connect(request, {}, options)
    try:
        while options.ask:
            errors = {k: error for k, error in opened.items() if isinstance(error, NodeError)}
            answered = ask_access(request, errors, options.console)
            if answered == request:
                break
            close_all(opened)
            request = answered
            opened = _connect(request, opened, options)
        with options.console.status(f"Querying {count(len(request.hosts), 'host')} …"):
            discovery = discover(request, config_of(request), opened)
        yield request, discovery, opened
    finally:
        close_all(opened)


def _connect(request: InitRequest, before: Opened, options: InitOptions) -> Opened:
    """Return a connection or an error for each host. Hosts that were unreachable in ``before`` are not tried again."""
    config = config_of(request)
    ranks = [k for k in range(len(config.nodes)) if not isinstance(before.get(k), UnreachableError)]
    chosen = replace(config, nodes=tuple(config.nodes[k] for k in ranks))
    asks = request.password  # the password prompt needs the terminal line of the spinner
    with nullcontext() if asks else options.console.status(f"Connecting to {count(len(ranks), 'host')} …"):
        opened = connect_all(chosen)
    return {**before, **{ranks[i]: one for i, one in opened.items()}}


def _show(draft: Draft, console: Console) -> None:
    """Print a table of the hosts, why hosts were left out, and the command that installs missing packages."""
    table = Table("Host", "CPUs", "Memory", "GPUs", "Python", box=SIMPLE_HEAD)
    for column in table.columns:
        column.overflow = "fold"
    for k, host in enumerate(draft.request.hosts):
        if k in draft.discovery.errors:
            table.add_row(escape(host), "–", "–", "–", "left out, see below", style="red")
            continue
        facts, chosen = draft.discovery.facts[k], draft.chosen[k]
        used = ", ".join(map(str, draft.devices[k])) if draft.devices[k] else "none used"
        gpus = f"{used} of {len(facts.gpus)} × {facts.gpus[0].name}" if facts.gpus else "none"
        python = f"{chosen.path}: torch {chosen.versions['torch']}" if chosen else "none with torch"
        table.add_row(*map(escape, (host, str(facts.cpus), size(facts.memory), gpus, python)))
    console.print(table)
    for line in reasons(draft.request, draft.discovery.errors):
        console.print(f"[bold red]left out[/] {escape(line)}", soft_wrap=True)
    if remedy := common_remedy(draft.request, draft.discovery.errors):
        console.print(f"To accept the unknown keys, {escape(remedy)}", soft_wrap=True)
    if not draft.shared_confirmed:
        console.print(f"[yellow]{escape(str(draft.request.shared))} is not the same writable folder[/] on all hosts")
    if lacking := _lacking(draft):
        hosts = escape(", ".join(lacking))
        command = escape(_setup_command(draft))
        console.print(f"[yellow]No Python with all packages[/] on {hosts}. To install them: {command}", soft_wrap=True)


def _lacking(draft: Draft) -> list[str]:
    """Return the hosts that lack Python packages."""
    return [draft.request.hosts[k] for k, one in draft.chosen.items() if one is None or one.lacking]


def _setup_command(draft: Draft) -> str:
    return f"{draft.program} setup --config {draft.file}"


def _check(draft: Draft, dest: Path, opened: Opened, options: InitOptions) -> dict[str, Any]:
    """Run ``gnnfleet check`` on the new file over the open connections; return {"blocked", "findings"} for --json."""
    from dataclasses import asdict

    from launcher.preflight.preflight_report import print_findings
    from launcher.run.check import check_over

    launch_options = LaunchOptions(dest)
    config = read_config(launch_options)
    ranks = list(draft.discovery.facts)  # hosts that were left out have no node_rank
    connections: Opened = {}
    for k, index in enumerate(ranks):
        connection = opened[index]
        assert isinstance(connection, Transport)
        connections[k] = connection
    report = check_over(config, launch_options, connections)

    # On a host without an environment, the remedy is to make one.
    remedy = f"run `{_setup_command(draft)}`, or name another environment in the file"
    findings = tuple(
        replace(one, remedy=remedy, command="", login=())
        if one.check in ("python", "packages") and draft.chosen[ranks[one.node_rank]] is None
        else one
        for one in report.findings
    )
    report = replace(report, findings=findings)
    print_findings(report, options.console)
    return {"blocked": report.blocked, "findings": [asdict(finding) for finding in findings]}


def check_writable(dest: Path, force: bool, ask: bool) -> None:
    """Raise UsageError if ``dest`` is in no existing folder, or is a file that must not be replaced.

    A file that ``gnnfleet init`` wrote may be replaced if nobody edited it. Any other file may be replaced if ``force``
    is true or, with ``ask``, if the user agrees.
    """
    if not dest.absolute().parent.is_dir():
        raise UsageError(f"no folder {dest.parent}; create it first, or name another file with -o")
    if not dest.exists() or force or is_unedited(dest):
        return
    if not (ask and click.confirm(f"{dest} exists already. Replace it?")):
        raise UsageError(f"{dest} exists already and was not changed; --force replaces it, -o names another file")
