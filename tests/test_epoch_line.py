"""Tests of the line that rank 0 prints after each epoch, and that the launcher shows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

from launcher.run.live_log import LiveLog, LogLine
from run_kit import make_launch, make_node
from trainer.core.batch_cost import Cost
from trainer.graph.cache_policy import Prediction
from trainer.train.epoch import EpochReport
from trainer.train.fit import epoch_text, traffic_text
from trainer.train.step_timing import StepTimes
from trainer.train.tasks.task import Metric

WIDTH = 100
ACCURACY, MICRO_F1 = Metric("accuracy", "higher"), Metric("micro_f1", "higher")
MRR, MAE = Metric("mrr", "higher"), Metric("mae", "lower")
COST = Cost(remote_bytes=30_000_000, rows=4000, remote_rows=2000, cached_rows=1000, held_rows=600)
PREDICTION = Prediction(50, 50, 16e6, 40e6, 0.5, 1000, 400_000)


def report(epoch: int, loss: float, seconds: float, seeds: int) -> EpochReport:
    times = StepTimes()
    return EpochReport(epoch, loss, torch.tensor([loss]), seconds, seeds, seeds, COST, 1, times, seconds, lr=0.01)


def shown(line: str, node_rank: int = 0) -> list[str]:
    console = Console(file=io.StringIO(), width=WIDTH)
    plan = make_launch([make_node(Path("/w"), node_rank, [])])
    LiveLog(console, plan, plain=True).process_lines([LogLine(0.0, node_rank, f"rank{node_rank}", line)])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_the_line_of_an_epoch_has_loss_validation_seconds_and_speed() -> None:
    line = epoch_text(report(3, 0.45123, 2.5, 100_000), 10, ACCURACY, 0.81234)
    assert shown(line) == ["node0/rank0 | epoch 3/10  loss 0.4512  val 0.8123  2.5 s  40,000 seeds/s"]
    assert "val" not in epoch_text(report(3, 0.45123, 2.5, 100_000), 10, ACCURACY, None)


def test_the_line_of_an_epoch_names_a_metric_other_than_accuracy() -> None:
    line = epoch_text(report(3, 0.45123, 2.5, 100_000), 10, MRR, 0.25)
    assert line == "epoch 3/10  loss 0.4512  val MRR 0.2500  2.5 s  40,000 seeds/s"


@pytest.mark.parametrize(("metric", "val"), [(ACCURACY, 1.0), (MICRO_F1, 1.0), (MAE, 123_456.789)])
@pytest.mark.parametrize("loss", [123_456.789, 1.2345e30])
def test_the_line_of_an_epoch_with_large_numbers_fits_in_100_columns(loss: float, metric: Metric, val: float) -> None:
    line = epoch_text(report(10_000, loss, 123_456.7, 10**14), 10_000, metric, val)
    (text,) = shown(line, node_rank=9999)
    assert text.startswith("node9999/rank9999 | epoch 10000/10000  loss 1")
    assert text.endswith(" seeds/s") and len(text) <= WIDTH


def test_traffic_and_shares_are_printed_once_for_all_epochs() -> None:
    assert list(traffic_text(COST, 2, 0, PREDICTION)) == [
        "from other hosts to rank 0: 15.0 MB an epoch, 16.0 MB predicted for epoch 1",
        "rows of other hosts on rank 0: 50% from the cache, 30% still held from recent batches, 20% requested",
    ]
    assert list(traffic_text(Cost(), 2, 0, None)) == []
