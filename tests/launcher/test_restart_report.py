"""Tests of how restarts are shown by the launcher, ``gnnfleet status`` and the report."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.report.ending import conclude
from launcher.report.last_attempt import ExpendableNodes, LastAttempt, checkpoint_node
from launcher.report.report import Lost, RunReport, print_report
from launcher.report.run_folder import FoundRun
from launcher.report.verdict import NodeView, judge
from launcher.run.live_table import Board, header
from run_kit import make_launch, make_node

TEXT = "restart 1 of 3: node0 (gnn0): no sign of life; going on with 2 of 3 nodes from epoch 3, step 120 (7.3 s)"
RESTART = {
    "t": 1010.0,
    "generation": 1,
    "of": 3,
    "text": TEXT,
    "reason": "node0 (gnn0): no sign of life",
    "cause_node": 0,
    "nodes": [1, 2],
    "without": [0],
    "ranks": {"1": [1], "2": [0]},
    "hub": 1,
    "epoch": 2,
    "step": 120,
    "seconds": 7.3,
}
GONE = {"0": {"since": 1003.0, "t": 1003.0, "why": "no sign of life", "how": "lost", "kind": "node-lost", "text": ""}}
AGAIN = {"generation": 1, "hub": 1, "restarts": [RESTART], "left": False, "no_restart": "", "gone": GONE}
FINDING = {"t": 1010.0, "kind": "restart", "node_rank": 0, "rank": None, "text": TEXT, "stop": False}


def plan(tmp_path: Path) -> Any:
    return make_launch([make_node(tmp_path, k, []) for k in range(3)])


def result(state: str = "done", **more: Any) -> dict[str, Any]:
    values = {"state": state, "reason": "", "cause": None, "asked": None, "outcomes": [], "lost": {}}
    return {**values, "findings": [FINDING], "clock_offset": 0.0, **AGAIN, **more}


def report(tmp_path: Path, results: Mapping[int, dict[str, Any]], **more: Any) -> RunReport:
    made = RunReport("r1", tmp_path, dict(results), **more)
    conclude(made, plan(tmp_path), 60.0)
    return made


def test_a_run_that_lost_its_lead_node_is_done(tmp_path: Path) -> None:
    found = report(tmp_path, {1: result(), 2: result()}, lost={0: Lost("no contact", 1020.0, out_of_reach=True)})
    assert (found.state, found.exit_status, found.first_failure) == ("done", 0, None)
    assert found.notes == ["node0 (local) was lost; the run went on without it"]
    (restart,) = found.to_json()["restarts"]
    assert (restart["text"], restart["nodes"], restart["seconds"]) == (TEXT, [1, 2], 7.3)
    out = io.StringIO()
    print_report(found, Console(file=out, width=300))
    assert out.getvalue().count(TEXT) == 1 and "restart: restart" not in out.getvalue()


def test_a_run_without_restarts_reports_none(tmp_path: Path) -> None:
    plain = {key: value for key, value in result(gone={}).items() if key not in AGAIN} | {"gone": {}}
    found = report(tmp_path, dict.fromkeys(range(3), {**plain, "findings": []}))
    assert found.state == "done" and "restarts" not in found.to_json() and found.notes == []


def test_a_run_that_failed_says_why_it_did_not_start_again(tmp_path: Path) -> None:
    why = "no remaining node has part 1"
    lost = {"2": {"since": 1030.0, "why": "no sign of life"}}
    failed = result("failed", lost=lost, no_restart=why, reason=f"node2 (local): no sign of life; no restart: {why}")
    found = report(tmp_path, {1: failed}, lost={k: Lost("no contact", 1040.0, out_of_reach=True) for k in (0, 2)})
    assert found.state == "failed" and found.first_failure is not None
    assert (found.first_failure.node_rank, found.first_failure.note) == (2, "no sign of life")
    assert f"no restart: {why}" in found.notes


def test_a_stall_before_a_restart_is_not_the_end(tmp_path: Path) -> None:
    stall = {"t": 1000.0, "kind": "stall", "node_rank": 1, "rank": None, "text": "no process has trained", "stop": True}
    found = report(tmp_path, dict.fromkeys((1, 2), result()), findings=[stall], lost={0: Lost("x", 1.0)})
    assert found.state == "done" and not any(outcome.name == "rank" for outcome in found.outcomes)
    later = report(
        tmp_path, dict.fromkeys((1, 2), result()), findings=[{**stall, "t": 1020.0}], lost={0: Lost("x", 1.0)}
    )
    assert len(later.outcomes) == len(found.outcomes) + 1


def test_which_node_leads_the_last_attempt(tmp_path: Path) -> None:
    old = {"state": "failed", "generation": 0, "hub": 0, "restarts": [], "left": True}
    reports = {0: old, 1: result(), 2: result()}
    assert LastAttempt.of(reports, 0) == LastAttempt(1, reports[1]) and checkpoint_node(reports, 0) == 2
    assert LastAttempt.of({0: {"state": "done"}}, 0).hub == 0 and checkpoint_node({0: {"state": "done"}}, 0) is None


def test_the_checkpoint_is_that_of_a_node_of_the_last_attempt() -> None:
    assert checkpoint_node({1: result(), 2: None}, 0) == 1, "the node of rank 0 cannot be reached"
    assert checkpoint_node({2: {"restarts": []}, 1: {"restarts": []}}, 0) == 1, "nor can the lead node"
    assert checkpoint_node({0: {"restarts": []}, 1: {"restarts": []}}, 0) == 0


def test_nodes_are_expendable_until_the_run_has_ended(tmp_path: Path) -> None:
    spares = ExpendableNodes(plan(tmp_path), restarts=3)
    assert all(k in spares for k in range(3))
    spares.take(1, AGAIN)
    spares.take_result(0, result("stopped", left=True, gone={}, generation=0))
    assert 1 in spares
    spares.take_result(1, result())
    assert 2 not in spares and 0 in spares, "the run goes on without node 0"
    never = ExpendableNodes(plan(tmp_path), restarts=3)
    never.discard(1)
    assert 1 not in never and 2 in never


def test_the_live_table_shows_the_attempt_and_its_ranks(tmp_path: Path) -> None:
    board = Board.of(plan(tmp_path))
    step = {"epoch": 1, "step": 4, "steps": 9, "loss": 1.0}
    board.state(0, {"state": "training", "ranks": {"0": step}})
    board.state(1, {"state": "training", "ranks": {"1": step}, **AGAIN})
    assert board.attempt == "restart 1 of 3" and "restart 1 of 3" in header(board, 0.0)
    assert {rank: row.node_rank for rank, row in board.ranks.items()} == {0: 2, 1: 1}
    assert board.nodes[0].left and board.ranks[1].step == 4 and board.ranks[0].step is None
    board.state(2, {"state": "stopping", "ranks": {"2": step}, "generation": 0, "restarts": []})
    assert board.ranks[0].step is None, "of an earlier attempt"
    board.rank_ended(0, failed=True)
    board.forget_ends(2)
    assert board.ranks[0].ended == ""


def test_status_knows_the_nodes_and_ranks_of_the_last_attempt(tmp_path: Path) -> None:
    made = plan(tmp_path)
    nodes, found = made.nodes, FoundRun("r1", None, None, made, None, None)
    alive = {"state": "training", "time": 1.0, **AGAIN}
    views = [NodeView(nodes[0], unreachable="no route"), *(NodeView(nodes[k], state=alive) for k in (1, 2))]
    attempt = LastAttempt.of({k: view.report for k, view in enumerate(views)}, 0)
    assert (attempt.hub, attempt.words, attempt.gone) == (1, "restart 1 of 3", {0})
    assert attempt.ranks(nodes) == {0: (), 1: (1,), 2: (0,)}
    now = judge(found, dict(enumerate(views)))
    assert now.state == "running" and "trains after restart 1 of 3: 2 training nodes, 2 ranks" in now.sentence
    lost = [replace(views[0], unreachable="", lost="it was killed"), *views[1:]]
    assert judge(found, dict(enumerate(lost))).state == "running", "the others restart without it"
    first = {"state": "training", "time": 1.0, "gone": {"0": {}}, "spare": [2]}
    lost = [replace(lost[0]), *(NodeView(nodes[k], state=first) for k in (1, 2))]
    assert judge(found, dict(enumerate(lost))).state == "running", "they go on without it"
    lost = [lost[0], *(NodeView(nodes[k], state={**first, "gone": {}}) for k in (1, 2))]
    assert judge(found, dict(enumerate(lost))).state == "stopping"
