"""Scalars for TensorBoard of what a rank writes to its metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.core.errors import SettingsError

FOLDER = "tensorboard"  #: below the run folder

_FLUSH = 10  # seconds that a scalar may wait to be written

_PLACES = ("t", "kind", "rank", "epoch", "step", "steps")  # which are no figures

_RUN_WIDE = ("loss", "step_loss")  # of an epoch line; every rank has the same

Line = Mapping[str, Any]


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

    def add(self, line: Line) -> None:
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


def _write_steps(writer: Any, line: Line) -> None:
    """The loss of each step over all ranks, which an epoch line of rank 0 lists; times are spread evenly over it."""
    losses, seconds = line.get("step_loss", ()), float(line["seconds"])
    for i, loss in enumerate(losses, start=1):
        t = float(line["t"]) - seconds * (1 - i / len(losses))
        _write(writer, [("step/loss", loss)], (line["epoch"] - 1) * len(losses) + i, t)


def _write(writer: Any, figures: Iterable[tuple[str, float]], step: int, t: float) -> None:
    for tag, value in figures:
        writer.add_scalar(tag, value, step, walltime=t)


def _figures(tree: Line, above: str) -> Iterator[tuple[str, float]]:
    """Every number of a line by its path, but what came from each host."""
    for key, value in tree.items():
        if key in _PLACES or key == "by_host":
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{above}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{above}/{key}", float(value)
