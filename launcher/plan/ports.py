"""Chooses ports: candidates for the master, control and graph service ports, and the choice among free ones."""

from __future__ import annotations

import itertools
from collections.abc import Set
from typing import TYPE_CHECKING

from launcher.config.roles import lead, servers, serves
from launcher.config.schema import ClusterConfig

if TYPE_CHECKING:
    from launcher.plan.model import NodeFacts

CONTROL_PORT = 29400

MASTER_PORT = 29500

SERVICE_PORT = 29600

_CANDIDATES = 64


def master_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Ports for torch.distributed on the lead node, the preferred one first; none where nothing trains."""
    if not config.world_size:
        return ()
    if config.run.master_port != "auto":
        return (config.run.master_port,)
    taken = {*_fixed_service_ports(config), config.run.control_port}
    return _ports_beside(taken, MASTER_PORT)


def control_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Ports on the lead node by which the nodes know of each other, the preferred one first; none for a single node,
    and where nothing trains: servers that are kept up do without each other's supervisors."""
    if len(config.nodes) == 1 or not config.world_size:
        return ()
    if config.run.control_port != "auto":
        return (config.run.control_port,)
    return _ports_beside({*_fixed_service_ports(config), *master_candidates(config)}, CONTROL_PORT)


def _fixed_service_ports(config: ClusterConfig) -> range:
    first = config.run.service_port
    return range(first, first + len(config.nodes)) if first != "auto" and servers(config) else range(0)


def _ports_beside(taken: Set[int | str], first: int) -> tuple[int, ...]:
    """Ports from ``first`` that are not taken; when all are, the next ones behind."""
    free = [port for port in range(first, first + _CANDIDATES) if port not in taken]
    behind = (port for port in itertools.count(first + _CANDIDATES) if port not in taken)
    return tuple(free or itertools.islice(behind, _CANDIDATES))


def service_candidates(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """Ports for a node's graph service; no two nodes have one in common, so a host may carry many nodes."""
    if not config.nodes[node_rank].holds:
        return ()
    if config.run.service_port != "auto":
        return (config.run.service_port + node_rank,)
    first, step = SERVICE_PORT + node_rank, len(config.nodes)
    ports = range(first, min(first + step * _CANDIDATES, 65536), step)
    return tuple(port for port in ports if port not in (config.run.master_port, config.run.control_port))


def candidate_ports(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """The ports preflight should try to bind on a node."""
    service = service_candidates(config, node_rank) if serves(config, node_rank) else ()
    if node_rank != lead(config):
        return service
    return (*master_candidates(config), *control_candidates(config), *service)


def choose(candidates: tuple[int, ...], fact: NodeFacts | None) -> int:
    """The candidate that preflight puts first; the lowest when none is known to be free (preflight refuses then)."""
    free = fact.free_ports if fact else ()
    return next((port for port in free if port in candidates), candidates[0])


def _service_port(config: ClusterConfig, node_rank: int, fact: NodeFacts | None) -> int:
    candidates = service_candidates(config, node_rank)
    return choose(candidates, fact) if candidates else 0
