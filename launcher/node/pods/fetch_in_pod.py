"""Program: fetches the parts of one node of an exported run from ``data.store``. ``fetch_in_pod.py RUN``, in a pod.

RUN: folder with the ConfigMap of the run (``launcher.node.pods.exported_run``); ``fetch`` in ``node<k>.json`` has

- ``url`` and ``options`` of the store
- ``folder``: the partition folder in the pod
- ``parts``: ids of the node's parts; ``replicated``: whether the node also needs the edges of the others
- ``manifest``: SHA-256 of the manifest; '' if any parts will do
- ``limit``: how many bytes all fetched partition folders may have together; null for no limit

Writes the number of fetched bytes to ``fetched.json`` in the node run folder, so that other pods know why they wait.
Exit status: 0 (the parts are complete, or the node needs none), 1 (failed; another attempt may succeed), 2 (another
attempt would fail as well).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

if not __package__:  # run as a file: make the package above importable
    sys.path[0] = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))

from launcher.node.exit_description import size
from launcher.node.pods.exported_run import FETCHED, ExportedNode, Unusable, run_program
from launcher.node.record import write_json
from launcher.node.remote_folder import RemoteFolder, StoreError
from launcher.node.store.fetch_parts import fetch_parts
from launcher.node.store.part_files import OtherParts, stored_files
from launcher.node.store.progress_lines import ProgressLines

_PAUSE = 10.0  # seconds between two tries

_REPORT_EVERY = 10.0  # seconds between two lines


class _PodProgress(ProgressLines):
    """Prints the progress for people, and passes the number of bytes to ``record`` every few seconds."""

    def __init__(self, url: str, record: Callable[[int], None]) -> None:
        super().__init__()
        self._url, self._record = url, record
        self._need = self._reported_at = 0.0
        self.bytes = 0  #: fetched so far

    def finish(self) -> None:
        """Count the last bytes and record their number."""
        with self._lock:
            self._flush()
            self._record(self.bytes)

    def _print(self, kind: str, **more: Any) -> None:
        if kind == "start":
            self._need = self.bytes + more["bytes"]
            print(f"fetching {size(more['bytes'])} from {self._url}; {size(more['present'])} are here", flush=True)
        elif kind == "bytes":
            self.bytes += more["bytes"]
            if time.monotonic() - self._reported_at >= _REPORT_EVERY:
                self._reported_at = time.monotonic()
                self._record(self.bytes)
                print(f"fetched {size(self.bytes)} of {size(int(self._need))}", flush=True)
        else:
            print(more["text"], flush=True)


def fetch_for(node: ExportedNode) -> None:
    """Fetch the parts of a node. Tries again while the store is not reachable.

    Raises StoreError, OSError, and Unusable if the store has no parts or others than those of the run.
    """
    content = node.node_file()
    spec = content["fetch"]
    os.makedirs(node.run_dir, exist_ok=True)
    if spec is None:
        return
    for name, text in content["env"].items():  # may name the region or the address of the store
        os.environ.setdefault(name, text)

    def record(count: int) -> None:
        write_json(node.path(FETCHED), {"bytes": count, "time": time.time()})

    record(0)
    lines = _PodProgress(spec["url"], record)
    seen, deadline = 0, node.deadline
    while True:
        try:
            store = RemoteFolder(spec["url"], spec["options"])
            files = stored_files(store, spec["parts"], replicated=spec["replicated"], sha256=spec["manifest"])
            fetch_parts({**spec, "files": files, "run_dir": node.run_dir}, lines)
            lines.finish()
            print(f"the parts are complete in {spec['folder']}", flush=True)
            return
        except OtherParts as error:
            raise Unusable(str(error)) from None
        except StoreError as error:
            if lines.bytes > seen:
                seen, deadline = lines.bytes, time.monotonic() + node.export["wait"]
            if not error.retry or time.monotonic() + _PAUSE > deadline:
                raise
            print(f"{error}; trying again in {_PAUSE:g} s", flush=True)
            time.sleep(_PAUSE)


def main() -> int:
    def fetch() -> int:
        fetch_for(ExportedNode(sys.argv[1], os.environ))
        return 0

    return run_program(fetch)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads may still wait for the store
