"""Tests of how the hub recognises stalls and stragglers from the states of all nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.node.child_process import Loop
from launcher.node.diagnostics import stall_detector
from launcher.node.diagnostics.expired_waits import Processes
from launcher.node.diagnostics.process_state import STOPPED
from launcher.node.diagnostics.stall_detector import StallDetector
from launcher.node.peers.hub import Hub
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor.health import Health
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.outcomes import OutcomeBook
from peers_kit import health_of
from vitals_kit import Cluster, pace


def test_a_stall_names_the_ranks_behind() -> None:
    run = Cluster(stall_after=30)
    run.steps(1, 17, every=4)
    run.all(18, phase="reduce")
    run.rank(3, 17, "compute")
    assert run.wait(30) == []
    (finding,) = run.wait(20)
    assert [finding[name] for name in ("kind", "node_rank", "rank", "stop")] == ["stall", 1, 3, True]
    assert finding["text"] == (
        "no process has trained a step for 31 s (the longest pause before was 4.00 s); "
        "rank 3 on node1 (gnn2) is at step 17 of epoch 2 (computing), "
        "the others are at step 18 of epoch 2 (their own work done, waiting for other ranks)"
    )


def test_the_time_limit_is_learned_from_earlier_pauses() -> None:
    run = Cluster()
    assert run.steps(1, 3) + run.steps(4, 5, every=60) == []
    assert run.wait(238) == []  # five times 60 s, 60 s of which have passed
    assert len(run.wait(4)) == 1


def test_a_first_step_of_minutes_raises_the_limit() -> None:
    run = Cluster()
    run.all(0, kind="start", epoch=None, at=[1, 0, "compute"])
    run.wait(300)
    run.all(1)
    assert run.wait(1490) == [] and len(run.wait(20)) == 1


def test_the_limit_is_at_least_two_minutes() -> None:
    run = Cluster()
    run.steps(1, 50)
    assert run.wait(119) == [] and len(run.wait(2)) == 1


def test_a_second_stall_is_reported_too() -> None:
    run = Cluster(stall_after=10, stop_on_stall=False)
    run.steps(1, 3)
    (first,) = run.wait(40)
    run.steps(4, 5)
    (second,) = run.wait(40)
    assert (first["stop"], second["stop"]) == (False, False) and "pause before was 41 s" in second["text"]


def test_before_the_first_step_the_limit_is_a_quarter_of_an_hour() -> None:
    run = Cluster(stall_after=5)
    run.all(0, kind="start", epoch=None, at=[1, 0, "compute"])
    assert run.wait(895) == []
    (finding,) = run.wait(10)
    assert finding["text"].startswith("no process has trained its first step within 901 s; all 4 ranks are at step 0")


def test_an_evaluation_with_progress_is_no_stall() -> None:
    run = Cluster(stall_after=10)
    run.steps(1, 3)
    for batch in range(10):
        run.all(batch, phase="evaluate", t=1003.0)
        assert run.wait(8) == []


def test_ranks_that_ended_or_report_nothing_are_not_stalled() -> None:
    run = Cluster(stall_after=10)
    assert run.wait(1000) == []
    run.steps(1, 3)
    run.all(3, ended=True, kind="result")
    assert run.wait(1000) == []


def test_a_script_may_do_anything_between_epochs() -> None:
    run = Cluster()
    run.steps(1, 20)
    run.all(21, phase="between")
    assert run.wait(890) == []
    (finding,) = run.wait(20)
    assert finding["text"].endswith("; all 4 ranks are at the end of epoch 2")


def test_scripts_without_steplog_have_a_longer_limit_and_positions_from_metrics() -> None:
    run = Cluster(at=False)
    run.steps(1, 20)
    assert run.wait(890) == []
    (finding,) = run.wait(20)
    assert finding["text"].endswith("; all 4 ranks are at step 20 of epoch 2 (from their last metrics line)")


def test_a_suspended_supervisor_reports_no_stall() -> None:
    run = Cluster(stall_after=10)
    run.steps(1, 3)
    run.wait(5)
    run.now += 3600  # stopped by SIGSTOP, or the machine was suspended
    assert run.wait(4) == [] and len(run.wait(10)) == 1


@pytest.mark.parametrize(
    ("slow", "why"),
    [
        (
            {"own_s": 0.41, "batch_s": 0.3, "remote_share": 0.8},
            "waiting for batches takes 0.30 s of that, with 80% of",
        ),
        ({"own_s": 0.41}, "it computes more slowly"),
    ],
)
def test_a_straggler_is_named_once_with_its_longest_phase(slow: dict[str, Any], why: str) -> None:
    run = Cluster()
    assert pace(run, 9, **slow) == []  # too few steps to judge
    (finding,) = pace(run, 60, **slow)
    assert [finding[name] for name in ("kind", "node_rank", "rank", "stop")] == ["straggler", 1, 3, False]
    start = "rank 3 on node1 (gnn2) needs 0.41 s of own work per step, the others 0.20 s; the run waits for it ("
    assert finding["text"].startswith(start + why)


def test_the_end_of_straggling_is_reported() -> None:
    run = Cluster()
    pace(run, 20, own_s=0.5)
    (ended,) = pace(run, 60)
    assert ended["text"] == "rank 3 on node1 (gnn2) keeps up again: 0.20 s of own work per step"
    assert ended["over"]
    assert pace(run, 60, own_s=0.5) == []  # not again so soon
    pace(run, round(stall_detector.QUIET))
    assert len(pace(run, 40, own_s=0.5)) == 1


@pytest.mark.parametrize("harmless", [{"own_s": 0.29}, {"own_s": 0.31, "step_s": 2.0}])
def test_a_small_difference_is_no_straggler(harmless: dict[str, Any]) -> None:
    assert pace(Cluster(), 60, **harmless) == []


def test_one_slow_start_is_no_straggler() -> None:
    run = Cluster()
    pace(run, 2, own_s=20.0, step_s=20.0)
    assert pace(run, 60) == []


def test_the_slower_of_two_ranks_is_the_straggler() -> None:
    run = Cluster()
    for _ in range(30):
        for rank, own in ((0, 0.2), (2, 0.4)):
            run.rank(rank, round(run.now), own_s=own, step_s=0.5, batch_s=0.0)
        run.wait(1)
    assert [finding["rank"] for finding in run.findings] == [2]


def test_judging_512_ranks_takes_a_fraction_of_a_second() -> None:
    judging, took = StallDetector(), []
    for now in range(40):
        line = {"epoch": 1, "step": now, "kind": "step", "t": now, "at": [1, now, "load"], "ended": False}
        line |= {"own_s": 0.2, "step_s": 0.5, "batch_s": 0.1, "remote_share": None}
        nodes = {node: {str(8 * node + local): line for local in range(8)} for node in range(64)}
        began = time.process_time()
        judging.look(float(now), nodes)
        took.append(time.process_time() - began)
    assert sum(took) / len(took) < 0.03


def test_steps_with_almost_equal_times_do_not_accumulate() -> None:
    # A user script may write any times to its metrics; if they are almost equal, memory use must still be limited.
    seen = stall_detector._StragglerRule()
    entry = {"kind": "step", "own_s": 0.1, "step_s": 0.2, "batch_s": 0.0, "node_rank": 0, "where": "rank 0"}
    for second in range(2000):
        assert not list(seen.look(float(second), {0: {**entry, "t": second * 1e-6}}))
    assert len(seen._lines[0]) < 100


def test_a_stopped_rank_leads_the_report_wherever_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All ranks are at the same step, so only the stack of the stopped rank shows which rank is the cause of the stall.
    nodes = (RunNode("node0 (gnn1)", ranks=(0,)), RunNode("node1 (gnn2)", ranks=(1,)))
    spec = NodeSpec("r1", "t", 0, str(tmp_path), nodes, None, None, start_timeout=9.0, grace=1.0)
    hub = Hub(spec, loop=cast(Loop, None))
    hub.members[1].own_ranks, hub.members[1].ahead = (1,), 300.0
    health = Health(spec, OutcomeBook(Journal(str(tmp_path), 0), 0, (0,)), hub, lambda seconds: None)
    known = Processes(spec.labels, {0: 0, 1: 1}, {0: "train.py:7 in step()", 1: STOPPED}, {})
    monkeypatch.setattr(health, "_stacks_of_all", lambda: known)
    finding = {"t": 50.0, "kind": "stall", "node_rank": 0, "rank": None, "text": "no process has trained", "stop": True}
    health._add(finding)
    assert (finding["node_rank"], finding["rank"], finding["t"]) == (1, 1, 350.0)
    assert finding["text"] == "rank 1 on node1 (gnn2) is stopped (SIGSTOP or a debugger): no process has trained"


@pytest.mark.parametrize("on_stall", ["stop", "warn"])
def test_expired_waits_of_several_nodes_are_one_finding(on_stall: str, tmp_path: Path) -> None:
    health, hub = health_of(tmp_path, on_stall=on_stall)
    assert health.look() is None and health.findings == []
    wait = {"rank": 0, "of": "server", "seconds": 9.0, "request": "sample", "node_rank": 1, "stack": []}
    (tmp_path / "procs/wait-rank0.json").write_text(json.dumps({"t": 70.0, **wait}))
    hub.members[1].ahead, hub.members[1].stacks = 10.0, {"1": ["train.py:7 in step()"], "server": [STOPPED]}
    hub.members[1].waits = {"1": {"t": 79.0, **wait, "rank": 1, "server": "", "at": ""}}
    health._next = 0.0
    found = health.look()
    (finding,) = health.findings
    assert found == (finding if on_stall == "stop" else None) and finding["stop"] == (on_stall == "stop")
    assert finding["text"] == (
        "the graph server of node1 (gnn2) is stopped (SIGSTOP or a debugger): rank 1 on node1 (gnn2) and 1 other rank "
        "waited 9 s for the graph server of node1 (gnn2) to answer a sample request"
    )
    assert [finding[name] for name in ("kind", "node_rank", "rank", "t")] == ["stall", 1, None, 79.0]
    assert finding["stacks"] == ["rank 1: train.py:7 in step()", f"graph server of node1 (gnn2): {STOPPED}"]
    assert health.waits["0"]["rank"] == 0, "reported to the other supervisors"
    health._next = 0.0
    health.look()
    assert len(health.findings) == 1


def test_a_rank_that_has_ended_its_work_is_not_accused() -> None:
    run = Cluster(stall_after=10)
    run.steps(1, 3)
    run.all(3, phase="evaluate")
    run.rank(2, 3, "reduce", done=True)
    run.rank(3, 3, "reduce")
    (finding,) = run.wait(15)
    assert finding["rank"] == 3
    run = Cluster(stall_after=10)
    run.steps(1, 3)
    run.all(4, done=True)
    run.rank(1, 4, ended=True)
    (finding,) = run.wait(15)
    assert finding["text"].endswith("all 3 ranks have ended the work, but not the process")


def test_a_rank_without_a_python_frame_is_not_accused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A script without a progress file: its rank 0 has ended its last epoch and exits, while rank 1 still computes.
    health, hub = health_of(tmp_path, stall_after=5.0)
    line = {"epoch": 3, "kind": "epoch", "step": 9, "t": 60.0, "at": None, "ended": False, "done": False}
    line |= {"own_s": None, "step_s": None, "batch_s": None, "remote_share": None}
    hub.members[1].ranks = {"1": {**line, "kind": "eval"}}
    health._vitals.ranks = {0: line}
    found = [
        finding
        for now in range(30)
        for finding in health._detector.look(float(now), {0: {0: line}, 1: hub.members[1].ranks})
    ]
    assert [finding["rank"] for finding in found] == [0]
    known = Processes(
        ("node0 (gnn1)", "node1 (gnn2)"), {0: 0, 1: 1}, {0: "no Python frame", 1: "train.py:7 in step()"}, {}
    )
    monkeypatch.setattr(health, "_stacks_of_all", lambda: known)
    health._add(found[0])
    assert (found[0]["node_rank"], found[0]["rank"]) == (1, None) and "rank 1 on node1 (gnn2) is at" in found[0]["text"]
