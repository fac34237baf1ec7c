"""``events.jsonl`` of a run: what the launcher did, and what the nodes told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events as JSON lines; safe to call from several threads."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, kind: str, **more: Any) -> None:
        """An event of the launcher's own, now."""
        self.take({"t": time.time(), "kind": kind, **more})

    def take(self, event: Mapping[str, Any]) -> None:
        """An event as a node wrote it."""
        with self._lock:
            self._file.write(json.dumps(event) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()
