"""Builds the curves of a report from the metrics lines of all ranks, in one pass and in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POINTS = 1500  #: of one curve; a page with more is slow, and nobody sees them

Line = Mapping[str, Any]

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """What the metrics of one run draw. x of a loss is in epochs done: 1.5 is the middle of the second."""

    step_loss: tuple[
        Point, ...
    ] = ()  #: (epochs done, loss of a global batch), several steps averaged where there are many
    epoch_loss: tuple[Point, ...] = ()  #: (epoch, mean loss)
    accuracy: Mapping[str, tuple[Point, ...]] = field(default_factory=dict)  #: split → (epoch, fraction)
    speed: Mapping[int, tuple[Point, ...]] = field(default_factory=dict)  #: rank → (seconds since the epoch, seeds/s)
    epochs: tuple[Line, ...] = ()  #: epoch lines of all ranks

    @property
    def epochs_done(self) -> int:
        """Of the rank that is furthest."""
        return max((_whole(line.get("epoch")) for line in self.epochs), default=0)


def read_series(lines: Iterable[Line]) -> Series:
    """Of ``lines``, each rank's in its order; a line that is not as it should be counts for nothing."""
    seen = _Seen()
    for line in lines:
        seen.take(line)
    return seen.series()


@dataclass
class _Curve:
    """Points, thinned to a half whenever there are twice too many."""

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
class _Seen:
    """What has been read."""

    losses: list[Point] = field(default_factory=list)  # of whole epochs, from lists over all ranks
    covered: set[int] = field(default_factory=set)  # those epochs
    steps: dict[int, dict[int, list[Point]]] = field(default_factory=dict)  # by epoch and rank, of step lines
    evals: dict[str, dict[float, float]] = field(default_factory=dict)
    speed: dict[int, _Curve] = field(default_factory=dict)
    epochs: list[Line] = field(default_factory=list)

    def take(self, line: Line) -> None:
        kind, rank = line.get("kind"), line.get("rank")
        if kind == "step" and isinstance(rank, int):
            self._step(rank, line)
        elif kind == "epoch" and isinstance(rank, int):
            self._epoch(line)
        elif kind == "eval":
            epoch, accuracy = number(line.get("epoch")), number(line.get("accuracy"))
            if epoch is not None and accuracy is not None:
                self.evals.setdefault(str(line.get("split")), {})[epoch] = accuracy

    def series(self) -> Series:
        steps = [point for epoch in sorted(self.steps) for point in mean_over_ranks(self.steps[epoch])]
        mean: dict[float, float] = {}
        for line in self.epochs:
            epoch, loss = number(line.get("epoch")), number(line.get("loss"))
            if epoch is not None and loss is not None:
                mean.setdefault(epoch, loss)
        return Series(
            tuple(thinned(self.losses + steps)),
            tuple(sorted(mean.items())),
            {split: tuple(sorted(points.items())) for split, points in sorted(self.evals.items())},
            {rank: tuple(thinned(curve.points)) for rank, curve in sorted(self.speed.items())},
            tuple(self.epochs),
        )

    def _step(self, rank: int, line: Line) -> None:
        t, speed = number(line.get("t")), number(line.get("seeds_per_s"))
        if t is not None and speed is not None:
            self.speed.setdefault(rank, _Curve()).add(t, speed)
        epoch, step, loss = (number(line.get(name)) for name in ("epoch", "step", "loss"))
        if epoch is not None and step is not None and loss is not None:
            x = epoch - 1 + (step + 1) / max(1.0, number(line.get("steps")) or 1.0)
            self._step_loss(int(epoch), rank, (x, loss))

    def _step_loss(self, epoch: int, rank: int, point: Point) -> None:
        """Of one rank's seeds: shown only where no line tells the loss over all ranks."""
        if epoch in self.covered:
            return
        points = self.steps.setdefault(epoch, {}).setdefault(rank, [])
        points.append(point)
        if len(points) > 20 * POINTS:
            points[:] = thinned(sorted(points))

    def _epoch(self, line: Line) -> None:
        losses, epoch = line.get("step_loss"), number(line.get("epoch"))
        if isinstance(losses, list) and losses and epoch is not None:
            points = [
                (epoch - 1 + (i + 1) / len(losses), loss)
                for i, each in enumerate(losses)
                if (loss := number(each)) is not None
            ]
            self.covered.add(int(epoch))
            self.steps.pop(int(epoch), None)
            self.losses += thinned(points)
            if len(self.losses) > 20 * POINTS:
                self.losses = thinned(self.losses)
        self.epochs.append({name: value for name, value in line.items() if name != "step_loss"})


def mean_over_ranks(by_rank: Mapping[int, Sequence[Point]]) -> list[Point]:
    """One curve of all ranks. Each tells about one step a second, not all the same one: points that follow each other
    are averaged until a rank comes again, so that what differs between ranks' own seeds makes no teeth."""
    groups: list[dict[int, Point]] = [{}]
    for x, y, rank in sorted((x, y, rank) for rank, points in by_rank.items() for x, y in points):
        if rank in groups[-1]:
            groups.append({})
        groups[-1][rank] = (x, y)
    return [mean_point(list(group.values())) for group in groups if group]


def mean_point(points: Sequence[Point]) -> Point:
    """The middle of one or more."""
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most ``POINTS``: neighbours averaged."""
    size = math.ceil(len(points) / POINTS) if points else 1
    if size == 1:
        return list(points)
    return [mean_point(points[i : i + size]) for i in range(0, len(points), size)]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond all floats
        return None


def _whole(value: Any) -> int:
    return int(number(value) or 0)
