"""Progress of a program that the launcher follows: one JSON object per line of stdout.

The other fields of a line depend on its ``kind``:

- ``start``: ``bytes`` to transfer; ``present``, bytes that need no transfer
- ``bytes``: ``bytes`` since the last line of this kind; negative if a file is transferred again
- ``note``, ``error``: ``text``
- ``done``: ``files``, the number of transferred files
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from launcher.node.json_reader import read_json
from launcher.node.remote_folder import StoreError

_EVERY = 0.2  # seconds between lines of kind ``bytes``


class ProgressLines:
    """Prints the progress lines of a program to stdout. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._last = 0, 0.0
        self.active = time.monotonic()  #: when bytes were last transferred

    def put(self, kind: str, **more: Any) -> None:
        with self._lock:
            self._print(kind, **more)

    def add(self, count: int) -> None:
        """Count ``count`` transferred bytes."""
        with self._lock:
            self.active = time.monotonic()
            self._count += count
            if self.active - self._last >= _EVERY:
                self._flush()

    def end(self, kind: str, status: int, **more: Any) -> NoReturn:
        """Print the last line and end this process at once, even if threads still wait for the store.

        kind, more: ``kind`` and the other fields of the line. status: exit status.
        """
        with self._lock:
            self._flush()
            self._print(kind, **more)
            os._exit(status)

    def _flush(self) -> None:
        if self._count:
            self._print("bytes", bytes=self._count)
        self._count, self._last = 0, time.monotonic()

    def _print(self, kind: str, **more: Any) -> None:
        try:
            sys.stdout.write(json.dumps({"kind": kind, **more}) + "\n")
            sys.stdout.flush()
        except OSError:  # the launcher is gone
            os._exit(1)


def run_program(task: Callable[[dict[str, Any], ProgressLines], int]) -> NoReturn:
    """Run ``task`` with the specification in the file ``sys.argv[1]``, print its progress and end this process.

    ``task`` returns the number of transferred files, or raises StoreError or OSError. The process also ends when its
    stdin is closed: then the launcher has ended, or the connection to the launcher is lost.
    """
    lines = ProgressLines()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        count = task(read_json(sys.argv[1]), lines)
    except StoreError as error:
        lines.end("error", 1, text=str(error))
    except OSError as error:
        lines.end("error", 1, text=f"{error.filename or 'store'}: {error.strerror or error}")
    lines.end("done", 0, files=count)


def _end_with_stdin() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)
