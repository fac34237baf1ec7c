"""Reads ``node.json``, the specification of one node for its supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from launcher.node import procs
from launcher.node.json_reader import read_json
from launcher.node.peers.model import Crew, PeerConfig


@dataclass(frozen=True)
class NodeSpec:
    """Content of ``node.json``. Its keys are described in docs/ARCHITECTURE.md, "Node run folder". Times are in
    seconds."""

    run_id: str
    token: str
    node_rank: int
    num_nodes: int
    run_dir: str
    ranks: tuple[int, ...]
    server: Mapping[str, Any] | None
    trainer: Mapping[str, Any] | None
    ready_file: str
    start_timeout: float
    grace: float
    control: Mapping[str, Any] | None = None
    peer_timeout: float = 6.0
    labels: tuple[str, ...] = ()
    leases: tuple[str, ...] = ()
    operator: str = ""
    on_stall: str = "stop"
    stall_after: float | str = "auto"
    on_nan: str = "warn"
    role: str = "worker"  #: worker, server or client
    roles: tuple[str, ...] = ()  #: of every node, by node_rank
    parts: tuple[tuple[int, ...], ...] = ()  #: part ids held by each node, by node_rank
    server_restarts: int = 3
    restarts: int = 0  #: how often the run may start again after a failure
    min_nodes: int = 1  #: training nodes that a restart needs
    lost_after: float = 60.0  #: seconds in which a node that was cut off tries to find the others again
    data_dir: str = ""  #: with restarts: the partition folder, if not sent by the launcher; may have all parts
    #: with restarts: host, address, bind, control_port, master_port and nproc of every node, by node_rank
    sites: tuple[Mapping[str, Any], ...] = ()
    generation: int = 0  #: number of the attempt; node.json describes the first one
    nodes: tuple[int, ...] = ()  #: node_ranks of the attempt; (): all nodes

    @staticmethod
    def read(path: str) -> NodeSpec:
        """Read ``node.json``, ignoring unknown keys. Raises SystemExit when it is missing or damaged."""
        try:
            values = read_json(path)
            if values is None:
                raise SystemExit(f"supervisor: no such file: {path}")
            known = {field.name: values[field.name] for field in fields(NodeSpec) if field.name in values}
            lists = {name: tuple(known.get(name, ())) for name in ("ranks", "labels", "leases", "roles", "sites")}
            parts = tuple(map(tuple, known.get("parts", ())))
            return NodeSpec(**{**known, **lists, "parts": parts})
        except (ValueError, TypeError) as error:
            raise SystemExit(f"supervisor: {path} is damaged ({error}); launch the run again") from None

    def environment(self, command: Mapping[str, Any], supervisor: str) -> dict[str, str]:
        """Return the environment of a process: variables of the supervisor, of ``command``, and of the run.

        Variables of ``command`` override those of the supervisor, and variables of the run override both. supervisor:
        ``pid:start_ticks`` of this supervisor.
        """
        return {
            **os.environ,
            **command.get("env", {}),
            procs.TOKEN: procs.node_token(self.token, self.node_rank),
            "GNNFLEET_RUN_ID": self.run_id,
            "GNNFLEET_RUN_DIR": self.run_dir,
            "GNNFLEET_GRACE": str(self.grace),
            "GNNFLEET_SUPERVISOR": supervisor,
            "GNNFLEET_SERVER_READY": self.ready_file if self.server is not None else "",
            "GNNFLEET_START_TIMEOUT": str(self.start_timeout),
            "NODE_RANK": str(self.node_rank),
        }

    @property
    def label(self) -> str:
        """Name of this node in messages: ``node1 (gpu2)``."""
        return self.all_labels[self.node_rank]

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Names of all nodes in messages, by node_rank; ``node<k>`` where node.json has none."""
        return self.labels or tuple(f"node{k}" for k in range(max(self.num_nodes, self.node_rank + 1)))

    @property
    def lead(self) -> int:
        return int(self.control.get("node_rank", 0)) if self.control else self.node_rank

    @property
    def active(self) -> tuple[int, ...]:
        """node_ranks of the nodes that take part in the attempt."""
        return self.nodes or tuple(range(self.num_nodes))

    def role_of(self, k: int) -> str:
        """Return worker, server or client; ``absent`` if node ``k`` does not take part in the attempt."""
        return self.roles[k] if self.roles else self.role

    def parts_of(self, k: int) -> tuple[int, ...]:
        return self.parts[k] if k < len(self.parts) else ()

    @property
    def peer_config(self) -> PeerConfig | None:
        """Address and timeouts of the connections to the other supervisors; None if the run has no other node."""
        if self.control is None:
            return None
        return PeerConfig(
            token=self.token,
            node_rank=self.node_rank,
            labels=self.all_labels,
            address=self.control["address"],
            bind=self.control["bind"],
            port=int(self.control["port"]),
            start_timeout=self.start_timeout,
            peer_timeout=self.peer_timeout,
            crew=Crew(self.lead, self.roles, self.parts),
            nodes=self.nodes or None,
            generation=self.generation,
            guests=self.restarts > 0,
        )
