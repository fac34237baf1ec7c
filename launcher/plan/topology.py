"""Decides the topology of a run (``data.topology``): whether nodes have the edges of all parts or only of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal

from launcher.config.roles import host_key
from launcher.config.schema import ClusterConfig
from launcher.errors import node_label
from launcher.plan.model import Topology
from launcher.plan.partition import PartitionFiles
from launcher.plan.placement import Site
from launcher.text import count

if TYPE_CHECKING:
    from launcher.plan.model import NodeFacts

MOST = 4 * 10**9  #: limit of ``auto``: bytes of edges per host

SHARE = 10  #: limit of ``auto``: edges may take 1/SHARE of a host's memory

MOST_FILES = 100_000  #: limit of ``auto``: files sent to all nodes, which grow with the square of the number of nodes


def decide(
    config: ClusterConfig,
    sites: Sequence[Site],
    num_parts: int,
    manifest: PartitionFiles | None,
    facts: Mapping[int, NodeFacts],
) -> Topology:
    """Decide whether the topology is ``replicated`` or ``partitioned``; undecided while sizes are unknown.

    ``manifest``: files of the parts that the launching machine sends; None if they do not exist yet. If it sends no
    parts, as in mode ``verify``, the sizes are taken from ``facts``.
    """
    holders = [site for site in sites if site.parts]
    if not holders or (len(sites) == 1 and holders[0].node.role == "worker"):
        return Topology()
    found = _bytes_known(config, holders, manifest, facts)
    if config.data.topology != "auto":
        return Topology(config.data.topology, "set by data.topology", found)
    if all(len(site.parts) == num_parts for site in holders):
        return Topology("partitioned", "auto: each node that holds parts has all of them", found)
    if not found:
        return _unknown(config, holders, facts)
    files = manifest.topology_files * len(holders) if manifest else 0
    if files > MOST_FILES:
        why = f"auto: sending the edges of all parts to all nodes would take {files:,} files"
        return Topology("partitioned", why, found)
    return _by_size(config, holders, found, facts)


def _bytes_known(
    config: ClusterConfig, holders: Sequence[Site], manifest: PartitionFiles | None, facts: Mapping[int, NodeFacts]
) -> int:
    """Return the bytes of the edges of all parts; 0 if unknown, or if the files of a node are incomplete."""
    if config.makes_parts:
        return manifest.topology_bytes if manifest else 0
    sizes = [facts[site.node_rank].topology_bytes for site in holders if site.node_rank in facts]
    return max(sizes, default=0) if all(sizes) else 0


def _unknown(config: ClusterConfig, holders: Sequence[Site], facts: Mapping[int, NodeFacts]) -> Topology:
    if config.makes_parts:
        return Topology("", "auto: decided when the parts exist")
    lacks = [site for site in holders if site.node_rank in facts and not facts[site.node_rank].topology_bytes]
    if not lacks:
        return Topology("", "auto: decided after preflight")
    label = node_label(lacks[0].node_rank, lacks[0].node.host)
    return Topology("partitioned", f"auto: {label} does not have the edges of all parts in {lacks[0].data_dir}")


def _by_size(config: ClusterConfig, holders: Sequence[Site], size: int, facts: Mapping[int, NodeFacts]) -> Topology:
    on_host = Counter(host_key(config, site.node) for site in holders)
    why = f"auto: the edges of all parts take {decimal(size)}"
    for site in holders:
        nodes = on_host[host_key(config, site.node)]
        needed = nodes * size
        each = f" for each of {count(nodes, 'node')} on {site.node.host}" if nodes > 1 else ""
        if needed > MOST:
            return Topology("partitioned", f"{why}{each}; the limit is {decimal(MOST)} per host", size)
        memory = facts[site.node_rank].memory if site.node_rank in facts else 0
        if memory and needed > memory // SHARE:
            label = node_label(site.node_rank, site.node.host)
            whose = f"more than a tenth of the memory of {label}, {decimal(memory)}"
            return Topology("partitioned", f"{why}{each}, {whose}", size)
    return Topology("replicated", why, size)
