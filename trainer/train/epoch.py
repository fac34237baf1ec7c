"""One pass over the train seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.core.batch import Batch, HeteroBatch
from trainer.core.batch_cost import Cost
from trainer.core.errors import TrainingError
from trainer.core.ranks import RankGroup
from trainer.graph.device import feed
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.step_timing import Phase, StepTimer, StepTimes, by_host, traffic
from trainer.train.task import Task

AnyBatch = Batch | HeteroBatch


class Batches(Protocol):
    """What the loop needs of a loader; ``trainer.loader.block_loader.BatchLoader`` has it."""

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
    cost: Cost  #: of this rank's batches
    lap: StepTimes  #: this rank's seconds, since it last had to begin anew
    cpu_s: float  #: CPU seconds of this rank's process, all its threads

    @property
    def line(self) -> dict[str, Any]:
        """What a metrics line tells of this rank's time and traffic."""
        return {
            "wait_s": round(self.lap.batch_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            **self.lap.means(),
            "traffic": traffic(self.cost, len(self.step_loss)),
            **by_host(self.cost),
            "remote_share": self.cost.remote_share,
        }

    @property
    def seeds_per_s(self) -> float:
        return self.seeds / self.seconds


@dataclass
class EpochSums:
    """Sums of one rank while its epoch runs."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  #: of all ranks, for first steps
    losses: list[Tensor] = field(default_factory=list)  #: of every step after those, summed over own seeds
    sizes: list[int] = field(default_factory=list)  #: per step, seeds over all ranks
    seeds: int = 0
    costs: list[Cost] = field(default_factory=list)  #: of this rank's batches
    started: float = field(default_factory=time.monotonic)
    cpu_began: float = field(default_factory=time.process_time)

    def add(self, batch: AnyBatch, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.sizes.append(batch.global_seeds)
        self.seeds += batch.num_seeds
        self.costs.append(batch.cost)

    def settle(self, group: RankGroup) -> None:
        """Add up the losses over ranks, all of which take part: what a rank has contributed then outlives it."""
        if self.losses:
            self.sums = torch.cat([self.sums, group.sum(torch.stack(self.losses).double().cpu())])
            self.losses = []

    def copy(self) -> EpochSums:
        """One that stays as it is while this one goes on."""
        return replace(self, losses=list(self.losses), sizes=list(self.sizes), costs=list(self.costs))

    @property
    def steps(self) -> int:
        return len(self.sizes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@contextmanager
def closed_after(batches: Iterator[AnyBatch]) -> Iterator[Iterator[AnyBatch]]:
    """The batches of an epoch, whose threads begin no more when it ends, by an exception too."""
    try:
        yield batches
    finally:
        if isinstance(batches, Generator):
            batches.close()


def train_epoch(
    model: nn.Module, task: Task, optimizers: Optimizers, batches: Batches, epoch: int, group: RankGroup,
    metrics: MetricsLog, tally: EpochSums | None = None, passed: Callable[[EpochSums], None] | None = None,
) -> EpochReport:  # fmt: skip
    """Train one epoch, or with a tally what is left of it. All ranks take part in every step, those without seeds too.

    passed: called after every step but the last.

    A rank's loss is its sum over own seeds, divided by the step's seeds over all ranks and multiplied
    by the number of ranks; DDP's mean of gradients then is the gradient of the global batch's mean.
    Raises ``TrainingError`` when the loss is no finite number.
    """
    model.train()
    tally, steps, bring = tally or EpochSums(), len(batches), feed(group.device)
    metrics.at(epoch, tally.steps, "load")
    pacing = StepTimer(model, optimizers.model, lambda: metrics.at(epoch, tally.steps, "reduce"))
    with pacing as pace, closed_after(batches.epoch(epoch, tally.steps)) as own:
        for batch in pace.waited(own):
            metrics.at(epoch, batch.step, "compute")
            pace.to(Phase.COPY)
            batch = bring(batch)
            pace.to(Phase.FORWARD)
            loss = task.loss_sum(model(batch), batch)
            due = metrics.step_due()
            if due or loss.device.type == "cpu":  # on a GPU a look at the loss stalls, so only now and then
                _check_own(float(loss.detach()), batch, epoch, steps, metrics, group)
            pace.to(Phase.BACKWARD)
            optimizers.step(loss * (group.size / batch.global_seeds))
            pace.step()
            tally.add(batch, loss)
            if due:
                metrics.write("step", **_step_line(tally, pace, batch, epoch, steps))
            metrics.at(epoch, batch.step + 1, "load")
            del batch, loss  # before the next one is asked for: its memory may be that of the one after
            if passed is not None and tally.steps < steps:
                passed(tally)
        pace.lap()
    metrics.at(epoch, steps, "reduce")
    return _report(tally, pace, epoch, group)


def _step_line(tally: EpochSums, pace: StepTimer, batch: AnyBatch, epoch: int, steps: int) -> dict[str, Any]:
    lap = pace.lap()
    return {
        "epoch": epoch,
        "step": batch.step,
        "steps": steps,
        "loss": float(tally.losses[-1]) / max(batch.num_seeds, 1),
        "seeds": batch.num_seeds,
        "seeds_per_s": round(tally.seeds / tally.seconds, 1),
        "wait_s": round(pace.total.batch_s, 4),
        **lap.means(),
        "traffic": traffic(lap.cost, lap.batches),
        "remote_share": lap.cost.remote_share,
    }


def _report(tally: EpochSums, pace: StepTimer, epoch: int, group: RankGroup) -> EpochReport:
    """Losses of all ranks are added up here, in one go per epoch."""
    sizes = torch.tensor(tally.sizes, dtype=torch.float64)
    tally.settle(group)
    sums = tally.sums
    for step, loss in enumerate(sums.tolist()):
        _check_finite(loss, epoch, step, group)
    return EpochReport(
        epoch=epoch,
        loss=float(sums.sum() / sizes.sum()),
        step_loss=sums / sizes,
        seconds=tally.seconds,
        seeds=int(sizes.sum()),
        own_seeds=tally.seeds,
        cost=Cost.total(tally.costs),
        lap=pace.total,
        cpu_s=time.process_time() - tally.cpu_began,
    )


def _check_own(loss: float, batch: AnyBatch, epoch: int, steps: int, metrics: MetricsLog, group: RankGroup) -> None:
    """``_check_finite``, with a line for whoever watches; the other ranks wait for this one meanwhile."""
    if not math.isfinite(loss):
        metrics.write("step", epoch=epoch, step=batch.step, steps=steps, loss=loss, seeds=batch.num_seeds)
    _check_finite(loss, epoch, batch.step, group)


def _check_finite(loss: float, epoch: int, step: int, group: RankGroup) -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss is {loss} in epoch {epoch} at step {step} ({group.ranks}); "
            "lower lr, or look for NaN and huge values in the features"
        )


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
