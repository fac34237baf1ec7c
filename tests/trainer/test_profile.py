"""Tests of ``python -m trainer profile``: tables and advice from metrics lines."""

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
from trainer.train.profile import advice, thread_advice
from trainer.train.run_times import RankLines, RankTimes, RunTimes, record_of

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

- 38% of a step on node0/rank0 (60 ms of 160 ms) is waiting for other ranks: the hosts or their work are unequal, \
a step without this wait takes 159 ms on node1/rank1 and 100 ms on node0/rank0, and most of the difference is remote
- 31% of a step on node1/rank1 (50 ms of 160 ms) is waiting for other hosts: a larger data.cache (it had 25% of the \
rows of other hosts), run.wire_rows: float16 or int8, a larger train.prefetch
- 12% of a step on node1/rank1 (20 ms of 160 ms) is waiting for batches, mostly sampling: a sampler thread needs \
250 ms for a batch (sampling 40 ms, other hosts 180 ms, gathering 30 ms), the rest of a step 90 ms: 3 threads and as \
many batches ahead keep up (train.sampler_threads, train.prefetch)
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


def test_the_tables_and_the_advice_of_a_recorded_run(recorded: Path) -> None:
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


def recorded_of(*ranks: list[dict[str, Any]]) -> RunTimes:
    """Return the times of a run with one rank per node.

    ranks: the metrics lines of each rank.
    """
    found = {}
    for k, lines in enumerate(ranks):
        found[k] = RankLines(k, node=k)
        for line in lines:
            found[k].add(line)
    record = record_of(found)
    assert record is not None
    return record


