"""Measures how the time of a training step is divided among kinds of work: clocks by phase, on the host and on a GPU
with CUDA events, and what each step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from trainer.core.batch_cost import Cost
from trainer.core.row_exchange import take_waited
from trainer.train.metrics import KINDS, LOADING


class Phase(IntEnum):
    """Phases of a training step. In ``StepTimes``, LOAD is divided into the work kinds sample, remote and gather."""

    LOAD = 0
    COPY = 1
    FORWARD = 2
    BACKWARD = 3  #: up to the last gradient
    REDUCE = 4  #: from the last gradient to the end of the backward pass, and exchanges of sharded rows
    OPTIMIZER = 5
    OTHER = 6


class _HostClock:
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


class DeviceClock(_HostClock):
    """``_HostClock`` for a training loop on a GPU, which runs asynchronously.

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


class BatchWait(NamedTuple):  # made in each step: a NamedTuple takes a quarter of a dataclass's time
    seconds: float
    cost: Cost | None  #: work of the sampler threads on the batch; None when the loader does not report it

    @property
    def parts(self) -> tuple[float, float, float]:
        """The seconds of the wait, divided among sampling, remote requests and gathering.

        The seconds are divided in proportion to the sampler threads' work. If the work is unknown, all count as
        sampling.
        """
        work = _work(self.cost) if self.cost is not None else (0.0, 0.0, 0.0)
        whole = sum(work)
        if whole <= 0:
            return self.seconds, 0.0, 0.0
        sample, remote, gather = (self.seconds * part / whole for part in work)
        return sample, remote, gather


@dataclass(frozen=True)
class StepTimes:
    steps: int = 0
    seconds: tuple[float, ...] = (0.0,) * len(KINDS)  #: seconds of all steps, by ``KINDS``
    batches: int = 0  #: number of batches whose cost is known
    cost: Cost = Cost()  #: sum of the costs of these batches
    device_steps: int = 0  #: number of steps whose end a GPU has reached
    device_s: float = 0.0  #: seconds that the GPU took for them, from the batch's copy to the update of the weights

    @classmethod
    def of(
        cls, steps: int, phases: Sequence[float], waits: Sequence[BatchWait], device: tuple[int, float] = (0, 0.0)
    ) -> StepTimes:  # fmt: skip
        """Make ``StepTimes`` from ``phases`` (seconds by ``Phase``) and ``waits`` (one per batch).

        ``device``: ``device_steps`` and ``device_s``.
        """
        parts = [sum(part) for part in zip(*(load.parts for load in waits), strict=True)] or [1.0, 0.0, 0.0]
        whole = sum(parts)
        split = [phases[Phase.LOAD] * part / whole for part in parts] if whole > 0 else [phases[Phase.LOAD], 0.0, 0.0]
        costs = [load.cost for load in waits if load.cost is not None]
        cost = Cost.total(costs) if costs else Cost()
        return cls(steps, (*split, *phases[Phase.COPY :]), len(costs), cost, *device)

    def __add__(self, other: StepTimes) -> StepTimes:
        seconds = tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return StepTimes(
            self.steps + other.steps, seconds, self.batches + other.batches, self.cost + other.cost,
            self.device_steps + other.device_steps, self.device_s + other.device_s,
        )  # fmt: skip

    @property
    def batch_s(self) -> float:
        """Seconds of waiting for batches, over all steps."""
        return sum(self.seconds[: len(LOADING)])

    def means(self) -> dict[str, Any]:
        """Return means per step, as fields of a metrics line, or {} without steps.

        The fields are ``step_s`` (seconds), ``own_s`` (without waiting for other ranks) and ``batch_s`` (waiting for
        batches). If the cost of the batches is known, also ``spent`` (seconds by kind of work) and ``behind`` (seconds
        of a sampler thread per batch).
        """
        if self.steps == 0:
            return {}
        whole = sum(self.seconds)
        own_s = whole - self.seconds[KINDS.index("reduce")]
        values = {"step_s": whole, "own_s": own_s, "batch_s": self.batch_s}
        line: dict[str, Any] = {name: round(value / self.steps, 6) for name, value in values.items()}
        if self.batches:
            spent = {kind: int(value / self.steps * 1e6) / 1e6 for kind, value in zip(KINDS, self.seconds, strict=True)}
            # All are rounded down to microseconds, and ``other`` gets the remainder.
            spent["other"] = max(0.0, round(line["step_s"] - sum(spent.values()) + spent["other"], 6))
            line["spent"] = spent
            line["behind"] = behind(self.cost, self.batches)
        return line


