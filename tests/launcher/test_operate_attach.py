"""Tests of ``gnnfleet attach``, which shows one tmux pane for each node, with a real tmux server."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.config.schema import NodeConfig
from launcher.manage.attach import Pane, attach_argv, make_session, panes_of
from launcher.manage.select import Choice, chosen
from operate_kit import LocalRun
from waiting import wait_until


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    monkeypatch.chdir(tmp_path)
    yield
    tmux("kill-server")


def tmux(*words: str) -> str:
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, timeout=10, check=False)
    return done.stdout + done.stderr


def start_sessions(local_run: LocalRun) -> None:
    for node in local_run.plan.nodes:
        tmux("new-session", "-d", "-s", node.session, f"echo 'supervisor of {node.label}'; exec sleep 60")


def pane_text(session: str, pane: int) -> str:
    return tmux("capture-pane", "-p", "-t", f"={session}:0.{pane}")


def test_a_pane_per_node_shows_its_session(tmp_path: Path) -> None:
    local_run = LocalRun(tmp_path).launched("train")
    start_sessions(local_run)
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        name = make_session("r1", panes_of(opened.found))
    for k in range(2):
        wait_until(lambda k=k: f"supervisor of node{k} (local)" in pane_text("gnnfleet-r1", k))
    titles = tmux("list-panes", "-t", "=gnnfleet-r1:", "-F", "#{@gnnfleet_node} #{pane_width}x#{pane_height}")
    assert [line.rpartition(" ")[0] for line in titles.splitlines()] == ["node0 (local)", "node1 (local)"]
    assert "synchronize-panes off" in tmux("show-options", "-w", "-t", "=gnnfleet-r1:", "synchronize-panes")
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        assert make_session("r1", panes_of(opened.found)) == name, "a second attach reuses the session"
    tmux("kill-session", "-t", "=gnnfleet-r1")
    sessions = tmux("list-sessions", "-F", "#{session_name}").split()
    assert sessions == ["gnnfleet-r1-node0", "gnnfleet-r1-node1"], "leaving the view ends no session of the run"


def test_the_pane_of_an_ended_node_stays_and_reports_the_end(tmp_path: Path) -> None:
    local_run = LocalRun(tmp_path).launched("train")
    start_sessions(local_run)
    tmux("kill-session", "-t", "=gnnfleet-r1-node1")
    with chosen(Choice("r1"), offline=lambda found: True) as opened:
        make_session("r1", panes_of(opened.found))
    wait_until(lambda: "node1 (local): not attached (the run has ended there" in pane_text("gnnfleet-r1", 1))
    tmux("kill-session", "-t", "=gnnfleet-r1-node0")
    wait_until(lambda: "node0 (local): not attached" in pane_text("gnnfleet-r1", 0))
    assert len(tmux("list-panes", "-t", "=gnnfleet-r1:").splitlines()) == 2


@pytest.mark.slow
def test_eighteen_nodes_fill_two_windows(tmp_path: Path) -> None:
    make_session("many", [Pane(f"node{k} (gnn{k})", ("sleep", "60")) for k in range(18)])
    windows = tmux("list-windows", "-t", "=gnnfleet-many:", "-F", "#{window_panes}").split()
    assert windows == ["16", "2"]


def test_attach_print_lists_one_command_per_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local_run = LocalRun(tmp_path).launched("train")
    assert run(["attach", "r1", "--print"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"env TMUX= tmux attach -r -t '=gnnfleet-r1-node{k}'" for k in range(2)
    ]
    node = NodeConfig("gnn2", port=2222, user="alice", key="/keys/my key")
    far = replace(local_run.config, transport="ssh", nodes=(node, node))
    assert attach_argv(far, local_run.plan.nodes[1]) == (
        "ssh", "-t", "-p", "2222", "-i", "/keys/my key", "alice@gnn2", "tmux attach -r -t '=gnnfleet-r1-node1'",
    )  # fmt: skip


def test_attach_requires_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    LocalRun(tmp_path).launched("train")
    monkeypatch.setattr("sys.stdin", open("/dev/null"))
    assert run(["attach", "r1"]) == 2
    assert "attach needs a terminal; --print shows the command for each node" in capsys.readouterr().err
