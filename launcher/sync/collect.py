"""Copies logs, outcomes, metrics, the last checkpoint, TensorBoard events and the script's output from the nodes."""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.errors import TransportError, reason_of
from launcher.files import appearing
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.ending import Collected
from launcher.report.metrics import read_metrics
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import call

_TIMEOUT = 120.0

_SMALL = 1 << 20  # bytes; such files come all in one answer

_ROOM = 32 << 20  # bytes of small files in one answer

#: node's file → place here
_WANTED = (
    r"(logs/[^/]+\.log|outcomes/[^/]+\.json|metrics-rank\d+\.jsonl|checkpoints/last\.pt|output/.+|tensorboard/.+|"
    r"events\.jsonl|state\.json|result\.json)"
)


def collect(plan: LaunchPlan, transports: Mapping[int, Transport | TransportError], folder: Path) -> Collected:
    """Fetch all nodes' files at once; a node that does not answer is noted, not waited for.

    Files that are here as they are there, by size and time, are not fetched again; each appears whole.
    """
    nodes = {node.node_rank: node for node in plan.nodes}
    answers = on_nodes(nodes, lambda k: _collect_node(nodes[k], transports[k], folder))
    notes = [
        f"{nodes[k].label}: its files could not be fetched ({reason_of(answers.errors[k])}); "
        f"they stay there in {nodes[k].run_dir}"
        for k in sorted(answers.errors)
    ]
    notes += [note for k in sorted(answers.values) for note in answers.values[k]]
    metrics = read_metrics(sorted(folder.glob("logs/node*/metrics-rank*.jsonl")))
    outcomes = {k: _outcomes(folder / "outcomes" / f"node{k}") for k in nodes}
    return Collected(metrics, outcomes, tuple(notes))


def _collect_node(node: NodePlan, line: Transport | TransportError, folder: Path) -> list[str]:
    """All wanted files of a node, the small ones in one answer; what could not be read there."""
    if isinstance(line, TransportError):
        raise line
    answer = _pack(node, line, folder)
    for path, file in answer["files"].items():
        if ".." in path.split("/"):
            continue
        here = folder / _place(node.node_rank, path)
        if file["data"] is None:
            line.download(f"{node.run_dir}/{path}", here)
        else:
            with appearing(here) as out:
                out.write(zlib.decompress(base64.b64decode(file["data"])))
        os.utime(here, ns=(file["mtime_ns"], file["mtime_ns"]))
    return [f"{node.label}: {node.run_dir}/{path} could not be read ({why})" for path, why in answer["errors"].items()]


def _pack(node: NodePlan, transport: Transport, folder: Path) -> dict[str, Any]:
    request = {"path": node.run_dir, "wanted": _WANTED, "have": _have(node.node_rank, folder), "small": _SMALL}
    answer: dict[str, Any] = call(transport, node.python, "collect_files", request | {"room": _ROOM}, _TIMEOUT)
    return answer


def _have(node_rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of a node's files that are here, by their path there."""
    tops = {
        f"logs/node{node_rank}": "logs",
        f"outcomes/node{node_rank}": "outcomes",
        f"output/node{node_rank}": "output",
        "tensorboard": "tensorboard",  # a folder for each rank
    }
    found = {}
    for top, there in tops.items():
        for path in (folder / top).rglob("*"):
            if path.is_file():
                stat = path.stat()
                name = path.relative_to(folder / top).as_posix()
                loose = there == "logs" and not name.endswith(".log")
                found[name if loose else f"{there}/{name}"] = (stat.st_size, stat.st_mtime_ns)
    checkpoint = folder / "checkpoints/last.pt"
    if checkpoint.is_file():
        found["checkpoints/last.pt"] = (checkpoint.stat().st_size, checkpoint.stat().st_mtime_ns)
    return found


def _place(node_rank: int, path: str) -> str:
    """Where a node's file is kept here."""
    if path.startswith("output/"):
        return f"output/node{node_rank}/{path.removeprefix('output/')}"
    top, _, name = path.rpartition("/")
    return path if path.startswith(("checkpoints/", "tensorboard/")) else f"{top or 'logs'}/node{node_rank}/{name}"


def _outcomes(folder: Path) -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(file.read_text()) for file in sorted(folder.glob("*.json")))
