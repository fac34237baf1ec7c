"""``gnnfleet setup``: queries the hosts, shows what is missing, asks once, and installs it."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import extra_packages
from launcher.errors import FleetError, NodeError, TransportError, UsageError
from launcher.preflight.preflight import open_agents
from launcher.setup.apply import Connections, Result, apply
from launcher.setup.lock import forget, lock_of
from launcher.setup.plan import SetupPlan, make_plan, with_sources
from launcher.setup.render import print_plan, to_json
from launcher.setup.requirements import Requirements, Target, required
from launcher.setup.survey import TIMEOUT, HostState, base_python, survey_hosts
from launcher.setup.wheels import Wheel, WheelLock, download
from launcher.sync.progress import transfer_progress
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent


@dataclass(frozen=True)
class SetupOptions:
    """Options of ``gnnfleet setup``."""

    console: Console
    next_command: str  #: command to run afterwards, for messages
    packages: tuple[str, ...] = ()  #: packages to install besides those of the bundled trainer
    build: str | None = None  #: build of torch on hosts with GPUs; '': that of the package index; None: chosen
    dry_run: bool = False  #: show the plan only
    ask: bool = True  #: ask before anything is installed
    as_json: bool = False  #: print the plan and its result as JSON on stdout


def set_up(config: ResolvedConfig, options: SetupOptions) -> int:
    """Make or repair the environments of all nodes.

    Returns the exit status: 0 if all hosts have what they need, 1 if an installation failed, 3 if a problem
    remains that only the user can solve, such as an unreachable host or one without tmux. Raises SetupError,
    UsageError.
    """
    if inside := [k for k, node in enumerate(config.nodes) if node.wrap]:
        raise UsageError(
            f"nodes.{inside[0]}.wrap: gnnfleet setup installs into environments of hosts, not into the image of a "
            "container; add the packages when you build the image (docs/operating.md), or leave such nodes out by "
            "--exclude"
        )
    requirements = required(config_packages(config, options.packages))
    with _connected(config, options) as (transports, unreachable), open_agents() as agents:
        with options.console.status(f"Querying {count(len(transports), 'host')} …"):
            states, errors = survey_hosts(config, transports, agents)
        failed = [*unreachable, *(errors[k] for k in sorted(errors))]
        plan = _planned(config, states, requirements, agents, options)
        print_plan(plan, failed, options.console)
        results: dict[int, Result] = {}
        problems: dict[int, Exception] = {}
        acting = bool(plan.work) and not options.dry_run
        if acting and options.ask:
            if not (sys.stdin.isatty() and options.console.is_terminal):
                raise UsageError("cannot ask whether to install this without a terminal; give --yes or --dry-run")
            text = f"Install this on {count(len(plan.work), 'host')}?"
            acting = click.confirm(text, default=True, err=options.as_json)
        if acting:
            pythons = {k: base_python(config, k) for k in transports}
            connections = Connections(transports, agents, pythons, config.run.connect_timeout)
            results, problems = _installed(plan, requirements, connections, options)
    if options.as_json:
        click.echo(json.dumps(to_json(plan, failed, {k: str(error) for k, error in problems.items()}), indent=1))
    if acting or not plan.work:
        return _conclude(plan, failed, results, problems, options)
    options.console.print(f"Nothing was changed. {count(len(plan.work), 'host')} would be set up.", highlight=False)
    return 3 if _left(plan, failed) or not options.dry_run else 0


def config_packages(config: ResolvedConfig, more: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that keys of the config need (``extra_packages``), and ``more``."""
    found = (name for k in range(len(config.nodes)) for name in extra_packages(config, k))
    return tuple(dict.fromkeys((*found, *more)))


@contextmanager
def _connected(
    config: ResolvedConfig, options: SetupOptions
) -> Iterator[tuple[dict[int, Transport], list[TransportError]]]:
    options.console.print(f"connecting to {count(len(config.nodes), 'node')}", highlight=False)
    opened = connect_all(config)
    try:
        found = {k: one for k, one in opened.items() if isinstance(one, Transport)}
        yield found, [one for one in opened.values() if isinstance(one, TransportError)]
    finally:
        close_all(opened)


