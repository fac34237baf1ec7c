"""What the metrics lines of a run tell of its time and traffic, per rank; read without torch."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import SettingsError
from trainer.train.metrics import KINDS, LOADING

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RankRecord:
    """Means of one rank over the epochs looked at."""

    rank: int
    steps: int
    spent: Mapping[str, float]  #: seconds per step, by ``KINDS``
    behind: Mapping[str, float]  #: seconds of a sampler thread per batch, by ``LOADING``
    traffic: Mapping[str, float]  #: per step
    predict: Line | None = None  #: what it was told to expect per epoch

    @classmethod
    def of(cls, rank: int, lines: Sequence[Line], predict: Line | None = None) -> RankRecord:
        """Weighted by steps; each line has ``spent``, ``behind`` and ``traffic``."""
        counts = [line["traffic"]["batches"] for line in lines]
        steps = sum(counts)

        def mean(group: str, names: Iterable[str]) -> dict[str, float]:
            weights = [1] * len(lines) if group == "traffic" else counts  # which are sums already
            weighted = list(zip(weights, lines, strict=True))
            return {name: sum(weight * line[group].get(name, 0) for weight, line in weighted) / steps for name in names}

        traffic = [name for name in lines[0]["traffic"] if name != "batches"]
        return cls(rank, steps, mean("spent", KINDS), mean("behind", LOADING), mean("traffic", traffic), predict)

    @property
    def step_s(self) -> float:
        return sum(self.spent.values())

    @property
    def own_s(self) -> float:
        return self.step_s - self.spent["reduce"]

    @property
    def wait_s(self) -> float:
        """Waiting for batches."""
        return sum(self.spent[kind] for kind in LOADING)

    @property
    def work_s(self) -> float:
        """Of a sampler thread, per batch."""
        return sum(self.behind.values())

    def share(self, *kinds: str) -> float:
        """Of a step."""
        return sum(self.spent[kind] for kind in kinds) / self.step_s if self.step_s else 0.0

    def part(self, rows: str, of: str) -> float | None:
        """Some of the rows as a part of others; None where there are none."""
        return self.traffic[rows] / self.traffic[of] if self.traffic[of] else None

    @property
    def bytes_predicted(self) -> float | None:
        """Received per step."""
        if self.predict is None or not self.predict.get("steps"):
            return None
        return float(self.predict["remote_bytes"]) / float(self.predict["steps"])


@dataclass(frozen=True)
class Record:
    """A run as far as its metrics lines go."""

    folder: Path
    epochs: tuple[int, ...]  #: looked at
    without_first: bool  #: the first epoch, which compiles and warms up, was left out
    ranks: tuple[RankRecord, ...]

    @property
    def mean(self) -> RankRecord:
        """Over ranks."""
        ranks, count = self.ranks, len(self.ranks)
        means = {
            name: {key: sum(getattr(rank, name)[key] for rank in ranks) / count for key in getattr(ranks[0], name)}
            for name in ("spent", "behind", "traffic")
        }
        return RankRecord(-1, max(rank.steps for rank in ranks), **means, predict=None)


def read_record(folder: Path, epochs: Container[int] | None = None) -> Record:
    """Lines of the epochs asked for, or of all but the first where there are several.

    Epoch lines, or else step lines without each rank's first. Raises ``SettingsError`` when there are none.
    """
    files = sorted(folder.glob("metrics-rank*.jsonl")) or sorted(folder.glob("logs/node*/metrics-rank*.jsonl"))
    if not files:
        raise SettingsError(
            f"{folder} has no metrics-rank*.jsonl, and no logs/node*/ with some; give a run's folder: the --run-dir of"
            " train, or runs/RUN of a launch"
        )
    lines = {int(re.findall(r"\d+", path.name)[0]): _lines(path) for path in files}
    telling = {rank: _telling(own) for rank, own in lines.items()}
    there = sorted({line["epoch"] for own in telling.values() for line in own})
    if not there:
        raise SettingsError(
            f"no epoch or step line in {folder} tells where time went: nothing was trained yet, or for less than a"
            " second, or by a script whose StepLog was not given its loader"
        )
    without_first = epochs is None and len(there) > 1
    wanted = tuple(there[1:] if without_first else (epoch for epoch in there if epochs is None or epoch in epochs))
    if not wanted:
        raise SettingsError(f"none of these epochs is recorded; there are {there[0]} to {there[-1]}")
    chosen = {rank: [line for line in own if line["epoch"] in wanted] for rank, own in telling.items()}
    ranks = tuple(RankRecord.of(rank, own, _predicted(lines[rank])) for rank, own in sorted(chosen.items()) if own)
    return Record(folder, wanted, without_first, ranks)


def _lines(path: Path) -> list[Line]:
    """The lines that can be read; the last one may be half written."""
    found: list[Line] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                found.append(line)
    return found


def _telling(lines: Iterable[Line]) -> list[Line]:
    """Of each epoch the last line, where a run went on in the same folder; without any, the step lines."""
    able = [line for line in lines if _tells(line)]
    epochs = {line["epoch"]: line for line in able if line["kind"] == "epoch"}
    steps = [line for line in able if line["kind"] == "step"]
    return list(epochs.values()) or steps[1:] or steps


def _tells(line: Line) -> bool:
    groups = [line.get(name) for name in ("spent", "behind", "traffic")]
    if line.get("kind") not in ("epoch", "step") or not all(isinstance(group, dict) for group in groups):
        return False
    spent, _, traffic = groups
    return set(KINDS) <= set(spent or {}) and bool((traffic or {}).get("batches"))


def _predicted(lines: Iterable[Line]) -> Line | None:
    return next((line for line in reversed(list(lines)) if line.get("kind") == "predict"), None)