def behind(cost: Cost, batches: int) -> dict[str, float]:
    """Return the seconds that a sampler thread needs for a batch, by kind of work (``LOADING``)."""
    return {name: round(part / batches, 6) for name, part in zip(LOADING, _work(cost), strict=True)}


def traffic(cost: Cost, batches: int) -> dict[str, int]:
    """Return the field ``traffic`` of a metrics line: sums of bytes and rows over ``batches`` batches."""
    names = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")
    return {"batches": batches, **{name: getattr(cost, name) for name in names}}


def by_host(cost: Cost) -> dict[str, dict[str, dict[str, int]]]:
    """Return the field ``by_host`` of an epoch line: bytes and rows by owning node, or {} with one node."""
    hosts = {str(host): one._asdict() for host, one in sorted(cost.by_host.items())}
    return {"by_host": hosts} if hosts else {}


def _work(cost: Cost) -> tuple[float, float, float]:
    return cost.sample_s, cost.wait_s, cost.gather_s


class HasCost(Protocol):
    """A batch or loader that reports the cost of making batches."""

    @property
    def cost(self) -> Cost: ...


T = TypeVar("T", bound=HasCost)


class StepTimer:
    """Context manager that times the phases of a training loop's steps, and removes its hooks at the end.

    The loop calls ``enter`` at the start of each phase. Phase REDUCE is the time that a rank waits for others after its
    own last gradient. On a GPU, phases are measured with CUDA events.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, on_last_gradient: Callable[[], None] | None = None
    ):
        """on_last_gradient: called in each step when the gradients of all weights are ready."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        clock = DeviceClock() if weights and weights[0].is_cuda else _HostClock()
        gradients = 0  # of the current step

        def on_gradient(_: torch.Tensor) -> None:
            nonlocal gradients
            clock.gradient_ready()
            gradients += 1
            if gradients == len(weights) and on_last_gradient is not None:
                on_last_gradient()

        def before_step(*_: Any) -> None:
            nonlocal gradients
            gradients = 0
            clock.reduced()

        self._hooks = ExitStack()
        for weight in weights:
            self._hooks.callback(weight.register_post_accumulate_grad_hook(on_gradient).remove)
        self._hooks.callback(optimizer.register_step_pre_hook(before_step).remove)
        self.total = StepTimes()  #: times of all steps up to the last call of ``lap``
        self._steps, self._waits, self._clock = 0, list[BatchWait](), clock
        self.enter = clock.enter  #: ends the current phase and starts another

    def timed(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield ``batches``, counting the time that the loop waits for each."""
        while True:
            began = time.perf_counter()
            self.enter(Phase.LOAD)
            batch = next(batches, None)
            self.enter(Phase.OTHER)
            if batch is None:
                return
            self.loaded(time.perf_counter() - began, batch.cost)
            yield batch
            del batch  # frees its memory before the next batch is requested

    def loaded(self, seconds: float, cost: Cost | None) -> None:
        """Record that the loop waited ``seconds`` for a batch. ``cost``: cost of making it, or None if unknown."""
        self._waits.append(BatchWait(seconds, cost))

    def step(self) -> None:
        self._clock.enter(Phase.OTHER)
        self._steps += 1

    def lap(self) -> StepTimes:
        """Return the times of the steps since the last call, and add them to ``total``."""
        lap = StepTimes.of(self._steps, self._clock.pop_seconds(), self._waits, self._clock.pop_device())
        self._steps, self._waits = 0, []
        self.total += lap
        return lap

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
