"""Tests of runs with several supervisors and no launcher: any failure ends all nodes within ten seconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.node import leases
from node_kit import python
from peers_kit import SERVE, SLEEP, Run, tcp_proxy
from waiting import DEADLINE, stretched, wait_until

MakeRun = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def run(count: int, **more: Any) -> Run:
        made.append(Run(tmp_path / f"run{len(made)}", count, **more))
        return made[-1]

    yield run
    for one in made:
        one.kill()


def states(results: list[dict[str, Any]]) -> list[str | None]:
    return [result.get("state") for result in results]


def test_failed_rank_stops_all_nodes_and_is_named_as_the_cause(make: MakeRun) -> None:
    run = make(3).start()
    pid, since = run.nodes[2].pid("rank2"), time.monotonic()
    os.kill(pid, signal.SIGKILL)
    results = run.ends(since)
    assert states(results) == ["stopped", "stopped", "failed"]
    assert results[2]["reason"] == "rank 2 was killed by signal 9 (SIGKILL)" and results[2]["cause"] is None
    for result in results[:2]:
        assert result["reason"] == "rank 2 on node2 (gpu2) was killed by signal 9 (SIGKILL)"
        cause = result["cause"]
        assert (cause["node_rank"], cause["name"], cause["rank"], cause["kind"]) == (2, "rank2", 2, "failure")
        assert abs(cause["t"] - results[2]["outcomes"][0]["ended"]) < 0.05
    assert all(result["lost"] == {} and result["asked"] is None for result in results)
    assert all(outcome["stopped"] for result in results[:2] for outcome in result["outcomes"])


@pytest.mark.slow
def test_failure_on_node_0_stops_the_members(make: MakeRun) -> None:
    run = make(2, server=python("import time; open('server.ready', 'w'); time.sleep(60)")).start()
    pid, since = run.nodes[0].pid("server"), time.monotonic()
    os.kill(pid, signal.SIGSEGV)
    results = run.ends(since)
    assert states(results) == ["failed", "stopped"]
    assert results[1]["reason"].startswith("server of node0 (gpu0) ended while it was needed; it crashed: segmentation")


@pytest.mark.slow
def test_a_leased_device_on_node_0_ends_the_other_nodes_at_once(
    make: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Node 0 ends before it listens for connections of other nodes; the other nodes must not wait for it until
    # `start_timeout`.
    monkeypatch.setenv("GNNFLEET_LEASES", str(tmp_path / "leases"))
    assert leases.take(["cuda:0"], leases.this_process("other", 0, "bob@desk")) == []
    run = make(2, leases=["cuda:0"], start_timeout=60.0)
    run.nodes[1].spec["leases"] = []
    since = time.monotonic()
    results = run.start(up=False).ends(since)
    assert states(results) == ["failed", "stopped"]
    assert results[0]["reason"].startswith("CUDA device 0 is held by run other of ")
    assert results[1]["reason"] == f"node0 (gpu0): {results[0]['reason']}"


def test_killed_supervisor_is_reported_lost(make: MakeRun) -> None:
    run = make(3).start()
    since = time.monotonic()
    run.nodes[1].supervisor.kill()  # type: ignore[union-attr]
    results = run.ends(since)
    assert states(results) == ["failed", None, "stopped"]
    why = "its supervisor ended without reporting a result; it was probably killed"
    assert results[0]["lost"]["1"]["why"] == why and abs(results[0]["lost"]["1"]["since"] - time.time()) < 10
    assert results[0]["reason"] == results[2]["reason"] == f"node1 (gpu1): {why}"
    assert results[2]["cause"]["kind"] == "lost" and results[2]["lost"] == {}


@pytest.mark.parametrize("silent", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_silent_machine_is_reported_lost(make: MakeRun, silent: int) -> None:
    # A supervisor is suspended with SIGSTOP, which looks to other nodes like a machine without power. The ranks ignore
    # SIGTERM, so that the other supervisors have to kill them.
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    run = make(3, argv=python(stubborn), grace=5.0).start()
    since = time.monotonic()
    os.kill(run.nodes[silent].supervisor.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    others = [node for k, node in enumerate(run.nodes) if k != silent]
    for node in others:
        node.supervisor.wait(DEADLINE)  # type: ignore[union-attr]
        assert node.processes() == []
    assert time.monotonic() - since < stretched(10)
    for node in others:
        result = node.json("result.json")
        assert "no sign of life for 3 s (run.peer_timeout)" in result["reason"]
        assert result["cause"]["node_rank"] == silent


@pytest.mark.slow
def test_cut_connection_stops_both_sides(make: MakeRun) -> None:
    run = make(3)
    with tcp_proxy(run.port) as proxy:
        run.reach_hub_at(2, proxy.port)
        run.start()
        since, proxy.cut = time.monotonic(), True
        results = run.ends(since)
    assert states(results) == ["failed", "stopped", "failed"]
    assert "2" in results[0]["lost"] and "0" in results[2]["lost"]
    assert results[1]["cause"]["node_rank"] == 2


@pytest.mark.slow
def test_short_interruption_of_a_connection_is_harmless(make: MakeRun) -> None:
    waiting = "import os, time; print('up', flush=True)\nwhile not os.path.exists('../go'): time.sleep(0.05)"
    run = make(2, argv=python(waiting), peer_timeout=4.0)
    with tcp_proxy(run.port) as proxy:
        run.reach_hub_at(1, proxy.port)
        run.start()
        proxy.cut = True
        time.sleep(2.6)
        proxy.cut = False
        time.sleep(2.0)
        assert run.met() and run.nodes[0].json("state.json")["peers"]["1"]["age"] < 2
        (run.nodes[0].path.parent / "go").touch()
        assert states(run.ends(time.monotonic())) == ["done", "done"]


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_stop_requested_at_any_node_stops_all(make: MakeRun, asked: int) -> None:
    run = make(3).start()
    since = time.monotonic()
    request = '{"by": "alice@laptop", "why": "gnnfleet stop", "now": false}'
    (run.nodes[asked].path / "control" / "stop").write_text(request)
    results = run.ends(since, within=5)
    assert states(results) == ["stopped"] * 3
    by = {"by": "alice@laptop", "why": "gnnfleet stop", "now": False}
    assert all(result["asked"] == by for result in results)
    words = "stop requested by alice@laptop (gnnfleet stop)"
    reasons = [words if k == asked else f"{words}, on node{asked} (gpu{asked})" for k in range(3)]
    assert [result["reason"] for result in results] == reasons


@pytest.mark.slow
def test_stop_now_skips_the_grace_period_of_all_nodes(make: MakeRun) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
    run = make(2, argv=python(stubborn), grace=20.0).start()
    since = time.monotonic()
    (run.nodes[0].path / "control" / "stop").write_text('{"by": "al", "why": "", "now": true}')
    results = run.ends(since, within=6)
    assert states(results) == ["stopped", "stopped"]
    assert all(outcome["stopped"] and not outcome["failed"] for result in results for outcome in result["outcomes"])


def test_deleted_run_folder_stops_all(make: MakeRun) -> None:
    run = make(2).start()
    since = time.monotonic()
    run.nodes[1].path.rename(run.nodes[1].path.parent / "elsewhere")
    results = run.ends(since, within=6)
    assert states(results) == ["stopped", None]
    assert results[0]["reason"] == f"node1 (gpu1): its run folder {run.nodes[1].path} has been deleted"


def test_nodes_end_at_different_times_and_serve_until_all_have_ended(make: MakeRun) -> None:
    run = make(3, server=python(SERVE))
    waiting = "import os, time; print('up', flush=True)\nwhile not os.path.exists('../go'): time.sleep(0.05)"
    run.rank(run.nodes[0], python("print('up')"))
    run.rank(run.nodes[1], python(waiting))
    run.nodes[2].spec["trainer"], run.nodes[2].own["ranks"] = None, []
    run.start(up=False)
    wait_until((run.nodes[0].path / "outcomes/rank0.json").exists)
    wait_until(run.nodes[1].says("rank1", "up"))
    time.sleep(1.5)
    assert [node.json("state.json")["state"] for node in run.nodes] == ["serving", "training", "serving"]
    (run.nodes[0].path.parent / "go").touch()
    results = run.ends(time.monotonic(), within=5)
    assert states(results) == ["done"] * 3
    assert all(not outcome["failed"] for result in results for outcome in result["outcomes"])


def test_clock_offset_of_a_member_is_in_its_result(make: MakeRun) -> None:
    library = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")
    if not library.exists():
        pytest.skip("faketime is not installed")
    waiting = "import select; print('up', flush=True); select.select([], [], [], 60)"  # faketime breaks time.sleep
    run = make(2, argv=python(waiting))
    ahead = {"LD_PRELOAD": str(library), "FAKETIME": "+5m", "DONT_FAKE_MONOTONIC": "1"}
    run.nodes[0].start()
    os.environ.update(ahead)
    try:
        run.nodes[1].start()
    finally:
        for name in ahead:
            del os.environ[name]
    run.wait_up()
    since = time.monotonic()
    os.kill(run.nodes[1].pid("rank1"), signal.SIGKILL)
    results = run.ends(since)
    assert abs(results[1]["clock_offset"] - 300) < 0.5 and results[0]["clock_offset"] == 0.0
    ended = next(outcome["ended"] for outcome in results[1]["outcomes"])
    assert abs(results[0]["cause"]["t"] - (ended - results[1]["clock_offset"])) < 0.01
    assert abs(results[0]["cause"]["t"] - time.time()) < 15