def _planned(
    config: ResolvedConfig,
    states: Mapping[int, HostState],
    requirements: Requirements,
    agents: Mapping[int, NodeAgent],
    options: SetupOptions,
) -> SetupPlan:
    """Return the plan. Resolves the wheels once per kind of host, and asks hosts which download servers they reach."""
    locks: dict[Target, WheelLock] = {}

    def resolved(target: Target) -> WheelLock:
        if target not in locks:
            with options.console.status(f"Resolving the packages for {target} …"):
                locks[target] = lock_of(requirements, target)
        return locks[target]

    plan = make_plan(config, states, requirements, resolved, platform.python_version(), options.build)
    if not plan.work:
        return plan
    urls = {host.state.node_rank: {w.server: w.url for w in host.wheels if w.server} for host in plan.work}

    def reach(k: int) -> dict[str, bool]:
        request = {"op": "reach", "urls": list(urls[k].values())}
        return dict(zip(urls[k], agents[k].call("downloads", request, TIMEOUT)["reached"], strict=True))

    with options.console.status("Testing which hosts reach the package index …"):
        answers = on_nodes([k for k in urls if urls[k]], reach, timeout=TIMEOUT)
    return with_sources(plan, answers.values)


def _installed(
    plan: SetupPlan, requirements: Requirements, connections: Connections, options: SetupOptions
) -> tuple[dict[int, Result], dict[int, Exception]]:
    """Download the wheels that are to be sent and that this machine lacks, then install on all hosts.

    Returns results and errors by node_rank. Raises SetupError if a download fails.
    """
    wanted: dict[Target, dict[Wheel, None]] = {}
    for host in plan.work:
        if host.lock and host.sent:
            wanted.setdefault(host.lock.target, {}).update(dict.fromkeys(host.sent))
    paths: dict[Wheel, Path] = {}
    for target, wheels in wanted.items():
        with options.console.status(f"Downloading {count(len(wheels), 'wheel')} for {target} …"):
            try:
                paths |= download(wheels, target)
            except FleetError:
                forget(requirements, target)  # the index may have withdrawn a file
                raise
    if paths:
        size = decimal(sum(path.stat().st_size for path in paths.values()))
        options.console.print(f"{count(len(paths), 'wheel')} on this machine, {size}", highlight=False)

    labels = {host.state.node_rank: host.state.label for host in plan.hosts}
    with transfer_progress(options.console, labels) as progress:
        results, errors = apply(plan, paths, connections, progress)
    bugs = [error for error in errors.values() if not isinstance(error, FleetError | TimeoutError)]
    if bugs:
        raise bugs[0]
    return results, errors


def _left(plan: SetupPlan, failed: Sequence[NodeError]) -> int:
    """Return the number of problems that only the user can solve."""
    return len(plan.refused) + len(failed) + len(plan.without_tmux)


def _conclude(
    plan: SetupPlan,
    failed: Sequence[NodeError],
    results: Mapping[int, Result],
    problems: Mapping[int, Exception],
    options: SetupOptions,
) -> int:
    """Print the results and return the exit status."""
    say, labels = options.console.print, {host.state.node_rank: host for host in plan.hosts}
    for k, result in sorted(results.items()):
        host = labels[k]
        gpu = "; torch cannot use the GPUs there" if host.state.gpus and not result.cuda else ""
        packages = count(len(host.changes), "package")
        say(Text(f"{host.state.label}: {packages} installed in {result.seconds:.0f} s with {result.tool}{gpu}"))
    for k, error in sorted(problems.items()):
        text = str(error)
        say(Text(text if text.startswith(labels[k].state.label) else f"{labels[k].state.label}: {text}", "bold red"))
    left = _left(plan, failed)
    if problems:
        say(Text("The other hosts are complete. Run gnnfleet setup again to go on.", "bold red"))
        return 1
    if left:
        say(Text(f"{count(left, 'problem')} above {'is' if left == 1 else 'are'} left to you; then run this again."))
    elif not plan.work:
        say(Text(f"Nothing to do: {count(len(plan.hosts), 'node')} complete.", "bold green"))
    else:
        say(Text(f"Set up {count(len(results), 'host')}. Next: {options.next_command}", "bold green"), soft_wrap=True)
    return 3 if left else 0
