"""Copies logs, outcomes, metrics, the last checkpoint, TensorBoard events and the script's output from the nodes."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from launcher.errors import NodeCallError, TransportError, reason_of
from launcher.files import appearing, inflated, is_plain_path
from launcher.node.json_reader import OUTCOME, record_in
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
    answer, room = _pack(node, line, folder), _ROOM
    notes = [f"{node.label}: {node.run_dir}/{path} could not be read ({why})" for path, why in answer.errors.items()]
    for path, file in answer.files.items():
        here = folder / _place(node.node_rank, path)
        if not _is_wanted(path) or not here.parent.resolve().is_relative_to(folder.resolve()):
            notes.append(f"{node.label}: a file that was not asked for is left there: {path}")
            continue
        if file.data is None:
            line.download(f"{node.run_dir}/{path}", here, most=file.bytes)
        else:
            try:
                content = inflated(base64.b64decode(file.data), min(file.bytes, _SMALL, room))
            except ValueError as error:
                notes.append(f"{node.label}: {node.run_dir}/{path} came damaged ({error}); it stays there")
                continue
            room -= len(content)
            with appearing(here) as out:
                out.write(content)
        os.utime(here, ns=(file.mtime_ns, file.mtime_ns))
    return notes


class _File(msgspec.Struct):
    """One file as ``node/programs/collect_files.py`` tells of it."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    data: str | None  #: base64 of zlib; None: to be fetched by itself


class _Files(msgspec.Struct):
    files: dict[str, _File]
    errors: dict[str, str]


def _pack(node: NodePlan, transport: Transport, folder: Path) -> _Files:
    request = {"path": node.run_dir, "wanted": _WANTED, "have": _have(node.node_rank, folder), "small": _SMALL}
    answer = call(transport, node.python, "collect_files", request | {"room": _ROOM}, _TIMEOUT)
    try:
        return msgspec.convert(answer, _Files)
    except ValueError as error:
        message = f"what it answers is no list of files: {error}"
        raise NodeCallError(message, host=transport.target, node_rank=transport.node_rank) from None


def _is_wanted(path: str) -> bool:
    """Whether a path that a node gives is one that it was asked for."""
    return is_plain_path(path) and re.fullmatch(_WANTED, path) is not None


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
    """What became of a node's processes; damaged files are left out."""
    found = (record_in(OUTCOME, str(file)) for file in sorted(folder.glob("*.json")))
    return tuple(one for one in found if one is not None)
