"""Counts in words."""

from __future__ import annotations


def count(number: int, thing: str, plural: str = "s") -> str:
    """``1 node``, ``2 nodes``, ``3 processes``."""
    return f"{number:,} {thing}{'' if number == 1 else plural}"
