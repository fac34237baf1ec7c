"""``python -m trainer profile``: shows from metrics lines where a run's time goes, and gives advice."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.filesize import decimal

from trainer.core.errors import SettingsError
from trainer.train.metrics import KINDS, LOADING
from trainer.train.run_times import RankLines, RankTimes, RunTimes, read_lines, record_of

NOTABLE = 0.1  #: smallest share of a step for which advice is given

_UNEVEN = 1.15  #: ranks count as unequal if the slowest works longer per step than a waiting rank by this factor

_OFF = 0.1  #: a prediction with a larger relative error than this is reported


@dataclass(frozen=True)
class _SettingNames:
    """How advice refers to settings: keys of the cluster file, or arguments of a loader in the user's script."""

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
    "more cached rows (graph.cache_rows)",
    "more batches ahead (prefetch of the loader)",
    "sampler threads (num_workers of the loader)",
    "prefetch of the loader",
    "batch_size of the loader",
    "pinned memory, a copy stream",
    "a smaller model or fewer neighbours in the script, or bfloat16 where the processor has it",
)


def advice(record: RunTimes, topology: str = "", *, script: bool = False) -> list[str]:
    """Return sentences of advice, the most important first.

    topology: ``data.topology`` of the run, '' if unknown. script: whether a user's own script trains; advice then names
    the loader's arguments instead of ``train.*`` keys.
    """
    names = _SCRIPT if script else _BUNDLED
    found = [*_remote(record, topology, names), *_loading(record, names), *_reduce(record, names)]
    found += [*_copy(record, names), *_rest(record), *_model(record, names), *_prediction(record)]
    lines = [text for _, text in sorted(found, key=lambda item: -item[0])]
    return lines or [f"no kind of work except the model's own takes {NOTABLE:.0%} of a step"]


def thread_advice(rank: RankTimes, names: _SettingNames = _BUNDLED) -> str | None:
    """Return advice about sampler threads that are slower than the training loop, or None if they keep up."""
    rest = rank.step_s - rank.wait_s
    if rank.wait_s < NOTABLE * rank.step_s or rank.work_s <= rest or rest <= 0:
        return None
    enough = math.ceil(rank.work_s / rest)
    need = "and as many batches ahead" if rank.behind["remote"] > rank.work_s / 2 else "with a core each"
    return (
        f"a sampler thread needs {_s(rank.work_s)} for a batch (sampling {_s(rank.behind['sample'])}, other hosts"
        f" {_s(rank.behind['remote'])}, gathering {_s(rank.behind['gather'])}), the rest of a step {_s(rest)}:"
        f" {enough} threads {need} keep up ({names.threads}, {names.ahead})"
    )


def _remote(record: RunTimes, topology: str, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "remote")
    if worst.share("remote") < NOTABLE:
        return
    means = ["data.topology: replicated (edges of all parts on each host)"] if topology == "partitioned" else []
    rate = record.rate("cached_rows")
    hits = "" if rate is None else f" (it had {rate:.0%} of the rows of other hosts)"
    means += [f"{names.cache}{hits}", "run.wire_rows: float16 or int8", names.prefetch]
    reported = worst is _worst(record, "sample", "gather") and worst.share("sample", "gather") >= NOTABLE
    needs = None if reported else thread_advice(worst, names)  # else ``_loading`` gives it for the same rank
    text = f"{_at(worst, 'remote')} is waiting for other hosts: {', '.join(means)}"
    yield worst.share("remote"), text + (f"; {needs}" if needs else "")


def _loading(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "sample", "gather")
    if worst.share("sample", "gather") < NOTABLE:
        return
    words = "sampling" if worst.spent["sample"] >= worst.spent["gather"] else "gathering rows"
    needs = (
        thread_advice(worst, names) or f"more {names.threads}, {names.prefetch}, or cores that no other process uses"
    )
    text = f"{_at(worst, 'sample', 'gather')} is waiting for batches, mostly {words}: {needs}"
    yield worst.share("sample", "gather"), text


