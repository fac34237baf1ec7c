"""What follows from the step and from the scores on val so far: the learning rate, and when a run ends early.

Pure functions: a resumed run, whose checkpoint holds the scores, goes on as if it had never stopped. The learning rates
have the formulas of torch's schedulers, which have state that two optimizers would need twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainer.core.errors import SettingsError
from trainer.core.train_config import EarlyStop, Schedule
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import Metric, Task, metric_named

ValScore = Mapping[str, float]  #: ``epoch``, ``loss`` and the metrics of one evaluation

_START = 0.04  #: share of ``lr`` at which one-cycle starts, as in torch


def rate_share(
    schedule: Schedule | None, step: int, steps: int, epochs: int, scores: Sequence[ValScore], default: Metric
) -> float:
    """Return the learning rate of a step as a share of ``lr``.

    Args:
        schedule: The schedule; None: constant.
        step: Number of steps trained before, over all epochs.
        steps: Steps of an epoch.
        epochs: Epochs of the run.
        scores: Scores on val of all earlier epochs that were evaluated.
        default: The task's metric.
    """
    if schedule is None:
        return 1.0
    warm_up = schedule.warmup_steps or schedule.warmup_epochs * steps
    if step < warm_up:
        return (step + 1) / warm_up
    whole, lowest = (schedule.epochs or epochs) * steps, schedule.lowest or 0.0
    if schedule.name == "cosine":
        return _cosine(1.0, lowest, (step - warm_up) / max(whole - warm_up, 1))
    if schedule.name == "step":
        return (schedule.factor or 0.1) ** (step // steps // (schedule.every or 10))
    if schedule.name == "plateau":
        return max((schedule.factor or 0.1) ** _plateaus(scores, schedule, default), lowest)
    if schedule.name == "one-cycle":
        peak = (schedule.rise or 0.3) * whole - 1
        if step <= peak:
            return _cosine(_START, 1.0, step / max(peak, 1))
        return _cosine(1.0, lowest, (step - peak) / (whole - 1 - peak))
    return 1.0


def _cosine(first: float, last: float, share: float) -> float:
    """Return a value between ``first`` and ``last``, on half a wave of a cosine."""
    return last + (first - last) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


def _plateaus(scores: Sequence[ValScore], schedule: Schedule, default: Metric) -> int:
    """Return how often the metric has not improved for ``patience`` evaluations."""
    metric, patience = metric_named(schedule.metric or default.name), schedule.patience or 10
    best: float | None = None
    found = waited = 0
    for score in (score for score in scores if metric.name in score):  # others are from before a resume
        waited += 1
        if metric.improves(score[metric.name], best):
            best, waited = score[metric.name], 0
        elif waited == patience:
            found, waited = found + 1, 0
    return found


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
        if stop is not None and not has_val:
            raise SettingsError(f"{name} needs evaluations on val, but the graph has no val split")


def why_ended(scores: Sequence[ValScore], stop: EarlyStop | None, default: Metric) -> str:
    """Return why the run ends after the last of these evaluations; '' if it goes on. ``default``: the task's metric."""
    if stop is None:
        return ""
    metric = metric_named(stop.metric or default.name)
    scores = [score for score in scores if metric.name in score]  # others are from before a resume
    best = -1  # the last evaluation that improved
    for index, score in enumerate(scores):
        gain = score[metric.name] - scores[best][metric.name]
        first = best < 0 or (math.isnan(scores[best][metric.name]) and not math.isnan(score[metric.name]))
        if first or (gain if metric.better == "higher" else -gain) > stop.min_delta:
            best = index
    waited = len(scores) - 1 - best
    if waited < stop.patience:
        return ""
    value, epoch = scores[best][metric.name], scores[best]["epoch"]
    more = f" by more than {stop.min_delta:g}" if stop.min_delta else ""
    return f"val {metric.name} has not improved on {value:.4g} of epoch {epoch:g}{more} in {waited} evaluations"
