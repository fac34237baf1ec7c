"""The learning rate of each step, as a share of ``lr``.

A function of the step and of the scores on val so far. It has the formulas of torch's schedulers but, unlike these, no
state, which two optimizers would need twice, and a resumed run would have to restore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainer.train.settings import Schedule
from trainer.train.tasks.task import Metric, metric_named
from trainer.train.val_scores import ValScore

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
