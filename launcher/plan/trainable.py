"""Checks that the bundled trainer can train on a graph, before any file is sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig
from launcher.errors import FleetError, UsageError
from launcher.node.json_reader import loads
from launcher.plan.partition import PartitionFiles, read_partition_files

#: Models that train on homogeneous graphs only; the other models train on any graph.
HOMOGENEOUS_MODELS = ("sage", "gcn", "gat")

_TYPED = "rgcn, hgt or rsage"

_HETERO = {"synthetic-hetero": True, "synthetic": False, "ogbn-mag": True}  #: datasets whose kind is known by name


def check_trainable(config: ClusterConfig, parts: PartitionFiles | None) -> None:
    """Raise UsageError if the bundled trainer would refuse the graph.

    It refuses a graph of a kind that ``train.model`` does not support, and a graph without train seeds.

    ``parts``: None if the parts are not made yet, or belong to a serving cluster. Then the graph is checked only as far
    as the config describes it: its types, and the splits of its tables.
    """
    _check_model(config, parts)
    if _needs_seeds(config, parts):
        if parts is not None:
            _check_train_seeds(config, parts)
        elif config.data.dataset == "tables" and not config.data.serving:
            _check_splits(config.data)


def _check_model(config: ClusterConfig, parts: PartitionFiles | None) -> None:
    model, hetero = config.train.model, is_hetero(config.data) if parts is None else parts.hetero
    if model not in HOMOGENEOUS_MODELS or not hetero:
        return
    graph = config.data.source or config.data.dataset or (parts.dataset if parts else "")
    raise UsageError(
        f"train.model: {model} is for homogeneous graphs, and {graph} has several types of nodes or edges; nothing was "
        f"sent. Set train.model to {_TYPED}"
    )


def is_hetero(data: DataConfig) -> bool | None:
    """Return whether the dataset of ``data`` is heterogeneous; None if the config does not tell."""
    if data.serving:
        return None
    if data.dataset == "tables":
        return any(len(_mapping(data.options.get(name))) > 1 for name in ("nodes", "edges"))
    if data.dataset == "partition" and data.source:
        try:
            manifest = read_partition_files(Path(data.source).expanduser())
        except FleetError:  # the partitioner explains what is wrong with the source
            return None
        return None if manifest is None else manifest.hetero
    return _HETERO.get(data.dataset)


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return an option as a mapping, parsed if it is JSON text; {} if it is neither a mapping nor JSON."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, Mapping) else {}


def _needs_seeds(config: ClusterConfig, parts: PartitionFiles | None) -> bool:
    """Return whether the task needs nodes with a train split. Link prediction needs none."""
    task, target = config.train.task, config.train.target
    held_out = "hold_out" in config.data.options if parts is None else parts.links_held_out
    return task != "link" and not (task == "auto" and (held_out or "__" in (target or "")))


def _check_splits(data: DataConfig) -> None:
    """Raise UsageError if no node table has a split. Wrong options are left to the partitioner, which explains them."""
    tables = _mapping(data.options.get("nodes")).values()
    if not tables or not all(isinstance(table, Mapping) for table in tables):
        return
    if not any("split" in table for table in tables):
        raise UsageError(
            "data.options: no node table has a split, so there are no nodes to train on; nothing was sent. Give a "
            "table label and split, or predict links: data.options.hold_out and train.task: link (docs/data.md)"
        )


def _check_train_seeds(config: ClusterConfig, parts: PartitionFiles) -> None:
    """Raise UsageError if the parts have no train seeds. If ``train.target`` is set, only its train seeds count."""
    target = config.train.target
    if target is not None and target in parts.train_seeds:
        seeds, whose, where = parts.train_seeds[target], f"node type {target} has", f" of {target}"
    else:  # the trainer refuses an unknown type and lists the existing ones
        seeds, whose, where = sum(parts.train_seeds.values()), "the graph has", ""
    if seeds or not parts.train_seeds:
        return
    raise UsageError(
        f"{config.data.source or parts.dataset}: {whose} no train split, which the bundled trainer needs (parts in "
        f"{parts.folder}); nothing was sent. Add train_idx or train_mask{where} to the graph (docs/data.md), set "
        "train.task to link to predict links, or run a script of your own on these parts: gnnfleet launch -- python "
        "SCRIPT"
    )
