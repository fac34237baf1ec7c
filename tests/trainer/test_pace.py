"""Tests of ``own_s``, a rank's step time without waits for other ranks, and of the metrics lines of user scripts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import trainer
from train_kit import FewBatches, metrics, run_script
from trainer.core.batch import Batch
from trainer.core.errors import SettingsError, TrainingError
from trainer.core.ranks import RankGroup, Ranks
from trainer.nn.layers import SAGEConv
from trainer.nn.models import BlockModel
from trainer.train.epoch import train_epoch
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.step_timing import StepTimer
from trainer.train.tasks.classification import Classification

ALONE = RankGroup(Ranks(), torch.device("cpu"))

SLOW_RANK = """
import os, sys, time, torch, torch.distributed as dist, trainer
from torch.nn.parallel import DistributedDataParallel
from trainer.train import metrics
metrics.STEP_INTERVAL = 0.2
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
log = trainer.StepLog(model, optimizer)
for step in range(9):
    if rank == 1:
        time.sleep(0.1)  # its batches take longer
    out = model(torch.ones(2, 4))
    if rank == 2:
        time.sleep(0.2)  # and this one computes longer
    loss = out.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.step(1, step, 9, loss, 2)
dist.barrier()
"""


def test_own_work_excludes_waits_for_slower_ranks(tmp_path: Path) -> None:
    # Three processes step together; each reports only its own work.
    for ended in run_script(["-c", SLOW_RANK], 3, tmp_path, GNNFLEET_RUN_DIR=str(tmp_path)):
        assert ended.returncode == 0, ended.output
    typical = [steady(tmp_path, rank) for rank in range(3)]
    for line in typical:
        assert line["step_s"] > 0.2  # of the slowest rank
    assert typical[0]["own_s"] < 0.1 and typical[0]["batch_s"] < 0.05
    assert 0.1 <= typical[1]["own_s"] < 0.2 and 0.1 <= typical[1]["batch_s"] < 0.15
    assert 0.2 <= typical[2]["own_s"] and typical[2]["batch_s"] < 0.05


def steady(run_dir: Path, rank: int) -> dict[str, float]:
    lines = metrics(run_dir, "step", rank)[1:]
    middle = {name: sorted(line[name] for line in lines) for name in ("step_s", "own_s", "batch_s")}
    return {name: values[len(values) // 2] for name, values in middle.items()}


class Progress(FewBatches):
    """Yields batches, and reads the rank's progress file before each batch."""

    def __init__(self, run_dir: Path):
        super().__init__()
        self.file, self.seen = run_dir / "progress-rank0", list[str]()

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        for batch in super().epoch(epoch, first_step):
            self.seen.append(self.file.read_text())
            yield batch


def one_epoch(batches: FewBatches, epoch: int, run_dir: Path) -> None:
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    optimizers = Optimizers(torch.optim.Adam(model.parameters()))
    with MetricsLog(run_dir, 0) as log:
        train_epoch(model, Classification(2), optimizers, batches, epoch, ALONE, log)


def test_the_progress_file_has_epoch_and_step(tmp_path: Path) -> None:
    batches = Progress(tmp_path)
    one_epoch(batches, 7, tmp_path)
    assert [text.split() for text in batches.seen] == [["7", str(step), "load"] for step in range(3)]
    assert batches.file.read_text().split() == ["7", "3", "done"]
    assert {len(text) for text in (*batches.seen, batches.file.read_text())} == {40}


def test_a_nan_loss_is_written_before_the_process_fails(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        one_epoch(FewBatches(bad_step=2), 4, tmp_path)
    last = metrics(tmp_path, "step")[-1]
    assert (last["epoch"], last["step"]) == (4, 2) and math.isnan(last["loss"])


def test_one_host_has_no_remote_share(tmp_path: Path) -> None:
    one_epoch(FewBatches(), 1, tmp_path)
    (line,) = metrics(tmp_path, "step")
    assert line["remote_share"] is None


def test_an_unknown_direction_of_a_metric_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(SettingsError, match="better: 'min'; expected 'higher' or 'lower'"):
        trainer.StepLog(model, optimizer, environ={}, metric="mae", better="min")


def test_a_step_log_outside_of_a_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 1)
    with trainer.StepLog(model, torch.optim.SGD(model.parameters(), lr=0.1), environ={}) as log:
        log.step(1, 0, 1, torch.tensor(0.5), 3)
    assert list(tmp_path.iterdir()) == []


def test_epochs_and_results_of_a_script_are_logged(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.StepLog(model, optimizer, environ={"GNNFLEET_RUN_DIR": str(tmp_path)}) as log:
        for epoch in (1, 2):
            for at in range(3):
                step(model, optimizer)
                log.step(epoch, at, 3, 0.5, 4)
            log.epoch(epoch, torch.tensor(0.25), val=0.75)
        log.result(test=0.5)
    epochs = metrics(tmp_path, "epoch")
    assert [(line["epoch"], line["loss"], line["seeds"]) for line in epochs] == [(1, 0.25, 12), (2, 0.25, 12)]
    assert all(line["seconds"] >= 0 and line["step_s"] > 0 for line in epochs)
    assert [(line["split"], line["accuracy"]) for line in metrics(tmp_path, "eval")] == [("val", 0.75)] * 2
    assert metrics(tmp_path, "result")[0]["test_accuracy"] == 0.5


def test_a_script_tells_where_it_is(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[str]] = []

    def look() -> None:
        seen.append((tmp_path / "progress-rank0").read_text().split())

    with trainer.StepLog(model, optimizer, environ={"GNNFLEET_RUN_DIR": str(tmp_path)}) as log:
        for at in range(2):
            loss = model(torch.ones(1, 2)).sum()
            look()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.step(1, at, 2, loss, 4)
            look()
        model.eval()
        for _ in range(2):
            model(torch.ones(1, 2))
            look()
        log.epoch(1, 0.5)
        look()
        model.train()
        model(torch.ones(1, 2))
        look()
    look()
    places = ["1 0 compute", "1 1 load", "1 1 compute", "1 2 between", "1 1 evaluate", "1 2 evaluate", "1 2 between"]
    assert [" ".join(words) for words in seen] == [*places, "2 0 compute", "2 0 done"]


def test_a_script_records_the_last_step_of_each_epoch(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainer.StepLog(model, optimizer, environ={"GNNFLEET_RUN_DIR": str(tmp_path)}) as log:
        for epoch in (1, 2):
            for at in range(5):
                step(model, optimizer)
                log.step(epoch, at, 5, 0.5, 4)
    lines = metrics(tmp_path, "step")
    assert [(line["epoch"], line["step"]) for line in lines] == [(1, 0), (1, 4), (2, 4)]
    assert all("saved" not in line for line in lines)


def test_a_loss_that_carries_gradients_is_logged_without_a_warning(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    environ = {"GNNFLEET_RUN_DIR": str(tmp_path)}
    with trainer.StepLog(model, torch.optim.SGD(model.parameters(), lr=0.1), environ=environ) as log:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.step(1, 0, 1, model(torch.zeros(1, 2)).sum() * 0 + 0.5, 3)
    assert [line["loss"] for line in metrics(tmp_path, "step")] == [0.5]


def test_pace_removes_its_hooks() -> None:
    model, called = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with StepTimer(model, optimizer, lambda: called.append("reduced")):
        step(model, optimizer)
    step(model, optimizer)
    assert called == ["reduced"]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
