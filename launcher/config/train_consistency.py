"""Checks that the settings in ``train`` of a config do not contradict each other, and fit the nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from launcher.config.schema import ClusterConfig
from launcher.config.validation import Reader, dotted
from trainer.core.train_config import Neighbors, Schedule, problems


def check_training(config: ClusterConfig, reader: Reader) -> None:
    """Report settings in ``train`` that contradict each other, or do not fit the nodes."""
    train = config.train
    bad = {str(path[1]) for path in reader.bad if path[0] == "train" and len(path) > 1}
    sections = {name: None for name in bad if isinstance(getattr(train, name, None), Mapping | Schedule | Neighbors)}
    for problem in list(problems(replace(train, **sections))):  # type: ignore[arg-type]
        place = ("train", *problem.place)
        if bad.isdisjoint((problem.place[0], *problem.others)):
            reader.report(place, f"{dotted(place)}: {problem.text}")
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
    # a device named by a UUID that begins with MIG is a MIG instance
    mig = (k for k, node in enumerate(config.nodes) for device in node.devices if str(device).startswith("MIG"))
    if train.backend == "nccl" and config.world_size > 1 and (k := next(mig, None)) is not None:
        reader.report(
            ("train", "backend"), f"train.backend: nccl does not connect MIG instances (node{k}); use auto or gloo"
        )
    if train.sampling != "cuda" or not reader.good(("nodes",), ("train", "sampling"), ("data", "topology")):
        return
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
