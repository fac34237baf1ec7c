"""Tests of a run's final report: times of all nodes on one clock, lost nodes, and stop requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.model import LaunchPlan, Login
from launcher.report.ending import conclude
from launcher.report.report import Lost, RunReport
from run_kit import make_launch, make_node

FOLDER = Path("/nowhere")


def record(rank: int, ended: float, **more: Any) -> dict[str, Any]:
    defaults = {"name": f"rank{rank}", "node_rank": rank, "rank": rank, "returncode": 0, "signal": None, "oom": False}
    return defaults | {"started": 1.0, "ended": ended, "failed": False, "traceback": [], "tail": [], **more}


def result(k: int, state: str, *records: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"node_rank": k, "state": state, "reason": "", "outcomes": list(records), **more}


def failed(rank: int, ended: float, **more: Any) -> dict[str, Any]:
    return record(rank, ended, **{"failed": True, "returncode": 3, **more})


def stopped(rank: int, ended: float) -> dict[str, Any]:
    return record(rank, ended, stopped=True, returncode=143, signal="SIGTERM")


def report(*results: dict[str, Any], nodes: int = 2, offsets: dict[int, float] | None = None, **more: Any) -> RunReport:
    plan = make_launch([make_node(Path("/w"), k, []) for k in range(nodes)])
    return judged(plan, {one["node_rank"]: one for one in results}, offsets, **more)


def judged(
    plan: LaunchPlan, results: dict[int, dict[str, Any]], offsets: dict[int, float] | None = None, **more: Any
) -> RunReport:
    made = RunReport("r1", FOLDER, dict(results), **more)
    conclude(made, plan, 1.0, offsets)
    return made


def test_the_first_failure_is_found_although_clocks_differ_by_minutes() -> None:
    # By the clocks of the nodes, node 1 failed 298 s after node 0. The clock of node 1 is 300 s ahead, so in truth it
    # failed 2 s before node 0.
    zero = result(0, "failed", failed(0, 102.0), clock_offset=0.0)
    one = result(1, "failed", failed(1, 400.0, returncode=5), clock_offset=300.0)
    made = report(zero, one, offsets={0: 60.0, 1: 7.0})
    assert made.first_failure is not None and made.first_failure.rank == 1
    assert made.first_failure.ended == pytest.approx(400.0 - 300.0 - 60.0), "on the launching machine's clock"
    assert made.exit_status == 5


def test_without_measured_offsets_heartbeats_give_the_clock_differences() -> None:
    made = report(result(0, "failed", failed(0, 102.0)), result(1, "failed", failed(1, 400.0)), clocks={1: 300.0})
    assert made.first_failure is not None and made.first_failure.rank == 1


def test_a_node_that_node_0_lost_is_the_first_failure() -> None:
    lost = {"1": {"since": 90.0, "why": "no sign of life for 6 s"}}
    zero = result(0, "failed", failed(0, 95.0, follow_up=True), lost=lost)
    mine = Lost("no contact for 12 s", 107.0, out_of_reach=True)
    made = report(zero, lost={1: mine})
    assert made.first_failure is not None
    assert (made.first_failure.place, made.first_failure.reason) == ("node1 (local)", "no sign of life for 6 s")
    assert made.state == "failed"


def test_unreachable_hosts_are_named_in_the_syntax_of_exclude() -> None:
    # The report names lost hosts as `--exclude` accepts them: by host name if all nodes of the host are lost, else by
    # the login of the lost node. It names none if all nodes are lost.
    places = [(None, "gnn1", None), ("al", "gnn2", 22), ("al", "gnn3", 22), ("bo", "gnn3", 23), ("al", "fe80::1", 22)]

    def excluded(*unreachable: int) -> tuple[str, ...]:
        nodes = [make_node(Path("/w"), k, [], login=Login(*place)) for k, place in enumerate(places)]
        lost = {k: Lost("no contact for 12 s", 107.0, out_of_reach=True) for k in unreachable}
        results = {0: result(0, "failed")} if 0 not in unreachable else {}
        return judged(make_launch(nodes), results, lost=lost).out_of_reach

    assert excluded(1) == ("gnn2",)
    assert excluded(2, 3) == ("gnn3",)
    assert excluded(3, 4) == ("bo@gnn3:23", "fe80::1")
    assert excluded(0, 1, 2, 3, 4) == ()


def test_a_lost_supervisor_has_the_nodes_reason_and_the_peers_time() -> None:
    lost = {"1": {"since": 90.0, "why": "its connection closed"}}
    made = report(result(0, "stopped", stopped(0, 95.0), lost=lost), lost={1: Lost("the supervisor is gone", 91.0)})
    assert made.first_failure is not None
    assert (made.first_failure.reason, made.first_failure.ended) == ("the supervisor is gone", 90.0)


def test_a_network_cut_between_two_nodes_blames_the_one_that_node_0_lost() -> None:
    # The results of both nodes have arrived, and each says that the other node was lost.
    zero = result(0, "stopped", stopped(0, 99.0), lost={"1": {"since": 91.0, "why": "no sign of life for 6 s"}})
    one = result(1, "stopped", stopped(1, 98.0), lost={"0": {"since": 90.0, "why": "no contact with node0 for 6 s"}})
    made = report(zero, one)
    assert made.first_failure is not None and made.first_failure.place == "node1 (local)"
    assert [outcome.node_rank for outcome in made.outcomes if outcome.name == "node"] == [1]


def test_node_0_is_the_lost_node_when_all_others_lost_it() -> None:
    # The network of node 0 was down for a while, so that node 0 and the other nodes lost each other; later the results
    # of all nodes arrived.
    gone = {"since": 91.0, "why": "no sign of life for 6 s"}
    zero = result(0, "failed", stopped(0, 99.0), lost={"1": gone, "2": gone})
    others = [result(k, "failed", stopped(k, 98.0), lost={"0": gone}) for k in (1, 2)]
    made = report(zero, *others, nodes=3)
    assert made.first_failure is not None and made.first_failure.place == "node0 (local)"


def test_a_lead_node_that_was_alone_lost_no_server() -> None:
    # The network of node 0, a client, was down: it went on without one of the two servers, and then without none. A
    # server that it lost a minute before is not blamed on that.
    lost = {"since": 91.0, "why": "no sign of life for 6 s"}
    servers = [result(k, "failed", stopped(k, 98.0), lost={"0": lost}) for k in (1, 2)]
    for earlier, kept in ((without(1), True), ({"gone": {"1": {**without(1)["gone"]["1"], "since": 90.0}}}, False)):
        finding = {**earlier["gone"]["1"], "node_rank": 1, "rank": None}
        zero = result(0, "failed", stopped(0, 99.0), lost={"2": lost}, findings=[finding], **earlier)
        made = report(zero, *servers, nodes=3)
        assert made.first_failure is not None and made.first_failure.place == "node0 (local)"
        assert [one["text"] for one in made.findings] == ([finding["text"]] if kept else [])


def test_the_others_report_the_loss_of_a_node_0_without_a_result() -> None:
    one = result(1, "stopped", stopped(1, 98.0), lost={"0": {"since": 90.0, "why": "no contact with node0"}})
    made = report(one, lost={0: Lost("no contact for 70 s", 160.0, out_of_reach=True)})
    assert made.first_failure is not None and made.first_failure.reason == "no contact with node0"


def test_the_others_report_a_failure_on_a_node_that_vanished_later() -> None:
    cause = {"node_rank": 1, "name": "rank1", "rank": 1, "kind": "failure", "reason": "ended with exit status 3"}
    zero = result(0, "stopped", stopped(0, 95.0), cause={**cause, "t": 90.0, "asked": None})
    made = report(zero, lost={1: Lost("no contact for 70 s", 160.0, out_of_reach=True)})
    assert made.first_failure is not None
    assert made.first_failure.sentence == "rank 1 on node1 (local): ended with exit status 3"


def test_a_stop_request_names_who_sent_it() -> None:
    asked = {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}
    cause = {"node_rank": 1, "name": "node", "rank": None, "kind": "stop", "reason": "…", "t": 90.0, "asked": asked}
    made = report(result(0, "stopped", stopped(0, 95.0), cause=cause), result(1, "stopped", stopped(1, 95.0)))
    assert (made.state, made.exit_status) == ("stopped", 130)
    assert made.stopped_by == "alice@laptop (gnnfleet stop)"


def test_a_failure_before_the_stop_stays_a_failure() -> None:
    asked = {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}
    cause = {"node_rank": 1, "name": "node", "rank": None, "kind": "stop", "reason": "…", "t": 90.0, "asked": asked}
    made = report(result(0, "failed", failed(0, 89.0), cause=cause), result(1, "stopped", stopped(1, 95.0)))
    assert (made.state, made.exit_status) == ("failed", 3)


def test_ctrl_c_stops_a_run_even_when_ranks_failed() -> None:
    made = report(result(0, "failed", failed(0, 95.0)), result(1, "stopped"), interrupted="Ctrl-C")
    assert (made.state, made.stopped_by, made.first_failure) == ("stopped", "Ctrl-C", None)


def test_an_unreachable_node_is_done_when_node_0_is() -> None:
    # If node 0 succeeded, all other nodes have succeeded before, even a node that the launcher cannot reach.
    unreachable = Lost("no contact for 70 s", 160.0, out_of_reach=True)
    assert report(result(0, "done", record(0, 9.0)), lost={1: unreachable}).state == "done"
    assert report(result(1, "done", record(1, 9.0)), lost={0: unreachable}).state == "failed"


def test_a_stall_that_stopped_the_run_is_its_cause_but_a_straggler_is_not() -> None:
    stall = {"t": 90.0, "kind": "stall", "node_rank": 1, "rank": 1, "text": "no step for 131 s", "stop": True}
    slow = {"t": 10.0, "kind": "straggler", "node_rank": 0, "rank": 0, "text": "rank 0 is slow", "stop": False}
    made = report(
        result(0, "stopped", stopped(0, 95.0), findings=[stall, slow]), result(1, "stopped", findings=[stall])
    )
    assert made.findings == [slow, stall], "each once, in order"
    assert made.first_failure is not None and "no step for 131 s" in made.first_failure.reason


def test_a_node_that_failed_before_its_processes_started_gives_the_reason() -> None:
    reason = "CUDA device 0 is held by run x of alice since 2026-11-21 12:03:11 UTC (pid 123)"
    made = report(result(0, "failed", reason=reason), result(1, "stopped", stopped(1, 95.0)))
    assert made.first_failure is not None and made.first_failure.sentence == f"node0 (local): {reason}"


# Runs that continue without a node


def without(k: int, how: str = "lost") -> dict[str, Any]:
    """Return the hub's record that the run went on without node ``k``."""
    text = f"server node{k} (local) was lost at 12:00:00 UTC: part 0 is served by node1 (local)"
    loss = {"since": 50.0, "t": 50.0, "why": "no sign of life", "how": how, "kind": "server-lost", "text": text}
    return {"gone": {str(k): loss}}


