"""What would make a run's steps shorter, as far as its metrics lines tell: which key of the config, or what else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median

from launcher.profile import LOADING, Profile, RankProfile, milliseconds, rank_name

NOTABLE = 0.1  #: share of a step from which on a kind is worth a line
_UNEVEN = 1.15  # times the own work of the rank in the middle
_OFF = 0.1  # of a prediction


def advice(profile: Profile, node_of: Mapping[int, int], topology: str = "") -> list[str]:
    """The weightiest line first; ``node_of``: node_rank by rank; ``topology``: of the plan, '' where not known."""
    found = [*_remote(profile, node_of, topology), *_loading(profile, node_of), *_reduce(profile, node_of)]
    found += [*_copy(profile), *_compute(profile), *_prediction(profile)]
    lines = [text for _, text in sorted(found, key=lambda item: -item[0])]
    return lines or [f"no single kind of work but the model's own takes {NOTABLE:.0%} of a step"]


def _remote(profile: Profile, node_of: Mapping[int, int], topology: str) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("remote"))
    if worst.share("remote") < NOTABLE:
        return
    help = ["data.topology: replicated (edges of all parts on each host)"] if topology == "partitioned" else []
    had = "" if profile.hit_rate is None else f" (it had {profile.hit_rate:.0%} of the rows that others own)"
    help += [f"a larger data.cache{had}", "run.wire_rows: float16 or int8", "a larger train.prefetch"]
    yield worst.share("remote"), f"{_at(worst, node_of, 'remote')} is waiting for other hosts: {', '.join(help)}"


def _loading(profile: Profile, node_of: Mapping[int, int]) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("sample", "gather"))
    if worst.share("sample", "gather") < NOTABLE:
        return
    what = max(("sample", "gather"), key=lambda kind: worst.spent[kind])
    words = {"sample": "sampling", "gather": "gathering rows"}[what]
    text = f"{_at(worst, node_of, 'sample', 'gather')} is waiting for batches, most of it {words}"
    yield worst.share("sample", "gather"), f"{text}: {_threads(worst)}"


def _threads(rank: RankProfile) -> str:
    """How many sampler threads would keep up with the rest of a step."""
    work, rest = sum(rank.behind.values()), rank.step_s - sum(rank.spent[kind] for kind in LOADING)
    if not work or rest <= 0 or work <= rest:
        return "more train.sampler_threads, a larger train.prefetch, or cores that are not shared"
    enough = math.ceil(work / rest)
    return (
        f"a batch takes a sampler thread {milliseconds(work)}, the rest of a step {milliseconds(rest)}, so "
        f"train.sampler_threads: {enough} keeps up where there are cores for them"
    )


def _reduce(profile: Profile, node_of: Mapping[int, int]) -> Iterator[tuple[float, str]]:
    worst = max(profile.ranks, key=lambda rank: rank.share("reduce"))
    if worst.share("reduce") < NOTABLE:
        return
    slow = max(profile.ranks, key=lambda rank: rank.own_s)
    usual = min if len(profile.ranks) == 2 else median
    text = f"{_at(worst, node_of, 'reduce')} is waiting for other ranks"
    if slow.own_s > _UNEVEN * usual([rank.own_s for rank in profile.ranks]):
        text += (
            f": the hosts are unequal, {rank_name(slow.rank, node_of)} takes {milliseconds(slow.own_s)} of its own for "
            f"a step and this one {milliseconds(worst.own_s)}"
        )
    else:
        text += ", though all take as long for their own work: a slow line, or steps too short; a larger "
        text += "train.batch_size has fewer of them"
    yield worst.share("reduce"), text


def _copy(profile: Profile) -> Iterator[tuple[float, str]]:
    if profile.share("copy") >= NOTABLE:
        text = f"{profile.share('copy'):.0%} of a step is copying batches to the device: pinned memory and a copy "
        yield profile.share("copy"), text + "stream (the bundled trainer has both), fewer columns, or float16 rows"


def _compute(profile: Profile) -> Iterator[tuple[float, str]]:
    share = profile.share("forward", "backward")
    if share >= 0.5 and profile.share(*LOADING) < NOTABLE:
        text = f"{share:.0%} of a step is the model's own work: more processes, fewer train.hidden or train.fanouts, "
        yield 0.0, text + "or train.precision: bfloat16 where the processor has it"


def _prediction(profile: Profile) -> Iterator[tuple[float, str]]:
    expected, got = profile.predicted("remote_bytes"), profile.traffic("remote_bytes")
    if profile.whole and expected and abs(got / expected - 1) > _OFF:
        more = "more" if got > expected else "less"
        yield 0.0, f"{abs(got / expected - 1):.0%} {more} bytes came from other hosts than predicted"


def _at(rank: RankProfile, node_of: Mapping[int, int], *kinds: str) -> str:
    seconds = milliseconds(sum(rank.spent[kind] for kind in kinds))
    return f"{rank.share(*kinds):.0%} of a step on {rank_name(rank.rank, node_of)} ({seconds})"
