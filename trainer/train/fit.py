"""The training loop over all epochs: evaluation, best weights, checkpoints. Independent of model and loader."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainer.core.batch import AnyBatch
from trainer.core.batch_cost import Cost
from trainer.core.errors import CheckpointError
from trainer.core.ranks import RankGroup
from trainer.core.slabs import give_back_freed_memory
from trainer.graph.cache_policy import Prediction
from trainer.nn.sharded_embedding import (
    ShardedEmbedding,
    embedding_state,
    gather_tables,
    load_embedding_state,
    scatter_tables,
)
from trainer.train.checkpoint import BestEpoch, Checkpoint, file_name, settings_record
from trainer.train.checkpoint_writer import CheckpointRequest, CheckpointSchedule, CheckpointWriter, detached
from trainer.train.epoch import Batches, EpochReport, EpochSums, Score, closed_after, evaluate, train_epoch
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers, averaged
from trainer.train.run_times import RankTimes
from trainer.train.schedule import ValScore, rate_share, why_ended
from trainer.train.settings import TrainSettings
from trainer.train.tasks.baseline import Baseline
from trainer.train.tasks.task import Metric, Task, metric_named

if TYPE_CHECKING:
    from trainer.train.full_ranking import FullRanking
    from trainer.train.timed_ranking import TimedRanking


@dataclass(frozen=True)
class FitResult:
    """Result of a run. The metrics are those of the weights with the best value of ``metric`` on the val split."""

    epochs: int  #: number of epochs trained, including those before a resume
    best_epoch: int
    metric: Metric  #: metric by which the best epoch is chosen
    val: Mapping[str, float] | None  #: metrics on val of ``best_epoch``, by name; None without a val split
    test: Mapping[str, float] | None  #: metrics on test, by name; None without a test split
    step_loss: tuple[torch.Tensor, ...]  #: float64 [steps] per epoch, including those before a resume
    epoch_seconds: tuple[float, ...]  #: seconds of each epoch that this process trained
    checkpoint: Path | None  #: newest checkpoint file; None when no epoch was left to train
    ended_early: str = ""  #: why not all epochs were trained


@dataclass
class _Progress:
    """Results of the epochs trained so far. The current weights are not included."""

    done: int = 0  #: number of epochs trained
    step_loss: tuple[torch.Tensor, ...] = ()  #: float64 [steps] per trained epoch
    best: BestEpoch | None = None
    scores: tuple[ValScore, ...] = ()  #: of all evaluations on val
    seconds: tuple[float, ...] = ()  #: seconds of each epoch that this process trained
    cost: Cost = Cost()  #: cost of this rank's batches in those epochs
    report: EpochReport | None = None  #: report of epoch ``done``; None if it was trained before a resume
    tally: EpochSums | None = None  #: sums over the steps of epoch ``done + 1`` that were trained before a resume


@dataclass(frozen=True)
class _ReportedBatches:
    batches: Batches
    metrics: MetricsLog
    done: int  #: number of epochs trained

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        with closed_after(self.batches.epoch(epoch, first_step)) as own:
            for batch in own:
                self.metrics.at(self.done, batch.step, "evaluate")
                yield batch
                del batch


class Fit:
    """One training run of one process. Its methods are collective."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, task: Task, loaders: Mapping[str, Batches], group: RankGroup,
        metrics: MetricsLog, folder: Path, graph: Mapping[str, Any], embedding: ShardedEmbedding | None = None,
        writers: tuple[int, ...] = (0,), baseline: Baseline | None = None,
        rankings: Mapping[str, FullRanking | TimedRanking] | None = None,
    ):  # fmt: skip
        """writers: ranks that write checkpoints, each into its own ``folder``. baseline: to compare the result with.
        rankings: of the splits whose links are ranked among all targets; the others are in ``loaders``.
        """
        self.rankings = rankings or {}
        self.settings, self.task, self.loaders, self.group = settings, task, loaders, group
        self.metric = metric_named(task.names[0])  #: chooses the best epoch
        self.metrics, self.folder, self.graph = metrics, folder, graph
        self.baseline = baseline if baseline is not None and baseline.metrics else None
        self.model = model.to(group.device)
        self.optimizers = Optimizers.of(settings, model, embedding)
        self.progress = _Progress()
        self.best_rows: torch.Tensor | None = None  #: this rank's embedding rows of the best epoch
        self._request = CheckpointRequest(folder.parent)
        self._writers, self._writer = writers, CheckpointWriter(folder, self._request)
        self._saving_s = 0.0  #: seconds by which checkpoints have delayed the current epoch
        self._schedule = CheckpointSchedule(settings.checkpoint_seconds, group, request=self._request)
        self._prediction: Prediction | None = None  #: predicted traffic from other hosts to this rank
        self._starvation_printed = False

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint that has passed ``check_fits``. On rank 0 it must include the embedding tables.

        Raises ``CheckpointError`` if its weights are not those of the model, as the user's class has changed.
        """
        try:
            self.model.load_state_dict(dict(checkpoint.model))
        except RuntimeError as error:
            why = " ".join(str(error).split("\n\t")[1:2]).strip() or str(error)
            raise CheckpointError(f"the checkpoint does not fit the class {self.settings.model}: {why}") from None
        self.optimizers.model.load_state_dict(dict(checkpoint.optimizer))
        tally = EpochSums.of(checkpoint.partial) if checkpoint.partial else None
        self.progress = _Progress(
            checkpoint.epoch, checkpoint.step_loss, checkpoint.best, checkpoint.scores, tally=tally
        )
        if rows := self.optimizers.rows:
            load_embedding_state(rows.embedding, checkpoint.embedding, rows.optimizer)
            if checkpoint.best is not None:
                self.best_rows = scatter_tables(rows.embedding, checkpoint.best.embedding)

    def log_prediction(self, prediction: Prediction) -> None:
        self.metrics.write("predict", **prediction.line())
        self._prediction = prediction
        self._print(str(prediction))

    def run(self) -> FitResult:
        """Train up to ``settings.epochs``, then score the best epoch's weights on the test split."""
        wrapped, average = averaged(self.model, self.group)
        self.optimizers = replace(self.optimizers, average=average)
        give_back_freed_memory()  # memory that was used to open the graph and to fill caches
        if self._over and self.progress.report is None:
            where, more = f"the checkpoint is at epoch {self.progress.done} of {self.settings.epochs}", "--epochs"
            if self._ended_early:
                where, more = f"{where}, and {self._ended_early}", "the patience of --early-stop"
            self._print(f"nothing to train: {where}; increase {more} to train further")
        self._schedule.saved()
        if os.environ.get("GNNFLEET_SAVE_ON_TERM") and self.settings.checkpoint_seconds:
            self._request.save_on_term()
        while not self._over:
            report = train_epoch(
                wrapped, self.task, self.optimizers, self.loaders["train"], self.progress.done + 1, self.group,
                self.metrics, self.progress.tally, self._after_step, self._rate_share,
            )  # fmt: skip
            at = self.progress
            at.done, at.report, at.tally, at.cost = report.epoch, report, None, at.cost + report.cost
            at.step_loss, at.seconds = (*at.step_loss, report.step_loss), (*at.seconds, report.seconds)
            curve = {"step_loss": report.step_loss.tolist()} if self.group.rank == 0 else {}
            saving = {"checkpoint_s": round(self._saving_s, 4)} if self._saving_s else {}
            self._saving_s = 0.0
            self.metrics.write(
                "epoch", epoch=report.epoch, loss=report.loss, lr=report.lr, **curve, seconds=round(report.seconds, 3),
                seeds=report.own_seeds, seeds_per_s=round(report.own_seeds / report.seconds, 1),
                remote_bytes=report.cost.remote_bytes, **report.line, **saving,
            )  # fmt: skip
            # Score the val split, if due, and keep the weights if they are the best so far.
            value: float | None = None
            if ("val" in self.loaders or "val" in self.rankings) and self._due(self.settings.eval_every):
                score = self._score("val", at.done)
                value = score.value(self.metric)
                loss = {} if math.isnan(score.loss) else {"loss": score.loss}
                kept: ValScore = {"epoch": at.done, **loss, **score.metrics}
                at.scores += (kept,)
                if self.metric.improves(value, at.best.metrics.get(self.metric.name) if at.best else None):
                    weights = {name: each.cpu().clone() for name, each in self.model.state_dict().items()}
                    at.best = BestEpoch(at.done, dict(score.metrics), weights)
                    if rows := self.optimizers.rows:
                        self.best_rows = rows.embedding.weight.detach().clone()
            self._print(epoch_text(report, self.settings.epochs, self.metric, value))
            self._print_starvation(report)
            # Save, if due.
            if self._due(self.settings.checkpoint_every):
                checkpoint = self._checkpoint()
                if checkpoint is not None:
                    self._writer.write(checkpoint)
                    if self.group.rank == 0:
                        self.metrics.write("checkpoint", epoch=self.progress.done, path=str(self._path))
                self._schedule.saved()
                del checkpoint
        return self._finish()

    def _after_step(self, tally: EpochSums) -> None:
        """Save a checkpoint within the epoch if it is due, while training continues. Collective."""
        if not self._schedule.due():
            return
        began = time.monotonic()
        tally.reduce_losses(self.group)
        checkpoint = self._checkpoint(tally)
        if checkpoint is not None:
            self._writer.begin(detached(checkpoint))
        seconds = time.monotonic() - began
        self._saving_s += seconds
        self._schedule.saved(seconds)
        if self._request.last:
            self._writer.finish()
            print("ended by SIGTERM; a checkpoint has been saved", flush=True)
            os._exit(128 + signal.SIGTERM)  # without the destructors of process groups, which may wait for other ranks

    def _rate_share(self, step: int) -> float:
        """Return the learning rate of a step of the current epoch, as a share of its initial value."""
        at, steps, metric = self.progress, len(self.loaders["train"]), self.metric
        return rate_share(
            self.settings.schedule, at.done * steps + step, steps, self.settings.epochs, at.scores, metric
        )  # fmt: skip

    @property
    def _ended_early(self) -> str:
        if self.progress.done >= self.settings.epochs:
            return ""
        return why_ended(self.progress.scores, self.settings.early_stop, self.metric)

    @property
    def _over(self) -> bool:
        """Whether no epoch is left to train. Equal on all ranks, as the scores are."""
        return self.progress.done >= self.settings.epochs or bool(self._ended_early)

    def _due(self, every: int) -> bool:
        return self._over or (every > 0 and self.progress.done % every == 0)

    def _score(self, split: str, epoch: int) -> Score:
        metric = self.metric
        if split in self.rankings:
            self.metrics.at(self.progress.done, 0, "evaluate")
            score = self.rankings[split].score(self.model, self.task.names)
        else:
            batches = _ReportedBatches(self.loaders[split], self.metrics, self.progress.done)
            score = evaluate(self.model, self.task, batches, self.group)
        if self.group.rank == 0:
            self.metrics.write(
                "eval", epoch=epoch, split=split, metric=metric.name, metric_title=metric_title(metric.name),
                better=metric.better, **score.metrics, **({} if math.isnan(score.loss) else {"loss": score.loss}),
            )  # fmt: skip
        return score

    def _print_starvation(self, report: EpochReport) -> None:
        """Say once that this rank waits for batches. Epoch 1 also compiles kernels and reads files."""
        if len(self.progress.seconds) < 2 or self._starvation_printed:
            return
        times = RankTimes.of(self.group.ranks.rank, [report.line])
        rest = times.step_s - times.wait_s
        if times.wait_s > 0.1 * times.step_s and times.work_s > rest > 0:
            self._starvation_printed = True
            self._print(
                f"rank {times.rank} waits for batches {times.wait_s / times.step_s:.0%} of a step: a sampler thread "
                f"needs {1000 * times.work_s:.3g} ms for a batch, the rest of a step {1000 * rest:.3g} ms "
                "(train.sampler_threads, train.prefetch)"
            )

    @property
    def _path(self) -> Path:
        return self.folder / file_name((self.progress.done, 0))

    def _checkpoint(self, tally: EpochSums | None = None) -> Checkpoint | None:
        """Return the state after the last step, on the ranks that write checkpoints, else None. Collective.

        ``tally``: sums over the trained steps of an unfinished epoch.
        """
        best, state = self.progress.best, None
        if rows := self.optimizers.rows:
            for rank in self._writers:
                gathered = embedding_state(rows.embedding, rows.optimizer, rank)
                state = gathered or state
                if self.progress.best is not None and self.best_rows is not None:
                    tables = gather_tables(rows.embedding, self.best_rows, rank)
                    best = replace(self.progress.best, embedding=tables) if tables is not None else best
        if self.group.rank not in self._writers:
            return None
        return Checkpoint(
            epoch=self.progress.done,
            model=self.model.state_dict(),
            optimizer=self.optimizers.model.state_dict(),
            settings=settings_record(self.settings),
            graph=self.graph,
            task=self.task.record(),
            step_loss=self.progress.step_loss,
            best=best,
            scores=self.progress.scores,
            embedding=state,
            partial=tally.partial() if tally else None,
            built_from=getattr(self.model, "built_from", {}),
        )

    def _finish(self) -> FitResult:
        at = self.progress
        self._writer.finish()
        best_epoch = at.best.epoch if at.best else at.done
        if at.best is not None:
            self.model.load_state_dict(dict(at.best.model))
            if (rows := self.optimizers.rows) and self.best_rows is not None:
                rows.embedding.weight.data.copy_(self.best_rows)
        has_test = "test" in self.loaders or "test" in self.rankings
        test = self._score("test", best_epoch).metrics if has_test else None
        val, metric, path = at.best.metrics if at.best else None, self.metric, self._path if at.report else None
        why = self._ended_early
        result = FitResult(at.done, best_epoch, metric, val, test, at.step_loss, at.seconds, path, why)
        if self.group.rank == 0:
            none: Mapping[str, float | None] = {metric.name: None}
            found = {"test": test or none, "val": val or none}
            self.metrics.write(
                "result", epochs=result.epochs, best_epoch=best_epoch, metric=metric.name,
                metric_title=metric_title(metric.name), better=metric.better,
                **{f"{split}_{name}": value for split, values in found.items() for name, value in values.items()},
                epoch_seconds=[round(value, 3) for value in at.seconds], checkpoint=path and str(path),
                **({"ended_early": why} if why else {}), **(self.baseline.fields() if self.baseline else {}),
            )  # fmt: skip
        if why and at.report is not None:
            self._print(f"ended early after epoch {at.done} of {self.settings.epochs}: {why}")
        if "GNNFLEET_RUN_ID" not in os.environ:  # else the launcher's report shows the traffic of all ranks
            for line in traffic_text(at.cost, len(at.seconds), self.group.ranks.rank, self._prediction):
                self._print(line)
        if test is not None:
            best = f" (weights of epoch {best_epoch}, val {_number_text(val[metric.name])})" if val is not None else ""
            self._print(f"test {metrics_text(test)}{best}")
        if self.baseline is not None:
            split = "test" if "test" in self.baseline.metrics else "val"
            self._print(f"{split} {metrics_text(self.baseline.metrics[split])} (baseline: {self.baseline.name})")
        return result

    def _print(self, line: str) -> None:
        if self.group.rank == 0:
            print(line, flush=True)


