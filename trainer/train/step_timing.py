"""Measures where the time of a training step goes, by kind."""

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
    """What a training loop is at; loading is told apart into sample, remote and gather afterwards."""

    LOAD = 0
    COPY = 1
    FORWARD = 2
    BACKWARD = 3  #: up to the last gradient
    REDUCE = 4  #: from there to the end of the backward pass, and exchanges of sharded rows
    OPTIMIZER = 5
    OTHER = 6


class BatchWait(NamedTuple):  # a quarter of a dataclass's time to make, and each step makes one
    """The wait for one batch, and what the sampler threads did for it; None: the loader does not tell."""

    seconds: float
    cost: Cost | None

    @property
    def parts(self) -> tuple[float, float, float]:
        """Seconds of the wait for sampling, other hosts and gathering, split as the work was; unknown: all sampling."""
        work = _work(self.cost) if self.cost is not None else (0.0, 0.0, 0.0)
        whole = sum(work)
        if whole <= 0:
            return self.seconds, 0.0, 0.0
        sample, remote, gather = (self.seconds * part / whole for part in work)
        return sample, remote, gather


@dataclass(frozen=True)
class StepTimes:
    """Some steps of one rank."""

    steps: int = 0
    seconds: tuple[float, ...] = (0.0,) * len(KINDS)  #: by ``KINDS``, over all steps
    batches: int = 0  #: that told what they cost
    cost: Cost = Cost()  #: of those

    @classmethod
    def of(cls, steps: int, phases: Sequence[float], waits: Sequence[BatchWait]) -> StepTimes:
        """phases: seconds by ``Phase``."""
        parts = [sum(part) for part in zip(*(load.parts for load in waits), strict=True)] or [1.0, 0.0, 0.0]
        whole = sum(parts)
        split = [phases[Phase.LOAD] * part / whole for part in parts] if whole > 0 else [phases[Phase.LOAD], 0.0, 0.0]
        costs = [load.cost for load in waits if load.cost is not None]
        return cls(steps, (*split, *phases[Phase.COPY :]), len(costs), Cost.total(costs) if costs else Cost())

    def __add__(self, other: StepTimes) -> StepTimes:
        seconds = tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return StepTimes(self.steps + other.steps, seconds, self.batches + other.batches, self.cost + other.cost)

    @property
    def batch_s(self) -> float:
        """Waiting for batches, over all steps."""
        return sum(self.seconds[: len(LOADING)])

    def means(self) -> dict[str, Any]:
        """For a line: ``step_s``, ``own_s``, ``batch_s``; where known ``spent``, ``behind``; {} without steps."""
        if self.steps == 0:
            return {}
        whole = sum(self.seconds)
        own_s = whole - self.seconds[KINDS.index("reduce")]
        values = {"step_s": whole, "own_s": own_s, "batch_s": self.batch_s}
        line: dict[str, Any] = {name: round(value / self.steps, 6) for name, value in values.items()}
        if self.batches:
            line["spent"] = self._spent(line["step_s"])
            line["behind"] = behind(self.cost, self.batches)
        return line

    def _spent(self, step_s: float) -> dict[str, float]:
        """Fractions of microseconds are cut off, so that the rest, which makes the sum exact, is never negative."""
        spent = {kind: int(value / self.steps * 1e6) / 1e6 for kind, value in zip(KINDS, self.seconds, strict=True)}
        return spent | {"other": max(0.0, round(step_s - sum(spent.values()) + spent["other"], 6))}


def behind(cost: Cost, batches: int) -> dict[str, float]:
    """Seconds of a sampler thread per batch, by what it was at."""
    return {name: round(part / batches, 6) for name, part in zip(LOADING, _work(cost), strict=True)}


def traffic(cost: Cost, batches: int) -> dict[str, int]:
    """Of a metrics line: where the rows of so many batches came from."""
    names = ("remote_bytes", "rows", "remote_rows", "cached_rows", "held_rows")
    return {"batches": batches, **{name: getattr(cost, name) for name in names}}


def by_host(cost: Cost) -> dict[str, dict[str, dict[str, int]]]:
    """For an epoch line: what came from, or belongs to, each other node; {} with one."""
    hosts = {str(host): one._asdict() for host, one in sorted(cost.by_host.items())}
    return {"by_host": hosts} if hosts else {}


