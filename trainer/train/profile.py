"""``python -m trainer profile``: where the time of a run goes, from its metrics lines, and what would help."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import click
from rich.filesize import decimal

from trainer.core.errors import SettingsError
from trainer.train.metrics import KINDS, LOADING

TRAFFIC = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")

PAIR = ("remote_bytes", "remote_rows", "cached_rows", "held_rows")  #: of ``by_host`` in an epoch line

_ROUGHLY = 0.9  # times the predicted bytes: fewer are worth an explanation

MetricsLine = Mapping[str, Any]


@dataclass(frozen=True)
class RankTimes:
    """Means of one rank over the epochs looked at."""

    rank: int
    steps: int
    spent: Mapping[str, float]  #: seconds per step, by ``KINDS``
    behind: Mapping[str, float]  #: seconds of a sampler thread per batch, by ``LOADING``
    traffic: Mapping[str, float]  #: per step, by ``TRAFFIC``
    predict: MetricsLine | None = None  #: what it was told to expect per epoch
    node: int | None = None  #: node rank, where the file lies in ``logs/node<k>/``
    epochs: int = 0  #: whole epochs; 0 where these are steps of an unfinished one

    @classmethod
    def of(
        cls, rank: int, lines: Sequence[MetricsLine], predict: MetricsLine | None = None, node: int | None = None
    ) -> RankTimes:  # fmt: skip
        """Weighted by steps; each line has ``spent``, ``behind`` and ``traffic``."""
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
            mean("traffic", TRAFFIC, [1.0] * len(lines)),  # which are sums already
            predict,
            node,
            sum(line.get("kind") == "epoch" for line in lines),
        )

    @property
    def name(self) -> str:
        """``node1/rank3``; ``rank3`` where the node is not known."""
        return f"rank{self.rank}" if self.node is None else f"node{self.node}/rank{self.rank}"

    @property
    def step_s(self) -> float:
        return sum(self.spent.values())

    @property
    def own_s(self) -> float:
        """Seconds of a step without waiting for other ranks."""
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

    def per_epoch(self, name: str) -> float:
        """One of ``TRAFFIC``, per whole epoch."""
        return self.traffic[name] * self.steps / max(1, self.epochs)

    @property
    def bytes_predicted(self) -> float | None:
        """Received per step."""
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
    """Where the time of a run goes, as far as its metrics lines say; at least one rank."""

    epochs: tuple[int, ...]  #: looked at
    without_first: bool  #: the first epoch, which compiles and warms up, was left out
    ranks: tuple[RankTimes, ...]

    @property
    def whole(self) -> bool:
        """Whole epochs; else steps of the only one so far."""
        return all(rank.epochs for rank in self.ranks)

    @property
    def mean(self) -> RankTimes:
        """Over ranks."""
        ranks, count = self.ranks, len(self.ranks)
        spent, behind, traffic = (
            {key: sum(getattr(rank, name)[key] for rank in ranks) / count for key in getattr(ranks[0], name)}
            for name in ("spent", "behind", "traffic")
        )
        return RankTimes(-1, max(rank.steps for rank in ranks), spent, behind, traffic)

    def traffic(self, name: str) -> float:
        """One of ``TRAFFIC``, per epoch and over all ranks."""
        return sum(rank.per_epoch(name) for rank in self.ranks)

    def predicted(self, name: str) -> float | None:
        """``remote_bytes`` or ``remote_bytes_without_cache`` per epoch over all ranks, as they were told to expect it
        before the first one; None where one of them was told nothing."""
        values = [(rank.predict or {}).get(name) for rank in self.ranks]
        return sum(map(_number, values)) if all(map(_is_number, values)) else None

    def rate(self, rows: str) -> float | None:
        """Part of the rows that other hosts own which were ``cached_rows`` or ``held_rows``; None without any."""
        remote = sum(rank.traffic["remote_rows"] * rank.steps for rank in self.ranks)
        return sum(rank.traffic[rows] * rank.steps for rank in self.ranks) / remote if remote else None

    @property
    def why_less(self) -> str:
        """Why fewer bytes came than predicted; '' where that is not so, or not known."""
        expected = self.predicted("remote_bytes")
        if not self.whole or not expected or self.traffic("remote_bytes") > _ROUGHLY * expected:
            return ""
        if not self.rate("held_rows"):
            return ""
        return "of an epoch that begins with nothing held; later ones still have the rows of the last batches"

    def to_json(self) -> dict[str, Any]:
        """``time`` of the document, without ``advice``."""
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
            "predicted": {name: self.predicted(name) for name in ("remote_bytes", "remote_bytes_without_cache")},
            "why_less": self.why_less,
            **{name: None if rate is None else round(rate, 4) for name, rate in rates.items()},
            "ranks": [rank.to_json() for rank in self.ranks],
        }


@dataclass
class RankLines:
    """What the analysis needs of one rank's metrics lines."""

    rank: int
    node: int | None = None
    epochs: dict[int, MetricsLine] = field(
        default_factory=dict
    )  #: the last line of each, where a run went on in its folder
    steps: list[MetricsLine] = field(default_factory=list)  #: until there is an epoch line; there may be millions
    predict: MetricsLine | None = None

    def add(self, line: MetricsLine) -> None:
        """Read the next line."""
        if line.get("kind") == "predict" and _is_number(line.get("remote_bytes")):
            self.predict = line
        elif line.get("kind") == "epoch" and isinstance(line.get("epoch"), int):
            self.epochs[line["epoch"]] = {name: value for name, value in line.items() if name != "step_loss"}
            self.steps = [] if _is_timed(line) else self.steps
        elif line.get("kind") == "step" and _is_timed(line) and not self.timed_epochs:
            self.steps.append(line)

    @property
    def timed_epochs(self) -> list[MetricsLine]:
        """Epoch lines that say where time went."""
        return [line for line in self.epochs.values() if _is_timed(line)]

    def to_json(self) -> dict[str, Any]:
        """Of ``traffic`` in the document: sums over all epochs, and the same by the node that was asked."""
        hosts: dict[int, dict[str, float]] = {}
        for line in self.epochs.values():
            for host, values in _group(line, "by_host").items():
                if str(host).isdigit() and isinstance(values, Mapping):
                    sums = hosts.setdefault(int(host), dict.fromkeys(PAIR, 0.0))
                    for name in PAIR:
                        sums[name] += _number(values.get(name))
        sums = {
            name: sum(_number(_group(line, "traffic").get(name)) for line in self.epochs.values()) for name in TRAFFIC
        }
        by_host = [{"node": host, **values} for host, values in sorted(hosts.items())]
        return {"rank": self.rank, "node": self.node, **sums, "by_host": by_host}


