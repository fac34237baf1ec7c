"""How long a rank's steps take, and how much of that is its own work: what is not waiting for other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from trainer.exchange import take_waited

T = TypeVar("T")


class Pace:
    """Times the steps of a training loop from hooks on its model and optimizer; a context manager that takes them off.

    A rank waits for others between the moment when its last gradient is there and the optimizer's
    step, and while it looks up sharded rows; the rest of a step is its own work. On a GPU the former
    is taken on the device's clock, as the host runs ahead of it. Costs some microseconds a step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, reduced: Callable[[], None] | None = None):
        """reduced: called when the last gradient of a step is there."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._marks = _DeviceMarks() if weights and weights[0].is_cuda else _HostMarks()
        self._weights, self._there, self._reduced = len(weights), 0, reduced
        self._hooks = ExitStack()
        for weight in weights:
            self._hooks.callback(weight.register_post_accumulate_grad_hook(self._gradient).remove)
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self.steps, self.seconds, self.own_s, self.batch_s = 0, 0.0, 0.0, 0.0  #: of all laps
        self._lap_steps, self._lap_batch_s, self._began = 0, 0.0, time.monotonic()
        take_waited()

    def waited(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, their waiting time counted."""
        while True:
            began = time.monotonic()
            batch = next(batches, None)
            self.loaded(time.monotonic() - began)
            if batch is None:
                return
            yield batch

    def loaded(self, seconds: float) -> None:
        """A batch was waited for so long."""
        self._lap_batch_s += seconds

    def step(self) -> None:
        """A step has been done."""
        self._lap_steps += 1

    def lap(self) -> dict[str, float]:
        """Means over the steps since the last lap: ``step_s``, ``own_s``, ``batch_s``; {} without steps."""
        now = time.monotonic()
        seconds, steps, batch_s = now - self._began, self._lap_steps, self._lap_batch_s
        own_s = max(0.0, seconds - self._marks.take() - take_waited())
        self._began, self._lap_steps, self._lap_batch_s = now, 0, 0.0
        self.steps, self.seconds = self.steps + steps, self.seconds + seconds
        self.own_s, self.batch_s = self.own_s + own_s, self.batch_s + batch_s
        return _means(steps, seconds, own_s, batch_s)

    def means(self) -> dict[str, float]:
        """The same over all laps."""
        return _means(self.steps, self.seconds, self.own_s, self.batch_s)

    def _gradient(self, _: torch.Tensor) -> None:
        self._marks.ready()
        self._there += 1
        if self._there == self._weights and self._reduced is not None:
            self._reduced()

    def _before_step(self, *_: Any) -> None:
        self._there = 0
        self._marks.reduced()

    def __enter__(self) -> Pace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()


def _means(steps: int, seconds: float, own_s: float, batch_s: float) -> dict[str, float]:
    if steps == 0:
        return {}
    values = {"step_s": seconds, "own_s": own_s, "batch_s": batch_s}
    return {name: round(value / steps, 6) for name, value in values.items()}


class _HostMarks:
    """Seconds between a step's last gradient and the end of its backward pass, which ends with the reduction."""

    def __init__(self) -> None:
        self._ready: float | None = None
        self._waited = 0.0

    def ready(self) -> None:
        self._ready = time.monotonic()

    def reduced(self) -> None:
        if self._ready is not None:
            self._waited += time.monotonic() - self._ready
        self._ready = None

    def take(self) -> float:
        waited, self._waited = self._waited, 0.0
        return waited


class _DeviceMarks(_HostMarks):
    """The same by events in the device's stream; those not reached yet count with a later lap."""

    def __init__(self) -> None:
        super().__init__()
        self._event: torch.cuda.Event | None = None
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def ready(self) -> None:
        self._event = self._event or _event()
        self._event.record()

    def reduced(self) -> None:
        if self._event is not None:
            end = _event()
            end.record()
            self._pairs.append((self._event, end))
        self._event = None

    def take(self) -> float:
        over = [pair for pair in self._pairs if pair[1].query()]
        self._pairs = self._pairs[len(over) :]
        return sum(ready.elapsed_time(end) for ready, end in over) / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
