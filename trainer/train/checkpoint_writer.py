"""Decides when to save a checkpoint within an epoch, and writes it in a thread while training goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.core.errors import CheckpointError
from trainer.core.ranks import RankGroup
from trainer.train.checkpoint import Checkpoint, Position, remove_temporaries, save_checkpoint, save_content

SHARE = 0.02  #: largest share of the time that saving may take from the training loop

_EVERY = 1.0  # seconds between messages of rank 0


class CheckpointSchedule:
    """Decides after which steps all ranks save a checkpoint: about every ``interval`` seconds by rank 0's clock.

    A message in every step would be costly for short steps, so rank 0 tells the others about once a second whether to
    save now, and after how many steps it tells them next. The interval grows if saving is slow, so that saving takes at
    most ``SHARE`` of the time.

    Args:
        interval: Seconds between checkpoints; 0: never.
        group: Ranks that save together.
        clock: Returns the time in seconds.
    """

    def __init__(self, interval: float, group: RankGroup, clock: Callable[[], float] = time.monotonic):
        self.interval, self._group, self._clock = interval, group, clock
        self._saved = self._told = clock()  # the last checkpoint, and the last message of rank 0
        self._steps, self._next = 0, 1  # steps since that message, and of these the one after which the next follows

    def due(self) -> bool:
        """Return whether to save now; call after each step. Collective."""
        self._steps += 1
        if self.interval <= 0 or self._steps < self._next:
            return False
        save, self._next = self._group.from_first(self._choice())
        self._told, self._steps = self._clock(), 0
        return bool(save)

    def _choice(self) -> tuple[bool, int]:
        """Whether to save now, and the number of steps until the next message."""
        now = self._clock()
        left = self._saved + self.interval - now
        pace = max(now - self._told, 1e-9) / self._steps  # seconds per step
        wait = _EVERY if left <= 0 else min(_EVERY, left)
        return left <= 0, max(1, round(wait / pace))

    def saved(self, seconds: float = 0.0) -> None:
        """Record that a checkpoint was saved, also at the end of an epoch; ``seconds``: by which it delayed the loop.

        All ranks must call this after the same steps.
        """
        self.interval = max(self.interval, seconds / SHARE) if self.interval > 0 else 0.0
        self._saved = self._told = self._clock()
        self._steps, self._next = 0, 1


class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time; those within an epoch in a thread.

    If the thread cannot write one, it prints the error, but not again for the next one, and training goes on: the
    earlier checkpoints are still there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._thread: threading.Thread | None = None
        self._failing = False  # whether the last one could not be written
        self._cleaned = False

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, checkpoint: Checkpoint) -> None:
        """Start to write a checkpoint; waits for the one before. Its tensors must not change meanwhile."""
        self._begin(lambda: save_checkpoint(self.folder, checkpoint))

    def begin_content(self, position: Position, content: Mapping[str, Any]) -> None:
        """As ``begin``, for any content that ``torch.save`` can write."""
        self._begin(lambda: save_content(self.folder, position, content))

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and wait for the disk. Raises ``CheckpointError``."""
        self._await_turn()
        return save_checkpoint(self.folder, checkpoint)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, save: Callable[[], object]) -> None:
        self._await_turn()
        self._thread = threading.Thread(target=self._write, args=(save,), name="checkpoint-writer")
        self._thread.start()

    def _await_turn(self) -> None:
        """Wait for the checkpoint before; at first, delete what a killed process was writing."""
        self.finish()
        if not self._cleaned:
            self._cleaned = True
            remove_temporaries(self.folder)

    def _write(self, save: Callable[[], object]) -> None:
        failed_before, self._failing = self._failing, False
        try:
            save()
        except CheckpointError as error:
            self._failing = True
            if not failed_before:
                print(f"{error}; training goes on, the last checkpoint is the one before", flush=True)


def detached(checkpoint: Checkpoint) -> Checkpoint:
    """A copy of a checkpoint whose weights and optimizer state, on the CPU, do not change when training goes on.

    The other tensors are shared: nothing changes the losses, the best weights or gathered tables in place.
    """
    return replace(checkpoint, model=cpu_copy(checkpoint.model), optimizer=cpu_copy(checkpoint.optimizer))


def cpu_copy(value: Any) -> Any:
    """Copy a state of dicts, lists and tuples; tensors are copied to the CPU, other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: cpu_copy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        copies = [cpu_copy(one) for one in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value
