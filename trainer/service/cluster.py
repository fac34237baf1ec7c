"""Reads ``cluster.json``, which lists the nodes and graph servers of a run, and connects to the graph servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from trainer.core.errors import ServiceError, SettingsError, first_wait
from trainer.core.files import read_json
from trainer.core.remote_settings import WireRows
from trainer.core.typed import convert
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.service_keys import ServiceKeys

_ROLES = ("worker", "server", "client")

_GLANCE = 0.1  #: seconds to wait for one server before the next one is checked

_FOR_COPIES = 3.0  #: seconds to wait for servers whose parts other nodes store too


@dataclass(frozen=True)
class ClusterNode:
    node_rank: int
    host: str
    role: str  #: worker: stores parts and trains; server: stores parts; client: trains
    endpoint: str | None  #: address of its graph server; None if it has none
    parts: tuple[int, ...]  #: parts on its disk; with replicas, several nodes store a part
    ranks: tuple[int, ...]  #: ranks of its trainer processes


@dataclass(frozen=True)
class Cluster:
    """The content of ``cluster.json``, which the launcher writes: nodes, parts and graph servers of a run."""

    run_id: str
    num_parts: int
    version: int  #: increases when servers are started again, as they may have another address then
    nodes: tuple[ClusterNode, ...]
    serving: str | None = None  #: name of the serving cluster that this run is attached to
    attached: tuple[ServerAddress, ...] = ()  #: graph servers of the serving cluster

    @cached_property
    def servers(self) -> tuple[ServerAddress, ...]:
        """The graph servers of this run in node order, or those of the serving cluster that the run is attached to."""
        if self.serving is not None:
            return self.attached
        return tuple(
            ServerAddress(f"node{node.node_rank} ({node.host})", node.node_rank, node.host, node.endpoint, node.parts)
            for node in self.nodes
            if node.endpoint is not None and node.parts
        )

    def node(self, node_rank: int) -> ClusterNode:
        for node in self.nodes:
            if node.node_rank == node_rank:
                return node
        known = ", ".join(str(node.node_rank) for node in self.nodes)
        raise SettingsError(
            f"run {self.run_id} has no node {node_rank}; its cluster.json lists {known}:"
            " set node_rank (NODE_RANK) to one of them"
        )

    def gateways(self) -> tuple[ServerAddress, ...]:
        """Return the graph servers that clients use: those of nodes with the role server, or else all."""
        only_serve = {node.node_rank for node in self.nodes if node.role == "server"}
        chosen = tuple(place for place in self.servers if place.node_rank in only_serve)
        return self.servers if self.serving is not None or not chosen else chosen

    def peers_of(self, node_rank: int) -> tuple[ServerAddress, ...]:
        """Return the graph servers of all nodes except ``node_rank``, or all servers of a serving cluster."""
        return tuple(place for place in self.servers if self.serving is not None or place.node_rank != node_rank)

    def home_of(self, node_rank: int) -> ServerAddress:
        """Return the home server of a client node. Raises ``SettingsError`` if there are no gateways."""
        gateways = self.gateways()
        if not gateways:
            raise SettingsError(f"run {self.run_id} has no graph server for the client node {node_rank}")
        clients = [node.node_rank for node in self.nodes if node.role == "client"]
        return gateways[clients.index(node_rank) % len(gateways)]

    def ranks_of_part(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks near each part, as one tuple per part.

        These are the ranks on nodes that store the part, and those on clients whose home server stores it.
        """
        near: list[list[int]] = [[] for _ in range(self.num_parts)]
        for node in self.nodes:
            for part in self.home_of(node.node_rank).parts if node.role == "client" else node.parts:
                near[part].extend(node.ranks)
        return tuple(map(tuple, near))


class _Attached(msgspec.Struct):
    node_rank: int
    host: str
    endpoint: str
    parts: tuple[int, ...]


class _Serving(msgspec.Struct):
    name: str
    servers: tuple[_Attached, ...]


class _Written(msgspec.Struct):
    """``cluster.json`` as it is written."""

    run_id: str
    num_parts: int
    nodes: tuple[dict[str, Any], ...]
    version: int = 1
    serving: _Serving | None = None


