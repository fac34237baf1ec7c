"""Tests of supervisors in runs that restart after a failure, without a launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.node import leases
from restart_kit import RestartRun, await_attempt, restarts
from waiting import stretched, wait_until

MakeRun = Callable[..., RestartRun]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[RestartRun] = []

    def run(count: int, **more: Any) -> RestartRun:
        made.append(RestartRun(tmp_path / f"run{len(made)}", count, **more))
        return made[-1]

    yield run
    for one in made:
        one.kill()


def test_after_a_killed_rank_all_nodes_go_on_from_the_newest_checkpoint(make: MakeRun) -> None:
    run = make(3).stepping()
    run.nodes[0].says("rank0", "up")
    os.kill(run.nodes[2].pid("rank2"), signal.SIGKILL)
    steps = [await_attempt(run.nodes[k], rank, world=3) for k, rank in _ranks(run).items()]
    assert max(steps) > 0
    results = run.finish()
    assert [result["state"] for result in results.values()] == ["done"] * 3
    (restart,) = results[0]["restarts"]
    assert restart["reason"] == "rank 2 on node2 (gpu2) was killed by signal 9 (SIGKILL)"
    assert restart["nodes"] == [0, 1, 2] and restart["without"] == [] and restart["step"] == max(steps)
    assert all(result["restarts"] == [restart] and result["gone"] == {} for result in results.values())
    assert restart["seconds"] < 10
    for node in run.nodes:
        assert [event["generation"] for event in node.events() if event["kind"] == "restart"] == [1]
        assert (node.path / "attempts/0/outcomes").is_dir()
    assert not any(outcome["failed"] for result in results.values() for outcome in result["outcomes"])


def _ranks(run: RestartRun) -> dict[int, int]:
    wait_until(lambda: (run.nodes[1].path / "attempts/0").exists())
    wait_until(lambda: restarts(run.nodes[1]))
    return {int(k): ranks[0] for k, ranks in restarts(run.nodes[1])[0]["ranks"].items() if ranks}


@pytest.mark.parametrize("how", ["killed", pytest.param("silent", marks=pytest.mark.slow)])
def test_the_others_go_on_without_the_lead_node(make: MakeRun, how: str) -> None:
    run = make(3, lost_after=5.0).stepping()
    lead = run.nodes[0].supervisor
    assert lead is not None
    since = time.monotonic()
    os.kill(lead.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    ranks = _ranks(run)
    for k, rank in ranks.items():
        await_attempt(run.nodes[k], rank, world=2)
    assert time.monotonic() - since < stretched(15) and set(ranks) == {1, 2}
    if how == "silent":
        os.kill(lead.pid, signal.SIGCONT)
        wait_until(lambda: run.nodes[0].json("state.json")["state"] == "waiting")
    results = run.finish(without=(0,))
    assert [result["state"] for result in results.values()] == ["done"] * 2
    assert results[1]["hub"] == 1 and set(results[1]["gone"]) == {"0"}
    reason = "probably killed" if how == "killed" else "no sign of life for 3 s"
    assert reason in results[2]["restarts"][0]["reason"]


def _suspend_until_left(run: RestartRun) -> dict[int, int]:
    """Suspend the supervisor of node 2 until the run has restarted without this node.

    Returns the new ranks of all other nodes.
    """
    away = run.nodes[2].supervisor
    assert away is not None
    os.kill(away.pid, signal.SIGSTOP)
    ranks = _ranks(run)
    await_attempt(run.nodes[0], ranks[0], world=2)
    os.kill(away.pid, signal.SIGCONT)
    wait_until(lambda: run.nodes[2].json("state.json")["state"] == "waiting")
    return ranks


@pytest.mark.slow
def test_a_node_that_was_suspended_is_part_of_the_next_attempt(make: MakeRun) -> None:
    run = make(3, lost_after=60.0).stepping()
    ranks = _suspend_until_left(run)
    wait_until(lambda: run.nodes[0].json("state.json")["ranks"])
    time.sleep(2)
    os.kill(run.nodes[0].pid(f"rank{ranks[0]}"), signal.SIGKILL)
    wait_until(lambda: len(restarts(run.nodes[2])) == 2)
    for k, (rank,) in {int(k): ranks for k, ranks in restarts(run.nodes[2])[1]["ranks"].items()}.items():
        await_attempt(run.nodes[k], rank, generation=2, world=3)
    results = run.finish()
    assert [result["state"] for result in results.values()] == ["done"] * 3 and results[0]["gone"] == {}


@pytest.mark.slow
def test_a_node_that_comes_back_too_late_ends_with_the_run(make: MakeRun) -> None:
    run = make(3, lost_after=60.0).stepping()
    _suspend_until_left(run)
    results = run.finish()
    assert [results[k]["state"] for k in (0, 1)] == ["done"] * 2 and results[2]["state"] != "done"
    assert results[2]["reason"].endswith("no restart: the run has ended without this node")


@pytest.mark.slow
def test_a_lead_node_that_is_told_to_end_is_left_behind(make: MakeRun) -> None:
    run = make(2).stepping()
    run.nodes[0].supervisor.terminate()  # type: ignore[union-attr]
    assert run.nodes[0].end()["state"] == "stopped"
    assert await_attempt(run.nodes[1], 0, world=1) > 0
    assert run.finish(without=(0,))[1]["state"] == "done"


@pytest.mark.slow
def test_two_losses_one_after_the_other(make: MakeRun) -> None:
    run = make(3).stepping()
    run.nodes[2].supervisor.kill()  # type: ignore[union-attr]
    await_attempt(run.nodes[0], _ranks(run)[0], world=2)
    wait_until(lambda: run.nodes[1].json("state.json")["ranks"])
    run.nodes[0].supervisor.kill()  # type: ignore[union-attr]
    await_attempt(run.nodes[1], 0, generation=2, world=1)
    result = run.finish(without=(0, 2))[1]
    assert result["state"] == "done" and [one["without"] for one in result["restarts"]] == [[2], [0]]
    assert set(result["gone"]) == {"0", "2"}


def test_a_run_of_one_node_starts_again(make: MakeRun) -> None:
    run = make(1).stepping()
    os.kill(run.nodes[0].pid("rank0"), signal.SIGKILL)
    assert await_attempt(run.nodes[0], 0, world=1) > 0
    assert run.finish()[0]["state"] == "done"


@pytest.mark.slow
def test_a_part_that_no_other_node_has_ends_the_run(make: MakeRun) -> None:
    run = make(3, roles="www", parts=[[0], [1], [2]]).stepping()
    run.nodes[1].supervisor.kill()  # type: ignore[union-attr]
    results = run.results(without=(1,))
    assert results[0]["state"] == "failed" and results[2]["state"] in ("failed", "stopped")
    for result in results.values():
        assert result["reason"].endswith("; no restart: no remaining node has part 1"), result["reason"]
    assert set(results[0]["lost"]) == {"1"}


@pytest.mark.slow
def test_restarts_are_used_up(make: MakeRun) -> None:
    run = make(2, restarts=1)
    run.nodes[1].spec["trainer"]["env"]["FAIL_AT"] = "5"
    results = run.start(up=False).results()
    assert results[1]["state"] == "failed"
    assert results[0]["reason"].endswith("no restart: the limit of run.restarts (1) is reached")
    assert len(results[0]["restarts"]) == 1


def test_a_failure_before_the_first_step_is_no_reason_to_start_again(make: MakeRun) -> None:
    run = make(2)
    for node in run.nodes:
        node.spec["trainer"]["env"]["FAIL_AT"] = "0"
    results = run.start(up=False).results()
    assert "ended with exit status 3; no restart: no process had trained a step" in results[0]["reason"]
    assert results[0]["restarts"] == []


def test_a_stop_is_no_reason_to_start_again(make: MakeRun) -> None:
    run = make(2).stepping()
    (run.nodes[1].path / "control/stop").write_text('{"by": "al@pc", "why": "gnnfleet stop", "now": false}')
    results = run.results()
    assert [result["state"] for result in results.values()] == ["stopped"] * 2
    assert results[0]["reason"] == "stop requested by al@pc (gnnfleet stop), on node1 (gpu1)"


TWO_COPIES = [[0, 1], [1, 0], [], []]


@pytest.mark.slow
def test_a_lost_client_is_left_behind(make: MakeRun) -> None:
    run = make(4, roles="sscc", parts=TWO_COPIES).stepping()
    run.nodes[3].supervisor.kill()  # type: ignore[union-attr]
    await_attempt(run.nodes[2], 0, world=1)
    results = run.finish(without=(3,))
    assert [result["state"] for result in results.values()] == ["done"] * 3
    assert results[0]["restarts"][0]["nodes"] == [0, 1, 2] and results[0]["restarts"][0]["without"] == [3]


@pytest.mark.slow
def test_a_lost_server_with_a_copy_needs_no_restart_and_stays_away_from_the_next(make: MakeRun) -> None:
    run = make(4, roles="sscc", parts=TWO_COPIES).stepping()
    run.nodes[1].supervisor.kill()  # type: ignore[union-attr]
    wait_until(lambda: "1" in run.nodes[2].json("state.json")["gone"])
    assert restarts(run.nodes[2]) == []
    os.kill(run.nodes[3].pid("rank3"), signal.SIGKILL)
    for k, (rank,) in {2: _ranks_of(run, 2), 3: _ranks_of(run, 3)}.items():
        await_attempt(run.nodes[k], rank, world=2)
    results = run.finish(without=(1,))
    assert [result["state"] for result in results.values()] == ["done"] * 3
    assert results[0]["restarts"][0]["nodes"] == [0, 2, 3] and set(results[2]["gone"]) == {"1"}


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_started_again_with_all_others(make: MakeRun) -> None:
    run = make(4, roles="sscc", parts=[[0], [1], [], []], server_restarts=0).stepping()
    os.kill(run.nodes[0].pid("server"), signal.SIGKILL)
    await_attempt(run.nodes[2], _ranks_of(run, 2)[0], world=2)
    wait_until(lambda: run.nodes[0].log("server").count("serving") == 2)
    results = run.finish()
    assert [result["state"] for result in results.values()] == ["done"] * 4
    assert "server of node0 (gpu0) ended while it was needed" in results[1]["restarts"][0]["reason"]


def _ranks_of(run: RestartRun, k: int) -> list[int]:
    wait_until(lambda: restarts(run.nodes[k]))
    found: list[int] = restarts(run.nodes[k])[0]["ranks"][str(k)]
    return found


def test_a_node_whose_devices_are_taken_when_it_returns_leaves_the_run_to_the_others(
    tmp_path: Path, make: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    node = make(2, leases=["cuda:0"]).nodes[1]
    (node.path / "returns.json").write_text('{"generation": 0}')
    assert leases.take(["cuda:0"], leases.this_process("other", 0)) == []
    result = node.run()
    assert result["state"] == "failed" and "is held by run other" in result["reason"] and result["left"]
