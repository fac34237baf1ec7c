"""Bring logs, outcomes, metrics, the last checkpoint and own scripts' output from the nodes into the run folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.fanout import on_nodes
from launcher.plan import LaunchPlan, NodePlan
from launcher.report import Metrics, read_metrics
from launcher.sync import ask_files
from launcher.transport.base import Transport

_TIMEOUT = 60.0
_WANTED = re.compile(r"logs/[^/]+\.log|outcomes/[^/]+\.json|metrics-rank\d+\.jsonl|checkpoints/last\.pt|output/.+")


@dataclass(frozen=True)
class Collected:
    """What could be brought here."""

    metrics: Metrics
    outcomes: Mapping[int, tuple[Mapping[str, Any], ...]]  #: outcome records by node_rank
    notes: tuple[str, ...]  #: which node's files are missing, and why


def collect(plan: LaunchPlan, transports: Mapping[int, Transport], folder: Path) -> Collected:
    """Fetch all nodes' files at once; a node that does not answer is noted, not waited for."""
    nodes = {node.node_rank: node for node in plan.nodes}
    answers = on_nodes(nodes, lambda k: _collect_node(nodes[k], transports[k], folder))
    notes = [
        f"{nodes[k].label}: its files could not be fetched ({answers.errors[k]}); they stay there in {nodes[k].run_dir}"
        for k in sorted(answers.errors)
    ]
    metrics = read_metrics(sorted(folder.glob("logs/node*/metrics-rank*.jsonl")))
    outcomes = {k: _outcomes(folder / "outcomes" / f"node{k}") for k in nodes}
    return Collected(metrics, outcomes, tuple(notes))


def _collect_node(node: NodePlan, transport: Transport, folder: Path) -> None:
    listed = ask_files(transport, node, {"op": "list", "path": node.run_dir}, _TIMEOUT)["files"]
    for path in (file["path"] for file in listed):
        if _WANTED.fullmatch(path) and ".." not in path.split("/"):
            transport.download(f"{node.run_dir}/{path}", folder / _place(node.node_rank, path))


def _place(node_rank: int, path: str) -> str:
    """Where a node's file is kept here."""
    if path.startswith("output/"):
        return f"output/node{node_rank}/{path.removeprefix('output/')}"
    top, _, name = path.rpartition("/")
    return path if top == "checkpoints" else f"{top or 'logs'}/node{node_rank}/{name}"


def _outcomes(folder: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
