"""A run followed to its end on fake nodes: lines that break, nodes that fail, what the others say of them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from follow_kit import FakeNode, Scene, ended, event, line, state, step
from launcher.errors import CommandTimeout, ConnectionLost, SessionError, UnreachableError
from launcher.run import monitor as follow_module
from launcher.run import node_stream

BROKEN = ConnectionLost("connection lost", host="host0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "RETRY_EVERY", 0.05)
    monkeypatch.setattr(follow_module, "_LAST_RESULT", 0.3)
    monkeypatch.setattr(follow_module, "_STOP_AFTER", 0.2)
    monkeypatch.setattr(follow_module, "_CHECK_EVERY", 0.05)
    monkeypatch.setattr(follow_module, "_TURN", 0.02)
    monkeypatch.setattr(follow_module, "_STARTED", 0.2)
    monkeypatch.setattr(follow_module, "_LOST_TO_PEERS", 0.3)


def test_all_nodes_done_and_nothing_left_behind(tmp_path: Path) -> None:
    log = line(file="logs/rank0.log", offset=9, lines=["2026-11-20T21:00:00.123Z hello"])
    scene = Scene(tmp_path, FakeNode(0, [log, ended(0)]), FakeNode(1, [ended(1)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "done"}
    assert followed.notes == [] and not followed.lost
    assert "node0/rank0 | hello\n" in scene.output
    assert [node.stops for node in scene.nodes] == [1, 1], "each node is swept once"


def test_a_lost_line_is_taken_up_from_the_offsets_and_no_line_is_told_twice(tmp_path: Path) -> None:
    first = line(file="logs/rank0.log", offset=30, lines=["one", "two"])
    rest = line(file="logs/rank0.log", offset=60, lines=["three"])
    node = FakeNode(0, [first, BROKEN], [BROKEN], [rest, ended(0)])
    scene = Scene(tmp_path, node)
    assert scene.follow().results[0]["state"] == "done"
    assert node.offsets == [{}, {"logs/rank0.log": 30}, {"logs/rank0.log": 30}]
    assert [text.split("| ")[1] for text in scene.output.splitlines() if "|" in text] == ["one", "two", "three"]
    assert scene.output.count("node0 (local): disconnected (connection lost); the run goes on") == 1, "told once"
    assert "node0 (local): reconnected after 0 s" in scene.output
    assert "line-lost" in scene.kinds and "line-back" in scene.kinds


def test_a_line_that_stays_lost_stops_nobody_while_another_node_tells(tmp_path: Path) -> None:
    """Longer than lost_after: the run belongs to the nodes."""
    away, other = FakeNode(0), FakeNode(1)
    away.fail = ConnectionLost("no route", host="host0")
    other.scripts = [[state(), lambda: time.sleep(1.0), lambda: back(away), lambda: time.sleep(0.3), ended(1)]]
    away.scripts = [[ended(0)]]
    scene = Scene(tmp_path, away, other, lost_after=0.3)
    followed = scene.follow()
    assert set(followed.results) == {0, 1} and not followed.lost and not followed.detached
    assert "stop" not in scene.kinds[: scene.kinds.index("line-back")]


def back(node: FakeNode) -> None:
    node.fail = None


def test_when_no_node_is_within_reach_the_run_is_left_to_itself(tmp_path: Path) -> None:
    nodes = [FakeNode(0, [state(), BROKEN]), FakeNode(1, [state(), BROKEN])]
    for node in nodes:
        node.on("control.py", AssertionError("the run must not be touched"))
    started = time.monotonic()
    followed = Scene(tmp_path, *nodes, lost_after=0.4).follow()
    assert followed.detached == "unreachable" and not followed.lost
    assert 0.4 < time.monotonic() - started < 5
    assert [node.stops for node in nodes] == [0, 0]


def test_a_node_out_of_reach_while_the_others_end_is_waited_for_and_then_lost(tmp_path: Path) -> None:
    away, other = FakeNode(0, [state(), BROKEN]), FakeNode(1)
    other.scripts = [[state(), lambda: time.sleep(0.2), ended(1)]]
    started = time.monotonic()
    followed = Scene(tmp_path, away, other, lost_after=0.6).follow()
    assert time.monotonic() - started > 0.8
    assert followed.lost[0].why.startswith("no contact for") and followed.lost[0].out_of_reach
    assert "tmux kill-session -t '=gnnfleet-r1-node0'" in followed.notes[0]
    assert "stops by itself if it cannot reach the other nodes" in followed.notes[0]


def test_a_node_that_the_others_have_lost_too_is_not_waited_for_so_long(tmp_path: Path) -> None:
    away = FakeNode(1, [state(), BROKEN])
    word = {"lost": {"1": {"since": 5.0, "why": "no sign of life for 6 s"}}}
    scene = Scene(tmp_path, FakeNode(0, [state(), ended(0, "stopped", word)]), away, lost_after=60.0)
    started = time.monotonic()
    followed = scene.follow()
    assert time.monotonic() - started < 5 and followed.lost[1].out_of_reach


def test_a_node_whose_line_comes_back_after_the_others_ended_still_tells_its_result(tmp_path: Path) -> None:
    late = FakeNode(0, [state(), BROKEN], [BROKEN], [BROKEN], [ended(0)])
    followed = Scene(tmp_path, late, FakeNode(1, [ended(1)])).follow()
    assert set(followed.results) == {0, 1} and not followed.lost


def test_a_failure_is_told_and_left_to_the_supervisors(tmp_path: Path) -> None:
    """They stop each other; from here nobody is asked to while they do."""
    gone = event("process-exit", name="rank0", rank=0, failed=True, returncode=1)
    failing = FakeNode(0, [gone, ended(0, "failed", failed=True, returncode=1)])
    scene = Scene(tmp_path, failing, FakeNode(1, [ended(1, "stopped", stopped=True)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "failed", 1: "stopped"}
    assert "a process failed: rank0 of node0 (local); every node stops" in scene.output
    assert "all nodes have ended" in scene.events.read_text(), "swept at the end, not before"


def test_nodes_that_do_not_stop_each_other_are_helped(tmp_path: Path) -> None:
    failing, other = FakeNode(0), FakeNode(1)
    gone = event("process-exit", name="rank0", rank=0, failed=True, returncode=1)
    failing.scripts = [[gone, other.stopped, ended(0, "failed", failed=True, returncode=1)]]
    other.scripts = [[other.stopped, ended(1, "stopped", stopped=True)]]
    followed = Scene(tmp_path, failing, other).follow()
    assert set(followed.results) == {0, 1} and other.stops == 1


def test_a_supervisor_that_dies_ends_the_run(tmp_path: Path) -> None:
    other = FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped")]]
    gone = line(lost={"reason": "the supervisor (pid 7) is gone", "state": {"time": 100.0}})
    followed = Scene(tmp_path, FakeNode(0, [state(time=time.time() + 300), gone]), other).follow()
    assert followed.lost[0].why == "the supervisor (pid 7) is gone"
    assert followed.lost[0].when == pytest.approx(100.0 - 300.0, abs=1), "by our clock: that node is 5 minutes ahead"
    assert other.stops == 1


def test_a_node_that_could_not_be_started_ends_the_others(tmp_path: Path) -> None:
    def refuse() -> None:
        raise SessionError("node0 (local): tmux is not installed on the node")

    other = FakeNode(1)
    other.scripts = [[other.stopped, ended(1, "stopped")]]
    scene = Scene(tmp_path, FakeNode(0), other, starts={0: refuse, 1: lambda: None})
    followed = scene.follow()
    assert followed.lost[0].why == "tmux is not installed on the node"
    assert followed.results[1]["state"] == "stopped"
    assert "start-failed" in scene.kinds


def test_a_line_that_breaks_while_a_node_starts_does_not_fail_it(tmp_path: Path) -> None:
    answers = [BROKEN, SessionError("node0 (local): tmux session x exists already; end it")]

    def start() -> None:
        raise answers.pop(0)

    scene = Scene(tmp_path, FakeNode(0, [ended(0)]), starts={0: start})
    assert scene.follow().results[0]["state"] == "done"


def test_a_host_that_is_lost_while_its_node_is_started_is_not_waited_for_as_long_as_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers nothing, so the line is closed; and nobody can connect to it any more."""
    monkeypatch.setattr(node_stream, "SILENCE", 0.3)
    monkeypatch.setattr(node_stream, "START_PATIENCE", 0.5)
    lost, other, closed = FakeNode(0), FakeNode(1), threading.Event()
    other.scripts = [[state(), other.stopped, ended(1, "stopped")]]
    lost.on("true", CommandTimeout("`true` did not end", host="host0"))
    monkeypatch.setattr(lost, "close", closed.set)

    def connect(timeout: float) -> None:
        raise UnreachableError("no answer on port 22", host="host0")

    monkeypatch.setattr(lost, "connect", connect)

    def start() -> None:
        assert closed.wait(20), "nobody asks whether the host lives"
        raise BROKEN

    scene = Scene(tmp_path, lost, other, starts={0: start, 1: lambda: None}, start_timeout=600.0)
    followed = scene.follow()
    assert "host0" in followed.lost[0].why and followed.results[1]["state"] == "stopped"


