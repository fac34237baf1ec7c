"""Accuracy on a split by sampled inference, each seed once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from trainer.core.errors import TrainingError
from trainer.core.ranks import RankGroup
from trainer.loader.device import feed
from trainer.train.epoch import Batches, closed_after
from trainer.train.task import Task

EVAL_EPOCH = 0  #: training counts from 1; always the same samples, so that scores can be compared


@dataclass(frozen=True)
class Score:
    """A model's result on one split, over all ranks."""

    accuracy: float
    loss: float  #: mean over seeds
    seeds: int


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, batches: Batches, group: RankGroup) -> Score:
    """Score ``model`` (not wrapped in DDP) on all seeds of a split; every rank gets the same result.

    Raises ``TrainingError`` when the loss is NaN.
    """
    model.eval()
    bring = feed(group.device)
    sums = torch.zeros(3, dtype=torch.float64, device=group.device)
    with closed_after(batches.epoch(EVAL_EPOCH)) as own:
        for batch in own:
            batch = bring(batch)
            out = model(batch)
            sums[0] += task.correct(out, batch)
            sums[1] += task.loss_sum(out, batch)
            sums[2] += batch.num_seeds
            del batch, out  # before the next one is asked for, so that its memory can be used again
    correct, loss, seeds = group.sum(sums.cpu()).tolist()
    if math.isnan(loss):
        raise TrainingError("the model's output is NaN on seeds of an evaluation split; lower lr")
    return Score(correct / seeds, loss / seeds, int(seeds))
