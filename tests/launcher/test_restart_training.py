"""Tests that training which restarts after a failure has the loss curve of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launching import REPOSITORY, Launched, Running, launch, local_config
from waiting import DEADLINE, wait_until

EPOCHS = 12
TRAIN = {"epochs": EPOCHS, "batch_size": 64}


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: None) -> list[float]:
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMUX_TMPDIR", str(folder))
        done = launch(local_config(folder, [1, 1, 1], train=TRAIN, data={"replicas": 2}))
    assert done.status == 0, done.output
    return losses(done)


def losses(done: Launched) -> list[float]:
    """Return the loss of each step. Of an epoch that was trained twice, the later losses count."""
    by_epoch = {line["epoch"]: line["step_loss"] for line in done.metrics("epoch") if "step_loss" in line}
    assert sorted(by_epoch) == list(range(1, EPOCHS + 1))
    return [loss for epoch in sorted(by_epoch) for loss in by_epoch[epoch]]


def state(folder: Path, k: int) -> dict:
    found: dict = json.loads((folder / f"node{k}/runs/trains-again/node{k}/state.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rank", "server", "lead node", "launcher and node"])
def test_the_loss_curve_is_that_of_a_run_without_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curve: list[float], what: str
) -> None:
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    run = {"restarts": 3, "peer_timeout": 3, "grace": 1, "server_restarts": 0}
    config = local_config(tmp_path, [1, 1, 1], train=TRAIN, data={"replicas": 2}, run=run)
    running = Running(config, "--run-id", "trains-again").await_epoch(3)
    if what in ("rank", "server"):
        name = "rank1" if what == "rank" else "server"
        os.kill(next(one["pid"] for one in state(tmp_path, 1)["processes"] if one["name"] == name), signal.SIGKILL)
    else:
        if what == "launcher and node":
            running.process.kill()
        os.kill(state(tmp_path, 0 if what == "lead node" else 2)["pid"], signal.SIGKILL)
    if what == "launcher and node":
        wait_until((tmp_path / "node0/runs/trains-again/node0/result.json").exists)
        done = _follow(tmp_path)
    else:
        done = running.end()
    assert done.status == 0 and "Done in" in done.output, done.output
    (restart,) = done.result["restarts"]
    assert restart["epoch"] >= 1 and "from epoch" in restart["text"]
    found = losses(done)
    assert len(found) == len(curve) and found == pytest.approx(curve, rel=1e-3)
    assert (done.run_dir / "checkpoints/last.pt").exists()


def _follow(folder: Path) -> Launched:
    argv = [sys.executable, str(REPOSITORY / "launch.py"), "follow", "trains-again"]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=DEADLINE, check=False)
    return Launched(done.returncode, done.stdout + done.stderr, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sharded_rows_continue_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_kernels: None) -> None:
    # Nodes without features have trainable rows, sharded over the ranks; only two nodes of three write checkpoints.
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    data = {"dataset": "synthetic-hetero", "options": {"num_nodes": 900, "num_classes": 4, "num_features": 12}}
    train = {**TRAIN, "batch_size": 30, "model": "rgcn", "embedding_lr": 0.02, "checkpoint_seconds": 0.2}
    (tmp_path / "whole").mkdir()
    whole = launch(local_config(tmp_path / "whole", [1], train=train, data=data))
    assert whole.status == 0, whole.output
    run = {"restarts": 3, "peer_timeout": 3, "grace": 1}
    config = local_config(tmp_path, [1, 1, 1], train=train, data={**data, "replicas": 2}, run=run)
    running = Running(config, "--run-id", "trains-again").await_epoch(4)
    os.kill(state(tmp_path, 0)["pid"], signal.SIGKILL)  # the lead node, which has rank 0 and its rows
    done = running.end()
    assert done.status == 0, done.output
    (restart,) = done.result["restarts"]
    assert restart["epoch"] >= 2 and len(restart["nodes"]) == 2
    assert losses(done) == pytest.approx(losses(whole), rel=1e-4)
