"""Where a run's time goes: in the live view, ``status``, the report, ``gnnfleet profile``; and what would help."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.advice import advice
from launcher.cli import run
from launcher.live.board import RankRow
from launcher.node.vitals import largest
from launcher.profile import KINDS, Profile, profile_lines, read_profile
from launcher.report import print_report, read_metrics
from operate_kit import MadeRun
from test_live import board_of, shown, step
from test_report import report

SPENT = {
    "sample": 0.004, "remote": 0.012, "gather": 0.002, "copy": 0.0, "forward": 0.04, "backward": 0.06, "reduce": 0.001,
    "optimizer": 0.0005, "other": 0.0005,
}  # fmt: skip
OLD = {"step_s": 0.12, "own_s": 0.1, "batch_s": 0.01, "seconds": 1.2, "seeds": 10, "loss": 0.5, "remote_share": 0.3}


def lines_of(rank: int, epochs: int = 3, **spent: float) -> list[dict[str, Any]]:
    """A rank's lines: its prediction, and in each epoch one step line and an epoch line."""
    spent = {**SPENT, **spent}
    traffic = {"batches": 10, "remote_bytes": 1_000_000, "rows": 5000, "remote_rows": 2000, "cached_rows": 1000}
    told = {**OLD, "rank": rank, "spent": spent, "step_s": round(sum(spent.values()), 6), "traffic": traffic}
    told["behind"] = {"sample": 0.02, "remote": 0.01, "gather": 0.03}
    predict = {"kind": "predict", "rank": rank, "t": 0.0, "steps": 10, "hit_rate": 0.5, "cache_rows": 3}
    lines = [{**predict, "remote_bytes": 980_000.0, "remote_bytes_without_cache": 2_000_000.0}]
    for epoch in range(1, epochs + 1):
        slow = {"spent": {**spent, "forward": 9.0}, "step_s": 9.0} if epoch == 1 else {}  # compiles
        lines.append({**told, **slow, "kind": "step", "t": epoch, "epoch": epoch, "step": 4, "steps": 10})
        lines.append({**told, **slow, "kind": "epoch", "t": epoch + 0.5, "epoch": epoch})
    return lines


def profile_of(*lines: list[dict[str, Any]]) -> Profile:
    found = read_profile(line for ranks in lines for line in ranks)
    assert found is not None
    return found


TABLE = """\
where a step's 120 ms go, mean of 2 ranks, epochs 2–3:
         sample  remote  gather  forward  backward  reduce
  ms        4.0    12.0     2.0     40.0      60.0     1.0
  share      3%     10%      2%      33%       50%      1%
longest wait for other hosts: node0/rank0, 12 ms of its 120 ms a step (10%)
from other hosts: 2.0 MB an epoch, 2.0 MB predicted (4.0 MB without the cache); of the rows that others \
own 50% were cached, 0% held from the last batches, 50% asked for
"""


def test_kinds_and_shares_are_means_over_ranks_without_the_first_epoch() -> None:
    found = profile_of(lines_of(0), lines_of(1))
    assert "\n".join(profile_lines(found, {0: 0, 1: 1})) + "\n" == TABLE
    told = found.to_json()
    assert told["spent"] == pytest.approx(SPENT) and sum(told["share"].values()) == pytest.approx(1, abs=0.01)
    assert told["predicted"] == {"remote_bytes": 1_960_000, "remote_bytes_without_cache": 4_000_000}
    assert (told["remote_bytes"], told["hit_rate"], told["most_remote"]["rank"]) == (2_000_000, 0.5, 0)


def test_in_the_first_epoch_its_steps_count() -> None:
    lines = [line for line in lines_of(0, epochs=1) if line["kind"] != "epoch"]
    found = profile_of(lines)
    first, *rest = profile_lines(found, {})
    assert first == "where a step's 9 s go, mean of 1 rank, epoch 1 so far:"
    assert not any("MB" in line for line in rest) and found.to_json()["remote_bytes"] is None


