"""Tests of ``gnnfleet compare`` on run folders with the files of real runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run
from launcher.config.loader import to_yaml
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.report.compare import Comparison, compare, figures_of
from launcher.report.launch_file import LaunchFile
from launcher.report.run_folder import read_folder
from metrics_kit import lines_of
from trainer.core.train_config import TrainConfig

CONFIG = ClusterConfig(
    nodes=(NodeConfig("gnn1"), NodeConfig("gnn2")),
    data=DataConfig("synthetic", options={"num_nodes": 1000}, folder="/parts"),
)
VERSIONS = {"python": "3.11.7", "torch": "2.13.0"}


def make_run(
    top: Path,
    run_id: str,
    config: ClusterConfig = CONFIG,
    *,
    losses: tuple[float, ...] = (0.9, 0.5),
    state: str = "done",
    versions: dict[str, str] | None = None,
    **spent: float,
) -> Path:
    """Write the run folder of a run with one rank, and with one epoch for each of ``losses``.

    versions: versions of packages, by name. spent: seconds of a step, by kind of work.
    """
    folder = top / "runs" / run_id
    replace(LaunchFile.mine(run_id, "toy", config="cluster.yml").at("end"), started=1.0).write(folder)
    (folder / "config.yml").write_text(to_yaml(config))
    result = {"run_id": run_id, "state": state, "seconds": 75.0, "nodes": [], "notes": [], "first_failure": None}
    (folder / "result.json").write_text(json.dumps(result))
    event = {"t": 1.0, "kind": "versions", "nodes": [0, 1], "versions": versions or VERSIONS}
    (folder / "events.jsonl").write_text(json.dumps(event) + '\n{"cut')
    file = folder / "logs/node0/metrics-rank0.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in metrics(losses, **spent)))
    return folder


def metrics(losses: tuple[float, ...], **spent: float) -> list[dict[str, Any]]:
    lines = [line for line in lines_of(0, len(losses), **spent) if line["kind"] != "step"]
    for line in lines:
        line |= {"loss": losses[line["epoch"] - 1], "remote_bytes": 10**6} if line["kind"] == "epoch" else {}
    evals = [
        {"kind": "eval", "t": epoch + 0.7, "rank": 0, "epoch": epoch, "split": "val", "accuracy": 1 - loss}
        for epoch, loss in enumerate(losses, start=1)
    ]
    return [*lines, *evals, {"kind": "result", "t": 99.0, "rank": 0, "test_accuracy": 1 - losses[-1]}]


def compared(*folders: Path) -> Comparison:
    return compare([figures_of(read_folder(folder)) for folder in folders])


def values(comparison: Comparison, section: str) -> dict[str, tuple[Any, ...]]:
    return {row.title: row.values for row in comparison.rows if row.section == section}


def best(comparison: Comparison) -> dict[str, tuple[int, ...]]:
    return {f"{row.section} {row.title}": row.best for row in comparison.rows if row.best}


def with_train(**settings: Any) -> ClusterConfig:
    return replace(CONFIG, train=TrainConfig(**settings))


def test_only_differing_keys_are_shown_and_the_best_value_is_marked(tmp_path: Path) -> None:
    first = make_run(tmp_path, "a")
    second = make_run(tmp_path, "b", with_train(lr=0.1, fanouts=(5, 5)), losses=(0.8, 0.6, 0.4), forward=0.02)
    comparison = compared(first, second)
    assert values(comparison, "config") == {"train.lr": (0.004, 0.1), "train.fanouts": ([15, 10, 5], [5, 5])}
    assert values(comparison, "loss") == {"1": (0.9, 0.8), "2": (0.5, 0.6), "3": (None, 0.4)}
    assert values(comparison, "speed")["from other hosts, an epoch"] == (1e6, 1e6)
    assert best(comparison) == {
        "results test accuracy": (1,), "results last loss": (1,), "step a step": (1,),
        "loss 1": (1,), "loss 2": (0,), "metric 1": (1,), "metric 2": (0,),
    }  # fmt: skip
    assert comparison.notes == ()


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            replace(CONFIG, data=replace(CONFIG.data, options={"num_nodes": 9})),
            "different graphs (data.options.num_nodes)",
        ),
        (
            replace(CONFIG, data=DataConfig("file", "/g.pt", folder="/parts")),
            "different graphs (data.dataset, data.source, data.opt",
        ),
        (with_train(seed=7), "different seeds (train.seed 0, 7): small differences may be chance"),
        (replace(CONFIG, nodes=(NodeConfig("gnn1", devices=(0, 1)), NodeConfig("gnn2"), NodeConfig("gnn3"))), ""),
    ],
    ids=["graph", "dataset", "seed", "nodes"],
)
def test_notes_name_settings_that_make_runs_incomparable(config: ClusterConfig, note: str, tmp_path: Path) -> None:
    comparison = compared(make_run(tmp_path, "a"), make_run(tmp_path, "b", config, losses=(0.8, 0.4)))
    assert "".join(comparison.notes).startswith(note) and len(comparison.notes) == bool(note)
    # losses on different graphs are not ranked
    assert ("results last loss" in best(comparison)) == ("graph" not in note)


def test_no_credentials_are_shown(tmp_path: Path) -> None:
    node = NodeConfig("gnn1", env={"PGPASSWORD": "hush", "LR": "3"})
    told = replace(CONFIG, nodes=(node, NodeConfig("gnn2")), run=RunConfig(notify=("https://hooks/hush",)))
    shown = values(compared(make_run(tmp_path, "a"), make_run(tmp_path, "b", told)), "config")
    assert shown["nodes.*.env"][1] == [{"PGPASSWORD": "***", "LR": "3"}, {}] and shown["run.notify"] == ([], ["***"])


def test_a_resumed_run_has_its_earlier_epochs(tmp_path: Path) -> None:
    plain = make_run(tmp_path, "plain", losses=(0.9, 0.5, 0.4))
    first = make_run(tmp_path, "first", losses=(0.9, 0.5, 0.45))  # its third epoch is made again
    second = make_run(tmp_path, "second", losses=(0.9, 0.5, 0.4, 0.3))
    file = second / "logs/node0/metrics-rank0.jsonl"
    lines = [line for line in file.read_text().splitlines() if json.loads(line).get("epoch") not in (1, 2)]
    file.write_text("".join(f"{line}\n" for line in lines))
    replace(LaunchFile.mine("second", "toy", config="cluster.yml").at("end"), resumed_from="first").write(second)
    found = compared(plain, second)
    assert values(found, "loss") == {"1": (0.9, 0.9), "2": (0.5, 0.5), "3": (0.4, 0.4), "4": (None, 0.3)}
    assert values(found, "metric")["1"] == pytest.approx((0.1, 0.1))
    (first / "launch.json").write_text("[")  # a damaged run must not prevent the comparison of later ones
    assert values(compared(plain, second), "loss")["1"] == (0.9, None)
    shutil.rmtree(first)
    assert values(compared(plain, second), "loss")["1"] == (0.9, None)


def test_trainer_settings_are_left_out_for_own_commands(tmp_path: Path) -> None:
    bundled, ours = (
        make_run(tmp_path, "a"),
        [make_run(tmp_path, "b", with_train(lr=0.1)), make_run(tmp_path, "c", with_train(seed=7))],
    )
    for folder in ours:
        replace(LaunchFile.read(folder), own_command=("python", "own.py")).write(folder)
    assert values(compared(*ours), "config") == {} and compared(*ours).notes == ()
    assert values(compared(bundled, *ours), "config") == {}
    assert values(compared(bundled, *ours), "run")["command"] == ("the bundled trainer", *["python own.py"] * 2)


def test_a_note_reports_different_parts_under_the_same_settings(tmp_path: Path) -> None:
    first, second = (figures_of(read_folder(make_run(tmp_path, run_id))) for run_id in "ab")
    comparison = compare([replace(first, parts="4f00"), replace(second, parts="77aa")])
    assert [note[:38] for note in comparison.notes] == ["the same settings but different parts:"]
    recut = replace(second, parts="77aa", config={**second.config, "data.num_parts": 4})
    assert compare([replace(first, parts="4f00"), recut]).notes == ()


def test_equal_nodes_are_shown_once(tmp_path: Path) -> None:
    more = replace(CONFIG, nodes=tuple(NodeConfig(f"gnn{k}", devices=(0,) if k else ()) for k in range(3)))
    shown = values(compared(make_run(tmp_path, "a"), make_run(tmp_path, "b", more)), "config")
    assert shown == {"nodes.*.host": ("gnn[1-2]", "gnn[0-2]"), "nodes.*.devices": ([], [[], [0], [0]])}


TABLE = """\
note: b: only one epoch, so its times include compilation; those of longer runs do not
note: b is not done (failed): its figures cover only what was collected
                              a         b
