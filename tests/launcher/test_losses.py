"""Tests of supervisors in server-client runs that lose nodes, without a launcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node_kit import python
from peers_kit import SERVE, Run
from waiting import DEADLINE, wait_until

MakeRun = Callable[..., Run]
WAIT = "import os, time; print('up', flush=True)\nwhile not os.path.exists('../go'): time.sleep(0.05)"
TWO_COPIES = [[0, 1], [1, 0], [], []]
ONE_COPY = [[0], [1], [], []]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRun]:
    made: list[Run] = []

    def run(parts: list[list[int]], roles: str = "sscc", **more: Any) -> Run:
        more.setdefault("server_restarts", 3)
        made.append(Run(tmp_path / f"run{len(made)}", len(roles), argv=python(WAIT), roles=roles, parts=parts, **more))
        return made[-1]

    yield run
    for one in made:
        one.kill()


def states(results: list[dict[str, Any]]) -> list[str | None]:
    return [result.get("state") for result in results]


def finish(run: Run) -> list[dict[str, Any]]:
    (run.nodes[0].path.parent / "go").touch()
    return run.ends(time.monotonic(), within=8)


def loss_of(run: Run, k: int) -> dict[str, Any]:
    """Wait until the run continues without node ``k``; return the hub's record of this loss."""
    hub = run.nodes[run.lead]
    wait_until((hub.path / "state.json").exists)
    wait_until(lambda: str(k) in hub.json("state.json")["gone"])
    loss: dict[str, Any] = hub.json("state.json")["gone"][str(k)]
    return loss


def kill(run: Run, k: int) -> None:
    run.nodes[k].supervisor.kill()  # type: ignore[union-attr]


def kinds(run: Run, k: int) -> list[str]:
    return [event["kind"] for event in run.nodes[k].events()]


def test_servers_and_clients_succeed_with_the_first_training_node_as_hub(make: MakeRun) -> None:
    run = make(ONE_COPY).start()
    assert [node.json("state.json")["state"] for node in run.nodes] == ["serving", "serving", "training", "training"]
    assert run.nodes[2].json("state.json")["spare"] == []
    results = finish(run)
    assert states(results) == ["done"] * 4 and all(result["gone"] == {} for result in results)
    assert results[2]["clock_offset"] == 0.0


def test_a_dead_server_is_restarted_on_its_port(make: MakeRun) -> None:
    serve = (
        "import os, pathlib, socket, time; s = socket.create_server(('127.0.0.1', int(os.environ['AT'])))\n"
        "pathlib.Path('server.ready').touch(); print('serving', flush=True); time.sleep(60)"
    )
    run = make(ONE_COPY)
    node = run.nodes[1]
    node.spec["server"] |= {"argv": python(serve), "env": {"AT": str(run.port + 1)}}
    run.start()
    first = node.pid("server")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: node.json("state.json")["state"] == "restarting")
    wait_until(lambda: node.log("server") == ["serving"] * 2 and node.json("state.json")["state"] == "serving")
    assert node.pid("server") != first and kinds(run, 1).count("server-ready") == 2
    results = finish(run)
    assert states(results) == ["done"] * 4
    (restart,) = results[1]["findings"]
    assert restart["text"] == ("server of node1 (gpu1) was killed by signal 9 (SIGKILL); restart 1 of 3 in 0.5 s")


@pytest.mark.slow
def test_a_dead_server_of_a_worker_is_restarted(make: MakeRun) -> None:
    run = make([[0], [1]], "ww").start()
    node = run.nodes[0]
    first = node.pid("server")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: kinds(run, 0).count("server-ready") == 2 and node.pid("server") != first)
    assert node.json("state.json")["state"] == "training"
    results = finish(run)
    assert states(results) == ["done"] * 2
    assert [finding["kind"] for finding in results[0]["findings"]] == ["server-restart"]


@pytest.mark.slow
def test_a_server_that_keeps_dying_ends_the_run_with_the_names_of_its_parts(make: MakeRun) -> None:
    run = make(ONE_COPY, server_restarts=1).start()
    node = run.nodes[1]
    os.kill(node.pid("server"), signal.SIGKILL)
    wait_until(lambda: len(node.log("server")) == 2)
    since = time.monotonic()
    os.kill(node.pid("server"), signal.SIGTERM)
    results = run.ends(since)
    assert states(results) == ["done", "failed", "stopped", "stopped"]
    why = "ended while it was needed, after 1 restart (run.server_restarts); it was killed by signal 15"
    assert results[2]["reason"] == f"server of node1 (gpu1) {why} (SIGTERM); no other node holds part 1"


@pytest.mark.slow
def test_a_server_that_was_never_ready_is_not_restarted(make: MakeRun) -> None:
    run = make(ONE_COPY)
    run.nodes[0].spec["server"]["argv"] = python("raise OSError('port 29600 is taken')")
    since = time.monotonic()
    results = run.start(up=False).ends(since)
    assert states(results)[0] == "failed" and "server-restart" not in kinds(run, 0)
    assert "raised OSError: port 29600 is taken; no other node holds part 0" in results[2]["reason"]


