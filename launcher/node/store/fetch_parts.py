"""Program ``fetch_parts.py SPEC``: fetches the files of a node's parts from a store.

SPEC is a JSON file with

- ``url`` and ``options`` of the store
- ``folder``: the partition folder on this machine
- ``files``: list of [path, bytes, sha256]
- ``run_dir``: folder of the run that needs the files; '' for none
- ``limit``: how many bytes all fetched partition folders may have together; null for no limit

The program prints its progress (format: launcher/node/store/progress_lines.py). It ends when its stdin is closed.
"""

from __future__ import annotations

import os
from typing import Any

from launcher.node.remote_folder import RemoteFolder
from launcher.node.store.fetch import StoredFile, fetch
from launcher.node.store.parts_cache import claim
from launcher.node.store.progress_lines import ProgressLines, run_program


def fetch_parts(spec: dict[str, Any], lines: ProgressLines) -> int:
    """Fetch the files of a specification; return how many were not there yet. Raises StoreError and OSError."""
    store, folder = RemoteFolder(spec["url"], spec["options"]), os.path.expanduser(spec["folder"])
    files = [StoredFile(*file) for file in spec["files"]]
    if spec["run_dir"]:
        need = sum(file.bytes for file in files)
        run_dir = os.path.expanduser(spec["run_dir"])
        for name in claim(folder, store.url, run_dir, need, spec["limit"]):
            lines.put("note", text=f"deleted {os.path.dirname(folder)}/{name} to stay below data.store_limit")
    return fetch(store, folder, files, lines)


if __name__ == "__main__":
    run_program(fetch_parts)