def read_lines(paths: Iterable[Path]) -> dict[int, RankLines]:
    """By rank; of run folders, and of files with the lines of one rank or several.

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
    """Means over the epochs asked for, or over all but the first where there are several, by their epoch lines; without
    any, over the step lines but each rank's first. None where no line says where time went.

    Raises ``SettingsError`` when the epochs asked for are not recorded.
    """
    timed = {rank: lines.timed_epochs for rank, lines in ranks.items()}
    if not any(timed.values()):
        timed = {rank: lines.steps[1:] or lines.steps for rank, lines in ranks.items()}
    there = sorted({line["epoch"] for lines in timed.values() for line in lines})
    if not there:
        return None
    without_first = epochs is None and len(there) > 1
    wanted = tuple(there[1:] if without_first else (epoch for epoch in there if epochs is None or epoch in epochs))
    if not wanted:
        raise SettingsError(f"none of these epochs is recorded; there are {there[0]} to {there[-1]}")
    chosen = {rank: [line for line in lines if line["epoch"] in wanted] for rank, lines in timed.items()}
    records = [
        RankTimes.of(rank, lines, ranks[rank].predict, ranks[rank].node) for rank, lines in chosen.items() if lines
    ]
    return RunTimes(wanted, without_first, tuple(records))


def _files(folder: Path) -> list[Path]:
    """A run's metrics files; raises ``SettingsError`` when there are none."""
    for pattern in ("metrics-rank*.jsonl", "logs/node*/metrics-rank*.jsonl", "metrics.jsonl"):
        if files := sorted(folder.glob(pattern)):
            return files
    raise SettingsError(
        f"{folder} has no metrics-rank*.jsonl, and no logs/node*/ with some; give a run's folder: the --run-dir of"
        " train, or runs/RUN of a launch"
    )


