"""Program ``push_parts.py SPEC``: uploads a partition folder to a store.

SPEC is a JSON file with

- ``url`` and ``options`` of the store
- ``folder``: the partition folder on this machine
- ``files``: list of [path, bytes, sha256], the manifest last
- ``made``: arguments of the command that made the parts; [] if unknown
- ``replace``: whether parts of another partition in the store are replaced

The program prints its progress (format: launcher/node/store/progress_lines.py). It ends when its stdin is closed.

The store gets the files of the folder and ``.gnnfleet-pushed.json``: ``{"manifest": its sha256, "made"}``. The program
uploads ``.gnnfleet-pushed.json`` first and the manifest last. So the parts in a store with a manifest are complete, and
an interrupted upload of the same parts continues with the missing files.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from launcher.node.json_reader import loads
from launcher.node.programs.files import inventory
from launcher.node.remote_folder import NotStored, RemoteFolder, StoreError
from launcher.node.store.fetch import MANIFEST, StoredFile
from launcher.node.store.progress_lines import ProgressLines, run_program

PUSHED = ".gnnfleet-pushed.json"

_MOST_NOTE = 1 << 20  # bytes

_AT_ONCE = 8  # files uploaded at the same time


def push_parts(spec: dict[str, Any], lines: ProgressLines) -> int:
    """Upload the files of a specification; return how many were uploaded. Raises StoreError and OSError."""
    store, folder = RemoteFolder(spec["url"], spec["options"]), spec["folder"]
    files = [StoredFile(*file) for file in spec["files"]]
    manifest = next(file for file in files if file.path == MANIFEST)
    entries = [{"path": os.path.join(folder, file.path), "bytes": file.bytes, "sha256": file.sha256} for file in files]
    for state in inventory(entries):
        if state["state"] != "present":
            raise StoreError(
                f"{state['path']} differs from its manifest or is missing; nothing was uploaded. Delete the partition "
                "folder and make the parts again"
            )
    if spec["replace"]:
        for path in [MANIFEST, *store.files()]:
            store.delete(path)
    pushed = pushed_note(store)
    resumed = pushed.get("manifest") == manifest.sha256
    if not resumed or pushed.get("made") != spec["made"]:
        store.write(PUSHED, json.dumps({"manifest": manifest.sha256, "made": spec["made"]}).encode())
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        sizes = pool.map(lambda file: store.size(file.path), files) if resumed else [None for _ in files]
        todo = [file for file, there in zip(files, sizes, strict=True) if there != file.bytes and file.path != MANIFEST]
    need = sum(file.bytes for file in todo) + manifest.bytes
    lines.put("start", bytes=need, present=sum(file.bytes for file in files) - need)
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        jobs = [pool.submit(store.upload, os.path.join(folder, file.path), file.path, lines.add) for file in todo]
        for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
            job.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    with open(os.path.join(folder, MANIFEST), "rb") as stream:
        store.write(MANIFEST, stream.read())
    lines.add(manifest.bytes)
    return len(todo) + 1


def pushed_note(store: RemoteFolder) -> dict[str, Any]:
    """Return the content of ``.gnnfleet-pushed.json`` in a store; {} if it is missing or damaged."""
    try:
        found = loads(store.read(PUSHED, 0, _MOST_NOTE))
    except (NotStored, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


if __name__ == "__main__":
    run_program(push_parts)
