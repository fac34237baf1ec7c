"""Tests of how a supervisor reads the metrics files of the ranks on its node."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.node.diagnostics import vitals as vitals_module
from launcher.node.diagnostics.vitals import Vitals
from launcher.node.json_records import MEMBER_REPORT
from launcher.report.events import nan_words


def write(folder: Path, rank: int, *lines: Mapping[str, Any] | str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    with (folder / f"metrics-rank{rank}.jsonl").open("a") as file:
        file.writelines(texts)


def step(number: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    line = {"t": 100.0 + number, "kind": "step", "rank": 0, "epoch": 2, "step": number, "steps": 40, "loss": loss}
    return {**line, "seeds": 8, "seeds_per_s": 99.5, "wait_s": 1.0, "own_s": 0.2, "step_s": 0.3, "batch_s": 0.1, **more}


def test_the_last_line_of_each_rank_is_read(tmp_path: Path) -> None:
    vitals = Vitals(str(tmp_path), [2, 3])
    assert vitals.look(50.0) == [] and vitals.ranks == {}
    write(
        tmp_path,
        3,
        {"t": 1.0, "kind": "start"},
        step(4),
        step(5, 0.25, remote_share=0.5, spent={"forward": 0.03, "sample": 0.07}),
    )
    vitals.look(51.0)
    assert vitals.ranks == {
        3: {
            "epoch": 2, "step": 5, "steps": 40, "loss": 0.25, "seeds_per_s": 99.5, "remote_share": 0.5, "own_s": 0.2,
            "step_s": 0.3, "batch_s": 0.1, "kind": "step", "t": 105.0, "at": None, "ended": False, "done": False,
            "most": ["sample", 0.7], "idle_s": 0,
        }
    }  # fmt: skip
    write(tmp_path, 3, {"t": 110.0, "kind": "eval", "epoch": 2, "loss": 9.9, "accuracy": 0.5})
    vitals.look(52.0, ended={3})
    assert [vitals.ranks[3][name] for name in ("kind", "loss", "step", "ended")] == ["eval", 0.25, 5, True]


def test_the_use_of_a_gpu_is_read(tmp_path: Path) -> None:
    vitals = Vitals(str(tmp_path), [0])
    device = {"used_bytes": 12, "total_bytes": 80, "utilization": 0.5, "step_s": "long", "more": 1}
    write(tmp_path, 0, step(4), step(5, device=device), step(6, device=[]))
    vitals.look(0.0)
    assert vitals.ranks[0]["device"] == {"used_bytes": 12, "total_bytes": 80, "utilization": 0.5}


def test_a_line_counts_once_it_is_complete(tmp_path: Path) -> None:
    vitals = Vitals(str(tmp_path), [0])
    whole = json.dumps(step(7)) + "\n"
    write(tmp_path, 0, step(6), whole[:30])
    vitals.look(0.0)
    assert vitals.ranks[0]["step"] == 6
    write(tmp_path, 0, whole[30:])
    vitals.look(0.0)
    assert vitals.ranks[0]["step"] == 7


def test_damaged_lines_are_ignored(tmp_path: Path) -> None:
    odd = ['{"kind": "st\n', "\0\0\xff\n", "7\n", "\n", '{"kind": 3}\n', '{"t": "x", "kind": "step", "loss": "y"}\n']
    write(tmp_path, 0, step(1), *odd, step(2, epoch="two", steps=None))
    vitals = Vitals(str(tmp_path), [0])
    assert vitals.look(77.0) == []
    assert [vitals.ranks[0][name] for name in ("epoch", "step", "steps", "loss")] == [2, 2, 40, 0.5]


def test_unexpected_lines_are_ignored(tmp_path: Path) -> None:
    lines = ['{"kind": "step", "epoch": 1, "loss": 1%s}' % ("0" * 400), '{"kind": "step", "x": %s}' % ("[" * 50_000)]
    lines += ['{"kind": "%s"}' % ("x" * 300_000), '{"kind": "step", "epoch": 1, "step": 3}']
    (tmp_path / "metrics-rank0.jsonl").write_text("\n".join(lines) + "\n")
    vitals = Vitals(str(tmp_path), [0])
    assert vitals.look(1.0) == [] and vitals.ranks[0]["step"] == 3 and vitals.ranks[0]["loss"] is None


@pytest.mark.parametrize("t", [1.7e12, -1.0, math.nan, math.inf, True, None])
def test_a_rank_whose_script_writes_other_times_is_known_to_the_lead_node(tmp_path: Path, t: Any) -> None:
    write(tmp_path, 0, step(1, t=t))
    vitals = Vitals(str(tmp_path), [0])
    vitals.look(77.0)
    about = dict.fromkeys(("offset", "trained", "final", "cause", "stacks"))
    report = {"t": 77.0, "state": "training", "ranks": {"0": vitals.ranks[0]}, "findings": [], "own_ranks": [0]}
    assert MEMBER_REPORT({**about, **report})["ranks"]["0"]["t"] == 77.0


def test_a_rewritten_file_is_read_from_its_start(tmp_path: Path) -> None:
    vitals = Vitals(str(tmp_path), [0])
    write(tmp_path, 0, step(1), step(30), '{"t": 131.0, "ki')
    vitals.look(0.0)
    (tmp_path / "metrics-rank0.jsonl").unlink()
    vitals.look(0.0)
    write(tmp_path, 0, step(2))
    vitals.look(0.0)
    assert vitals.ranks[0]["step"] == 2


def test_the_position_of_a_rank_is_read_from_its_progress_file(tmp_path: Path) -> None:
    write(tmp_path, 0, step(1))
    vitals, seen = Vitals(str(tmp_path), [0]), []
    for text in ("2 17 compute\n", "2 17", "", "2 17 sleep\n", "x 17 load\n"):
        (tmp_path / "progress-rank0").write_text(text.ljust(40))
        vitals.look(0.0)
        seen.append(vitals.ranks[0]["at"])
    assert seen == [[2, 17, "compute"], None, None, None, None]


def test_the_seconds_without_progress_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(vitals_module.time, "monotonic", lambda: now[0])
    vitals, idle = Vitals(str(tmp_path), [0]), []
    write(tmp_path, 0, step(4))
    for seconds, place in ((0, ""), (30, ""), (1, "2 5 load"), (40, "2 5 load"), (1, "2 5 compute"), (9, "2 5 done")):
        now[0] += seconds
        (tmp_path / "progress-rank0").write_text(f"{place}\n".ljust(40))
        vitals.look(0.0)
        idle.append(vitals.ranks[0]["idle_s"])
    assert idle == [0, 30, 0, 40, 0, 0]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported_at_once_and_only_once(loss: float, tmp_path: Path) -> None:
    vitals = Vitals(str(tmp_path), [2, 3], node_rank=1, label="node1 (gnn2)", stop_on_nan=True)
    write(tmp_path, 2, step(4, 0.7))
    write(tmp_path, 3, step(4, 0.6931))
    assert vitals.look(0.0) == []
    write(tmp_path, 2, step(6, loss))
    write(tmp_path, 3, step(5, loss))
    (finding,) = vitals.look(0.0)
    assert [finding[name] for name in ("t", "kind", "node_rank", "rank", "stop")] == [105.0, "nan", 1, 3, True]
    assert nan_words(finding) == "NaN loss of rank 3 in epoch 2 at step 5"
    assert finding["text"].startswith("the loss of rank 3 on node1 (gnn2) is ")
    assert "in epoch 2 at step 5; the last finite loss was 0.6931, at step 4. " in finding["text"]
    write(tmp_path, 3, step(6, loss))
    assert vitals.look(0.0) == [] and vitals.findings == [finding]


def test_reading_eight_ranks_takes_less_than_a_millisecond(tmp_path: Path) -> None:
    vitals, took = Vitals(str(tmp_path), range(8)), []
    for number in range(50):
        for rank in range(8):
            write(tmp_path, rank, step(number))
            (tmp_path / f"progress-rank{rank}").write_text(f"2 {number} load".ljust(40))
        began = time.process_time()
        vitals.look(0.0)
        took.append(time.process_time() - began)
    assert sorted(took)[len(took) // 2] < 1e-3


def test_a_huge_file_is_read_in_pieces(tmp_path: Path) -> None:
    curve = {"t": 1.0, "kind": "epoch", "epoch": 1, "loss": 0.5, "step_loss": [0.123456789] * 250_000}
    write(tmp_path, 0, curve, step(3))
    assert os.path.getsize(tmp_path / "metrics-rank0.jsonl") > 3 << 20
    vitals, looks = Vitals(str(tmp_path), [0]), 0
    while not vitals.ranks or vitals.ranks[0]["kind"] != "step":
        vitals.look(0.0)
        looks += 1
    assert 3 <= looks <= 4 and vitals.ranks[0]["step"] == 3
