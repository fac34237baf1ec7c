"""Finds out, on all hosts in parallel, which Pythons and packages they have and which hosts share an environment."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.utils import canonicalize_name

from launcher.command import Command
from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import NodeConfig
from launcher.errors import FleetError, NodeCallError, NodeError, node_label
from launcher.plan.placement import ANY_PYTHON, MORE_PYTHONS, interpreter
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import NodeAgent

TIMEOUT = 120.0  # seconds; Python starts slowly from a network disk


@dataclass(frozen=True)
class Interpreter:
    """A Python on a host that can make virtual environments."""

    program: str
    version: str  #: with three numbers

    @property
    def minor(self) -> str:
        return minor(self.version)


@dataclass(frozen=True)
class Installed:
    """The environment that a node uses."""

    kind: str  #: venv, conda, or python for one that belongs to the system
    prefix: str
    python: str  #: version with three numbers
    versions: Mapping[str, str]  #: by canonical name of the package
    unfinished: tuple[str, ...]  #: packages whose installation was interrupted; ("?",): unknown which
    cuda: str  #: CUDA that torch is built for; '' without


@dataclass(frozen=True)
class HostState:
    """Properties of a node's host: its environment, Pythons, tools and GPUs."""

    node_rank: int
    label: str
    environment: str  #: folder to make or repair; '' if the cluster file names no environment
    home: str
    arch: str
    glibc: str
    pythons: tuple[Interpreter, ...]  #: empty if the environment exists
    uv: str  #: path of uv; '' without
    gpus: int
    driver: str
    tmux: bool
    tmux_line: str  #: command that installs tmux; '' if unknown
    exists: bool  #: whether something is at the path of the environment
    error: str  #: why the environment cannot be written; ''
    in_use: tuple[str, ...]  #: processes that run the environment's Python
    installed: Installed | None  #: None: there is no environment yet
    builder: int  #: lowest node_rank of those that see the same folder: its node makes or repairs the environment


def minor(version: str) -> str:
    """Return the first two numbers of a version."""
    return ".".join(version.split(".")[:2])


def base_python(config: ResolvedConfig, k: int) -> Command:
    """Return the command that starts a Python, 3.8 or newer, on a node."""
    if config.local:
        return Command((sys.executable,))
    return Command(ANY_PYTHON, setup=(*config.nodes[k].setup, MORE_PYTHONS))


def survey_hosts(
    config: ResolvedConfig, transports: Mapping[int, Transport], agents: dict[int, NodeAgent]
) -> tuple[dict[int, HostState], dict[int, NodeError]]:
    """Query all connected nodes; returns states and errors by node_rank. Adds an open agent per node to ``agents``."""

    def query(k: int) -> dict[str, Any]:
        """Return the reply of ``host_survey.py``, and as "installed" that of ``install.py`` from the node's Python.

        "installed" is None if this Python is missing or fails.
        """
        agents[k] = NodeAgent(transports[k], base_python(config, k))
        folder = _folder(config.nodes[k])
        facts: dict[str, Any] = agents[k].call("host_survey", {"op": "survey", "environment": folder}, TIMEOUT)
        facts["installed"] = None
        if not folder or facts["usable"]:
            try:
                with NodeAgent(transports[k], interpreter(config, k)) as own:
                    facts["installed"] = own.call("install", {"op": "installed"}, TIMEOUT)
            except NodeCallError as error:
                facts["error"] = facts["error"] or f"its Python fails: {error.message}"
        return facts

    answers = on_nodes(transports, query, timeout=TIMEOUT)
    errors: dict[int, NodeError] = {}
    for k, error in answers.errors.items():
        if isinstance(error, NodeError):
            errors[k] = error
        elif isinstance(error, FleetError | TimeoutError):
            text, remedy = f"no answer ({error})", "check whether a disk hangs"
            errors[k] = NodeError(text, host=config.nodes[k].host, node_rank=k, remedy=remedy)
        else:  # a bug of gnnfleet
            raise error

    found = {k: answers.values[k] for k in sorted(answers.values)}
    builders, states = _builders(found, agents), {}
    for k, facts in found.items():
        installed, there = None, facts["installed"]
        if there is not None:
            versions = {str(canonicalize_name(name)): version for name, version in there["versions"].items()}
            unfinished = tuple(str(canonicalize_name(name)) if name != "?" else name for name in there["unfinished"])
            installed = Installed(there["kind"], there["prefix"], there["python"], versions, unfinished, there["cuda"])
        node, of_installed = config.nodes[k], installed.prefix if installed and installed.kind != "python" else ""
        names = ("home", "arch", "glibc", "uv", "gpus", "driver", "tmux", "tmux_line", "exists", "error")
        states[k] = HostState(
            node_rank=k,
            label=node_label(k, node.login),
            environment=_folder(node) or of_installed,
            pythons=tuple(Interpreter(**one) for one in facts["pythons"]),
            in_use=tuple(facts["in_use"]),
            installed=installed,
            builder=builders[k],
            **{name: facts[name] for name in names},
        )
    return states, errors


def _folder(node: NodeConfig) -> str:
    """The folder of the node's environment as the cluster file names it; '' for a conda environment given by name."""
    path = node.venv or (node.conda if node.conda and "/" in node.conda else "")
    return path.rstrip("/") if path else ""


def _builders(found: Mapping[int, dict[str, Any]], agents: Mapping[int, NodeAgent]) -> dict[int, int]:
    """Return for each node the lowest node_rank of the nodes that share the folder of its environment.

    To find out, each node makes a file in the folder, and lists the files that the other nodes made.
    """
    prefix = f".gnnfleet-setup-{secrets.token_hex(6)}-"
    ranks = [k for k in found if found[k]["path"]]
    if len(ranks) < 2:
        return {k: k for k in found}

    def mark(k: int) -> None:
        agents[k].call("host_survey", {"op": "mark", "environment": found[k]["path"], "name": f"{prefix}{k}"}, TIMEOUT)

    def seen(k: int) -> list[int]:
        reply = agents[k].call(
            "host_survey", {"op": "marks", "environment": found[k]["path"], "prefix": prefix}, TIMEOUT
        )
        return [int(name[len(prefix) :]) for name in reply["names"]]

    on_nodes(ranks, mark, timeout=TIMEOUT)
    others = on_nodes(ranks, seen, timeout=TIMEOUT).values
    on_nodes(ranks, lambda k: agents[k].call("host_survey", {"op": "unmark"}, TIMEOUT), timeout=TIMEOUT)
    same = {k: [j for j in others.get(k, []) if found[j]["path"] == found[k]["path"]] for k in found}
    return {k: min([k, *same[k]]) for k in found}
