"""Test kit: training runs as real processes that lose ranks.

Controls when each rank dies and whether the others are notified, and records which seeds were trained.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forked import Forked
from train_kit import Ended, command_line, finish, free_port, rank_environment
from trainer.cli import main
from trainer.loader.block_loader import BatchLoader
from trainer.train import fit as fit_module
from trainer.train import job as job_module
from trainer.train.fit import Fit
from trainer.train.settings import TrainJob

EVERY = 4  #: steps between snapshots


@dataclass(frozen=True)
class Loss:
    """The end of one rank by a signal: at a batch of a split, or at another ``moment``.

    A training batch is given by ``epoch`` and ``step``.
    """

    rank: int
    split: str = "train"
    epoch: int = 1
    step: int = 0
    how: signal.Signals = signal.SIGKILL
    moment: str = "batch"  #: or ``rejoin``, ``open`` (before training), ``start``


@dataclass
class Survived:
    """The result of a run that lost ranks."""

    run_dir: Path
    ended: dict[int, Ended] = field(default_factory=dict)  #: of the remaining ranks
    seconds: float = 0.0  #: since the last loss


def run_without_losses(item: TrainJob, world_size: int) -> list[Ended]:
    """Run all ranks to the end in an existing run folder."""
    port = free_port()
    ranks = [_start(item, rank, world_size, port, None, {}) for rank in range(world_size)]
    return [finish(process) for process in ranks]


def run_with_losses(
    item: TrainJob, world_size: int, losses: Sequence[Loss], announce: bool = True, **more_env: str
) -> Survived:
    """Run ``world_size`` ranks and lose some in the given order.

    announce: write each loss to team.json, as supervisors do.
    """
    item.run_dir.mkdir(parents=True)
    by_rank, port = {loss.rank: loss for loss in losses}, free_port()
    ranks = {rank: _start(item, rank, world_size, port, by_rank.get(rank), more_env) for rank in range(world_size)}
    left, survived, began = set(ranks), Survived(item.run_dir), time.monotonic()
    try:
        for generation, loss in enumerate(losses, 1):
            _await_end(ranks[loss.rank], loss)
            left.remove(loss.rank)
            began = time.monotonic()
            if announce:
                write_team(item.run_dir, generation, left)
        survived.ended = {rank: finish(ranks[rank]) for rank in left}
        survived.seconds = time.monotonic() - began
    finally:
        for process in ranks.values():
            process.kill()
    return survived


def write_team(run_dir: Path, generation: int, ranks: set[int]) -> None:
    """Write team.json as a supervisor does after it lost a node."""
    team = {"generation": generation, "ranks": sorted(ranks), "lost": []}
    (run_dir / "team.new").write_text(json.dumps(team))
    (run_dir / "team.new").replace(run_dir / "team.json")


def trained_seeds(run_dir: Path, world_size: int) -> Counter[tuple[int, int]]:
    """Count for each (epoch, seed) how often the seed was trained; steps that were rolled back do not count."""
    notes = {rank: _notes(run_dir, rank) for rank in range(world_size)}
    backs = {note["generation"]: (note["epoch"], note["step"]) for note in notes[0] if note["kind"] == "back"}
    counted: Counter[tuple[int, int]] = Counter()
    for own in notes.values():
        for note in own:
            later = [at for generation, at in backs.items() if generation > note["generation"]]
            if note["kind"] == "trained" and all((note["epoch"], note["step"]) < at for at in later):
                counted.update((note["epoch"], seed) for seed in note["seeds"])
    return counted


def _notes(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    path = run_dir / f"notes-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _start(item: TrainJob, rank: int, size: int, port: int, loss: Loss | None, more_env: dict[str, str]) -> Forked:
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": str(rank)}
    run = {"GNNFLEET_ON_CLIENT_LOSS": "go-on", "GNNFLEET_RUN_DIR": str(item.run_dir)}
    env = rank_environment(rank, size, port, **alone, **run, **more_env)
    return Forked(_rank, (command_line(item), item.run_dir / f"notes-{rank}", loss), env)


def _rank(words: list[str], notes: Path, loss: Loss | None) -> None:
    """Run one rank from start to end, in its own process."""
    _Note(notes, loss).install()
    main(words)


def _await_end(process: Forked, loss: Loss) -> None:
    """Wait until the process is dead or stopped."""
    until = time.monotonic() + 60
    while process.poll() is None and _state(process.pid) not in ("T", "gone"):
        assert time.monotonic() < until, f"{loss} did not happen"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


class _Note:
    """Records what this rank trains and kills the process at the moment of ``loss``."""

    def __init__(self, path: Path, loss: Loss | None):
        self.path, self.loss, self.generation = path, loss, 0

    def write(self, kind: str, **values: Any) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"kind": kind, "generation": self.generation, **values}) + "\n")

    def die_at(self, moment: str, **where: Any) -> None:
        loss = self.loss
        if loss and loss.moment == moment and all(getattr(loss, name) == at for name, at in where.items()):
            os.kill(os.getpid(), loss.how)

    def install(self) -> None:
        self.die_at("start")
        epoch_of, rejoin, open_job_graph = BatchLoader.epoch, Fit.rejoin, job_module.open_job_graph

        def batches(loader: BatchLoader, epoch: int, first_step: int = 0) -> Iterator[Any]:
            split = loader.settings.split
            for batch in epoch_of(loader, epoch, first_step):
                at = {"epoch": epoch} if split == "train" else {}
                self.die_at("batch", split=split, step=batch.step, **at)
                yield batch
                if split == "train":
                    self.write("trained", epoch=epoch, step=batch.step, seeds=batch.input_id.tolist())

        def back(fit: Fit, team: Any, loaders: Any) -> None:
            self.die_at("rejoin")
            rejoin(fit, team, loaders)
            done, scored, step = fit.progress.position
            self.generation = team.generation
            self.write("back", epoch=done + 1, step=step)

        def opened(*args: Any) -> Any:
            self.die_at("open")
            return open_job_graph(*args)

        job_module.open_job_graph = opened
        BatchLoader.epoch, Fit.rejoin = batches, back  # type: ignore[method-assign]
        fit_module.SNAPSHOT_STEPS = EVERY
