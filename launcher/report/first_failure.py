"""Decides which process failed first, and summarises the failures that followed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from launcher.report.outcome import Outcome
from launcher.text import count, spans


def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """Return the outcome of the process that failed first; None if none failed.

    Failures that look like consequences come after all other failures, and stopped processes come last.

    The loss of a node without which the run continued is ignored. It counts only if there are other failures and they
    all look like consequences.
    """
    failed = [outcome for outcome in outcomes if outcome.failed]
    serious = [outcome for outcome in failed if not outcome.done_without]
    first = min(serious, key=_order, default=None)
    return min(failed, key=_order, default=None) if first is not None and first.is_follow_up else first


def _order(outcome: Outcome) -> tuple[bool, bool, float, int, int]:
    when = outcome.ended if outcome.ended is not None else float("inf")
    rank = outcome.rank if outcome.rank is not None else -1
    return outcome.stopped, outcome.is_follow_up, when, outcome.node_rank, rank


_KINDS_SHOWN = 4

_LONGEST = 120  # characters of a folded reason

#: Parts in which the same error differs between processes: numbers and addresses.
_PARTICULAR = re.compile(r"\[?\b\d{1,3}(\.\d{1,3}){3}\b\]?(:\d+)?|0x[0-9a-f]+|\b\d+\b")

_NAMED = 8  # nodes and servers that are named in one line


@dataclass(frozen=True)
class Aftermath:
    lead: str  #: ``, 3.2 s before 7 follow-up errors``; '' if nothing else failed
    lines: tuple[str, ...]  #: the errors that followed, equal ones in one line, then counts of stopped processes


def aftermath_of(first: Outcome, outcomes: Iterable[Outcome]) -> Aftermath:
    """Summarise the outcomes of all processes and nodes except ``first``, the first failure."""
    others = [outcome for outcome in outcomes if outcome is not first and not outcome.done_without]
    failed = [outcome for outcome in others if outcome.failed and not outcome.stopped]
    stopped = [outcome for outcome in others if outcome.stopped]
    return Aftermath(_lead(first, failed), (*_folded(failed), *_stopped(stopped)))


def _lead(first: Outcome, failed: Sequence[Outcome]) -> str:
    if not failed:
        return ""
    errors = count(len(failed), "follow-up error")
    later = [outcome.ended - first.ended for outcome in failed if outcome.ended and first.ended]
    if not later or min(later) < 0:  # a consequence was recorded before its cause
        return f"; {errors}"
    return f", {min(later):.1f} s before {errors}"


def _folded(failed: Iterable[Outcome]) -> list[str]:
    kinds: dict[str, list[Outcome]] = {}
    for outcome in failed:
        kinds.setdefault(_PARTICULAR.sub("…", outcome.reason), []).append(outcome)
    largest = sorted(kinds.values(), key=len, reverse=True)
    lines = [f"then {_who(each)} {_short(each[0].reason)}" for each in largest[:_KINDS_SHOWN]]
    left = sum(map(len, largest[_KINDS_SHOWN:]))
    return [*lines, f"then {count(left, 'more error')}, see the logs"] if left else lines


def _stopped(stopped: Iterable[Outcome]) -> list[str]:
    kinds = Counter("rank" if outcome.rank is not None else outcome.name for outcome in stopped)
    counts = [count(kinds[kind], kind) for kind in ("rank", "server", "node") if kinds[kind]]
    return [f"stopped after it: {' and '.join(counts)}"] if counts else []


def _who(outcomes: Sequence[Outcome]) -> str:
    """Return the names of processes: ``rank 4`` or ``ranks 0–2, 4``; servers and nodes by name."""
    ranks = sorted(outcome.rank for outcome in outcomes if outcome.rank is not None)
    others = [outcome.place for outcome in outcomes if outcome.rank is None]
    if len(others) > _NAMED:
        others = [*others[: _NAMED - 1], f"{len(others) - _NAMED + 1} more"]
    named = [f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)}"] if ranks else []
    return ", ".join([*named, *others]) + (":" if others else "")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
