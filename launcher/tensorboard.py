"""TensorBoard events of a run, made of its metrics lines; only where the package ``tensorboard`` is installed.

Metrics lines → Point → ``tensorboard/all/`` (what is true of the run as a whole) and ``tensorboard/rank<r>/``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from launcher.wholefile import appearing

FOLDER = "tensorboard"
_ALL = "all"
_MOST_BYTES = 16 << 20  #: of metrics files; of larger ones every second, third … step line is taken
_MOST_STEPS = 20_000  #: losses of steps; of more every second, third … is taken
_LARGEST = 2**63  #: that an event's number may have
_NO_FIGURES = ("t", "rank", "epoch", "step", "steps")
_GLOBAL = ("loss", "step_loss")  #: of an epoch line; every rank tells the same
#: Over ranks; others are means.
_SUMMED = ("seeds_per_s", "seeds", "batches", "remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """Values of one moment."""

    writer: str  #: ``all`` or ``rank3``: a folder, and a colour in TensorBoard
    t: float  #: seconds since the epoch
    step: int  #: the steps done, or the epochs where the tags begin with ``epoch/`` or ``eval/``
    values: Mapping[str, float]  #: by tag, as ``step/spent/sample``


def write_events(folder: Path, files: Sequence[Path], lines: Iterable[Line]) -> None:
    """Write ``folder``/tensorboard anew, from ``lines``, those of the metrics ``files``.

    Does nothing where tensorboard is not installed. Raises OSError when the disk does not take it.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except Exception:  # not installed, or with a protobuf of another time: nothing that a run could help
        return
    by_writer: dict[str, list[Point]] = {}
    for point in points(lines, every=1 + sum(file.stat().st_size for file in files) // _MOST_BYTES):
        by_writer.setdefault(point.writer, []).append(point)
    for writer, told in by_writer.items():
        told.sort(key=attrgetter("t"))
        with appearing(folder / FOLDER / writer / f"events.out.tfevents.{folder.name}") as out:
            recorder = RecordWriter(out)
            recorder.write(Event(wall_time=told[0].t, file_version="brain.Event:2").SerializeToString())
            for point in told:
                values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
                event = Event(wall_time=point.t, step=point.step, summary=Summary(value=values))
                recorder.write(event.SerializeToString())


def points(lines: Iterable[Line], every: int = 1) -> Iterator[Point]:
    """Of the lines of all ranks, in any order between ranks; of step lines only each ``every``-th."""
    epochs: dict[int, _Epoch] = {}
    steps = 0
    for line in lines:
        kind, rank, epoch = line.get("kind"), line.get("rank"), line.get("epoch")
        if not isinstance(rank, int) or not _is_count(epoch):
            continue  # an own script's, or of no epoch
        if kind == "step":
            steps += 1
            if steps % every == 0:
                yield _point(f"rank{rank}", line, "step", _steps_done(line))
        elif kind == "epoch":
            yield _point(f"rank{rank}", line, "epoch", epoch, leave=_GLOBAL)
            epochs.setdefault(epoch, _Epoch()).lines.append(line)
        elif kind == "eval":
            yield _point(_ALL, line, f"eval/{line.get('split')}", epoch)
    for epoch, one in sorted(epochs.items()):
        yield from one.points(epoch)
    yield from _step_losses([one.of_rank_0 for _, one in sorted(epochs.items())])


@dataclass
class _Epoch:
    """What all ranks tell of one epoch."""

    lines: list[Line] = field(default_factory=list)

    @property
    def of_rank_0(self) -> Line:
        return next((line for line in self.lines if line.get("rank") == 0), {})

    def points(self, epoch: int) -> Iterator[Point]:
        told = [dict(_figures(line, "epoch", leave=_GLOBAL)) for line in self.lines]
        tags = dict.fromkeys(tag for each in told for tag in each)
        values = {tag: _together(tag, [each[tag] for each in told if tag in each]) for tag in tags}
        loss = self.of_rank_0.get("loss")
        values |= {"epoch/loss": float(loss)} if _is_number(loss) else {}
        yield Point(_ALL, max(map(_time, self.lines)), epoch, values)


def _step_losses(lines: Sequence[Line]) -> Iterator[Point]:
    """The loss of every step over all ranks, which rank 0 tells at an epoch's end; times are evened out over it."""
    told = [line for line in lines if isinstance(line.get("step_loss"), list)]
    every = 1 + sum(len(line["step_loss"]) for line in told) // _MOST_STEPS
    for line in told:
        steps, seconds = len(line["step_loss"]), line.get("seconds")
        lasted = float(seconds) if _is_number(seconds) else 0.0
        for i, loss in enumerate(line["step_loss"], start=1):
            done = (line["epoch"] - 1) * steps + i
            if _is_number(loss) and done % every == 0:
                yield Point(_ALL, _time(line) - lasted * (1 - i / steps), done, {"step/loss": float(loss)})


def _together(tag: str, values: Sequence[float]) -> float:
    """Of all ranks."""
    return sum(values) if tag.rpartition("/")[2] in _SUMMED else sum(values) / len(values)


def _point(writer: str, line: Line, kind: str, step: int, leave: Sequence[str] = ()) -> Point:
    return Point(writer, _time(line), step, dict(_figures(line, kind, leave)))


def _figures(tree: Line, above: str, leave: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """Every number of a line by its path, also those that an own script has added, as ``lr``."""
    for key, value in tree.items():
        if key in _NO_FIGURES or key in leave:
            continue
        if isinstance(value, Mapping):
            yield from _figures(value, f"{above}/{key}")
        elif _is_number(value):
            yield f"{above}/{key}", float(value)


def _steps_done(line: Line) -> int:
    """Since the first epoch, as far as the line tells how many an epoch has."""
    steps, step = line.get("steps"), line.get("step")
    before = (int(line["epoch"]) - 1) * steps if _is_count(steps) else 0
    return before + (step if _is_count(step) else 0)


def _time(line: Line) -> float:
    t = line.get("t")
    return float(t) if _is_number(t) else 0.0


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether an event can hold it; an own script may write what it likes."""
    return isinstance(value, float) or (isinstance(value, int) and type(value) is not bool and abs(value) < _LARGEST)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
