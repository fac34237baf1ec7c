"""What follows from the scores on val: when a run ends early.

Pure functions of all scores so far, which a checkpoint holds: a resumed run decides as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainer.core.errors import SettingsError
from trainer.train.settings import EarlyStop, TrainSettings
from trainer.train.tasks.task import Metric, Task, metric_named

ValScore = Mapping[str, float]  #: ``epoch``, ``loss`` and the metrics of one evaluation


def check_task(settings: TrainSettings, task: Task, has_val: bool) -> None:
    """Raise ``SettingsError`` if a setting is for another task, or needs scores on val that there are not."""
    for name, given in (("class_weights", settings.class_weights), ("label_smoothing", settings.label_smoothing)):
        if given and task.kind != "classification":
            raise SettingsError(f"{name} is for task classification, not {task.kind}")
    if settings.loss != "softmax" and task.kind != "link":
        raise SettingsError(f"loss {settings.loss} is for task link, not {task.kind}")
    plateau = settings.schedule if settings.schedule and settings.schedule.name == "plateau" else None
    for name, stop in (("early_stop", settings.early_stop), ("schedule", plateau)):
        if stop is not None and stop.metric == "loss" and task.kind == "link" and settings.eval_negatives == "all":
            raise SettingsError(f"{name}: with eval_negatives: all there is no loss on val; name another metric")
        if stop is not None and not (has_val and settings.eval_every):
            why = "eval_every is 0" if has_val else "the graph has no val split"
            raise SettingsError(f"{name} needs evaluations on val, but {why}")


def why_ended(scores: Sequence[ValScore], stop: EarlyStop | None, default: Metric) -> str:
    """Return why the run ends after the last of these evaluations; '' if it goes on. ``default``: the task's metric."""
    if stop is None:
        return ""
    metric = metric_named(stop.metric or default.name)
    scores = [score for score in scores if metric.name in score]  # others are from before a resume
    best, waited = _best_and_wait(scores, metric, stop.min_delta)
    if waited < stop.patience:
        return ""
    value, epoch = scores[best][metric.name], scores[best]["epoch"]
    more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    return f"val {metric.name} has not improved on {value:.4g} of epoch {epoch:g}{more} in {waited} evaluations"


def _best_and_wait(scores: Sequence[ValScore], metric: Metric, min_delta: float) -> tuple[int, int]:
    """Return the index of the last evaluation that improved, and the number of those after it."""
    best = -1
    for index, score in enumerate(scores):
        gain = score[metric.name] - scores[best][metric.name]
        first = best < 0 or (math.isnan(scores[best][metric.name]) and not math.isnan(score[metric.name]))
        if first or (gain if metric.better == "higher" else -gain) > min_delta:
            best = index
    return best, len(scores) - 1 - best
