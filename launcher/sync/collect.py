"""Fetches logs, outcomes, metrics, checkpoints, files of trackers and a script's output from the nodes."""

from __future__ import annotations

import base64
import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from launcher.errors import NodeCallError, RemoteFileError, TransportError, reason_of
from launcher.files import atomic_file, decompress, is_plain_path
from launcher.node.json_reader import record_in
from launcher.node.json_records import OUTCOME
from launcher.plan.model import LaunchPlan, NodePlan
from launcher.report.report import RunReport
from launcher.text import printable
from launcher.transport.base import Transport
from launcher.transport.fanout import on_nodes
from launcher.transport.rpc import call
from trainer.core.typed import convert

_TIMEOUT = 120.0  # seconds

_SMALL = 1 << 20  # bytes; files up to this size are sent together in one reply

_ROOM = 32 << 20  # bytes of small files in one reply

#: Files to fetch: pattern of paths below a node's run folder.
_WANTED = (
    r"(?s:logs/[^/]+\.log|outcomes/[^/]+\.json|metrics-rank\d+\.jsonl|output/.+|track/(tensorboard|wandb|mlruns)/.+|"
    r"events\.jsonl|state\.json|result\.json{})"
)

#: Of one node: its last checkpoint, and the place in the trackers.
_OF_FIRST = r"|checkpoints/last\.pt|track/(tensorboard|wandb|mlflow)\.json"

_EPOCHS = r"|checkpoints/epoch-\d{4,}\.pt"  #: with ``train.keep``: after whole epochs, the best ones and the newest two


def collect(
    report: RunReport,
    plan: LaunchPlan,
    transports: Mapping[int, Transport | TransportError],
    first: int | None = None,
) -> None:
    """Fetch the files of all nodes in parallel into the folder of ``report``, and add to it what they say.

    Nodes that fail are listed in its notes. first: node whose checkpoint is fetched (with ``run.restarts`` several
    nodes have checkpoints); None: any node. A file that the folder has with the same size and time is not fetched
    again. Files are written atomically. With ``train.keep``, checkpoints that the node no longer has are deleted.
    """
    folder = report.folder
    nodes = {node.node_rank: node for node in plan.nodes}
    checkpoints = _OF_FIRST + (_EPOCHS if plan.train is not None and plan.train.keep > 1 else "")
    wanted = {k: _WANTED.format(checkpoints if first in (None, k) else "") for k in nodes}
    answers = on_nodes(nodes, lambda k: _collect_node(nodes[k], transports[k], folder, wanted[k]))
    report.notes += [
        f"{nodes[k].label}: its files could not be fetched ({reason_of(answers.errors[k])}); "
        f"they are still on the node, in {nodes[k].run_dir}"
        for k in sorted(answers.errors)
    ]
    report.notes += [note for k in sorted(answers.values) for note in answers.values[k]]
    report.records = {k: _outcomes(folder / "outcomes" / f"node{k}") for k in nodes}


def _collect_node(node: NodePlan, transport: Transport | TransportError, folder: Path, wanted: str) -> list[str]:
    if isinstance(transport, TransportError):
        raise transport
    have = {path: found for path, found in _local_files(node.node_rank, folder).items() if re.fullmatch(wanted, path)}
    request = {"path": node.run_dir, "wanted": wanted, "have": have, "small": _SMALL, "room": _ROOM}
    reply, room = call(transport, node.python, "collect_files", request, _TIMEOUT), _ROOM
    try:
        answer = convert(reply, _Files)
    except ValueError as error:
        message = f"invalid reply, expected a list of files: {error}"
        raise NodeCallError(message, host=transport.target, node_rank=transport.node_rank) from None
    where = {path: f"{node.label}: {node.run_dir}/{path}" for path in (*answer.errors, *answer.files)}
    notes = [f"{where[path]} could not be read ({why})" for path, why in answer.errors.items()]
    for path, file in answer.files.items():
        top, _, name = path.rpartition("/")
        dest = folder / (top or "logs") / f"node{node.node_rank}" / name
        if path.startswith("output/"):
            dest = folder / f"output/node{node.node_rank}/{path.removeprefix('output/')}"
        elif path.startswith(("checkpoints/", "track/")):
            dest = folder / path
        try:
            requested = is_plain_path(path) and re.fullmatch(wanted, path)  # nodes may reply with others
            if not requested or not dest.parent.resolve().is_relative_to(folder.resolve()):
                notes.append(f"{where[path]}: ignored a file that was not requested, or whose name cannot be used here")
                continue
            if file.data is None:
                transport.download(f"{node.run_dir}/{path}", dest, most=file.bytes)
            else:
                content = decompress(base64.b64decode(file.data), min(file.bytes, _SMALL, room))
                room -= len(content)
                with atomic_file(dest) as out:
                    out.write(content)
            os.utime(dest, ns=(file.mtime_ns, file.mtime_ns))
        except (ValueError, RemoteFileError) as error:  # ValueError: also a name that SFTP cannot encode
            notes.append(f"{where[path]} arrived damaged or not at all ({reason_of(error)}); it stays on the node")
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            notes.append(f"{where[path]} cannot be stored as {dest} ({error.strerror}); it stays on the node")
    if any(path.startswith("checkpoints/") for path in (*answer.files, *answer.same)):
        for path in have.keys() - {*answer.files, *answer.same, *answer.errors}:
            if path.startswith("checkpoints/epoch-"):
                (folder / path).unlink(missing_ok=True)
    return [printable(note).replace("\n", " ") for note in notes]


class _File(msgspec.Struct):
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    data: str | None  #: content, zlib in base64; None for a file to be downloaded separately


class _Files(msgspec.Struct):
    files: dict[str, _File]
    errors: dict[str, str]
    same: list[str] = []  #: files that are here already


def _local_files(node_rank: int, folder: Path) -> dict[str, tuple[int, int]]:
    """Return size in bytes and time in ns of the files fetched from a node before, by path in its run folder."""
    tops = {
        f"logs/node{node_rank}": "logs",
        f"outcomes/node{node_rank}": "outcomes",
        f"output/node{node_rank}": "output",
        "track": "track",
        "checkpoints": "checkpoints",
    }
    found = {}
    for top, on_node in tops.items():
        for path in (folder / top).rglob("*"):
            if path.is_file():
                stat = path.stat()
                name = path.relative_to(folder / top).as_posix()
                is_top_level = on_node == "logs" and not name.endswith(".log")
                found[name if is_top_level else f"{on_node}/{name}"] = (stat.st_size, stat.st_mtime_ns)
    return found


def _outcomes(folder: Path) -> tuple[Mapping[str, Any], ...]:
    found = (record_in(OUTCOME, str(file)) for file in sorted(folder.glob("*.json")))
    return tuple(one for one in found if one is not None)
