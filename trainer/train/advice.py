"""What would make a run's steps shorter, as far as its own figures say: which key of the config, or what else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.filesize import decimal

from trainer.train.metrics import KINDS, LOADING
from trainer.train.recorded import RankRecord, Record

NOTABLE = 0.1  #: share of a step from which on a kind is worth a line

_UNEVEN = 1.15  #: times the own work of the rank that waits

_OFF = 0.1  #: of a prediction


@dataclass(frozen=True)
class _Names:
    """What can be changed to make a step shorter, as it is called where it is changed."""

    cache: str
    prefetch: str
    threads: str
    ahead: str
    batch: str
    copy: str
    model: str


_BUNDLED = _Names(
    "a larger data.cache",
    "a larger train.prefetch",
    "train.sampler_threads",
    "train.prefetch",
    "train.batch_size",
    "pinned memory and a copy stream (the bundled trainer has both)",
    "fewer train.hidden or train.fanouts, or train.precision: bfloat16 where the processor has it",
)

_SCRIPT = _Names(
    "more rows kept here (graph.cache_rows)",
    "more batches under way (prefetch of the loader)",
    "sampler threads (num_workers of the loader)",
    "prefetch of the loader",
    "batch_size of the loader",
    "pinned memory, a copy stream",
    "a smaller model or fewer neighbours in the script, or bfloat16 where the processor has it",
)


def advice(record: Record, topology: str = "", *, script: bool = False) -> list[str]:
    """Sentences, the weightiest first.

    topology: ``data.topology`` of the run, '' where not known; script: a script of one's own trains, which reads no
    ``train.*`` keys.
    """
    names = _SCRIPT if script else _BUNDLED
    found = [*_remote(record, topology, names), *_loading(record, names), *_reduce(record, names)]
    found += [*_copy(record, names), *_rest(record), *_model(record, names), *_prediction(record)]
    lines = [text for _, text in sorted(found, key=lambda item: -item[0])]
    return lines or [f"no single kind of work but the model's own takes {NOTABLE:.0%} of a step"]


def keeping_up(rank: RankRecord, names: _Names = _BUNDLED) -> str | None:
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


def _remote(record: Record, topology: str, names: _Names) -> Iterator[tuple[float, str]]:
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


def _loading(record: Record, names: _Names) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "sample", "gather")
    if worst.share("sample", "gather") < NOTABLE:
        return
    words = "sampling" if worst.spent["sample"] >= worst.spent["gather"] else "gathering rows"
    needs = keeping_up(worst, names) or f"more {names.threads}, {names.prefetch}, or cores that are not shared"
    text = f"{_at(worst, 'sample', 'gather')} is waiting for batches, most of it {words}: {needs}"
    yield worst.share("sample", "gather"), text


def _reduce(record: Record, names: _Names) -> Iterator[tuple[float, str]]:
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


def _copy(record: Record, names: _Names) -> Iterator[tuple[float, str]]:
    worst = _worst(record, "copy")
    if worst.share("copy") >= NOTABLE:
        text = f"{_at(worst, 'copy')} is copying batches to the device: {names.copy}, fewer columns, or float16 rows"
        yield worst.share("copy"), text


def _rest(record: Record) -> Iterator[tuple[float, str]]:
    for kind, about in (
        ("optimizer", "the update of the weights"),
        ("other", "what the loop does besides: metrics, snapshots, a script's own code"),
    ):
        worst = _worst(record, kind)
        if worst.share(kind) >= NOTABLE:
            yield worst.share(kind), f"{_at(worst, kind)} is {kind} ({about})"


def _model(record: Record, names: _Names) -> Iterator[tuple[float, str]]:
    """Of the rank that the others wait for."""
    slow = max(record.ranks, key=lambda rank: rank.own_s)
    if slow.share("forward", "backward") >= 0.5 and slow.share(*LOADING) < NOTABLE:
        yield 0.0, f"{_at(slow, 'forward', 'backward')} is the model's own work: more processes, {names.model}"


def _prediction(record: Record) -> Iterator[tuple[float, str]]:
    expected, got = record.predicted("remote_bytes"), record.traffic("remote_bytes")
    if record.whole and expected and abs(got / expected - 1) > _OFF:
        text = f"{decimal(round(got))} an epoch came from other hosts, {decimal(round(expected))} were predicted"
        yield 0.0, f"{text} {record.why_less}".rstrip()


def _worst(record: Record, *kinds: str) -> RankRecord:
    return max(record.ranks, key=lambda rank: rank.share(*kinds))


def _at(rank: RankRecord, *kinds: str) -> str:
    seconds = _s(sum(rank.spent[kind] for kind in kinds))
    return f"{rank.share(*kinds):.0%} of a step on {rank.name} ({seconds} of {_s(rank.step_s)})"


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