def _work(cost: Cost) -> tuple[float, float, float]:
    return cost.sample_s, cost.wait_s, cost.gather_s


class HostClock:
    """Seconds by phase on this process's clock. Entering a phase takes well under a microsecond."""

    def __init__(self) -> None:
        self._seconds, self._phase = [0.0] * len(Phase), Phase.OTHER
        self._since, self._ready = time.perf_counter(), 0.0
        take_waited()

    def enter(self, phase: Phase) -> None:
        """From now on the loop is at this; what exchanges of rows took of the phase before counts as reduce."""
        now, waited = time.perf_counter(), take_waited()
        self._seconds[self._phase] += now - self._since
        if waited:
            self._exchanged(waited)
        self._since, self._phase, self._ready = now, phase, 0.0

    def _exchanged(self, seconds: float) -> None:
        self._seconds[self._phase] -= seconds
        self._seconds[Phase.REDUCE] += seconds

    def ready(self) -> None:
        """A gradient is there; the last call of a backward pass counts."""
        self._ready = time.perf_counter()

    def reduced(self) -> None:
        """The backward pass has ended."""
        if ready := self._ready:
            self._seconds[self._phase] += ready - self._since
            self._since, self._phase = ready, Phase.REDUCE
        self.enter(Phase.OPTIMIZER)

    def pop_seconds(self) -> list[float]:
        """By phase, since the last call."""
        self.enter(self._phase)
        seconds, self._seconds = self._seconds, [0.0] * len(Phase)
        return seconds


class DeviceClock(HostClock):
    """The same for a loop that runs ahead of its GPU: shares by events in the device's stream, nobody waits for them.

    Shares of a lap are those of the steps that the device has done meanwhile; those not reached yet
    count with a later lap. Where it has done none, the host's clock stands in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last, self._gradient = _recorded(), None  # type: Any, Any
        self._spans: list[tuple[Phase, Any, Any]] = []  # phase, event at its begin, event at its end
        self._exchanges = [0.0] * len(Phase)

    def enter(self, phase: Phase) -> None:
        self._mark(_recorded())
        self._gradient = None
        super().enter(phase)

    def ready(self) -> None:
        super().ready()
        self._gradient = self._gradient or _event()
        self._gradient.record()

    def reduced(self) -> None:
        if self._gradient is not None:
            self._mark(self._gradient)
        super().reduced()

    def pop_seconds(self) -> list[float]:
        host, seconds = super().pop_seconds(), [0.0] * len(Phase)
        over = 0
        while over < len(self._spans) and self._spans[over][2].query():
            phase, begin, end = self._spans[over]
            seconds[phase] += begin.elapsed_time(end) / 1000
            over += 1
        self._spans = self._spans[over:]
        for phase in Phase:
            moved = min(self._exchanges[phase], seconds[phase])
            seconds[phase] -= moved
            seconds[Phase.REDUCE] += moved
        self._exchanges, whole = [0.0] * len(Phase), sum(seconds)
        return [sum(host) * value / whole for value in seconds] if whole > 0 else host

    def _exchanged(self, seconds: float) -> None:
        super()._exchanged(seconds)
        self._exchanges[self._phase] += seconds

    def _mark(self, event: Any) -> None:
        """The phase that goes on until this event."""
        self._spans.append((self._phase, self._last, event))
        self._last = event


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _recorded() -> Any:
    event = _event()
    event.record()
    return event


class HasCost(Protocol):
    """A batch that says what it took to make."""

    @property
    def cost(self) -> Cost: ...


T = TypeVar("T", bound=HasCost)


class StepTimer:
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
        self.total = StepTimes()  #: of all laps
        self._steps, self._waits = 0, list[BatchWait]()
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
        self._waits.append(BatchWait(seconds, cost))

    def step(self) -> None:
        """A step has been done."""
        self._clock.enter(Phase.OTHER)
        self._steps += 1

    def lap(self) -> StepTimes:
        """The steps since the last lap."""
        lap = StepTimes.of(self._steps, self._clock.pop_seconds(), self._waits)
        self._steps, self._waits = 0, []
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

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
