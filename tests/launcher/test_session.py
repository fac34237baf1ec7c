"""Tests of the tmux session of a node, with a real tmux server for each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.command import Command, render
from launcher.errors import SessionError, SessionExists
from launcher.node import control
from launcher.plan.model import NodePlan
from launcher.run.tmux_session import return_session, start_session, stop_session
from launcher.transport.local import LocalTransport
from node_kit import PYTHON, ROOT, SUPERVISOR, RunFolder, python
from waiting import wait_until

TMUX = shutil.which("tmux")
pytestmark = pytest.mark.skipif(TMUX is None, reason="needs tmux")

SLEEP = python("import time; print('up', flush=True); time.sleep(60)")
LOCAL = LocalTransport()
Make = Callable[..., tuple[RunFolder, NodePlan]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a new home folder, with a tmux server for this test."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    with tempfile.TemporaryDirectory(prefix="tmux") as sockets:  # short: socket paths are limited
        monkeypatch.setenv("TMUX_TMPDIR", sockets)
        yield tmp_path
        subprocess.run([str(TMUX), "kill-server"], capture_output=True, check=False)


@pytest.fixture
def make(home: Path) -> Iterator[Make]:
    """Yield a function that creates a node's run folder with start.sh. It returns the folder and the node's plan."""
    made: list[RunFolder] = []

    def make(interpreter: str = PYTHON, setup: tuple[str, ...] = ()) -> tuple[RunFolder, NodePlan]:
        k = len(made)
        folder = RunFolder(home / "run with space" / f"node{k}", node_rank=k).rank(SLEEP)
        made.append(folder)
        folder.write_spec()
        plan = node_plan(folder, k, interpreter, setup)
        (folder.path / "start.sh").write_text(render(plan.start))
        return folder, plan

    yield make
    for folder in made:
        folder.kill()


def node_plan(folder: RunFolder, k: int, interpreter: str, setup: tuple[str, ...]) -> NodePlan:
    argv = (interpreter, str(SUPERVISOR), str(folder.path / "node.json"))
    start = Command(argv, {"MARK": "a b"}, str(folder.path), setup)
    return NodePlan(
        label=f"node{k} (local)",
        node_rank=k,
        login=None,
        ranks=(0,),
        devices=(),
        parts=(),
        address="127.0.0.1",
        workdir=str(folder.path),
        code_dir=str(ROOT),
        data_dir="",
        run_dir=str(folder.path),
        master_port=0,
        service_port=0,
        session=f"gnnfleet-test-node{k}",
        start=start,
        server=None,
        trainer=Command(()),
        files=(),
    )


def sessions() -> list[str]:
    listed = subprocess.run(["tmux", "list-sessions", "-F", "#S"], capture_output=True, text=True, check=False)
    return listed.stdout.split()


def test_start_runs_the_node_and_stop_leaves_no_process(make: Make) -> None:
    folder, plan = make()
    start_session(LOCAL, plan, start_timeout=10)
    assert sessions() == [plan.session]
    wait_until(folder.says("rank0", "up"))
    assert control.status(control.NodeFolder(plan.run_dir))["state"] == "training"
    report = stop_session(LOCAL, plan, timeout=10)
    assert report.clean and report.killed == () == report.leftovers
    assert folder.json("result.json")["state"] == "stopped"
    assert folder.processes() == [] and sessions() == []


def test_two_nodes_on_one_machine_have_two_sessions(make: Make) -> None:
    (first, plan0), (second, plan1) = make(), make()
    for plan in (plan0, plan1):
        start_session(LOCAL, plan, start_timeout=10)
    wait_until(second.says("rank0", "up"))
    stop_session(LOCAL, plan0, timeout=10)
    assert first.processes() == [] and sessions() == [plan1.session]
    assert control.status(control.NodeFolder(plan1.run_dir))["alive"]
    stop_session(LOCAL, plan1, timeout=10)


def test_session_ends_with_the_run(make: Make) -> None:
    folder, plan = make()
    start_session(LOCAL, plan, start_timeout=10)
    (folder.path / "control").mkdir(exist_ok=True)
    (folder.path / "control" / "stop").touch()
    wait_until(lambda: sessions() == [])
    assert folder.json("result.json")["state"] == "stopped"


def test_session_that_exists_already(make: Make) -> None:
    _, plan = make()
    start_session(LOCAL, plan, start_timeout=10)
    with pytest.raises(SessionExists, match=r"node0 \(local\): tmux session \S+ exists already; end it with `tmux kil"):
        start_session(LOCAL, plan, start_timeout=10)
    assert control.status(control.NodeFolder(plan.run_dir))["alive"]
    stop_session(LOCAL, plan, timeout=10)


def test_missing_python_is_named(make: Make) -> None:
    _, plan = make("/no/such/python3")
    with pytest.raises(SessionError, match=r"(?s)supervisor ended while it started; .*start.log:.*/no/such/python3"):
        start_session(LOCAL, plan, start_timeout=10)
    assert sessions() == []


@pytest.mark.slow
def test_setup_that_takes_too_long(make: Make) -> None:
    _, plan = make(setup=("echo loading modules >&2", "sleep 60"))
    with pytest.raises(SessionError, match=r"did not start within 4 s \(run.start_timeout\); .*\nloading modules"):
        start_session(LOCAL, plan, start_timeout=4)
    assert sessions() == []


def test_missing_tmux(make: Make, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = make()
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(SessionError, match="tmux is not installed on the node; install it"):
        start_session(LOCAL, plan, start_timeout=10)


def test_closed_session_stops_the_run(make: Make) -> None:
    folder, plan = make()
    start_session(LOCAL, plan, start_timeout=10)
    wait_until(folder.says("rank0", "up"))
    subprocess.run(["tmux", "kill-session", "-t", f"={plan.session}"], check=True)
    wait_until(lambda: (folder.path / "result.json").exists())
    assert folder.json("result.json")["reason"] == "its supervisor got SIGHUP: its tmux session was closed"
    assert folder.processes() == []


def test_users_tmux_conf_neither_keeps_nor_ends_the_session(make: Make, home: Path) -> None:
    (home / ".tmux.conf").write_text("set -g remain-on-exit on\nset -g destroy-unattached on\n")
    folder, plan = make()
    start_session(LOCAL, plan, start_timeout=10)
    wait_until(folder.says("rank0", "up"))
    assert sessions() == [plan.session]
    (folder.path / "control" / "stop").touch()
    wait_until(lambda: sessions() == [])


def test_environment_is_that_of_start_sh_not_of_an_older_tmux_server(make: Make) -> None:
    older = ["tmux", "new-session", "-d", "-s", "older"]
    subprocess.run(older, env={**os.environ, "MARK": "stale"}, check=True)
    folder, plan = make()
    folder.rank(python("import os; print(os.environ['MARK'])")).write_spec()
    start_session(LOCAL, plan, start_timeout=10)
    wait_until(folder.says("rank0", "a b"))
    wait_until(lambda: sessions() == ["older"])


def test_stop_without_a_run_folder(make: Make) -> None:
    folder, plan = make()
    (folder.path / "node.json").unlink()
    with pytest.raises(SessionError, match="could not stop the run on this node: control: no run in"):
        stop_session(LOCAL, plan, timeout=5)


def test_a_supervisor_is_started_again_after_a_start_that_failed(make: Make) -> None:
    folder, plan = make()
    (folder.path / "state.json").write_text("{}")
    start = (folder.path / "start.sh").read_text()
    (folder.path / "start.sh").write_text("echo the disk of the environment is not mounted yet >&2; exit 1")
    with pytest.raises(SessionError, match="not mounted yet"):
        return_session(LOCAL, plan, start_timeout=10)
    (folder.path / "start.sh").write_text(start)
    return_session(LOCAL, plan, start_timeout=10)
    wait_until(folder.says("rank0", "up"))
    stop_session(LOCAL, plan, timeout=10)
