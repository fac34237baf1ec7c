"""The training loop of one epoch, and evaluation on one split."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.core.batch import AnyBatch
from trainer.core.batch_cost import Cost
from trainer.core.errors import TrainingError
from trainer.core.ranks import RankGroup
from trainer.graph.device import feed
from trainer.train.checkpoint import PartialEpoch
from trainer.train.device_monitor import DeviceMonitor
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.step_timing import Phase, StepTimer, StepTimes, by_host, traffic
from trainer.train.tasks.ranking import SplitScores, in_order
from trainer.train.tasks.task import Metric, Task


class Batches(Protocol):
    def __len__(self) -> int:
        """Return the number of steps in an epoch, the same on every rank."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]: ...


@dataclass(frozen=True)
class EpochReport:
    """Results of one epoch. Values are those of all ranks unless stated otherwise."""

    epoch: int
    loss: float  #: mean over all seeds
    step_loss: Tensor  #: float64 [steps] mean over each step's seeds
    seconds: float  #: time of the steps that this process trained; after a resume within the epoch, only later steps
    seeds: int  #: seeds of all ranks in these steps
    own_seeds: int  #: seeds of this rank in these steps
    cost: Cost  #: cost of this rank's batches
    batches: int  #: number of this rank's batches
    times: StepTimes  #: times of this rank's steps
    cpu_s: float  #: CPU seconds of this rank's process, all threads
    lr: float  #: learning rate of the last step
    device: Mapping[str, Any] = field(default_factory=dict)  #: use of this rank's GPU, by ``DeviceMonitor``

    @property
    def line(self) -> dict[str, Any]:
        """Times and traffic of this rank, as fields of an ``epoch`` metrics line."""
        return {
            "wait_s": round(self.times.batch_s, 3),
            "cpu_s": round(self.cpu_s, 3),
            **self.times.means(),
            "traffic": traffic(self.cost, self.batches),
            **by_host(self.cost),
            "remote_share": self.cost.remote_share,
            **self.device,
        }

    @property
    def seeds_per_s(self) -> float:
        return self.seeds / self.seconds


