"""Tests of the console output of a run: log lines, progress lines and tracebacks."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.run import live_log
from launcher.run.live_log import LiveLog, LogLine, log_lines
from run_kit import make_launch, make_node

STAMP = "2026-11-20T21:00:00.123Z"
TRACEBACK = ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "ValueError: no"]


def view(*, terminal: bool = False, plain: bool = True) -> tuple[LiveLog, Callable[[], str]]:
    console = Console(
        file=io.StringIO(),
        width=100,
        height=24,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    assert isinstance(console.file, io.StringIO)
    plan = make_launch([make_node(Path("/w"), k, []) for k in range(12)])
    return LiveLog(console, plan, plain=plain), console.file.getvalue


def lines_of(k: int, *texts: str) -> list[LogLine]:
    """Return lines of rank k, on node k."""
    return list(log_lines([f"{STAMP} {text}" for text in texts], k, f"logs/rank{k}.log"))


def step(rank: int, number: int, **more: Any) -> dict[str, Any]:
    at = {"kind": "step", "rank": rank, "epoch": 2, "step": number, "steps": 50}
    return {**at, "loss": 1.25, "seeds": 512, "seeds_per_s": 1000.0, "wait_s": 0.0, **more}


def test_lines_start_with_node_and_rank_aligned_and_have_no_timestamp() -> None:
    live, text = view()
    live.process_lines(lines_of(0, "one", "  two [red] {x}"))
    live.process_lines(lines_of(11, "three"))
    assert text().splitlines() == [
        "node0/rank0   | one",
        "node0/rank0   |   two [red] {x}",
        "node11/rank11 | three",
    ]


def test_on_a_terminal_each_node_has_its_colour_and_control_characters_do_no_harm() -> None:
    live, text = view(terminal=True)
    live.process_lines(lines_of(0, "plain\x07", "\x1b[2Jclears", "\x1b[32mgreen\x1b[0m"))
    live.process_lines(lines_of(1, "other"))
    out = text()
    assert "\x07" not in out and "\x1b[2J" not in out
    assert "\x1b[32mgreen" in out
    assert out.count("\x1b[36mnode0/rank0") == 3 and "\x1b[35mnode1/rank1" in out


def test_lines_of_several_threads_are_not_mixed() -> None:
    live, text = view()
    threads = [
        threading.Thread(target=lambda k=k: [live.process_lines(lines_of(k, *["x" * 200] * 3)) for _ in range(30)])
        for k in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = text().splitlines()
    assert len(lines) == 6 * 30 * 3
    assert all(line.endswith("| " + "x" * 200) and line.startswith("node") for line in lines)


def test_without_a_terminal_steps_give_one_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(live_log.time, "monotonic", lambda: now[0])
    live, text = view()
    for number in range(10):
        now[0] += 1.0
        for rank in (0, 1):
            live.metric(step(rank, number))
    lines = text().splitlines()
    assert len(lines) == 2
    assert lines[1] == "epoch 2 step 5/50  loss 1.2500  2,000 seeds/s on 2 of 12 ranks"


def test_a_traceback_that_ends_the_run_is_shown_by_the_report_only() -> None:
    live, text = view()
    live.process_lines(lines_of(0, "before", *TRACEBACK))
    live.process_lines(lines_of(1, *("[rank1]: " + line for line in TRACEBACK)))
    live.quiet()
    live.process_lines(lines_of(0, "after"))
    live.tick()
    assert text() == "node0/rank0   | before\n"


def test_a_traceback_that_does_not_end_the_run_is_shown_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(live_log.time, "monotonic", lambda: now[0])
    live, text = view()
    live.process_lines(lines_of(0, *TRACEBACK))
    live.process_lines(lines_of(0, "goes on"))
    live.tick()
    assert text() == ""
    now[0] += 5.0
    live.tick()
    assert [line.split("| ")[1] for line in text().splitlines()] == [*TRACEBACK, "goes on"]
