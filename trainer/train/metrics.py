"""Writes metrics as JSON lines, one file per rank."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from typing import Any

from trainer.core.errors import SettingsError

STEP_INTERVAL = 1.0  #: seconds between ``step`` lines

#: What a rank is doing, as written to the progress file; a script may do anything "between" two epochs.
PHASES = ("load", "compute", "reduce", "evaluate", "between", "done")

LOADING = ("sample", "remote", "gather")  #: kinds of work of sampler threads, by which the wait for a batch is split

#: Kinds of work and waiting that a step's time is split into.
KINDS = (*LOADING, "copy", "forward", "backward", "reduce", "optimizer", "other")

_WIDTH = 40  # bytes of the progress file; its size is fixed so that a write replaces the whole text


class MetricsLog:
    """Context manager that appends to ``metrics-rank<r>.jsonl`` and updates ``progress-rank<r>``.

    Raises ``SettingsError`` if the metrics file cannot be opened.
    """

    def __init__(self, run_dir: Path, rank: int):
        path = run_dir / f"metrics-rank{rank}.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}; choose another --run-dir") from error
        self.rank = rank
        self._next_step = 0.0
        self._progress_path = run_dir / f"progress-rank{rank}"
        self._progress: io.FileIO | None = None
        self._place = 0, 0  # last epoch and step in the progress file
        self.write("start")

    def write(self, kind: str, **values: Any) -> None:
        """Append a line with the time, ``kind``, the rank and ``values``, and flush the file."""
        line = {"t": round(time.time(), 3), "kind": kind, "rank": self.rank, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def at(self, epoch: int, step: int, phase: str) -> None:
        """Overwrite the progress file with epoch, step and phase (one of ``PHASES``), by one system call."""
        self._place = epoch, step
        text = f"{epoch} {step} {phase}".ljust(_WIDTH - 1) + "\n"
        try:
            self._progress = self._progress or io.FileIO(self._progress_path, "w")
            os.pwrite(self._progress.fileno(), text.encode(), 0)
        except OSError:  # ignored: if the disk fails, writing metrics or checkpoints raises an error
            pass

    def step_due(self) -> bool:
        """Return whether a ``step`` line may be written now: True at most once per ``STEP_INTERVAL``."""
        now = time.monotonic()
        if now < self._next_step:
            return False
        self._next_step = now + STEP_INTERVAL
        return True

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._progress is not None:
            self.at(*self._place, "done")  # the process may still need a while to end, and is not to be called stalled
            self._progress.close()
