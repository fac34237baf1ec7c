"""TensorBoard events: read back by TensorBoard's own reader; absent where the package is."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.report import Metrics, RunReport, written
from launcher.tensorboard import points

EPOCH = {
    "kind": "epoch",
    "epoch": 2,
    "loss": 0.5,
    "seconds": 4.0,
    "seeds": 100,
    "seeds_per_s": 25.0,
    "remote_bytes": 10,
}
LINES = (
    {"kind": "start", "t": 90.0, "rank": 0},
    {"kind": "step", "t": 101.0, "rank": 0, "epoch": 2, "step": 3, "steps": 4, "loss": 0.7, "lr": 0.01},
    {"kind": "step", "t": 102.0, "rank": 1, "epoch": 2, "step": 4, "steps": 4, "loss": float("nan"), "note": "mine"},
    {**EPOCH, "t": 104.0, "rank": 0, "step_loss": [4.0, 3.0, 2.0, 1.0], "spent": {"sample": 0.2, "reduce": 0.1}},
    {**EPOCH, "t": 104.5, "rank": 1, "spent": {"sample": 0.4, "reduce": 0.3}},
    {"kind": "eval", "t": 105.0, "rank": 0, "epoch": 2, "split": "val", "accuracy": 0.75},
    {"kind": "step", "t": 106.0, "rank": 0, "epoch": None, "step": 1, "loss": 9.0},  # an own script's, of no epoch
    {"kind": "step", "t": 107.0, "rank": 0, "epoch": 3, "step": 1, "steps": 4, "loss": 10**400, "lr": 0.02},
)
Curves = dict[str, dict[str, list[tuple[float, int, float]]]]


def report_in(folder: Path, lines: tuple[Mapping[str, Any], ...] = LINES) -> RunReport:
    file = folder / "logs/node0/metrics-rank0.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunReport("toy", "done", (), None, Metrics(files=(file,)), 1.0, folder)


def read_back(folder: Path) -> Curves:
    """Curves by writer and tag, as (wall time, step, value)."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: Curves = {}
    for writer in sorted(folder.iterdir()):
        events = accumulator.EventAccumulator(str(writer)).Reload()
        tags = events.Tags()["scalars"]
        found[writer.name] = {
            tag: [(event.wall_time, event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
            for tag in tags
        }
    return found


def test_events_hold_steps_epochs_and_scores_with_their_times(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    assert written(report_in(folder)).notes == ()
    curves = read_back(folder / "tensorboard")
    assert sorted(curves) == ["all", "rank0", "rank1"]
    together, rank0 = curves["all"], curves["rank0"]
    assert together["eval/val/accuracy"] == [(105.0, 2, 0.75)]
    assert together["epoch/loss"] == [(104.5, 2, 0.5)]
    assert together["epoch/seeds_per_s"] == [(104.5, 2, 50.0)]  # of both ranks
    assert together["epoch/remote_bytes"] == [(104.5, 2, 20.0)]
    assert together["epoch/spent/sample"] == [(104.5, 2, 0.3)]  # their mean
    assert together["step/loss"] == [(101.0, 5, 4.0), (102.0, 6, 3.0), (103.0, 7, 2.0), (104.0, 8, 1.0)]
    assert rank0["step/loss"] == [(101.0, 7, 0.7)] and rank0["step/lr"] == [(101.0, 7, 0.01), (107.0, 9, 0.02)]
    assert "step/note" not in curves["rank1"] and curves["rank1"]["epoch/spent/reduce"] == [(104.5, 2, 0.3)]


def test_collecting_again_replaces_the_events(tmp_path: Path) -> None:
    for lines in (LINES, LINES[:2]):
        written(report_in(tmp_path / "toy", lines))
    assert len(list((tmp_path / "toy/tensorboard/rank0").iterdir())) == 1
    assert list(read_back(tmp_path / "toy/tensorboard")["rank0"]["step/loss"]) == [(101.0, 7, 0.7)]


def test_without_the_package_there_is_nothing_and_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    report = written(report_in(tmp_path / "toy"))
    assert report.notes == () and (tmp_path / "toy/result.json").exists()
    assert not (tmp_path / "toy/tensorboard").exists()


def test_long_runs_are_thinned_out() -> None:
    losses = {**EPOCH, "t": 1.0, "rank": 0, "step_loss": [0.5] * 50_000}
    steps = [{"kind": "step", "t": 1.0, "rank": 0, "epoch": 1, "step": i, "steps": 9, "loss": 0.5} for i in range(9)]
    told = list(points([losses, *steps], every=3))
    assert [point.step for point in told if point.writer == "rank0" and "step/loss" in point.values] == [2, 5, 8]
    assert 10_000 < len([point for point in told if point.writer == "all"]) < 20_000
