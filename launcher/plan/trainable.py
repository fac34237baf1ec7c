"""Checks that the bundled trainer can train on a graph, before any file is sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig
from launcher.errors import FleetError, UsageError
from launcher.node.json_reader import loads
from launcher.plan.commands import train_flags
from launcher.plan.partition import PartitionFiles, read_partition_files, trainer_output
from trainer.core.train_config import METRICS, Neighbors, TrainConfig, is_own_model

# Models that train on homogeneous graphs only; the other models train on any graph.
_HOMOGENEOUS_MODELS = ("sage", "gcn", "gat")

_TYPED = "rgcn, hgt, rsage or token-transformer"

_HETERO = {"synthetic-hetero": True, "synthetic": False, "ogbn-mag": True}  #: datasets whose kind is known by name


def check_trainable(config: ClusterConfig, parts: PartitionFiles | None) -> None:
    """Raise UsageError if the bundled trainer would refuse the graph.

    It refuses a graph of a kind that ``train.model`` does not support, a graph without train seeds, and settings that
    name what the graph does not have: types, attributes, classes, metrics of its task, a val split.

    ``parts``: None if the parts are not made yet, or belong to a serving cluster. Then the graph is checked only as far
    as the config describes it: its types, and the splits of its tables.
    """
    hetero = is_hetero(config.data) if parts is None else parts.hetero
    if config.train.model in _HOMOGENEOUS_MODELS and hetero:
        graph = config.data.source or config.data.dataset or (parts.dataset if parts else "")
        raise UsageError(
            f"train.model: {config.train.model} is for homogeneous graphs, and {graph} has several types of nodes or "
            f"edges; nothing was sent. Set train.model to {_TYPED}"
        )

    # Tasks of links and of labels of edges need no nodes with a train split.
    task, target, options = config.train.task, config.train.target, config.data.options
    if parts is None:
        tables = [table for table in _mapping(options.get("edges")).values() if isinstance(table, Mapping)]
        labelled = any(table.get("label") for table in tables)
        # Links are held out to be predicted by an option, or by the split of an edge table.
        unlabelled = [table for table in tables if not table.get("label")]
        held_out = any(table.get(key) for table in unlabelled for key in ("split", "val_files", "test_files"))
        held_out = held_out or any(options.get(name) is not None for name in ("hold_out", "hold_out_split"))
    else:
        held_out = parts.links_held_out
        labelled = any({"y", "edge_split"} <= set(spec.attrs) for spec in parts.edges.values())
    of_edges = task == "link" or task.startswith("edge-")
    if not of_edges and not (task == "auto" and (held_out or labelled or "__" in (target or ""))):
        if parts is not None:
            _check_train_nodes(config, parts)
        elif config.data.dataset == "tables" and not config.data.serving:
            # A node table needs a split. Wrong options are left to the partitioner, which explains them.
            given = [*_mapping(options.get("nodes")).values(), *_mapping(options.get("tasks")).values()]
            well_formed = bool(given) and all(isinstance(table, Mapping) for table in given)
            if well_formed and not any("split" in table for table in given):
                raise UsageError(
                    "data.options: no node table has a split, so there are no nodes to train on; nothing was sent. "
                    "Give a table label and split, or predict links: data.options.hold_out, or a split of the edge "
                    "table, and train.task: link (docs/data.md)"
                )
    if parts is not None:
        _check_attrs(config, parts)


def check_model_class(train: TrainConfig, parts: PartitionFiles | None) -> None:
    """Check that the trainer can make and call the user's model class, by ``trainer check-model`` on this machine.

    ``parts``: the graph for which it is made, if its parts are on this machine. Raises UsageError with what the class
    lacks. Does nothing for a bundled model.
    """
    if not is_own_model(train.model):
        return
    here = parts is not None and (Path(parts.folder) / "manifest.json").is_file()
    try:
        trainer_output("check-model", *(("--parts", parts.folder) if parts and here else ()), *train_flags(train))
    except UsageError as error:
        raise UsageError(f"train.{error}; nothing was sent") from None


def is_hetero(data: DataConfig) -> bool | None:
    """Return whether the dataset of ``data`` is heterogeneous; None if the config does not tell."""
    if data.serving:
        return None
    if data.dataset == "tables":
        given = {name: _mapping(data.options.get(name)) for name in ("nodes", "edges", "tasks")}
        by_column = any(isinstance(table, Mapping) and table.get("relation") for table in given["edges"].values())
        return by_column or bool(given["tasks"]) or len(given["nodes"]) > 1 or len(given["edges"]) > 1
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


def _check_train_nodes(config: ClusterConfig, parts: PartitionFiles) -> None:
    """Raise UsageError if the parts have no train seeds, or a setting of the task does not fit their labels.

    If ``train.target`` is set, only its train seeds count.
    """
    train, target = config.train, config.train.target
    if target is not None and parts.nodes and target not in {**parts.nodes, **parts.edges}:
        raise UsageError(f"train.target: there is no {target} in {parts.dataset}; it has {', '.join(parts.nodes)}")
    trained = {name: spec.splits.get("train", 0) for name, spec in parts.nodes.items()}
    if target is not None and target in trained:
        seeds, whose, where = trained[target], f"node type {target} has", f" of {target}"
    else:
        seeds, whose, where = sum(trained.values()), "the graph has", ""
    if trained and not seeds:
        raise UsageError(
            f"{config.data.source or parts.dataset}: {whose} no train split, which the bundled trainer needs (parts "
            f"in {parts.folder}); nothing was sent. Add train_idx or train_mask{where} to the graph (docs/data.md), "
            "set train.task to link to predict links, or run a script of your own on these parts: gnnfleet launch -- "
            "python SCRIPT"
        )

    problem = ""
    able = {name: spec for name, spec in parts.nodes.items() if "y" in spec.attrs and spec.splits.get("train")}
    names = [train.target] if train.target is not None else [*able]
    if len(names) != 1 or names[0] not in able or able[names[0]].num_classes is None:
        return  # the trainer explains which types can be trained on
    (name,), spec, classes = names, able[names[0]], able[names[0]].num_classes
    of = f"{parts.dataset} ({name})" if parts.hetero else parts.dataset
    kinds = ["classification"] if classes else ["multilabel", "regression"]
    tasks = kinds if train.task == "auto" else [train.task]
    known = list(dict.fromkeys(metric for task in tasks for metric in METRICS.get(task, ())))
    chosen = [*train.metrics, *(each.metric for each in (train.early_stop, train.schedule) if each and each.metric)]
    if train.task == "classification" and not classes:
        problem = f"train.task: y of {of} are no classes"
    for key, given in (("class_weights", train.class_weights), ("label_smoothing", train.label_smoothing)):
        if given and "classification" not in tasks:
            problem = f"train.{key}: is for task classification, and y of {of} are no classes"
    if isinstance(train.class_weights, list | tuple) and classes and len(train.class_weights) != classes:
        problem = f"train.class_weights: {len(train.class_weights)} numbers, but {of} has {classes} classes"
    if wrong := [metric for metric in chosen if metric not in (*known, "loss")]:
        problem = f"train: no metric {wrong[0]!r} for y of {of}; there are {', '.join(known)}"
    plateau = train.schedule is not None and train.schedule.name == "plateau"
    for key, needs_val in (("early_stop", train.early_stop is not None), ("schedule", plateau)):
        if not problem and needs_val and not spec.splits.get("val"):
            problem = f"train.{key}: needs evaluations on val, but {of} has no val split"
    if problem:
        raise UsageError(f"{problem}; nothing was sent")


def _check_attrs(config: ClusterConfig, parts: PartitionFiles) -> None:
    """Raise UsageError for an attribute of edges or nodes that the graph does not have."""
    of_edges = {name for spec in parts.edges.values() for name in spec.attrs}
    of_nodes = {name for spec in parts.nodes.values() for name in spec.attrs}
    train = config.train
    for key, name, known in (
        *(("edge_attr", name, of_edges) for name in train.edge_attr or ()),
        ("weight_attr", train.weight_attr, of_edges),
        ("time_attr", train.time_attr, of_edges | of_nodes),
        *(("category_dims", name, of_edges | of_nodes) for name in train.category_dims or ()),
    ):  # fmt: skip
        if name is None or not parts.edges:
            continue
        column = name.rpartition(".")[2] if key == "category_dims" and name not in known else name  # after the type
        if column not in known:
            there = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"train.{key}: {parts.dataset} has no attribute {name!r} there; it has {there}; nothing was sent"
            )
    rule = train.neighbors or Neighbors("fanout")
    if rule.name == "walks" and not rule.metapath and len(parts.edges) > 1:
        there = ", ".join(sorted(parts.edges))
        raise UsageError(
            f"train.neighbors: {parts.dataset} has several edge types ({there}), among which walks need a metapath, "
            "from the seeds outwards and back to their type; nothing was sent"
        )
    targets: list[str] = []
    if train.task == "link" and train.target != "all":
        list_targets = {name.partition("__lists__")[0] for name in parts.edges if "__lists__" in name}
        targets = [name for name in (train.target or "").split(",") if name and name not in list_targets]
    elif train.task.startswith("edge-") and train.target:
        targets = [train.target]
    for key, name in (
        *(("target", name) for name in targets),
        ("hard_negatives", train.hard_negatives),
        ("eval_candidates", train.eval_candidates),
        *(("neighbors.edge_types", name) for name in rule.edge_types or ()),
        *(("neighbors.metapath", name) for name in rule.metapath or ()),
    ):
        if name is not None and parts.edges and name not in parts.edges:
            there = ", ".join(sorted(parts.edges))
            raise UsageError(f"train.{key}: {parts.dataset} has no edge type {name}; it has {there}; nothing was sent")
