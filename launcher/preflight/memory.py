"""How much memory a node's share of a run takes."""

from __future__ import annotations

from launcher.config.roles import clients, gateways, holdings, serves
from launcher.config.rowcache import CacheSize
from launcher.config.schema import ClusterConfig, TrainConfig
from launcher.preflight.finding import GraphSize

_MB = 10**6

# Private memory of our processes on a tiny graph, measured with torch 2.13.0+cpu and Python 3.11 on x86_64:
SUPERVISOR = 20 * _MB  #: with watch.py

RUNNER = 10 * _MB  #: of each rank

SERVER = 60 * _MB  #: graph server

RANK = 260 * _MB  #: bundled trainer


def base_memory(config: ClusterConfig, node_rank: int, own_command: bool) -> int:
    """Bytes that the node's processes take at least. Of an own command nothing is known."""
    node = config.nodes[node_rank]
    ranks = (RUNNER + (0 if own_command else RANK)) * node.nproc if node.trains else 0
    return SUPERVISOR + (SERVER if serves(config, node_rank) else 0) + ranks


def batch_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None, cpus: int) -> int:
    """Bytes of batches at most: those that ranks have prepared ahead, and those that a server makes and keeps for
    clients. ``cpus``: of the node."""
    alive = max(config.train.prefetch, config.train.sampler_threads + 1) + 1  # the one in use among them; one to spare
    found = _batch(config, graph) * alive * config.nodes[node_rank].nproc
    if clients(config) and node_rank in gateways(config):
        threads = cpus if config.run.server_threads == "auto" else config.run.server_threads
        found += config.run.server_buffer * _MB + _batch(config, graph) * threads
    return found


def cache_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None) -> int:
    """Bytes of other nodes' rows that a node keeps (``data.cache``): files of its run folder that its ranks map."""
    parts = len(holdings(config)[node_rank].parts)
    if graph is None or not parts or not config.nodes[node_rank].trains:
        return 0
    remote = graph.nodes * (1 - parts / config.num_parts)
    return CacheSize.parse(config.data.cache).of_rows(remote, graph.row_bytes)


def _batch(config: ClusterConfig, graph: GraphSize | None) -> int:
    """Bytes of a rank's batch at most: as if its vertices were all different; 0 where the graph is not known."""
    if graph is None or not config.world_size:
        return 0
    seeds = -(-config.train.batch_size // config.world_size)
    return round(min(graph.nodes, seeds * _tree(config.train)) * graph.row_bytes)


def _tree(train: TrainConfig) -> int:
    """Vertices in one seed's tree; a fanout of -1 may reach all there are."""
    total = width = 1
    for fanout in train.fanouts:
        width *= fanout if fanout > 0 else 1 << 40
        total += width
    return total