@pytest.mark.parametrize("how", ["lost", "failure", "out of reach"])
def test_a_run_that_continued_without_a_node_is_done(how: str) -> None:
    hub = result(0, "done", record(0, 95.0), **without(2, how.replace("out of reach", "lost")))
    others = [result(1, "done", record(1, 95.0))]
    others += [result(2, "failed", failed(2, 50.0))] if how == "failure" else []
    lost = {} if how == "failure" else {2: Lost("no contact", 60.0, out_of_reach=how == "out of reach")}
    made = report(hub, *others, nodes=3, lost=lost)
    assert (made.state, made.exit_status, made.first_failure) == ("done", 0, None)
    (gone,) = (outcome for outcome in made.outcomes if outcome.done_without and outcome.failed)
    assert gone.node_rank == 2 and made.to_json()["nodes"][2]["outcomes"][0]["done_without"]


def test_the_failure_that_ended_the_run_comes_before_an_earlier_loss() -> None:
    hub = result(0, "failed", failed(0, 95.0, returncode=4, traceback=[], tail=["no such column"]), **without(2))
    made = report(hub, result(1, "stopped", stopped(1, 96.0)), nodes=3, lost={2: Lost("gone", 50.0)})
    assert made.first_failure is not None and made.first_failure.rank == 0
    assert made.exit_status == 4


