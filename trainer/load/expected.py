"""What a rank will receive from other hosts in an epoch, by the chances of nodes to be in its batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.load.hot import BatchPlan, HostVisits, remote_chances
from trainer.sample.held import HELD, MOST_ANSWERS, MOST_BYTES
from trainer.schema import NodeType
from trainer.store.part import PartStore

_BINS = 2048  #: nodes of about the same chance are looked at together
_SPREAD = 0.1  #: answers are whole or gone, and batches differ: one that just fits on average is there half of the time
_STEPS = 256  #: batches that are gone through; the rest of an epoch is like the last one


@dataclass(frozen=True)
class Prediction:
    """Of one rank and epoch."""

    steps: int
    remote_bytes: float
    remote_bytes_without_cache: float
    hit_rate: float  #: share of the rows of others that the cache has
    cache_rows: int
    cache_bytes: int

    def line(self) -> dict[str, float]:
        """Of the metrics."""
        return {
            "steps": self.steps,
            "remote_bytes": round(self.remote_bytes),
            "remote_bytes_without_cache": round(self.remote_bytes_without_cache),
            "hit_rate": round(self.hit_rate, 4),
            "cache_rows": self.cache_rows,
            "cache_bytes": self.cache_bytes,
        }


def predicted(
    plan: BatchPlan, visits: HostVisits, store: PartStore, row_bytes: Mapping[NodeType, int], label_bytes: int,
    kept: Mapping[NodeType, Ids], unheld: Collection[NodeType] = (),
) -> Prediction:  # fmt: skip
    """``kept`` rows are on this host; of ``unheld`` types each batch asks anew.

    row_bytes: of the columns that batches ask other hosts for; label_bytes: of those of seeds.
    """
    always = visits.sampled_bytes + label_bytes * float(
        remote_chances(visits.seeds[plan.target], plan.target, store).sum()
    )
    with_cache = without = plan.steps * always
    cached = remote = 0.0
    for of, width in row_bytes.items():
        chances = remote_chances(visits.chances[of], of, store)
        batches = 0 if of in unheld else HELD
        without += width * asked_rows(chances, plan.steps, width, plan.threads, batches)
        remote += float(chances.sum())
        if of in kept:
            cached += float(chances[kept[of]].sum())
            chances[kept[of]] = 0
        with_cache += width * asked_rows(chances, plan.steps, width, plan.threads, batches)
    return Prediction(
        plan.order.num_steps, with_cache, without, cached / remote if remote else 0.0,
        sum(map(len, kept.values())), sum(row_bytes[of] * len(ids) for of, ids in kept.items()),
    )  # fmt: skip


def asked_rows(chances: Array, steps: float, row_bytes: int, threads: int = 1, batches: int = HELD) -> float:
    """How many rows are asked for in ``steps`` batches, each node being in one with its chance, [n].

    Answers are held as ``HeldRows`` does: the last ones, no more rows than the last ``batches`` batches needed. A
    batch does not find the answers of ``threads - 1`` batches that are made beside it.
    """
    chance, number = _binned(chances)
    needed, total, asked = float(chance @ number), 0.0, np.zeros(0)
    answers: deque[npt.NDArray[np.float64]] = deque(maxlen=MOST_ANSWERS + threads - 1)
    for step in range(min(int(np.ceil(steps)), _STEPS)):
        held = _held(answers, number, needed * min(batches, step), row_bytes, threads - 1)
        asked = chance * (1.0 - held)
        answers.append(asked)
        total += float(asked @ number) * min(1.0, steps - step)
    return total + max(0.0, steps - _STEPS) * float(asked @ number) if len(asked) else 0.0


def _held(
    answers: deque[npt.NDArray[np.float64]], number: Array, most_rows: float, row_bytes: int, late: int
) -> npt.NDArray[np.float64]:
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


def _binned(chances: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean chance and number of the nodes of each bin; bins are even on the scale of roots."""
    chances = chances[chances > 0]
    bins = np.minimum((np.sqrt(chances) * _BINS).astype(np.int64), _BINS - 1)
    number = np.bincount(bins, minlength=_BINS).astype(np.float64)
    sums = np.bincount(bins, chances, minlength=_BINS)
    some = number > 0
    return sums[some] / number[some], number[some]
