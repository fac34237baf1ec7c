"""Tests of the live view of a run in a terminal: what it shows, in which order, and in how much space."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.plan.model import LaunchPlan, Login
from launcher.run.live_log import LiveLog, LogLine
from launcher.run.live_table import Board, clock, render
from run_kit import make_launch, make_node
from trainer.core.train_config import TrainConfig


def plan_of(nodes: int, ranks: int) -> LaunchPlan:
    made = []
    for k in range(nodes):
        node = make_node(Path("/w"), k, [], login=Login(None, f"gpu{k}", None))
        made.append(replace(node, ranks=tuple(range(k * ranks, (k + 1) * ranks))))
    return replace(make_launch(made), train=TrainConfig(epochs=10))


def step(rank: int, number: int = 16, **more: Any) -> dict[str, Any]:
    at = {"kind": "step", "rank": rank, "epoch": 3, "step": number, "steps": 50, "t": 1.0}
    return {**at, "loss": 0.4512, "seeds": 512, "seeds_per_s": 2034.0, "remote_share": 0.31, **more}


def board_of(nodes: int, ranks: int, **more: Any) -> Board:
    board = Board.of(plan_of(nodes, ranks), **more)
    for k in range(nodes):
        board.state(k, {"state": "training"})
    for rank in range(nodes * ranks):
        board.metric(step(rank))
    return board


def shown(board: Board, width: int = 100, height: int = 24, **more: Any) -> list[str]:
    return [line.plain for line in render(board, width, height, time.monotonic(), **more)]


def test_a_row_for_every_node_and_rank() -> None:
    lines = shown(board_of(2, 2, elapsed=185.0))
    assert lines[0].startswith("r1 · 3:05 · epoch 3/10 step 17/50 · 8,136 seeds/s")
    assert lines[1:] == [
        "node   host  rank  state     epoch   step  seeds/s    loss  remote  heard",
        "node0  gpu0     0  training   3/10  17/50    2,034  0.4512     31%    0 s",
        "                1  training   3/10  17/50    2,034  0.4512     31%    0 s",
        "node1  gpu1     2  training   3/10  17/50    2,034  0.4512     31%    0 s",
        "                3  training   3/10  17/50    2,034  0.4512     31%    0 s",
    ]


def test_ranks_without_progress_show_no_speed() -> None:
    board = board_of(2, 1)
    board.metric(step(0, idle_s=45))
    assert shown(board)[1:] == [
        "node   host  rank  state     epoch   step  seeds/s  no step for    loss  remote  heard",
        "node0  gpu0     0  training   3/10  17/50                  45 s  0.4512     31%    0 s",
        "node1  gpu1     1  training   3/10  17/50    2,034               0.4512     31%    0 s",
    ]
    assert board.severity(0, 0.0) == 2 and board.severity(1, 0.0) == 3
    board.metric(step(1, idle_s=44))
    assert "· no step for 0:44" in shown(board)[0] and board.progress_line().endswith("no step for 44 s")
    board.metric(step(1, 17))
    assert "2,034 seeds/s" in shown(board)[0]


GPU = {"used_bytes": 12.34e9, "total_bytes": 80e9, "peak_bytes": 9e9, "step_s": 0.1034, "utilization": 0.87}


def test_a_rank_on_a_gpu_shows_device_time_utilisation_and_memory() -> None:
    board = board_of(1, 2)
    board.metric(step(0, device=GPU))
    board.metric(step(1, device={"used_bytes": 20e9, "total_bytes": 80e9}))
    lines = shown(board, 120)
    assert lines[1].endswith("remote  gpu ms  gpu  gpu memory  heard")
    assert lines[2].endswith("   31%     103  87%  12.3/80 GB    0 s")
    assert lines[3].endswith("   31%               20.0/80 GB    0 s")
    (node,) = shown(board, 120, 3)[2:]
    assert node.endswith("   31%     103  87%  20.0/80 GB    0 s"), "means, and the fullest device"
    board.metric(step(0, t=2.0, device="much"))
    assert shown(board, 120)[2].split()[-2:] == ["0", "s"] and "gpu ms" not in shown(board, 120)[1]


def test_64_ranks_fit_a_terminal_of_80_by_24_as_one_row_per_node() -> None:
    lines = shown(board_of(16, 4), 80, 24)
    assert len(lines) == 18 and max(map(len, lines)) <= 80
    assert lines[2].startswith("node0") and "0–3" in lines[2] and "8,136" in lines[2]


def test_in_a_short_terminal_nodes_with_problems_come_first() -> None:
    board = board_of(64, 1)
    board.connection_lost(40, "no route")
    board.ended(17, "failed")
    board.finding({"kind": "straggler", "node_rank": 33, "rank": 33, "text": "rank 33 is slow", "stop": False})
    lines = shown(board, 80, 16)
    assert len(lines) <= 16
    assert [line.split()[0] for line in lines[2:6]] == ["node17", "node40", "node33", "node0"]
    assert "unreachable" in lines[3]
    assert lines[-2] == "… 52 more nodes: training, epoch 3 step 17/50 or further"
    assert lines[-1] == "! straggler: rank 33 is slow"


@pytest.mark.parametrize(
    ("width", "kept"), [(60, "node rank state epoch step seeds/s loss heard"), (30, "node rank state step")]
)
def test_narrow_terminals_drop_columns(width: int, kept: str) -> None:
    lines = shown(board_of(2, 2), width)
    assert lines[-5].split() == kept.split()
    assert max(map(len, lines)) <= width


def test_a_node_without_heartbeat_is_shown_as_silent_with_the_time() -> None:
    board = board_of(1, 1)
    assert board.nodes[0].heard is not None
    board.nodes[0].heard -= 9.0
    assert "silent" in shown(board)[2] and shown(board)[2].endswith("9 s")


def test_the_time_left_is_estimated_from_the_speed_so_far() -> None:
    board = Board.of(plan_of(1, 1))
    board.metric(step(0, 49, epoch=1))
    assert "left" not in shown(board)[0]
    assert board._first is not None
    board._first = board._first[0] - 60.0, board._first[1]
    board.metric(step(0, 49, epoch=3))  # two epochs in a minute; seven are left
    assert shown(board)[0].endswith("about 3:30 left") or shown(board)[0].endswith("about 3:29 left")


def test_lost_ranks_do_not_hold_back_the_progress_of_the_run() -> None:
    board = board_of(3, 1)
    restart = {"generation": 1, "of": 3, "nodes": [0, 1], "ranks": {"0": [0], "1": [1]}}
    board.state(0, {"state": "training", "generation": 1, "restarts": [restart]})
    for rank in (0, 1):
        board.metric(step(rank, 41, t=9.0))
    assert board.progress_line() == "epoch 3 step 42/50  loss 0.4512  4,068 seeds/s on 2 of 2 ranks"
    assert shown(board)[0].split(" · ")[3:5] == ["epoch 3/10 step 42/50", "4,068 seeds/s"]
    assert board.summary() == "2 nodes, 2 ranks; epoch 3 of 10, step 42 of 50"


def test_older_lines_do_not_overwrite_newer_ones() -> None:
    board = board_of(1, 1)
    board.state(0, {"state": "training", "ranks": {"0": {"epoch": 3, "step": 40, "steps": 50, "t": 5.0}}})
    board.metric(step(0, 20, t=4.0))
    assert "41/50" in shown(board)[2]


def test_hours_are_shown_as_hours() -> None:
    assert [clock(5), clock(65), clock(3605)] == ["0:05", "1:05", "1:00:05"]


def test_log_lines_scroll_above_the_table_which_disappears_at_the_end() -> None:
    console = Console(file=io.StringIO(), width=100, height=24, force_terminal=True, color_system=None)
    live = LiveLog(console, plan_of(2, 1), board=board_of(2, 1))
    with live:
        live.tick()
        live.process_lines([LogLine(0.0, 0, "rank0", "a line of rank 0")])
        live.tick()
        live.say("all nodes have ended")
    assert isinstance(console.file, io.StringIO)
    screen = played(console.file.getvalue())
    assert screen == ["node0/rank0 | a line of rank 0", "all nodes have ended"]


def played(text: str) -> list[str]:
    """Return the lines that a terminal shows after ``text`` was written to it."""
    # handles line end, cursor up and erase line only
    rows, row = [""], 0
    i = 0
    while i < len(text):
        if text[i] == "\x1b":
            end = next(j for j in range(i + 2, len(text)) if text[j].isalpha())
            number, what = text[i + 2 : end].lstrip("?"), text[end]
            if what == "A":
                row -= int(number or 1)
            elif what == "K":
                rows[row] = ""
            i = end + 1
            continue
        if text[i] == "\n":
            row += 1
            rows += [""] * (row + 1 - len(rows))
        elif text[i] != "\r":
            rows[row] += text[i]
        i += 1
    return [line.rstrip() for line in rows if line.strip()]