@pytest.mark.parametrize(
    "how",
    [pytest.param("lost", marks=pytest.mark.slow), "failed", pytest.param("before ready", marks=pytest.mark.slow)],
)
def test_a_run_continues_without_a_server_whose_parts_have_another_holder(make: MakeRun, how: str) -> None:
    run = make(TWO_COPIES, server_restarts=0)
    if how == "before ready":
        run.nodes[0].spec["server"]["argv"] = python("import time; time.sleep(0.5); raise OSError('port is taken')")
    run.start()
    if how == "lost":
        kill(run, 0)
    elif how == "failed":
        os.kill(run.nodes[0].pid("server"), signal.SIGKILL)
    loss = loss_of(run, 0)
    verb = "was lost" if how == "lost" else "failed"
    assert loss["text"].startswith(f"server node0 (gpu0) {verb} at ")
    assert loss["text"].endswith("): parts 0, 1 are served by node1 (gpu1)")
    results = finish(run)
    assert states(results) == [None if how == "lost" else "failed", "done", "done", "done"]
    assert set(results[2]["gone"]) == {"0"} and results[2]["lost"] == {} and results[2]["cause"] is None
    assert "server-lost" in kinds(run, 2)
    assert [finding["kind"] for finding in results[2]["findings"]] == ["server-lost"]


@pytest.mark.slow
def test_the_loss_of_the_last_holder_ends_the_run(make: MakeRun) -> None:
    run = make(TWO_COPIES).start()
    kill(run, 1)
    loss_of(run, 1)
    since = time.monotonic()
    kill(run, 0)
    results = run.ends(since)
    assert states(results) == [None, None, "failed", "stopped"]
    why = "its supervisor ended without reporting a result; it was probably killed"
    reason = f"node0 (gpu0): {why}; no other node holds parts 0, 1, as node1 (gpu1) was lost before"
    assert results[2]["reason"] == results[3]["reason"] == reason
    assert set(results[2]["gone"]) == {"1"} and set(results[2]["lost"]) == {"0"}


@pytest.mark.slow
def test_a_run_continues_without_a_server_that_never_started(make: MakeRun) -> None:
    run = make(TWO_COPIES, start_timeout=5.0)
    for node in run.nodes[1:]:
        node.start()
    assert "did not report to node2 within 5 s (run.start_timeout)" in loss_of(run, 0)["why"]
    run.nodes.pop(0)
    assert states(finish(run)) == ["done"] * 3


@pytest.mark.slow
def test_the_loss_of_a_server_after_training_is_harmless(make: MakeRun) -> None:
    run = make(ONE_COPY, grace=4.0)
    # the server of a run that is done gets SIGINT
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + SERVE
    run.nodes[0].spec["server"]["argv"] = python(stubborn)
    run.start()
    (run.nodes[0].path.parent / "go").touch()
    wait_until(lambda: run.nodes[0].json("state.json")["state"] == "stopping")
    since = time.monotonic()
    kill(run, 0)
    assert states(run.ends(since)) == [None, "done", "done", "done"]


@pytest.mark.slow
def test_a_lost_hub_stops_all_nodes(make: MakeRun) -> None:
    run = make(TWO_COPIES).start()
    since = time.monotonic()
    kill(run, 2)
    results = run.ends(since)
    assert states(results) == ["failed", "failed", None, "failed"]
    assert (
        results[3]["reason"] == "node2 (gpu2): its supervisor ended without reporting a result; it was probably killed"
    )


@pytest.mark.slow
def test_a_stop_request_to_a_server_stops_all_nodes(make: MakeRun) -> None:
    run = make(TWO_COPIES).start()
    since = time.monotonic()
    (run.nodes[1].path / "control" / "stop").write_text('{"by": "al@pc", "why": "gnnfleet stop", "now": false}')
    results = run.ends(since)
    assert states(results) == ["done", "done", "stopped", "stopped"]
    assert results[2]["asked"]["by"] == "al@pc" and results[2]["gone"] == {}


# Clients


def test_a_lost_client_ends_the_run(make: MakeRun) -> None:
    run = make(TWO_COPIES).start()
    since = time.monotonic()
    kill(run, 3)
    results = run.ends(since)
    assert states(results) == ["done", "done", "failed", None] and "3" in results[2]["lost"]


@pytest.mark.slow
def test_a_server_that_was_only_suspended_stops_after_its_exclusion(make: MakeRun) -> None:
    run = make(TWO_COPIES).start()
    os.kill(run.nodes[0].supervisor.pid, signal.SIGSTOP)  # type: ignore[union-attr]
    loss_of(run, 0)
    os.kill(run.nodes[0].supervisor.pid, signal.SIGCONT)  # type: ignore[union-attr]
    assert run.nodes[0].supervisor.wait(DEADLINE) == 0  # type: ignore[union-attr]
    assert run.nodes[2].json("state.json")["state"] == "training"
    results = finish(run)
    assert states(results) == ["done"] * 4 and set(results[2]["gone"]) == {"0"}
