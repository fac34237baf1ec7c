"""``Finding``, and ``Survey``: the replies of all nodes that findings are made from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import NodeCallError, NodeError, node_label


def connect_finding(config: ClusterConfig, node_rank: int, error: Exception) -> Finding:
    """Why a node cannot be worked with."""
    what, remedy = str(error), ""
    if isinstance(error, NodeError):
        what, remedy = error.message, error.remedy
    check = "python" if isinstance(error, NodeCallError) else "connect"
    return Finding(node_rank, config.nodes[node_rank].host, "block", check, what, remedy)


Severity = Literal["ok", "warn", "block"]


@dataclass(frozen=True)
class Finding:
    """One check on one node."""

    node_rank: int
    host: str
    severity: Severity
    check: str
    message: str
    remedy: str = ""  #: in words
    command: str = ""  #: shell line that repairs it when it runs on the node
    login: tuple[str, ...] = ()  #: words that lead there, as ("ssh", "alice@gnn2"); () on this machine

    def line(self) -> str:
        remedy = "; ".join(filter(None, [self.remedy, self.paste() and f"`{self.paste()}`"]))
        return f"{node_label(self.node_rank, self.host)}: {self.message}" + (f" – {remedy}" if remedy else "")

    def paste(self) -> str:
        """``command`` as it is run from here; '' without one."""
        if not self.command or not self.login:
            return self.command
        return f"{shlex.join(self.login)} {shlex.quote(self.command)}"


@dataclass(frozen=True)
class GraphSize:
    """As much of the graph as memory depends on."""

    nodes: int  #: vertices of all types
    row_bytes: float  #: attributes of one vertex, on the average


@dataclass(frozen=True)
class Survey:
    """All that the checks look at. ``probes`` are the replies of node/programs/probe.py by node_rank."""

    config: ResolvedConfig
    probes: Mapping[int, Mapping[str, Any]]
    clock_offsets: Mapping[int, float]
    own_command: bool = False
    bytes_needed: Mapping[int, int] = field(default_factory=dict)  #: what the plan stores on each node
    graph: GraphSize | None = None  #: None: not known yet
    code_digest: str = ""

    def host(self, node_rank: int) -> str:
        return self.config.nodes[node_rank].host

    def finding(
        self, node_rank: int, severity: Severity, check: str, message: str, remedy: str = "", command: str = ""
    ) -> Finding:
        login = login_words(self.config, self.config.nodes[node_rank]) if command else ()
        return Finding(node_rank, self.host(node_rank), severity, check, message, remedy, command, login)

    def version(self, node_rank: int, name: str) -> str:
        """'' when it is not installed, or not known."""
        return str(self.probes[node_rank]["versions"].get(name, ""))

    def machine(self, node_rank: int) -> tuple[str, str]:
        """Equal for nodes that share a machine."""
        probe = self.probes[node_rank]
        return probe["hostname"], probe["boot_id"]

    def housemates(self, node_rank: int) -> list[int]:
        """Nodes on this node's machine, itself included."""
        return self._machines[self.machine(node_rank)]

    @cached_property
    def _machines(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for k in sorted(self.probes):
            found.setdefault(self.machine(k), []).append(k)
        return found

    @cached_property
    def world_size(self) -> int:
        return self.config.world_size

    def labels(self, ranks: Sequence[int]) -> str:
        """``node1 (gnn2), node2 (gnn3)``; only a number when there are many."""
        if len(ranks) > 3:
            return f"{len(ranks)} nodes"
        return ", ".join(node_label(k, self.host(k)) for k in ranks)


def login_words(config: ClusterConfig, node: NodeConfig) -> tuple[str, ...]:
    """The ssh command of a node, as a person would type it."""
    if config.transport == "local":
        return ()
    port = ("-p", str(node.port)) if node.port else ()
    key = ("-i", node.key) if node.key else ()
    return ("ssh", *port, *key, f"{node.user}@{node.host}" if node.user else node.host)


def listed(words: Iterable[str]) -> str:
    return ", ".join(words)
