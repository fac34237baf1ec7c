"""Turns a config as written into a config as run: which nodes take part, their roles, and the data they use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import UsageError
from launcher.hostlist import fold


@dataclass(frozen=True)
class ResolvedConfig(ClusterConfig):
    """A config as run: ``nodes[k]`` is the node of node_rank ``k`` in the plan, the run folder and the report.

    ``resolve_run`` and ``resolve_serving`` derive it from file and flags (``ClusterConfig``). It is saved as
    ``config.yml`` in the run folder.
    """

    left_out: str = ""  #: note on hosts of the file that do not take part; "" if all do; not saved

    @property
    def serve_only(self) -> bool:
        """Whether no node trains: the config then describes a serving cluster."""
        return not self.world_size


def resolve(config: ClusterConfig) -> ResolvedConfig:
    """Resolve as ``gnnfleet launch`` does, or as ``gnnfleet serve`` does if no node trains."""
    return resolve_run(config) if config.world_size else resolve_serving(config)


def resolve_run(config: ClusterConfig) -> ResolvedConfig:
    """Resolve the config of a run. With ``data.serving`` only the nodes that train are kept, as clients without parts.

    Raises UsageError if no node trains.
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
    """Resolve the config of a serving cluster: its servers or, if it has none, its workers as servers.

    Raises UsageError if no node holds parts, or the config itself attaches to a serving cluster.
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
    return _resolved(config, nodes=nodes, run=replace(config.run, on_client_loss="stop"))


def resolve_saved(config: ClusterConfig, nodes: Sequence[NodeConfig] | None = None) -> ResolvedConfig:
    """Resolve the config of an existing run.

    ``config`` was read from the ``config.yml`` of the run folder; or from another file, then ``nodes`` lists its nodes
    in the order of the run.
    """
    return _resolved(config, **({} if nodes is None else {"nodes": tuple(nodes)}))


def _resolved(config: ClusterConfig, **changes: Any) -> ResolvedConfig:
    return ResolvedConfig(**{**vars(config), **changes})
