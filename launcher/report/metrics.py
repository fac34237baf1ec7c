"""Reads the metrics files of a run from its folder, in one pass over the lines of all nodes: curves and summaries.

Also which metric a run is scored by.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from launcher.node.json_reader import records
from launcher.node.json_records import METRIC
from launcher.report.profile import Analysis, Profile, analyse

POINTS = 1500  #: maximum of one curve; more points make the page slow and are not visible

Line = Mapping[str, Any]

Point = tuple[float, float]


@dataclass(frozen=True)
class TaskMetric:
    """The metric by which a run chooses its best epoch."""

    name: str = "accuracy"  #: its field in metrics lines
    title: str = "accuracy"
    better: Literal["more", "less"] = "more"

    def of(self, line: Mapping[str, Any], split: str = "") -> float | None:
        """Return the value in an ``eval`` or, with ``split``, a ``result`` line; None if missing or not finite."""
        value = line.get(f"{split}_{self.name}" if split else self.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return float(value)

    def baseline(self, result: Mapping[str, Any], split: str) -> tuple[str, bool]:
        """Return the score of the simplest prediction in a ``result`` line, and whether the run is not better.

        The score is in words, as ``0.1020 (the targets with most links)``; '' if the line has none.
        """
        own, simplest, name = self.of(result, split), self.of(result, f"baseline_{split}"), result.get("baseline")
        if simplest is None or not isinstance(name, str):
            return "", False
        worse = own is not None and (own <= simplest if self.better == "more" else own >= simplest)
        return f"{score_text(simplest)} ({name})" + ("; the model is not better than it" if worse else ""), worse


def metric_of(lines: Iterable[Mapping[str, Any]]) -> TaskMetric:
    """Return the metric of the first line that has a field ``metric``; accuracy if no line has it."""
    for line in lines:
        name = line.get("metric")
        if isinstance(name, str) and name:
            title = line.get("metric_title")
            title = title if isinstance(title, str) and title else name
            return TaskMetric(name, title, "less" if line.get("better") == "lower" else "more")
    return TaskMetric()


def score_text(value: float) -> str:
    """Return a number with four decimals below 1000, one decimal below a million, else four significant digits."""
    return f"{value:.4f}" if abs(value) < 1e3 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"


@dataclass(frozen=True)
class Series:
    """Curves of one run. The x of a step's loss is the number of epochs done: 1.5 is the middle of the second epoch."""

    step_loss: tuple[Point, ...] = ()  #: (epochs done, loss of a global batch); many steps are averaged in groups
    epoch_loss: tuple[Point, ...] = ()  #: (epoch, mean loss)
    metric: TaskMetric = TaskMetric()  #: metric of the task
    scores: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  #: split → (epoch, metric)
    speed: Mapping[int, tuple[Point, ...]] = field(default_factory=dict)  #: rank → (seconds since the epoch, seeds/s)
    epochs: tuple[Line, ...] = ()  #: epoch lines of all ranks

    @property
    def epochs_done(self) -> int:
        return max((int(number(line.get("epoch")) or 0) for line in self.epochs), default=0)


@dataclass
class _Curve:
    """A curve. Whenever it has more than ``2 * POINTS`` points, every second one is dropped."""

    points: list[Point] = field(default_factory=list)
    _stride: int = 1
    _skipped: int = 0

    def add(self, x: float, y: float) -> None:
        self._skipped += 1
        if self._skipped < self._stride:
            return
        self._skipped = 0
        self.points.append((x, y))
        if len(self.points) > 2 * POINTS:
            del self.points[::2]
            self._stride *= 2


