"""The metric of a run's task, such as accuracy or MAE, as named in its metrics lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

_TITLES = {"mae": "MAE", "rmse": "RMSE", "mrr": "MRR", "auc": "AUC", "micro_f1": "micro-F1"}


@dataclass(frozen=True)
class TaskMetric:
    """The metric by which a run chooses its best epoch."""

    name: str = "accuracy"  #: as in metrics lines
    better: Literal["more", "less"] = "more"

    @property
    def title(self) -> str:
        return _TITLES.get(self.name, self.name.replace("hits@", "Hits@"))

    def of(self, line: Mapping[str, Any], split: str = "") -> float | None:
        """Return the value in an ``eval`` or, with ``split``, a ``result`` line; None if missing or not finite."""
        value = line.get(f"{split}_{self.name}" if split else self.name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            return None
        return float(value)


def metric_of(lines: Iterable[Mapping[str, Any]]) -> TaskMetric:
    """Return the metric of the first line that has a field ``metric``; accuracy if no line has it."""
    for line in lines:
        name = line.get("metric")
        if isinstance(name, str) and name:
            return TaskMetric(name, "less" if line.get("better") == "lower" else "more")
    return TaskMetric()


def score_text(value: float) -> str:
    """Return a number with four decimals below 1000, one decimal below a million, else four significant digits."""
    return f"{value:.4f}" if abs(value) < 1e3 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"
