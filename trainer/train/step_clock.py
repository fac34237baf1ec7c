"""Clocks that measure the seconds of a training loop by phase: on the host, and on a GPU with CUDA events."""

from __future__ import annotations

import time
from enum import IntEnum
from typing import Any

import torch

from trainer.core.row_exchange import take_waited


class Phase(IntEnum):
    """Phases of a training step. In ``StepTimes``, LOAD is divided into the work kinds sample, remote and gather."""

    LOAD = 0
    COPY = 1
    FORWARD = 2
    BACKWARD = 3  #: up to the last gradient
    REDUCE = 4  #: from the last gradient to the end of the backward pass, and exchanges of sharded rows
    OPTIMIZER = 5
    OTHER = 6


class HostClock:
    """Measures seconds by phase with this process's clock."""

    def __init__(self) -> None:
        self._seconds, self._phase = [0.0] * len(Phase), Phase.OTHER
        self._since, self._ready = (
            time.perf_counter(),
            0.0,
        )  # _ready: time of the last gradient; 0.0: none in this phase
        take_waited()

    def enter(self, phase: Phase) -> None:
        """End the current phase and start ``phase``. The time of row exchanges between ranks counts as REDUCE."""
        now, waited = time.perf_counter(), take_waited()
        self._seconds[self._phase] += now - self._since
        if waited:
            self._move_to_reduce(waited)
        self._since, self._phase, self._ready = now, phase, 0.0

    def _move_to_reduce(self, seconds: float) -> None:
        self._seconds[self._phase] -= seconds
        self._seconds[Phase.REDUCE] += seconds

    def gradient_ready(self) -> None:
        """Record that a gradient is ready. Only the last call in a backward pass counts."""
        self._ready = time.perf_counter()

    def reduced(self) -> None:
        """Record the end of the backward pass. The time since the last gradient counts as REDUCE."""
        if ready := self._ready:
            self._seconds[self._phase] += ready - self._since
            self._since, self._phase = ready, Phase.REDUCE
        self.enter(Phase.OPTIMIZER)

    def pop_seconds(self) -> list[float]:
        self.enter(self._phase)
        seconds, self._seconds = self._seconds, [0.0] * len(Phase)
        return seconds

    def pop_device(self) -> tuple[int, float]:
        """Return steps that have ended on a GPU and were counted by ``pop_seconds``, and the GPU's seconds for them."""
        return 0, 0.0


#: Phases in which the device works on a step. In the others it may wait for a batch, or for the host.
_DEVICE_PHASES = (Phase.COPY, Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE, Phase.OPTIMIZER)


class DeviceClock(HostClock):
    """``HostClock`` for a training loop on a GPU, which runs asynchronously.

    Divides the host's seconds among the phases in proportion to the time between CUDA events. Never waits for an event.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last, self._gradient = _recorded(), None  # type: Any, Any
        self._spans: list[tuple[Phase, Any, Any]] = []  # phase, event at its begin, event at its end
        self._exchanges = [0.0] * len(Phase)
        self._steps, self._step_s = 0, 0.0  # of the steps that have ended on the device

    def enter(self, phase: Phase) -> None:
        self._mark(_recorded())
        self._gradient = None
        super().enter(phase)

    def gradient_ready(self) -> None:
        super().gradient_ready()
        self._gradient = self._gradient or _event()
        self._gradient.record()

    def reduced(self) -> None:
        if self._gradient is not None:
            self._mark(self._gradient)
        super().reduced()

    def pop_seconds(self) -> list[float]:
        host, seconds = super().pop_seconds(), [0.0] * len(Phase)
        passed = 0
        while passed < len(self._spans) and self._spans[passed][2].query():
            phase, begin, end = self._spans[passed]
            span = begin.elapsed_time(end) / 1000
            seconds[phase] += span
            self._step_s += span if phase in _DEVICE_PHASES else 0.0
            self._steps += phase == Phase.OPTIMIZER
            passed += 1
        self._spans = self._spans[passed:]
        for phase in Phase:
            moved = min(self._exchanges[phase], seconds[phase])
            seconds[phase] -= moved
            seconds[Phase.REDUCE] += moved
        self._exchanges, whole = [0.0] * len(Phase), sum(seconds)
        return [sum(host) * value / whole for value in seconds] if whole > 0 else host

    def pop_device(self) -> tuple[int, float]:
        found, self._steps, self._step_s = (self._steps, self._step_s), 0, 0.0
        return found

    def _move_to_reduce(self, seconds: float) -> None:
        super()._move_to_reduce(seconds)
        self._exchanges[self._phase] += seconds

    def _mark(self, event: Any) -> None:
        self._spans.append((self._phase, self._last, event))
        self._last = event


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded() -> Any:
    event = _event()
    event.record()
    return event
