"""Decides the topology of a run (``data.topology``): whether nodes have the edges of all parts or only of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.filesize import decimal

from launcher.config.roles import host_key
from launcher.config.schema import ClusterConfig
from launcher.plan.model import NodeFacts, NodePlan, Topology
from launcher.plan.partition import PartitionFiles
from launcher.text import count

_MOST = 4 * 10**9  #: limit of ``auto``: bytes of edges per host

_SHARE = 10  #: limit of ``auto``: edges may take 1/_SHARE of a host's memory

_MOST_FILES = 100_000  # limit of ``auto``: files sent to all nodes, which grow with the square of the number of nodes


def decide(
    config: ClusterConfig,
    nodes: Sequence[NodePlan],
    num_parts: int,
    manifest: PartitionFiles | None,
    facts: Mapping[int, NodeFacts],
) -> Topology:
    """Decide whether the topology is ``replicated`` or ``partitioned``; undecided while sizes are unknown.

    ``manifest``: files of the parts that the launching machine sends; None if they do not exist yet. If it sends no
    parts, as in mode ``verify``, the sizes are taken from ``facts``.
    """
    holders = [node for node in nodes if node.parts]
    if not holders or (len(nodes) == 1 and holders[0].role == "worker"):
        return Topology()
    # Bytes of the edges of all parts; 0 if unknown, or if the files of a node are incomplete.
    if config.makes_parts:
        found = manifest.topology_bytes if manifest else 0
    else:
        sizes = [facts[node.node_rank].topology_bytes for node in holders if node.node_rank in facts]
        found = max(sizes, default=0) if all(sizes) else 0
    if config.data.topology != "auto":
        return Topology(config.data.topology, "set by data.topology", found)
    if all(len(node.parts) == num_parts for node in holders):
        return Topology("partitioned", "auto: each node that holds parts has all of them", found)
    if not found:
        if config.makes_parts:
            return Topology("", "auto: decided when the parts exist")
        lacks = [node for node in holders if node.node_rank in facts and not facts[node.node_rank].topology_bytes]
        if not lacks:
            return Topology("", "auto: decided after preflight")
        why = f"auto: {lacks[0].label} does not have the edges of all parts in {lacks[0].data_dir}"
        return Topology("partitioned", why)
    files = manifest.topology_files * len(holders) if manifest else 0
    if files > _MOST_FILES:
        why = f"auto: sending the edges of all parts to all nodes would take {files:,} files"
        return Topology("partitioned", why, found)

    # Whether the edges fit on each host, beside those of its other nodes.
    hosts = {node.node_rank: config.nodes[node.node_rank] for node in holders}
    on_host = Counter(host_key(config, host) for host in hosts.values())
    why = f"auto: the edges of all parts take {decimal(found)}"
    for node in holders:
        host = hosts[node.node_rank]
        sharing = on_host[host_key(config, host)]
        needed = sharing * found
        each = f" for each of {count(sharing, 'node')} on {host.host}" if sharing > 1 else ""
        if needed > _MOST:
            return Topology("partitioned", f"{why}{each}; the limit is {decimal(_MOST)} per host", found)
        memory = facts[node.node_rank].memory if node.node_rank in facts else 0
        if memory and needed > memory // _SHARE:
            whose = f"more than a tenth of the memory of {node.label}, {decimal(memory)}"
            return Topology("partitioned", f"{why}{each}, {whose}", found)
    return Topology("replicated", why, found)
