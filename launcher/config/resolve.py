"""Determines from a config which nodes take part in a run or a serving cluster, their roles, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import UsageError
from launcher.hostlist import fold


@dataclass(frozen=True)
class ResolvedConfig(ClusterConfig):
    """The config of one run or serving cluster: only the nodes that take part, with their final roles.

    ``nodes[k]`` has node_rank ``k``. Saved as ``config.yml`` in the run folder.
    """

    left_out: str = ""  #: note on hosts of the file that do not take part; "" if all do; not saved

    @property
    def serve_only(self) -> bool:
        """Whether this is the config of a serving cluster, in which no node trains."""
        return not self.world_size


def resolve(config: ClusterConfig) -> ResolvedConfig:
    """Resolve a config with ``resolve_run``, or with ``resolve_serving`` if no node trains."""
    return resolve_run(config) if config.world_size else resolve_serving(config)


def resolve_run(config: ClusterConfig) -> ResolvedConfig:
    """Resolve the config of a run. Raises UsageError if no node trains.

    With ``data.serving`` only the nodes that train take part, all with ``role: client``.
    """
    if not config.world_size:
        raise UsageError(
            "nodes: all are servers, so nothing would train. Use `gnnfleet serve --config FILE` to start them for runs "
            "that attach to them, or give a node `role: client` or `role: worker`"
        )
    if not config.data.serving:
        return _resolved(config)
    nodes = tuple(replace(node, role="client") for node in config.nodes if node.trains)
    data = DataConfig(dataset=config.data.dataset, serving=config.data.serving)
    names = [node.host for node in config.nodes if not node.trains]
    note = f"{fold(names)} left out: the graph is served by `{config.data.serving}`" if names else ""
    return _resolved(config, nodes=nodes, data=data, left_out=note)


def resolve_serving(config: ClusterConfig) -> ResolvedConfig:
    """Resolve the config of a serving cluster: its nodes are those with ``role: server``, else the workers.

    Raises UsageError if no node holds parts, or if the config has ``data.serving``.
    """
    if config.data.serving is not None:
        raise UsageError(
            f"data.serving: this config uses the graph of serving cluster {config.data.serving}, but `gnnfleet serve` "
            "needs a graph of its own; leave data.serving out and give data.dataset"
        )
    if not any(node.holds for node in config.nodes):
        raise UsageError("nodes: all are clients, so no node can serve; give the hosts of the graph `role: server`")
    kept = [node for node in config.nodes if node.role == "server"] or [node for node in config.nodes if node.holds]
    nodes = tuple(replace(node, role="server", procs=None, devices=()) for node in kept)
    return _resolved(config, nodes=nodes)


def resolve_saved(config: ClusterConfig, nodes: Sequence[NodeConfig] | None = None) -> ResolvedConfig:
    """Resolve the config of an existing run.

    ``nodes``: the nodes of the run by node_rank; only needed if ``config`` is not that of the run folder.
    """
    return _resolved(config, **({} if nodes is None else {"nodes": tuple(nodes)}))


def _resolved(config: ClusterConfig, **changes: Any) -> ResolvedConfig:
    return ResolvedConfig(**{**vars(config), **changes})
