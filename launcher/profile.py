"""Where a run's time goes, over all ranks, by their metrics lines (docs/ARCHITECTURE.md, "Metrics lines")."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.words import count, spans

KINDS = ("sample", "remote", "gather", "copy", "forward", "backward", "reduce", "optimizer", "other")
LOADING = KINDS[:3]  #: waiting for batches
_SHOWN = 0.005  # share of a step from which on a kind has a column
_GAP = "  "

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RankProfile:
    """One rank's means. ``spent`` and ``behind`` have seconds by kind: of a step, and of the sampler threads' work on a
    batch, hidden behind training or not."""

    rank: int
    step_s: float
    spent: Mapping[str, float]
    behind: Mapping[str, float]
    traffic: Mapping[str, float]  #: of an epoch: remote_bytes, rows, remote_rows, cached_rows, held_rows
    predicted: Mapping[str, Any] = field(default_factory=dict)  #: its ``predict`` line; {} without one

    @property
    def own_s(self) -> float:
        """Of a step, without waiting for other ranks."""
        return self.step_s - self.spent["reduce"]

    def share(self, *kinds: str) -> float:
        """Of a step, 0 to 1."""
        return sum(self.spent[kind] for kind in kinds) / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Profile:
    """A run's ranks, one at least."""

    ranks: tuple[RankProfile, ...]
    epochs: tuple[int, ...]  #: counted, ascending
    whole: bool  #: whole epochs; else the steps of the only one so far

    @property
    def step_s(self) -> float:
        """Mean over ranks."""
        return sum(rank.step_s for rank in self.ranks) / len(self.ranks)

    @property
    def spent(self) -> dict[str, float]:
        """Seconds of a step by kind, mean over ranks."""
        return {kind: sum(rank.spent[kind] for rank in self.ranks) / len(self.ranks) for kind in KINDS}

    def share(self, *kinds: str) -> float:
        """Of a step, mean over ranks."""
        return sum(self.spent[kind] for kind in kinds) / self.step_s if self.step_s else 0.0

    @property
    def most_remote(self) -> RankProfile:
        """The rank that waits longest for other hosts."""
        return max(self.ranks, key=lambda rank: rank.spent["remote"])

    def traffic(self, name: str) -> float:
        """Of an epoch, over all ranks."""
        return sum(rank.traffic.get(name, 0.0) for rank in self.ranks)

    def predicted(self, name: str) -> float | None:
        """The same as the ranks expected it; None where one of them told nothing."""
        values = [_number(rank.predicted.get(name)) for rank in self.ranks]
        return None if None in values else sum(value or 0.0 for value in values)

    @property
    def hit_rate(self) -> float | None:
        """Of the rows that other hosts own, those answered by the cache; None without any such rows."""
        return self._of_remote_rows("cached_rows")

    @property
    def held_rate(self) -> float | None:
        """Of the same rows, those that had come for the batches just before and were still held."""
        return self._of_remote_rows("held_rows")

    @property
    def less_than_predicted(self) -> str:
        """Why fewer bytes came than predicted; '' where that is not so, or not known."""
        expected, got = self.predicted("remote_bytes"), self.traffic("remote_bytes")
        if not self.whole or not expected or got > 0.9 * expected or not self.held_rate:
            return ""
        return "of an epoch that begins with nothing held; later ones still have the rows of the last batches"

    def _of_remote_rows(self, name: str) -> float | None:
        remote = self.traffic("remote_rows")
        return self.traffic(name) / remote if remote else None

    def to_json(self) -> dict[str, Any]:
        """For result.json; bytes and rows are those of an epoch."""
        told = {
            "epochs": list(self.epochs),
            "step_s": round(self.step_s, 6),
            "spent": {kind: round(value, 6) for kind, value in self.spent.items()},
            "share": {kind: round(self.share(kind), 4) for kind in KINDS},
            "most_remote": {"rank": self.most_remote.rank, "seconds": round(self.most_remote.spent["remote"], 6)},
            "remote_bytes": round(self.traffic("remote_bytes")),
            "predicted": {name: self.predicted(name) for name in ("remote_bytes", "remote_bytes_without_cache")},
            "hit_rate": None if self.hit_rate is None else round(self.hit_rate, 4),
            "held_rate": None if self.held_rate is None else round(self.held_rate, 4),
        }
        return told if self.whole else {**told, "remote_bytes": None}


def read_profile(lines: Iterable[Line]) -> Profile | None:
    """Of all ranks' lines, in any order between ranks; None where they tell no ``spent``, as those of older versions.

    Counted are whole epochs but the first, which compiles; the first where there is no other; else its steps so far.
    """
    seen: dict[int, _Seen] = {}
    for line in lines:
        rank, kind = line.get("rank"), line.get("kind")
        if isinstance(rank, int) and kind in ("step", "epoch", "predict"):
            seen.setdefault(rank, _Seen()).take(kind, line)
    told = {rank: one for rank, one in sorted(seen.items()) if one.epochs or one.steps}
    whole = any(one.epochs for one in told.values())
    ranks = [(one, one.profile(rank, whole)) for rank, one in told.items() if one.epochs or not whole]
    if not ranks:
        return None
    epochs = {epoch for one, _ in ranks for epoch in one.counted(whole)}
    return Profile(tuple(rank for _, rank in ranks), tuple(sorted(epochs)), whole)


