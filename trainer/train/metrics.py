"""Metrics as JSON lines, one file per rank; docs/ARCHITECTURE.md lists the kinds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.errors import SettingsError

STEP_INTERVAL = 1.0  #: seconds between ``step`` lines


class MetricsLog:
    """Appends to ``metrics-rank<r>.jsonl``; a context manager. Raises ``SettingsError`` when it cannot."""

    def __init__(self, run_dir: Path, rank: int):
        path = run_dir / f"metrics-rank{rank}.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}; choose another --run-dir") from error
        self.rank = rank
        self._next_step = 0.0

    def write(self, kind: str, **values: Any) -> None:
        """Append one line and flush it."""
        line = {"t": round(time.time(), 3), "kind": kind, "rank": self.rank, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def step_due(self) -> bool:
        """Whether a ``step`` line may be written now; at most one a second."""
        now = time.monotonic()
        if now < self._next_step:
            return False
        self._next_step = now + STEP_INTERVAL
        return True

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
