"""How much memory a node's share of a run takes."""

from __future__ import annotations

from launcher.config import ClusterConfig, TrainConfig
from launcher.findings.base import GraphSize

_MB = 10**6
# Private memory of our processes on a tiny graph, measured with torch 2.13.0+cpu and Python 3.11 on x86_64:
SUPERVISOR = 20 * _MB  #: with watch.py
AGENT = 150 * _MB  #: torch.distributed.run
SERVER = 130 * _MB  #: graph server
RANK = 340 * _MB  #: bundled trainer


def base_memory(config: ClusterConfig, node_rank: int, own_command: bool) -> int:
    """Bytes that the node's processes take at least. Of an own command nothing is known."""
    common = SUPERVISOR + AGENT + (SERVER if len(config.nodes) > 1 else 0)
    return common + (0 if own_command else RANK * config.nodes[node_rank].nproc)


def batch_memory(config: ClusterConfig, node_rank: int, graph: GraphSize | None, world_size: int) -> int:
    """Bytes of the batches that are prepared ahead, at most: as if a batch's vertices were all different."""
    if graph is None:
        return 0
    seeds = -(-config.train.batch_size // world_size)
    nodes = min(graph.nodes, seeds * _tree(config.train))
    ahead = config.train.prefetch + 2  # one being made, one being trained on
    return round(nodes * graph.row_bytes * ahead) * config.nodes[node_rank].nproc


def _tree(train: TrainConfig) -> int:
    """Vertices in one seed's tree; a fanout of -1 may reach all there are."""
    total = width = 1
    for fanout in train.fanouts:
        width *= fanout if fanout > 0 else 1 << 40
        total += width
    return total
