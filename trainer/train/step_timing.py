"""Measures how the time of a training step is divided among kinds of work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from trainer.core.batch_cost import Cost
from trainer.train.metrics import KINDS, LOADING
from trainer.train.step_clock import DeviceClock, HostClock, Phase


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
        self._weights, self._gradients, self._on_last_gradient = len(weights), 0, on_last_gradient
        self._hooks = ExitStack()
        for weight in weights:
            self._hooks.callback(weight.register_post_accumulate_grad_hook(self._gradient).remove)
        self._hooks.callback(optimizer.register_step_pre_hook(self._before_step).remove)
        self.total = StepTimes()  #: times of all steps up to the last call of ``lap``
        self._steps, self._waits = 0, list[BatchWait]()
        self._clock = DeviceClock() if weights and weights[0].is_cuda else HostClock()
        self.enter = self._clock.enter  #: ends the current phase and starts another

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

    def _gradient(self, _: torch.Tensor) -> None:
        self._clock.gradient_ready()
        self._gradients += 1
        if self._gradients == self._weights and self._on_last_gradient is not None:
            self._on_last_gradient()

    def _before_step(self, *_: Any) -> None:
        self._gradients = 0
        self._clock.reduced()

    def __enter__(self) -> StepTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
