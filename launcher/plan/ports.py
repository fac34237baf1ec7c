"""Chooses the master, control and graph service ports of a run: lists candidates, and selects a free one."""

from __future__ import annotations

import itertools
from collections.abc import Set
from typing import TYPE_CHECKING

from launcher.config.roles import host_key, lead, servers, serves
from launcher.config.schema import ClusterConfig

if TYPE_CHECKING:
    from launcher.plan.model import NodeFacts

_CONTROL_PORT = 29400

_MASTER_PORT = 29500

_SERVICE_PORT = 29600

_RESTART_PORT = 20000

_CANDIDATES = 64  # number of candidates for each port

_RESTART_PORTS = 9000  # number of candidates, over all nodes, for ports that are used only after a restart


def master_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Return the candidates for torch.distributed's port on the lead node, in order of preference; () if no node
    trains.
    """
    if not config.world_size:
        return ()
    if config.run.master_port != "auto":
        return (config.run.master_port,)
    taken = {*_fixed_service_ports(config), config.run.control_port}
    return _untaken_ports(taken, _MASTER_PORT)


def control_candidates(config: ClusterConfig) -> tuple[int, ...]:
    """Return the candidates for the lead node's control port, in order of preference.

    () for a run with one node and for a serving cluster.
    """
    if len(config.nodes) == 1 or not config.world_size:
        return ()
    if config.run.control_port != "auto":
        return (config.run.control_port,)
    return _untaken_ports({*_fixed_service_ports(config), *master_candidates(config)}, _CONTROL_PORT)


def _fixed_service_ports(config: ClusterConfig) -> range:
    first = config.run.service_port
    return range(first, first + len(config.nodes)) if first != "auto" and servers(config) else range(0)


def _untaken_ports(taken: Set[int | str], first: int) -> tuple[int, ...]:
    """Return the ports from ``first`` to ``first + 63`` that are not in ``taken``.

    If all of these are taken, returns the next 64 ports that are not.
    """
    free = [port for port in range(first, first + _CANDIDATES) if port not in taken]
    following = (port for port in itertools.count(first + _CANDIDATES) if port not in taken)
    return tuple(free or itertools.islice(following, _CANDIDATES))


def service_candidates(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """Return the candidates for the port of a node's graph server.

    No two nodes have a candidate in common, as they may share a host.
    """
    if not config.nodes[node_rank].holds:
        return ()
    if config.run.service_port != "auto":
        return (config.run.service_port + node_rank,)
    first, step = _SERVICE_PORT + node_rank, len(config.nodes)
    ports = range(first, min(first + step * _CANDIDATES, 65536), step)
    return tuple(port for port in ports if port not in (config.run.master_port, config.run.control_port))


def lead_candidates(config: ClusterConfig, node_rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the candidates for the control port and for the master port of a node, while it is the lead node.

    Other nodes than the first lead node need them after a restart: both are () if the run does not restart or no node
    trains, and the second is () for a node that does not train. If the config gives a port, this port is the only
    candidate of the first node on each host except the lead node's host.
    """
    if node_rank == lead(config):
        return control_candidates(config), master_candidates(config)
    node = config.nodes[node_rank]
    if not config.run.restarts or not config.world_size:
        return (), ()
    hosts = [host_key(config, other) for other in (config.nodes[lead(config)], *config.nodes[:node_rank])]
    alone = host_key(config, node) not in hosts
    taken = {*_fixed_service_ports(config), config.run.control_port, config.run.master_port}
    count, run = 2 * len(config.nodes), config.run
    candidates = max(4, min(_CANDIDATES, _RESTART_PORTS // count))
    ours = range(_RESTART_PORT + 2 * node_rank, _RESTART_PORT + count * candidates, count)
    control = tuple(port for port in ours if port not in taken)
    master = tuple(port + 1 for port in ours if port + 1 not in taken)
    if run.control_port != "auto" and alone:
        control = (run.control_port,)
    if run.master_port != "auto" and alone:
        master = (run.master_port,)
    return control, master if node.trains else ()


def candidate_ports(config: ClusterConfig, node_rank: int) -> tuple[int, ...]:
    """Return all candidate ports of a node. Preflight tries to listen on each of them."""
    service = service_candidates(config, node_rank) if serves(config, node_rank) else ()
    control, master = lead_candidates(config, node_rank)
    return (*master, *control, *service)


def choose(candidates: tuple[int, ...], fact: NodeFacts | None) -> int:
    """Return the first candidate in ``fact.free_ports``, else the first candidate; 0 if there is none."""
    free = fact.free_ports if fact else ()
    return next((port for port in free if port in candidates), next(iter(candidates), 0))
