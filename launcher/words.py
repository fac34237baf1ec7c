"""Counts in words."""

from __future__ import annotations

from collections.abc import Iterable


def count(number: int, thing: str, plural: str = "s") -> str:
    """``1 node``, ``2 nodes``, ``3 processes``."""
    return f"{number:,} {thing}{'' if number == 1 else plural}"


def spans(numbers: Iterable[int], name: str = "") -> str:
    """Ascending numbers with runs folded: ``0–2, 4``; with ``name`` before each: ``node0–node2, node4``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{name}{run[0]}" if len(run) == 1 else f"{name}{run[0]}–{name}{run[-1]}" for run in runs)
