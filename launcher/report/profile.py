"""Reads and prints the document of ``python -m trainer profile --json``: where a run's time goes.

The trainer analyses the metrics lines that it has written; the launcher, which never imports it, runs it as a program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.errors import FleetError
from launcher.text import count, spans

_CODE = Path(__file__).resolve().parents[2]  # where the trainer lies, too

_TIMEOUT = 600.0  # seconds; a minute of one rank's lines takes it about a millisecond

_NOTABLE = 0.005  # share of a step from which on a kind has a column

_GAP = "  "

_DETAILS = ("ranks", "advice")  # of the document's "time", left out of result.json


@dataclass(frozen=True)
class RankProfile:
    """One rank's means over the epochs counted."""

    rank: int
    node: int | None
    step_s: float
    spent: Mapping[str, float]  #: seconds of a step by kind

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.node)


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes; a run's ranks, one at least. Bytes are those of an epoch over all ranks."""

    epochs: tuple[int, ...]  #: counted, ascending
    whole: bool  #: whole epochs; else the steps of the only one so far
    step_s: float  #: mean over ranks, as ``spent`` and ``share``
    spent: Mapping[str, float]  #: seconds of a step by kind
    share: Mapping[str, float]  #: of a step by kind, 0 to 1
    most_remote: RankProfile  #: the rank that waits longest for other hosts
    remote_bytes: float | None  #: None where no epoch is whole
    predicted: float | None  #: the same as the ranks expected it; None where one of them told nothing
    predicted_without_cache: float | None
    why_less: str  #: why fewer bytes came than predicted; '' where that is not so, or not known
    hit_rate: float | None  #: of the rows that other hosts own, those cached; None without any such rows
    held_rate: float | None  #: of the same rows, those still held from the last batches
    ranks: tuple[RankProfile, ...]
    advice: tuple[str, ...]  #: what would make steps shorter, the weightiest sentence first
    summary: Mapping[str, Any]  #: for result.json

    @classmethod
    def of(cls, time: Mapping[str, Any]) -> Profile:
        """From ``time`` of the document."""
        ranks = tuple(RankProfile(one["rank"], one["node"], one["step_s"], one["spent"]) for one in time["ranks"])
        return cls(
            epochs=tuple(time["epochs"]),
            most_remote=next(rank for rank in ranks if rank.rank == time["most_remote"]["rank"]),
            predicted=time["predicted"]["remote_bytes"],
            predicted_without_cache=time["predicted"]["remote_bytes_without_cache"],
            ranks=ranks,
            advice=tuple(time["advice"]),
            summary={name: value for name, value in time.items() if name not in _DETAILS},
            **{
                name: time[name]
                for name in ("whole", "step_s", "spent", "share", "remote_bytes", "why_less", "hit_rate", "held_rate")
            },
        )


@dataclass(frozen=True)
class RankTraffic:
    """What one rank received, over all epochs."""

    rank: int
    node: int | None
    sums: Mapping[str, float]  #: remote_bytes, rows, remote_rows, cached_rows, held_rows
    by_host: Mapping[int, Mapping[str, float]]  #: the same but ``rows`` by the node asked

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.node)


@dataclass(frozen=True)
class Analysis:
    """Of the metrics lines of a run."""

    profile: Profile | None = None  #: None where they do not say where time went
    traffic: tuple[RankTraffic, ...] = ()  #: of ranks with an epoch line


def analyse(files: Iterable[Path], topology: str = "", *, own: bool = False) -> Analysis:
    """Run the trainer's analysis of metrics files; those in ``node<k>/`` are of that node.

    topology: of the plan, '' where not known; own: an own command ran. Raises FleetError when the program fails.
    """
    paths = [str(file.absolute()) for file in files]
    if not paths:
        return Analysis()
    words = [*(["--topology", topology] if topology else []), *(["--script"] if own else [])]
    argv = [sys.executable, "-m", "trainer", "profile", "--json", *words, *paths]
    path = os.pathsep.join(filter(None, (str(_CODE), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            argv, cwd=_CODE, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_TIMEOUT, check=True, start_new_session=True,  # Ctrl-C is the launcher's to heed
        )  # fmt: skip
        told = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise FleetError(f"the metrics could not be analysed (python -m trainer profile --json): {last}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise FleetError(f"the metrics could not be analysed (python -m trainer profile --json): {error}") from error
    return Analysis(Profile.of(told["time"]) if told["time"] else None, tuple(map(_traffic, told["traffic"])))


def _traffic(values: dict[str, Any]) -> RankTraffic:
    sums = {name: value for name, value in values.items() if name not in ("rank", "node", "by_host")}
    return RankTraffic(values["rank"], values["node"], sums, {one.pop("node"): one for one in values["by_host"]})


def print_profile(profile: Profile, console: Console) -> None:
    """Print the table, the longest wait for other hosts, and bytes."""
    for line in profile_lines(profile):
        console.print(Text(line), soft_wrap=True)


def profile_lines(profile: Profile) -> Iterator[str]:
    """The same as texts."""
    ranks, epochs = count(len(profile.ranks), "rank"), "epoch" if len(profile.epochs) == 1 else "epochs"
    which = f"{epochs} {spans(profile.epochs)}" + ("" if profile.whole else " so far")
    yield f"where a step's {milliseconds(profile.step_s)} go, mean of {ranks}, {which}:"
    yield from _table(profile)
    most = profile.most_remote
    if seconds := most.spent["remote"]:
        told = f"{milliseconds(seconds)} of its {milliseconds(most.step_s)} a step ({seconds / most.step_s:.0%})"
        yield f"longest wait for other hosts: {most.name}, {told}"
    if profile.remote_bytes or (profile.whole and profile.hit_rate is not None):
        yield "from other hosts: " + _bytes(profile)


def milliseconds(seconds: float) -> str:
    """``182 ms``, ``1.5 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rank_name(rank: int, node: int | None) -> str:
    """``node1/rank3``; ``rank3`` where the node is not known."""
    return f"rank{rank}" if node is None else f"node{node}/rank{rank}"


def _table(profile: Profile) -> Iterator[str]:
    """A column for each kind that takes some of a step."""
    shown = {kind: seconds for kind, seconds in profile.spent.items() if profile.share[kind] >= _NOTABLE}
    columns = [
        ("", "ms", "share"),
        *((kind, f"{1000 * seconds:.1f}", f"{profile.share[kind]:.0%}") for kind, seconds in shown.items()),
    ]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns, strict=True):
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {cells[0].ljust(len(first))}{_GAP}{_GAP.join(rest)}".rstrip()


def _bytes(profile: Profile) -> str:
    """``12.3 MB an epoch, 12.1 MB predicted (40.2 MB without the cache)``, and where the rows of others came from."""
    text = f"{decimal(round(profile.remote_bytes or 0))} an epoch"
    if profile.predicted is not None:
        text += f", {decimal(round(profile.predicted))} predicted"
        text += " of one that begins with nothing held" if profile.why_less else ""
        bare = profile.predicted_without_cache
        text += f" ({decimal(round(bare))} without the cache)" if bare is not None else ""
    cached, held = profile.hit_rate, profile.held_rate
    if cached is not None and held is not None:
        asked = max(0.0, 1 - cached - held)
        text += f"; of the rows that others own {cached:.0%} were cached, {held:.0%} held from the last batches, "
        text += f"{asked:.0%} asked for"
    return text
