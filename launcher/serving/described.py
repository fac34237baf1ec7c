"""``cluster.json`` of a serving cluster, as the launcher reads and writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from launcher.config.roles import GraphServer
from launcher.errors import FleetError, node_label
from launcher.words import count, spans


@dataclass(frozen=True)
class Described:
    """A serving cluster as the newest ``cluster.json`` on its nodes has it."""

    name: str
    version: int  #: rises whenever nodes join or leave
    num_parts: int
    servers: tuple[GraphServer, ...]

    @property
    def words(self) -> str:
        """``3 servers, 4 parts``."""
        return f"{count(len(self.servers), 'server')}, {count(self.num_parts, 'part')}"

    def label(self, server: GraphServer) -> str:
        """``node1 (gnn2)``."""
        return node_label(server.node_rank, server.host)

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {**asdict(self), "servers": [asdict(server) for server in self.servers]}


def read_described(text: str, where: str) -> Described:
    """From the text of a ``cluster.json``; ``where`` it was found is for the FleetError when it is none."""
    try:
        raw: Mapping[str, Any] = json.loads(text)
        servers = tuple(_server(node) for node in raw["nodes"] if node["endpoint"] and node["parts"])
        return Described(str(raw["run_id"]), int(raw.get("version", 1)), int(raw["num_parts"]), servers)
    except (ValueError, KeyError, TypeError) as error:
        raise FleetError(f"{where}: cluster.json is damaged ({error!r})") from None


def _server(node: Mapping[str, Any]) -> GraphServer:
    parts = tuple(map(int, node["parts"]))
    return GraphServer(int(node["node_rank"]), str(node["host"]), str(node["endpoint"]), parts)


def server_lines(cluster: Described) -> list[str]:
    """A line for each server: who, where, which parts."""
    width = max((len(cluster.label(server)) for server in cluster.servers), default=0)
    return [
        f"  {cluster.label(server):{width}}  {server.endpoint}  {parts_words(server.parts)}"
        for server in cluster.servers
    ]


def parts_words(parts: tuple[int, ...]) -> str:
    """``parts 0–2, 5``; ``no parts``."""
    return f"{'part' if len(parts) == 1 else 'parts'} {spans(parts)}" if parts else "no parts"
