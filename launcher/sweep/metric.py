"""The metric of a sweep, as the metrics lines of its runs report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from launcher.errors import UsageError
from launcher.report.metrics import TaskMetric, metric_of
from trainer.core.train_config import LOWER_IS_BETTER

_SPLITS = ("train", "val", "test")


class Metric:
    """Reads the metric after each epoch: by default that by which a run chooses its best epoch, on val.

    ``name``: another one, as ``val_macro_f1``; ``loss`` is that of training. ``goal``: whether more or less is better,
    if the name does not say it. ``better`` is known once a line of a run has been read, or from the name.
    """

    def __init__(self, name: str, goal: str):
        split, _, rest = name.partition("_")
        if name and name != "loss" and (split not in _SPLITS or not rest):
            raise UsageError(f"--metric {name}: write SPLIT_NAME, as val_accuracy, or loss for that of training")
        self.split, self.name = ("train", "loss") if name in ("loss", "train_loss") else (split or "val", rest)
        self.fixed = {"max": "more", "min": "less"}.get(goal, "")
        self.better: Literal["more", "less"] = (
            "less" if self.name in LOWER_IS_BETTER or self.fixed == "less" else "more"
        )
        if self.fixed == "more":
            self.better = "more"
        self.title = f"{self.split} {self.name}".strip()

    def score(self, line: Mapping[str, Any]) -> tuple[int, float] | None:
        """Return the epoch and the value that a metrics line has; None if it has none."""
        kind, epoch = line.get("kind"), line.get("epoch")
        if not isinstance(epoch, int):
            return None
        if (self.split, self.name) == ("train", "loss"):
            value = TaskMetric("loss", "loss", "less").of(line) if kind == "epoch" and line.get("rank") == 0 else None
        elif kind == "eval" and line.get("split") == self.split:
            own = metric_of([line])
            if not self.name and own.of(line) is not None:
                self.name, self.title = own.name, f"{self.split} {own.title}"
            if self.name == own.name and not self.fixed:
                self.better = own.better
            value = TaskMetric(self.name).of(line) if self.name else None
        else:
            return None
        return None if value is None else (epoch, value)

    def best(self, scores: Iterable[float]) -> float | None:
        values = list(scores)
        return (min if self.better == "less" else max)(values) if values else None