def test_a_loss_that_made_other_ranks_fail_is_the_first_failure() -> None:
    # The run tried to continue without rank 1, which had failed, but rank 0 then failed because of this loss.
    hub = result(0, "failed", failed(0, 51.0, follow_up=True), **without(1, "failure"))
    made = report(hub, result(1, "failed", failed(1, 50.0, returncode=7)))
    assert made.first_failure is not None and made.first_failure.rank == 1


def test_the_hub_may_be_any_node() -> None:
    # Clock offsets and lost nodes are read from the result of the lead node, here node 1.
    plan = replace(make_launch([make_node(Path("/w"), k, []) for k in range(2)]), lead=1)
    lost = {"0": {"since": 90.0, "why": "no sign of life for 6 s"}}
    results = {1: result(1, "failed", stopped(1, 95.0), lost=lost, clock_offset=0.0)}
    made = judged(plan, results, {1: 40.0}, lost={0: Lost("no contact for 60 s", 160.0, out_of_reach=True)})
    assert made.first_failure is not None
    assert (made.first_failure.node_rank, made.first_failure.ended) == (0, 90.0 - 40.0)


def test_a_serving_cluster_that_was_stopped_is_done() -> None:
    plan = replace(make_launch([make_node(Path("/w"), k, []) for k in range(2)]), world_size=0)
    asked = {"asked": {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}}
    server = record(0, 95.0, stopped=True) | {"name": "server", "rank": None}
    results = {k: result(k, "done", server, clock_offset=0.0, **asked) for k in range(2)}
    made = judged(plan, results, {0: 5.0, 1: 7.0})
    assert (made.state, made.exit_status) == ("done", 0)
    assert [outcome.ended for outcome in made.outcomes] == [90.0, 88.0], (
        "servers do not measure each other's clocks, so each node's own offset applies"
    )


