"""How far a training run is, and copies of it in memory to go back to when a rank is lost."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainer.train.checkpoint import Best
from trainer.train.epoch import EpochReport, Tally
from trainer.train.optimize import Optimizers

SNAPSHOT_STEPS = 20  #: training steps between snapshots: at most so many are done again

KEPT = 2  #: all ranks are in the same step or in the next, so one of the last two snapshots is everybody's

Place = tuple[int, bool, int]  #: epochs done, whether the last of them is scored, steps of the next one


@dataclass(frozen=True)
class Progress:
    """What a run has to show so far, apart from the weights. Never changed, so a snapshot need not copy it."""

    done: int = 0  #: epochs
    scored: bool = True  #: whether epoch ``done`` has been evaluated where it is to be
    step_loss: tuple[Tensor, ...] = ()  #: float64 [steps] per epoch done
    best: Best | None = None
    seconds: tuple[float, ...] = ()  #: of the epochs of this process
    report: EpochReport | None = None  #: of epoch ``done``, if this process trained it
    tally: Tally | None = None  #: of the epoch under way; None at its start

    @property
    def place(self) -> Place:
        """Ascends while a run goes on."""
        return self.done, self.scored, self.tally.steps if self.tally else 0


@dataclass(frozen=True)
class Snapshot:
    """A run at one place; the tensors are its own."""

    progress: Progress
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]

    @classmethod
    def of(cls, progress: Progress, model: nn.Module, optimizers: Optimizers) -> Snapshot:
        """A copy, on the model's device."""
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return cls(progress, weights, copy.deepcopy(optimizers.model.state_dict()))

    def restore(self, model: nn.Module, optimizers: Optimizers) -> None:
        """Write the weights and the optimizer's state back; the snapshot can be used again."""
        model.load_state_dict(dict(self.model))
        optimizers.model.load_state_dict(copy.deepcopy(dict(self.optimizer)))


class Snapshots:
    """A rank's last snapshots."""

    def __init__(self) -> None:
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)

    def keep(self, progress: Progress, model: nn.Module, optimizers: Optimizers) -> None:
        """Take one, unless the last is of the same place."""
        if not self._kept or self._kept[-1].progress.place != progress.place:
            self._kept.append(Snapshot.of(progress, model, optimizers))

    def places(self) -> tuple[Place, ...]:
        """Where this rank could go on."""
        return tuple(kept.progress.place for kept in self._kept)

    def back_to(self, place: Place) -> Snapshot:
        """The snapshot of a place, now the last one: later ones are of a past that did not happen."""
        while self._kept[-1].progress.place != place:
            self._kept.pop()
        return self._kept[-1]


def newest_common(places: Iterable[tuple[Place, ...]]) -> Place:
    """The furthest place that all ranks can go back to."""
    return max(set.intersection(*(set(own) for own in places)))
