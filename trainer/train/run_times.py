"""Reads metrics lines, and computes mean times per rank and the traffic between hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from trainer.core.errors import SettingsError
from trainer.train.metrics import KINDS, LOADING

_TRAFFIC = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")

_PAIR = ("remote_bytes", "remote_rows", "cached_rows", "held_rows")  #: fields per node of ``by_host`` in an epoch line

_MetricsLine = Mapping[str, Any]


@dataclass(frozen=True)
class RankTimes:
    """Mean times and traffic of one rank over the selected epochs."""

    rank: int
    steps: int
    spent: Mapping[str, float]  #: seconds per step, by ``KINDS``
    behind: Mapping[str, float]  #: seconds of a sampler thread per batch, by ``LOADING``
    traffic: Mapping[str, float]  #: bytes and rows per step, by ``_TRAFFIC``
    predict: _MetricsLine | None = None  #: the rank's ``predict`` line, with values per epoch
    node: int | None = None  #: node rank; None unless the metrics file is in ``logs/node<k>/``
    epochs: int = 0  #: number of complete epochs; 0 if only steps of an unfinished epoch were read

    @classmethod
    def of(
        cls, rank: int, lines: Sequence[_MetricsLine], predict: _MetricsLine | None = None, node: int | None = None
    ) -> RankTimes:  # fmt: skip
        """Compute the means over ``lines``, weighted by steps.

        Each line must have ``spent``, ``behind`` and ``traffic``.
        """
        counts = [float(line["traffic"]["batches"]) for line in lines]
        steps = sum(counts)

        def mean(group: str, names: Iterable[str], weights: Sequence[float]) -> dict[str, float]:
            weighted = list(zip(weights, lines, strict=True))
            return {name: sum(w * _number(line[group].get(name)) for w, line in weighted) / steps for name in names}

        return cls(
            rank,
            round(steps),
            mean("spent", KINDS, counts),
            mean("behind", LOADING, counts),
            mean("traffic", _TRAFFIC, [1.0] * len(lines)),  # these fields are already sums over a line's steps
            predict,
            node,
            sum(line.get("kind") == "epoch" for line in lines),
        )

    @property
    def step_s(self) -> float:
        return sum(self.spent.values())

    @property
    def own_s(self) -> float:
        """Mean seconds per step, without waiting for other ranks."""
        return self.step_s - self.spent["reduce"]

    @property
    def wait_s(self) -> float:
        """Mean seconds per step that the training loop waits for batches."""
        return sum(self.spent[kind] for kind in LOADING)

    @property
    def work_s(self) -> float:
        """Mean seconds that a sampler thread needs for a batch."""
        return sum(self.behind.values())

    def share(self, *kinds: str) -> float:
        return sum(self.spent[kind] for kind in kinds) / self.step_s if self.step_s else 0.0

    def ratio(self, rows: str, of: str) -> float | None:
        """Return ``traffic[rows] / traffic[of]``, or None if ``traffic[of]`` is 0."""
        return self.traffic[rows] / self.traffic[of] if self.traffic[of] else None

    def per_epoch(self, name: str) -> float:
        """Return the bytes or rows per complete epoch. ``name``: one of ``_TRAFFIC``, such as ``remote_bytes``."""
        return self.traffic[name] * self.steps / max(1, self.epochs)

    @property
    def bytes_predicted(self) -> float | None:
        """Predicted number of bytes received per step, or None without a prediction."""
        if self.predict is None or not self.predict.get("steps"):
            return None
        return float(self.predict["remote_bytes"]) / float(self.predict["steps"])

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "node": self.node,
            "steps": self.steps,
            "step_s": round(self.step_s, 6),
            "own_s": round(self.own_s, 6),
            **{name: {key: round(s, 6) for key, s in getattr(self, name).items()} for name in ("spent", "behind")},
            "traffic": {name: round(value, 3) for name, value in self.traffic.items()},
        }


@dataclass(frozen=True)
class RunTimes:
    """Times and traffic of a run, with at least one rank."""

    epochs: tuple[int, ...]  #: numbers of the selected epochs
    without_first: bool  #: whether the first epoch was left out, which also compiles kernels
    ranks: tuple[RankTimes, ...]

    @property
    def whole(self) -> bool:
        """Whether the means cover complete epochs, not steps of the unfinished first epoch."""
        return all(rank.epochs for rank in self.ranks)

    @property
    def mean(self) -> RankTimes:
        ranks, count = self.ranks, len(self.ranks)
        spent, behind, traffic = (
            {key: sum(getattr(rank, name)[key] for rank in ranks) / count for key in getattr(ranks[0], name)}
            for name in ("spent", "behind", "traffic")
        )
        return RankTimes(-1, max(rank.steps for rank in ranks), spent, behind, traffic)

    def traffic(self, name: str) -> float:
        return sum(rank.per_epoch(name) for rank in self.ranks)

    @property
    def predicted(self) -> float | None:
        """Predicted bytes from other hosts in an epoch, over all ranks. None if a rank has no prediction."""
        values = [(rank.predict or {}).get("remote_bytes") for rank in self.ranks]
        return sum(map(_number, values)) if all(map(_is_number, values)) else None

    def rate(self, rows: str) -> float | None:
        """Return the share of ``cached_rows`` or ``held_rows`` in all remote rows, 0 to 1; None without remote rows."""
        remote = sum(rank.traffic["remote_rows"] * rank.steps for rank in self.ranks)
        return sum(rank.traffic[rows] * rank.steps for rank in self.ranks) / remote if remote else None

    def to_json(self) -> dict[str, Any]:
        """Return the field ``time`` of ``profile --json``."""
        mean, most = self.mean, max(self.ranks, key=lambda rank: rank.spent["remote"])
        rates = {name: self.rate(rows) for name, rows in (("hit_rate", "cached_rows"), ("held_rate", "held_rows"))}
        return {
            "epochs": list(self.epochs),
            "whole": self.whole,
            "step_s": round(mean.step_s, 6),
            "spent": {kind: round(mean.spent[kind], 6) for kind in KINDS},
            "share": {kind: round(mean.share(kind), 4) for kind in KINDS},
            "most_remote": {"rank": most.rank, "seconds": round(most.spent["remote"], 6)},
            "remote_bytes": round(self.traffic("remote_bytes")) if self.whole else None,
            "predicted": self.predicted,
            **{name: None if rate is None else round(rate, 4) for name, rate in rates.items()},
            "ranks": [rank.to_json() for rank in self.ranks],
        }


@dataclass
class RankLines:
    rank: int
    node: int | None = None
    #: ``epoch`` lines by epoch; the last line if an epoch was trained twice
    epochs: dict[int, _MetricsLine] = field(default_factory=dict)
    #: ``step`` lines before the first ``epoch`` line; later lines are dropped to bound memory
    steps: list[_MetricsLine] = field(default_factory=list)
    predict: _MetricsLine | None = None

    def add(self, line: _MetricsLine) -> None:
        if line.get("kind") == "predict" and _is_number(line.get("remote_bytes")):
            self.predict = line
        elif line.get("kind") == "epoch" and isinstance(line.get("epoch"), int):
            self.epochs[line["epoch"]] = {name: value for name, value in line.items() if name != "step_loss"}
            self.steps = [] if _is_timed(line) else self.steps
        elif line.get("kind") == "step" and _is_timed(line) and not self.timed_epochs:
            self.steps.append(line)

    @property
    def timed_epochs(self) -> list[_MetricsLine]:
        """The epoch lines that contain mean times per step (field ``spent``)."""
        return [line for line in self.epochs.values() if _is_timed(line)]

    def to_json(self) -> dict[str, Any]:
        """One entry of ``traffic`` in ``profile --json``: sums over all epochs, in total and by owning node."""
        hosts: dict[int, dict[str, float]] = {}
        for line in self.epochs.values():
            for host, values in _group(line, "by_host").items():
                if str(host).isdigit() and isinstance(values, Mapping):
                    sums = hosts.setdefault(int(host), dict.fromkeys(_PAIR, 0.0))
                    for name in _PAIR:
                        sums[name] += _number(values.get(name))
        sums = {
            name: sum(_number(_group(line, "traffic").get(name)) for line in self.epochs.values()) for name in _TRAFFIC
        }
        by_host = [{"node": host, **values} for host, values in sorted(hosts.items())]
        return {"rank": self.rank, "node": self.node, **sums, "by_host": by_host}


def read_lines(paths: Iterable[Path]) -> dict[int, RankLines]:
    """Read metrics files, and return their lines by rank. Each path is a metrics file or a run folder.

    Raises ``SettingsError`` for a folder without metrics files.
    """
    ranks: dict[int, RankLines] = {}
    for file in [file for path in paths for file in (_files(path) if path.is_dir() else [path])]:
        found = re.fullmatch(r"node(\d+)", file.parent.name)
        for line in _lines(file):
            rank = line.get("rank")
            if isinstance(rank, int):
                ranks.setdefault(rank, RankLines(rank, int(found[1]) if found else None)).add(line)
    return dict(sorted(ranks.items()))


def record_of(ranks: Mapping[int, RankLines], epochs: Container[int] | None = None) -> RunTimes | None:
    """Return the mean times and traffic over ``epochs``. Default: all epochs but the first, or the only epoch.

    If no epoch is complete yet, the means are taken over each rank's ``step`` lines except its first. Returns None if
    no line has times. Raises ``SettingsError`` if the lines contain none of ``epochs``.
    """
    timed = {rank: lines.timed_epochs for rank, lines in ranks.items()}
    if not any(timed.values()):
        timed = {rank: lines.steps[1:] or lines.steps for rank, lines in ranks.items()}
    recorded = sorted({line["epoch"] for lines in timed.values() for line in lines})
    if not recorded:
        return None
    without_first = epochs is None and len(recorded) > 1
    wanted = tuple(
        recorded[1:] if without_first else (epoch for epoch in recorded if epochs is None or epoch in epochs)
    )
    if not wanted:
        raise SettingsError(
            f"the metrics files contain none of the chosen epochs; they contain epochs {recorded[0]} to {recorded[-1]}"
        )
    chosen = {rank: [line for line in lines if line["epoch"] in wanted] for rank, lines in timed.items()}
    records = [
        RankTimes.of(rank, lines, ranks[rank].predict, ranks[rank].node) for rank, lines in chosen.items() if lines
    ]
    return RunTimes(wanted, without_first, tuple(records))


def _files(folder: Path) -> list[Path]:
    for pattern in ("metrics-rank*.jsonl", "logs/node*/metrics-rank*.jsonl", "metrics.jsonl"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise SettingsError(
        f"{folder} has no metrics-rank*.jsonl or logs/node*/metrics-rank*.jsonl; give a run's folder: the --run-dir of"
        " train, or runs/RUN of a launch"
    )


def _lines(path: Path) -> Iterator[_MetricsLine]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            # The last line of a file may be incomplete.
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _is_timed(line: _MetricsLine) -> bool:
    spent, behind, traffic = line.get("spent"), line.get("behind"), line.get("traffic")
    if not (isinstance(spent, Mapping) and isinstance(behind, Mapping) and isinstance(traffic, Mapping)):
        return False
    timed = all(_is_number(spent.get(kind)) for kind in KINDS) and _number(traffic.get("batches")) > 0
    return timed and isinstance(line.get("epoch"), int)


def _group(line: _MetricsLine, name: str) -> _MetricsLine:
    group = line.get(name)
    return group if isinstance(group, Mapping) else {}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0
