"""Tests of ranks lost during a run: the others continue, each seed is trained exactly once, the loss curve stays
equal."""

from __future__ import annotations

import signal
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from regroup_kit import Loss, run_with_losses, run_without_losses, trained_seeds, write_team
from train_kit import curve, job, metrics, write_parts
from trainer.core.errors import PeerError, TrainingError
from trainer.core.ranks import RankGroup, Ranks
from trainer.train import regroup
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.optimize import Optimizers
from trainer.train.regroup import (
    Progress,
    RegroupOptions,
    Snapshots,
    Team,
    _RegroupingRank,
    _TeamWatch,
    newest_common,
)
from trainer.train.settings import TrainJob

SMALL = {"batch_size": 16, "eval_batch_size": 30, "epochs": 3}  #: 180 train seeds: 12 steps
SEEDS = 180

LOSSES = {
    "at the first step, then in mid-epoch": (4, [Loss(3), Loss(1, epoch=2, step=6)]),
    "in evaluation, then a host that vanishes": (3, [Loss(2, "val"), Loss(1, epoch=3, step=9, how=signal.SIGSTOP)]),
    "at the last step, then in the last evaluation": (3, [Loss(1, epoch=3, step=11), Loss(2, "test")]),
    "in mid-epoch, then while they regroup": (3, [Loss(2, epoch=2, step=5), Loss(1, moment="rejoin")]),
    "before they meet, then before they train": (3, [Loss(1, moment="start"), Loss(2, moment="open")]),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


@pytest.fixture(scope="module")
def alone(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a run with one process."""
    folder = tmp_path_factory.mktemp("alone")
    train(job(parts, folder, **SMALL), Ranks())
    return folder


def small(parts: Path, run_dir: Path) -> TrainJob:
    return job(parts, run_dir, **SMALL)


@pytest.mark.parametrize("name", LOSSES)
def test_a_run_continues_without_lost_ranks(name: str, parts: Path, alone: Path, tmp_path: Path) -> None:
    world_size, losses = LOSSES[name]
    survived = run_with_losses(small(parts, tmp_path / "run"), world_size, losses)
    for ended in survived.ended.values():
        assert ended.returncode == 0, ended.output
    assert survived.seconds < 60, "survivors must not wait for the 120 s deadline of an announced loss"
    np.testing.assert_allclose(curve(survived.run_dir), curve(alone), rtol=1e-4)
    trained = trained_seeds(survived.run_dir, world_size)
    assert len(trained) == 3 * SEEDS and set(trained.values()) == {1}
    back = [(line["generation"], line["ranks"]) for line in metrics(survived.run_dir, "regroup")]
    begun = any(
        loss.moment in ("batch", "rejoin") for loss in losses
    )  # without one of these no rank has trained yet, so no regrouping happens
    assert back[-1:] == ([(len(losses), sorted(survived.ended))] if begun else [])
    for kind in ("eval", "checkpoint", "result"):
        ours, theirs = metrics(survived.run_dir, kind), metrics(alone, kind)
        assert [line.get("epoch") for line in ours] == [line.get("epoch") for line in theirs]
    saved, whole = (load_checkpoint(folder / "checkpoints" / "last.pt") for folder in (survived.run_dir, alone))
    ours, theirs = (torch.cat([value.flatten() for value in one.model.values()]) for one in (saved, whole))
    apart = (ours - theirs).abs()
    assert (apart > 1e-4 + 1e-3 * theirs.abs()).float().mean() < 0.03, (
        "all rows except those of a unit whose ReLU flipped by rounding"
    )
    assert apart.max() < 4e-3, "differs by at most a step of Adam"


def test_ranks_one_snapshot_apart_share_a_snapshot() -> None:
    model = torch.nn.Linear(2, 2)
    optimizers = Optimizers(torch.optim.Adam(model.parameters()))
    ahead, behind = Snapshots(), Snapshots()
    for place in (Progress(done=1), Progress(done=2, scored=False), Progress(done=2)):
        ahead.keep(place, model, optimizers)
        if not place.scored or place.done == 1:
            behind.keep(place, model, optimizers)
        torch.nn.init.constant_(model.weight, place.done)
    place = newest_common([ahead.positions(), behind.positions()])
    assert place == (2, False, 0)
    assert torch.equal(ahead.rewind_to(place).model["weight"], behind.rewind_to(place).model["weight"])
    assert ahead.positions() == (place,) and behind.positions() == ((1, True, 0), place)


@pytest.mark.parametrize("eval_every", [1, 2])
def test_no_rank_gets_two_snapshots_ahead_of_the_others(
    eval_every: int, parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    keep, add_up = Snapshots.keep, RankGroup.sum

    def kept(self: Snapshots, *what: Any) -> None:
        before = self.positions()
        keep(self, *what)
        events.extend(["kept"] * (self.positions() != before))

    def waited(self: RankGroup, values: torch.Tensor) -> torch.Tensor:
        events.append("waited for all ranks")
        return add_up(self, values)

    monkeypatch.setattr(Snapshots, "keep", kept)
    monkeypatch.setattr(RankGroup, "sum", waited)
    monkeypatch.setenv("GNNFLEET_ON_CLIENT_LOSS", "go-on")
    train(job(parts, tmp_path, **SMALL, eval_every=eval_every), Ranks())
    assert events.count("kept") > 3
    assert ("kept", "kept") not in list(pairwise(events)), "newest_common would find none"


@pytest.mark.parametrize("first", [0, 1])
def test_all_ranks_decide_alike_whichever_learns_of_a_loss_first(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks 0 and 1 have finished and rank 2 is lost; rank 1 learns of the loss before it sees that rank 0 is done.
    monkeypatch.setattr(regroup, "_LEAVE", 0.0)
    store, go_on = HashStore(), RegroupOptions(tmp_path / "team.json")
    everybody, waits = Team(0, (0, 1, 2)), []
    store.set("done/1", "")
    for rank in (0, 1):
        survivor = object.__new__(_RegroupingRank)
        survivor.ranks, survivor.timeout, survivor.store, survivor.regroup = Ranks(rank, 3), 20.0, store, go_on
        waits.append(survivor)
    write_team(tmp_path, 1, {0, 1})
    ended: list[bool] = []
    for rank in (first, 1 - first):
        if rank == 1:
            store.delete_key("done/0")
        try:
            waits[rank]._await_all(everybody)
            ended.append(True)
        except PeerError:
            ended.append(False)
    assert ended in ([True, True], [False, False])


def test_without_an_announced_loss_the_other_ranks_fail(parts: Path, tmp_path: Path) -> None:
    loss = Loss(1, epoch=2, step=5)
    survived = run_with_losses(small(parts, tmp_path / "run"), 2, [loss], announce=False, GNNFLEET_PEER_TIMEOUT="-8")
    assert survived.ended[0].returncode == 1 and survived.seconds < 60
    assert "error: rank 0 (node0" in survived.ended[0].output and "lost another rank" in survived.ended[0].output
    assert "Traceback" not in survived.ended[0].output


def test_a_rank_reported_lost_by_mistake_ends_with_a_message(parts: Path, tmp_path: Path) -> None:
    # Rank 1 is reported lost before the ranks meet; rank 0 trains long enough for rank 1 to reach it.
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_team(run_dir, 1, {0})
    lone, lost = run_without_losses(job(parts, run_dir, **{**SMALL, "epochs": 60}, eval_every=0), 2)
    assert lone.returncode == 0, lone.output
    assert lost.returncode == 1 and "error: rank 1 (node1" in lost.output and "was reported lost" in lost.output
    assert len(metrics(run_dir, "epoch")) == 60


def test_losing_a_share_of_embedding_rows_ends_the_run_with_advice(tmp_path: Path) -> None:
    typed = write_parts(tmp_path / "parts", 2, "synthetic-hetero", num_nodes=300)
    item = job(typed, tmp_path / "run", model="rsage", epochs=3)
    survived = run_with_losses(item, 2, [Loss(1, epoch=2)])
    assert survived.ended[0].returncode == 1
    assert "each stored a share of the embedding rows of nodes without features" in survived.ended[0].output
    assert "resume from the last checkpoint" in survived.ended[0].output


def test_an_unreadable_team_file_ends_the_wait_for_other_ranks(tmp_path: Path) -> None:
    go_on, cut = RegroupOptions(tmp_path / "team.json"), threading.Event()
    with _TeamWatch(go_on) as watch:
        watch.guard(Team(0, (0, 1)), cut.set)
        go_on.file.write_text("{")
        assert cut.wait(60)
    with pytest.raises(TrainingError, match="does not list the remaining ranks"):
        watch.superseded(Team(0, (0, 1)))
