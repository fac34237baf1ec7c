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

from trainer.ranks import Ranks
from trainer.train.metrics import MetricsLog
from trainer.train.pace import Pace


class StepLog:
    """Tells a run started by ``launch.py`` how far a script is: at most one line a second; elsewhere it does nothing.

    ::

        log = trainer.StepLog(model, optimizer)
        for epoch in range(epochs):
            for step, batch in enumerate(loader):
                ...                         # forward, backward, optimizer.step()
                log.step(epoch, step, len(loader), loss, batch.batch_size)

    With it the launcher shows loss and speed, finds a loss that is no number, a run that stands
    still and a rank that the others wait for.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, environ: Mapping[str, str] = os.environ
    ):  # fmt: skip
        run_dir = environ.get("GNNFLEET_RUN_DIR")
        self._log = MetricsLog(Path(run_dir), Ranks.from_env(environ).rank) if run_dir else None
        self._pace = Pace(model, optimizer)
        self._forward = model.register_forward_pre_hook(self._has_batch)
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
            more = self._pace.lap() | (
                {"seeds_per_s": round(self._seeds / (now - self._since), 1)} if self._seeds else {}
            )
            value = float(loss.detach() if isinstance(loss, Tensor) else loss)
            self._log.write("step", epoch=epoch, step=step, steps=steps, loss=value, seeds=seeds, **more)
        self._asked = now

    def _has_batch(self, model: nn.Module, _: Any) -> None:
        if self._asked is not None and model.training:
            self._pace.loaded(time.monotonic() - self._asked)
            self._asked = None

    def close(self) -> None:
        """Take the hooks off; the process's end does no less."""
        self._forward.remove()
        self._pace.__exit__(None, None, None)
        if self._log is not None:
            self._log.__exit__(None, None, None)

    def __enter__(self) -> StepLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
