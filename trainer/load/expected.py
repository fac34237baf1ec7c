"""What a rank will receive from other hosts in an epoch.

By the chances of nodes to be in its batches; where the first batches were rehearsed, by those, and the chances say how
the others differ from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.load.asked import AskedColumns
from trainer.load.hot import BatchPlan, HostVisits, remote_chances
from trainer.load.rehearsal import Rehearsal
from trainer.sample.held import HELD, MOST_ANSWERS, MOST_BYTES
from trainer.schema import NodeType
from trainer.store.part import PartStore

_BINS = 2048  #: nodes of about the same chance are looked at together
_SPREAD = 0.1  #: answers are whole or gone, and batches differ: one that just fits on average is there half of the time
_STEPS = 256  #: batches that are gone through; the rest of an epoch is like the last one

Steps = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """Of one rank and epoch."""

    steps: int
    remote_bytes: float
    remote_bytes_without_cache: float
    hit_rate: float  #: share of the rows of others that the cache has
    cache_rows: int
    cache_bytes: int
    by: Literal["sampled", "chances"] = "chances"  #: how it was found

    def line(self) -> dict[str, float | str]:
        """Of the metrics."""
        return {
            "steps": self.steps,
            "remote_bytes": round(self.remote_bytes),
            "remote_bytes_without_cache": round(self.remote_bytes_without_cache),
            "hit_rate": round(self.hit_rate, 4),
            "cache_rows": self.cache_rows,
            "cache_bytes": self.cache_bytes,
            "by": self.by,
        }


def predicted(
    plan: BatchPlan, visits: HostVisits, store: PartStore, columns: AskedColumns, kept: Mapping[NodeType, Ids],
    held: int = HELD, rehearsal: Rehearsal | None = None,
) -> Prediction:  # fmt: skip
    """``kept`` rows are on this host; answers are held for ``held`` batches."""
    seeds = remote_chances(visits.seeds[plan.target], plan.target, store)
    always = visits.sampled_bytes + columns.label_bytes * float(seeds.sum())
    steps = np.minimum(1.0, plan.steps - np.arange(min(int(np.ceil(plan.steps)), _STEPS)))
    with_cache, without = always * steps, always * steps
    cached = remote = 0.0
    for of, width in columns.wire_bytes.items():
        chances, batches = remote_chances(visits.chances[of], of, store), held if of in columns.wide else 0
        bounds = Bounds(columns.row_bytes[of], plan.threads, batches)
        without = without + width * asked_rows(chances, steps, bounds)
        some = kept.get(of, np.empty(0, np.int64))
        cached, remote = cached + float(chances[some].sum()), remote + float(chances.sum())
        with_cache = with_cache + width * asked_rows(chances, steps, bounds, some)
    rate = cached / remote if remote else 0.0
    return Prediction(
        plan.order.num_steps,
        _epoch(with_cache, plan.steps, None if rehearsal is None else rehearsal.with_cache),
        _epoch(without, plan.steps, None if rehearsal is None else rehearsal.without),
        rate if rehearsal is None else rehearsal.hit_rate,
        sum(map(len, kept.values())),
        sum(columns.row_bytes[of] * len(ids) for of, ids in kept.items()),
        "chances" if rehearsal is None else "sampled",
    )


def _epoch(expected: Steps, steps: float, seen: Steps | None) -> float:
    """Bytes of all ``steps``. After those ``seen`` each is like the last third of them, or less where less is expected.

    Nothing makes later steps ask for more; where nearly all is at hand by then, what is expected of them says little.
    """
    rest = max(0.0, steps - len(expected)) * float(expected[-1]) if len(expected) else 0.0
    if seen is None or len(seen) == 0:
        return float(expected.sum()) + rest
    last = slice(len(seen) - max(1, len(seen) // 3), len(seen))
    more = max(0.0, steps - len(seen))
    usual = float(expected[last].mean())
    fewer = (float(expected[len(seen) :].sum()) + rest) / (more * usual) if more and usual else 1.0
    return float(seen.sum()) + more * min(1.0, fewer) * float(seen[last].mean())


@dataclass(frozen=True)
class Bounds:
    """Of what is held, as ``HeldRows`` does."""

    row_bytes: int
    threads: int = 1  #: a batch does not find the answers of those that are made beside it
    batches: int = HELD  #: the last answers, no more rows than so many batches needed


def asked_rows(chances: Array, steps: Steps, bounds: Bounds, kept: Ids | None = None) -> Steps:
    """How many rows each step asks for, float64 [steps], each node being in a batch with its chance, [n].

    ``steps``: how large each is, 1 for a whole one. What is ``kept`` is not asked for.
    """
    others = chances.copy()
    others[[] if kept is None else kept] = 0
    chance, number = _binned(others)
    needed = float(chances.sum(dtype=np.float64))
    answers: deque[Steps] = deque(maxlen=MOST_ANSWERS + bounds.threads - 1)
    asked = np.zeros(len(steps))
    for step, size in enumerate(steps):
        held = _held(answers, number, needed * min(bounds.batches, step), bounds.row_bytes, bounds.threads - 1)
        answers.append(chance * (1.0 - held))
        asked[step] = float(answers[-1] @ number) * size
    return asked


def _held(answers: deque[Steps], number: Array, most_rows: float, row_bytes: int, late: int) -> Steps:
    """The chance of each bin's nodes to be at hand."""
    held, rows = np.zeros(len(number)), 0.0
    limit = min(most_rows, MOST_BYTES / max(row_bytes, 1))
    for answer in list(answers)[::-1][late : late + MOST_ANSWERS]:
        rows += float(answer @ number)
        share = min(1.0, 0.5 + (limit - rows) / (2 * _SPREAD * limit)) if limit else 0.0
        if share <= 0:
            break
        held += share * answer
    return np.minimum(held, 1.0)


def _binned(chances: Array) -> tuple[Steps, Steps]:
    """Mean chance and number of the nodes of each bin; bins are even on the scale of roots."""
    chances = chances[chances > 0]
    bins = np.minimum((np.sqrt(chances) * _BINS).astype(np.int64), _BINS - 1)
    number = np.bincount(bins, minlength=_BINS).astype(np.float64)
    sums = np.bincount(bins, chances, minlength=_BINS)
    some = number > 0
    return sums[some] / number[some], number[some]
