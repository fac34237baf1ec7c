"""Tests of ``python -m trainer profile``: tables from metrics lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from metrics_kit import lines_of
from test_spent import Batches, one_epoch
from trainer.cli import cli
from trainer.train.metrics import KINDS, LOADING

SPENT = {
    0: (0.004, 0.006, 0.0, 0.0, 0.03, 0.05, 0.06, 0.005, 0.005),
    1: (0.01, 0.05, 0.01, 0.0, 0.031, 0.049, 0.001, 0.005, 0.004),
}
BEHIND = {0: (0.03, 0.02, 0.01), 1: (0.04, 0.18, 0.03)}
TRAFFIC = {"remote_bytes": 250_000_000, "rows": 1_200_000, "remote_rows": 900_000, "cached_rows": 225_000}

EXPECTED = """\
epochs 2 to 3 (the first, which compiles and warms up, left out): 40 steps on 2 ranks
milliseconds of a step
rank    sample   remote   gather   copy   forward   backward   reduce   optimizer   other    step
─────────────────────────────────────────────────────────────────────────────────────────────────
0          4.0      6.0      0.0    0.0      30.0       50.0     60.0         5.0     5.0   160.0
1         10.0     50.0     10.0    0.0      31.0       49.0      1.0         5.0     4.0   160.0
mean       7.0     28.0      5.0    0.0      30.5       49.5     30.5         5.0     4.5   160.0
share       4%      17%       3%     0%       19%        31%      19%          3%      3%

per batch: milliseconds of a sampler thread, rows, MB received
rank   sample   remote   gather     rows   remote   cached   held      MB   MB predicted
────────────────────────────────────────────────────────────────────────────────────────
0        30.0     20.0     10.0   60,000      75%      25%     0%   12.50          10.00
1        40.0    180.0     30.0   60,000      75%      25%     0%   12.50              -
"""


def line(rank: int, epoch: int, kind: str = "epoch") -> dict[str, Any]:
    groups: dict[str, Any] = {
        "spent": dict(zip(KINDS, SPENT[rank], strict=True)),
        "behind": dict(zip(LOADING, BEHIND[rank], strict=True)),
        "traffic": {"batches": 20, **TRAFFIC, "held_rows": 0},
    }
    return {"kind": kind, "rank": rank, "epoch": epoch, **groups}


def write(folder: Path, name: str, *lines: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    (folder / name).write_text("\n".join(texts) + "\n")


def run(*words: str | Path) -> str:
    result = CliRunner().invoke(cli, ["profile", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return "".join(text.rstrip() + "\n" for text in result.output.splitlines())


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    # the first epoch of rank 0 is slow, and the file of rank 1 has invalid lines
    predict = {"kind": "predict", "rank": 0, "steps": 20, "remote_bytes": 200_000_000, "hit_rate": 0.3}
    first = {**line(0, 1), "spent": dict.fromkeys(KINDS, 1.0)}
    write(tmp_path / "logs/node0", "metrics-rank0.jsonl", {"kind": "start"}, predict, first, line(0, 2), line(0, 3))
    torn = '{"kind": "epoch", "epo'
    write(tmp_path / "logs/node1", "metrics-rank1.jsonl", line(1, 1), "[]", line(1, 2), line(1, 3), torn)
    return tmp_path


def test_the_tables_of_a_recorded_run(recorded: Path) -> None:
    shown = run(recorded)
    assert _lines(shown) == _lines(EXPECTED)


def test_epochs_can_be_chosen(recorded: Path) -> None:
    assert run(recorded, "--epochs", "1").startswith("epoch 1: 20 steps on 2 ranks")
    assert run(recorded, "--epochs", "2-9").startswith("epochs 2 to 3: 40 steps on 2 ranks")


WRONG = {
    "the metrics files contain none of the chosen epochs; they contain epochs 1 to 3": ["--epochs", "7"],
    "'x-2' is neither an epoch, such as 3, nor a range of epochs, such as 2-5": ["--epochs", "x-2"],
}


@pytest.mark.parametrize("message", WRONG)
def test_missing_epochs_are_refused(message: str, recorded: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", str(recorded), *WRONG[message]])
    assert message in f"{result.output} {result.exception}"


def test_a_folder_without_lines_is_refused(tmp_path: Path) -> None:
    for lines, message in (
        ([], "has no metrics-rank*.jsonl"),
        ([{"kind": "epoch", "epoch": 1}], "training has not started"),
    ):
        if lines:
            write(tmp_path, "metrics-rank0.jsonl", *lines)
        error = CliRunner().invoke(cli, ["profile", str(tmp_path)]).exception
        assert message in str(error)


def test_a_running_run_is_profiled_by_its_step_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    one_epoch(tmp_path, Batches(load=0.01))
    assert run(tmp_path).startswith("epoch 1: 4 steps on 1 rank\n")


@pytest.mark.parametrize(
    "spoiled",
    [{"spent": None}, {"spent": {"forward": 1.0}}, {"spent": {**lines_of(0)[1]["spent"], "copy": "much"}},
     {"spent": []}, {"epoch": "x"}, {"traffic": None}, {"behind": 1}],
)  # fmt: skip
def test_lines_without_times_are_ignored(spoiled: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, "metrics-rank0.jsonl", *({**line, **spoiled} for line in lines_of(0) if line["kind"] != "predict"))
    assert json.loads(run("--json", tmp_path))["time"] is None


def test_json_has_times_of_ranks_and_traffic_between_hosts(recorded: Path) -> None:
    hosts = {"1": {"remote_bytes": 70, "remote_rows": 7, "cached_rows": 3, "held_rows": 2}}
    again = [{**line(0, epoch), "by_host": hosts} for epoch in (3, 4)]  # a run that was resumed in the same folder
    with (recorded / "logs/node0/metrics-rank0.jsonl").open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in again)
    shown = json.loads(run("--json", recorded))
    assert shown["version"] == 1
    assert shown["time"]["epochs"] == [2, 3, 4] and shown["time"]["whole"]
    assert [(rank["rank"], rank["node"], rank["steps"]) for rank in shown["time"]["ranks"]] == [(0, 0, 60), (1, 1, 40)]
    assert shown["time"]["ranks"][1]["spent"] == dict(zip(KINDS, SPENT[1], strict=True))
    (first, second) = shown["traffic"]
    assert first["by_host"] == [{"node": 1, "remote_bytes": 140, "remote_rows": 14, "cached_rows": 6, "held_rows": 4}]
    assert (first["remote_bytes"], second["rows"], second["by_host"]) == (1_000_000_000, 3_600_000, [])
    file = recorded / "logs/node1/metrics-rank1.jsonl"
    assert json.loads(run("--json", file))["time"]["ranks"][0]["node"] == 1


def test_the_program_starts_without_torch_and_numba() -> None:
    words = "import sys, trainer.cli, trainer.train.profile; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert not {"torch", "numba", "numpy"} & set(done.stdout.split())