@dataclass
class _Seen:
    """What one rank has told: its epochs, and its steps, a lap to each of several."""

    epochs: dict[int, Line] = field(default_factory=dict)
    steps: dict[int, list[Line]] = field(default_factory=dict)  # of the newest epoch alone
    predicted: Line = field(default_factory=dict)

    def take(self, kind: str, line: Line) -> None:
        epoch = line.get("epoch")
        if kind == "predict":
            self.predicted = line
        elif _tells(line) and isinstance(epoch, int):
            if kind == "epoch":
                self.epochs[epoch] = line
            elif not self.epochs:  # else they are not needed, and there may be millions
                self.steps.setdefault(epoch, []).append(line)

    def counted(self, whole: bool) -> list[int]:
        return (sorted(self.epochs)[1:] or sorted(self.epochs)) if whole else sorted(self.steps)

    def profile(self, rank: int, whole: bool) -> RankProfile:
        lines = [self.epochs[epoch] for epoch in self.counted(whole)] if whole else _all(self.steps.values())
        weights = [1.0 if whole else _number(_part(line, "traffic").get("batches")) or 1.0 for line in lines]
        return RankProfile(
            rank,
            _mean(((_number(line.get("step_s")) or 0.0) for line in lines), weights),
            {kind: _mean((_value(line, "spent", kind) for line in lines), weights) for kind in KINDS},
            {kind: _mean((_value(line, "behind", kind) for line in lines), weights) for kind in LOADING},
            _traffic(lines),
            self.predicted,
        )


def _traffic(lines: list[Line]) -> dict[str, float]:
    names = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")
    return {name: sum(_value(line, "traffic", name) for line in lines) / len(lines) for name in names}


def _all(lists: Iterable[list[Line]]) -> list[Line]:
    return [line for lines in lists for line in lines]


def _tells(line: Line) -> bool:
    spent = line.get("spent")
    return isinstance(spent, Mapping) and all(_number(spent.get(kind)) is not None for kind in KINDS)


def _part(line: Line, name: str) -> Mapping[str, Any]:
    part = line.get(name)
    return part if isinstance(part, Mapping) else {}


def _value(line: Line, part: str, name: str) -> float:
    return _number(_part(line, part).get(name)) or 0.0


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _mean(values: Iterable[float], weights: list[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def print_profile(profile: Profile, console: Console, node_of: Mapping[int, int]) -> None:
    """The table, the longest wait for other hosts, and bytes; ``node_of``: node_rank by rank."""
    for line in profile_lines(profile, node_of):
        console.print(Text(line), soft_wrap=True)


def profile_lines(profile: Profile, node_of: Mapping[int, int]) -> Iterator[str]:
    """The same as texts."""
    ranks, epochs = count(len(profile.ranks), "rank"), "epoch" if len(profile.epochs) == 1 else "epochs"
    which = f"{epochs} {spans(profile.epochs)}" + ("" if profile.whole else " so far")
    yield f"where a step's {milliseconds(profile.step_s)} go, mean of {ranks}, {which}:"
    yield from _table(profile)
    most = profile.most_remote
    if most.spent["remote"]:
        told = f"{milliseconds(most.spent['remote'])} of its {milliseconds(most.step_s)} a step"
        told += f" ({most.share('remote'):.0%})"
        yield f"longest wait for other hosts: {rank_name(most.rank, node_of)}, {told}"
    if profile.whole and (profile.traffic("remote_bytes") or profile.hit_rate is not None):
        yield "from other hosts: " + _bytes(profile)


def milliseconds(seconds: float) -> str:
    """``182 ms``, ``1.5 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rank_name(rank: int, node_of: Mapping[int, int]) -> str:
    """``node1/rank3``."""
    return f"node{node_of[rank]}/rank{rank}" if rank in node_of else f"rank{rank}"


def _table(profile: Profile) -> Iterator[str]:
    """A column for each kind that takes some of a step."""
    spent = profile.spent
    shown = [kind for kind in KINDS if profile.share(kind) >= _SHOWN]
    columns = [
        ("", "ms", "share"),
        *((kind, f"{1000 * spent[kind]:.1f}", f"{profile.share(kind):.0%}") for kind in shown),
    ]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns, strict=True):
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {cells[0].ljust(len(first))}{_GAP}{_GAP.join(rest)}".rstrip()


def _bytes(profile: Profile) -> str:
    """``12.3 MB an epoch, 12.1 MB predicted (40.2 MB without the cache)``, and where the rows of others came from."""
    text = f"{decimal(round(profile.traffic('remote_bytes')))} an epoch"
    expected, bare = profile.predicted("remote_bytes"), profile.predicted("remote_bytes_without_cache")
    if expected is not None:
        text += f", {decimal(round(expected))} predicted"
        text += " of one that begins with nothing held" if profile.less_than_predicted else ""
        text += f" ({decimal(round(bare))} without the cache)" if bare is not None else ""
    cached, held = profile.hit_rate, profile.held_rate
    if cached is not None and held is not None:
        asked = max(0.0, 1 - cached - held)
        text += f"; of the rows that others own {cached:.0%} were cached, {held:.0%} held from the last batches, "
        text += f"{asked:.0%} asked for"
    return text
