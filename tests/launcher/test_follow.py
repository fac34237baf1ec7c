"""Tests of a launcher that follows a run on fake nodes: lost connections, failed nodes and lost nodes."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from follow_kit import FakeNode, Scene, ended, event, line, state, step
from launcher.errors import CommandTimeout, ConnectionLost, FleetError, SessionError, SessionExists, UnreachableError
from launcher.run import monitor as follow_module
from launcher.run import node_stream
from waiting import stretched

BROKEN = ConnectionLost("connection lost", host="host0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_stream, "RETRY_EVERY", 0.05)
    monkeypatch.setattr(follow_module, "_LAST_RESULT", 0.3)
    monkeypatch.setattr(follow_module, "_STOP_AFTER", 0.2)
    monkeypatch.setattr(follow_module, "_CHECK_EVERY", 0.05)
    monkeypatch.setattr(follow_module, "_POLL", 0.02)
    monkeypatch.setattr(follow_module, "_STARTED", 0.2)
    monkeypatch.setattr(follow_module, "_LOST_TO_PEERS", 0.3)


def test_a_run_whose_nodes_are_all_done_leaves_nothing_behind(tmp_path: Path) -> None:
    log = line(file="logs/rank0.log", offset=9, lines=["2026-11-20T21:00:00.123Z hello"])
    scene = Scene(tmp_path, FakeNode(0, [log, ended(0)]), FakeNode(1, [ended(1)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "done"}
    assert followed.notes == [] and not followed.lost
    assert "node0/rank0 | hello\n" in scene.output
    assert [node.stops for node in scene.nodes] == [1, 1], "each node is cleaned up once"


def test_a_reconnected_stream_resumes_at_the_offsets_and_repeats_no_line(tmp_path: Path) -> None:
    first = line(file="logs/rank0.log", offset=30, lines=["one", "two"])
    rest = line(file="logs/rank0.log", offset=60, lines=["three"])
    node = FakeNode(0, [first, BROKEN], [BROKEN], [rest, ended(0)])
    scene = Scene(tmp_path, node)
    assert scene.follow().results[0]["state"] == "done"
    assert node.offsets == [{}, {"logs/rank0.log": 30}, {"logs/rank0.log": 30}]
    assert [text.split("| ")[1] for text in scene.output.splitlines() if "|" in text] == ["one", "two", "three"]
    assert scene.output.count("node0 (local): disconnected (connection lost); the run goes on") == 1, "logged once"
    assert re.search(r"node0 \(local\): reconnected after \d+ s", scene.output)
    assert "line-lost" in scene.kinds and "line-back" in scene.kinds


def test_an_error_while_a_node_is_stopped_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> str:
        raise RuntimeError("a bug")

    monkeypatch.setattr(follow_module, "stop_node", fails)
    followed = Scene(tmp_path, FakeNode(0, [ended(0)])).follow()
    assert followed.notes == ["node0 (local): stopping it failed: RuntimeError('a bug')"]


def test_a_lost_connection_stops_no_node_while_another_is_connected(tmp_path: Path) -> None:
    # The connection to node 0 is lost for longer than `lost_after`, but the launcher is still connected to node 1.
    unreachable, other = FakeNode(0), FakeNode(1)
    unreachable.fail = ConnectionLost("no route", host="host0")
    other.scripts = [
        [state(), lambda: time.sleep(1.0), lambda: reconnect(unreachable), lambda: time.sleep(0.3), ended(1)]
    ]
    unreachable.scripts = [[ended(0)]]
    scene = Scene(tmp_path, unreachable, other, lost_after=0.3)
    followed = scene.follow()
    assert set(followed.results) == {0, 1} and not followed.lost and not followed.detached
    assert "stop" not in scene.kinds[: scene.kinds.index("line-back")]


def reconnect(node: FakeNode) -> None:
    node.fail = None


def test_when_no_node_is_reachable_the_launcher_detaches(tmp_path: Path) -> None:
    nodes = [FakeNode(0, [state(), BROKEN]), FakeNode(1, [state(), BROKEN])]
    for node in nodes:
        node.on("control.py", AssertionError("the run must not be touched"))
    started = time.monotonic()
    followed = Scene(tmp_path, *nodes, lost_after=0.4).follow()
    assert followed.detached == "unreachable" and not followed.lost
    assert 0.4 < time.monotonic() - started < stretched(5)
    assert [node.stops for node in nodes] == [0, 0]


def test_an_unreachable_node_counts_as_lost_some_time_after_the_others_ended(tmp_path: Path) -> None:
    unreachable, other = FakeNode(0, [state(), BROKEN]), FakeNode(1)
    other.scripts = [[state(), lambda: time.sleep(0.2), ended(1)]]
    started = time.monotonic()
    followed = Scene(tmp_path, unreachable, other, lost_after=0.6).follow()
    assert time.monotonic() - started > 0.8
    assert followed.lost[0].why.startswith("no contact for") and followed.lost[0].out_of_reach
    assert "tmux kill-session -t '=gnnfleet-r1-node0'" in followed.notes[0]
    assert "stops by itself if it cannot reach the other nodes" in followed.notes[0]


def test_the_wait_for_an_unreachable_node_is_short_if_its_peers_lost_it_too(tmp_path: Path) -> None:
    unreachable = FakeNode(1, [state(), BROKEN])
    loss = {"lost": {"1": {"since": 5.0, "why": "no sign of life for 6 s"}}}
    scene = Scene(tmp_path, FakeNode(0, [state(), ended(0, "stopped", loss)]), unreachable, lost_after=60.0)
    started = time.monotonic()
    followed = scene.follow()
    assert time.monotonic() - started < stretched(5) and followed.lost[1].out_of_reach


def test_a_node_that_reconnects_after_the_others_ended_delivers_its_result(tmp_path: Path) -> None:
    late = FakeNode(0, [state(), BROKEN], [BROKEN], [BROKEN], [ended(0)])
    followed = Scene(tmp_path, late, FakeNode(1, [ended(1)])).follow()
    assert set(followed.results) == {0, 1} and not followed.lost


def test_a_failure_is_logged_and_left_to_the_supervisors(tmp_path: Path) -> None:
    # After the failure, the supervisors stop all nodes themselves; until then the launcher sends no stop request.
    gone = event("process-exit", name="rank0", rank=0, failed=True, returncode=1)
    failing = FakeNode(0, [gone, ended(0, "failed", failed=True, returncode=1)])
    scene = Scene(tmp_path, failing, FakeNode(1, [ended(1, "stopped", stopped=True)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "failed", 1: "stopped"}
    assert "a process failed: rank0 of node0 (local); every node stops" in scene.output
    assert "all nodes have ended" in scene.events.read_text(), "nodes are cleaned up at the end, not before"


def test_the_launcher_stops_nodes_that_do_not_stop_each_other(tmp_path: Path) -> None:
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
    assert followed.lost[0].when == pytest.approx(100.0 - 300.0, abs=1), (
        "on the launching machine's clock; the node's is 5 minutes ahead"
    )
    assert other.stops == 1


def test_another_run_on_the_same_cpus_is_said_once(tmp_path: Path) -> None:
    shared = [event("shares-cpus", k, run="other", text="its CPUs are held by run other of bob") for k in (0, 1)]
    scene = Scene(tmp_path, FakeNode(0, [state(), shared[0], ended(0)]), FakeNode(1, [state(), shared[1], ended(1)]))
    scene.follow()
    assert scene.output.count("held by run other of bob; both runs get slower") == 1


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


def test_a_connection_lost_while_a_node_starts_does_not_fail_the_start(tmp_path: Path) -> None:
    answers = [BROKEN, SessionExists("node0 (local): tmux session x exists already; end it")]

    def start() -> None:
        raise answers.pop(0)

    scene = Scene(tmp_path, FakeNode(0, [ended(0)]), starts={0: start})
    assert scene.follow().results[0]["state"] == "done"


def test_the_wait_for_a_host_lost_during_its_start_is_shorter_than_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A host stops answering while its node starts. The launcher closes the connection and cannot connect again.
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
        assert closed.wait(20), "the launcher must test the connection of a silent host"
        raise BROKEN

    scene = Scene(tmp_path, lost, other, starts={0: start, 1: lambda: None}, start_timeout=600.0)
    followed = scene.follow()
    assert "host0" in followed.lost[0].why and followed.results[1]["state"] == "stopped"


def test_the_wait_for_two_of_three_lost_hosts_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The hosts of nodes 0 and 2 are lost. Node 1 is connected to the lead node 0 only, so it can report the loss of
    # node 0 but not that of node 2.
    monkeypatch.setattr(follow_module, "_LOST_TO_PEERS", 0.3)
    loss = {"lost": {"0": {"since": 1.0, "why": "no sign of life for 6 s"}}}
    scene = Scene(
        tmp_path, FakeNode(0, [state(), BROKEN]), FakeNode(1, [ended(1, "failed", loss)]), FakeNode(2, [BROKEN]),
        lost_after=60.0,
    )  # fmt: skip
    followed = scene.follow()
    assert set(followed.lost) == {0, 2} and not followed.detached


def test_the_wait_for_a_silent_node_after_a_stop_is_short(tmp_path: Path) -> None:
    scene = Scene(tmp_path, FakeNode(0, [threading.Event()]))
    scene.follower.interrupt("Ctrl-C")
    started = time.monotonic()
    followed = scene.follow()
    assert followed.interrupted == "Ctrl-C" and scene.follower._nodes[0].state == "silent"
    assert time.monotonic() - started < stretched(5)


def test_repeated_findings_are_logged_once(tmp_path: Path) -> None:
    finding = {"t": 1.0, "kind": "nan", "node_rank": 0, "rank": 0, "text": "the loss is nan", "stop": False}
    message = state(findings=[finding])
    scene = Scene(tmp_path, FakeNode(0, [message, message, ended(0)]), FakeNode(1, [message, ended(1)]))
    assert scene.follow().findings == [finding]
    assert scene.output.count("nan: the loss is nan") == 1


def test_detach_waits_for_the_first_training_step(tmp_path: Path) -> None:
    node = FakeNode(0, [state(), step(0), threading.Event()])
    scene = Scene(tmp_path, node, leave_when_trained=True, starts={0: lambda: None})
    followed = scene.follow()
    assert followed.detached == "trained" and node.stops == 0


def test_detach_from_an_own_command_without_metrics_waits_for_all_ranks(tmp_path: Path) -> None:
    started = event("process-start", name="rank0", rank=0, pid=9)
    node = FakeNode(0, [state(), started, threading.Event()])
    before = time.monotonic()
    followed = Scene(tmp_path, node, leave_when_trained=True, own_command=("true",), starts={0: lambda: None}).follow()
    assert followed.detached == "trained" and time.monotonic() - before > 0.2


def queued(*blockers: str, earlier: int = 0) -> str:
    listed = [{"run_id": run_id, "user": "bob", "what": "CPUs", "since": 1.0, "waits": False} for run_id in blockers]
    return state("queued", queue={"since": 1.0, "earlier": earlier, "blockers": listed})


def test_detach_leaves_a_run_that_waits_in_line(tmp_path: Path) -> None:
    node = FakeNode(0, [queued("a", earlier=1), threading.Event()])
    scene = Scene(tmp_path, node, leave_when_trained=True, starts={0: lambda: None})
    assert scene.follow().detached == "queued" and node.stops == 0
    assert "waiting for run a of bob on node0 since " in scene.live.board.summary()


def test_what_a_run_waits_for_is_said_once_per_change(tmp_path: Path) -> None:
    script = [
        queued("a", earlier=1),
        queued("a", earlier=1),
        queued("a"),
        queued(),
        state("starting"),
        state(),
        ended(0),
    ]
    scene = Scene(tmp_path, FakeNode(0, script), starts={0: lambda: None})
    assert scene.follow().results[0]["state"] == "done"
    said = [
        line.partition(" since ")[0] + line[line.rindex(",") :]
        for line in scene.output.splitlines()
        if "waiting for" in line
    ]
    assert said == ["waiting for run a of bob on node0, 2nd in line", "waiting for run a of bob on node0, 1st in line"]
    assert scene.output.count("its turn has come after 0 s: starting") == 1 and scene.live.board.waiting == ""


def test_a_run_that_fails_before_its_first_step_is_reported_despite_detach(tmp_path: Path) -> None:
    node = FakeNode(0, [state(), ended(0, "failed", failed=True, returncode=1)])
    followed = Scene(tmp_path, node, leave_when_trained=True).follow()
    assert not followed.detached and followed.results[0]["state"] == "failed"


def test_malformed_metrics_lines_of_an_own_script_are_ignored(tmp_path: Path) -> None:
    lines = ["[1]", "nonsense", '{"kind": "step"}', '{"kind": "step", "rank": 0, "epoch": "one", "loss": null}']
    message = line(file="metrics-rank0.jsonl", offset=1, lines=lines)
    nan = json.dumps({"kind": "step", "rank": 0, "epoch": 1, "step": 3, "loss": float("nan")})
    scene = Scene(tmp_path, FakeNode(0, [message, line(file="metrics-rank0.jsonl", offset=2, lines=[nan]), ended(0)]))
    assert scene.follow().results[0]["state"] == "done"
    assert "epoch 1 step 4  loss nan" in scene.output


def test_a_slow_terminal_does_not_fill_the_queue_of_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_MAX_QUEUED", 10)
    scene = Scene(tmp_path, FakeNode(0, [*(step(0, number) for number in range(50)), ended(0)]))
    waiting: list[int] = []

    def slow(metric: object) -> None:
        time.sleep(0.005)
        waiting.append(scene.follower._messages.qsize())

    monkeypatch.setattr(scene.live, "metric", slow)
    assert scene.follow().results[0]["state"] == "done"
    assert len(waiting) == 50 and max(waiting) <= 10


# Expendable nodes

CAUSE = {"node_rank": 0, "name": "rank0", "rank": 0, "kind": "failure", "reason": "raised", "t": 1.0, "asked": None}


def finding(k: int) -> dict[str, Any]:
    text = f"server node{k} (local) failed at 12:00:00 UTC: part 0 is served by node2 (local)"
    return {"t": 1.0, "kind": "server-lost", "node_rank": k, "rank": None, "text": text, "stop": False}


def test_a_failure_of_an_expendable_node_stops_no_other_node(tmp_path: Path) -> None:
    # If a server fails that the run does not need, no other node is stopped, and the hub records the loss.
    crash = event("process-exit", 1, name="server", rank=None, failed=True, returncode=1)
    going, over = threading.Event(), threading.Event()
    hub = FakeNode(0, [state(spare=[1, 2]), going, state(spare=[], gone={"1": {}}, findings=[finding(1)])])
    hub.scripts[0] += [lambda: time.sleep(1.0), lambda: over.set(), ended(0, more={"gone": {"1": {}}})]
    failing = FakeNode(1, [state(spare=[1, 2]), crash, lambda: going.set(), ended(1, "failed", failed=True)])
    scene = Scene(tmp_path, hub, failing, FakeNode(2, [state(), over, ended(2)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "failed", 2: "done"}
    assert "a process failed: server of node1 (local)\n" in scene.output and "every node stops" not in scene.output
    assert f"server-lost: {finding(1)['text']}" in scene.output
    assert "stop" not in scene.kinds[: scene.kinds.index("process-exit") + 1], "nodes are cleaned up at the end only"


def test_a_lost_supervisor_of_an_expendable_node_stops_no_other_node(tmp_path: Path) -> None:
    lost = line(lost={"reason": "the supervisor is gone", "state": None})
    hub = FakeNode(0, [state(spare=[1]), lambda: time.sleep(1.0), ended(0, more={"gone": {"1": {}}})])
    gone = FakeNode(1, [state(), lambda: time.sleep(0.3), lost])
    scene = Scene(tmp_path, hub, gone)
    followed = scene.follow()
    assert followed.results[0]["state"] == "done" and followed.lost[1].why == "the supervisor is gone"
    stops = [json.loads(text) for text in scene.events.read_text().splitlines() if '"stop"' in text]
    assert [stop["reason"] for stop in stops] == ["all nodes have ended"]


CUT_OFF = {"kind": "lost", "name": "node", "rank": None, "reason": "no sign of life for 6 s", "t": 1.0, "asked": None}


def test_a_server_that_was_cut_off_does_not_know_whether_the_run_goes_on(tmp_path: Path) -> None:
    # Its connection returns before the lead node has told the launcher that the run goes on without it.
    alone = {"lost": {"0": {"since": 1.0, "why": "no sign of life for 6 s"}}, "cause": {**CUT_OFF, "node_rank": 0}}
    over = threading.Event()
    lead = FakeNode(0, [state(spare=[1, 2]), lambda: time.sleep(1.0), lambda: over.set(), ended(0)])
    lead.scripts[0][-1] = ended(0, more={"gone": {"1": {"since": 1.0, "why": "no sign of life for 6 s"}}})
    cut_off = FakeNode(1, [state(spare=[1, 2]), BROKEN], [ended(1, "failed", alone)])
    scene = Scene(tmp_path, lead, cut_off, FakeNode(2, [state(), over, ended(2)]))
    followed = scene.follow()
    assert {k: result["state"] for k, result in followed.results.items()} == {0: "done", 1: "failed", 2: "done"}
    stops = [json.loads(text)["reason"] for text in scene.events.read_text().splitlines() if '"stop"' in text]
    assert stops == ["all nodes have ended"] and "every node stops" not in scene.output


@pytest.mark.parametrize(
    "answers",
    [
        [FleetError("tmux does not answer"), FleetError("tmux does not answer"), None],
        [OSError("no space"), OSError("no space"), None],
        [ConnectionLost("connection lost"), SessionExists("node1: tmux session exists")],  # it had been started
    ],
)
def test_a_node_whose_return_failed_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[Exception | None]
) -> None:
    left, returned = list(answers), threading.Event()

    def return_session(transport: FakeNode, node: Any, *, start_timeout: float) -> None:
        answer = left.pop(0)
        if not left:
            returned.set()
        if answer:
            raise answer

    for name in ("_RETURN_AFTER", "_RETURN_AGAIN"):
        monkeypatch.setattr(follow_module, name, 0.1)
    monkeypatch.setattr(follow_module, "return_session", return_session)
    going = state(generation=1, restarts=[{}], gone={"1": {}}, hub=0)
    lead = FakeNode(0, [going, returned, lambda: time.sleep(0.5), ended(0, more={"generation": 1, "gone": {}})])
    lost = line(lost={"reason": "the supervisor is gone", "state": None})
    scene = Scene(tmp_path, lead, FakeNode(1, [state(), lost], [state("waiting"), returned, ended(1)]), restarts=3)
    followed = scene.follow()
    assert not left and set(followed.results) == {0, 1}
    assert scene.output.count("could not be started again") == 1, "each reason is said once"


def test_a_node_is_started_again_after_another_has_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []
    returned = threading.Event()

    def return_session(transport: FakeNode, node: Any, *, start_timeout: float) -> None:
        tries.append(node.label)
        returned.set()

    monkeypatch.setattr(follow_module, "_RETURN_AFTER", 0.1)
    monkeypatch.setattr(follow_module, "return_session", return_session)
    going = state(generation=1, restarts=[{}], gone={"1": {}, "2": {}}, hub=0)
    lead = FakeNode(0, [going, returned, lambda: time.sleep(0.3), ended(0, more={"generation": 1, "gone": {"1": {}}})])
    alone = ended(1, "failed", {"left": True, "restarts": [], "generation": 0})
    lost = line(lost={"reason": "the supervisor is gone", "state": None})
    later = [state(), lambda: time.sleep(0.4), lost]
    scene = Scene(
        tmp_path, lead, FakeNode(1, [state(), alone]), FakeNode(2, later, [state("waiting"), returned, ended(2)]),
        restarts=3,
    )  # fmt: skip
    scene.follow(), returned.wait(5.0)
    assert [*map(str, tries)] == [scene.plan.nodes[2].label]


def test_losing_all_connections_after_an_expendable_node_ended_detaches(tmp_path: Path) -> None:
    hub = FakeNode(0, [state(spare=[], gone={"1": {}}), lambda: time.sleep(0.3), BROKEN])
    scene = Scene(tmp_path, hub, FakeNode(1, [ended(1, "failed", failed=True)]), lost_after=0.4)
    followed = scene.follow()
    assert followed.detached == "unreachable" and 0 not in followed.lost


@pytest.mark.parametrize("more", [{"lost": {"0": {"since": 1.0, "why": "no sign of life for 6 s"}}}, {"cause": CAUSE}])
def test_an_unreachable_lead_node_is_lost_once_other_nodes_report_the_end(tmp_path: Path, more: Any) -> None:
    # For example, the host of the only client is lost, and all other nodes are servers that the run could do without.
    lead = FakeNode(0, [state(spare=[1, 2]), lambda: time.sleep(0.3), BROKEN])
    servers = (FakeNode(k, [state(spare=[1, 2]), lambda: time.sleep(0.5), ended(k, "failed", more)]) for k in (1, 2))
    scene = Scene(tmp_path, lead, *servers, lost_after=0.4)
    followed = scene.follow()
    assert not followed.detached and set(followed.results) == {1, 2}
    assert followed.lost[0].out_of_reach
