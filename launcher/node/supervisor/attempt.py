"""Prepares the next attempt of a run after a restart was decided: specification, cluster.json, and the run folder."""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from launcher.node.json_reader import natural, read_json
from launcher.node.peers.model import Decision
from launcher.node.regular_file import open_regular
from launcher.node.spec import NodeSpec
from launcher.node.supervisor.processes import Idle

#: Files about the ranks and processes of an attempt; moved away before the next attempt writes its own.
_MOVED = ("outcomes", "procs", "progress-rank*", "server.ready", "cluster.json")

_CHECKPOINT = re.compile(r"epoch-(\d{4,})(?:-step-(\d{6,}))?\.pt")  # epochs done, steps done of the next epoch

_COMMENT = b"sha256:"  # followed by 64 hexadecimal digits

_COMMENT_BYTES = len(_COMMENT) + 64

_BLOCK = 1 << 24  # bytes of a checkpoint that are read at once


def next_spec(first: NodeSpec, decision: Decision) -> NodeSpec:
    """Return the specification of this node for the attempt that ``decision`` describes.

    first: specification for the first attempt (node.json).
    """
    present = set(decision["nodes"])
    nodes = [
        replace(
            node,
            role=node.role if k in present else "absent",
            ranks=tuple(decision["ranks"].get(str(k), ())),
            parts=tuple(decision["parts"].get(str(k), ())),
        )
        for k, node in enumerate(first.nodes)
    ]
    trainer = first.trainer
    if trainer and decision["checkpoint"]:
        path = os.path.join(first.run_dir, "checkpoints", str(decision["checkpoint"]["file"]))
        trainer = {**trainer, "env": {**trainer.get("env", {}), "GNNFLEET_RESUME": path}}
    server = first.server
    if server and "--own" in server["argv"]:
        argv = list(server["argv"])
        argv[argv.index("--own") + 1] = ",".join(map(str, nodes[first.node_rank].parts))
        server = {**server, "argv": argv}
    return replace(
        first,
        generation=decision["generation"],
        nodes=tuple(nodes),
        hub=decision["lead"],
        master_addr=first.master_addr if decision["first"] == first.hub else "",
        server=server,
        trainer=trainer,
    )


def read_returns(spec: NodeSpec) -> tuple[bool, NodeSpec]:
    """Return whether this supervisor replaces one that ended without a result, and the specification to use.

    Reads and deletes ``returns.json``, the last ``state.json`` of the earlier supervisor. The specification is ``spec``
    or, for a replacement, ``spec`` with the attempt number from that file.
    """
    path = os.path.join(spec.run_dir, "returns.json")
    try:
        state = read_json(path)
        os.unlink(path)
        generation = natural(state["generation"]) if isinstance(state, dict) else -1
    except (OSError, ValueError, KeyError):
        return False, spec
    if not spec.restarts or generation < 0:
        return False, spec
    return True, replace(spec, generation=generation)


def cluster_file(before: Mapping[str, Any], spec: NodeSpec, decision: Decision) -> dict[str, Any]:
    """Return the content of cluster.json for the attempt that ``decision`` describes.

    before: content of cluster.json in the first attempt. spec: specification of any node for the new attempt.
    """
    nodes = [
        {
            **node,
            "parts": list(spec.nodes[int(node["node_rank"])].parts),
            "ranks": decision["ranks"].get(str(node["node_rank"]), []),
        }
        for node in before["nodes"]
        if int(node["node_rank"]) in spec.active
    ]
    return {**before, "version": int(before.get("version", 1)) + spec.generation, "nodes": nodes}


def archive(run_dir: str, generation: int) -> None:
    """Move the files about ranks and processes of attempt ``generation`` to ``attempts/<generation>/``.

    ``state.json`` is copied, as other programs read the supervisor's pid from it. A file that cannot be moved is
    deleted.
    """
    folder = os.path.join(run_dir, "attempts", str(generation))
    with suppress(OSError):  # a full disk must not prevent the next attempt
        os.makedirs(folder, exist_ok=True)
        shutil.copy(os.path.join(run_dir, "state.json"), folder)
    for pattern in _MOVED:
        for path in glob.glob(os.path.join(glob.escape(run_dir), pattern)):
            try:
                os.rename(path, os.path.join(folder, os.path.basename(path)))
            except OSError:
                with suppress(OSError):
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    for name in ("outcomes", "procs"):
        os.makedirs(os.path.join(run_dir, name), exist_ok=True)


def first_cluster(run_dir: str) -> dict[str, Any] | None:
    """Return the content of cluster.json of the first attempt; None if it is missing or damaged."""
    for path in (os.path.join(run_dir, "attempts", "0", "cluster.json"), os.path.join(run_dir, "cluster.json")):
        with suppress(OSError, ValueError):
            value = read_json(path)
            if isinstance(value, dict):
                return value
    return None


def newest_checkpoint(run_dir: str, idle: Idle = lambda seconds: None) -> dict[str, Any] | None:
    """Return this node's newest undamaged checkpoint: {"file", "epoch", "step"}; None if there is none.

    The file's name contains epoch and step; its ZIP comment is the digest (see trainer/train/checkpoint.py).
    ``idle(0.0)`` is called while a large file is read, for the supervisor's heartbeat.
    """
    folder = os.path.join(run_dir, "checkpoints")
    names: list[str] = []
    with suppress(OSError):  # this node has saved none
        names = os.listdir(folder)
    matches = [match for match in map(_CHECKPOINT.fullmatch, names) if match]
    for match in sorted(matches, key=_position, reverse=True):
        if _is_whole(os.path.join(folder, match[0]), idle):
            epoch, step = _position(match)
            return {"file": match[0], "epoch": epoch, "step": step}
    return None


def _position(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2] or 0)


def _is_whole(path: str, idle: Idle) -> bool:
    """Whether a checkpoint file ends with the SHA-256 of its content; False if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            left = os.fstat(file.fileno()).st_size - _COMMENT_BYTES - 2  # without the comment and its length
            while left > 0:
                block = file.read(min(left, _BLOCK))
                if not block:
                    return False
                digest.update(block)
                left -= len(block)
                idle(0.0)
            return file.read()[2:] == _COMMENT + digest.hexdigest().encode()
    except OSError:
        return False


def parts_on_disk(first: NodeSpec) -> tuple[int, ...]:
    """Return the parts that this node can read.

    These are its own parts and, if its partition folder was not sent by the launcher, all other complete parts in that
    folder. first: specification for the first attempt.
    """
    own = set(first.nodes[first.node_rank].parts)
    if not first.data_dir:
        return tuple(sorted(own))
    try:
        manifest = read_json(os.path.join(first.data_dir, "manifest.json"))
        files = [(str(one["path"]), int(one["bytes"])) for one in manifest["files"]]
        num_parts = int(manifest["num_parts"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return tuple(sorted(own))
    damaged = set()
    for path, size in files:
        try:
            whole = os.stat(os.path.join(first.data_dir, path)).st_size == size
        except OSError:
            whole = False
        if not whole:
            damaged.add(path.partition("/")[0])
    return tuple(sorted(own | {part for part in range(num_parts) if f"part{part}" not in damaged}))
