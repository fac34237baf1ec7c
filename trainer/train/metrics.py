"""Writes metrics as JSON lines, one file per rank."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
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

    def __init__(self, run_dir: Path, rank: int, tensorboard: bool = False):
        """tensorboard: also write scalars into ``run_dir``/tensorboard."""
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
        self._tensorboard: TensorBoard | None = None
        if tensorboard:
            self._tensorboard = TensorBoard(run_dir, rank)
        self.write("start")

    def write(self, kind: str, **values: Any) -> None:
        """Append a line with the time, ``kind``, the rank and ``values``, and flush the file."""
        line = {"t": round(time.time(), 3), "kind": kind, "rank": self.rank, **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.add(line)

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
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._progress is not None:
            self.at(*self._place, "done")  # the process may still need a while to end, and is not to be called stalled
            self._progress.close()


FOLDER = "tensorboard"  #: folder of TensorBoard files in the run folder

_FLUSH = 10  # seconds that a scalar may wait to be written

_POSITION = ("t", "kind", "rank", "epoch", "step", "steps")  # fields that are not scalars

_RUN_WIDE = ("loss", "step_loss")  # fields of an epoch line that are equal on all ranks

MetricsLine = Mapping[str, Any]


class TensorBoard:
    """Writes the scalars of a rank into ``tensorboard/rank<r>/``. Rank 0 also writes those of the run into ``all/``.

    A tag is the path of a value in its metrics line, such as ``epoch/spent/sample``. The step of ``epoch/`` and
    ``eval/`` tags is the epoch. The step of ``step/`` tags is the number of training steps of all epochs so far. Raises
    ``SettingsError`` if the package tensorboard is not installed.
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
        """Write the scalars of a ``step``, ``epoch`` or ``eval`` line. Lines of other kinds are ignored."""
        kind, epoch, t = line["kind"], line.get("epoch"), float(line["t"])
        if kind == "step":
            done = (line["epoch"] - 1) * line["steps"] + line["step"] + 1
            _write(self._own, _scalars(line, "step"), done, t)
        elif kind == "epoch" and epoch is not None:
            own = {name: value for name, value in line.items() if name not in _RUN_WIDE}
            _write(self._own, _scalars(own, "epoch"), epoch, t)
            if self._all is not None:
                _write(self._all, [(f"epoch/{name}", line[name]) for name in ("loss", "seconds")], epoch, t)
                _write_steps(self._all, line)
        elif kind == "eval" and self._all is not None and epoch is not None:
            _write(self._all, _scalars(line, f"eval/{line['split']}"), epoch, t)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


def _write_steps(writer: Any, line: MetricsLine) -> None:
    """Write the losses ``step_loss`` of an epoch line, at times spread evenly over the epoch."""
    losses, seconds = line.get("step_loss", ()), float(line["seconds"])
    for i, loss in enumerate(losses, start=1):
        t = float(line["t"]) - seconds * (1 - i / len(losses))
        _write(writer, [("step/loss", loss)], (line["epoch"] - 1) * len(losses) + i, t)


def _write(writer: Any, scalars: Iterable[tuple[str, float]], step: int, t: float) -> None:
    for tag, value in scalars:
        writer.add_scalar(tag, value, step, walltime=t)


def _scalars(tree: MetricsLine, above: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if key in _POSITION or key == "by_host":
            continue
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{above}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}/{key}", float(value)
