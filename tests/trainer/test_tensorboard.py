"""Tests of TensorBoard scalars, read back with TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.core.errors import SettingsError
from trainer.train.metrics import MetricsLog

Curves = dict[str, list[tuple[int, Any]]]


def read_back(folder: Path) -> Curves:
    """Return the (step, value) pairs of each scalar tag."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_each_rank_writes_its_metrics_and_rank_0_those_of_the_run(tmp_path: Path) -> None:
    spent = {"sample": 0.2, "reduce": 0.1}
    for rank in (0, 1):
        losses = {"step_loss": [4.0, 3.0, 2.0, 1.0]} if rank == 0 else {}
        with MetricsLog(tmp_path, rank, tensorboard=True) as log:
            log.write("step", epoch=2, step=2, steps=4, loss=0.7, seeds_per_s=9.0)
            log.write("epoch", epoch=2, loss=0.5, seconds=4.0, spent=spent, remote_share=None, **losses)
            if rank == 0:
                log.write("eval", epoch=2, split="val", accuracy=0.75)
                log.write("result", epochs=2, test_accuracy=0.7)
    assert sorted(path.name for path in (tmp_path / "tensorboard").iterdir()) == ["all", "rank0", "rank1"]
    run, rank1 = read_back(tmp_path / "tensorboard/all"), read_back(tmp_path / "tensorboard/rank1")
    assert run == {
        "epoch/loss": [(2, 0.5)],
        "epoch/seconds": [(2, 4.0)],
        "step/loss": [(5, 4.0), (6, 3.0), (7, 2.0), (8, 1.0)],
        "eval/val/accuracy": [(2, 0.75)],
    }
    assert rank1 == {
        "step/loss": [(7, 0.7)],
        "step/seeds_per_s": [(7, 9.0)],
        "epoch/seconds": [(2, 4.0)],
        "epoch/spent/sample": [(2, 0.2)],
        "epoch/spent/reduce": [(2, 0.1)],
    }


def test_without_the_package_the_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(SettingsError, match="pip install tensorboard"):
        MetricsLog(tmp_path, 0, tensorboard=True)
