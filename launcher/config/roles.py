"""Derives from a config which nodes hold parts, serve, train or act as clients."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.schema import ClusterConfig, NodeConfig
from launcher.errors import node_label
from trainer.core.train_config import TRACKERS


def host_key(config: ClusterConfig, node: NodeConfig) -> str:
    """Return a key that is equal for nodes with the same host name in the config."""
    return "local" if config.local else node.host.lower()


@dataclass(frozen=True)
class GraphServer:
    node_rank: int  #: in the serving cluster
    host: str
    endpoint: str  #: host:port at which clients reach it
    parts: tuple[int, ...]  #: ids of the parts it holds


def servers(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k in range(len(config.nodes)) if serves(config, k))


@dataclass(frozen=True)
class ServingCluster:
    """A running serving cluster to which a run attaches."""

    name: str
    num_parts: int
    servers: tuple[GraphServer, ...]
    encrypted: bool  #: whether its graph service uses TLS

    def label(self, server: GraphServer) -> str:
        """Return the server's name for messages, as ``node0 (g1) of products``."""
        return f"{node_label(server.node_rank, server.host)} of {self.name}"


@dataclass(frozen=True)
class HeldParts:
    parts: tuple[int, ...] = ()  #: all of them, ascending
    copies: tuple[int, ...] = ()  #: the replicas among ``parts``, whose first holder is another node


def store_packages(config: ClusterConfig) -> tuple[str, ...]:
    """Return the Python packages that nodes with parts need to read ``data.store``; () if it is not set."""
    if config.data.store is None:
        return ()
    from launcher.node.remote_folder import PACKAGES, scheme_of

    special = PACKAGES.get(scheme_of(config.data.store))
    return ("fsspec", special) if special else ("fsspec",)


def extra_packages(config: ClusterConfig, k: int) -> tuple[str, ...]:
    """Return the packages that node ``k`` needs for ``data.store``, ``train.track`` and ``run.prometheus``.

    Trackers are the work of the node with rank 0, which may be another one after a restart.
    """
    may_lead = k == lead(config) or (config.run.restarts and config.nodes[k].trains)
    return (
        *(store_packages(config) if config.nodes[k].holds else ()),
        *(TRACKERS[name].package.replace("-", "_") for name in config.train.track or () if may_lead),
        *(("prometheus_client",) if config.run.prometheus else ()),
    )


def device_packages(node: NodeConfig) -> tuple[str, ...]:
    """Return the packages with which the bundled trainer compiles kernels for the node's devices; () without any."""
    return ("numba_cuda",) if node.devices and node.trains else ()


def kernel_requirement(cuda: str) -> str:
    """Return what pip installs for kernels beside a torch for CUDA version ``cuda``, as ``numba-cuda[cu12]>=0.30``.

    '' for a CUDA version that numba-cuda does not support.
    """
    major = cuda.split(".")[0]
    return f"numba-cuda[cu{major}]>=0.30" if major in ("12", "13") else ""


def lead(config: ClusterConfig) -> int:
    """Return the node_rank of the lead node: the first node that trains, or 0 if none does.

    It hosts rank 0, the rendezvous of torch.distributed, and the control port to which all supervisors connect.
    """
    return next((k for k, node in enumerate(config.nodes) if node.trains), 0)


def trainers(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k, node in enumerate(config.nodes) if node.trains)


def clients(config: ClusterConfig) -> tuple[int, ...]:
    return tuple(k for k, node in enumerate(config.nodes) if node.role == "client")


def serves(config: ClusterConfig, k: int) -> bool:
    """Whether node ``k`` runs a graph server. A single worker reads all parts from its own disk instead."""
    node = config.nodes[k]
    return node.holds and (len(config.nodes) > 1 or not node.trains)


def gateways(config: ClusterConfig) -> tuple[int, ...]:
    """Return the node_ranks of the servers to which clients connect: ``role: server`` nodes, else all graph servers."""
    return tuple(k for k in servers(config) if config.nodes[k].role == "server") or servers(config)


def holdings(config: ClusterConfig) -> tuple[HeldParts, ...]:
    """Return the parts of each node.

    Each holder has one block of consecutive part ids. With ``data.replicas`` > 1, a holder also has copies of the
    blocks of the ``replicas - 1`` holders before it; before the first holder comes the last.
    """
    holders, num_parts = config.holders, config.num_parts
    blocks = [part_block(i, len(holders), num_parts) for i in range(len(holders))]
    found = {}
    for i, k in enumerate(holders):
        others = [blocks[(i - back) % len(holders)] for back in range(1, config.data.replicas)]
        copies = tuple(sorted(part for block in others for part in block))
        found[k] = HeldParts(tuple(sorted((*blocks[i], *copies))), copies)
    return tuple(found.get(k, HeldParts()) for k in range(len(config.nodes)))


def part_block(index: int, count: int, num_parts: int) -> tuple[int, ...]:
    """Split ``num_parts`` ids into ``count`` contiguous blocks of nearly equal size; return block ``index``."""
    return tuple(range(index * num_parts // count, (index + 1) * num_parts // count))