def test_when_two_of_three_hosts_are_gone_neither_is_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that has lost the lead node knows nothing of the other member."""
    monkeypatch.setattr(follow_module, "_LOST_TO_PEERS", 0.3)
    told = {"lost": {"0": {"since": 1.0, "why": "no sign of life for 6 s"}}}
    scene = Scene(
        tmp_path, FakeNode(0, [state(), BROKEN]), FakeNode(1, [ended(1, "failed", told)]), FakeNode(2, [BROKEN]),
        lost_after=60.0,
    )  # fmt: skip
    followed = scene.follow()
    assert set(followed.lost) == {0, 2} and not followed.detached


def test_a_stopped_node_that_says_nothing_more_is_not_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path, FakeNode(0, [threading.Event()]))
    scene.follower.interrupt("Ctrl-C")
    started = time.monotonic()
    followed = scene.follow()
    assert followed.interrupted == "Ctrl-C" and followed.silent == {0}
    assert time.monotonic() - started < 5


def test_findings_are_told_once_however_often_nodes_repeat_them(tmp_path: Path) -> None:
    finding = {"t": 1.0, "kind": "nan", "node_rank": 0, "rank": 0, "text": "the loss is nan", "stop": False}
    told = state(findings=[finding])
    scene = Scene(tmp_path, FakeNode(0, [told, told, ended(0)]), FakeNode(1, [told, ended(1)]))
    assert scene.follow().findings == [finding]
    assert scene.output.count("nan: the loss is nan") == 1


def test_detached_once_the_first_step_has_trained(tmp_path: Path) -> None:
    node = FakeNode(0, [state(), step(0), threading.Event()])
    scene = Scene(tmp_path, node, leave_when_trained=True, starts={0: lambda: None})
    followed = scene.follow()
    assert followed.detached == "trained" and node.stops == 0


def test_an_own_command_without_metrics_is_detached_once_all_ranks_run(tmp_path: Path) -> None:
    started = event("process-start", name="rank0", rank=0, pid=9)
    node = FakeNode(0, [state(), started, threading.Event()])
    before = time.monotonic()
    followed = Scene(tmp_path, node, leave_when_trained=True, own_command=("true",), starts={0: lambda: None}).follow()
    assert followed.detached == "trained" and time.monotonic() - before > 0.2


def test_a_run_that_fails_before_its_first_step_is_reported_although_detaching_was_wanted(tmp_path: Path) -> None:
    node = FakeNode(0, [state(), ended(0, "failed", failed=True, returncode=1)])
    followed = Scene(tmp_path, node, leave_when_trained=True).follow()
    assert not followed.detached and followed.results[0]["state"] == "failed"


def test_odd_metrics_lines_of_an_own_script_do_no_harm(tmp_path: Path) -> None:
    lines = ["[1]", "nonsense", '{"kind": "step"}', '{"kind": "step", "rank": 0, "epoch": "one", "loss": null}']
    told = line(file="metrics-rank0.jsonl", offset=1, lines=lines)
    nan = json.dumps({"kind": "step", "rank": 0, "epoch": 1, "step": 3, "loss": float("nan")})
    scene = Scene(tmp_path, FakeNode(0, [told, line(file="metrics-rank0.jsonl", offset=2, lines=[nan]), ended(0)]))
    assert scene.follow().results[0]["state"] == "done"
    assert "epoch 1 step 4  loss nan" in scene.output


def test_a_terminal_that_takes_no_more_holds_the_nodes_news_back_instead_of_filling_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "_MAX_QUEUED", 10)
    scene = Scene(tmp_path, FakeNode(0, [*(step(0, number) for number in range(50)), ended(0)]))
    waiting: list[int] = []

    def slow(metric: object) -> None:
        time.sleep(0.005)
        waiting.append(scene.follower._messages.qsize())

    monkeypatch.setattr(scene.live, "metric", slow)
    assert scene.follow().results[0]["state"] == "done"
    assert len(waiting) == 50 and max(waiting) <= 10


# Nodes that the run can do without

CAUSE = {"node_rank": 0, "name": "rank0", "rank": 0, "kind": "failure", "reason": "raised", "t": 1.0, "asked": None}


def finding(k: int) -> dict[str, Any]:
    text = f"server node{k} (local) failed at 12:00:00 UTC: part 0 is served by node2 (local)"
    return {"t": 1.0, "kind": "server-lost", "node_rank": k, "rank": None, "text": text, "stop": False}


def test_a_node_that_can_be_done_without_ends_nobody(tmp_path: Path) -> None:
    """Neither when it fails, nor when its supervisor is gone; the hub says what becomes of it."""
    crash = event("process-exit", 1, name="server", rank=None, failed=True, returncode=1)
    going = threading.Event()
    hub = FakeNode(0, [state(spare=[1, 2]), going, state(spare=[], gone={"1": {}}, findings=[finding(1)])])
    hub.scripts[0] += [lambda: time.sleep(1.0), ended(0, more={"gone": {"1": {}}})]
    failing = FakeNode(1, [state(spare=[1, 2]), crash, lambda: going.set(), ended(1, "failed", failed=True)])
    scene = Scene(tmp_path, hub, failing, FakeNode(2, [state(), ended(2)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "failed", 2: "done"}
    assert "a process failed: server of node1 (local)\n" in scene.output and "every node stops" not in scene.output
    assert f"server-lost: {finding(1)['text']}" in scene.output
    assert "stop" not in scene.kinds[: scene.kinds.index("process-exit") + 1], "swept at the end alone"


def test_a_lost_supervisor_of_a_spare_node_is_swept_there_alone(tmp_path: Path) -> None:
    lost = line(lost={"reason": "the supervisor is gone", "state": None})
    hub = FakeNode(0, [state(spare=[1]), lambda: time.sleep(1.0), ended(0, more={"gone": {"1": {}}})])
    gone = FakeNode(1, [state(), lambda: time.sleep(0.3), lost])
    scene = Scene(tmp_path, hub, gone)
    followed = scene.follow()
    assert followed.results[0]["state"] == "done" and followed.lost[1].why == "the supervisor is gone"
    stops = [json.loads(text) for text in scene.events.read_text().splitlines() if '"stop"' in text]
    assert [told["reason"] for told in stops] == ["all nodes have ended"]


def test_our_line_to_the_rest_lost_after_a_spare_node_has_ended_leaves_the_run_to_itself(tmp_path: Path) -> None:
    hub = FakeNode(0, [state(spare=[], gone={"1": {}}), lambda: time.sleep(0.3), BROKEN])
    scene = Scene(tmp_path, hub, FakeNode(1, [ended(1, "failed", failed=True)]), lost_after=0.4)
    followed = scene.follow()
    assert followed.detached == "unreachable" and 0 not in followed.lost


@pytest.mark.parametrize("word", [{"lost": {"0": {"since": 1.0, "why": "no sign of life for 6 s"}}}, {"cause": CAUSE}])
def test_when_nodes_say_that_the_run_is_over_a_lead_node_out_of_reach_is_lost(tmp_path: Path, word: Any) -> None:
    """As when the only client's host is gone: each of its servers is one that the run could do without."""
    lead = FakeNode(0, [state(spare=[1, 2]), lambda: time.sleep(0.3), BROKEN])
    servers = (FakeNode(k, [state(spare=[1, 2]), lambda: time.sleep(0.5), ended(k, "failed", word)]) for k in (1, 2))
    scene = Scene(tmp_path, lead, *servers, lost_after=0.4)
    followed = scene.follow()
    assert not followed.detached and set(followed.results) == {1, 2}
    assert followed.lost[0].out_of_reach
