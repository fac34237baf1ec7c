"""``node.json``, the specification of one node for its supervisor: the plan makes it, the supervisor reads it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from launcher.node.json_reader import read_json


@dataclass(frozen=True)
class RunNode:
    """What all nodes of a run know of each of them."""

    label: str  #: name in messages: ``node1 (gpu2)``
    role: str = "worker"  #: worker, server or client; "absent" if it takes no part in a later attempt
    ranks: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()  #: part ids that it holds
    address: str = ""  #: address at which other nodes reach it
    bind: str = ""  #: address on which its services listen
    control_port: int = 0  #: while it is the hub; 0 if it cannot be
    master_port: int = 0  #: while it has rank 0; 0 if it cannot


@dataclass(frozen=True)
class Crew:
    """The nodes of a run, and which of them the run can lose.

    The run can lose a server, except the lead node, as long as other nodes hold all its parts.
    """

    lead: int  #: node_rank of the hub
    nodes: Sequence[RunNode]  #: by node_rank

    def can_lose(self, k: int, gone: Collection[int] = ()) -> bool:
        """Whether the run can continue without node ``k``, given that the nodes ``gone`` are lost already."""
        if self.nodes[k].role != "server" or k == self.lead:
            return False
        # clients, if any, still need a server
        others = any(one.role == "server" and j != k and j not in gone for j, one in enumerate(self.nodes))
        served = others or all(one.role != "client" for one in self.nodes)
        return served and not self.last_copies(k, gone)

    def can_lose_all(self, nodes: Collection[int], gone: Collection[int] = ()) -> bool:
        """Whether the run can continue without any of ``nodes``, given that the nodes ``gone`` are lost already."""
        return all(self.can_lose(k, {*gone, *nodes} - {k}) for k in nodes)

    def spare(self, gone: Collection[int] = ()) -> list[int]:
        """Return each node whose loss alone would not end the run.

        gone: nodes that were lost earlier.
        """
        return [k for k in range(len(self.nodes)) if k not in gone and self.can_lose(k, gone)]

    def last_copies(self, k: int, gone: Collection[int] = ()) -> list[int]:
        """Return the parts of node ``k`` that no other node holds. gone: lost nodes, which do not count."""
        return [part for part in self.nodes[k].parts if all(j == k or j in gone for j in self._holders[part])]

    def served_by(self, k: int, gone: Collection[int]) -> list[int]:
        """Return the other nodes that hold any part of node ``k``, without those in ``gone``."""
        return sorted({j for part in self.nodes[k].parts for j in self._holders[part] if j != k and j not in gone})

    def held(self, k: int) -> str:
        """Return the parts of node ``k`` as text: ``parts 2, 3``."""
        return parts_words(self.nodes[k].parts)

    @cached_property
    def _holders(self) -> dict[int, list[int]]:
        """The nodes that hold each part, ascending, by part."""
        found: dict[int, list[int]] = {}
        for k, node in enumerate(self.nodes):
            for part in node.parts:
                found.setdefault(part, []).append(k)
        return found


def parts_words(parts: Collection[int]) -> str:
    """Return parts as text: ``part 2``, ``parts 2, 3``."""
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(map(str, sorted(parts)))}"


@dataclass(frozen=True)
class NodeSpec:
    """Content of ``node.json``. Its keys are described in docs/ARCHITECTURE.md, "Node run folder". Times are in
    seconds."""

    run_id: str
    token: str
    node_rank: int
    run_dir: str
    nodes: tuple[RunNode, ...]  #: all nodes of the run, by node_rank
    server: Mapping[str, Any] | None
    trainer: Mapping[str, Any] | None
    start_timeout: float
    grace: float
    hub: int = 0  #: node_rank of the lead node; if that has no control port, the supervisors do not connect
    master_addr: str = ""  #: ``run.master_addr``: address of rank 0, while the lead node has it; '' for the node's
    peer_timeout: float = 6.0
    leases: tuple[str, ...] = ()
    operator: str = ""
    on_stall: str = "stop"
    stall_after: float | str = "auto"
    on_nan: str = "warn"
    server_restarts: int = 3
    restarts: int = 0  #: how often the run may start again after a failure
    min_nodes: int = 1  #: training nodes that a restart needs
    lost_after: float = 60.0  #: seconds in which a node that was cut off tries to find the others again
    notify: tuple[str, ...] = ()  #: URLs and command lines that get messages about the run
    notify_on: tuple[str, ...] = ()  #: events about which there are messages; (): all
    prometheus: str = ""  #: folder of node_exporter's textfile collector; '' for none
    data_dir: str = ""  #: with restarts: the partition folder, if not sent by the launcher; may have all parts
    tracker: Mapping[str, Any] | None = None  #: sends the run to its trackers, if rank 0 is here
    queued_at: float = 0.0  #: when a run that waits for its leases was launched, seconds since the epoch; 0: no waiting
    wait_limit: float = 0.0  #: how long it waits at most; 0: as long as it takes
    epochs: int = 0  #: that the bundled trainer trains; 0: unknown
    generation: int = 0  #: number of the attempt; node.json describes the first one

    @staticmethod
    def read(path: str) -> NodeSpec:
        """Read ``node.json``, ignoring unknown keys. Raises SystemExit when it is missing or damaged."""
        try:
            values = read_json(path)
            if values is None:
                raise SystemExit(f"supervisor: no such file: {path}")
            nodes = tuple(RunNode(**_known(RunNode, one)) for one in values["nodes"])
            spec = NodeSpec(**{**_known(NodeSpec, values), "nodes": nodes})
            if not (0 <= spec.node_rank < len(nodes) and 0 <= spec.hub < len(nodes)):
                raise ValueError(f"there is no node {spec.node_rank} or {spec.hub}")
            return spec
        except (ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"supervisor: {path} is damaged ({error}); launch the run again") from None

    @property
    def ready_file(self) -> str:
        """File that the graph server writes when it is ready."""
        return f"{self.run_dir}/server.ready"

    @property
    def label(self) -> str:
        """Name of this node in messages: ``node1 (gpu2)``."""
        return self.nodes[self.node_rank].label

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of all nodes in messages, by node_rank."""
        return tuple(node.label for node in self.nodes)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.nodes[self.node_rank].ranks

    @property
    def hub_node(self) -> RunNode:
        return self.nodes[self.hub]

    @property
    def has_peers(self) -> bool:
        """Whether the supervisors connect to each other; false for a single node and for a serving cluster."""
        return self.hub_node.control_port > 0

    @cached_property
    def active(self) -> tuple[int, ...]:
        """node_ranks of the nodes that take part in the attempt."""
        return tuple(k for k, node in enumerate(self.nodes) if node.role != "absent")

    @property
    def members(self) -> tuple[int, ...]:
        """node_ranks of the active nodes that connect to the hub."""
        return tuple(k for k in self.active if k != self.hub)

    @cached_property
    def crew(self) -> Crew:
        return Crew(self.hub, self.nodes)


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the dataclass ``kind`` that a JSON object has, with tuples for lists."""
    found = {field.name: values[field.name] for field in fields(kind) if field.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
