"""Checks that the settings in ``train`` of a config do not contradict each other, and fit the nodes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from launcher.config.cache_size import CacheSize
from launcher.config.schema import (
    AT_K,
    METRICS,
    MODELS,
    NEIGHBORS,
    OF_DEGREES,
    OF_MODELS,
    OPTIMIZERS,
    SCHEDULES,
    TRACKERS,
    WITHOUT_SCORES,
    ClusterConfig,
    Neighbors,
    Schedule,
    TrainConfig,
    is_own_model,
)
from launcher.config.validation import KeyPath, Reader, dotted
from launcher.yaml_tree import shortened


def check_training(config: ClusterConfig, reader: Reader) -> None:
    """Report settings in ``train`` that contradict each other, or do not fit the nodes."""
    train = config.train
    check_cache_size("train.device_cache", train.device_cache, "all rows", reader)
    for name in ("fanouts", "eval_fanouts"):
        fanouts = getattr(train, name)
        wrong = next((fanout for fanout in fanouts or () if fanout == 0 or fanout < -1), None)
        if wrong is not None and reader.good(("train", name)):
            message = f"train.{name}: each must be -1 (all neighbours) or at least 1; found {wrong}"
            reader.report(("train", name), message)
    if not train.fanouts and reader.good(("train", "fanouts")):
        reader.report(("train", "fanouts"), "train.fanouts: empty; give one number per layer")
    elif reader.good(("train", "fanouts")):
        _layers(config, reader)
    if train.neighbors is not None and reader.good(("train", "neighbors")):
        _neighbors(train.neighbors, train, reader)
    _model(config, reader)
    for name, given in (("class_weights", train.class_weights), ("label_smoothing", train.label_smoothing)):
        if given and train.task not in ("auto", "classification"):
            reader.report(("train", name), f"train.{name}: is for task classification, not {train.task}")
    if train.optimizer is not None and reader.good(("train", "optimizer")):
        _optimizer(train.optimizer, train, reader)
    if train.schedule is not None and reader.good(("train", "schedule")):
        _schedule(train.schedule, train, reader)
    if train.early_stop is not None and reader.good(("train", "early_stop")):
        _evaluated(("train", "early_stop"), train.early_stop.metric, train, reader)
    for name, options in (train.track or {}).items() if reader.good(("train", "track")) else ():
        _tracker(name, options, reader)
    for name in train.metrics if reader.good(("train", "metrics")) else ():
        _metric(("train", "metrics"), name, train, reader)
    if reader.good(("nodes",), ("train", "batch_size")) and train.batch_size < config.world_size:
        reader.report(
            ("train", "batch_size"),
            f"train.batch_size: the global batch is {train.batch_size}, fewer seeds "
            f"than processes ({config.world_size}); raise it or use fewer processes",
        )
    cpu_only = next((k for k, node in enumerate(config.nodes) if node.trains and not node.devices), None)
    if train.backend == "nccl" and cpu_only is not None and reader.good(("nodes",)):
        host = config.nodes[cpu_only].host
        reader.report(
            ("train", "backend"),
            f"train.backend: nccl needs devices on every node, but {host} (node{cpu_only}) lists none",
        )
    mig = next((k for k, node in enumerate(config.nodes) if any(map(_is_mig, node.devices))), None)
    if train.backend == "nccl" and mig is not None and config.world_size > 1:
        reader.report(
            ("train", "backend"),
            f"train.backend: nccl does not connect MIG instances (node{mig}); use auto or gloo",
        )
    if train.sampling == "cuda" and reader.good(("nodes",), ("train", "sampling"), ("data", "topology")):
        _device_sampling(config, cpu_only, reader)


def _device_sampling(config: ClusterConfig, cpu_only: int | None, reader: Reader) -> None:
    client = next((k for k, node in enumerate(config.nodes) if node.trains and not node.holds), None)
    if cpu_only is not None:
        host = config.nodes[cpu_only].host
        text = f"train.sampling: cuda needs devices on every node, but {host} (node{cpu_only}) lists none"
    elif client is not None:
        host = config.nodes[client].host
        text = f"train.sampling: cuda needs parts on the nodes that train, but {host} (node{client}) is a client"
    elif config.data.topology == "partitioned" and sum(node.holds for node in config.nodes) > 1:
        text = "train.sampling: cuda needs the edges of all parts on each node; set data.topology to replicated"
    else:
        return
    reader.report(("train", "sampling"), text)


def _layers(config: ClusterConfig, reader: Reader) -> None:
    train, hops = config.train, len(config.train.fanouts)
    if train.model == "embedding":
        return
    if (
        train.layers
        and train.layers != hops
        and train.model != "token-transformer"
        and reader.good(("train", "layers"))
    ):
        reader.report(
            ("train", "layers"),
            f"train.layers is {train.layers}, but train.fanouts has {hops} numbers; "
            "give one fanout per layer, or leave layers out",
        )
    if train.eval_fanouts is not None and len(train.eval_fanouts) != hops:
        reader.report(
            ("train", "eval_fanouts"),
            f"train.eval_fanouts has {len(train.eval_fanouts)} numbers, but "
            f"train.fanouts has {hops}; both need one per layer",
        )


def _model(config: ClusterConfig, reader: Reader) -> None:
    """Report an unknown model, and arguments, heads and an edge feature setting that do not fit ``train.model``."""
    train = config.train
    own = is_own_model(train.model)
    if not own and train.model not in MODELS and reader.good(("train", "model")):
        near = difflib.get_close_matches(train.model, MODELS, 1)
        hint = f"did you mean `{near[0]}`? The models are" if near else "the models are"
        reader.report(
            ("train", "model"),
            f"train.model: `{train.model}` is no model; {hint} {', '.join(MODELS)}, or a class: FILE.py:CLASS or "
            "PACKAGE.CLASS",
        )
        return
    if train.model_args and not own and reader.good(("train", "model_args")):
        text = f"train.model_args: {train.model} is a bundled model, which takes no further arguments; leave them out"
        reader.report(("train", "model_args"), text)
    for name, dim in (train.category_dims or {}).items() if reader.good(("train", "category_dims")) else ():
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim <= 1024:
            text = f"train.category_dims.{name}: expected a whole number from 0 to 1024, found {shortened(str(dim))}"
            reader.report(("train", "category_dims"), text)
    for name, models in OF_MODELS.items():
        given = getattr(train, name) != getattr(TrainConfig(), name)
        if given and train.model not in models and reader.good(("train", name)):
            hint = "pass it to your class by train.model_args" if own else f"use {' or '.join(models)}"
            text = f"train.{name}: model {train.model} does not read it; {hint}"
            reader.report(("train", name), text)
    if (
        train.model in ("gat", "hgt", "token-transformer")
        and train.hidden % train.heads
        and reader.good(("train", "heads"))
    ):
        reader.report(
            ("train", "heads"),
            f"train.heads: {train.heads} heads do not divide train.hidden ({train.hidden}), as {train.model} needs; "
            "change one of them",
        )
    if (
        train.model in ("lightgcn", "embedding")
        and train.task not in ("auto", "link")
        and reader.good(("train", "model"))
    ):
        text = f"train.model: {train.model} is for train.task: link"
        reader.report(("train", "model"), text)
    chosen = train.neighbors is not None and train.neighbors.name in ("ppr", "walks")
    if (
        train.model in OF_DEGREES
        and train.time_attr is not None
        and not chosen
        and reader.good(("train", "model"), ("train", "time_attr"))
    ):
        reader.report(
            ("train", "time_attr"),
            f"train.time_attr: model {train.model} divides messages by degrees in the whole graph, which count later "
            "edges; use sage, for several types rsage",
        )
    if train.model == "embedding" and train.layers is not None and reader.good(("train", "layers")):
        reader.report(("train", "layers"), "train.layers: model embedding has none; leave it out")
    if train.hide and train.task != "auto" and not train.task.startswith("edge-") and reader.good(("train", "hide")):
        reader.report(("train", "hide"), f"train.hide: is for labels of edges, and train.task is {train.task}")
    if train.decoder != "dot" and reader.good(("train", "decoder")):
        _decoder(train, reader)
    if (
        train.edge_attr is not None
        and not own
        and train.model not in ("sage", "rsage", "token-transformer")
        and reader.good(("train", "edge_attr"))
    ):
        reader.report(
            ("train", "edge_attr"),
            f"train.edge_attr: model {train.model} does not read edge features; use sage, for several types rsage",
        )


def _decoder(train: TrainConfig, reader: Reader) -> None:
    """Report settings that a decoder with weights per edge type does not fit."""
    place, problem = ("train", "decoder"), ""
    if train.task not in ("auto", "link"):
        problem = f"it scores links, and train.task is {train.task}"
    elif train.decoder in ("complex", "rotate") and train.hidden % 2:
        problem = f"its rows are complex numbers, so train.hidden must be even, not {train.hidden}"
    elif train.time_attr is not None:
        problem = "links with times (train.time_attr) have decoder dot"
    elif train.loss == "in-batch":
        problem = "train.loss: in-batch is for decoder dot; use softmax"
    elif train.hard_negatives is not None:
        problem = "train.hard_negatives are for decoder dot"
    if problem:
        reader.report(place, f"train.decoder: {train.decoder}: {problem}")


#: Kinds of the arguments of optimizers that are not a number.
_PAIRS, _FLAGS = (
    ("betas", "etas", "step_sizes"),
    ("amsgrad", "centered", "decoupled_weight_decay", "maximize", "nesterov"),
)


def _optimizer(optimizer: Mapping[str, Any], train: TrainConfig, reader: Reader) -> None:
    """Report an unknown optimizer, and arguments that it does not have or that are of another kind."""
    name, place = str(optimizer.get("name")), ("train", "optimizer")
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name[:40], OPTIMIZERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(OPTIMIZERS)}"
        found = f"no optimizer `{shortened(name)}` of torch.optim" if "name" in optimizer else "its `name` is missing"
        reader.report(place, f"train.optimizer: {found}; {hint}")
        return
    known = OPTIMIZERS[name].split()
    for key, value in optimizer.items():
        kind = "two numbers" if key in _PAIRS else "true or false" if key in _FLAGS else "a number"
        pair = value if isinstance(value, list) else [value]
        fits = all(isinstance(one, int | float) and isinstance(one, bool) == (key in _FLAGS) for one in pair)
        if key in ("lr", "weight_decay"):
            reader.report(place, f"train.optimizer.{key}: set train.{key} instead")
        elif key != "name" and key not in known:
            reader.report(place, f"train.optimizer: {name} has no argument `{key}`; it has {', '.join(known)}")
        elif key != "name" and not (fits and len(pair) == 1 + (key in _PAIRS)):
            reader.report(place, f"train.optimizer.{key}: expected {kind}, found {shortened(str(value))}")
    if name == "Rprop" and train.weight_decay:
        reader.report(("train", "weight_decay"), "train.weight_decay: Rprop has none")


def _neighbors(neighbors: Neighbors, train: TrainConfig, reader: Reader) -> None:
    """Report keys that the way to choose neighbours does not have, and settings with which it cannot be used."""
    place, name = ("train", "neighbors"), neighbors.name
    known, some = NEIGHBORS[name].split(), {key for keys in NEIGHBORS.values() for key in keys.split()}
    for key in sorted(some.difference(known)):
        if getattr(neighbors, key) is not None:
            has = f"; it has {', '.join(known)}" if known else ""
            reader.report((*place, key), f"train.neighbors.{key}: {name} has no such key{has}")
    if name == "top" and train.weight_attr is None and train.time_attr is None:
        text = "train.neighbors: top takes the heaviest or the latest neighbours; set weight_attr or time_attr"
        reader.report(place, text)
    elif name != "fanout" and train.replace:
        reader.report(("train", "replace"), f"train.replace: has no effect with neighbors: {name}; leave it out")
    if name not in ("ppr", "walks"):
        return
    if train.model in WITHOUT_SCORES:
        text = f"train.neighbors: {train.model} does not read the scores that {name} gives; use another model"
        reader.report(place, text)
    if train.edge_attr:
        text = f"train.edge_attr: neighbors: {name} makes edges of its own, which have no attributes; leave it out"
        reader.report(("train", "edge_attr"), text)
    if train.sampling == "cuda":
        text = f"train.sampling: neighbours by {name} are chosen by the CPU; set auto or cpu"
        reader.report(("train", "sampling"), text)
    if wrong := [k for k in (*train.fanouts, *(train.eval_fanouts or ())) if k < 1]:
        text = f"train.fanouts: {wrong[0]} neighbours by {name}; give the number of neighbours of each layer"
        reader.report(("train", "fanouts"), text)


def _schedule(schedule: Schedule, train: TrainConfig, reader: Reader) -> None:
    """Report keys that the schedule does not have."""
    known, some = SCHEDULES[schedule.name].split(), {key for keys in SCHEDULES.values() for key in keys.split()}
    for key in sorted(some.difference(known)):
        if getattr(schedule, key) is not None:
            has = f"; it has {', '.join(known)}" if known else ""
            reader.report(("train", "schedule", key), f"train.schedule.{key}: {schedule.name} has no such key{has}")
    if schedule.warmup_steps and (schedule.warmup_epochs or schedule.name == "one-cycle"):
        why = "give steps or epochs, not both" if schedule.warmup_epochs else "one-cycle has its own, `rise`"
        reader.report(("train", "schedule", "warmup_steps"), f"train.schedule.warmup_steps: {why}")
    elif schedule.warmup_epochs and schedule.name == "one-cycle":
        place = ("train", "schedule", "warmup_epochs")
        reader.report(place, "train.schedule.warmup_epochs: one-cycle has its own, `rise`")
    if schedule.name == "plateau":
        _evaluated(("train", "schedule"), schedule.metric, train, reader)


def _tracker(name: str, options: Any, reader: Reader) -> None:
    """Report an unknown tracker, and options that it does not have."""
    place = ("train", "track", name)
    if name not in TRACKERS:
        near = difflib.get_close_matches(name[:40], TRACKERS, 1)
        hint = f"did you mean {near[0]}?" if near else f"the trackers are {', '.join(TRACKERS)}"
        reader.report(place, f"train.track: there is no tracker `{shortened(name)}`; {hint}")
        return
    known = TRACKERS[name][0].split()
    if not isinstance(options or {}, Mapping):
        reader.report(place, f"{dotted(place)}: expected options of {name}, found {shortened(str(options))}")
        return
    for key, value in (options or {}).items():
        at = (*place, key)
        if key not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            reader.report(at, f"{dotted(place)}: {name} has no option `{shortened(key)}`; {has}")
        elif not isinstance(value, str) or not value:
            reader.report(at, f"{dotted(at)}: expected text, found {shortened(str(value))}")
        elif key == "mode" and value not in ("online", "offline"):
            reader.report(at, f"{dotted(at)}: expected online or offline, found {shortened(value)}")
        elif key == "uri" and "@" in urlsplit(value).netloc:
            text = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on the host instead of writing them here"
            reader.report(at, f"{dotted(at)}: {text}")


def _evaluated(section: KeyPath, name: str | None, train: TrainConfig, reader: Reader) -> None:
    """Report a section that needs evaluations on val if there are none, and if the task does not have its metric."""
    if not train.eval_every:
        reader.report(section, f"{dotted(section)} needs evaluations on val, but train.eval_every is 0")
    if name not in (None, "loss"):
        _metric((*section, "metric"), str(name), train, reader)


def _metric(place: KeyPath, name: str, train: TrainConfig, reader: Reader) -> None:
    """Report a metric that the task does not have."""
    tasks = METRICS if train.task == "auto" else (train.task.removeprefix("edge-"),)
    known = list(dict.fromkeys(metric for task in tasks for metric in METRICS[task]))
    kind, _, k = name.partition("@")
    if "link" in tasks and kind in AT_K and k.isdecimal() and int(k):
        if kind != "hits" and train.eval_negatives != "all":
            reader.report(place, f"{dotted(place)}: {name} needs train.eval_negatives: all")
        return
    if name not in known:
        of = "are" if train.task == "auto" else f"of task {train.task} are"
        text = f"{dotted(place)}: no metric {name!r}; the metrics {of} {', '.join(known)}"
        reader.report(place, text)


def check_cache_size(key: str, text: str, rows: str, reader: Reader) -> None:
    """Report a cache size that cannot be parsed.

    ``key``: path of the cache size in the config. ``rows``: what its percentage refers to, for messages.
    """
    place = tuple(key.split("."))
    try:
        CacheSize.parse(text, rows)
    except ValueError as error:
        if reader.good(place):
            reader.report(place, f"{key}: {error}")


def _is_mig(device: int | str) -> bool:
    """Return whether a device is named by the UUID of a MIG instance."""
    return isinstance(device, str) and device.startswith("MIG")