def _lines(path: Path) -> Iterator[MetricsLine]:
    """The lines that can be read; the last one may be half written."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def _is_timed(line: MetricsLine) -> bool:
    """Whether a line says where time went, and of how many batches."""
    spent, behind, traffic = line.get("spent"), line.get("behind"), line.get("traffic")
    if not (isinstance(spent, Mapping) and isinstance(behind, Mapping) and isinstance(traffic, Mapping)):
        return False
    timed = all(_is_number(spent.get(kind)) for kind in KINDS) and _number(traffic.get("batches")) > 0
    return timed and isinstance(line.get("epoch"), int)


def _group(line: MetricsLine, name: str) -> MetricsLine:
    group = line.get(name)
    return group if isinstance(group, Mapping) else {}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else 0.0


NOTABLE = 0.1  #: share of a step from which on a kind is worth a line

_UNEVEN = 1.15  #: times the own work of the rank that waits

_OFF = 0.1  #: of a prediction


@dataclass(frozen=True)
class _SettingNames:
    """What can be changed to make a step shorter, as it is called where it is changed."""

    cache: str
    prefetch: str
    threads: str
    ahead: str
    batch: str
    copy: str
    model: str


_BUNDLED = _SettingNames(
    "a larger data.cache",
    "a larger train.prefetch",
    "train.sampler_threads",
    "train.prefetch",
    "train.batch_size",
    "pinned memory and a copy stream (the bundled trainer has both)",
    "fewer train.hidden or train.fanouts, or train.precision: bfloat16 where the processor has it",
)

_SCRIPT = _SettingNames(
    "more rows kept here (graph.cache_rows)",
    "more batches under way (prefetch of the loader)",
    "sampler threads (num_workers of the loader)",
    "prefetch of the loader",
    "batch_size of the loader",
    "pinned memory, a copy stream",
    "a smaller model or fewer neighbours in the script, or bfloat16 where the processor has it",
)


def advice(record: RunTimes, topology: str = "", *, script: bool = False) -> list[str]:
    """Sentences, the weightiest first.

    topology: ``data.topology`` of the run, '' where not known; script: a script of one's own trains, which reads no
    ``train.*`` keys.
    """
    names = _SCRIPT if script else _BUNDLED
    found = [*_remote(record, topology, names), *_loading(record, names), *_reduce(record, names)]
    found += [*_copy(record, names), *_rest(record), *_model(record, names), *_prediction(record)]
    lines = [text for _, text in sorted(found, key=lambda item: -item[0])]
    return lines or [f"no single kind of work but the model's own takes {NOTABLE:.0%} of a step"]


def keeping_up(rank: RankTimes, names: _SettingNames = _BUNDLED) -> str | None:
    """What sampler threads would need that cannot keep up with the training loop; None where they can."""
    rest = rank.step_s - rank.wait_s
    if rank.wait_s < NOTABLE * rank.step_s or rank.work_s <= rest or rest <= 0:
        return None
    enough = math.ceil(rank.work_s / rest)
    need = "and as many batches ahead" if rank.behind["remote"] > rank.work_s / 2 else "with a core each"
    return (
        f"a batch takes a sampler thread {_s(rank.work_s)} (sampling {_s(rank.behind['sample'])}, other hosts"
        f" {_s(rank.behind['remote'])}, gathering {_s(rank.behind['gather'])}), the rest of a step {_s(rest)}:"
        f" {enough} threads {need} keep up ({names.threads}, {names.ahead})"
    )


def _remote(record: RunTimes, topology: str, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "remote")
    if worst.share("remote") < NOTABLE:
        return
    means = ["data.topology: replicated (edges of all parts on each host)"] if topology == "partitioned" else []
    rate = record.rate("cached_rows")
    had = "" if rate is None else f" (it had {rate:.0%} of the rows that others own)"
    means += [f"{names.cache}{had}", "run.wire_rows: float16 or int8", names.prefetch]
    again = worst is _worst(record, "sample", "gather") and worst.share("sample", "gather") >= NOTABLE
    needs = None if again else keeping_up(worst, names)  # which ``_loading`` says of the same rank
    text = f"{_at(worst, 'remote')} is waiting for other hosts: {', '.join(means)}"
    yield worst.share("remote"), text + (f"; {needs}" if needs else "")


def _loading(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "sample", "gather")
    if worst.share("sample", "gather") < NOTABLE:
        return
    words = "sampling" if worst.spent["sample"] >= worst.spent["gather"] else "gathering rows"
    needs = keeping_up(worst, names) or f"more {names.threads}, {names.prefetch}, or cores that are not shared"
    text = f"{_at(worst, 'sample', 'gather')} is waiting for batches, most of it {words}: {needs}"
    yield worst.share("sample", "gather"), text


def _reduce(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst, slow = _worst(record, "reduce"), max(record.ranks, key=lambda rank: rank.own_s)
    if worst.share("reduce") < NOTABLE:
        return
    text = f"{_at(worst, 'reduce')} is waiting for other ranks"
    if slow.own_s > _UNEVEN * worst.own_s:
        kind = max((kind for kind in KINDS if kind != "reduce"), key=lambda kind: slow.spent[kind] - worst.spent[kind])
        text += (
            f": the hosts, or their work, are unequal, {slow.name} takes {_s(slow.own_s)} of its own for a step and"
            f" this one {_s(worst.own_s)}, the difference mostly in {kind}"
        )
    else:
        text += (
            f", though none takes much longer for its own work than its {_s(worst.own_s)}: a slow network, or steps too"
            f" short; a larger {names.batch} has fewer of them"
        )
    yield worst.share("reduce"), text


def _copy(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "copy")
    if worst.share("copy") >= NOTABLE:
        text = f"{_at(worst, 'copy')} is copying batches to the device: {names.copy}, fewer columns, or float16 rows"
        yield worst.share("copy"), text


def _rest(record: RunTimes) -> Iterator[tuple[float, str]]:
    for kind, about in (
        ("optimizer", "the update of the weights"),
        ("other", "what the loop does besides: metrics, snapshots, a script's own code"),
    ):
        worst = _worst(record, kind)
        if worst.share(kind) >= NOTABLE:
            yield worst.share(kind), f"{_at(worst, kind)} is {kind} ({about})"


def _model(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    """Of the rank that the others wait for."""
    slow = max(record.ranks, key=lambda rank: rank.own_s)
    if slow.share("forward", "backward") >= 0.5 and slow.share(*LOADING) < NOTABLE:
        yield 0.0, f"{_at(slow, 'forward', 'backward')} is the model's own work: more processes, {names.model}"


def _prediction(record: RunTimes) -> Iterator[tuple[float, str]]:
    expected, got = record.predicted("remote_bytes"), record.traffic("remote_bytes")
    if record.whole and expected and abs(got / expected - 1) > _OFF:
        text = f"{decimal(round(got))} an epoch came from other hosts, {decimal(round(expected))} were predicted"
        yield 0.0, f"{text} {record.why_less}".rstrip()


def _worst(record: RunTimes, *kinds: str) -> RankTimes:
    return max(record.ranks, key=lambda rank: rank.share(*kinds))


def _at(rank: RankTimes, *kinds: str) -> str:
    seconds = _s(sum(rank.spent[kind] for kind in kinds))
    return f"{rank.share(*kinds):.0%} of a step on {rank.name} ({seconds} of {_s(rank.step_s)})"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


VERSION = 1  #: of the JSON document; docs/ARCHITECTURE.md describes it

_WIDTH = 110  # of what is not shown in a terminal


class _EpochRange(click.ParamType):
    """``3`` or ``2-5``."""

    name = "epochs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Container[int]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", value.strip())
        if not found:
            self.fail(f"{value!r} is no epoch, 3, and no range of them, 2-5", param, ctx)
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--epochs", type=_EpochRange(), help="One, or a range as 2-5; default: all but the first.")
@click.option("--topology", default="", help="data.topology of the run, which the advice goes by; default: not known.")
@click.option("--script", is_flag=True, help="A script of one's own trained: the advice names no train.* keys.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead.")
def profile(paths: tuple[Path, ...], epochs: Container[int] | None, topology: str, script: bool, as_json: bool) -> None:
    """Show where a run's time goes, per rank, and what would help.

    PATHS: the --run-dir of train, or the folder of a launch, also while it runs; or metrics files of ranks.
    """
    lines = read_lines(paths)
    record = record_of(lines, epochs)
    told = advice(record, topology, script=script) if record else []
    if as_json:
        print(json.dumps(document(lines, record, told)))
    elif record is None:
        raise SettingsError(
            f"no epoch or step line in {', '.join(map(str, paths))} tells where time went: nothing was trained yet, or"
            " for less than a second, or by a script whose StepLog was not given its loader"
        )
    else:
        show(record, told)


def document(lines: Mapping[int, RankLines], record: RunTimes | None, told: list[str]) -> dict[str, Any]:
    """What ``--json`` prints."""
    time = record.to_json() | {"advice": told} if record else None
    return {"version": VERSION, "time": time, "traffic": [rank.to_json() for rank in lines.values() if rank.epochs]}


def show(record: RunTimes, told: list[str]) -> None:
    """Print tables and advice."""
    from rich.console import Console  # which takes longer to import than all the rest

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(width=max(width, 80), highlight=False)
    console.print(_title(record), soft_wrap=True)
    console.print(_steps(record))
    console.print(_behind(record))
    for line in told:
        console.print(f"- {line}", soft_wrap=True, markup=False)


def _title(record: RunTimes) -> str:
    first, last = record.epochs[0], record.epochs[-1]
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    left_out = " (the first, which compiles and warms up, left out)" if record.without_first else ""
    ranks, steps = len(record.ranks), max(rank.steps for rank in record.ranks)
    return f"{epochs}{left_out}: {steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _steps(record: RunTimes) -> Any:
    """Milliseconds of a step by kind."""
    table = _table("milliseconds of a step", ("rank", *KINDS, "step"))
    rows = [(str(rank.rank), rank) for rank in record.ranks]
    for name, rank in [*rows, ("mean", record.mean)] if len(rows) > 1 else rows:
        table.add_row(name, *(_ms(rank.spent[kind]) for kind in KINDS), _ms(rank.step_s))
    table.add_row("share", *(f"{record.mean.share(kind):.0%}" for kind in KINDS), "", style="bold")
    return table


def _behind(record: RunTimes) -> Any:
    """The sampler threads' work on a batch, hidden behind training or not, and where its rows came from."""
    heads = ("rank", *LOADING, "rows", "remote", "cached", "held", "MB", "MB predicted")
    table = _table("behind it, per batch: milliseconds of a sampler thread, rows, MB received", heads)
    for rank in record.ranks:
        table.add_row(str(rank.rank), *(_ms(rank.behind[kind]) for kind in LOADING), *_rows(rank))
    return table


def _rows(rank: RankTimes) -> tuple[str, ...]:
    expected = rank.bytes_predicted
    return (
        f"{rank.traffic['rows']:,.0f}" if rank.traffic["rows"] else "-",
        _share(rank.part("remote_rows", "rows")),
        _share(rank.part("cached_rows", "remote_rows")),
        _share(rank.part("held_rows", "remote_rows")),
        f"{rank.traffic['remote_bytes'] / 1e6:.2f}",
        "-" if expected is None else f"{expected / 1e6:.2f}",
    )


def _table(title: str, heads: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head == "rank" else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _share(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"
