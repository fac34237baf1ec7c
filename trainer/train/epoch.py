"""One pass over the train seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.batch import Batch, HeteroBatch
from trainer.errors import TrainingError
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.task import Task
from trainer.train.team import Team

AnyBatch = Batch | HeteroBatch


class Batches(Protocol):
    """What the loop needs of a loader; ``trainer.load.loader.BatchLoader`` has it."""

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        """This rank's batch of every step."""


@dataclass(frozen=True)
class EpochReport:
    """What one epoch did; sums over ranks unless said otherwise."""

    epoch: int
    loss: float  #: mean over all seeds
    step_loss: Tensor  #: float64 [steps] mean over each step's seeds
    seconds: float
    seeds: int
    own_seeds: int  #: this rank's
    remote_bytes: int  #: this rank's
    wait_s: float  #: this rank's, for batches

    @property
    def seeds_per_s(self) -> float:
        return self.seeds / self.seconds


@dataclass
class _Tally:
    """Sums of one rank while its epoch runs."""

    losses: list[Tensor] = field(default_factory=list)  #: per step, summed over own seeds
    sizes: list[int] = field(default_factory=list)  #: per step, seeds over all ranks
    seeds: int = 0
    remote_bytes: int = 0
    wait_s: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def waited(self, batches: Iterator[AnyBatch]) -> Iterator[AnyBatch]:
        """The same batches, their waiting time counted."""
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self.wait_s += time.monotonic() - began
            if batch is None:
                return
            yield batch

    def add(self, batch: AnyBatch, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.sizes.append(batch.global_seeds)
        self.seeds += batch.num_seeds
        self.remote_bytes += batch.remote_bytes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


def train_epoch(
    model: nn.Module, task: Task, optimizers: Optimizers, batches: Batches, epoch: int, team: Team,
    metrics: MetricsLog,
) -> EpochReport:  # fmt: skip
    """Train one epoch. All ranks take part in every step, those without seeds too.

    A rank's loss is its sum over own seeds, divided by the step's seeds over all ranks and multiplied
    by the number of ranks; DDP's mean of gradients then is the gradient of the global batch's mean.
    Raises ``TrainingError`` when the loss is no finite number.
    """
    model.train()
    tally = _Tally()
    for batch in tally.waited(batches.epoch(epoch)):
        batch = batch.to(team.device)
        loss = task.loss_sum(model(batch), batch)
        due = metrics.step_due()
        if due or loss.device.type == "cpu":  # on a GPU a look at the loss stalls, so only now and then
            _check_finite(float(loss.detach()), epoch, batch.step, team)
        optimizers.step(loss * (team.size / batch.global_seeds))
        tally.add(batch, loss)
        if due:
            metrics.write("step", **_step_line(tally, batch, epoch, len(batches)))
    return _report(tally, epoch, team)


def _step_line(tally: _Tally, batch: AnyBatch, epoch: int, steps: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "step": batch.step,
        "steps": steps,
        "loss": float(tally.losses[-1]) / max(batch.num_seeds, 1),
        "seeds": batch.num_seeds,
        "seeds_per_s": round(tally.seeds / tally.seconds, 1),
        "wait_s": round(tally.wait_s, 4),
    }


def _report(tally: _Tally, epoch: int, team: Team) -> EpochReport:
    """Losses of all ranks are added up here, in one go per epoch."""
    sizes = torch.tensor(tally.sizes, dtype=torch.float64)
    sums = team.sum(torch.stack(tally.losses).double().cpu())
    for step, loss in enumerate(sums.tolist()):
        _check_finite(loss, epoch, step, team)
    return EpochReport(
        epoch=epoch,
        loss=float(sums.sum() / sizes.sum()),
        step_loss=sums / sizes,
        seconds=tally.seconds,
        seeds=int(sizes.sum()),
        own_seeds=tally.seeds,
        remote_bytes=tally.remote_bytes,
        wait_s=tally.wait_s,
    )


def _check_finite(loss: float, epoch: int, step: int, team: Team) -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss is {loss} in epoch {epoch} at step {step} ({team.ranks}); "
            "lower lr, or look for NaN and huge values in the features"
        )
