"""Examines all hosts at once: Pythons with torch, GPUs, shared folders."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.command import Command, quote
from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import node_workdir
from launcher.errors import FleetError, NodeError, TransportError
from launcher.init.request import InitRequest
from launcher.preflight.check_packages import OLDEST_PYTHON, PACKAGES, RULES, leading
from launcher.preflight.preflight import open_agents
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent, program_source

_SECONDS = 120.0  # Pythons on a slow network disk

#: Behind what PATH has: a machine may have no Python but that of a conda or of ours.
_PATH = 'export PATH="$PATH:' + ":".join(
    [f"$HOME/{name}/bin" for name in ("gnnfleet-venv", "miniconda3", "miniforge3", "anaconda3", "mambaforge")]
    + ["/opt/conda/bin", "/opt/miniconda3/bin", "/usr/local/bin"]
) + '"'  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """A Python on a host, as a cluster.yml names it."""

    key: str  #: venv, conda or python
    path: str
    versions: Mapping[str, str]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Packages that the bundled trainer needs and that are not there."""
        return tuple(name for name in PACKAGES if not self.versions.get(name))

    @property
    def complete(self) -> bool:
        return not self.lacking and self.numbers("python", 2) >= OLDEST_PYTHON

    @property
    def alike(self) -> tuple[str, ...]:
        """What must be equal on all nodes."""
        return tuple(
            leading(self.versions.get(rule.name, ""), rule.numbers)
            for rule in RULES
            if rule.numbers and not rule.devices
        )

    def numbers(self, package: str, count: int = 3) -> tuple[int, ...]:
        words = leading(self.versions.get(package, ""), count).split(".")
        return tuple(int(word) for word in words if word.isdigit())


@dataclass(frozen=True)
class Gpu:
    """A device as nvidia-smi shows it; memory in MiB."""

    index: int
    name: str
    memory: int
    used: int
    mig: bool


@dataclass(frozen=True)
class HostFacts:
    """What one host has."""

    environments: tuple[Environment, ...]
    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int  #: bytes
    home: str
    shares: tuple[str, ...]


@dataclass(frozen=True)
class Discovery:
    """All hosts by their place in the list: what they have, or why that is not known."""

    looks: Mapping[int, HostFacts]
    errors: Mapping[int, NodeError]
    shared: tuple[str, ...] = ()  #: folders that are one on all hosts of ``looks``
    shared_here: tuple[str, ...] = ()  #: those of them that are the same folder on this machine


def discover(
    request: InitRequest, config: ResolvedConfig, opened: Mapping[int, Transport | TransportError]
) -> Discovery:
    """Ask every host that has a line, at once. Raises nothing for a host that fails."""
    lines = {k: line for k, line in opened.items() if isinstance(line, Transport)}
    with open_agents() as agents:

        def ask(k: int) -> HostFacts:
            agents[k] = NodeAgent(lines[k], _python(request))
            return _host_facts(request, config, k, agents[k])

        answers = on_nodes(lines, ask, timeout=_SECONDS)
        errors: dict[int, Exception] = {k: line for k, line in opened.items() if isinstance(line, TransportError)}
        errors |= answers.errors
        working = {k: agents[k] for k in sorted(answers.values)}
        shared, here = _shared(answers.values, working)
    return Discovery(
        {k: answers.values[k] for k in sorted(answers.values)},
        {k: _told(errors[k]) for k in sorted(errors)},
        shared,
        here,
    )


def _told(error: Exception) -> NodeError:
    """An error that is not a user's is a mistake of ours, and must not pass for a host's."""
    if isinstance(error, NodeError):
        return error
    if isinstance(error, FleetError | TimeoutError):
        return NodeError(f"it does not answer ({error})", remedy="look whether a disk or network folder hangs there")
    raise error


def _python(request: InitRequest) -> Command:
    """The Python that looks; any will do, the one that trains is found by it."""
    if request.local:
        return Command((sys.executable,))
    folders = [f"{text.rstrip('/')}/bin" for text in (request.venv, request.conda) if text and "/" in text]
    given = [f'export PATH="$PATH":{quote(folder)}' for folder in folders]
    return Command((request.python or "python3",), setup=(_PATH, *given))


def _host_facts(request: InitRequest, config: ResolvedConfig, k: int, agent: NodeAgent) -> HostFacts:
    there = agent.call("probe", _probe_request(config, k), _SECONDS)
    given = [text for text in request.environment.values() if "/" in text]
    query = {
        "packages": program_source("packages"),
        "given": [*given, *([sys.executable] if request.local else [])],
        "shared": [request.shared] if request.shared else [],
    }
    found = agent.call("environments", query, _SECONDS)
    return HostFacts(
        environments=tuple(Environment(**one) for one in found["environments"]),
        gpus=tuple(Gpu(**{name: one[name] for name in Gpu.__dataclass_fields__}) for one in there["gpus"]),
        cpus=there["cpus"],
        memory=there["memory_limit"],
        home=there["home"],
        shares=tuple(found["shares"]),
    )


def _probe_request(config: ResolvedConfig, k: int) -> dict[str, Any]:
    return {
        "address": "", "peer": "", "workdir": node_workdir(config.nodes[k], k), "run_dir": "", "session": "",
        "ports": [], "manifest": "", "devices": True,
    }  # fmt: skip


# -- shared folders ------------------------------------------------------


def _shared(looks: Mapping[int, HostFacts], agents: Mapping[int, NodeAgent]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(folders that are one on all hosts, those that are so on this machine as well)."""
    if len(agents) < 2:
        return (), ()
    first, *others = agents
    names = [folder for folder in looks[first].shares if all(folder in looks[k].shares for k in others)]
    found = {folder: _is_one(folder, agents, first, others) for folder in names}
    return tuple(name for name in names if found[name][0]), tuple(name for name in names if all(found[name]))


def _is_one(folder: str, agents: Mapping[int, NodeAgent], first: int, others: Sequence[int]) -> tuple[bool, bool]:
    """Whether a file that one host writes is there on all others; and here."""
    name = f".gnnfleet-{secrets.token_hex(8)}"

    def ask(op: str, k: int) -> dict[str, Any]:
        reply: dict[str, Any] = agents[k].call("folders", {"op": op, "folder": folder, "name": name}, _SECONDS)
        return reply

    try:
        if not ask("write", first)["written"]:
            return False, False
        seen = on_nodes(others, lambda k: ask("look", k)["seen"], timeout=_SECONDS)
        here = os.path.exists(os.path.join(folder, name))
        ask("remove", first)
    except NodeError:
        return False, False
    return not seen.errors and all(seen.values.values()), here
