"""Tests of trackers: each point once, also in a resumed run; a tracker that fails or is slow affects nothing else."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.tracking import earlier_files
from tracked_runs import mlflow_run, tensorboard_curves, tensorboard_text, wandb_curves, wandb_run
from trainer.core.train_config import TRACKERS, TrackerOptions
from trainer.track import follow, tensorboard
from trainer.track.start import tracked
from trainer.track.tracker import CLASSES, Job, Place, Point
from waiting import DEADLINE, stretched

CONFIG = {"train": {"lr": 0.1, "epochs": 2}, "cluster": {"nodes": 2}}


def lines(first: int, last: int) -> Iterator[dict[str, Any]]:
    """Yield metrics lines of rank 0 for the epochs ``first`` to ``last``, with two steps each."""
    for epoch in range(first, last + 1):
        for step in range(2):
            yield {"kind": "step", "epoch": epoch, "step": step, "steps": 2, "loss": 1 / epoch, "saved": [1, 0]}
        losses = [1.0 / epoch, 0.5 / epoch]
        yield {"kind": "epoch", "epoch": epoch, "loss": 1 / epoch, "seconds": 2.0, "step_loss": losses, "by_host": {}}
        yield {"kind": "eval", "epoch": epoch, "split": "val", "accuracy": 0.1 * epoch, "metric": "accuracy"}
    yield {"kind": "result", "epochs": last, "test_accuracy": 0.7, "epoch_seconds": [2.0]}


def write_run(run_dir: Path, run_id: str, first: int, last: int, trackers: Mapping[str, Any], patience: float) -> None:
    """Write the files of a run that has trained the epochs ``first`` to ``last``, and has ended."""
    folder = run_dir / "track"
    folder.mkdir(exist_ok=True)
    config = {**CONFIG, "train": {"lr": 0.1, "epochs": last}}
    (folder / "job.json").write_text(json.dumps({"run_id": run_id, "trackers": trackers, "config": config}))
    with (run_dir / "metrics-rank0.jsonl").open("a") as file:
        file.writelines(json.dumps({"t": time.time(), "rank": 0, **line}) + "\n" for line in lines(first, last))
    system = {"t": time.time(), "nodes": {"1": {"cpu_share": 0.5}}, "ranks": {"3": {"device": {"utilization": 0.9}}}}
    (folder / "nodes.json").write_text(json.dumps(system))
    end = {"state": "done", "report": {"seconds": 4.5, "reason": ""}, "patience": patience}
    (folder / "end.json").write_text(json.dumps(end))


def state_of(run_dir: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "track" / f"{name}.json").read_text())
    return found


class Raises:
    def __init__(self, job: Job, options: Mapping[str, Any], known: str) -> None:
        self.place = Place(job.run_id, "http://tracker/run", "")

    def log(self, points: list[Point]) -> None:
        raise ConnectionError("no answer\nfrom the server")


class Sleeps(Raises):
    def log(self, points: list[Point]) -> None:
        time.sleep(30)


def test_trackers_that_fail_or_are_slow_say_so_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tensorboard.FOLDER  # imported before the time that the trackers get
    monkeypatch.setitem(sys.modules, "absent", None)
    more = {"raises": (__name__, "Raises"), "sleeps": (__name__, "Sleeps"), "absent": ("absent", "A")}
    monkeypatch.setattr("trainer.track.tracker.CLASSES", {**CLASSES, **more})
    monkeypatch.setitem(TRACKERS, "absent", TrackerOptions((), "abs"))  # type: ignore[arg-type]
    monkeypatch.setattr(follow, "_AGAIN", 0.01)
    write_run(tmp_path, "r1", 1, 2, dict.fromkeys(("tensorboard", *more)), patience=1.0)
    began = time.monotonic()
    follow.follow(tmp_path)
    assert time.monotonic() - began < stretched(15)
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == [
        "absent: it needs a package: pip install abs (import of absent halted; None in sys.modules)",
        "raises: ConnectionError: no answer from the server",
        "sleeps: it was not ready 1 s after the end of the run, and lacks its last values",
    ]
    assert [state_of(tmp_path, name)["problem"] for name in more] == [
        text.partition(": ")[2] for name in more for text in said if text.startswith(name)
    ]
    assert state_of(tmp_path, "raises")["url"] == "http://tracker/run"

    folder = tmp_path / "track/tensorboard"
    curves = tensorboard_curves(folder)
    assert curves["epoch/loss"] == [(1, 1.0), (2, 0.5)] and curves["epoch/seconds"] == [(1, 2.0), (2, 2.0)]
    assert curves["step/loss"] == [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.5)]
    assert curves["step/loss_of_all_ranks"] == [(1, 1.0), (2, 0.5), (3, 0.5), (4, 0.25)]
    assert curves["eval/val/accuracy"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.2))]
    assert curves["system/node1/cpu_share"] == [(0, 0.5)] and "system/rank3/device/utilization" in curves
    assert len(curves) == 7
    assert '"lr": 0.1' in tensorboard_text(folder, "config")
    report = tensorboard_text(folder, "report").split()
    assert report == "state: done epochs: 2 test_accuracy: 0.7 seconds: 4.5".split()
    assert state_of(tmp_path, "tensorboard")["complete"]


@pytest.mark.slow
def test_a_resumed_run_continues_the_run_of_each_tracker(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow")
    trackers = {"tensorboard": {}, "wandb": {"mode": "offline", "project": "p"}, "mlflow": {"experiment": "e"}}
    earlier, later = tmp_path / "r1", tmp_path / "r2"
    for run_dir, first in ((earlier, 1), (later, 2)):  # epoch 2 is trained again, as after a checkpoint within it
        run_dir.mkdir()
        for file in earlier_files(str(earlier / "checkpoints/last.pt")) if run_dir == later else ():
            (later / file.dest).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file.source, later / file.dest)
            (later / file.dest).with_name(".gnnfleet-digests.json").touch()  # as sending leaves it
        write_run(run_dir, run_dir.name, first, first + 1, trackers, patience=DEADLINE)
        subprocess.run([sys.executable, "-m", "trainer", "track", str(run_dir)], check=True, timeout=DEADLINE)

    epochs = [(k, pytest.approx(1 / k)) for k in (1, 2, 3)]
    steps = [(k, pytest.approx(1 / ((k + 1) // 2))) for k in range(1, 7)]
    states = {name: state_of(later, name) for name in trackers}
    assert all(state["complete"] and state["runs"] == ["r1", "r2"] for state in states.values())

    ids, config, summary, history = wandb_run(later / "track/wandb")
    assert ids == {"r1"} == {states["wandb"]["id"]} and summary["report/state"] == "done"
    assert config["train"] == {"lr": 0.1, "epochs": 3} and config["gnnfleet"]["runs"] == ["r1", "r2"]
    assert summary["report/test_accuracy"] == 0.7
    run, of_mlflow = mlflow_run(later / "track/mlruns", states["mlflow"]["id"])
    assert run.info.status == "FINISHED" and run.data.tags["gnnfleet.run_id"] == "r2"
    assert run.data.params["train.epochs"] == "2" and run.data.tags["gnnfleet.changed.train.epochs"] == "3"
    assert run.data.metrics["report/test_accuracy"] == 0.7 and "seconds: 4.5" in run.data.tags["mlflow.note.content"]
    for curves in (wandb_curves(history), of_mlflow, tensorboard_curves(later / "track/tensorboard")):
        assert curves["epoch/loss"] == epochs and curves["step/loss"] == steps
        assert [at for at, _ in curves["eval/val/accuracy"]] == [1, 2, 3]


def test_without_a_supervisor_each_run_has_a_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GNNFLEET_RUN_ID", raising=False)

    def name_of(run_dir: Path) -> str:
        with tracked(run_dir, {}, {}):
            pass
        return json.loads((run_dir / "track/job.json").read_text())["run_id"]

    exported = tmp_path / "toy-20261127-1a2b"
    assert name_of(exported / "node0") == exported.name
    plain = name_of(tmp_path / "run")
    assert re.fullmatch(r"run-\d{8}-\d{6}", plain) and name_of(tmp_path / "run") == plain
