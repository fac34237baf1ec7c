"""Limits the disk space of fetched partition folders: the least recently used ones that no run needs are deleted.

A fetched folder has a note, ``.gnnfleet-store.json``: ``{"url", "used": time of the last fetch, "runs": [{"run_dir",
"host", "boot_id", "since"}]}``. ``runs`` lists the runs that use the folder. Folders without a note, such as those that
the launcher has sent, are neither counted nor deleted. Each change holds the lock file next to the partition folders.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.node.exit_description import size
from launcher.node.json_reader import Record, items, number, record_in, text
from launcher.node.procs import alive, boot_id
from launcher.node.programs.folders import state_of, stored
from launcher.node.record import write_json
from launcher.node.remote_folder import StoreError
from launcher.node.store.fetch import wait_for_lock

NOTE = ".gnnfleet-store.json"

_NOTE = Record(
    {
        "url": text,
        "used": number,
        "runs": items(Record({"run_dir": text, "host": text, "boot_id": text, "since": number}, {}, {})),
    },
    {},
    {},
)

_LOCK = ".gnnfleet-cache.lock"

_EVICTED = ".gnnfleet-evicted-"  # prefix of folders that are being deleted

_START_TIME = 3600.0  # seconds that a launch may take from its fetch to the start of its supervisor

_OTHER_HOST = 14 * 86400.0  # seconds that a claim counts if it is of another host, whose processes are unknown here


def claim(folder: str, url: str, run_dir: str, need: int, limit: int | None) -> list[str]:
    """Record that the run of ``run_dir`` uses ``folder``, and make room for it; return the names of deleted folders.

    url: that of the store. need: bytes of all files that the run needs in ``folder``. limit: how many bytes ``folder``
    and the fetched folders beside it may have together; None for no limit.

    Raises StoreError if the folders of running runs leave too little room; then nothing has been deleted or claimed.
    """
    top = os.path.dirname(folder)
    os.makedirs(top, exist_ok=True)
    with _locked(top):
        evicted = [] if limit is None else _evictable(top, folder, max(need, stored(folder)), limit)
        for name in evicted:
            os.rename(os.path.join(top, name), os.path.join(top, _EVICTED + name))
        os.makedirs(folder, exist_ok=True)
        path, now = os.path.join(folder, NOTE), time.time()
        runs = [run for run in _note(path).get("runs", []) if run["run_dir"] != run_dir and _uses(run)]
        if run_dir:
            runs.append({"run_dir": run_dir, "host": socket.gethostname(), "boot_id": boot_id(), "since": now})
        write_json(path, {"url": url, "used": now, "runs": runs})
        # Also deletes what an earlier program left when it was killed.
        for name in os.listdir(top):
            if name.startswith(_EVICTED):
                shutil.rmtree(os.path.join(top, name), ignore_errors=True)
    return evicted


def _evictable(top: str, folder: str, need: int, limit: int) -> list[str]:
    """Return the folders in ``top`` to delete, so that ``folder`` and the remaining ones fit into ``limit`` bytes.

    need: bytes of all files that the run needs in ``folder``. Chooses the least recently used folders that no run
    needs. Raises StoreError if they do not suffice.
    """
    others = {}
    for name in sorted(os.listdir(top)):
        path = os.path.join(top, name, NOTE)
        if name != os.path.basename(folder) and not name.startswith(".") and os.path.isfile(path):
            others[name] = _note(path)
    sizes = {name: stored(os.path.join(top, name)) for name in others}
    total, chosen = need + sum(sizes.values()), []
    free = [name for name, note in others.items() if not _users(note)]
    for name in sorted(free, key=lambda name: float(others[name].get("used", 0))):
        if total <= limit:
            break
        chosen.append(name)
        total -= sizes[name]
    if total > limit:
        users = sorted({user for name in others if name not in free for user in _users(others[name])})
        held = f" and {size(total - need)} are in use by {', '.join(users)}" if users else ""
        raise StoreError(
            f"{top}: data.store_limit is {size(limit)}, but this run needs {size(need)}{held}; raise the limit"
            + (", or wait for the end of these runs" if users else "")
        )
    return chosen


def _users(note: dict[str, Any]) -> list[str]:
    """Return the ids of the runs that use a folder, by its note."""
    return [os.path.basename(os.path.dirname(run["run_dir"])) for run in note.get("runs", []) if _uses(run)]


def _uses(run: dict[str, Any]) -> bool:
    run_dir, age = run["run_dir"], time.time() - run["since"]
    if not os.path.isdir(run_dir) or os.path.exists(os.path.join(run_dir, "result.json")):
        return False
    if run["host"] != socket.gethostname():
        return age < _OTHER_HOST
    if run["boot_id"] != boot_id():
        return False
    state = state_of(run_dir)
    return alive(state.get("pid"), state.get("start_ticks")) if state else age < _START_TIME


def _note(path: str) -> dict[str, Any]:
    """Return the content of a note; {} if it is missing or damaged."""
    return record_in(_NOTE, path) or {}


@contextmanager
def _locked(top: str) -> Iterator[None]:
    with open(os.path.join(top, _LOCK), "ab") as file:
        wait_for_lock(file, lambda: None)
        yield
