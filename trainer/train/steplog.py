"""``StepLog``: metrics lines of a user's own training loop."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.batch_cost import Cost
from trainer.core.ranks import Ranks
from trainer.train.metrics import MetricsLog
from trainer.train.step_timing import HasCost, Phase, StepTimer, StepTimes, by_host, traffic


class StepLog:
    """Tells a run started by ``launch.py`` how far a script is: at most one line a second; elsewhere it does nothing.

    ::

        log = gnnfleet.StepLog(model, optimizer, loader)
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                ...                         # forward, backward, optimizer.step()
                log.step(epoch + 1, step, len(loader), loss, batch.batch_size)
            log.epoch(epoch + 1, mean_loss, val=accuracy)
        log.result(test=accuracy)

    With it the launcher shows loss and speed, finds a loss that is no number, a run that stands
    still and a rank that the others wait for. With the loader, whose ``cost`` tells what its batches
    took, ``python -m trainer profile`` shows where a step's time goes: there the wait for a batch ends when
    the model is called, copying included, and all between the model's answer and the last gradient is backward.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: HasCost | None = None,
        environ: Mapping[str, str] = os.environ, *, tensorboard: bool = False,
    ):  # fmt: skip
        """tensorboard: also write scalars for TensorBoard, which ``runs/<run_id>/tensorboard`` has in the end."""
        run_dir = environ.get("GNNFLEET_RUN_DIR")
        self._log = MetricsLog(Path(run_dir), Ranks.from_env(environ).rank, tensorboard) if run_dir else None
        self._pace = StepTimer(model, optimizer)
        self._loader, self._cost = loader, Cost()
        self._hooks = [
            model.register_forward_pre_hook(self._has_batch),
            model.register_forward_hook(self._has_output),
            optimizer.register_step_post_hook(lambda *_: self._pace.to(Phase.OTHER)),
        ]
        self._epoch: int | None = None
        self._seeds = 0
        self._since = time.monotonic()  #: the end of the epoch's first step
        self._waiting_since: float | None = None  #: the end of the last step, until the next batch is there
        self._began = self._ended = self._since  #: the epoch's beginning, and the end of its last step
        self._all_seeds, self._laps = 0, StepTimes()  #: of the epoch

    def step(self, epoch: int, step: int, steps: int, loss: float | Tensor, seeds: int) -> None:
        """After each step. ``epoch`` counts from 1, ``step`` from 0; ``loss``, the mean over this rank's ``seeds``,
        is looked at only where a line is due."""
        if self._log is None:
            return
        now = time.monotonic()
        if epoch != self._epoch:  # what lay between the epochs, an evaluation perhaps, is no part of a step
            self._epoch, self._seeds, self._since = epoch, 0, now
            first = self._pace.lap()
            self._all_seeds, self._laps = 0, StepTimes(batches=first.batches, cost=first.cost)
        else:
            self._pace.step()
            self._seeds += seeds
        self._all_seeds, self._ended = self._all_seeds + seeds, now
        due = self._log.step_due()
        if due or step + 1 == steps:  # what comes after the last one is no part of it either
            lap = self._pace.lap()
            self._laps += lap
        if due:
            more = lap.means()
            if self._seeds:
                more["seeds_per_s"] = round(self._seeds / (now - self._since), 1)
            if lap.batches:
                more |= {"traffic": traffic(lap.cost, lap.batches), "remote_share": lap.cost.remote_share}
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._log.write("step", epoch=epoch, step=step, steps=steps, loss=value, seeds=seeds, **more)
        self._waiting_since = now
        self._pace.to(Phase.LOAD)

    def epoch(self, epoch: int, loss: float | Tensor, **accuracy: float) -> None:
        """After each epoch, on all ranks, for the table at the end, ``compare`` and the report.

        loss: the mean over all ranks' seeds; accuracy: 0 to 1 by split, as ``val=0.71``, where one was taken.
        """
        if self._log is None:
            return
        lap, seconds = self._laps, max(self._ended - self._began, 1e-6)
        more = lap.means()
        if lap.batches:
            more |= {"remote_bytes": lap.cost.remote_bytes, "traffic": traffic(lap.cost, lap.batches)}
            more |= {**by_host(lap.cost), "remote_share": lap.cost.remote_share}
        self._log.write(
            "epoch", epoch=epoch, loss=float(loss), seconds=round(seconds, 3), seeds=self._all_seeds,
            seeds_per_s=round(self._all_seeds / seconds, 1), **more,
        )  # fmt: skip
        for split, value in accuracy.items() if self._log.rank == 0 else ():
            self._log.write("eval", epoch=epoch, split=split, accuracy=float(value))
        self._began = time.monotonic()

    def result(self, **accuracy: float) -> None:
        """At the end: what the run came to, as ``test=0.70``; ``runs`` has a column for ``test``."""
        if self._log is not None and self._log.rank == 0:
            self._log.write("result", **{f"{split}_accuracy": float(value) for split, value in accuracy.items()})

    def _has_batch(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        self._pace.to(Phase.FORWARD)
        if self._waiting_since is not None:
            self._pace.loaded(time.monotonic() - self._waiting_since, self._new_cost())
            self._waiting_since = None

    def _has_output(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            self._pace.to(Phase.BACKWARD)

    def _new_cost(self) -> Cost | None:
        """What the loader's batches have cost since the last call."""
        if self._loader is None:
            return None
        before, self._cost = self._cost, self._loader.cost
        return self._cost - before

    def close(self) -> None:
        """Take the hooks off; the process's end does no less."""
        for hook in self._hooks:
            hook.remove()
        self._pace.__exit__(None, None, None)
        if self._log is not None:
            self._log.__exit__(None, None, None)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
