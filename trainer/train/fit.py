"""Trains for all epochs: evaluates, keeps the best model, writes checkpoints. Independent of model and loader."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.core.ranks import RankGroup
from trainer.core.slabs import give_back_freed_memory
from trainer.graph.cache_fill import FilledCache
from trainer.graph.cache_policy import Prediction
from trainer.nn.sharded_embedding import (
    ShardedEmbedding,
    embedding_state,
    gather_tables,
    load_embedding_state,
    scatter_tables,
)
from trainer.train.checkpoint import BestEpoch, Checkpoint, save_checkpoint, settings_record
from trainer.train.epoch import AnyBatch, Batches, EpochReport, EpochSums, Score, closed_after, evaluate, train_epoch
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers, averaged
from trainer.train.profile import keeping_up
from trainer.train.regroup import SNAPSHOT_STEPS, CannotRegroup, Progress, Snapshots, newest_common
from trainer.train.run_times import RankTimes
from trainer.train.settings import TrainSettings
from trainer.train.task import Task


@dataclass(frozen=True)
class FitResult:
    """How the run ended. Test accuracy is that of the epoch with the best val accuracy."""

    epochs: int
    best_epoch: int
    val_accuracy: float | None  #: of ``best_epoch``; None without a val split
    test_accuracy: float | None  #: None without a test split
    step_loss: tuple[torch.Tensor, ...]  #: float64 [steps] per epoch, resumed ones included
    epoch_seconds: tuple[float, ...]  #: of the epochs of this process
    checkpoint: Path | None  #: newest file; None when nothing was left to train


@dataclass(frozen=True)
class _ReportedBatches:
    """Batches of an evaluation, whose progress is told as they are handed over."""

    batches: Batches
    metrics: MetricsLog
    done: int  #: epochs

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        with closed_after(self.batches.epoch(epoch, first_step)) as own:
            for batch in own:
                self.metrics.at(self.done, batch.step, "evaluate")
                yield batch
                del batch


class Fit:
    """One training run of one process; all ranks call the same methods in the same order."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, task: Task, loaders: Mapping[str, Batches], group: RankGroup,
        metrics: MetricsLog, folder: Path, graph: Mapping[str, Any], embedding: ShardedEmbedding | None = None,
        regroups: bool = False,
    ):  # fmt: skip
        """goes_on: after the loss of a rank this run may be told to ``rejoin``, so it keeps snapshots."""
        self.settings, self.task, self.loaders, self.group = settings, task, loaders, group
        self.metrics, self.folder, self.graph = metrics, folder, graph
        self.model = model.to(group.device)
        self.optimizers = Optimizers.of(settings, model, embedding)
        self.at = Progress()
        self.best_rows: torch.Tensor | None = None  #: this rank's embedding rows of the best epoch
        self._snapshots = Snapshots() if regroups else None
        self._reported: set[tuple[Any, ...]] = set()
        self._prediction: Prediction | None = None  #: what this rank receives of other hosts
        self._starvation_printed = False  #: and that has been said

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint that fits (``check_fits``); on rank 0 it holds the embedding tables."""
        self.model.load_state_dict(dict(checkpoint.model))
        self.optimizers.model.load_state_dict(dict(checkpoint.optimizer))
        self.at = Progress(done=checkpoint.epoch, step_loss=checkpoint.step_loss, best=checkpoint.best)
        if rows := self.optimizers.rows:
            load_embedding_state(rows.embedding, checkpoint.embedding, rows.optimizer)
            if checkpoint.best is not None:
                self.best_rows = scatter_tables(rows.embedding, checkpoint.best.embedding)

    def log_prediction(self, filled: FilledCache) -> None:
        """Tell what this rank will receive of other hosts; the end of each epoch says it beside what it was."""
        self.metrics.write("predict", **filled.prediction.line())
        self._prediction = filled.prediction
        self._print(str(filled))

    def rejoin(self, group: RankGroup, loaders: Mapping[str, Batches]) -> None:
        """Go back to the newest snapshot that all ranks of ``group``, those that are left, have; ``run`` goes on there.

        Raises ``CannotRegroup`` when a part of the model was lost with a rank.
        """
        if self.optimizers.rows is not None:
            raise CannotRegroup(
                f"{group.ranks}: the run cannot go on without the ranks that were lost, each held a share of the rows "
                "of nodes without features; go on from the last checkpoint (resume)"
            )
        assert self._snapshots is not None
        snapshot = self._snapshots.back_to(newest_common(group.gather(self._snapshots.places())))
        self.model = copy.deepcopy(self.model)  # its weights carry hooks of the lost group's DistributedDataParallel
        self.optimizers = Optimizers.of(self.settings, self.model, None)
        snapshot.restore(self.model, self.optimizers)
        self.at, self.group, self.loaders = snapshot.progress, group, loaders
        done, _, step = self.at.place
        self.metrics.write("regroup", generation=group.generation, ranks=group.members, epochs=done, step=step)
        self._print(f"going on with {group.size} of {group.ranks.world_size} ranks after epoch {done}, step {step}")

    def run(self) -> FitResult:
        """Train up to ``settings.epochs``, then score the best epoch's weights on the test split."""
        wrapped = self._wrapped()
        give_back_freed_memory()  # of opening and ranking, which the steps would not fill
        if self.at.done >= self.settings.epochs and self.at.report is None:
            at = f"epoch {self.at.done} of {self.settings.epochs}"
            self._print(f"nothing to train: the checkpoint is at {at}; give more --epochs")
        self._keep()
        while self.at.done < self.settings.epochs or not self.at.scored:
            if self.at.scored:
                self._train(wrapped)
            self._close_epoch()
        return self._finish()

    def _train(self, wrapped: nn.Module) -> None:
        """The next epoch, or what is left of it."""
        before = self.at
        report = train_epoch(
            wrapped, self.task, self.optimizers, self.loaders["train"], before.done + 1, self.group, self.metrics,
            before.tally and before.tally.copy(), self._after_step if self._snapshots else None,
        )  # fmt: skip
        curve, seconds = (*before.step_loss, report.step_loss), (*before.seconds, report.seconds)
        self.at = Progress(report.epoch, False, curve, before.best, seconds, report)
        self._keep()
        if self._first_time("epoch"):
            self._log_epoch(report)

    def _after_step(self, tally: EpochSums) -> None:
        """Every so many steps, a snapshot."""
        if tally.steps % SNAPSHOT_STEPS == 0:
            tally.settle(self.group)
            self._keep(tally.copy())

    def _keep(self, tally: EpochSums | None = None) -> None:
        if self._snapshots is not None:
            self._snapshots.keep(replace(self.at, tally=tally or self.at.tally), self.model, self.optimizers)

    def _close_epoch(self) -> None:
        """After an epoch's training: its score, its line, its checkpoint."""
        score = self._score_val()
        self.at = replace(self.at, scored=True)
        if score is not None:  # else nobody has waited for the others since the last snapshot
            self._keep()
        if self.at.report is not None and self._first_time("said"):
            self._print_epoch(self.at.report, score)
            self._print_starvation(self.at.report)
        if self._due(self.settings.checkpoint_every):
            self._save()

    def _first_time(self, *what: Any) -> bool:
        """Whether this is not yet told of the epoch; what is done again after a loss is told once."""
        new = (*what, self.at.done) not in self._reported
        self._reported.add((*what, self.at.done))
        return new

    def _wrapped(self) -> nn.Module:
        """The model whose gradients are averaged over ranks."""
        model, average = averaged(self.model, self.group)
        self.optimizers = replace(self.optimizers, average=average)
        return model

    def _due(self, every: int) -> bool:
        return self.at.done == self.settings.epochs or (every > 0 and self.at.done % every == 0)

    def _score_val(self) -> Score | None:
        """Score the val split when it is time; remember the weights if they are the best so far."""
        if "val" not in self.loaders or not self._due(self.settings.eval_every):
            return None
        score, best = self._score("val", self.at.done), self.at.best
        if best is None or score.accuracy > best.val_accuracy:
            weights = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
            self.at = replace(self.at, best=BestEpoch(self.at.done, score.accuracy, weights))
            if rows := self.optimizers.rows:
                self.best_rows = rows.embedding.weight.detach().clone()
        return score

    def _score(self, split: str, epoch: int) -> Score:
        score = evaluate(
            self.model, self.task, _ReportedBatches(self.loaders[split], self.metrics, self.at.done), self.group
        )
        if self.group.rank == 0 and self._first_time("eval", split):
            self.metrics.write("eval", epoch=epoch, split=split, accuracy=score.accuracy, loss=score.loss)
        return score

    def _log_epoch(self, report: EpochReport) -> None:
        curve = {"step_loss": report.step_loss.tolist()} if self.group.rank == 0 else {}
        self.metrics.write(
            "epoch", epoch=report.epoch, loss=report.loss, **curve, seconds=round(report.seconds, 3),
            seeds=report.own_seeds, seeds_per_s=round(report.own_seeds / report.seconds, 1),
            remote_bytes=report.cost.remote_bytes, **report.line,
        )  # fmt: skip

    def _print_epoch(self, report: EpochReport, val: Score | None) -> None:
        words = [f"epoch {report.epoch}/{self.settings.epochs}", f"loss {report.loss:.4f}"]
        words += [f"val {val.accuracy:.4f}"] if val else []
        words += [f"{report.seconds:.1f} s", f"{report.seeds_per_s:,.0f} seeds/s"]
        if self._prediction is not None:
            received, predicted = report.cost.remote_bytes / 1e6, self._prediction.remote_bytes / 1e6
            told = f"{received:,.1f} MB of other hosts on rank {self.group.ranks.rank}"
            words.append(f"{told} (expected {predicted:,.1f}{_held_words(report, predicted - received)})")
        self._print("  ".join(words))

    def _print_starvation(self, report: EpochReport) -> None:
        """Once, and not of the first epoch, in which kernels are compiled and files read for the first time."""
        if len(self.at.seconds) < 2 or self._starvation_printed:
            return
        record = RankTimes.of(self.group.ranks.rank, [report.line])
        if text := keeping_up(record):
            self._starvation_printed = True
            self._print(f"rank {record.rank} waits for batches {record.wait_s / record.step_s:.0%} of a step: {text}")

    @property
    def _path(self) -> Path:
        """Of the newest checkpoint, the same on all ranks."""
        return self.folder / f"epoch-{self.at.done:04d}.pt"

    def _save(self) -> None:
        """Write the checkpoint on the first rank, which the others send their rows."""
        checkpoint = self._checkpoint()
        if self.group.rank == 0:
            save_checkpoint(self.folder, checkpoint)
            if self._first_time("checkpoint"):
                self.metrics.write("checkpoint", epoch=self.at.done, path=str(self._path))

    def _checkpoint(self) -> Checkpoint:
        best, state = self.at.best, None
        if rows := self.optimizers.rows:
            state = embedding_state(rows.embedding, rows.optimizer)
            if best is not None and self.best_rows is not None:
                best = replace(best, embedding=gather_tables(rows.embedding, self.best_rows))
        return Checkpoint(
            epoch=self.at.done,
            model=self.model.state_dict(),
            optimizer=self.optimizers.model.state_dict(),
            settings=settings_record(self.settings),
            graph=self.graph,
            step_loss=self.at.step_loss,
            best=best,
            embedding=state,
        )

    def _finish(self) -> FitResult:
        at = self.at
        best_epoch = at.best.epoch if at.best else at.done
        if at.best is not None:
            self.model.load_state_dict(dict(at.best.model))
            if (rows := self.optimizers.rows) and self.best_rows is not None:
                rows.embedding.weight.data.copy_(self.best_rows)
        test = self._score("test", best_epoch).accuracy if "test" in self.loaders else None
        val = at.best.val_accuracy if at.best else None
        path = self._path if at.report else None
        result = FitResult(at.done, best_epoch, val, test, at.step_loss, at.seconds, path)
        if not self._first_time("result"):
            return result
        if self.group.rank == 0:
            self.metrics.write(
                "result", epochs=result.epochs, best_epoch=best_epoch, test_accuracy=test, val_accuracy=val,
                epoch_seconds=[round(value, 3) for value in at.seconds], checkpoint=path and str(path),
            )  # fmt: skip
        if test is not None:
            best = f" (weights of epoch {best_epoch}, val {val:.4f})" if val is not None else ""
            self._print(f"test accuracy {test:.4f}{best}")
        return result

    def _print(self, line: str) -> None:
        """A line for people, from rank 0."""
        if self.group.rank == 0:
            print(line, flush=True)


def _held_words(report: EpochReport, less: float) -> str:
    """Why an epoch after the first brings less than expected of one that begins with nothing held; ``less``: MB."""
    held, remote = report.cost.held_rows, report.cost.remote_rows
    if report.epoch == 1 or less < 0.05 or not held:
        return ""
    return f" from scratch; {held / remote:.0%} of the rows others own were still held"
