"""``gnnfleet setup``: queries the hosts, shows what is missing, asks once, and installs it."""

from __future__ import annotations

import json
import platform
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import extra_packages
from launcher.errors import FleetError, TransportError, UsageError
from launcher.node.programs.packages import PACKAGES
from launcher.plan.model import PlannedFile
from launcher.preflight.preflight import open_agents
from launcher.setup.lock import forget, lock_of
from launcher.setup.plan import HostPlan, SetupPlan, make_plan, with_sources
from launcher.setup.render import print_plan, to_json
from launcher.setup.requirements import Requirements, Target, required
from launcher.setup.survey import TIMEOUT, HostState, base_python, survey_hosts
from launcher.setup.wheels import SetupError, Wheel, WheelLock, download
from launcher.sync.progress import TransferProgress, transfer_progress
from launcher.sync.transfer import FileTransfer, Stopped
from launcher.text import count
from launcher.transport import close_all, connect_all
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

_POLL = 1.0  # seconds between progress reports of downloads

_CALL_TIMEOUT = 120.0  # seconds

_INSTALL_TIMEOUT = 5400.0  # seconds; longer than the timeouts of node/programs/install.py together

#: Modules that must be importable after an installation, and their packages
_MODULES = {**{name: name.replace("_", "-") for name in PACKAGES}, "numba.cuda": "numba-cuda", "gnnfleet": "gnnfleet"}


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
        results: dict[int, _Result] = {}
        problems: dict[int, Exception] = {}
        acting = bool(plan.work) and not options.dry_run
        if acting and options.ask:
            if not (sys.stdin.isatty() and options.console.is_terminal):
                raise UsageError("cannot ask whether to install this without a terminal; give --yes or --dry-run")
            text = f"Install this on {count(len(plan.work), 'host')}?"
            acting = click.confirm(text, default=True, err=options.as_json)
        if acting:
            pythons = {k: base_python(config, k) for k in transports}
            connections = _Connections(transports, agents, pythons, config.run.connect_timeout)
            results, problems = _installed(plan, requirements, connections, options)
    if options.as_json:
        click.echo(json.dumps(to_json(plan, failed, {k: str(error) for k, error in problems.items()}), indent=1))
    left = len(plan.refused) + len(failed) + len(plan.without_tmux)  # problems that only the user can solve
    if plan.work and not acting:
        options.console.print(f"Nothing was changed. {count(len(plan.work), 'host')} would be set up.", highlight=False)
        return 3 if left or not options.dry_run else 0
    say, labels = options.console.print, {host.state.node_rank: host for host in plan.hosts}
    for k, result in sorted(results.items()):
        host = labels[k]
        gpu = "; torch cannot use the GPUs there" if host.state.gpus and not result.cuda else ""
        packages = count(len(host.changes), "package")
        say(Text(f"{host.state.label}: {packages} installed in {result.seconds:.0f} s with {result.tool}{gpu}"))
    for k, error in sorted(problems.items()):
        text = str(error)
        say(Text(text if text.startswith(labels[k].state.label) else f"{labels[k].state.label}: {text}", "bold red"))
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


@dataclass(frozen=True)
class _Connections:
    """Open connections to the nodes, by node_rank."""

    transports: Mapping[int, Transport]
    agents: Mapping[int, NodeAgent]
    pythons: Mapping[int, Command]  #: commands that start some Python there
    connect_timeout: float  #: seconds


@dataclass(frozen=True)
class _Result:
    """A finished installation on one host."""

    seconds: float
    tool: str  #: uv or pip
    cuda: bool  #: whether torch can use CUDA there


@dataclass(frozen=True)
class _Receiver:
    node_rank: int
    label: str
    python: Command


class _WheelTransfer(FileTransfer):
    """The transfer of wheels to one host."""

    def __init__(self, files: list[PlannedFile], *rest: Any):
        super().__init__(*rest)
        self.files = files

    def send_all(self) -> None:
        self.send_files(list(zip(self.files, self.inventory(self.files)["files"], strict=True)))


def _installed(
    plan: SetupPlan, requirements: Requirements, connections: _Connections, options: SetupOptions
) -> tuple[dict[int, _Result], dict[int, Exception]]:
    """Download the wheels that are to be sent and that this machine lacks, then install on all hosts in parallel.

    Returns results and errors by node_rank: a failure on one host does not stop the others. Raises SetupError if a
    download to this machine fails.
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
    hosts, stop = {host.state.node_rank: host for host in plan.work}, threading.Event()
    with transfer_progress(options.console, labels) as progress:
        try:
            answers = on_nodes(hosts, lambda k: _set_up(hosts[k], paths, connections, progress, stop))
        finally:
            stop.set()  # Ctrl-C: threads of hosts that receive wheels end
    bugs = [error for error in answers.errors.values() if not isinstance(error, FleetError | TimeoutError)]
    if bugs:
        raise bugs[0]
    return answers.values, answers.errors


def _set_up(
    host: HostPlan,
    paths: Mapping[Wheel, Path],
    connections: _Connections,
    progress: TransferProgress,
    stop: threading.Event,
) -> _Result:
    k = host.state.node_rank
    folder = f"{host.state.environment}.setup"  # removed when the installation is complete
    wheels = f"{folder}/wheels"
    agent, environment, label = connections.agents[k], host.state.environment, host.state.label
    if host.fetched:  # the host downloads them; their bytes count as progress
        asked = [{"file": wheel.file, "url": wheel.url, "sha256": wheel.sha256} for wheel in host.fetched]
        agent.call("downloads", {"op": "fetch", "folder": wheels, "wheels": asked}, _CALL_TIMEOUT)
        received = total = 0
        while not stop.is_set():
            state = agent.call("downloads", {"op": "fetched", "seconds": _POLL}, _CALL_TIMEOUT)
            progress.start(k, state["total"] - total)
            progress.advance(k, state["bytes"] - received)
            received, total = state["bytes"], state["total"]
            if state["done"] and state["error"]:
                raise SetupError(f"{label}: a download failed: {state['error']}. Run gnnfleet setup again")
            if state["done"]:
                break
    if host.sent:
        files = [
            PlannedFile(f"{wheels}/{wheel.file}", paths[wheel].stat().st_size, str(paths[wheel]), sha256=wheel.sha256)
            for wheel in host.sent
        ]
        node = _Receiver(k, label, connections.pythons[k])
        transport = connections.transports[k]
        _WheelTransfer(files, node, transport, progress, stop, connections.connect_timeout).run()
    if stop.is_set():
        raise Stopped("stopped")
    progress.note(k, f"installing {count(len(host.changes), 'package')} in {environment}")
    assert host.lock is not None
    uv = host.lock.uv if host.lock.uv in host.wheels else None
    changed = {change.name for change in host.changes}
    request = {
        "op": "install",
        "environment": environment,
        "folder": folder,
        "base": host.base,
        "requirements": [wheel.pin for wheel in host.lock.wheels if wheel.name in changed],
        "uv": host.state.uv,
        "tool": uv.file if uv else "",
        "pip": host.lock.pip.file,
        "imports": [module for module, name in _MODULES.items() if name in host.lock.versions],
    }
    answer = agent.call("install", request, _INSTALL_TIMEOUT)
    if answer["error"]:
        raise SetupError(f"{label}: {answer['error']}")
    return _Result(answer["seconds"], answer["tool"], answer["cuda"])
