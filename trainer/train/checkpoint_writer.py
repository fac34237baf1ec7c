"""Decides when to save a checkpoint within an epoch, and writes it in a thread while training continues."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from trainer.core.errors import CheckpointError
from trainer.core.ranks import RankGroup
from trainer.train.checkpoint import Checkpoint, Position, save_checkpoint, save_content

SHARE = 0.02  #: largest share of the time that saving may take from the training loop

_EVERY = 1.0  # seconds between broadcasts of rank 0

_EVERY_BEFORE_END = 0.25  # the same, if SIGTERM asks for a checkpoint, as little time is left then


class CheckpointRequest:
    """A request of the launcher to save a checkpoint now: the file ``control/checkpoint`` in a node's run folder.

    If the file exists when a checkpoint is begun, it is deleted once the checkpoint is on the disk. After a call of
    ``save_on_term``, SIGTERM counts as a request too, and the process ends after the checkpoint.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir / "control" / "checkpoint"
        self.handles_term = self.last = False  #: whether SIGTERM is a request; whether it has come

    def save_on_term(self) -> None:
        """Handle SIGTERM from now on. To be called in the main thread."""
        signal.signal(signal.SIGTERM, self._on_term)
        self.handles_term = True

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.last = True

    def pending(self) -> bool:
        return self.last or self._path.exists()

    def fulfil(self) -> None:
        self._path.unlink(missing_ok=True)


class CheckpointSchedule:
    """Decides after which steps all ranks save a checkpoint: about every ``interval`` seconds by rank 0's clock.

    If saving is slow, the interval grows, so that saving takes at most ``SHARE`` of the time. If a ``request`` is
    pending, a checkpoint is due at rank 0's next broadcast.

    Args:
        interval: Seconds between checkpoints; 0: never.
        group: Ranks that save together.
        clock: Returns the time in seconds.
        request: Request to save now; None if there can be none.
    """

    def __init__(
        self, interval: float, group: RankGroup, clock: Callable[[], float] = time.monotonic,
        request: CheckpointRequest | None = None,
    ):  # fmt: skip
        self.interval, self._group, self._clock = interval, group, clock
        self._request = request
        self._saved = self._told = clock()  # times of the last checkpoint and of the last broadcast
        self._steps, self._next = 0, 1  # steps since the last broadcast, and number of steps until the next

    def due(self) -> bool:
        """Return whether to save a checkpoint now. Must be called after each step. Collective."""
        self._steps += 1
        if self.interval <= 0 or self._steps < self._next:
            return False
        now = self._clock()
        left = self._saved + self.interval - now
        pace = max(now - self._told, 1e-9) / self._steps  # seconds per step
        every = _EVERY_BEFORE_END if self._request is not None and self._request.handles_term else _EVERY
        wait = every if left <= 0 else min(every, left)
        asked = self._request is not None and self._request.pending()
        # A broadcast in every step would be costly for short steps, so rank 0 broadcasts about once a second.
        save, self._next = self._group.from_first((left <= 0 or asked, max(1, round(wait / pace))))
        self._told, self._steps = self._clock(), 0
        return bool(save)

    def saved(self, seconds: float = 0.0) -> None:
        """Record that a checkpoint was saved within an epoch or at its end.

        All ranks must call this after the same steps. ``seconds``: time by which saving delayed the training loop.
        """
        self.interval = max(self.interval, seconds / SHARE) if self.interval > 0 else 0.0
        self._saved = self._told = self._clock()
        self._steps, self._next = 0, 1


def checkpoint_writers(group: RankGroup, has_tables: bool, every_node: bool) -> tuple[int, ...]:
    """Return the ranks that write checkpoints: rank 0, and with ``every_node`` the first rank of each node. Collective.

    has_tables: checkpoints contain embedding tables; then at most two ranks write.
    """
    first: dict[int, int] = {}
    for rank, node in enumerate(group.gather(group.ranks.node_rank)):
        first.setdefault(node, rank)
    ranks = tuple(first.values()) if every_node else (0,)
    return ranks[:2] if has_tables else ranks


class CheckpointWriter:
    """Writes checkpoints into a folder, one at a time: ``begin`` in a thread, ``write`` in the calling thread.

    If the thread cannot write a checkpoint, it prints the error, and training continues.
    """

    def __init__(self, folder: Path, request: CheckpointRequest | None = None):
        """``request``: if pending when a checkpoint is begun, its file is deleted once the checkpoint is written."""
        self.folder = folder
        self._request = request
        self._thread: threading.Thread | None = None
        self._failing = False  # whether writing the last checkpoint failed
        self._cleaned = False

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, checkpoint: Checkpoint) -> None:
        """Wait until the previous checkpoint is written, and start to write ``checkpoint``.

        The tensors of ``checkpoint`` must not change until it is written.
        """
        self._begin(lambda: save_checkpoint(self.folder, checkpoint))

    def begin_content(self, position: Position, content: Mapping[str, Any]) -> None:
        """Start to write ``content``, anything that ``torch.save`` accepts, once the previous checkpoint is written.

        ``position``: number of complete epochs, and of steps in the next epoch.
        """
        self._begin(lambda: save_content(self.folder, position, content))

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint and wait for the disk. Raises ``CheckpointError``."""
        asked = self._await_turn()
        path = save_checkpoint(self.folder, checkpoint)
        if asked is not None:
            asked.fulfil()
        return path

    def finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _begin(self, save: Callable[[], object]) -> None:
        asked = self._await_turn()
        self._thread = threading.Thread(target=self._write, args=(save, asked), name="checkpoint-writer")
        self._thread.start()

    def _await_turn(self) -> CheckpointRequest | None:
        """Wait for the previous checkpoint. Returns the request for the next one, if there is one."""
        self.finish()
        if not self._cleaned:
            self._cleaned = True
            for path in self.folder.glob(".epoch-*.pt.*"):  # incomplete files that killed processes left
                path.unlink(missing_ok=True)
        return self._request if self._request is not None and self._request.pending() else None

    def _write(self, save: Callable[[], object], asked: CheckpointRequest | None) -> None:
        failed_before, self._failing = self._failing, False
        try:
            save()
            if asked is not None:
                asked.fulfil()
        except CheckpointError as error:
            self._failing = True
            if not failed_before:
                print(f"{error}; training continues, and the previous checkpoint remains the newest", flush=True)


def detached(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy of a checkpoint that does not change when training continues."""
    # Losses, best weights and gathered tables are never changed in place, and so are shared.
    return replace(checkpoint, model=cpu_copy(checkpoint.model), optimizer=cpu_copy(checkpoint.optimizer))


def cpu_copy(value: Any) -> Any:
    """Copy nested dicts, lists and tuples, with tensors on the CPU. Other values are shared."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: cpu_copy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        copies = [cpu_copy(one) for one in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value
