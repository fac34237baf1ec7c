"""Checkpoints of a user's own training script: saved by ``StepLog.step``, restored by ``StepLog.restore``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from trainer.core.errors import CheckpointError
from trainer.core.ranks import RankGroup, Ranks
from trainer.train.checkpoint import Position, load_content
from trainer.train.checkpoint_writer import CheckpointWriter, cpu_copy

FORMAT = "gnnfleet-script-checkpoint"

VERSION = 1


class Stateful(Protocol):
    """An object whose state is saved, such as an optimizer or a learning rate scheduler."""

    def state_dict(self) -> Any:
        """Return the state, of tensors and plain values."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state that ``state_dict`` returned."""


@dataclass(frozen=True)
class StartPosition:
    """Where a script's training loop begins: at the beginning, or after the last step of a checkpoint.

    Args:
        epoch: Counts from 1.
        step: Counts from 0, in the epoch. Equal to the epoch's number of steps if only its end is left to do.
    """

    epoch: int = 1
    step: int = 0

    def first_step(self, epoch: int) -> int:
        """Return the first step to train in an epoch: ``step`` in the first one, 0 in later ones."""
        return self.step if epoch == self.epoch else 0


class ScriptCheckpoints:
    """Saves and restores the objects of a script, by the variables that the launcher sets.

    The first rank of a run saves; in a run that restarts after failures, the first rank of each node.

    Args:
        objects: What is saved, by name. A ``DistributedDataParallel`` is saved as the model in it.
        run_dir: Run folder of the node.
        ranks: Of this process.
        interval: Seconds between checkpoints within an epoch; 0: none.
        environ: Environment variables of the launcher.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, objects: Mapping[str, Stateful], run_dir: Path, ranks: Ranks, interval: float,
        environ: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic,
    ):  # fmt: skip
        self._objects = {name: _without_ddp(one) for name, one in objects.items()}
        every_node = bool(int(environ.get("GNNFLEET_RESTARTS") or 0))
        self._saves = ranks.rank == 0 or (every_node and ranks.local_rank == 0)
        self._writer, self._ranks, self._environ = CheckpointWriter(run_dir / "checkpoints"), ranks, environ
        self._interval, self._clock, self._since = interval, clock, clock()

    def restore(self) -> StartPosition:
        """Restore all objects from the checkpoint that the run resumes from. Collective.

        Raises ``CheckpointError`` if rank 0 cannot read the file, or if the file does not fit the objects.
        """
        path = self._environ.get("GNNFLEET_RESUME")
        self._since = self._clock()
        if not path:
            return StartPosition()
        group = RankGroup.of_process(self._ranks)
        read = group.agree(lambda: self._read(path) if group.rank == 0 else None)
        content: Any = group.from_first(read)
        group.agree(lambda: self._load(path, content["objects"]))
        epoch, step = content["position"]
        return StartPosition(epoch + 1, step)

    def after_step(self, epoch: int, step: int) -> None:
        """Save if a checkpoint is due; ``epoch`` counts from 1, ``step`` from 0."""
        if self._saves and 0 < self._interval <= self._clock() - self._since and not self._writer.busy:
            self._save((epoch - 1, step + 1))

    def after_epoch(self, epoch: int) -> None:
        """Save at the end of an epoch, which counts from 1."""
        if self._saves:
            self._save((epoch, 0))

    def close(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._writer.finish()

    def _save(self, position: Position) -> None:
        states = {name: cpu_copy(one.state_dict()) for name, one in self._objects.items()}
        content = {"format": FORMAT, "version": VERSION, "position": list(position), "objects": states}
        self._writer.begin_content(position, content)
        self._since = self._clock()

    def _read(self, path: str) -> dict[str, Any]:
        content = load_content(path)
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(f"{path} is not a {FORMAT} of version {VERSION}: another kind of run wrote it")
        return content

    def _load(self, path: str, states: Mapping[str, Any]) -> None:
        if set(states) != set(self._objects):
            saved, ours = ", ".join(sorted(states)), ", ".join(sorted(self._objects))
            raise CheckpointError(f"checkpoint {path} has the state of {saved}; this script restores {ours}")
        for name, state in states.items():
            try:
                self._objects[name].load_state_dict(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f"checkpoint {path} does not fit this script's {name}: {error}") from error


def _without_ddp(one: Stateful) -> Stateful:
    """The model in a ``DistributedDataParallel``; importing that class to compare with it would take seconds."""
    wraps = type(one).__name__ == "DistributedDataParallel" and isinstance(getattr(one, "module", None), nn.Module)
    return one.module if wraps else one  # type: ignore[attr-defined, no-any-return]
