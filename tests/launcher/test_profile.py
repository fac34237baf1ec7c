"""Tests of how the live view, ``status``, the report and ``gnnfleet profile`` show where time is spent."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.cli.main import run
from launcher.errors import FleetError
from launcher.node.diagnostics.vitals import largest
from launcher.report.html.render import write_report
from launcher.report.metrics import Metrics, read_metrics
from launcher.report.profile import Profile, analyse, profile_lines
from launcher.report.report import print_report
from launcher.run.live_table import RankRow
from metrics_kit import SPENT, lines_of, metrics_file
from operate_kit import LocalRun
from test_live import board_of, shown, step
from test_report import report


def profile_of(folder: Path, *ranks: list[dict[str, Any]]) -> Profile:
    """Return the profile of a run with one rank on each node.

    ranks: the metrics lines of each rank.
    """
    files = [metrics_file(folder / f"node{k}/metrics-rank{k}.jsonl", lines) for k, lines in enumerate(ranks)]
    found = analyse(files).profile
    assert found is not None
    return found


TABLE = """\
time per step: 120 ms, mean of 2 ranks, epochs 2–3:
         sample  remote  gather  forward  backward  reduce
  ms        4.0    12.0     2.0     40.0      60.0     1.0
  share      3%     10%      2%      33%       50%      1%
longest wait for other hosts: node0/rank0, 12 ms of its 120 ms per step (10%)
received from other hosts: 2.0 MB per epoch, predicted 2.0 MB; remote rows: 50% cached, \
0% held from recent batches, 50% requested
"""


def test_the_trainers_analysis_is_read_and_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = profile_of(Path("logs"), lines_of(0), lines_of(1))
    assert "\n".join(profile_lines(found)) + "\n" == TABLE
    output = found.summary
    assert output["spent"] == pytest.approx(SPENT) and sum(output["share"].values()) == pytest.approx(1, abs=0.01)
    assert output["predicted"] == 1_960_000
    assert (output["remote_bytes"], output["hit_rate"], output["most_remote"]["rank"]) == (2_000_000, 0.5, 0)


def test_a_first_epoch_is_profiled_from_its_steps(tmp_path: Path) -> None:
    found = profile_of(tmp_path, [line for line in lines_of(0, epochs=1) if line["kind"] != "epoch"])
    first, *rest = profile_lines(found)
    assert first == "time per step: 9.08 s, mean of 1 rank, epoch 1 so far:"
    assert next(profile_lines(found, ended=True)) == "time per step: 9.08 s, mean of 1 rank, epoch 1:"
    assert not any("MB" in line for line in rest) and found.remote_bytes is None


def test_an_analysis_that_fails_is_a_note_of_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(files=(tmp_path / "gone.jsonl",))
    with pytest.raises(FleetError, match=r"the metrics cannot be read: .*gone.jsonl: No such file"):
        metrics.analysed()
    (tmp_path / "logs/node0").mkdir(parents=True)
    metrics_file(tmp_path / "logs/node0/metrics-rank0.jsonl", lines_of(0))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with_note = report("done", [], tmp_path)
    write_report(with_note)
    assert "the metrics could not be analysed" in with_note.notes[0]
    assert json.loads((tmp_path / "result.json").read_text())["state"] == "done"


def test_the_live_view_shows_the_longest_phase_of_a_step() -> None:
    board = board_of(2, 1)
    assert not any("mostly" in line for line in shown(board))
    board.metric(step(0, 17, spent=SPENT))
    board.state(1, {"state": "training", "ranks": {"1": {**step(1, 17), "most": ["remote", 0.304]}}})
    lines = shown(board)
    assert lines[1].split() == ["node", "host", "rank", "state", "epoch", "step", "seeds/s", "loss", "mostly", "remote",
                                "heard"]  # fmt: skip
    assert "0.4512  backward 50%" in lines[2] and "0.4512    remote 30%" in lines[3]


@pytest.mark.parametrize("spent", [None, {}, [], {"forward": float("nan")}, {"forward": "1"}, {"a": -1.0}, 5])
def test_invalid_phase_times_are_ignored(spent: Any) -> None:
    assert largest(spent) is None
    row = RankRow(0, 0)
    row.update(step(0, spent=spent, most=spent))
    assert row.most == ""


def test_the_report_has_the_profile_and_result_json_its_numbers(tmp_path: Path) -> None:
    files = [metrics_file(tmp_path / f"metrics-rank{rank}.jsonl", lines_of(rank)) for rank in (0, 1)]
    done = report("done", [], tmp_path)
    done = replace(done, metrics=read_metrics(files).analysed())
    console = Console(file=io.StringIO(), width=100)
    print_report(done, console)
    assert isinstance(console.file, io.StringIO)
    assert TABLE.replace("node0/", "") in console.file.getvalue()
    assert set(done.to_json()["metrics"]["profile"]["share"]) == set(SPENT)


@pytest.fixture
def local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRun]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    local_run = LocalRun(tmp_path)
    yield local_run
    local_run.kill()


def test_profile_of_a_collected_run(local_run: LocalRun, capsys: pytest.CaptureFixture[str]) -> None:
    local_run.launched("end")
    for k in (0, 1):
        logs = local_run.folder / "logs" / f"node{k}"
        metrics_file(logs / f"metrics-rank{k}.jsonl", lines_of(k, remote=0.1))
        (logs / "result.json").write_text("{}")
    assert run(["profile", "r1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("time per step: 208 ms, mean of 2 ranks")
    assert run(["profile", "r1", "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert told_json["run_id"] == "r1" and told_json["step_s"] == pytest.approx(0.208)


def test_profile_of_a_live_run_reads_the_nodes(local_run: LocalRun, capsys: pytest.CaptureFixture[str]) -> None:
    local_run.launched("train").start()
    local_run.await_training()
    assert run(["profile", "r1"]) == 1
    assert "no rank has reported timings" in capsys.readouterr().err
    for k, node in enumerate(local_run.nodes):
        metrics_file(node.path / f"metrics-rank{k}.jsonl", lines_of(k))
    assert run(["profile", "r1"]) == 0
    assert "mean of 2 ranks, epochs 2–3" in capsys.readouterr().out
