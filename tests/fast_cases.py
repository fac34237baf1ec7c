"""Marks the cases of a parametrized test that run only with the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def fast_cases(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the cases as parameters (of a tuple, several). All but ``fast`` are slow, as they are similar to these."""
    cases = list(cases)
    assert all(case in cases for case in fast), "a name was changed"
    marks = {True: (), False: (pytest.mark.slow,)}
    return [pytest.param(*(case if isinstance(case, tuple) else [case]), marks=marks[case in fast]) for case in cases]