def read_cluster(path: str | Path) -> Cluster:
    """Read ``cluster.json``. Raises ``SettingsError`` if the file is missing, incomplete or contradicts itself."""
    try:
        raw = convert(read_json(Path(path)), _Written)
        nodes = convert([{"role": "worker", **node} for node in raw.nodes], tuple[ClusterNode, ...])
    except OSError as error:
        raise SettingsError(f"cluster file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"cluster file {path} is not a cluster.json (docs/ARCHITECTURE.md): {error}") from None
    name = raw.serving.name if raw.serving else ""
    attached = [
        ServerAddress(f"node{of.node_rank} ({of.host}) of {name}", of.node_rank, of.host, of.endpoint, of.parts, name)
        for of in (raw.serving.servers if raw.serving else ())
    ]
    cluster = Cluster(raw.run_id, raw.num_parts, raw.version, nodes, name or None, tuple(attached))
    if problem := _problem(cluster):
        raise SettingsError(f"cluster file {path}: {problem}")
    return cluster


def _problem(cluster: Cluster) -> str:
    nodes, attached = cluster.nodes, cluster.attached
    for numbers in ([node.node_rank for node in nodes], [place.node_rank for place in attached]):
        if len(set(numbers)) != len(numbers):
            return "two nodes have the same node_rank"
    for node in nodes:
        if node.role not in _ROLES:
            return f"node {node.node_rank} has role {node.role!r}; roles are {', '.join(_ROLES)}"
        if node.role == "client" and (node.parts or node.endpoint):
            return f"node {node.node_rank} is a client and cannot hold parts {list(node.parts)} or serve"
        if node.role == "server" and node.ranks:
            return f"node {node.node_rank} is a server and cannot have ranks {list(node.ranks)}"
    holders = [node.parts for node in nodes] + [place.parts for place in attached]
    held = {part for parts in holders for part in parts}
    if foreign := sorted(held - set(range(cluster.num_parts))):
        return f"its nodes have parts {foreign}, but num_parts is {cluster.num_parts}"
    if missing := sorted(set(range(cluster.num_parts)) - held):
        return f"no node has parts {missing} of {cluster.num_parts}"
    if any(node.role == "client" for node in cluster.nodes) and not cluster.servers:
        return "it has client nodes, but no graph server for them"
    return ""


def connect_cluster(
    path: str | Path, own_node_rank: int, manifest_digest: str, deadline: float, keys: ServiceKeys | None = None,
    start_deadline: float | None = None, wire_rows: WireRows = "stored",
) -> dict[int, HostClient]:  # fmt: skip
    """Connect to the graph servers of all other nodes. Returns a mapping from node rank to client.

    A server is needed if one of its parts is neither on this node nor on a server that has answered. Waits up to
    ``start_deadline`` seconds (default: ``deadline``) for needed servers, and up to ``_FOR_COPIES`` seconds for the
    others. ``deadline``: seconds that later replies may take. ``wire_rows``: dtype to which servers round
    floating-point rows for sending.

    Raises ``ServiceError`` with one line for each needed server that does not answer, and for each server that has
    other parts or another partition than expected.
    """
    cluster = read_cluster(path)
    own = {part for node in cluster.nodes if node.node_rank == own_node_rank for part in node.parts}
    peers = cluster.peers_of(own_node_rank)
    with contextlib.ExitStack() as closing:
        greeters = [HostClient(place, deadline, keys) for place in peers]
        for client in greeters:
            closing.callback(client.close)
        until = time.monotonic() + (deadline if start_deadline is None else start_deadline)
        problems = _greet(greeters, own, manifest_digest, until)
    if problems:
        raise ServiceError("\n".join(map(str, problems)), wait=first_wait(problems))
    return {
        place.node_rank: HostClient(place, deadline, keys, gone_after=GONE_AFTER, wire_rows=wire_rows)
        for place in peers
    }


def _greet(clients: Sequence[HostClient], own: set[int], manifest_digest: str, until: float) -> list[ServiceError]:
    """Send HELLO to all servers and wait for the replies, at most until ``time.monotonic()`` is ``until``.

    Returns an error for each server that has other parts or another partition than expected, and for each
    needed server that does not answer. A server is needed if one of its parts is neither in ``own``, the parts of this
    node, nor on a server that has answered.
    """
    enough_at = time.monotonic() + _FOR_COPIES
    hellos = {client: client.greet() for client in clients}
    problems: dict[HostClient, ServiceError | None] = {}
    while hellos:
        left = until - time.monotonic()
        for client, hello in list(hellos.items()):
            try:
                info = hello.result(max(0.0, min(left, _GLANCE)))
            except ServiceError as error:
                problems[client] = error
                continue
            del hellos[client]
            problem = hello_problem(client, info, manifest_digest)
            problems[client] = ServiceError(problem) if problem else None
        held = own.union(*(client.part_ids for client in clients if not problems[client]))
        dispensable = [client for client in hellos if held.issuperset(client.part_ids)]
        if len(dispensable) == len(hellos) and time.monotonic() >= min(enough_at, until):
            return [problem for client, problem in problems.items() if problem and client not in hellos]
        if left <= 0:
            break
    return [problem for problem in problems.values() if problem]


def hello_problem(client: HostClient, info: HelloInfo, manifest_digest: str) -> str:
    node = f"node{client.node_rank} ({client.host})"
    if info.node_rank != client.node_rank or set(info.part_ids) != set(client.part_ids):
        return (
            f"{node}: at {client.endpoint} answers node{info.node_rank} ({info.host}) with parts {list(info.part_ids)};"
            f" cluster.json says node{client.node_rank} with parts {list(client.part_ids)}. Is the port used by another"
            " run?"
        )
    if info.manifest_digest != manifest_digest:
        return (
            f"manifest.json of {node} differs: {info.manifest_digest[:12]} there, {manifest_digest[:12]} here; "
            "copy the same partition to both nodes"
        )
    return ""
