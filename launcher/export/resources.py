"""Processors and memory that an exported run asks for on each node, from cluster.yml or estimated from the plan."""

from __future__ import annotations

from launcher.config.cache_size import parse_bytes
from launcher.config.resolve import ResolvedConfig
from launcher.config.schema import NodeConfig
from launcher.plan.model import LaunchPlan
from launcher.plan.partition import PartitionFiles

_OF_RANK = 4 << 30  # bytes of a trainer process beside its parts: torch, its model, batches in flight

_OF_SERVER = 1 << 30


def cpus_of(node: NodeConfig, config: ResolvedConfig) -> int:
    """Return ``cpus`` of the node; by default the processes with their sampler threads, and two for a graph server."""
    return node.cpus or node.nproc * (config.train.sampler_threads + 1) + 2 * node.holds


def memory_of(k: int, config: ResolvedConfig, parts: PartitionFiles | None, plan: LaunchPlan) -> int:
    """Return the MiB that node ``k`` needs: ``memory`` of the node, else an estimate; 0 without known parts.

    The estimate counts the files of its parts, once, as the processes of a host share them, and its processes.
    """
    node = config.nodes[k]
    if node.memory is not None:
        return -(-parse_bytes(node.memory) >> 20)
    if parts is None:
        return 0
    files = parts.of_parts(plan.nodes[k].parts, replicated=plan.topology.replicated) if node.holds else ()
    used = sum(file.bytes for file in files) + node.nproc * _OF_RANK + node.holds * _OF_SERVER
    return -(-used >> 20)
