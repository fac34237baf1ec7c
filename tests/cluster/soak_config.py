"""Writes the cluster.yml of a soak scenario, and returns the arguments of its launch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launching import write_config
from netns import NetCluster
from scenario import ENDLESS, GRAPHS, NUM_PARTS, STALL_AFTER, Scenario
from ssh_nodes import ssh_nodes


def data_section(scenario: Scenario, parts: Path, *, alone: bool = False) -> dict[str, Any]:
    """Return the section ``data``. ``alone``: for the comparison run with one process."""
    section = {**GRAPHS[scenario.graph], "folder": str(parts / scenario.graph), "num_parts": NUM_PARTS}
    placement = {"replicas": scenario.replicas, "topology": scenario.topology, "cache": scenario.cache}
    return section if alone else section | placement


def train_section(scenario: Scenario, epochs: int = ENDLESS) -> dict[str, Any]:
    model = "rsage" if scenario.graph == "heterogeneous" else "sage"
    section = {"model": model, "hidden": 8, "batch_size": 30, "epochs": epochs, "eval_every": 4}
    return section | {"checkpoint_seconds": 0.5, **scenario.sampler}


def run_section(scenario: Scenario, *, resumed: bool = False) -> dict[str, Any]:
    # a resumed run keeps the default stall_after: a rank that exits slowly could else count as stalled
    section: dict[str, Any] = {"connect_timeout": 3, "lost_after": 12, "restarts": 0 if resumed else scenario.restarts}
    return section | ({"stall_after": STALL_AFTER} if scenario.fault.kind == "stop" and not resumed else {})


def job_words(scenario: Scenario, epochs: int = ENDLESS, pause: float = 0.05) -> list[str]:
    """Return the launch arguments that start the user script; [] if the scenario runs the bundled trainer."""
    words = ["--", "python", "job.py", str(epochs), json.dumps(scenario.sampler), str(pause)]
    return words if scenario.own else []


def node_list(cluster: NetCluster, scenario: Scenario, pythons: Sequence[str], more: int = 0) -> list[dict[str, Any]]:
    """Return the nodes of the scenario, and ``more`` further nodes with one process each."""
    procs = (*[1] * scenario.servers, *scenario.procs, *[1] * more)
    nodes = ssh_nodes(cluster, procs, pythons)
    for k, node in enumerate(nodes if scenario.servers else ()):
        node["role"] = "server" if k < scenario.servers else "client"
        if k < scenario.servers:
            del node["procs"]
    return nodes


def cluster_file(
    folder: Path, cluster: NetCluster, scenario: Scenario, pythons: Sequence[str], parts: Path, epochs: int = ENDLESS,
    more: int = 0,
) -> Path:  # fmt: skip
    return write_config(
        folder,
        node_list(cluster, scenario, pythons, more),
        data=data_section(scenario, parts),
        train=train_section(scenario, epochs),
        run=run_section(scenario, resumed=more > 0),
    )