@dataclass
class Curves:
    """Collects the curves from metrics lines, which are in order for each rank; malformed lines are skipped."""

    losses: list[Point] = field(default_factory=list)  # losses over all ranks, from epoch lines
    covered: set[int] = field(default_factory=set)  # epochs in ``losses``
    steps: dict[int, dict[int, list[Point]]] = field(default_factory=dict)  # from step lines, by epoch and rank
    evals: dict[str, dict[float, float]] = field(default_factory=dict)
    metric: TaskMetric | None = None
    speed: dict[int, _Curve] = field(default_factory=dict)
    epochs: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        kind, rank = line.get("kind"), line.get("rank")
        if kind == "step" and isinstance(rank, int):
            t, speed = number(line.get("t")), number(line.get("seeds_per_s"))
            if t is not None and speed is not None:
                self.speed.setdefault(rank, _Curve()).add(t, speed)
            epoch, step, loss = (number(line.get(name)) for name in ("epoch", "step", "loss"))
            if epoch is None or step is None or loss is None or int(epoch) in self.covered:
                return
            x = epoch - 1 + (step + 1) / max(1.0, number(line.get("steps")) or 1.0)
            points = self.steps.setdefault(int(epoch), {}).setdefault(rank, [])
            points.append((x, loss))
            if len(points) > 20 * POINTS:
                points[:] = _thinned(sorted(points))
        elif kind == "epoch" and isinstance(rank, int):
            losses, epoch = line.get("step_loss"), number(line.get("epoch"))  # those over all ranks
            if isinstance(losses, list) and losses and epoch is not None:
                points = [
                    (epoch - 1 + (i + 1) / len(losses), loss)
                    for i, each in enumerate(losses)
                    if (loss := number(each)) is not None
                ]
                self.covered.add(int(epoch))
                self.steps.pop(int(epoch), None)
                self.losses += _thinned(points)
                if len(self.losses) > 20 * POINTS:
                    self.losses = _thinned(self.losses)
            self.epochs.append({name: value for name, value in line.items() if name != "step_loss"})
        elif kind == "eval":
            self.metric = self.metric or metric_of([line])
            epoch, score = number(line.get("epoch")), self.metric.of(line)
            if epoch is not None and score is not None:
                self.evals.setdefault(str(line.get("split")), {})[epoch] = score

    def series(self) -> Series:
        # Each rank logs about one step per second, and ranks log different steps. For a smooth curve, consecutive
        # points of different ranks are averaged.
        steps: list[Point] = []
        for _, by_rank in sorted(self.steps.items()):
            groups: list[dict[int, Point]] = [{}]
            for x, y, rank in sorted((x, y, rank) for rank, points in by_rank.items() for x, y in points):
                if rank in groups[-1]:
                    groups.append({})
                groups[-1][rank] = (x, y)
            steps += [_mean_point(list(group.values())) for group in groups if group]
        mean: dict[float, float] = {}
        for line in sorted(self.epochs, key=lambda line: int(line["rank"])):
            epoch, loss = number(line.get("epoch")), number(line.get("loss"))
            if epoch is not None and loss is not None:
                mean.setdefault(epoch, loss)
        return Series(
            tuple(_thinned(self.losses + steps)),
            tuple(sorted(mean.items())),
            self.metric or TaskMetric(),
            {split: tuple(sorted(points.items())) for split, points in sorted(self.evals.items())},
            {rank: tuple(_thinned(curve.points)) for rank, curve in sorted(self.speed.items())},
            tuple(sorted(self.epochs, key=lambda line: int(line["rank"]))),
        )


