"""Makes the config of a rehearsal: the nodes, ranks and settings of a cluster's config, all on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig
from launcher.errors import UsageError

#: Vertices of generated graphs whose options do not contain num_nodes; trainer/data/options.py has these defaults.
_GENERATED = {"synthetic": 20_000, "synthetic-hetero": 10_000}

#: Prefixes of environment variables that name devices or network interfaces of the real hosts.
_HARDWARE = ("CUDA_", "GLOO_", "NCCL_")


def local_config(config: ClusterConfig, folder: Path, vertices: int) -> ClusterConfig:
    """Return the config of a rehearsal of ``config``.

    Nodes, roles, processes per node and settings are the same. All nodes run on this machine, on the CPU, with the
    Python of this program, on any free ports and without a checkpoint to resume from.

    Args:
        config: the config of the cluster, with the selected nodes only.
        folder: absolute path of the folder for the parts and the nodes' work folders.
        vertices: largest number of vertices of the graph.

    Raises:
        UsageError: the graph belongs to a serving cluster, or cannot be made smaller.
    """
    data = config.data
    if data.serving:
        raise UsageError(
            f"data.serving: the graph of `{data.serving}` exists only on its servers, so this config cannot be "
            "rehearsed; rehearse the config of the serving cluster, or give a graph with --dataset and --set "
            "data.serving=null"
        )
    options = smaller_graph_options(data, vertices)
    made_of = [data.dataset, data.source, options, data.num_parts, len(config.holders), asdict(data.partition)]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()
    nodes = (
        NodeConfig(
            host="localhost",
            role=node.role,
            procs=node.nproc or None,
            batch_share=node.batch_share,
            workdir=f"{folder}/node{{node_rank}}",
            env={name: value for name, value in node.env.items() if not name.startswith(_HARDWARE)},
        )
        for node in config.nodes
    )
    return replace(
        config,
        name=f"{config.name}-rehearsal",
        transport="local",
        slurm={},
        slurm_job=None,
        nodes=tuple(nodes),
        data=replace(
            data,
            options=options,
            folder=f"{folder}/parts-{digest[:12]}",  # the partitioner does not replace the parts of another graph
            mode="sync",
            store=None,
            store_options={},
            store_limit=None,
        ),
        train=replace(
            config.train,
            backend="gloo" if config.train.backend == "nccl" else config.train.backend,
            sampling="cpu" if config.train.sampling == "cuda" else config.train.sampling,
            device_cache="0",
            resume=None,
            start=None,
        ),
        run=replace(
            config.run,
            master_addr="auto",
            master_port="auto",
            service_port="auto",
            control_port="auto",
            encrypt="on" if (config.run.encrypt == "auto" and not config.local) else config.run.encrypt,
        ),
    )


def smaller_graph_options(data: DataConfig, vertices: int) -> Mapping[str, Any]:
    """Return ``data.options`` for a graph of at most ``vertices`` vertices.

    Graphs that are generated become smaller; graphs that are read are reduced to a subset. Raises UsageError for a
    partition folder.
    """
    if data.dataset == "partition":
        raise UsageError(
            "data.dataset: the graph of a partition folder cannot be made smaller; rehearse on another graph, such as "
            "--dataset synthetic, with options such as --set data.options.num_features=128"
        )
    if data.dataset not in _GENERATED:
        return {**data.options, "subset": min(vertices, data.options.get("subset") or vertices)}
    whole = _number(data.options.get("num_nodes"), _GENERATED[data.dataset])
    size = min(int(whole), vertices)
    counts = {name: _number(data.options.get(name), 0) for name in ("train", "val", "test")}
    scaled = {name: max(1, int(count * size / whole)) for name, count in counts.items() if count >= 1 and size < whole}
    return {**data.options, **scaled, "num_nodes": size}


def _number(value: Any, default: float) -> float:
    try:
        return max(float(value), 0.0) or default
    except (TypeError, ValueError):  # the trainer reports other values
        return default
