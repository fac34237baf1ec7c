"""Metrics as JSON lines, one file per rank; docs/ARCHITECTURE.md lists the kinds."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
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
            pass

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


FOLDER = "tensorboard"  #: below the run folder

_FLUSH = 10  # seconds that a scalar may wait to be written

_PLACES = ("t", "kind", "rank", "epoch", "step", "steps")  # which are no figures

_RUN_WIDE = ("loss", "step_loss")  # of an epoch line; every rank has the same

MetricsLine = Mapping[str, Any]


class TensorBoard:
    """Writes ``tensorboard/rank<r>/`` of a rank's own figures and, as rank 0, ``tensorboard/all/`` of the run's.

    A tag is a figure's path in its line, as ``epoch/spent/sample``. Steps count over all epochs; of ``epoch/`` and
    ``eval/`` tags the step is the epoch. Raises ``SettingsError`` where the package tensorboard is not installed.
    """

    def __init__(self, run_dir: Path, rank: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise SettingsError(
                f"--tensorboard (train.tensorboard) needs the package tensorboard: pip install tensorboard ({error})"
            ) from error
        names = [f"rank{rank}", *(["all"] if rank == 0 else [])]
        self._writers: dict[str, Any] = {
            name: SummaryWriter(str(run_dir / FOLDER / name), flush_secs=_FLUSH)  # type: ignore[no-untyped-call]
            for name in names
        }
        self._own, self._all = self._writers[names[0]], self._writers.get("all")

    def add(self, line: MetricsLine) -> None:
        """Write the figures of a ``step``, ``epoch`` or ``eval`` line; others have none."""
        kind, epoch, t = line["kind"], line.get("epoch"), float(line["t"])
        if kind == "step":
            done = (line["epoch"] - 1) * line["steps"] + line["step"] + 1
            _write(self._own, _figures(line, "step"), done, t)
        elif kind == "epoch" and epoch is not None:
            own = {name: value for name, value in line.items() if name not in _RUN_WIDE}
            _write(self._own, _figures(own, "epoch"), epoch, t)
            if self._all is not None:
                _write(self._all, [(f"epoch/{name}", line[name]) for name in ("loss", "seconds")], epoch, t)
                _write_steps(self._all, line)
        elif kind == "eval" and self._all is not None and epoch is not None:
            _write(self._all, _figures(line, f"eval/{line['split']}"), epoch, t)

    def close(self) -> None:
        """Write what is left and close the files."""
        for writer in self._writers.values():
            writer.close()


def _write_steps(writer: Any, line: MetricsLine) -> None:
    """The loss of each step over all ranks, which an epoch line of rank 0 lists; times are spread evenly over it."""
    losses, seconds = line.get("step_loss", ()), float(line["seconds"])
    for i, loss in enumerate(losses, start=1):
        t = float(line["t"]) - seconds * (1 - i / len(losses))
        _write(writer, [("step/loss", loss)], (line["epoch"] - 1) * len(losses) + i, t)


def _write(writer: Any, figures: Iterable[tuple[str, float]], step: int, t: float) -> None:
    for tag, value in figures:
        writer.add_scalar(tag, value, step, walltime=t)


def _figures(tree: MetricsLine, above: str) -> Iterator[tuple[str, float]]:
    """Every number of a line by its path, but what came from each host."""
    for key, value in tree.items():
        if key in _PLACES or key == "by_host":
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{above}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}/{key}", float(value)