@pytest.mark.parametrize("how", ["failed", "lost"])
def test_parts_without_a_holder_are_named(how: str) -> None:
    # Server node1, which held part 1, was lost first. Then server node2, which holds parts 0 and 1, fails or is lost.
    held: list[tuple[int, ...]] = [(), (1,), (0, 1)]
    nodes = [replace(make_node(Path("/w"), k, []), role="server" if k else "client", parts=held[k]) for k in range(3)]
    own = failed(2, 90.0, returncode=137, signal="SIGKILL", note="ended") | {"name": "server", "rank": None}
    results = {0: result(0, "stopped", stopped(0, 95.0), clock_offset=0.0, **without(1))}
    results |= {2: result(2, "failed", own)} if how == "failed" else {}
    lost = {2: Lost("no sign of life", 90.0)} if how == "lost" else {}
    first = judged(make_launch(nodes), results, lost=lost).first_failure
    assert first is not None and first.node_rank == 2
    assert first.sentence.endswith("; no other node holds parts 0, 1, as node1 (local) was lost before")


@pytest.mark.parametrize(("replicas", "state"), [(2, "stopped"), (1, "failed")])
def test_a_server_lost_just_before_a_stop_fails_the_run_only_if_its_parts_are_lost(replicas: int, state: str) -> None:
    # Server node1 loses power two seconds before the stop; nobody has noticed that when the other nodes stop.
    held: list[tuple[int, ...]] = [(0, 1), (0, 1), ()] if replicas == 2 else [(0,), (1,), ()]
    roles = ("server", "server", "client")
    nodes = [replace(make_node(Path("/w"), k, []), role=role, parts=held[k]) for k, role in enumerate(roles)]
    asked = {"asked": {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}}
    server = record(0, 95.0, stopped=True) | {"name": "server", "rank": None}
    results = {
        0: result(0, "done", server, clock_offset=0.0, **asked),
        2: result(2, "stopped", stopped(2, 95.0), clock_offset=0.0, **asked),
    }
    made = judged(make_launch(nodes), results, lost={1: Lost("the supervisor is gone", 93.0)})
    assert made.state == state
    assert made.stopped_by == ("alice@laptop (gnnfleet stop)" if state == "stopped" else made.stopped_by)
    assert (made.first_failure is None) == (state == "stopped")


def test_a_rank_that_had_ended_before_does_not_date_the_failure_of_its_node() -> None:
    # Node 1 is told of by the loss of node 0, which it noticed at 206; one of its ranks had finished at 150.
    why = "no sign of life for 6 s"
    cause = {"kind": "lost", "name": "node", "rank": None, "node_rank": 0, "reason": why, "t": 200.0, "asked": None}
    more = {"cause": cause, "lost": {"0": {"since": 200.0, "why": why}}, "clock_offset": 0.0}
    one = result(1, "failed", record(1, 150.0), stopped(2, 207.0), **more)
    made = report(one)
    assert made.first_failure is not None and (made.first_failure.node_rank, made.first_failure.note) == (0, why)
