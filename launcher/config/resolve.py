"""A config as written → the config as it is run: which nodes take part, in which role, and with which data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import UsageError
from launcher.hostlist import fold


@dataclass(frozen=True)
class ResolvedConfig(ClusterConfig):
    """A config as it is run: ``nodes[k]`` is the node of node_rank ``k`` in the plan, the run folder and the report.

    ``resolve_run`` and ``resolve_serving`` make it of what the file and the flags say (``ClusterConfig``); the
    ``config.yml`` of a run folder holds it.
    """

    left_out: str = ""  #: a note on hosts of the file that do not take part; '' without any; not saved

    @property
    def serve_only(self) -> bool:
        """Nothing trains: a serving cluster."""
        return not self.world_size


def resolve(config: ClusterConfig) -> ResolvedConfig:
    """As ``gnnfleet launch`` runs the config; one where nothing trains, as ``gnnfleet serve`` does."""
    return resolve_run(config) if config.world_size else resolve_serving(config)


def resolve_run(config: ClusterConfig) -> ResolvedConfig:
    """The config of a run. With ``data.serving``: those that train, as clients, without parts of their own.

    Raises UsageError when nothing would train.
    """
    if not config.world_size:
        raise UsageError(
            "nodes: all are servers, so nothing would train. `gnnfleet serve --config FILE` keeps them up for runs "
            "that attach to them; for a run of its own give a node `role: client` or `role: worker`"
        )
    if not config.data.serving:
        return _resolved(config)
    nodes = tuple(replace(node, role="client") for node in config.nodes if node.trains)
    data = DataConfig(dataset=config.data.dataset, serving=config.data.serving)
    names = [node.host for node in config.nodes if not node.trains]
    note = f"{fold(names)} left out: the graph is served by `{config.data.serving}`" if names else ""
    return _resolved(config, nodes=nodes, data=data, left_out=note)


def resolve_serving(config: ClusterConfig) -> ResolvedConfig:
    """The config of a serving cluster: the servers; where there are none, the workers as servers.

    Raises UsageError where nothing can serve.
    """
    if config.data.serving is not None:
        raise UsageError(
            f"data.serving: this config attaches to serving cluster {config.data.serving}, and one that serves holds "
            "the graph itself; leave that key out and name a data.dataset"
        )
    if not any(node.holds for node in config.nodes):
        raise UsageError("nothing to serve from: every node is a client; give the hosts of the graph `role: server`")
    kept = [node for node in config.nodes if node.role == "server"] or [node for node in config.nodes if node.holds]
    nodes = tuple(replace(node, role="server", procs=None, devices=()) for node in kept)
    return _resolved(config, nodes=nodes, run=replace(config.run, on_client_loss="stop"))


def resolve_saved(config: ClusterConfig, nodes: Sequence[NodeConfig] | None = None) -> ResolvedConfig:
    """The config of a run that exists, from its ``config.yml``, or from a file with ``nodes`` in the run's order."""
    return _resolved(config, **({} if nodes is None else {"nodes": tuple(nodes)}))


def _resolved(config: ClusterConfig, **changes: Any) -> ResolvedConfig:
    return ResolvedConfig(**{**vars(config), **changes})