@pytest.mark.parametrize(
    "spoiled",
    [{"spent": None}, {"spent": {"forward": 1.0}}, {"spent": {**SPENT, "copy": "much"}}, {"spent": []}, {"epoch": "x"}],
)
def test_lines_of_older_versions_and_odd_ones_tell_nothing(spoiled: dict[str, Any]) -> None:
    assert read_profile({**line, **spoiled} for line in lines_of(0) if line["kind"] != "predict") is None


SLOW_HOST = [lines_of(0, reduce=0.1), lines_of(1, forward=0.14)]
CASES: dict[str, tuple[list[list[dict[str, Any]]], str, str]] = {
    "edges elsewhere": (
        [lines_of(0, remote=0.1), lines_of(1)],
        "partitioned",
        "48% of a step on node0/rank0 (100 ms of 208 ms) is waiting for other hosts: data.topology: "
        "replicated (edges of all "
        "parts on each host), a larger data.cache (it had 50% of the rows that others own), run.wire_rows: float16 or "
        "int8, a larger train.prefetch",
    ),
    "rows elsewhere": (
        [lines_of(0), lines_of(1, remote=0.1)],
        "replicated",
        "48% of a step on node1/rank1 (100 ms of 208 ms) is waiting for other hosts: a larger data.cache (it "
        "had 50% of the rows "
        "that others own), run.wire_rows: float16 or int8, a larger train.prefetch",
    ),
    "too few threads": (
        [lines_of(0, sample=0.05, forward=0.01, backward=0.01)],
        "",
        "60% of a step on node0/rank0 (52 ms of 86 ms) is waiting for batches, most of it sampling: a batch "
        "takes a sampler "
        "thread 60 ms, the rest of a step 22 ms, so train.sampler_threads: 3 keeps up where there are cores for them",
    ),
    "slow gathering": (
        [lines_of(0, gather=0.05)],
        "",
        "32% of a step on node0/rank0 (54 ms of 168 ms) is waiting for batches, most of it gathering rows: more "
        "train.sampler_threads, a larger train.prefetch, or cores that are not shared",
    ),
    "an unequal host": (
        SLOW_HOST,
        "",
        "46% of a step on node0/rank0 (100 ms of 219 ms) is waiting for other ranks: the hosts, or their work, are "
        "unequal, node1/rank1 takes 219 ms of its own for a step and this one 119 ms",
    ),
    "a slow line": (
        [lines_of(0, reduce=0.1), lines_of(1, reduce=0.1)],
        "",
        "46% of a step on node0/rank0 (100 ms of 219 ms) is waiting for other ranks, though none takes much "
        "longer for its "
        "own work than its 119 ms: a slow line, or steps too short; a larger train.batch_size has fewer of them",
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
def test_what_would_help(name: str) -> None:
    lines, topology, first = CASES[name]
    assert advice(profile_of(*lines), {0: 0, 1: 1}, topology)[0] == first


def test_a_prediction_that_was_off_is_told() -> None:
    lines = [{**line, "remote_bytes": 500_000.0} if line["kind"] == "predict" else line for line in lines_of(0)]
    assert "1.0 MB an epoch came from other hosts, 500.0 kB were predicted" in advice(profile_of(lines), {})


def test_what_is_held_over_epochs_explains_less_than_predicted() -> None:
    traffic = {"batches": 2, "remote_bytes": 3600, "rows": 500, "remote_rows": 200, "cached_rows": 25, "held_rows": 163}
    lines = [{**line, "traffic": traffic} if "traffic" in line else line for line in lines_of(0)]
    found = profile_of(lines)
    (told,) = [line for line in profile_lines(found, {}) if "predicted" in line]
    assert told.endswith("of the rows that others own 12% were cached, 82% held from the last batches, 6% asked for")
    (line,) = [line for line in advice(found, {}) if "predicted" in line]
    assert line.startswith("3.6 kB an epoch came from other hosts, 980.0 kB were predicted of an epoch that begins")


def test_waits_are_told_of_the_ranks_that_the_bars_show() -> None:
    lines = [
        lines_of(0, reduce=0.18),
        *(lines_of(rank, forward=0.1, remote=0.001) for rank in (1, 2, 3)),
    ]  # three are slow alike
    told = advice(profile_of(*lines), {})
    assert "of 299 ms) is waiting for other ranks: the hosts, or their work, are unequal" in told[0]
    assert "takes 168 ms of its own for a step and this one 119 ms" in told[0]
    assert told[1].startswith("95% of a step on rank1 (160 ms of 169 ms) is the model's own work")


@pytest.mark.parametrize("name", CASES)
def test_an_own_command_is_not_told_of_settings_that_it_does_not_read(name: str) -> None:
    lines, topology, _ = CASES[name]
    assert not any("train." in line or "data.cache" in line for line in advice(profile_of(*lines), {}, own=True))


def test_the_live_view_tells_what_takes_most_of_a_step() -> None:
    board = board_of(2, 1)
    assert not any("mostly" in line for line in shown(board))
    board.metric(step(0, 17, spent=SPENT))
    board.state(1, {"state": "training", "ranks": {"1": {**step(1, 17), "most": ["remote", 0.304]}}})
    lines = shown(board)
    assert lines[1].split() == ["node", "host", "rank", "state", "epoch", "step", "seeds/s", "loss", "mostly", "remote",
                                "heard"]  # fmt: skip
    assert "0.4512  backward 50%" in lines[2] and "0.4512    remote 30%" in lines[3]


@pytest.mark.parametrize("spent", [None, {}, [], {"forward": float("nan")}, {"forward": "1"}, {"a": -1.0}, 5])
def test_odd_shares_are_passed_over(spent: Any) -> None:
    assert largest(spent) is None
    row = RankRow(0, 0)
    row.take(step(0, spent=spent, most=spent))
    assert row.most == ""


def metrics_file(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_report_has_the_table_and_result_json_the_figures(tmp_path: Path) -> None:
    files = [metrics_file(tmp_path / f"metrics-rank{rank}.jsonl", lines_of(rank)) for rank in (0, 1)]
    done = report("done", [], tmp_path)
    done = done.__class__(**{**vars(done), "metrics": read_metrics(files)})
    console = Console(file=io.StringIO(), width=100)
    print_report(done, console)
    assert isinstance(console.file, io.StringIO)
    assert TABLE.replace("node0/", "") in console.file.getvalue()
    assert set(done.to_json()["metrics"]["profile"]["share"]) == set(KINDS)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeRun]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = MadeRun(tmp_path)
    yield made
    made.kill()


def test_profile_of_a_run_that_was_collected(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.launched("end")
    for k in (0, 1):
        logs = made.folder / "logs" / f"node{k}"
        metrics_file(logs / f"metrics-rank{k}.jsonl", lines_of(k, remote=0.1))
        (logs / "result.json").write_text("{}")
    assert run(["profile", "r1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("where a step's 208 ms go, mean of 2 ranks") and "\n- 48% of a step on " in told
    assert run(["profile", "r1", "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert told_json["run_id"] == "r1" and told_json["advice"][0].startswith("48% of a step")


def test_profile_of_a_run_that_goes_on_asks_the_nodes(made: MadeRun, capsys: pytest.CaptureFixture[str]) -> None:
    made.launched("train").start()
    made.await_training()
    assert run(["profile", "r1"]) == 1
    assert "no rank has told where its time goes" in capsys.readouterr().err
    for k, node in enumerate(made.nodes):
        metrics_file(node.path / f"metrics-rank{k}.jsonl", lines_of(k))
    assert run(["profile", "r1"]) == 0
    assert "mean of 2 ranks, epochs 2–3" in capsys.readouterr().out
