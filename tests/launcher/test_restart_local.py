"""Tests of restarts after a failure, in runs that are launched on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.node import procs
from launching import REPOSITORY, Running, launch, local_config, make_parts
from restart_kit import TRAIN
from waiting import DEADLINE, wait_until


@pytest.fixture(autouse=True)
def private_tmux(compiled_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a tmux server for this test alone. Afterwards, assert that no session is left."""
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    yield
    listed = subprocess.run(["tmux", "list-sessions"], capture_output=True, text=True)
    subprocess.run(["tmux", "kill-server"], capture_output=True, check=False)
    assert listed.returncode != 0, f"sessions left behind: {listed.stdout}"


class Counting:
    def __init__(self, folder: Path, data: dict[str, Any] | None = None, nodes: int = 3, **run: Any) -> None:
        self.folder = folder
        settings = {"restarts": 3, "peer_timeout": 3, "grace": 1, **run}
        self.config = local_config(folder, [1] * nodes, run=settings, data=data or {"replicas": 2})
        if data is None:
            make_parts(self.config)
        (folder / "train.py").write_text(TRAIN)
        self.running = Running(self.config, "--run-id", "again", "--", "python", "train.py", str(folder / "go"))

    def node(self, k: int) -> Path:
        return self.folder / f"node{k}/runs/again/node{k}"

    def state(self, k: int) -> dict[str, Any]:
        path = self.node(k) / "state.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def await_steps(self, *nodes: int, generation: int = 0) -> None:
        for k in nodes:
            wait_until(lambda k=k: self._launcher_failed() or self._steps(k, generation))
            assert self._steps(k, generation), self.running.output

    def _launcher_failed(self) -> bool:
        # a launcher that the test has killed does not count
        return self.running.process.poll() not in (None, -signal.SIGKILL)

    def _steps(self, k: int, generation: int) -> bool:
        state = self.state(k)
        return state.get("generation") == generation and bool(state["ranks"])

    def kill(self, k: int, name: str) -> None:
        if name == "supervisor":
            os.kill(self.state(k)["pid"], signal.SIGKILL)
            return
        os.kill(next(one["pid"] for one in self.state(k)["processes"] if one["name"] == name), signal.SIGKILL)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(REPOSITORY / "launch.py"), *words]
        env = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(
            argv, cwd=self.folder, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
        )


@pytest.mark.slow
def test_a_killed_rank_and_then_a_lost_lead_node(tmp_path: Path) -> None:
    run = Counting(tmp_path, nodes=2)
    run.await_steps(0, 1)
    run.kill(1, "rank1")
    run.running.await_line(
        "restart 1 of 3: rank 1 on node1 (local) was killed by signal 9 (SIGKILL); going on with 2 of 2"
    )
    run.await_steps(0, 1, generation=1)
    run.kill(0, "supervisor")
    run.running.await_line("restart 2 of 3: node0 (local): its supervisor ended without reporting a result")
    run.await_steps(1, generation=2)
    status = run.command("status", "again")
    assert "trains after restart 2 of 3" in status.stdout, status.stdout + status.stderr
    # node0 would join the next restart, but the run ends before that
    run.running.await_line("node0 (local): its supervisor was started again; it joins at the next restart")
    (tmp_path / "go").touch()
    done = run.running.end()
    assert done.status == 0 and "Done in" in done.output, done.output
    assert "every node stops" not in done.output and "Traceback" not in done.output, done.output
    result = done.result
    assert result["state"] == "done" and result["first_failure"] is None
    assert [one["without"] for one in result["restarts"]] == [[], [0]]
    assert any("node0" in note for note in result["notes"]), result["notes"]
    assert done.output.count("restart 1 of 3") == 2, "once when it happens, once in the report"


@pytest.mark.slow
def test_without_the_launcher(tmp_path: Path) -> None:
    run = Counting(tmp_path)
    run.await_steps(0, 1, 2)
    run.running.process.kill()
    run.kill(2, "supervisor")
    run.await_steps(0, 1, generation=1)
    (tmp_path / "go").touch()
    followed = run.command("follow", "again", "--plain")
    assert followed.returncode == 0 and "Done in" in followed.stdout, followed.stdout + followed.stderr
    assert "restart 1 of 3: node2 (local)" in followed.stdout


@pytest.mark.slow
def test_a_run_that_cannot_start_again_says_why(tmp_path: Path) -> None:
    run = Counting(tmp_path, restarts=1, min_nodes=3)
    run.await_steps(0, 1, 2)
    run.kill(1, "supervisor")
    done = run.running.end()
    assert done.status == 1 and "The run failed: node1 (local)" in done.output, done.output
    assert "no restart: training nodes left: 2, needed: 3 (run.min_nodes)" in done.output
    since = time.monotonic()
    while procs.run_processes(f"GNNFLEET_RUN_DIR={run.node(0)}", None) and time.monotonic() - since < 10:
        time.sleep(0.1)
    assert procs.run_processes(f"GNNFLEET_RUN_DIR={run.node(0)}", None) == []


@pytest.mark.slow
def test_parts_of_a_lost_node_are_read_from_a_shared_folder(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    made = launch(local_config(tmp_path / "made", [1, 1, 1]), "--", "false")
    parts = tmp_path / "made/parts"
    assert (parts / "manifest.json").is_file(), made.output
    run = Counting(tmp_path, {"mode": "verify", "folder": str(parts)})
    run.await_steps(0, 1, 2)
    run.kill(1, "supervisor")
    run.await_steps(0, 2, generation=1)
    nodes = json.loads((run.node(0) / "cluster.json").read_text())["nodes"]
    assert [(node["node_rank"], node["parts"]) for node in nodes] == [(0, [0, 1]), (2, [2])]
    (tmp_path / "go").touch()
    done = run.running.end()
    assert done.status == 0 and done.result["state"] == "done", done.output


@pytest.mark.slow
def test_a_supervisor_that_was_killed_joins_at_the_next_restart(tmp_path: Path) -> None:
    run = Counting(tmp_path)
    run.await_steps(0, 1, 2)
    before = run.state(2)["pid"]
    run.kill(2, "supervisor")
    run.running.await_line("going on with 2 of 3 nodes")
    run.running.await_line("node2 (local): its supervisor was started again; it joins at the next restart")
    run.await_steps(0, 1, generation=1)
    wait_until(lambda: run.state(2).get("state") == "waiting")
    assert run.state(2)["pid"] != before
    run.kill(1, f"rank{_rank_of(run, 1)}")
    run.running.await_line("going on with 3 of 3 nodes")
    run.await_steps(0, 1, 2, generation=2)
    (tmp_path / "go").touch()
    done = run.running.end()
    assert done.status == 0 and done.result["state"] == "done", done.output
    assert [(one["without"], one["nodes"]) for one in done.result["restarts"]] == [([2], [0, 1]), ([], [0, 1, 2])]


@pytest.mark.slow
def test_a_supervisor_that_was_started_again_ends_with_the_run(tmp_path: Path) -> None:
    run = Counting(tmp_path)
    run.await_steps(0, 1, 2)
    run.kill(2, "supervisor")
    run.running.await_line("its supervisor was started again")
    wait_until(lambda: run.state(2).get("state") == "waiting")
    (tmp_path / "go").touch()
    done = run.running.end()
    assert done.status == 0 and done.result["state"] == "done", done.output
    assert "the run has ended without this node" in json.loads((run.node(2) / "result.json").read_text())["reason"]


def _rank_of(run: Counting, k: int) -> int:
    return next(one["rank"] for one in run.state(k)["processes"] if one["rank"] is not None)
