"""``events.jsonl`` of a run: what the launcher did, and what the nodes told; with ``--json`` on stdout as well."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """Appends events as JSON lines; safe to call from several threads. ``stream`` gets them too, and more."""

    def __init__(self, path: Path, stream: TextIO | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.path, self.stream = path, stream
        self._failed = False

    def add(self, kind: str, **more: Any) -> None:
        """An event of the launcher's own, now."""
        self.take({"t": time.time(), "kind": kind, **more})

    def take(self, event: Mapping[str, Any]) -> None:
        """An event as a node wrote it."""
        line = json.dumps(event) + "\n"
        with self._lock:
            self._keep(line)
            self._stream(line)

    def tell(self, event: Mapping[str, Any]) -> None:
        """To the stream alone: what is kept elsewhere."""
        if self.stream is not None:
            with self._lock:
                self._stream(json.dumps(event) + "\n")

    def close(self) -> None:
        self._file.close()

    def _keep(self, line: str) -> None:
        """A full disk here is no reason to end a run elsewhere; it is said once."""
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            if not self._failed:
                print(f"events are not kept any more: {self.path}: {error.strerror}", file=sys.stderr)
            self._failed = True

    def _stream(self, line: str) -> None:
        if self.stream is not None:
            self.stream.write(line)
            self.stream.flush()
