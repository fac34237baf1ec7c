"""``cluster.json``: who serves which parts, and the connections to them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ServiceError, SettingsError
from trainer.service.client import HostClient
from trainer.service.keys import CurveKeys
from trainer.service.protocol import HelloInfo


@dataclass(frozen=True)
class ClusterNode:
    """One node of the run."""

    node_rank: int
    host: str
    endpoint: str | None  #: of its graph server; None when it serves nothing
    parts: tuple[int, ...]
    ranks: tuple[int, ...]  #: of the trainer processes on it


@dataclass(frozen=True)
class Cluster:
    """All nodes of the run, as the launcher wrote them."""

    run_id: str
    num_parts: int
    nodes: tuple[ClusterNode, ...]

    def owner_of(self, part_ids: set[int]) -> ClusterNode | None:
        """The node whose parts are exactly these."""
        return next((node for node in self.nodes if set(node.parts) == part_ids), None)


def read_cluster(path: str | Path) -> Cluster:
    """Read ``cluster.json``. Raises ``SettingsError`` when it is missing, incomplete or contradicts itself."""
    try:
        raw = json.loads(Path(path).read_text())
        nodes = tuple(map(_node, raw["nodes"]))
        cluster = Cluster(str(raw["run_id"]), int(raw["num_parts"]), nodes)
    except OSError as error:
        raise SettingsError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SettingsError(f"cluster file {path} is not a cluster.json (docs/ARCHITECTURE.md): {error!r}") from None
    _check(path, cluster)
    return cluster


def _node(raw: Mapping[str, Any]) -> ClusterNode:
    endpoint = None if raw["endpoint"] is None else str(raw["endpoint"])
    parts, ranks = (tuple(int(item) for item in raw[key]) for key in ("parts", "ranks"))
    return ClusterNode(int(raw["node_rank"]), str(raw["host"]), endpoint, parts, ranks)


def _check(path: str | Path, cluster: Cluster) -> None:
    parts = sorted(part for node in cluster.nodes for part in node.parts)
    if parts != list(range(cluster.num_parts)):
        raise SettingsError(f"cluster file {path}: its nodes own parts {parts}; each of {cluster.num_parts} needs one")
    if len({node.node_rank for node in cluster.nodes}) != len(cluster.nodes):
        raise SettingsError(f"cluster file {path}: two nodes have the same node_rank")


def connect_cluster(
    path: str | Path,
    own_node_rank: int,
    manifest_digest: str,
    deadline: float,
    keys: CurveKeys | None = None,
    start_deadline: float | None = None,
) -> dict[int, HostClient]:
    """Clients of all other nodes that serve parts, by node_rank, each having said hello.

    A peer may start late, up to ``start_deadline`` seconds (default: ``deadline``); ``deadline`` is that
    of every later request. Raises ``ServiceError`` with one line per node that does not answer, holds
    another partition, or other parts.
    """
    peers = [node for node in read_cluster(path).nodes if node.node_rank != own_node_rank]
    clients = {
        node.node_rank: HostClient(node.endpoint, node.node_rank, node.host, node.parts, deadline, keys)
        for node in peers
        if node.endpoint is not None
    }
    problems = _greet(clients, manifest_digest, deadline if start_deadline is None else start_deadline)
    if problems:
        for client in clients.values():
            client.close()
        raise ServiceError("\n".join(problems))
    return clients


def _greet(clients: Mapping[int, HostClient], manifest_digest: str, deadline: float) -> list[str]:
    """What is wrong with each peer, within one deadline for all."""
    until = time.monotonic() + deadline
    hellos = [(client, client.submit_hello()) for client in clients.values()]
    problems = []
    for client, hello in hellos:
        try:
            problem = _differs(client, hello.result(max(0.0, until - time.monotonic())), manifest_digest)
        except ServiceError as error:
            problem = str(error)
        if problem:
            problems.append(problem)
    return problems


def _differs(client: HostClient, info: HelloInfo, manifest_digest: str) -> str:
    who = f"node{client.node_rank} ({client.host})"
    if info.node_rank != client.node_rank or set(info.part_ids) != set(client.part_ids):
        return (
            f"{who}: at {client.endpoint} answers node{info.node_rank} ({info.host}) with parts {list(info.part_ids)}; "
            f"cluster.json says node{client.node_rank} with parts {list(client.part_ids)}. Is it left from another run?"
        )
    if info.manifest_digest != manifest_digest:
        return (
            f"manifest.json of {who} differs: {info.manifest_digest[:12]} there, {manifest_digest[:12]} here; "
            "bring both nodes the same partition"
        )
    return ""
