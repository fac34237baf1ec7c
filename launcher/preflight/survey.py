"""``Inquiry``: the requests to ``node/programs/probe.py``; ``Survey``: the replies, which the checks evaluate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from launcher.config.resolve import ResolvedConfig
from launcher.config.roles import device_packages, extra_packages, holdings
from launcher.config.schema import node_workdir
from launcher.errors import node_label
from launcher.node.json_reader import read_json
from launcher.node.programs.packages import size_of
from launcher.plan.files import code_digest
from launcher.plan.placement import is_ip, run_dir, session_name
from launcher.plan.ports import candidate_ports
from launcher.preflight.finding import Finding, Severity
from launcher.transport import login_words


@dataclass(frozen=True)
class GraphSize:
    nodes: int  #: number of vertices of all types
    row_bytes: float  #: average bytes of one vertex's attributes


@dataclass(frozen=True)
class _LocalParts:
    """Fingerprint and size of the graph in the partition folder on the launching machine."""

    fingerprint: str
    graph: GraphSize


@dataclass(frozen=True)
class Inquiry:
    """Data for the requests of one preflight. Files on the launching machine are read once, for all nodes."""

    config: ResolvedConfig
    run_id: str = ""
    code: str = ""  #: digest of gnnfleet's code
    parts: _LocalParts | None = None  #: partition folder on the launching machine (mode ``sync``)
    all_devices: bool = False  #: also ask nodes without ``devices`` for GPUs

    @classmethod
    def about(cls, config: ResolvedConfig, run_id: str = "") -> Inquiry:
        """Create an Inquiry; reads gnnfleet's code and the partition manifest on the launching machine.

        ``run_id``: id of the run to be launched; nodes report whether they already have its run folder.
        """
        parts = None
        if config.makes_parts:
            missing_or_damaged = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError)
            with suppress(*missing_or_damaged):
                manifest = read_json(str(Path(config.data.folder).expanduser() / "manifest.json"))
                parts = _LocalParts(manifest["fingerprint"], _graph(size_of(manifest)))
        return cls(config, run_id, code_digest(), parts)

    def request(self, k: int, peer: str = "") -> dict[str, Any]:
        """Return the request to node ``k``.

        ``peer``: address of another node. A node that is reached over loopback reports from which of its addresses it
        would connect to ``peer``.
        """
        config, node, run_id = self.config, self.config.nodes[k], self.run_id
        local = "127.0.0.1" if config.local else ""
        workdir, parts = node_workdir(node, k), node.data_folder or config.data.folder
        names = dict.fromkeys((config.run.master_addr, *(other.address for other in config.nodes)))
        return {
            "address": node.address or local,
            "peer": peer,
            "workdir": workdir,
            "run_dir": run_dir(workdir, run_id, k) if run_id else "",
            "session": session_name(run_id, k) if run_id else "",
            "ports": list(candidate_ports(config, k)),
            "manifest": f"{parts}/manifest.json" if config.data.mode == "verify" and node.holds else "",
            "devices": bool(node.devices) or self.all_devices,
            "packages": [*extra_packages(config, k), *device_packages(node)],
            "names": [name for name in names if name and name != "auto" and not is_ip(name)],
            "code": self.code,
            "parts": f"{workdir}/data/{self.parts.fingerprint}" if self.parts and node.holds else "",
        }

    def survey(
        self,
        probes: Mapping[int, Mapping[str, Any]],
        clock_offsets: Mapping[int, float],
        own_command: bool = False,
        bytes_needed: Mapping[int, int] | None = None,
    ) -> Survey:
        """Build the ``Survey`` from the replies of all nodes.

        ``probes``: the replies, by node_rank. ``own_command``: whether the run starts a user's own command.
        ``bytes_needed``: bytes that the plan stores on each node.
        """
        graph = (
            self.parts.graph
            if self.parts
            else next((_graph(probe["graph"]) for probe in probes.values() if probe["graph"]), None)
        )
        return Survey(self.config, probes, clock_offsets, own_command, bytes_needed or {}, graph, self.code)


def _graph(found: Mapping[str, Any]) -> GraphSize:
    return GraphSize(found["nodes"], found["row_bytes"])


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