state                         done      failed
took                          75 s      75 s

config, where it differs
  train.lr                    0.004     0.1

results
  test accuracy               0.5000 *  0.3000
  last loss                   0.5000 *  0.7000

speed
  an epoch                    1.20 s    1.20 s
  seeds/s                     8         8
  from other hosts, an epoch  1.0 MB    1.0 MB
  remote rows cached          50%       50%
  remote rows held            0%        0%

where a step's time goes
  a step                      120 ms *  9.08 s
  sample                      4 ms      4 ms
  remote                      12 ms     12 ms
  gather                      2 ms      2 ms
  forward                     40 ms     9 s
  backward                    60 ms     60 ms
  reduce                      1 ms      1 ms

loss by epoch
  1                           0.9000    0.7000 *
  2                           0.5000    –

val accuracy by epoch
  1                           0.1000    0.3000 *
  2                           0.5000    –

versions, where they differ
  torch                       2.13.0    2.14.0
the same versions of: python 3.11.7
* best
"""


def test_the_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "a")
    other = {**VERSIONS, "torch": "2.14.0"}
    make_run(tmp_path, "b", with_train(lr=0.1), losses=(0.7,), state="failed", versions=other, forward=0.18)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["compare", "a", "b"]) == 0
    assert "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.splitlines()) == TABLE
    assert run(["compare", "a", "b", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [one["run_id"] for one in printed["runs"]] == ["a", "b"]
    assert {"section": "config", "title": "train.lr", "values": [0.004, 0.1], "best": []} in printed["rows"]


@pytest.mark.parametrize("words", [["a"], ["a", "a"], ["a", "runs/a"]], ids=" ".join)
def test_one_run_is_not_compared_with_itself(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, "a")
    monkeypatch.chdir(tmp_path)
    assert run(["compare", *words]) == 2
    assert "give two or more different runs; `gnnfleet runs` lists those known here" in capsys.readouterr().err
