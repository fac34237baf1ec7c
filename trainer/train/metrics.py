"""Metrics as JSON lines, one file per rank; docs/ARCHITECTURE.md lists the kinds."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from trainer.core.errors import SettingsError

STEP_INTERVAL = 1.0  #: seconds between ``step`` lines

PHASES = ("load", "compute", "reduce", "evaluate")  #: what a rank is at

LOADING = ("sample", "remote", "gather")  #: parts of the wait for a batch, and of the work on it

#: What a step's time goes to.
KINDS = (*LOADING, "copy", "forward", "backward", "reduce", "optimizer", "other")

_WIDTH = 40  # bytes of the progress file, so that it is always overwritten whole


class MetricsLog:
    """Appends to ``metrics-rank<r>.jsonl`` and keeps ``progress-rank<r>``; a context manager.

    Raises ``SettingsError`` when it cannot.
    """

    def __init__(self, run_dir: Path, rank: int, tensorboard: bool = False):
        """tensorboard: also write scalars below ``run_dir``/tensorboard."""
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
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            from trainer.train.tensorboard import TensorBoard

            self._tensorboard = TensorBoard(run_dir, rank)
        self.write("start")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line and flush it."""
        line = {"t": round(time.time(), 3), "kind": kind, "rank": self.rank, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.add(line)

    def at(self, epoch: int, step: int, phase: str) -> None:
        """Overwrite the progress file; as cheap as a system call, so it may be done several times a step.

        phase: one of ``PHASES``.
        """
        text = f"{epoch} {step} {phase}".ljust(_WIDTH - 1) + "\n"
        try:
            self._progress = self._progress or io.FileIO(self._progress_path, "w")
            os.pwrite(self._progress.fileno(), text.encode(), 0)
        except OSError:  # a disk that is gone does not matter here; what has to be written says so
            pass

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
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._progress is not None:
            self._progress.close()
