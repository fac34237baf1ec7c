"""``StepLog`` writes metrics lines for a user's own training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.batch_cost import Cost
from trainer.core.errors import SettingsError
from trainer.core.ranks import Ranks
from trainer.core.waits import report_uncaught
from trainer.nn.sharded_embedding import ShardedEmbedding
from trainer.train.device_monitor import DeviceMonitor
from trainer.train.metrics import MetricsLog
from trainer.train.script_checkpoint import ScriptCheckpoints, StartPosition, Stateful
from trainer.train.step_timing import HasCost, Phase, StepTimer, StepTimes, by_host, traffic


class StepLog:
    """Report the progress of a script to the launcher: at most one line per second, and one at the end of each epoch.

    Without a launcher all methods do nothing. With ``loader``, ``python -m trainer profile`` also shows where a step's
    time goes. It counts the time until the model is called as waiting for a batch, including the copy to the device.
    It counts the time from the model's output to the last gradient as the backward pass.

    Once ``restore`` has been called, ``step`` and ``epoch`` also save checkpoints. ``gnnfleet resume`` continues from
    the last one.

    Args:
        model: The model that is trained; hooks on it measure the forward pass.
        optimizer: Its optimizer; a hook on it marks the end of a step.
        loader: A loader of gnnfleet, for the time and traffic of batches.
        environ: Environment variables of the launcher.
        checkpoint_seconds: Seconds between checkpoints within an epoch; 0: only after epochs.
        metric: Name of the values that ``epoch`` and ``result`` record.
        better: Which values of the metric are better, ``higher`` or ``lower``.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")
        loader = gf.DistNeighborLoader(graph, [5], "train", batch_size=64)
        model = torch.nn.Linear(graph.num_features, graph.num_classes)
        optimizer = torch.optim.Adam(model.parameters())
        log = gf.StepLog(model, optimizer, loader)
        start = log.restore()
        for epoch in range(start.epoch, 3):
            first = start.first_step(epoch)
            loader.set_epoch(epoch - 1, first)
            for step, batch in enumerate(loader, first):
                seeds = batch.batch_size
                loss = torch.nn.functional.cross_entropy(model(batch.x[:seeds]), batch.y[:seeds])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                log.step(epoch, step, len(loader), loss, seeds)
            log.epoch(epoch, float(loss))
        log.result(train_loss=float(loss))
        ```
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: HasCost | None = None,
        environ: Mapping[str, str] = os.environ, *, checkpoint_seconds: float = 60.0,
        metric: str = "accuracy", better: str = "higher",
    ):  # fmt: skip
        if better not in ("higher", "lower"):
            raise SettingsError(f"better: {better!r}; expected 'higher' or 'lower'")
        run_dir = environ.get("GNNFLEET_RUN_DIR")
        report_uncaught(environ)
        self._log = MetricsLog(Path(run_dir), Ranks.from_env(environ).rank) if run_dir else None
        self._timer = StepTimer(model, optimizer)
        self._model_device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self._monitor = DeviceMonitor(self._model_device)
        self.loader, self._cost = loader, Cost()
        self._metric, self._better = metric, better
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(
                lambda model, *_: self._timer.enter(Phase.BACKWARD) if model.training else None
            ),
            optimizer.register_step_post_hook(lambda *_: self._timer.enter(Phase.OTHER)),
        ]
        self._epoch: int | None = None
        self._next, self._evaluated = (
            (1, 0),
            0,
        )  #: next epoch and step; forward passes of an evaluation
        self._seeds = 0  #: seeds of the epoch's steps except the first
        self._since = time.monotonic()  #: time when the epoch's first step ended
        self._waiting_since: float | None = None  #: time when the last step ended; None in a forward or backward pass
        self._began = self._ended = self._since  #: times when the epoch began and when its last step ended
        self._all_seeds, self._times = 0, StepTimes()  #: seeds and times of all steps of the epoch
        self._saved: dict[str, Stateful | ShardedEmbedding] = {"model": model, "optimizer": optimizer}
        self._checkpoint_seconds, self._environ = checkpoint_seconds, environ
        self._checkpoints: ScriptCheckpoints | None = None  #: None before ``restore``, and without a launcher

    def restore(self, **more: Stateful | ShardedEmbedding) -> StartPosition:
        """Restore the model and the optimizer if the run is resumed, and save checkpoints from now on. Collective.

        Pass the result on to the loader, as in the example of the class. The state of torch's random number generators
        is not saved.

        Args:
            more: Other objects to save and restore, by name, such as a learning rate scheduler. Each must have
                ``state_dict`` and ``load_state_dict``, or be a ``ShardedEmbedding``. With a ``ShardedEmbedding``, pass
                also its optimizer: ``log.restore(embedding=embedding, rows=sparse_adam)``; ``step`` and ``epoch`` are
                then collective. The resumed run may have another number of ranks.

        Returns:
            The epoch and step to begin with: epoch 1 and step 0 if the run is not resumed.

        Raises:
            CheckpointError: The checkpoint cannot be read, or does not fit the objects.
            SettingsError: The optimizer of a ``ShardedEmbedding`` also has other parameters.
        """
        run_dir = self._environ.get("GNNFLEET_RUN_DIR")
        if not run_dir:
            return StartPosition()
        self._checkpoints = ScriptCheckpoints(
            {**self._saved, **more}, Path(run_dir), Ranks.from_env(self._environ), self._checkpoint_seconds,
            self._environ,
        )  # fmt: skip
        return self._checkpoints.restore()

    def step(self, epoch: int, step: int, steps: int, loss: float | Tensor, seeds: int) -> None:
        """Record a step. Must be called after each step.

        Args:
            epoch: Number of the epoch, from 1.
            step: Number of the step in the epoch, from 0.
            steps: Number of steps in the epoch.
            loss: Mean over this rank's seeds. A tensor is read only when a line is written.
            seeds: Number of this rank's seeds in the step.
        """
        if self._log is None:
            return
        now = time.monotonic()
        if epoch != self._epoch:  # time between epochs, such as evaluation, belongs to no step
            self._epoch, self._seeds, self._since = epoch, 0, now
            first = self._timer.lap()
            self._all_seeds, self._times = 0, StepTimes(batches=first.batches, cost=first.cost)
            self._monitor = DeviceMonitor(self._model_device)
        else:
            self._timer.step()
            self._seeds += seeds
        self._all_seeds, self._ended = self._all_seeds + seeds, now
        recorded = self._log.step_due() or step + 1 == steps
        if recorded:  # before a checkpoint is saved: time after the last step belongs to no step
            lap = self._timer.lap()
            self._times += lap
        if self._checkpoints is not None:
            self._checkpoints.after_step(epoch, step)
        if recorded:
            more = lap.means() | self._monitor.step_fields(lap)
            if self._seeds:
                more["seeds_per_s"] = round(self._seeds / (now - self._since), 1)
            if lap.batches:
                more |= {"traffic": traffic(lap.cost, lap.batches), "remote_share": lap.cost.remote_share}
            if self._checkpoints is not None and self._checkpoints.saved is not None:
                more["saved"] = self._checkpoints.saved
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._log.write("step", epoch=epoch, step=step, steps=steps, loss=value, seeds=seeds, **more)
        self._waiting_since = time.monotonic()
        self._timer.enter(Phase.LOAD)
        self._next, self._evaluated = (epoch, step + 1), 0
        self._log.at(epoch, step + 1, "between" if step + 1 == steps else "load")

    def epoch(self, epoch: int, loss: float | Tensor, **scores: float) -> None:
        """Record an epoch, for the launcher's table and reports. Must be called after each epoch, on all ranks.

        ``loss``: mean over the seeds of all ranks. ``scores``: value of the metric by name of an evaluated split, such
        as ``val=0.71``; an accuracy is 0 to 1.
        """
        if self._log is None:
            return
        times, seconds = self._times, max(self._ended - self._began, 1e-6)
        more = times.means() | self._monitor.epoch_fields(times)
        if times.batches:
            more |= {"remote_bytes": times.cost.remote_bytes, "traffic": traffic(times.cost, times.batches)}
            more |= {**by_host(times.cost), "remote_share": times.cost.remote_share}
        self._log.write(
            "epoch", epoch=epoch, loss=float(loss), seconds=round(seconds, 3), seeds=self._all_seeds,
            seeds_per_s=round(self._all_seeds / seconds, 1), **more,
        )  # fmt: skip
        for split, value in scores.items() if self._log.rank == 0 else ():
            self._log.write("eval", epoch=epoch, split=split, **self._named, **{self._metric: float(value)})
        if self._checkpoints is not None:
            self._checkpoints.after_epoch(epoch)
        self._began = time.monotonic()
        self._log.at(epoch, self._next[1], "between")
        self._next, self._evaluated = (epoch + 1, 0), 0

    def result(self, **scores: float) -> None:
        """Record the run's final value of the metric by split, such as ``test=0.70``."""
        if self._log is not None and self._log.rank == 0:
            values = {f"{split}_{self._metric}": float(value) for split, value in scores.items()}
            self._log.write("result", **self._named, **values)

    @property
    def _named(self) -> dict[str, str]:
        # lines without these fields have an accuracy
        return {} if self._metric == "accuracy" else {"metric": self._metric, "better": self._better}

    def _before_forward(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            self._evaluated += 1
            if self._log is not None:
                self._log.at(self._epoch or 0, self._evaluated, "evaluate")
            return
        if self._log is not None:
            self._log.at(*self._next, "compute")
        self._timer.enter(Phase.FORWARD)
        if self._waiting_since is not None:
            waited, cost = time.monotonic() - self._waiting_since, None
            if self.loader is not None:
                before, self._cost = self._cost, self.loader.cost
                cost = self._cost - before
            self._timer.loaded(waited, cost)
            self._waiting_since = None

    def close(self) -> None:
        """Remove the hooks, close the log and finish the last checkpoint. Not needed at the end of the process."""
        for hook in self._hooks:
            hook.remove()
        self._timer.__exit__(None, None, None)
        if self._log is not None:
            self._log.__exit__(None, None, None)
        if self._checkpoints is not None:
            self._checkpoints.close()

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
