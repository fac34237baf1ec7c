"""Tests of the tables of ``status`` and ``runs`` in narrow and wide terminals."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from launcher.cli.main import run
from launcher.manage.status import Status, rendered
from launcher.plan.model import Login
from launcher.report import run_history
from launcher.report.run_folder import FoundRun
from launcher.report.run_history import Entry
from launcher.report.verdict import NodeView, Verdict, judge
from launcher.run.live_table import Board, render
from launcher.text import PlainConsole, printable
from run_kit import make_launch, make_node

STEP = {"epoch": 12, "step": 1233, "steps": 40000, "loss": 0.51234, "seeds_per_s": 123456.0, "remote_share": 0.25}


def printed(what: RenderableType, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(what, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    return lines


def status_of(host: str, user: str | None = None, **more: Any) -> Status:
    nodes = [make_node(Path("/w"), k, [], login=Login(user, f"{host}{k}", None)) for k in range(2)]
    state = {"state": "training", "time": 100.0, "ranks": {"0": {**STEP, **more}, "1": STEP}}
    views = {k: NodeView(node, state, now=101.5) for k, node in enumerate(nodes)}
    found = FoundRun("r1", None, None, make_launch(nodes), None, None)
    return Status(found, Verdict("running", "run r1 trains"), views)


@pytest.mark.parametrize(
    ("host", "user"), [("gnn", None), ("gnn-machine-of-the-institute.example.org", "alice.liddell")]
)
def test_status_at_80_columns_does_not_cut_rank_state_epoch_and_step(host: str, user: str | None) -> None:
    _, titles, first, second = printed(rendered(status_of(host, user)), 80)
    assert titles.split()[:5] == ["node", "rank", "state", "epoch", "step"]
    assert second.startswith("node1 (") and " 1 " in second and " training " in second
    assert " 12  1234/40000" in first


def test_status_at_120_columns_shows_all_columns() -> None:
    _, titles, first, _ = printed(rendered(status_of("gnn")), 120)
    assert titles.split() == ["node", "rank", "state", "epoch", "step", "seeds/s", "loss", "remote", "heartbeat"]
    assert first.split()[3:] == ["training", "12", "1234/40000", "123,456", "0.5123", "25%", "1.5", "s", "ago"]


def test_status_of_a_run_that_waits_says_for_whom() -> None:
    found = status_of("gnn")
    blocker = {"run_id": "a", "user": "bob", "what": "CPUs", "since": 1.0, "waits": False}
    waits = {"state": "queued", "time": 100.0, "queue": {"since": 1.0, "earlier": 2, "blockers": [blocker]}}
    views = {k: replace(view, state=waits) for k, view in found.views.items()}
    one = judge(found.found, views)
    assert one.state == "waiting" and one.exit_status == 0
    assert one.sentence.startswith("run r1 is waiting for run a of bob on node0, node1 since ")
    assert ", 3rd in line: 2 nodes, " in one.sentence and "gnnfleet stop r1" in one.next


def test_status_shows_ranks_without_progress() -> None:
    _, titles, first, second = printed(rendered(status_of("gnn", idle_s=45)), 130)
    assert titles.split()[5:9] == ["seeds/s", "no", "step", "for"]
    assert first.split()[6:9] == ["–", "45", "s"] and "123,456" in second
    found = status_of("gnn", idle_s=45)
    one = judge(found.found, found.views)
    assert one.sentence.startswith("run r1 trains: ") and not one.alarm
    ranks = {"0": {**STEP, "idle_s": 45}, "1": {**STEP, "idle_s": 44}}
    views = {k: replace(view, state={**(view.state or {}), "ranks": ranks}) for k, view in found.views.items()}
    stalled = judge(found.found, views)
    assert stalled.alarm and stalled.sentence.startswith("run r1 has trained no step for 44 s: 2 nodes, ")


def test_status_shows_the_longest_phase_of_a_step_if_a_rank_reports_it() -> None:
    _, titles, first, second = printed(rendered(status_of("gnn", most=["backward", 0.412])), 130)
    assert titles.split()[-3:] == ["mostly", "remote", "heartbeat"]
    assert "  backward 41%     25%  " in first and "             –     25%  " in second


def test_status_shows_the_use_of_gpus_if_a_rank_reports_it() -> None:
    device = {"used_bytes": 12.34e9, "total_bytes": 80e9, "step_s": 0.1034, "utilization": 0.87}
    _, titles, first, second = printed(rendered(status_of("gnn", device=device)), 140)
    assert titles.endswith("remote  gpu ms  gpu  gpu memory  heartbeat")
    assert "  25%     103  87%  12.3/80 GB  1.5 s ago" in first and "  25%       –    –           –" in second


WHY = "rank 1 on node1 (gnn2) raised ValueError: the shapes of the two operands do not agree\nat all " + "x" * 200
ENTRIES = [
    Entry(
        "toy-20261121-041349-042e",
        "/f",
        1.0,
        "c/cluster.yml",
        "2 nodes × 4 ranks",
        "failed",
        7300.0,
        "accuracy",
        None,
        WHY,
        None,
    ),
    Entry("toy-20261121-041349-aaaa", "/f", 2.0, "", "", "never started", None, "accuracy", None, "refused", "toy-1"),
]


def test_runs_are_one_line_each_and_only_the_result_is_cut() -> None:
    titles, first, second = printed(run_history.rendered(ENTRIES), 80)
    assert titles.split() == ["when", "run", "state", "result"]
    assert "toy-20261121-041349-042e  failed         rank 1 on node1 (gnn" in first and first.endswith("…")
    assert second.endswith("toy-20261121-041349-aaaa  never started  refused")
    titles, first, _ = printed(run_history.rendered(ENTRIES), 120)
    assert titles.split() == ["when", "run", "size", "state", "took", "result"]
    assert "2 nodes × 4 ranks  failed" in first and "2 h 2 min  rank 1 on" in first


@pytest.mark.parametrize(("columns", "whole"), [(None, True), ("80", False)])
def test_into_a_pipe_nothing_is_cut_unless_columns_is_set(
    columns: str | None, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_history, "history", lambda runs_dirs, limit: ENTRIES)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert run(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and (" ".join(WHY.split()) in lines[1]) is whole and ("…" in lines[1]) is not whole


def test_json_has_the_result_in_full() -> None:
    assert "x" * 200 in run_history.to_json(ENTRIES)


@pytest.mark.parametrize("width", [80, 60])
def test_lines_break_between_words_on_a_terminal_and_paths_stay_whole(width: int) -> None:
    path = "/scratch/a-user/projects/graphs/" + "folder-with-a-long-name/" * 4 + "report.html"
    text = (
        f"node3 (alice@gnn3): the report of the run, which failed after 12 epochs, is in {path}, and logs are beside it"
    )
    commands = "  ssh -t alice@gnn3 " + "a-word " * 30
    out = io.StringIO()
    console = PlainConsole(file=out, width=width, force_terminal=True, color_system=None, highlight=False)
    console.print(Text(text, "red"), soft_wrap=True)
    console.print(text, soft_wrap=True, markup=False)
    console.print(Text(commands), soft_wrap=True)
    lines = out.getvalue().splitlines()
    assert lines.pop() == commands, "what is copied is left to the terminal"
    assert " ".join(line.strip() for line in lines).split() == f"{text} {text}".split(), "no word is cut"
    assert all(len(line) <= width or line.split() == [f"{path},"] for line in lines)


def test_a_labelled_line_goes_on_below_its_text() -> None:
    out = io.StringIO()
    console = PlainConsole(file=out, width=40, force_terminal=True, color_system=None, highlight=False)
    console.print(Text("  note    the parts will be made at launch, in /a/folder"), soft_wrap=True)
    assert out.getvalue().splitlines() == ["  note    the parts will be made at", "          launch, in /a/folder"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", (40, 60, 80, 100))
@pytest.mark.parametrize(
    "words",
    (
        ("--epoch", "3"),
        ("launch", "--on-interrupt", "foo"),
        ("logs", "--since", "the-day-before-yesterday"),
        ("explain", "disk full"),
        ("explain", "host-key-unknown"),
        ("init", "--list"),
    ),
)
def test_messages_break_between_words_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: Sequence[str], width: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = []
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        run(words)
        shown.append(printable(stream.getvalue()))
    on_terminal, piped = shown
    assert on_terminal.split() == piped.split(), "no word is cut"
    assert all(len(line) <= width or len(line.split()) <= 2 for line in on_terminal.splitlines())


def test_no_word_of_the_live_view_is_lost_at_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board.of(make_launch([make_node(Path("/w"), 0, [])]))
    board.findings.append("rank 1 waits for the graph server of node1, which has not answered for 12 s")
    question = "Ctrl-C again: d detaches, s stops the run, anything else continues it"
    shown = render(board, 40, 20, board.began + 5, [question])
    text = " ".join(" ".join(str(line) for line in shown).split())
    assert board.findings[0] in text and question in text
    assert all(len(line) <= 40 and "…" not in line for line in shown)


@pytest.mark.parametrize("width", [120, 140, 200])
def test_only_columns_that_may_be_cut_are_cut(width: int) -> None:
    why = "server of node2 was not ready within 120 s (run.start_timeout): it has not written server.ready"
    entry = Entry(
        "shop-20261127-223419-ace4",
        "",
        0.0,
        "configs/shop.yml",
        "3 nodes × 3 ranks",
        "failed",
        180.0,
        "",
        None,
        why,
        None,
    )
    resumed = replace(entry, config="", resumed_from="cluster-20261127-225341-d1c8")
    titles, first, second = printed(run_history.rendered([entry, resumed]), width)
    assert titles.split() == ["when", "run", "config", "size", "state", "took", "result"]
    assert "shop-20261127-223419-ace4  " in first and "  3 nodes × 3 ranks  failed  3 min  server of" in first
    assert second.count("…") <= 2
