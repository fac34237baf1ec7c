"""Chooses the master, control and graph service ports: lists candidates, and selects a free one."""

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

_CANDIDATES = 64  # per port to choose


def master_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Candidates for torch.distributed's port on the lead node, in order of preference; () if nothing trains."""
    if not config.world_size:
        return ()
    if config.run.master_port != "auto":
        return (config.run.master_port,)
    taken = {*_fixed_service_ports(config), config.run.control_port}
    return _ports_beside(taken, MASTER_PORT)


def control_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Candidates for the hub's port on the lead node, in order of preference.

    () for a single node, and if nothing trains: supervisors of a serving cluster do not connect to each other.
    """
    if len(config.nodes) == 1 or not config.world_size:
        return ()
    if config.run.control_port != "auto":
        return (config.run.control_port,)
    return _ports_beside({*_fixed_service_ports(config), *master_candidates(config)}, CONTROL_PORT)


def _fixed_service_ports(config: ClusterConfig) -> range:
    first = config.run.service_port
    return range(first, first + len(config.nodes)) if first != "auto" and servers(config) else range(0)


def _ports_beside(taken: Set[int | str], first: int) -> tuple[int, ...]:
    """The first 64 ports from ``first`` without those in ``taken``; if none is left, the next ones."""
    free = [port for port in range(first, first + _CANDIDATES) if port not in taken]
    following = (port for port in itertools.count(first + _CANDIDATES) if port not in taken)
    return tuple(free or itertools.islice(following, _CANDIDATES))


def service_candidates(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """Candidates for a node's graph service; nodes have no candidate in common, as several may share a host."""
    if not config.nodes[node_rank].holds:
        return ()
    if config.run.service_port != "auto":
        return (config.run.service_port + node_rank,)
    first, step = SERVICE_PORT + node_rank, len(config.nodes)
    ports = range(first, min(first + step * _CANDIDATES, 65536), step)
    return tuple(port for port in ports if port not in (config.run.master_port, config.run.control_port))


def candidate_ports(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """All candidate ports of a node, which preflight tries to bind."""
    service = service_candidates(config, node_rank) if serves(config, node_rank) else ()
    if node_rank != lead(config):
        return service
    return (*master_candidates(config), *control_candidates(config), *service)


def choose(candidates: tuple[int, ...], fact: NodeFacts | None) -> int:
    """The first of preflight's ``free_ports`` that is a candidate; the first candidate if none is known to be free."""
    free = fact.free_ports if fact else ()
    return next((port for port in free if port in candidates), candidates[0])


def _service_port(config: ClusterConfig, node_rank: int, fact: NodeFacts | None) -> int:
    candidates = service_candidates(config, node_rank)
    return choose(candidates, fact) if candidates else 0
