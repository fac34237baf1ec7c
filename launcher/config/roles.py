"""Roles of nodes: which nodes hold parts, serve, train, or ask which server. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import node_label


def host_key(config: ClusterConfig, node: NodeConfig) -> str:
    """Equal for nodes that share a machine, as far as the config shows."""
    return "local" if config.transport == "local" else node.host.lower()


@dataclass(frozen=True)
class GraphServer:
    """One server of a serving cluster, as its clients reach it."""

    node_rank: int  #: in the serving cluster
    host: str
    endpoint: str
    parts: tuple[int, ...]


def servers(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k in range(len(config.nodes)) if serves(config, k))


@dataclass(frozen=True)
class ServingCluster:
    """A serving cluster that runs already, for a run that attaches to it."""

    name: str
    num_parts: int
    servers: tuple[GraphServer, ...]
    encrypted: bool

    def label(self, server: GraphServer) -> str:
        """``node0 (g1) of products``."""
        return f"{node_label(server.node_rank, server.host)} of {self.name}"


@dataclass(frozen=True)
class Held:
    """Parts that one node holds, ascending."""

    parts: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()  #: of these, the ones that another node holds in the first place


def lead(config: ClusterConfig) -> int:
    """The node of rank 0, where torch.distributed and the supervisors meet; node 0 where nothing trains."""
    return next((k for k, node in enumerate(config.nodes) if node.trains), 0)


def trainers(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k, node in enumerate(config.nodes) if node.trains)


def clients(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k, node in enumerate(config.nodes) if node.role == "client")


def serves(config: ClusterConfig, k: int) -> bool:
    """Whether node ``k`` runs a graph server; the only node of a run reads all parts from its own disk."""
    node = config.nodes[k]
    return node.holds and (len(config.nodes) > 1 or not node.trains)


def gateways(config: ClusterConfig) -> tuple[int, ...]:
    """Whom clients ask: nodes that do nothing but serve, or all that serve where there are none of those."""
    return tuple(k for k in servers(config) if config.nodes[k].role == "server") or servers(config)


def holdings(config: ClusterConfig) -> tuple[Held, ...]:
    """What each node holds: its own block of parts, and copies of the blocks of the holders before it."""
    holders, num_parts = config.holders, config.num_parts
    blocks = [part_block(i, len(holders), num_parts) for i in range(len(holders))]
    found = {}
    for i, k in enumerate(holders):
        others = [blocks[(i - back) % len(holders)] for back in range(1, config.data.replicas)]
        copies = tuple(sorted(part for block in others for part in block))
        found[k] = Held(tuple(sorted((*blocks[i], *copies))), copies)
    return tuple(found.get(k, Held()) for k in range(len(config.nodes)))


def part_block(index: int, count: int, num_parts: int) -> tuple[int, ...]:
    """Contiguous, balanced part ids of one among ``count`` holders."""
    return tuple(range(index * num_parts // count, (index + 1) * num_parts // count))
