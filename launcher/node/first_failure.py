"""Decides which failure of a run came first: on a node, on the hub, and in the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T")

#: Seconds that supervisors need to notice a node that was killed. Ranks of other nodes notice it, and fail, before.
NOTICED = 3.0


class Failure(NamedTuple):
    """What decides which of several failures came first."""

    t: float  #: seconds since the epoch, all by one clock
    node_rank: int
    rank: int | None
    kind: str = "failure"  #: as in a cause: failure, lost, stop, nan, stall
    follow_up: bool = False  #: it looks like a consequence of the end of another process
    stopped: bool = False  #: the process was stopped before it failed
    done_without: bool = False  #: the run continued without the process


def first_failure(failures: Iterable[T], about: Callable[[T], Failure]) -> T | None:
    """Return the failure that came first; None if there is none, or if the run continued without all.

    It is the earliest, but the loss of a node comes before the failure of a rank up to ``NOTICED`` seconds earlier.
    Failures that the run continued without come after all others but consequences; stopped processes come last.
    """
    found = sorted(((about(one), one) for one in failures), key=lambda pair: _order(pair[0]))
    if all(one.done_without for one, _ in found):
        return None
    first = found[0][0]
    losses = (one for other, one in found if other.kind == "lost" and other.t < first.t + NOTICED)
    rank_failed = first.kind == "failure" and first.rank is not None
    return next(losses, found[0][1]) if rank_failed else found[0][1]


def _order(one: Failure) -> tuple[bool, bool, bool, float, int, int]:
    spared = one.done_without and not one.follow_up
    return one.stopped, one.follow_up, spared, one.t, one.node_rank, -1 if one.rank is None else one.rank
