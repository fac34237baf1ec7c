"""Marks the cases of a parametrized test that run only with the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def fast_cases(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the cases as parameters (of a tuple, several). All but ``fast`` are slow, as they are similar to these."""
    cases = list(cases)
    assert all(case in cases for case in fast), "a name was changed"
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=marks[case in fast]) for case in cases]


def fast_grid(*axes: Iterable[Any], share: int) -> list[Any]:
    """Return all combinations of values as parameters. One of ``share`` is fast, such that no value is left out."""
    cases = list(itertools.product(*map(enumerate, axes)))
    fast = [case for case in cases if sum(k for k, _ in case) % share == 0]
    assert {one for case in fast for one in enumerate(k for k, _ in case)} == {
        one for case in cases for one in enumerate(k for k, _ in case)
    }, "a value is left out: choose a smaller share"
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*(value for _, value in case), marks=marks[case in fast]) for case in cases]
