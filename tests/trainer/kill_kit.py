"""Runs training processes that save checkpoints at given steps and kill themselves at a given step."""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path

from forked import Forked
from ports import free_port
from train_kit import command_line, finish_all, rank_environment
from trainer.cli import main
from trainer.train import checkpoint_writer
from trainer.train.checkpoint_writer import CheckpointSchedule
from trainer.train.settings import TrainJob


def train_until(words: list[str], every: int, last: int, newest: Path, steps: int = 0) -> None:
    """Run the trainer with a checkpoint after every ``every`` steps. After step ``last`` (0: never), wait until the
    file ``newest`` exists, then kill the process.

    The trainer asks for no checkpoint after the last step of an epoch. ``every`` and ``last`` count this step only if
    ``steps``, the number of steps of an epoch, is given.
    """
    asked = itertools.count(1)

    def due(self: CheckpointSchedule) -> bool:
        number = next(asked)
        number += (number - 1) // (steps - 1) if steps else 0
        if number == last:
            while not newest.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return number % every == 0

    checkpoint_writer.CheckpointSchedule.due = due  # type: ignore[method-assign]
    main(words)


def killed_run(killed: TrainJob, world_size: int, every: int, last: int) -> Path:
    """Run ``train_until`` as every rank of a job until all have killed themselves. Return the newest checkpoint."""
    port, newest = free_port(), killed.run_dir / "checkpoints" / "last.pt"
    words = command_line(killed)
    ranks = [
        Forked(train_until, (words, every, last, newest), rank_environment(rank, world_size, port))
        for rank in range(world_size)
    ]
    for ended in finish_all(ranks):
        assert ended.returncode == -signal.SIGKILL
    return newest