@dataclass
class EpochSums:
    """Losses, seeds and costs of the steps of an epoch so far, on one rank."""

    #: float64 [steps], sum of the loss over each step's seeds, over all ranks
    sums: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    #: loss of each step that is not in ``sums`` yet, summed over this rank's seeds
    losses: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  #: seeds of each step over all ranks
    seeds: int = 0  #: seeds of this rank
    costs: list[Cost] = field(default_factory=list)  #: cost of each batch of this rank
    resumed: int = 0  #: number of steps trained by an earlier process, before a resume within the epoch
    started: float = math.nan  #: ``time.monotonic()`` when ``begin`` was called
    cpu_began: float = math.nan  #: CPU seconds of this process when ``begin`` was called

    @classmethod
    def of(cls, partial: PartialEpoch) -> EpochSums:
        """Return the sums of the steps of this epoch that were trained before the run was resumed."""
        sizes = [int(size) for size in partial.sizes]
        return cls(partial.loss_sums.clone(), sizes=sizes, resumed=len(sizes))

    def begin(self) -> None:
        self.started, self.cpu_began = time.monotonic(), time.process_time()

    def add(self, batch: AnyBatch, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.sizes.append(batch.global_seeds)
        self.seeds += batch.num_seeds
        self.costs.append(batch.cost)

    def reduce_losses(self, group: RankGroup) -> None:
        """Append ``losses``, summed over ranks, to ``sums``, and clear ``losses``. Collective."""
        if self.losses:
            self.sums = torch.cat([self.sums, group.sum(torch.stack(self.losses).double().cpu())])
            self.losses = []

    def partial(self) -> PartialEpoch:
        """Return the sums as a checkpoint stores them. Call ``reduce_losses`` before."""
        return PartialEpoch(self.sums.clone(), torch.tensor(self.sizes))

    @property
    def steps(self) -> int:
        return len(self.sizes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


@contextmanager
def closed_after(batches: Iterator[AnyBatch]) -> Iterator[Iterator[AnyBatch]]:
    """Close the iterator of an epoch's batches at the end of the ``with`` block, so that its threads stop."""
    try:
        yield batches
    finally:
        if isinstance(batches, Generator):
            batches.close()


def train_epoch(
    model: nn.Module, task: Task, optimizers: Optimizers, batches: Batches, epoch: int, group: RankGroup,
    metrics: MetricsLog, tally: EpochSums | None = None, after_step: Callable[[EpochSums], None] | None = None,
    rate_share: Callable[[int], float] = lambda step: 1.0,
) -> EpochReport:  # fmt: skip
    """Train one epoch. Collective: ranks without seeds take part in every step too.

    tally: sums over the steps of this epoch that were trained before; training continues with the next step.
    after_step: called with the sums after every step except the last. rate_share: returns the learning rate of a step,
    as a share of its initial value. Raises ``TrainingError`` when the loss is not finite.
    """
    model.train()
    tally, steps, to_device = tally or EpochSums(), len(batches), feed(group.device)
    monitor = DeviceMonitor(group.device)
    tally.begin()
    metrics.at(epoch, tally.steps, "load")
    timer = StepTimer(model, optimizers.model, lambda: metrics.at(epoch, tally.steps, "reduce"))
    with timer, closed_after(batches.epoch(epoch, tally.steps)) as own:
        for batch in timer.timed(own):
            metrics.at(epoch, batch.step, "compute")
            timer.enter(Phase.COPY)
            batch = to_device(batch)
            timer.enter(Phase.FORWARD)
            loss = task.loss_sum(model(batch), batch)
            due = metrics.step_due()
            if due or loss.device.type == "cpu":  # reading the loss synchronises a GPU
                own_loss = float(loss.detach())
                if not math.isfinite(own_loss):
                    metrics.write(
                        "step", epoch=epoch, step=batch.step, steps=steps, loss=own_loss, seeds=batch.num_seeds
                    )
                _check_finite(own_loss, epoch, batch.step, group)
            timer.enter(Phase.BACKWARD)
            optimizers.set_rates(rate_share(batch.step))
            # The mean of gradients over ranks is then the gradient of the mean loss of the global batch.
            optimizers.step(loss * (group.size / batch.global_seeds))
            timer.step()
            tally.add(batch, loss)
            if due:
                lap = timer.lap()
                metrics.write(
                    "step",
                    epoch=epoch,
                    step=batch.step,
                    steps=steps,
                    loss=float(tally.losses[-1]) / max(batch.num_seeds, 1),
                    seeds=batch.num_seeds,
                    lr=optimizers.lr,
                    seeds_per_s=round(tally.seeds / tally.seconds, 1),
                    wait_s=round(timer.total.batch_s, 4),
                    **lap.means(),
                    traffic=traffic(lap.cost, lap.batches),
                    remote_share=lap.cost.remote_share,
                    **monitor.step_fields(lap),
                )
            metrics.at(epoch, batch.step + 1, "load")
            del batch, loss  # frees their memory before the next batch is requested
            if after_step is not None and tally.steps < steps:
                after_step(tally)
        timer.lap()
    metrics.at(epoch, steps, "reduce")

    # The epoch over all ranks.
    sizes = torch.tensor(tally.sizes, dtype=torch.float64)
    tally.reduce_losses(group)
    sums = tally.sums
    for step, loss in enumerate(sums.tolist()):
        _check_finite(loss, epoch, step, group)
    return EpochReport(
        epoch=epoch,
        loss=float(sums.sum() / sizes.sum()),
        step_loss=sums / sizes,
        seconds=tally.seconds,
        seeds=sum(tally.sizes[tally.resumed :]),
        own_seeds=tally.seeds,
        cost=Cost.total(tally.costs),
        batches=len(tally.costs),
        times=timer.total,
        cpu_s=time.process_time() - tally.cpu_began,
        lr=optimizers.lr,
        device=monitor.epoch_fields(timer.total),
    )


def _check_finite(loss: float, epoch: int, step: int, group: RankGroup) -> None:
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss is {loss} in epoch {epoch} at step {step} ({group.ranks}); "
            "lower lr, or look for NaN or very large values in the features"
        )


EVAL_EPOCH = 0  #: epoch number in the random keys of evaluations, so that all sample the same neighbours


@dataclass(frozen=True)
class Score:
    metrics: Mapping[str, float]  #: by name, as ``Task.metrics`` returns them
    loss: float  #: mean over seeds
    seeds: int

    def value(self, metric: Metric) -> float:
        return self.metrics[metric.name]


@torch.no_grad()
def evaluate(model: nn.Module, task: Task, batches: Batches, group: RankGroup) -> Score:
    """Score ``model`` (not wrapped in DDP) on all seeds of a split. Every rank gets the same result. Collective.

    Raises ``TrainingError`` when the loss is NaN.
    """
    model.eval()
    to_device = feed(group.device)
    scores = SplitScores(task)
    sums = torch.zeros(2 + task.num_sums, dtype=torch.float64, device=group.device)
    with closed_after(batches.epoch(EVAL_EPOCH)) as own:
        for batch in own:
            batch = to_device(batch)
            out = model(batch)
            sums[0] += task.loss_sum(out, batch)
            sums[1] += batch.num_seeds
            sums[2:] += task.metric_sums(out, batch)
            scores.add(out, batch)
            del batch, out  # frees their memory before the next batch is requested
    loss, seeds, *rest = group.sum(sums.cpu()).tolist()
    if math.isnan(loss):
        raise TrainingError("the model's output is NaN on seeds of an evaluation split; lower lr")
    return Score(in_order(task, task.metrics(rest), scores.metrics(group)), loss / seeds, int(seeds))
