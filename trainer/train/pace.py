"""How long a rank's steps take and what it is at: a clock driven by the training loop and by hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from trainer.core.batch_cost import Cost
from trainer.train.step_timing import DeviceClock, HostClock, Lap, Load, Phase


class Costed(Protocol):
    """A batch that says what it took to make."""

    @property
    def cost(self) -> Cost: ...


T = TypeVar("T", bound=Costed)


class Pace:
    """Times the steps of a training loop; a context manager that takes its hooks off.

    The loop says what it is at (``to``); the end of the last gradient and of the backward pass, which
    ends with the reduction of gradients, are seen by hooks on model and optimizer. So what a rank waits
    for others after its own last gradient is known; reductions that run beside the backward pass cost it
    nothing and count as nothing. On a GPU the device's clock tells shares. A step costs microseconds.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, reduced: Callable[[], None] | None = None):
        """reduced: called when the last gradient of a step is there."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._weights, self._there, self._reduced = len(weights), 0, reduced
        self._hooks = ExitStack()
        for weight in weights:
            self._hooks.callback(weight.register_post_accumulate_grad_hook(self._gradient).remove)
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self.total = Lap()  #: of all laps
        self._steps, self._loads = 0, list[Load]()
        self._clock = DeviceClock() if weights and weights[0].is_cuda else HostClock()
        self.to = self._clock.enter  #: what the loop is at from now on

    def waited(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, their waiting time counted."""
        while True:
            began = time.perf_counter()
            self.to(Phase.LOAD)
            batch = next(batches, None)
            self.to(Phase.OTHER)
            if batch is None:
                return
            self.loaded(time.perf_counter() - began, batch.cost)
            yield batch
            del batch  # before the next one is waited for: its memory may be that of one after it

    def loaded(self, seconds: float, cost: Cost | None) -> None:
        """A batch was waited for so long; ``cost``: of making it, where the loader tells."""
        self._loads.append(Load(seconds, cost))

    def step(self) -> None:
        """A step has been done."""
        self._clock.enter(Phase.OTHER)
        self._steps += 1

    def lap(self) -> Lap:
        """The steps since the last lap."""
        lap = Lap.of(self._steps, self._clock.take(), self._loads)
        self._steps, self._loads = 0, []
        self.total += lap
        return lap

    def _gradient(self, _: torch.Tensor) -> None:
        self._clock.ready()
        self._there += 1
        if self._there == self._weights and self._reduced is not None:
            self._reduced()

    def _before_step(self, *_: Any) -> None:
        self._there = 0
        self._clock.reduced()

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()
