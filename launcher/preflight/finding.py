"""``Finding``, the result of one check, and ``Survey``, the answers of all nodes, which the checks evaluate."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import holdings
from launcher.config.schema import ClusterConfig
from launcher.errors import NodeCallError, NodeError, node_label
from launcher.transport import login_words


def connect_finding(config: ClusterConfig, node_rank: int, error: Exception) -> Finding:
    """Return the finding for a node that cannot be reached, or whose Python fails."""
    what, remedy, code = str(error), "", ""
    if isinstance(error, NodeError):
        what, remedy, code = error.message, error.remedy, error.code
    check = ("container" if code == "container" else "python") if isinstance(error, NodeCallError) else "connect"
    return Finding(node_rank, config.nodes[node_rank].host, "block", check, what, remedy, code=code)


Severity = Literal["ok", "warn", "block"]


@dataclass(frozen=True)
class Finding:
    """The result of one check on one node."""

    node_rank: int
    host: str
    severity: Severity
    check: str
    message: str
    remedy: str = ""  #: what the user can do, as text
    command: str = ""  #: shell command that fixes it when run on the node
    login: tuple[str, ...] = ()  #: argv that logs in to the node, as ("ssh", "alice@gnn2"); () for transport ``local``
    code: str = ""  #: of its explanation (``gnnfleet explain CODE``)
    held_by: str = ""  #: the run that uses what is needed, or waits for it: a launch with --wait waits for that run

    def line(self) -> str:
        """Return the finding as one line of text: node, message, remedy and command."""
        remedy = "; ".join(filter(None, [self.remedy, self.paste() and f"`{self.paste()}`"]))
        return f"{node_label(self.node_rank, self.host)}: {self.message}" + (f" – {remedy}" if remedy else "")

    def paste(self) -> str:
        """Return a shell line that runs ``command`` on the node, over SSH if needed; '' without ``command``."""
        if not self.command or not self.login:
            return self.command
        return f"{shlex.join(self.login)} {shlex.quote(self.command)}"


@dataclass(frozen=True)
class GraphSize:
    nodes: int  #: number of vertices of all types
    row_bytes: float  #: average bytes of one vertex's attributes


@dataclass(frozen=True)
class Survey:
    """The config and the answers of the nodes, for all checks. Keys are node_ranks of nodes that answered."""

    config: ResolvedConfig
    probes: Mapping[int, Mapping[str, Any]]  #: replies of ``node/programs/probe.py``
    clock_offsets: Mapping[int, float]  #: node's clock minus the launching machine's, seconds
    own_command: bool = False  #: the run starts a user's command instead of the bundled trainer
    bytes_needed: Mapping[int, int] = field(default_factory=dict)  #: bytes that the plan stores on each node
    graph: GraphSize | None = None  #: None: unknown
    code_digest: str = ""  #: digest of gnnfleet's code

    def host(self, node_rank: int) -> str:
        return self.config.nodes[node_rank].host

    def finding(
        self,
        node_rank: int,
        severity: Severity,
        check: str,
        message: str,
        remedy: str = "",
        command: str = "",
        code: str = "",
        held_by: str = "",
    ) -> Finding:
        login = login_words(self.config, self.config.nodes[node_rank]) if command else ()
        return Finding(node_rank, self.host(node_rank), severity, check, message, remedy, command, login, code, held_by)

    def version(self, node_rank: int, name: str) -> str:
        """Return the version of package ``name`` on a node; '' if it is not installed or its version is unknown."""
        return str(self.probes[node_rank]["versions"].get(name, ""))

    def python(self, node_rank: int) -> str:
        """Return the path of the node's Python on which the run depends; inside of ``wrap``, if the node has it."""
        probe = self.probes[node_rank]
        return f"{probe['inside']['python']} in the container" if "inside" in probe else str(probe["python"])

    def machine(self, node_rank: int) -> tuple[str, str]:
        """Return host name and boot id of a node's machine; they are equal for nodes on the same machine."""
        probe = self.probes[node_rank]
        return probe["hostname"], probe["boot_id"]

    def same_machine(self, node_rank: int) -> list[int]:
        """Return the node_ranks of all nodes on the machine of node ``node_rank``, including ``node_rank``."""
        return self._machines[self.machine(node_rank)]

    @cached_property
    def _machines(self) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for k in sorted(self.probes):
            found.setdefault(self.machine(k), []).append(k)
        return found

    @cached_property
    def parts_held(self) -> tuple[int, ...]:
        """The number of parts that each node of the config holds, by node_rank."""
        return tuple(len(held.parts) for held in holdings(self.config))

    @cached_property
    def devices_take_equal_shares(self) -> bool:
        """Whether some node trains on devices, and all nodes that train have the same ``batch_share``."""
        training = [node for node in self.config.nodes if node.trains]
        return len({node.batch_share for node in training}) == 1 and any(node.devices for node in training)

    @cached_property
    def world_size(self) -> int:
        return self.config.world_size

    def labels(self, ranks: Sequence[int]) -> str:
        """Return the names of nodes: ``node1 (gnn2), node2 (gnn3)``, or ``4 nodes`` for more than three."""
        if len(ranks) > 3:
            return f"{len(ranks)} nodes"
        return ", ".join(node_label(k, self.host(k)) for k in ranks)
