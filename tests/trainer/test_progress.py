"""Tests of the progress lines of long loops."""

from __future__ import annotations

import pytest

from trainer.core import progress
from trainer.core.progress import progress as report
from trainer.core.progress import reporting


def test_a_line_every_interval_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    said: list[str] = []
    with reporting(said.append):
        for done in range(10):
            report("sort", done, 10)
            now += 4
        report("write", 0, 4)
        now += 30
        report("write", 1, 4)
        report("write", 4, 4)
    report("unheard", 0, 2)
    assert [line.strip() for line in said] == [
        "sort: 30%, about 28 s left",
        "sort: 60%, about 16 s left",
        "sort: 90%, about 4 s left",
        "write: 25%, about 90 s left",
    ]
