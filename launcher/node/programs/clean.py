"""Node program: lists what gnnfleet left in work folders, and deletes what it is told to. Standard library only.

``main({"op": "list", "workdirs": [glob pattern]})`` replies ``{"items": [{"kind", "path", "bytes", "age", "used"}]}``:
``age`` is the number of seconds since a run last used it, ``used`` says what uses it now ('' for nothing).
``main({"op": "delete", "workdirs", "paths"})`` deletes those of ``paths`` that a new list has and that nothing uses,
and replies ``{"deleted": {path: bytes}, "errors": {path: why}}``.

Only folders that gnnfleet made are listed: ``code/<digest>``, ``data/<name>`` with a manifest, ``runs/<run id>`` with
the files of a node, and the folder of compiled kernels. Links are never followed.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import time
from typing import Any

from launcher.node import procs
from launcher.node.regular_file import open_regular

_RECENT = 900.0  # seconds; a run whose supervisor wrote its state, or whose files came, since then may be alive

_CODE = re.compile(r"[0-9a-f]{16}(\.deleted)?")


def main(request: dict[str, Any]) -> dict[str, Any]:
    """List or delete (format: docstring of the module)."""
    patterns = [os.path.expanduser(pattern) for pattern in request["workdirs"]]
    workdirs = sorted({os.path.realpath(path) for pattern in patterns for path in glob.glob(pattern)})
    runs = [run for workdir in workdirs for run in _folders(workdir, "runs")]
    nodes = [node for run in runs for node in _folders(run, "") if os.path.isfile(os.path.join(node, "run.json"))]
    live = {node: name for node in nodes for name in [os.path.basename(os.path.dirname(node))] if _alive(node)}
    texts = {node: _text(os.path.join(node, "node.json")) + _text(os.path.join(node, "start.sh")) for node in nodes}
    found = [("runs", path) for path in runs if any(os.path.dirname(node) == path for node in nodes)]
    for workdir in workdirs:
        code = _folders(workdir, "code")
        found += [("code", path) for path in code if _CODE.fullmatch(os.path.basename(path))]
        data = _folders(workdir, "data")
        found += [("parts", path) for path in data if os.path.isfile(os.path.join(path, "manifest.json"))]
        own = os.path.join(workdir, "kernels")  # of nodes that run in containers
        found += [("kernels", own)] if glob.glob(glob.escape(own) + "/*.nbc") and not os.path.islink(own) else []
    kernels = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gnnfleet", "kernels")
    found += [("kernels", kernels)] if os.path.isdir(kernels) and not os.path.islink(kernels) else []
    items = []
    for kind, path in found:
        tail = "/".join(["", *path.split("/")[-2:]])  # the rest may be written otherwise, through a link
        users = [node for node in nodes if kind == "kernels" or node.startswith(path + "/") or tail in texts[node]]
        used = sorted({live[node] for node in users if node in live})
        size, newest = _size(path)
        last = max([newest, *(os.path.getmtime(node) for node in users if kind != "kernels")])
        words = "run %s" % ", ".join(used) if used else ""
        age = 0.0 if used else max(0.0, time.time() - last)
        items.append({"kind": kind, "path": path, "bytes": size, "age": age, "used": words})
    if request["op"] == "list":
        return {"items": items}

    known = {item["path"]: item for item in items}
    deleted, errors = {}, {}
    for path in request["paths"]:
        item = known.get(path)
        if item is None or item["used"]:
            errors[path] = "used by %s" % item["used"] if item else "not there any more"
            continue
        try:
            hidden = path if path.endswith(".deleted") else "%s.deleted" % path  # no run finds what is half gone
            os.rename(path, hidden)
            shutil.rmtree(hidden)
            deleted[path] = item["bytes"]
        except OSError as error:
            errors[path] = error.strerror or str(error)
    return {"deleted": deleted, "errors": errors}


def _folders(parent: str, name: str) -> list[str]:
    """Return the folders in ``parent/name`` that are no links; [] if it cannot be read."""
    try:
        entries = list(os.scandir(os.path.join(parent, name)))
    except OSError:
        return []
    return sorted(entry.path.rstrip("/") for entry in entries if entry.is_dir(follow_symlinks=False))


def _alive(node: str) -> bool:
    """Whether the run of a node's run folder may be alive, also on another host that shares the folder."""
    state = os.path.join(node, "state.json")
    over = os.path.isfile(os.path.join(node, "result.json"))
    marks = [os.path.join(node, name) for name in ("state.json", "node.json", "run.json")]
    newest = max([os.path.getmtime(mark) for mark in marks if os.path.isfile(mark)], default=0.0)
    if not over and time.time() - newest < _RECENT:
        return True
    try:
        record = json.loads(_text(state) or "{}")
        return bool(record) and procs.alive(int(record["pid"]), int(record["start_ticks"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return not over  # unreadable: better kept


def _text(path: str) -> str:
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _size(top: str) -> tuple[int, float]:
    """Return the bytes that a folder takes on the disk, and when its newest file or folder was changed."""
    size, newest, seen = 0, 0.0, set()
    for folder, _, names in os.walk(top):
        for path in [folder, *(os.path.join(folder, name) for name in names)]:
            try:
                found = os.lstat(path)
            except OSError:
                continue
            newest = max(newest, found.st_mtime)
            if found.st_ino not in seen:  # a file with several names is counted once
                seen.add(found.st_ino)
                size += found.st_blocks * 512
    return size, newest
