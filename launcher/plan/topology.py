"""Decides ``data.topology``: whether nodes have the edges of all parts or only those of their own. Pure functions."""

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

MOST = 4 * 10**9  #: bytes of edges that a host has by ``auto``

SHARE = 10  #: of its memory they are at most one part in so many

MOST_FILES = 100_000  #: that are sent to all nodes together for it: they grow with the square of the nodes


def decide(
    config: ClusterConfig,
    sites: Sequence[Site],
    num_parts: int,
    manifest: PartitionFiles | None,
    facts: Mapping[int, NodeFacts],
) -> Topology:
    """``manifest``: of the parts that are sent from here. In mode verify the nodes tell what they see."""
    holders = [site for site in sites if site.parts]
    if not holders or (len(sites) == 1 and holders[0].node.role == "worker"):
        return Topology()
    found = _bytes_known(config, holders, manifest, facts)
    if config.data.topology != "auto":
        return Topology(config.data.topology, "data.topology says so", found)
    if all(len(site.parts) == num_parts for site in holders):
        return Topology("partitioned", "auto: each node that holds parts has all of them", found)
    if not found:
        return _unknown(config, holders, facts)
    files = manifest.topology_files * len(holders) if manifest else 0
    if files > MOST_FILES:
        return Topology("partitioned", f"auto: the edges of all parts for all nodes are {files:,} files", found)
    return _by_size(config, holders, found, facts)


def _bytes_known(
    config: ClusterConfig, holders: Sequence[Site], manifest: PartitionFiles | None, facts: Mapping[int, NodeFacts]
) -> int:
    """Of the edges of all parts; 0 where that cannot be told, or where a node does not see all of them."""
    if config.makes_parts:
        return manifest.topology_bytes if manifest else 0
    told = [facts[site.node_rank].topology_bytes for site in holders if site.node_rank in facts]
    return max(told, default=0) if all(told) else 0


def _unknown(config: ClusterConfig, holders: Sequence[Site], facts: Mapping[int, NodeFacts]) -> Topology:
    """The plan is not final then, but where a node of mode verify has its own parts only."""
    if config.makes_parts:
        return Topology("", "auto: decided once the parts are there")
    lacks = [site for site in holders if site.node_rank in facts and not facts[site.node_rank].topology_bytes]
    if not lacks:
        return Topology("", "auto: decided once the nodes have been looked at")
    label = node_label(lacks[0].node_rank, lacks[0].node.host)
    return Topology("partitioned", f"auto: {label} does not have the edges of all parts in {lacks[0].data_dir}")


def _by_size(config: ClusterConfig, holders: Sequence[Site], size: int, facts: Mapping[int, NodeFacts]) -> Topology:
    on_host = Counter(host_key(config, site.node) for site in holders)
    told = f"auto: the edges of all parts take {decimal(size)}"
    for site in holders:
        nodes = on_host[host_key(config, site.node)]
        there = nodes * size
        each = f" for each of {count(nodes, 'node')} on {site.node.host}" if nodes > 1 else ""
        if there > MOST:
            return Topology("partitioned", f"{told}{each}, and {decimal(MOST)} per host is the most", size)
        memory = facts[site.node_rank].memory if site.node_rank in facts else 0
        if memory and there > memory // SHARE:
            label = node_label(site.node_rank, site.node.host)
            whose = f"more than a tenth of the memory of {label}, {decimal(memory)}"
            return Topology("partitioned", f"{told}{each}, {whose}", size)
    return Topology("replicated", told, size)
