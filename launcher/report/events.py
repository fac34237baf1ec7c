"""``events.jsonl`` of a run: what the launcher did and what the nodes reported; with ``--json`` also on stdout."""

from __future__ import annotations

import fcntl
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from launcher.node.record import write_line


class EventLog:
    """Appends events as JSON lines; safe to call from several threads. ``stream`` gets them too, and more.

    Several may write one file (a launcher, and those that follow its run): an event of a node is kept once.
    """

    def __init__(self, path: Path, stream: TextIO | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b", buffering=0)
        self._lock = threading.Lock()
        self.path, self.stream = path, stream
        self._known: set[str] = set()  # lines of nodes that are in the file
        self._read_to = 0  # byte up to which it has been looked at for them
        self._failed = False

    def add(self, kind: str, **more: Any) -> None:
        """An event of the launcher's own, now."""
        line = json.dumps({"t": time.time(), "kind": kind, **more}) + "\n"
        with self._lock:
            self._keep(line)
            self._stream(line)

    def take(self, event: Mapping[str, Any]) -> None:
        """An event as a node wrote it."""
        line = json.dumps(event) + "\n"
        with self._lock:
            self._keep(line, once=True)
            self._stream(line)

    def tell(self, event: Mapping[str, Any]) -> None:
        """To the stream alone: what is kept elsewhere."""
        if self.stream is not None:
            with self._lock:
                self._stream(json.dumps(event) + "\n")

    def close(self) -> None:
        self._file.close()

    def _keep(self, line: str, *, once: bool = False) -> None:
        """A full disk here is no reason to end a run elsewhere; it is said once."""
        try:
            with self._alone():
                if once and line in self._lines_there():
                    return
                write_line(self._file.fileno(), line.encode())
        except OSError as error:
            if not self._failed:
                print(f"events are not kept any more: {self.path}: {error.strerror}", file=sys.stderr)
            self._failed = True

    def _stream(self, line: str) -> None:
        if self.stream is not None:
            self.stream.write(line)
            self.stream.flush()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other program that follows the run writes meanwhile."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lines_there(self) -> set[str]:
        """Those of nodes, read up to the end of the file."""
        self._file.seek(self._read_to)
        for line in self._file:
            self._known |= {line.decode("utf-8", "replace")} if b'"node_rank"' in line else set()
        self._read_to = self._file.tell()
        return self._known