def _reduce(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    worst, slow = _worst(record, "reduce"), max(record.ranks, key=lambda rank: rank.own_s)
    if worst.share("reduce") < NOTABLE:
        return
    text = f"{_at(worst, 'reduce')} is waiting for other ranks"
    if slow.own_s > _UNEVEN * worst.own_s:
        kind = max((kind for kind in KINDS if kind != "reduce"), key=lambda kind: slow.spent[kind] - worst.spent[kind])
        text += (
            f": the hosts or their work are unequal, a step without this wait takes {_s(slow.own_s)} on {slow.name} and"
            f" {_s(worst.own_s)} on {worst.name}, and most of the difference is {kind}"
        )
    else:
        text += (
            f", though no rank needs much longer for its own work than {_s(worst.own_s)}: the network is slow, or the"
            f" steps are too short; a larger {names.batch} makes fewer steps"
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
        ("other", "the rest of the loop: metrics, snapshots, a script's own code"),
    ):
        worst = _worst(record, kind)
        if worst.share(kind) >= NOTABLE:
            yield worst.share(kind), f"{_at(worst, kind)} is {kind} ({about})"


def _model(record: RunTimes, names: _SettingNames) -> Iterator[tuple[float, str]]:
    slow = max(record.ranks, key=lambda rank: rank.own_s)
    if slow.share("forward", "backward") >= 0.5 and slow.share(*LOADING) < NOTABLE:
        yield 0.0, f"{_at(slow, 'forward', 'backward')} is the model's own work: more processes, {names.model}"


def _prediction(record: RunTimes) -> Iterator[tuple[float, str]]:
    expected, got = record.predicted("remote_bytes"), record.traffic("remote_bytes")
    if record.whole and expected and abs(got / expected - 1) > _OFF:
        text = f"{decimal(round(got))} an epoch came from other hosts; {decimal(round(expected))} were predicted"
        yield 0.0, f"{text} {record.why_less}".rstrip()


def _worst(record: RunTimes, *kinds: str) -> RankTimes:
    return max(record.ranks, key=lambda rank: rank.share(*kinds))


def _at(rank: RankTimes, *kinds: str) -> str:
    seconds = _s(sum(rank.spent[kind] for kind in kinds))
    return f"{rank.share(*kinds):.0%} of a step on {rank.name} ({seconds} of {_s(rank.step_s)})"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


VERSION = 1  #: version of the JSON document, which docs/ARCHITECTURE.md describes

_WIDTH = 110  # columns of output that does not go to a terminal


class _EpochRange(click.ParamType):
    """Value of ``--epochs``: one epoch, such as ``3``, or a range, such as ``2-5``."""

    name = "epochs"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Container[int]:
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", value.strip())
        if not found:
            self.fail(f"{value!r} is neither an epoch, such as 3, nor a range of epochs, such as 2-5", param, ctx)
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1)


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--epochs", type=_EpochRange(), help="An epoch, or a range such as 2-5; default: all but the first.")
@click.option("--topology", default="", help="data.topology of the run, used for the advice; default: unknown.")
@click.option("--script", is_flag=True, help="A user's own script trained: the advice names no train.* keys.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead.")
def profile(paths: tuple[Path, ...], epochs: Container[int] | None, topology: str, script: bool, as_json: bool) -> None:
    """Show per rank where a run's time goes, and give advice.

    PATHS: the --run-dir of train, the run folder of a launch (also of a running one), or metrics files of ranks.
    """
    lines = read_lines(paths)
    record = record_of(lines, epochs)
    sentences = advice(record, topology, script=script) if record else []
    if as_json:
        print(json.dumps(document(lines, record, sentences)))
    elif record is None:
        raise SettingsError(
            f"no epoch or step line in {', '.join(map(str, paths))} has times: training has not started or took less"
            " than a second, or a script's StepLog was created without its loader"
        )
    else:
        show(record, sentences)


def document(lines: Mapping[int, RankLines], record: RunTimes | None, sentences: list[str]) -> dict[str, Any]:
    """Return the JSON document that ``profile --json`` prints. ``sentences``: the result of ``advice``."""
    time = record.to_json() | {"advice": sentences} if record else None
    return {"version": VERSION, "time": time, "traffic": [rank.to_json() for rank in lines.values() if rank.epochs]}


def show(record: RunTimes, sentences: list[str]) -> None:
    """Print two tables of where the time of a run goes, per step and per batch, then the advice ``sentences``."""
    from rich.console import Console  # slow to import

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    console = Console(width=max(width, 80), highlight=False)
    console.print(_title(record), soft_wrap=True)
    console.print(_steps(record))
    console.print(_behind(record))
    for line in sentences:
        console.print(f"- {line}", soft_wrap=True, markup=False)


def _title(record: RunTimes) -> str:
    first, last = record.epochs[0], record.epochs[-1]
    epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    left_out = " (the first, which compiles and warms up, left out)" if record.without_first else ""
    ranks, steps = len(record.ranks), max(rank.steps for rank in record.ranks)
    return f"{epochs}{left_out}: {steps} steps on {ranks} {'rank' if ranks == 1 else 'ranks'}"


def _steps(record: RunTimes) -> Any:
    table = _table("milliseconds of a step", ("rank", *KINDS, "step"))
    rows = [(str(rank.rank), rank) for rank in record.ranks]
    for name, rank in [*rows, ("mean", record.mean)] if len(rows) > 1 else rows:
        table.add_row(name, *(_ms(rank.spent[kind]) for kind in KINDS), _ms(rank.step_s))
    table.add_row("share", *(f"{record.mean.share(kind):.0%}" for kind in KINDS), "", style="bold")
    return table


def _behind(record: RunTimes) -> Any:
    """Return a table of means per batch, with one row per rank.

    The columns are: milliseconds of a sampler thread, by kind of work; number of gathered rows, and the shares of
    remote, cached and held rows; MB received.
    """
    heads = ("rank", *LOADING, "rows", "remote", "cached", "held", "MB", "MB predicted")
    table = _table("per batch: milliseconds of a sampler thread, rows, MB received", heads)
    for rank in record.ranks:
        table.add_row(str(rank.rank), *(_ms(rank.behind[kind]) for kind in LOADING), *_rows(rank))
    return table


def _rows(rank: RankTimes) -> tuple[str, ...]:
    expected = rank.bytes_predicted
    return (
        f"{rank.traffic['rows']:,.0f}" if rank.traffic["rows"] else "-",
        _share(rank.ratio("remote_rows", "rows")),
        _share(rank.ratio("cached_rows", "remote_rows")),
        _share(rank.ratio("held_rows", "remote_rows")),
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
