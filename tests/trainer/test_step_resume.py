"""Tests of checkpoints within an epoch: when they are saved, and equal losses after a resume."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from kill_kit import killed_run
from train_kit import curve, job, metrics, run_ranks, write_parts
from trainer.core.ranks import RankGroup, Ranks
from trainer.train.checkpoint import load_checkpoint, position_of
from trainer.train.checkpoint_writer import SHARE, CheckpointRequest, CheckpointSchedule, CheckpointWriter
from trainer.train.job import train

ALONE = RankGroup(Ranks(), torch.device("cpu"))

EPOCHS, STEPS = 2, 12  # 180 train seeds in batches of 16

KINDS: dict[str, dict[str, Any]] = {
    "homogeneous": {"batch_size": 16, "epochs": EPOCHS, "dropout": 0.2},
    "heterogeneous": {"batch_size": 16, "epochs": EPOCHS, "model": "rgcn", "embedding_lr": 0.02},
}

KILLED = 2  #: processes of a run that is killed
RESUMED = {"as many processes": 2, "one fewer": 1, "one more": 3}


@pytest.fixture(scope="module", params=fast_cases(KINDS, "homogeneous"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def parts(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind) / "parts"
    if kind == "homogeneous":
        return write_parts(folder, 2)
    return write_parts(folder, 2, "synthetic-hetero")


@pytest.fixture(scope="module")
def undisturbed(kind: str, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(job(parts, folder, **KINDS[kind]), Ranks())
    losses = curve(folder)
    assert len(losses) == EPOCHS * STEPS
    return losses


@pytest.fixture(scope="module")
def newest(kind: str, parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the newest checkpoint of a run that was killed at a random step; test_resume_kills has more of them."""
    random_of = random.Random(f"{kind} 0")
    # ``due`` is not called after the last step of an epoch
    every, last = random_of.randint(1, 5), random_of.randint(6, EPOCHS * (STEPS - 1))
    newest = killed_run(job(parts, tmp_path_factory.mktemp("killed"), **KINDS[kind]), KILLED, every, last)
    assert load_checkpoint(newest).position > (0, 0), f"saved after every {every} steps, killed after {last}"
    return newest


@pytest.mark.parametrize("change", RESUMED)
def test_a_killed_run_resumes_at_the_step_with_the_same_losses(
    change: str, newest: Path, kind: str, parts: Path, undisturbed: list[float], tmp_path: Path
) -> None:
    after, saved, resumed = RESUMED[change], load_checkpoint(newest), tmp_path / "resumed"
    for ended in run_ranks(after, job(parts, resumed, **KINDS[kind], resume=str(newest))):
        assert ended.returncode == 0, ended.output
    first = saved.epoch * STEPS
    np.testing.assert_allclose(curve(resumed), undisturbed[first:], rtol=1e-4, err_msg=str(saved.position))
    seeds = sum(line["seeds"] for rank in range(after) for line in metrics(resumed, "epoch", rank))
    partial = int(saved.partial.sizes.sum()) if saved.partial else 0
    assert seeds == 180 * (EPOCHS - saved.epoch) - partial, "no seed of a step before the checkpoint is trained again"
    final = load_checkpoint(resumed / "checkpoints" / "last.pt")
    assert torch.cat(final.step_loss).tolist() == pytest.approx(undisturbed, rel=1e-4)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def saved_at(schedule: CheckpointSchedule, clock: Clock, step_seconds: list[float], cost: float = 0.0) -> list[float]:
    """Simulate steps of ``step_seconds``, and return the times at which checkpoints are saved.

    cost: seconds to save a checkpoint.
    """
    times = []
    for seconds in step_seconds:
        clock.now += seconds
        if schedule.due():
            times.append(clock.now - 100.0)
            clock.now += cost
            schedule.saved(cost)
    return times


@pytest.mark.parametrize("step", [0.01, 0.3, 7.0, 45.0])
def test_a_checkpoint_is_due_about_every_interval(step: float) -> None:
    clock = Clock()
    times = saved_at(CheckpointSchedule(60.0, ALONE, clock), clock, [step] * int(600 / step))
    gaps = np.diff([0.0, *times])
    assert len(times) > 0 and gaps.min() >= 60.0 and gaps.max() <= 60.0 + 2 * step


def test_a_pace_that_changes_does_not_put_off_a_checkpoint_for_long() -> None:
    clock = Clock()
    times = saved_at(CheckpointSchedule(60.0, ALONE, clock), clock, [0.01] * 2000 + [0.2] * 1000)
    assert 60.0 <= times[0] <= 60.0 + 21.0


def test_saving_takes_a_small_share_of_the_time() -> None:
    clock = Clock()
    times = saved_at(CheckpointSchedule(10.0, ALONE, clock), clock, [0.5] * 2000, cost=4.0)
    assert np.diff(times).min() >= 4.0 / SHARE


def test_ranks_decide_together_about_once_a_second() -> None:
    messages = []

    class Counted(RankGroup):
        def from_first(self, value: Any) -> Any:
            messages.append(value)
            return value

    clock = Clock()
    saved_at(CheckpointSchedule(60.0, Counted(Ranks()), clock), clock, [0.01] * 12_000)
    assert len(messages) < 2 * 65


def test_an_interval_of_zero_saves_nothing_within_an_epoch() -> None:
    clock = Clock()
    assert saved_at(CheckpointSchedule(0.0, ALONE, clock), clock, [100.0] * 5) == []


def test_names_of_files_are_positions() -> None:
    assert position_of("epoch-0007.pt") == (7, 0) and position_of("epoch-0007-step-000120.pt") == (7, 120)
    assert position_of("last.pt") is None and position_of(".epoch-0007.pt.12.34") is None


def test_a_checkpoint_that_the_launcher_asks_for_is_saved_within_a_second(tmp_path: Path) -> None:
    clock, request = Clock(), CheckpointRequest(tmp_path)
    schedule = CheckpointSchedule(60.0, ALONE, clock, request)
    assert saved_at(schedule, clock, [0.1] * 100) == []
    (tmp_path / "control").mkdir()
    (tmp_path / "control/checkpoint").touch()
    writer, begun, written = CheckpointWriter(tmp_path, request), clock.now, threading.Event()
    steps = 0
    while not schedule.due():
        clock.now += 0.1
        steps += 1
    assert steps <= 20 and clock.now - begun <= 2.0
    writer._begin(written.wait)
    assert request.pending(), "the checkpoint is not on the disk yet"
    written.set()
    writer.finish()
    assert not request.pending()
    schedule.saved()
    assert saved_at(schedule, clock, [0.1] * 100) == []
