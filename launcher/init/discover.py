"""Finds Pythons with torch, GPUs and shared folders on all hosts in parallel."""

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
from launcher.node.programs.packages import PACKAGES
from launcher.plan.placement import ANY_PYTHON, MORE_PYTHONS
from launcher.preflight.check_packages import OLDEST_PYTHON, RULES, leading
from launcher.preflight.preflight import open_agents
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent, program_source

_TIMEOUT = 120.0  # seconds; Python starts slowly from a network disk


@dataclass(frozen=True)
class Environment:
    key: str  #: key of a node in cluster.yml: venv, conda or python
    path: str
    versions: Mapping[str, str]  #: package → version, "" if missing; also python and cuda

    @property
    def lacking(self) -> tuple[str, ...]:
        """Packages that the bundled trainer needs and the environment lacks."""
        return tuple(name for name in PACKAGES if not self.versions.get(name))

    @property
    def complete(self) -> bool:
        return not self.lacking and self.numbers("python", 2) >= OLDEST_PYTHON

    @property
    def matched_versions(self) -> tuple[str, ...]:
        """The leading numbers of each package version that must agree on all nodes, such as torch's."""
        return tuple(
            leading(self.versions.get(rule.name, ""), rule.numbers)
            for rule in RULES
            if rule.numbers and not rule.devices
        )

    def numbers(self, package: str, count: int = 3) -> tuple[int, ...]:
        """Return the first ``count`` numbers of a package's version; () if it is missing."""
        words = leading(self.versions.get(package, ""), count).split(".")
        return tuple(int(word) for word in words if word.isdigit())


@dataclass(frozen=True)
class Gpu:
    index: int  #: CUDA id
    name: str
    memory: int  #: MiB
    used: int  #: MiB
    mig: bool  #: whether it is divided (MIG)


@dataclass(frozen=True)
class HostFacts:
    environments: tuple[Environment, ...]
    gpus: tuple[Gpu, ...]
    cpus: int
    memory: int  #: bytes
    home: str  #: path of the home folder
    shares: tuple[str, ...]  #: writable folders on network file systems, and the folder of --shared


@dataclass(frozen=True)
class Discovery:
    """Facts of each host, or the error of querying it. Keys are indices in ``InitRequest.hosts``."""

    facts: Mapping[int, HostFacts]
    errors: Mapping[int, NodeError]
    shared: tuple[str, ...] = ()  #: folders that all hosts of ``facts`` share
    shared_here: tuple[str, ...] = ()  #: those of ``shared`` that this machine shares, too


def discover(
    request: InitRequest, config: ResolvedConfig, opened: Mapping[int, Transport | TransportError]
) -> Discovery:
    """Query all connected hosts in parallel. Errors of a host are returned, not raised."""
    connections = {k: one for k, one in opened.items() if isinstance(one, Transport)}
    # Any version of Python will do: the query searches for the one to train with.
    folders = [f"{text.rstrip('/')}/bin" for text in (request.venv, request.conda) if text and "/" in text]
    given = [f'export PATH="$PATH":{quote(folder)}' for folder in folders]
    python = Command((request.python,) if request.python else ANY_PYTHON, setup=(MORE_PYTHONS, *given))
    if request.local:
        python = Command((sys.executable,))
    with open_agents() as agents:

        def query(k: int) -> HostFacts:
            agents[k] = NodeAgent(connections[k], python)
            return _host_facts(request, config, k, agents[k])

        answers = on_nodes(connections, query, timeout=_TIMEOUT)
        errors: dict[int, Exception] = {k: one for k, one in opened.items() if isinstance(one, TransportError)}
        errors |= answers.errors
        facts = {k: answers.values[k] for k in sorted(answers.values)}

        # Folders that all hosts share, and whether this machine shares them as well.
        found: dict[str, tuple[bool, bool]] = {}
        if len(facts) > 1:
            first, *others = facts
            for folder in facts[first].shares:
                if all(folder in facts[k].shares for k in others):
                    found[folder] = _is_shared(folder, agents, first, others)
    return Discovery(
        facts,
        {k: _node_error(errors[k]) for k in sorted(errors)},
        tuple(folder for folder, (by_all, _) in found.items() if by_all),
        tuple(folder for folder, seen in found.items() if all(seen)),
    )


def _node_error(error: Exception) -> NodeError:
    # Other exceptions are bugs of gnnfleet.
    if isinstance(error, NodeError):
        return error
    if isinstance(error, FleetError | TimeoutError):
        return NodeError(f"no answer ({error})", remedy="check whether a disk or network folder of the host hangs")
    raise error


def _host_facts(request: InitRequest, config: ResolvedConfig, k: int, agent: NodeAgent) -> HostFacts:
    asked = {"workdir": node_workdir(config.nodes[k], k), "ports": [], "devices": True}
    probed = agent.call(
        "probe", dict.fromkeys(("address", "peer", "run_dir", "session", "manifest"), "") | asked, _TIMEOUT
    )
    given = [text for text in request.environment.values() if "/" in text]
    query = {
        "packages": program_source("packages"),
        "given": [*given, *([sys.executable] if request.local else [])],
        "shared": [request.shared] if request.shared else [],
    }
    found = agent.call("environments", query, _TIMEOUT)
    return HostFacts(
        environments=tuple(Environment(**one) for one in found["environments"]),
        gpus=tuple(Gpu(**{name: one[name] for name in Gpu.__dataclass_fields__}) for one in probed["gpus"]),
        cpus=probed["cpus"],
        memory=probed["memory_limit"],
        home=probed["home"],
        shares=tuple(found["shares"]),
    )


def _is_shared(folder: str, agents: Mapping[int, NodeAgent], first: int, others: Sequence[int]) -> tuple[bool, bool]:
    """Write a file in ``folder`` on one host. Return whether all ``others`` see it, and whether this machine sees it.

    The file is removed at the end. ``first``: the host that writes it.
    """
    name = f".gnnfleet-{secrets.token_hex(8)}"

    def call(op: str, k: int) -> dict[str, Any]:
        reply: dict[str, Any] = agents[k].call("folders", {"op": op, "folder": folder, "name": name}, _TIMEOUT)
        return reply

    try:
        if not call("write", first)["written"]:
            return False, False
        seen = on_nodes(others, lambda k: call("look", k)["seen"], timeout=_TIMEOUT)
        here = os.path.exists(os.path.join(folder, name))
        call("remove", first)
    except NodeError:
        return False, False
    return not seen.errors and all(seen.values.values()), here
