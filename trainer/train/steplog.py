"""Metrics lines of a training loop of one's own: ``trainer.StepLog``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.cost import Cost
from trainer.ranks import Ranks
from trainer.train.metrics import MetricsLog
from trainer.train.pace import Costed, Pace
from trainer.train.spent import Phase, traffic


class StepLog:
    """Tells a run started by ``launch.py`` how far a script is: at most one line a second; elsewhere it does nothing.

    ::

        log = trainer.StepLog(model, optimizer, loader)
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                ...                         # forward, backward, optimizer.step()
                log.step(epoch, step, len(loader), loss, batch.batch_size)

    With it the launcher shows loss and speed, finds a loss that is no number, a run that stands
    still and a rank that the others wait for. With the loader, whose ``cost`` tells what its batches
    took, ``python -m trainer profile`` shows where a step's time goes: there the wait for a batch ends when
    the model is called, copying included, and all between the model's answer and the last gradient is backward.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Costed | None = None,
        environ: Mapping[str, str] = os.environ,
    ):  # fmt: skip
        run_dir = environ.get("GNNFLEET_RUN_DIR")
        self._log = MetricsLog(Path(run_dir), Ranks.from_env(environ).rank) if run_dir else None
        self._pace = Pace(model, optimizer)
        self._loader, self._cost = loader, Cost()
        self._hooks = [
            model.register_forward_pre_hook(self._has_batch),
            model.register_forward_hook(self._has_output),
            optimizer.register_step_post_hook(lambda *_: self._pace.to(Phase.OTHER)),
        ]
        self._epoch: int | None = None
        self._seeds = 0
        self._since = time.monotonic()  #: the end of the epoch's first step
        self._asked: float | None = None  #: the end of the last step, until the next batch is there

    def step(self, epoch: int, step: int, steps: int, loss: float | Tensor, seeds: int) -> None:
        """After each step; ``loss``, the mean over this rank's ``seeds``, is looked at only where a line is due."""
        if self._log is None:
            return
        now = time.monotonic()
        if epoch != self._epoch:  # what lay between the epochs, an evaluation perhaps, is no part of a step
            self._epoch, self._seeds, self._since = epoch, 0, now
            self._pace.lap()
        else:
            self._pace.step()
            self._seeds += seeds
        if self._log.step_due():
            lap = self._pace.lap()
            more = lap.means()
            if self._seeds:
                more["seeds_per_s"] = round(self._seeds / (now - self._since), 1)
            if lap.batches:
                more |= {"traffic": traffic(lap.cost, lap.batches), "remote_share": lap.cost.remote_share}
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._log.write("step", epoch=epoch, step=step, steps=steps, loss=value, seeds=seeds, **more)
        self._asked = now
        self._pace.to(Phase.LOAD)

    def _has_batch(self, model: nn.Module, _: Any) -> None:
        if not model.training:
            return
        self._pace.to(Phase.FORWARD)
        if self._asked is not None:
            self._pace.loaded(time.monotonic() - self._asked, self._taken())
            self._asked = None

    def _has_output(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            self._pace.to(Phase.BACKWARD)

    def _taken(self) -> Cost | None:
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
