"""What would make a run's steps shorter, as far as its metrics lines tell: which key of the config, or what else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.filesize import decimal

from launcher.profile import LOADING, Profile, RankProfile, milliseconds, rank_name

NOTABLE = 0.1  #: share of a step from which on a kind is worth a line
_UNEVEN = 1.15  # times the own work of the rank that waits
_OFF = 0.1  # of a prediction


@dataclass(frozen=True)
class _Means:
    """What can be changed to make a step shorter, as it is called where it is changed."""

    cache: str
    prefetch: str
    threads: str
    batch: str
    copy: str
    model: str


_BUNDLED = _Means(
    "a larger data.cache",
    "a larger train.prefetch",
    "train.sampler_threads",
    "train.batch_size",
    "pinned memory and a copy stream (the bundled trainer has both)",
    "fewer train.hidden or train.fanouts, or train.precision: bfloat16 where the processor has it",
)
_OWN = _Means(
    "more rows kept here (graph.cache_rows)",
    "more batches under way (prefetch of the loader)",
    "sampler threads (num_workers of the loader)",
    "batch_size of the loader",
    "pinned memory, a copy stream",
    "a smaller model or fewer neighbours in the script, or bfloat16 where the processor has it",
)


def advice(profile: Profile, node_of: Mapping[int, int], topology: str = "", *, own: bool = False) -> list[str]:
    """The weightiest line first; ``node_of``: node_rank by rank; ``topology``: of the plan, '' where not known;
    ``own``: an own command ran, which reads no ``train.*`` keys."""
    means = _OWN if own else _BUNDLED
    found = [*_remote(profile, node_of, topology, means), *_loading(profile, node_of, means)]
    found += [*_reduce(profile, node_of, means), *_copy(profile, node_of, means), *_compute(profile, node_of, means)]
    lines = [text for _, text in sorted([*found, *_prediction(profile)], key=lambda item: -item[0])]
    return lines or [f"no single kind of work but the model's own takes {NOTABLE:.0%} of a step"]


def _remote(profile: Profile, node_of: Mapping[int, int], topology: str, means: _Means) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("remote"))
    if worst.share("remote") < NOTABLE:
        return
    help = ["data.topology: replicated (edges of all parts on each host)"] if topology == "partitioned" else []
    had = "" if profile.hit_rate is None else f" (it had {profile.hit_rate:.0%} of the rows that others own)"
    help += [f"{means.cache}{had}", "run.wire_rows: float16 or int8", means.prefetch]
    yield worst.share("remote"), f"{_at(worst, node_of, 'remote')} is waiting for other hosts: {', '.join(help)}"


def _loading(profile: Profile, node_of: Mapping[int, int], means: _Means) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("sample", "gather"))
    if worst.share("sample", "gather") < NOTABLE:
        return
    what = max(("sample", "gather"), key=lambda kind: worst.spent[kind])
    words = {"sample": "sampling", "gather": "gathering rows"}[what]
    text = f"{_at(worst, node_of, 'sample', 'gather')} is waiting for batches, most of it {words}"
    yield worst.share("sample", "gather"), f"{text}: {_threads(worst, means)}"


def _threads(rank: RankProfile, means: _Means) -> str:
    """How many sampler threads would keep up with the rest of a step."""
    work, rest = sum(rank.behind.values()), rank.step_s - sum(rank.spent[kind] for kind in LOADING)
    if not work or rest <= 0 or work <= rest:
        return f"more {means.threads}, {means.prefetch}, or cores that are not shared"
    enough = math.ceil(work / rest)
    return (
        f"a batch takes a sampler thread {milliseconds(work)}, the rest of a step {milliseconds(rest)}, so "
        f"{means.threads}: {enough} keeps up where there are cores for them"
    )


def _reduce(profile: Profile, node_of: Mapping[int, int], means: _Means) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("reduce"))
    if worst.share("reduce") < NOTABLE:
        return
    slow = max(profile.ranks, key=lambda rank: rank.own_s)
    text = f"{_at(worst, node_of, 'reduce')} is waiting for other ranks"
    if slow.own_s > _UNEVEN * worst.own_s:
        text += (
            f": the hosts, or their work, are unequal, {rank_name(slow.rank, node_of)} takes "
            f"{milliseconds(slow.own_s)} of its own for a step and this one {milliseconds(worst.own_s)}"
        )
    else:
        text += f", though none takes much longer for its own work than its {milliseconds(worst.own_s)}: a slow line, "
        text += f"or steps too short; a larger {means.batch} has fewer of them"
    yield worst.share("reduce"), text


def _copy(profile: Profile, node_of: Mapping[int, int], means: _Means) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("copy"))
    if worst.share("copy") >= NOTABLE:
        text = f"{_at(worst, node_of, 'copy')} is copying batches to the device: {means.copy}, fewer columns, or "
        yield worst.share("copy"), text + "float16 rows"


def _compute(profile: Profile, node_of: Mapping[int, int], means: _Means) -> Iterator[tuple[float, str]]:
    """Of the rank that the others wait for."""
    slow = max(profile.ranks, key=lambda rank: rank.own_s)
    if slow.share("forward", "backward") >= 0.5 and slow.share(*LOADING) < NOTABLE:
        text = f"{_at(slow, node_of, 'forward', 'backward')} is the model's own work: more processes, "
        yield 0.0, text + means.model


def _prediction(profile: Profile) -> Iterator[tuple[float, str]]:
    expected, got = profile.predicted("remote_bytes"), profile.traffic("remote_bytes")
    if not profile.whole or not expected or abs(got / expected - 1) <= _OFF:
        return
    why = f" {profile.less_than_predicted}".rstrip()
    text = f"{decimal(round(got))} an epoch came from other hosts, {decimal(round(expected))} were predicted"
    yield 0.0, text + why


def _at(rank: RankProfile, node_of: Mapping[int, int], *kinds: str) -> str:
    seconds = milliseconds(sum(rank.spent[kind] for kind in kinds))
    named = rank_name(rank.rank, node_of)
    return f"{rank.share(*kinds):.0%} of a step on {named} ({seconds} of {milliseconds(rank.step_s)})"