def _mean_point(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return at most ``POINTS`` points; neighbouring points are replaced by their mean."""
    size = math.ceil(len(points) / POINTS) if points else 1
    if size == 1:
        return list(points)
    return [_mean_point(points[i : i + size]) for i in range(0, len(points), size)]


def number(value: Any) -> float | None:
    """Return ``value`` as a float if it is a finite number; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer too large for a float
        return None


_BLOCK = 1 << 16  # bytes of a metrics file read at once


@dataclass(frozen=True)
class Metrics:
    """The metrics of a run (format of the lines: docs/ARCHITECTURE.md).

    Of the step lines, millions in a long run, only curves and the last one of each file are kept.
    """

    lines: tuple[Mapping[str, Any], ...] = ()  #: of all ranks, except step lines, in order of time
    files: tuple[Path, ...] = ()  #: metrics files of all ranks
    last_steps: Mapping[Path, Mapping[str, Any]] = field(default_factory=dict)  #: last with a loss, by file
    series: Series = Series()
    analysis: Analysis = Analysis()  #: empty before ``analysed``

    @property
    def profile(self) -> Profile | None:
        """Time per step by kind; None before ``analysed``, or if the lines have no times."""
        return self.analysis.profile

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        return [line for line in self.lines if line.get("kind") == kind]

    @property
    def result(self) -> Mapping[str, Any]:
        """The last line of kind ``result``; empty if there is none."""
        found = self.of_kind("result")
        return found[-1] if found else {}

    def analysed(self) -> Metrics:
        """Return these metrics with the trainer's analysis of the files. Raises FleetError if the analysis fails."""
        return replace(self, analysis=analyse(self.files))

    def summary(self) -> dict[str, Any]:
        """Return ``metrics`` of result.json: accuracies, epoch times, profile, mean seeds per second by rank."""
        result = {key: value for key, value in self.result.items() if key not in ("t", "kind", "rank")}
        result |= {"profile": dict(self.profile.summary)} if self.profile else {}
        speed = {str(rank): round(value, 1) for rank, value in self.throughput().items()}
        return {**result, "seeds_per_s": speed} if speed else result

    def throughput(self) -> dict[int, float]:
        """Return each rank's mean seeds per second over its epochs.

        If there are several epochs, the first is left out, since it includes compilation. Of the
        durations of an epoch that the ranks have measured, the shortest is used for all ranks.
        """
        by_rank: dict[int, list[Mapping[str, Any]]] = {}
        lasted: dict[int, float] = {}
        for line in self._timed_epochs():
            by_rank.setdefault(line["rank"], []).append(line)
            lasted[line["epoch"]] = min(line["seconds"], lasted.get(line["epoch"], line["seconds"]))
        found = {}
        for rank, epochs in sorted(by_rank.items()):
            counted = epochs[1:] or epochs
            seconds = sum(lasted[line["epoch"]] for line in counted)
            found[rank] = sum(line["seeds"] for line in counted) / seconds if seconds else 0.0
        return found

    def counted_epochs(self) -> list[int]:
        """Return the epochs that ``throughput`` averages, ascending."""
        epochs = sorted({line["epoch"] for line in self._timed_epochs()})
        return epochs[1:] or epochs

    def _timed_epochs(self) -> list[Mapping[str, Any]]:
        # Lines of a user's own script may have no seeds and seconds.
        return [line for line in self.epochs() if {"rank", "seconds", "seeds"} <= line.keys()]

    def epochs(self) -> list[Mapping[str, Any]]:
        """Return the epoch lines of all ranks; of an epoch repeated after a restart, only each rank's last line."""
        lines = (line for line in self.of_kind("epoch") if "epoch" in line)
        return [*{(line.get("rank"), line["epoch"]): line for line in lines}.values()]


def metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files of all ranks in the folder of a run."""
    return sorted(folder.glob("logs/node*/metrics-rank*.jsonl"))


class _Line(NamedTuple):
    t: float
    text: bytes
    values: Mapping[str, Any]
    file: Path


def read_metrics(files: Iterable[Path], merged: IO[bytes] | None = None) -> Metrics:
    """Read metrics files and merge their lines by time; skip a last line that a killed writer did not complete.

    ``merged``: file to which all lines are written.
    """
    files, curves = tuple(files), Curves()
    lines: list[Mapping[str, Any]] = []
    last_steps: dict[Path, Mapping[str, Any]] = {}
    for line in heapq.merge(*map(_lines_of, files), key=attrgetter("t")):
        if merged is not None:
            merged.write(line.text)
        curves.add(line.values)
        if line.values.get("kind") != "step":
            lines.append(line.values)
        elif {"epoch", "step"} <= line.values.keys() and line.values.get("loss") is not None:
            last_steps[line.file] = line.values
    return Metrics(tuple(lines), files, last_steps, curves.series())


def _lines_of(file: Path) -> Iterator[_Line]:
    # The file is opened again for each block of lines: ranks may outnumber the files that a process may open.
    offset = 0
    while True:
        with file.open("rb") as opened:
            opened.seek(offset)
            lines = opened.readlines(_BLOCK)
            offset = opened.tell()
        if not lines:
            return
        for text in lines:
            for values in records(METRIC, [text]):  # no record if the line is incomplete or not a metrics line
                yield _Line(float(values.get("t", 0.0)), text.rstrip(b"\n") + b"\n", values, file)
