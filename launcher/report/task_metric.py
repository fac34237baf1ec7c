"""The metric of a run's task, such as accuracy or MAE, as named in its metrics lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal


@dataclass(frozen=True)
class TaskMetric:
    """The metric by which a run chooses its best epoch."""

    name: str = "accuracy"  #: its field in metrics lines
    title: str = "accuracy"
    better: Literal["more", "less"] = "more"

    def of(self, line: Mapping[str, Any], split: str = "") -> float | None:
        """Return the value in an ``eval`` or, with ``split``, a ``result`` line; None if missing or not finite."""
        value = line.get(f"{split}_{self.name}" if split else self.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return None
        return float(value)

    def baseline(self, result: Mapping[str, Any], split: str) -> tuple[str, bool]:
        """Return the score of the simplest prediction in a ``result`` line, and whether the run is not better.

        The score is in words, as ``0.1020 (the targets with most links)``; '' if the line has none.
        """
        own, simplest, name = self.of(result, split), self.of(result, f"baseline_{split}"), result.get("baseline")
        if simplest is None or not isinstance(name, str):
            return "", False
        worse = own is not None and (own <= simplest if self.better == "more" else own >= simplest)
        return f"{score_text(simplest)} ({name})" + ("; the model is not better than it" if worse else ""), worse


def metric_of(lines: Iterable[Mapping[str, Any]]) -> TaskMetric:
    """Return the metric of the first line that has a field ``metric``; accuracy if no line has it."""
    for line in lines:
        name = line.get("metric")
        if isinstance(name, str) and name:
            title = line.get("metric_title")
            title = title if isinstance(title, str) and title else name
            return TaskMetric(name, title, "less" if line.get("better") == "lower" else "more")
    return TaskMetric()


def score_text(value: float) -> str:
    """Return a number with four decimals below 1000, one decimal below a million, else four significant digits."""
    return f"{value:.4f}" if abs(value) < 1e3 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"