SLOW_HOST = [lines_of(0, reduce=0.1), lines_of(1, forward=0.14)]
CASES: dict[str, tuple[list[list[dict[str, Any]]], str, str]] = {
    "edges elsewhere": (
        [lines_of(0, remote=0.1), lines_of(1)],
        "partitioned",
        "48% of a step on node0/rank0 (100 ms of 208 ms) is waiting for other hosts: data.topology: "
        "replicated (edges of all "
        "parts on each host), a larger data.cache (it had 50% of the rows of other hosts), run.wire_rows: float16 or "
        "int8, a larger train.prefetch",
    ),
    "rows elsewhere": (
        [lines_of(0), lines_of(1, remote=0.1)],
        "replicated",
        "48% of a step on node1/rank1 (100 ms of 208 ms) is waiting for other hosts: a larger data.cache (it "
        "had 50% of the rows "
        "of other hosts), run.wire_rows: float16 or int8, a larger train.prefetch",
    ),
    "too few threads": (
        [lines_of(0, sample=0.05, forward=0.01, backward=0.01)],
        "",
        "60% of a step on node0/rank0 (52 ms of 86 ms) is waiting for batches, mostly sampling: a sampler thread "
        "needs 60 ms for a batch (sampling 20 ms, other hosts 10 ms, gathering 30 ms), the rest of a step 22 ms: 3 "
        "threads with a core each keep up (train.sampler_threads, train.prefetch)",
    ),
    "slow gathering": (
        [lines_of(0, gather=0.05)],
        "",
        "32% of a step on node0/rank0 (54 ms of 168 ms) is waiting for batches, mostly gathering rows: more "
        "train.sampler_threads, a larger train.prefetch, or cores that no other process uses",
    ),
    "an unequal host": (
        SLOW_HOST,
        "",
        "46% of a step on node0/rank0 (100 ms of 219 ms) is waiting for other ranks: the hosts or their work are "
        "unequal, a step without this wait takes 219 ms on node1/rank1 and 119 ms on node0/rank0, and most of the "
        "difference is forward",
    ),
    "a slow network": (
        [lines_of(0, reduce=0.1), lines_of(1, reduce=0.1)],
        "",
        "46% of a step on node0/rank0 (100 ms of 219 ms) is waiting for other ranks, though no rank needs much "
        "longer for its own work than 119 ms: the network is slow, or the steps are too short; a larger "
        "train.batch_size makes fewer steps",
    ),
    "copies": (
        [lines_of(0, copy=0.08)],
        "",
        "40% of a step on node0/rank0 (80 ms of 200 ms) is copying batches to the device: pinned memory and "
        "a copy stream (the bundled trainer has "
        "both), fewer columns, or float16 rows",
    ),
    "the model": (
        [lines_of(0, remote=0.001)],
        "",
        "92% of a step on node0/rank0 (100 ms of 109 ms) is the model's own work: more processes, fewer "
        "train.hidden or train.fanouts, or "
        "train.precision: bfloat16 where the processor has it",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice(name: str) -> None:
    lines, topology, first = CASES[name]
    assert advice(recorded_of(*lines), topology)[0] == first


def test_a_wrong_prediction_is_reported() -> None:
    lines = [{**line, "remote_bytes": 500_000.0} if line["kind"] == "predict" else line for line in lines_of(0)]
    assert "1.0 MB an epoch came from other hosts; 500.0 kB were predicted" in advice(recorded_of(lines))


def test_rows_held_over_epochs_explain_less_traffic_than_predicted() -> None:
    traffic = {"batches": 2, "remote_bytes": 3600, "rows": 500, "remote_rows": 200, "cached_rows": 25, "held_rows": 163}
    lines = [{**line, "traffic": traffic} if "traffic" in line else line for line in lines_of(0)]
    (line,) = [line for line in advice(recorded_of(lines)) if "predicted" in line]
    assert line.startswith("3.6 kB an epoch came from other hosts; 980.0 kB were predicted for an epoch that")


def test_waits_name_the_waiting_rank_and_the_slow_rank() -> None:
    slow = [lines_of(rank, forward=0.1, remote=0.001) for rank in (1, 2, 3)]
    lines = advice(recorded_of(lines_of(0, reduce=0.18), *slow))
    assert "of 299 ms) is waiting for other ranks: the hosts or their work are unequal" in lines[0]
    assert "takes 168 ms on node1/rank1 and 119 ms on node0/rank0, and most of the difference is forward" in lines[0]
    assert lines[1].startswith("95% of a step on node1/rank1 (160 ms of 169 ms) is the model's own work")


@pytest.mark.parametrize("name", CASES)
def test_advice_for_a_user_script_names_only_settings_it_reads(name: str) -> None:
    lines, topology, _ = CASES[name]
    assert not any("train." in line or "data.cache" in line for line in advice(recorded_of(*lines), script=True))


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
    shown = json.loads(run("--json", "--topology", "partitioned", recorded))
    assert shown["version"] == 1
    assert shown["time"]["epochs"] == [2, 3, 4] and shown["time"]["whole"]
    assert [(rank["rank"], rank["node"], rank["steps"]) for rank in shown["time"]["ranks"]] == [(0, 0, 60), (1, 1, 40)]
    assert shown["time"]["ranks"][1]["spent"] == dict(zip(KINDS, SPENT[1], strict=True))
    assert shown["time"]["advice"][1].count("data.topology: replicated") == 1
    (first, second) = shown["traffic"]
    assert first["by_host"] == [{"node": 1, "remote_bytes": 140, "remote_rows": 14, "cached_rows": 6, "held_rows": 4}]
    assert (first["remote_bytes"], second["rows"], second["by_host"]) == (1_000_000_000, 3_600_000, [])
    file = recorded / "logs/node1/metrics-rank1.jsonl"
    assert json.loads(run("--json", file))["time"]["ranks"][0]["node"] == 1


def test_the_program_starts_without_torch_and_numba() -> None:
    words = "import sys, trainer.cli, trainer.train.profile; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert not {"torch", "numba", "numpy"} & set(done.stdout.split())


def rank(number: int = 0, behind: float = 0.0, **spent: float) -> RankTimes:
    traffic = dict.fromkeys((*TRAFFIC, "held_rows"), 0.0)
    seconds = dict.fromkeys(KINDS, 0.0) | spent
    return RankTimes(number, 10, seconds, dict.fromkeys(LOADING, 0.0) | {"sample": behind}, traffic)


def test_no_advice_for_threads_that_keep_up() -> None:
    assert thread_advice(rank(behind=0.25, sample=0.01, forward=0.2)) is None  # hidden behind computation
    assert thread_advice(rank(behind=0.05, sample=0.1, forward=0.1)) is None  # not caused by too few threads
