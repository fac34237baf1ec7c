"""Epoch after epoch: train, score, keep the best, write checkpoints. Independent of model and loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.config import TrainSettings
from trainer.nn.sharded import ShardedEmbedding
from trainer.nn.sharded_state import embedding_state, gather_tables, load_embedding_state, scatter_tables
from trainer.train.checkpoint import Best, Checkpoint, save_checkpoint, settings_record
from trainer.train.epoch import AnyBatch, Batches, EpochReport, train_epoch
from trainer.train.evaluate import Score, evaluate
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.task import Task
from trainer.train.team import Team


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
class _Watched:
    """Batches of an evaluation, whose progress is told as they are handed over."""

    batches: Batches
    metrics: MetricsLog
    done: int  #: epochs

    def __len__(self) -> int:
        return len(self.batches)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        for batch in self.batches.epoch(epoch, first_step):
            self.metrics.at(self.done, batch.step, "evaluate")
            yield batch


class Fit:
    """One training run of one process; all ranks call the same methods in the same order."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, task: Task, loaders: Mapping[str, Batches], team: Team,
        metrics: MetricsLog, folder: Path, graph: Mapping[str, Any], embedding: ShardedEmbedding | None = None,
    ):  # fmt: skip
        self.settings, self.task, self.loaders, self.team = settings, task, loaders, team
        self.metrics, self.folder, self.graph = metrics, folder, graph
        self.model = model.to(team.device)
        self.optimizers = Optimizers.of(settings, model, embedding)
        self.done = 0
        self.step_loss: tuple[torch.Tensor, ...] = ()
        self.best: Best | None = None
        self.best_rows: torch.Tensor | None = None  #: this rank's embedding rows of the best epoch

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint that fits (``check_fits``); on rank 0 it holds the embedding tables."""
        self.model.load_state_dict(dict(checkpoint.model))
        self.optimizers.model.load_state_dict(dict(checkpoint.optimizer))
        self.done, self.step_loss, self.best = checkpoint.epoch, checkpoint.step_loss, checkpoint.best
        if rows := self.optimizers.rows:
            load_embedding_state(rows.embedding, checkpoint.embedding, rows.optimizer)
            if checkpoint.best is not None:
                self.best_rows = scatter_tables(rows.embedding, checkpoint.best.embedding)

    def run(self) -> FitResult:
        """Train up to ``settings.epochs``, then score the best epoch's weights on the test split."""
        wrapped = self._wrapped()
        seconds: list[float] = []
        path: Path | None = None
        if self.done >= self.settings.epochs:
            at = f"epoch {self.done} of {self.settings.epochs}"
            self._say(f"nothing to train: the checkpoint is at {at}; give more --epochs")
        for epoch in range(self.done + 1, self.settings.epochs + 1):
            report = train_epoch(
                wrapped, self.task, self.optimizers, self.loaders["train"], epoch, self.team, self.metrics
            )
            self.done, self.step_loss = epoch, (*self.step_loss, report.step_loss)
            seconds.append(report.seconds)
            self._log_epoch(report)
            self._say_epoch(report, self._score_val())
            if self._due(self.settings.checkpoint_every):
                path = self._save()
        return self._finish(tuple(seconds), path)

    def _wrapped(self) -> nn.Module:
        """The model whose gradients are averaged over ranks."""
        if self.team.size == 1:
            return self.model
        return DistributedDataParallel(self.model, process_group=self.team.gradients, find_unused_parameters=False)

    def _due(self, every: int) -> bool:
        return self.done == self.settings.epochs or (every > 0 and self.done % every == 0)

    def _score_val(self) -> Score | None:
        """Score the val split when it is time; remember the weights if they are the best so far."""
        if "val" not in self.loaders or not self._due(self.settings.eval_every):
            return None
        score = self._score("val", self.done)
        if self.best is None or score.accuracy > self.best.val_accuracy:
            weights = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
            self.best = Best(self.done, score.accuracy, weights)
            if rows := self.optimizers.rows:
                self.best_rows = rows.embedding.weight.detach().clone()
        return score

    def _score(self, split: str, epoch: int) -> Score:
        score = evaluate(self.model, self.task, _Watched(self.loaders[split], self.metrics, self.done), self.team)
        if self.team.rank == 0:
            self.metrics.write("eval", epoch=epoch, split=split, accuracy=score.accuracy, loss=score.loss)
        return score

    def _log_epoch(self, report: EpochReport) -> None:
        curve = {"step_loss": report.step_loss.tolist()} if self.team.rank == 0 else {}
        self.metrics.write(
            "epoch", epoch=report.epoch, loss=report.loss, **curve, seconds=round(report.seconds, 3),
            seeds=report.own_seeds, seeds_per_s=round(report.own_seeds / report.seconds, 1),
            remote_bytes=report.remote_bytes, wait_s=round(report.wait_s, 3), **report.pace,
            remote_share=report.remote_share,
        )  # fmt: skip

    def _say_epoch(self, report: EpochReport, val: Score | None) -> None:
        words = [f"epoch {report.epoch}/{self.settings.epochs}", f"loss {report.loss:.4f}"]
        words += [f"val {val.accuracy:.4f}"] if val else []
        words += [f"{report.seconds:.1f} s", f"{report.seeds_per_s:,.0f} seeds/s"]
        self._say("  ".join(words))

    def _save(self) -> Path:
        """Write the checkpoint on rank 0, which the others send their rows; the path is the same on all."""
        path = self.folder / f"epoch-{self.done:04d}.pt"
        checkpoint = self._checkpoint()
        if self.team.rank == 0:
            save_checkpoint(self.folder, checkpoint)
            self.metrics.write("checkpoint", epoch=self.done, path=str(path))
        return path

    def _checkpoint(self) -> Checkpoint:
        best, state = self.best, None
        if rows := self.optimizers.rows:
            state = embedding_state(rows.embedding, rows.optimizer)
            if best is not None and self.best_rows is not None:
                best = replace(best, embedding=gather_tables(rows.embedding, self.best_rows))
        return Checkpoint(
            epoch=self.done,
            model=self.model.state_dict(),
            optimizer=self.optimizers.model.state_dict(),
            settings=settings_record(self.settings),
            graph=self.graph,
            step_loss=self.step_loss,
            best=best,
            embedding=state,
        )

    def _finish(self, seconds: tuple[float, ...], path: Path | None) -> FitResult:
        best_epoch = self.best.epoch if self.best else self.done
        if self.best is not None:
            self.model.load_state_dict(dict(self.best.model))
            if (rows := self.optimizers.rows) and self.best_rows is not None:
                rows.embedding.weight.data.copy_(self.best_rows)
        test = self._score("test", best_epoch).accuracy if "test" in self.loaders else None
        val = self.best.val_accuracy if self.best else None
        result = FitResult(self.done, best_epoch, val, test, self.step_loss, seconds, path)
        if self.team.rank == 0:
            self.metrics.write(
                "result", epochs=result.epochs, best_epoch=best_epoch, test_accuracy=test, val_accuracy=val,
                epoch_seconds=[round(value, 3) for value in seconds], checkpoint=path and str(path),
            )  # fmt: skip
        if test is not None:
            best = f" (weights of epoch {best_epoch}, val {val:.4f})" if val is not None else ""
            self._say(f"test accuracy {test:.4f}{best}")
        return result

    def _say(self, line: str) -> None:
        """A line for people, from rank 0."""
        if self.team.rank == 0:
            print(line, flush=True)
