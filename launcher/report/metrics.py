"""Reads the metrics files of a run from its folder, in one pass over the lines of all nodes, and summarises them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, NamedTuple

from launcher.node.json_reader import records
from launcher.node.json_records import METRIC
from launcher.report.profile import Analysis, Profile, analyse
from launcher.report.series import Curves, Series

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
    for text in _texts(file):
        for values in records(METRIC, [text]):  # no record if the line is incomplete or not a metrics line
            yield _Line(float(values.get("t", 0.0)), text.rstrip(b"\n") + b"\n", values, file)


def _texts(file: Path) -> Iterator[bytes]:
    # The file is opened again for each block of lines: ranks may outnumber the files that a process may open.
    offset = 0
    while True:
        with file.open("rb") as opened:
            opened.seek(offset)
            lines = opened.readlines(_BLOCK)
            offset = opened.tell()
        if not lines:
            return
        yield from lines
