"""Runs ``python -m trainer profile --json`` on a run's metrics, and prints how long the parts of a step take."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from launcher.errors import FleetError
from launcher.plan.partition import local_trainer, runnable
from launcher.text import count, spans

_TIMEOUT = 600.0  # seconds; the lines of one rank and minute take about a millisecond

_NOTABLE = 0.005  # smallest share of a step for which a kind gets a column

_GAP = "  "


@dataclass(frozen=True)
class RankProfile:
    """Seconds per step of one rank: in total, and by kind (sample, remote, forward, …); means over epochs."""

    rank: int
    node: int | None  #: node_rank; None if not known
    step_s: float  #: seconds per step
    spent: Mapping[str, float]  #: seconds per step by kind

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.node)


@dataclass(frozen=True)
class Profile:
    """Time per step and traffic of a run. Bytes are per epoch, summed over all ranks."""

    epochs: tuple[int, ...]  #: counted epochs, ascending
    whole: bool  #: whether all of ``epochs`` are complete; else it is only the running one
    step_s: float  #: seconds per step, mean over ranks (as ``spent`` and ``share``)
    spent: Mapping[str, float]  #: seconds per step by kind
    share: Mapping[str, float]  #: share of a step by kind, 0 to 1
    most_remote: RankProfile  #: the rank that waits longest for other hosts
    remote_bytes: float | None  #: bytes received from other hosts; None if no epoch is complete
    predicted: float | None  #: prediction of ``remote_bytes``; None if a rank has none
    hit_rate: float | None  #: share of cached rows among the rows of other hosts; None without such rows
    held_rate: float | None  #: share of held rows (kept from recent batches) among the rows of other hosts
    ranks: tuple[RankProfile, ...]
    summary: Mapping[str, Any]  #: content of ``profile`` in result.json

    @classmethod
    def of(cls, time: Mapping[str, Any]) -> Profile:
        """Build a Profile from ``time``, an object in the output of ``trainer profile --json``."""
        ranks = tuple(RankProfile(one["rank"], one["node"], one["step_s"], one["spent"]) for one in time["ranks"])
        return cls(
            epochs=tuple(time["epochs"]),
            most_remote=next(rank for rank in ranks if rank.rank == time["most_remote"]["rank"]),
            ranks=ranks,
            summary={name: value for name, value in time.items() if name != "ranks"},
            **{
                name: time[name]
                for name in ("whole", "step_s", "spent", "share", "remote_bytes", "predicted", "hit_rate", "held_rate")
            },
        )


@dataclass(frozen=True)
class RankTraffic:
    """Rows and bytes that one rank gathered, as sums over all epochs."""

    rank: int
    node: int | None  #: node_rank; None if not known
    sums: Mapping[str, float]  #: remote_bytes, rows, remote_rows, cached_rows, held_rows
    by_host: Mapping[int, Mapping[str, float]]  #: the same sums, without ``rows``, by the node that owns the rows

    @property
    def name(self) -> str:
        return rank_name(self.rank, self.node)


@dataclass(frozen=True)
class Analysis:
    profile: Profile | None = None  #: None if the lines have no times by kind
    traffic: tuple[RankTraffic, ...] = ()  #: one for each rank with an epoch line


def analyse(files: Iterable[Path]) -> Analysis:
    """Analyse metrics files with ``trainer profile --json``. Files in a folder ``node<k>`` belong to node k.

    Raises FleetError if the program fails.
    """
    try:
        paths = [str(file.absolute()) for file in files if file.stat()]
    except OSError as error:
        raise FleetError(f"the metrics cannot be read: {error.filename}: {error.strerror}") from error
    if not paths:
        return Analysis()
    command = local_trainer("profile", "--json", *paths)
    try:
        done = subprocess.run(
            runnable(command), env={**os.environ, **command.env}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=_TIMEOUT, check=True, start_new_session=True,  # Ctrl-C reaches only the launcher
        )  # fmt: skip
        document = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise FleetError(f"the metrics could not be analysed (python -m trainer profile --json): {last}") from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise FleetError(f"the metrics could not be analysed (python -m trainer profile --json): {error}") from error
    traffic = []
    for of_rank in document["traffic"]:
        sums = {name: value for name, value in of_rank.items() if name not in ("rank", "node", "by_host")}
        by_host = {one.pop("node"): one for one in of_rank["by_host"]}
        traffic.append(RankTraffic(of_rank["rank"], of_rank["node"], sums, by_host))
    return Analysis(Profile.of(document["time"]) if document["time"] else None, tuple(traffic))


def print_profile(profile: Profile, console: Console, *, ended: bool = False) -> None:
    """Print the time per step by kind, the longest wait for other hosts, and the bytes received.

    ``ended``: whether the run has ended. If not, an incomplete epoch is marked ``so far``.
    """
    for line in profile_lines(profile, ended=ended):
        console.print(Text(line), soft_wrap=True)


def profile_lines(profile: Profile, *, ended: bool = False) -> Iterator[str]:
    ranks, epochs = count(len(profile.ranks), "rank"), "epoch" if len(profile.epochs) == 1 else "epochs"
    which = f"{epochs} {spans(profile.epochs)}" + ("" if profile.whole or ended else " so far")
    yield f"time per step: {milliseconds(profile.step_s)}, mean of {ranks}, {which}:"
    shown = {kind: seconds for kind, seconds in profile.spent.items() if profile.share[kind] >= _NOTABLE}
    columns = [
        ("", "ms", "share"),
        *((kind, f"{1000 * seconds:.1f}", f"{profile.share[kind]:.0%}") for kind, seconds in shown.items()),
    ]
    widths = [max(map(len, column)) for column in columns]
    for cells in zip(*columns, strict=True):
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        yield f"  {cells[0].ljust(len(first))}{_GAP}{_GAP.join(rest)}".rstrip()
    most = profile.most_remote
    if seconds := most.spent["remote"]:
        wait = f"{milliseconds(seconds)} of its {milliseconds(most.step_s)} per step ({seconds / most.step_s:.0%})"
        yield f"longest wait for other hosts: {most.name}, {wait}"
    if profile.remote_bytes or (profile.whole and profile.hit_rate is not None):
        text = f"{decimal(round(profile.remote_bytes or 0))} per epoch"
        if profile.predicted is not None:
            text += f", predicted {decimal(round(profile.predicted))}"
        cached, held = profile.hit_rate, profile.held_rate
        if cached is not None and held is not None:
            requested = max(0.0, 1 - cached - held)
            text += (
                f"; remote rows: {cached:.0%} cached, {held:.0%} held from recent batches, {requested:.0%} requested"
            )
        yield "received from other hosts: " + text


def milliseconds(seconds: float) -> str:
    """Return a number of seconds as text: ``182 ms``, ``1.5 ms``, ``9.08 s``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rank_name(rank: int, node: int | None) -> str:
    """Return the name of a rank: ``node1/rank3``, or ``rank3`` if ``node`` is None."""
    return f"rank{rank}" if node is None else f"node{node}/rank{rank}"