def epoch_text(report: EpochReport, epochs: int, metric: Metric, val: float | None) -> str:
    """Return the line that is printed for an epoch: loss, metric on val, seconds, seeds per second."""
    rate, digits = report.seeds_per_s, 1 if report.seconds < 1e4 else 0
    speed = f"{rate:,.0f}" if rate < 1e7 else f"{rate / 1e6:,.0f}M"
    words = [f"epoch {report.epoch}/{epochs}", f"loss {_number_text(report.loss)}"]
    name = "val" if metric.name == "accuracy" else f"val {metric_title(metric.name)}"
    words += [f"{name} {_number_text(val)}"] if val is not None else []
    return "  ".join([*words, f"{report.seconds:.{digits}f} s", f"{speed} seeds/s"])


def _number_text(value: float) -> str:
    """Format a loss or a metric with four decimals, or with fewer from 1e3 on."""
    return f"{value:.4f}" if abs(value) < 1e3 else f"{value:.1f}" if abs(value) < 1e6 else f"{value:.4g}"


def metric_title(name: str) -> str:
    name = name.replace("ndcg@", "NDCG@").replace("map@", "MAP@")
    return {
        "mae": "MAE",
        "rmse": "RMSE",
        "mrr": "MRR",
        "auc": "AUC",
        "micro_f1": "micro-F1",
        "macro_f1": "macro-F1",
        "roc_auc": "ROC-AUC",
    }.get(name, name.replace("hits@", "Hits@"))


def metrics_text(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{metric_title(name)} {_number_text(value)}" for name, value in metrics.items())


def traffic_text(cost: Cost, epochs: int, rank: int, prediction: Prediction | None) -> Iterator[str]:
    """Yield lines of text about the rows that a rank got from other hosts, if any.

    ``cost``: sum over ``epochs`` epochs. ``prediction``: traffic predicted for one epoch, or None.
    """
    if epochs == 0 or cost.remote_rows == 0:
        return
    text = f"from other hosts to rank {rank}: {cost.remote_bytes / epochs / 1e6:,.1f} MB an epoch"
    if prediction is not None:
        text += f", {prediction.remote_bytes / 1e6:,.1f} MB predicted for epoch 1"
    yield text
    cached, held = cost.cached_rows / cost.remote_rows, cost.held_rows / cost.remote_rows
    yield (
        f"rows of other hosts on rank {rank}: {cached:.0%} from the cache, {held:.0%} still held from recent batches,"
        f" {max(0.0, 1 - cached - held):.0%} requested"
    )
