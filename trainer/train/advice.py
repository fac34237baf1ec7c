"""What would make a run's steps shorter, as far as its own figures tell."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from trainer.train.recorded import RankRecord, Record

NOTABLE = 0.1  #: share of a step from which on a kind is worth a word
_UNEVEN = 1.15  #: times the own work of the rank in the middle
_OFF = 0.1  #: of a prediction


@dataclass(frozen=True)
class Advice:
    share: float  #: of a step that is at stake
    text: str


def advice(record: Record, most: int = 3) -> list[str]:
    """The weightiest lines first."""
    found = sorted(_found(record), key=lambda item: -item.share)
    return [item.text for item in found[:most]] or [
        f"no kind but forward and backward takes {NOTABLE:.0%} of a step on any rank"
    ]


def keeping_up(rank: RankRecord) -> str | None:
    """When a loop waits because its sampler threads cannot keep up: what they would need."""
    rest = rank.step_s - rank.wait_s
    if rank.wait_s < NOTABLE * rank.step_s or rank.work_s <= rest or rest <= 0:
        return None
    enough = math.ceil(rank.work_s / rest)
    need = "and as many batches ahead" if rank.behind["remote"] > rank.work_s / 2 else "with a core each"
    return (
        f"a batch takes a sampler thread {_s(rank.work_s)} (sampling {_s(rank.behind['sample'])}, other hosts"
        f" {_s(rank.behind['remote'])}, gathering {_s(rank.behind['gather'])}), the rest of a step {_s(rest)}:"
        f" {enough} threads {need} keep up (sampler_threads, prefetch)"
    )


def _found(record: Record) -> Iterator[Advice]:
    yield from _loading(record)
    yield from _reduce(record)
    yield from _model(record)
    yield from _rest(record)
    yield from _prediction(record)


def _loading(record: Record) -> Iterator[Advice]:
    remote = max(record.ranks, key=lambda rank: rank.share("remote"))
    local = max(record.ranks, key=lambda rank: rank.share("sample", "gather"))
    needs = keeping_up(local)
    if (share := remote.share("remote")) >= NOTABLE:
        yield Advice(share, f"remote wait is {_at(remote, 'remote')}{_traffic(remote)}{_then(keeping_up(remote))}")
        needs = None if local is remote else needs  # once is enough
    if (share := local.share("sample", "gather")) >= NOTABLE:
        yield Advice(share, f"waiting for sampling and gathering is {_at(local, 'sample', 'gather')}{_then(needs)}")


def _traffic(rank: RankRecord) -> str:
    """Where its rows come from, and what would bring fewer bytes."""
    text = f": a batch brings {_bytes(rank.traffic['remote_bytes'])} from other hosts"
    remote, cached = rank.part("remote_rows", "rows"), rank.part("cached_rows", "remote_rows")
    if remote is not None:
        text += f", who own {remote:.0%} of its {rank.traffic['rows']:,.0f} rows"
    if cached is not None:
        held = rank.part("held_rows", "remote_rows") or 0.0
        text += f"; of those {cached:.0%} were cached (data.cache), {held:.0%} held from the last batches"
    return text


def _reduce(record: Record) -> Iterator[Advice]:
    worst = max(record.ranks, key=lambda rank: rank.share("reduce"))
    if (share := worst.share("reduce")) < NOTABLE or len(record.ranks) == 1:
        return
    slow, middle = max(record.ranks, key=lambda rank: rank.own_s), median(rank.own_s for rank in record.ranks)
    text = f"waiting for other ranks is {_at(worst, 'reduce')}"
    if slow.own_s > _UNEVEN * middle or (len(record.ranks) == 2 and slow.own_s > _UNEVEN * worst.own_s):
        kind = max(slow.spent, key=lambda name: slow.spent[name] - record.mean.spent[name] if name != "reduce" else -1)
        text += (
            f"; rank {slow.rank} has most work of its own, {_s(slow.own_s)} a step against {_s(worst.own_s)} of rank"
            f" {worst.rank}, the difference mostly in {kind}"
        )
    else:
        text += "; the ranks' own work is even, so it is the line: a larger batch_size reduces less often"
    yield Advice(share, text)


def _model(record: Record) -> Iterator[Advice]:
    mean = record.mean
    share, loading = mean.share("forward", "backward"), mean.share(*mean.behind)
    if share >= 0.5 and loading < NOTABLE:
        yield Advice(
            share,
            f"forward and backward are {share:.0%} of a step ({_s(share * mean.step_s)}), waiting for batches"
            f" {loading:.0%}: what is left to gain is in the model (hidden, fanouts, precision) and in more processes",
        )


def _rest(record: Record) -> Iterator[Advice]:
    for kind, about in (
        ("copy", "batches to the device"),
        ("optimizer", "the update of the weights"),
        ("other", "what the loop does besides: metrics, snapshots, a script's own code"),
    ):
        worst = max(record.ranks, key=lambda rank: rank.share(kind))
        if (share := worst.share(kind)) >= NOTABLE:
            yield Advice(share, f"{kind} ({about}) is {_at(worst, kind)}")


def _prediction(record: Record) -> Iterator[Advice]:
    for rank in record.ranks:
        expected, got = rank.bytes_predicted, rank.traffic["remote_bytes"]
        if expected and abs(got / expected - 1) > _OFF:
            why = " of an epoch that begins with nothing held" if got < expected and rank.traffic["held_rows"] else ""
            text = f"rank {rank.rank} receives {_bytes(got)} a batch, {_bytes(expected)} were predicted{why}"
            yield Advice(0.0, text)
            return


def _at(rank: RankRecord, *kinds: str) -> str:
    seconds = sum(rank.spent[kind] for kind in kinds)
    return f"{rank.share(*kinds):.0%} of a step on rank {rank.rank} ({_s(seconds)})"


def _then(text: str | None) -> str:
    return f"; {text}" if text else ""


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
