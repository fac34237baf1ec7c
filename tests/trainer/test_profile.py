"""``python -m trainer profile``: the table and the advice from metrics lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from test_spent import Batches, one_epoch
from trainer.cli import cli
from trainer.train.advice import advice, keeping_up
from trainer.train.metrics import KINDS, LOADING
from trainer.train.recorded import RankRecord, Record

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

behind it, per batch: milliseconds of a sampler thread, rows, MB received
rank   sample   remote   gather     rows   remote   cached   held      MB   MB predicted
────────────────────────────────────────────────────────────────────────────────────────
0        30.0     20.0     10.0   60,000      75%      25%     0%   12.50          10.00
1        40.0    180.0     30.0   60,000      75%      25%     0%   12.50              -

- waiting for other ranks is 38% of a step on rank 0 (60 ms); rank 1 has most work of its own, 159 ms a step against \
100 ms of rank 0, the difference mostly in remote
- remote wait is 31% of a step on rank 1 (50 ms): a batch brings 12.5 MB from other hosts, who own 75% of its 60,000 \
rows; of those 25% were cached (data.cache), 0% held from the last batches; a batch takes a sampler thread 250 ms \
(sampling 40 ms, other hosts 180 ms, gathering 30 ms), the rest of a step 90 ms: 3 threads and as many \
batches ahead keep up (sampler_threads, prefetch)
- waiting for sampling and gathering is 12% of a step on rank 1 (20 ms)
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
    """Two ranks as a launch collects them; the first epoch took ten times as long."""
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
    "none of these epochs is recorded; there are 1 to 3": ["--epochs", "7"],
    "'x-2' is no epoch, 3, and no range of them, 2-5": ["--epochs", "x-2"],
}


@pytest.mark.parametrize("message", WRONG)
def test_epochs_that_are_not_there_are_refused(message: str, recorded: Path) -> None:
    result = CliRunner().invoke(cli, ["profile", str(recorded), *WRONG[message]])
    assert message in f"{result.output} {result.exception}"


def test_a_folder_without_lines_is_refused(tmp_path: Path) -> None:
    for lines, message in ([], "has no metrics-rank*.jsonl"), ([{"kind": "epoch", "epoch": 1}], "nothing was trained"):
        if lines:
            write(tmp_path, "metrics-rank0.jsonl", *lines)
        error = CliRunner().invoke(cli, ["profile", str(tmp_path)]).exception
        assert message in str(error)


def test_a_run_under_way_is_profiled_by_its_step_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.train.metrics.STEP_INTERVAL", 0.0)
    one_epoch(tmp_path, Batches(load=0.01))
    assert run(tmp_path).startswith("epoch 1: 4 steps on 1 rank\n")


def rank(number: int = 0, behind: float = 0.0, **spent: float) -> RankRecord:
    traffic = dict.fromkeys((*TRAFFIC, "held_rows"), 0.0)
    seconds = dict.fromkeys(KINDS, 0.0) | spent
    return RankRecord(number, 10, seconds, dict.fromkeys(LOADING, 0.0) | {"sample": behind}, traffic)


SAID: dict[str, tuple[RankRecord, ...]] = {
    "waiting for sampling and gathering is 50% of a step on rank 0 (100 ms); a batch takes a sampler thread 250 ms"
    " (sampling 250 ms, other hosts 0 ms, gathering 0 ms), the rest of a step 100 ms: 3 threads with a core each keep"
    " up (sampler_threads, prefetch)": (rank(behind=0.25, sample=0.1, forward=0.1),),
    "forward and backward are 95% of a step (190 ms), waiting for batches 5%: what is left to gain is in the model"
    " (hidden, fanouts, precision) and in more processes": (rank(forward=0.1, backward=0.09, sample=0.01),),
    "waiting for other ranks is 50% of a step on rank 0 (100 ms); the ranks' own work is even, so it is the line: a"
    " larger batch_size reduces less often": (rank(forward=0.1, reduce=0.1), rank(1, forward=0.1, reduce=0.1)),
    "copy (batches to the device) is 50% of a step on rank 0 (1 s)": (rank(copy=1.0, forward=1.0),),
}


@pytest.mark.parametrize("text", SAID)
def test_advice(text: str) -> None:
    assert text in advice(Record(Path(), (1,), False, SAID[text]))


def test_threads_that_keep_up_are_not_spoken_of() -> None:
    assert keeping_up(rank(behind=0.25, sample=0.01, forward=0.2)) is None  # hidden
    assert keeping_up(rank(behind=0.05, sample=0.1, forward=0.1)) is None  # not for want of threads
