"""Tests of the sentence that explains waits past their deadline: who waited for whom, and who is the cause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.node.diagnostics.expired_waits import Processes, describe, read_wait, server_lines
from launcher.node.diagnostics.process_state import STOPPED

LABELS = ("node0 (gnn1)", "node1 (gnn2)")

REDUCE = "all_reduce at trainer/train/optimize.py:98"


def wait(rank: int, t: float = 50.0, of: str = "ranks", **more: Any) -> dict[str, Any]:
    about = {"request": "", "node_rank": None, "server": "", "at": REDUCE}
    return {"t": t, "rank": rank, "of": of, "seconds": 120.0, **about, **more}


def known(ranks: dict[int, str], servers: dict[int, str] | None = None) -> Processes:
    return Processes(LABELS, dict.fromkeys(range(4), 0) | {2: 1, 3: 1}, ranks, servers or {})


def test_a_stopped_rank_leads_the_sentence() -> None:
    ranks = {0: REDUCE, 1: REDUCE, 2: STOPPED, 3: REDUCE}
    culprit = describe([wait(1, 51.0), wait(0), wait(3, 50.5)], known(ranks))
    assert (culprit.node_rank, culprit.rank) == (1, 2)
    assert culprit.text == (
        "rank 2 on node1 (gnn2) is stopped (SIGSTOP or a debugger): rank 0 on node0 (gnn1) and 2 other ranks waited "
        "120 s for other ranks (all_reduce at trainer/train/optimize.py:98)"
    )


def test_a_swapping_rank_is_named_although_it_has_a_stack() -> None:
    line = "state D: waits for memory (312 major page faults per second, 1.2 GB of it are in swap); forward at m.py:7"
    culprit = describe([wait(0)], known({0: REDUCE, 1: REDUCE, 2: REDUCE, 3: line}))
    assert (culprit.node_rank, culprit.rank) == (1, 3)
    assert culprit.text.startswith("rank 3 on node1 (gnn2) waits for memory (312 major page faults per second, 1.2 GB")


def test_a_stopped_process_is_named_rather_than_a_blocked_one() -> None:
    blocked = "state D: is blocked in io_schedule (a disk, a network file system or a device does not answer); x.py:1"
    culprit = describe([wait(0)], known({0: REDUCE, 1: blocked, 3: STOPPED}, {0: STOPPED}))
    assert (culprit.node_rank, culprit.rank) == (1, 3)


def test_ranks_that_are_elsewhere_are_named() -> None:
    ranks = {0: REDUCE, 1: "load at data.py:17 in read()", 3: REDUCE}
    culprit = describe([wait(0)], known(ranks))
    assert (culprit.node_rank, culprit.rank) == (0, 1)
    assert culprit.text == (
        "rank 0 on node0 (gnn1) waited 120 s for other ranks (all_reduce at trainer/train/optimize.py:98); not there: "
        "rank 1 on node0 (gnn1) (at load at data.py:17 in read()), rank 2 on node1 (gnn2) (has not started)"
    )


def test_a_rank_whose_process_is_ending_is_not_accused() -> None:
    culprit = describe([wait(0)], known({0: REDUCE, 1: "no Python frame", 2: "forward at m.py:7", 3: REDUCE}))
    assert culprit.rank == 2


@pytest.mark.parametrize("state", [STOPPED, "serve at trainer/service/server.py:88", ""])
def test_a_graph_server_that_does_not_answer(state: str) -> None:
    asked = wait(0, of="server", request="sample", node_rank=1, seconds=12.0)
    held = "state D: is blocked in x (a disk, a network file system or a device does not answer); load at p.py:1"
    found = known({0: REDUCE, 2: held}, {0: "idle at s.py:1"} | ({1: state} if state else {}))
    culprit = describe([asked], found)
    text = "rank 0 on node0 (gnn1) waited 12 s for the graph server of node1 (gnn2) to answer a sample request"
    if state == STOPPED:
        assert culprit.text == f"the graph server of node1 (gnn2) is stopped (SIGSTOP or a debugger): {text}"
        assert (culprit.node_rank, culprit.rank) == (1, None)
        assert server_lines(found, 1) == [f"graph server of node1 (gnn2): {STOPPED}"]
    else:  # a rank of that node that is blocked explains more
        assert culprit.rank == 2 and culprit.text.endswith(text)
        assert describe([asked], known({0: REDUCE}, {1: state} if state else {})).text.startswith(text)


def test_no_host_of_the_run_is_blamed_for_a_server_of_a_serving_cluster() -> None:
    asked = wait(3, of="server", request="batch", server="node0 (gpu1) of products", seconds=60.0)
    culprit = describe([asked], known({0: REDUCE, 3: REDUCE}, {0: "serve at server.py:8"}))
    assert (culprit.node_rank, culprit.rank) == (1, 3)
    assert culprit.text == (
        "rank 3 on node1 (gnn2) waited 60 s for the graph server of node0 (gpu1) of products to answer a batch request"
    )
    unknown = describe([wait(3, of="server", request="batch", node_rank=77)], known({3: REDUCE}))
    assert (culprit.node_rank, culprit.rank) == (1, 3) and "the graph server of node77" in unknown.text


def test_sampler_threads() -> None:
    culprit = describe([wait(3, of="threads")], known({3: REDUCE}))
    assert culprit.text == "rank 3 on node1 (gnn2) waited 120 s for a batch from its own sampler threads"
    assert (culprit.node_rank, culprit.rank) == (1, 3)


def test_the_file_of_a_rank(tmp_path: Path) -> None:
    (tmp_path / "procs").mkdir()
    (tmp_path / "logs").mkdir()
    assert read_wait(str(tmp_path), 0) is None
    lib = "/x/lib/python3.11/site-packages/torch/distributed/c10d.py"
    stack = ["Current thread 0x0 (most recent call first):", f'  File "{lib}", line 9 in wrapper']
    stack += [f'  File "{lib}", line 7 in all_reduce', f'  File "{tmp_path}/files/mine.py", line 12 in step']
    record = {**wait(0), "stack": stack}
    del record["at"]
    (tmp_path / "procs/wait-rank0.json").write_text(json.dumps(record))
    found = read_wait(str(tmp_path), 0)
    assert found is not None and found["at"] == "all_reduce at mine.py:12" and "stack" not in found
    (tmp_path / "procs/wait-rank1.json").write_text('{"t": 1, "rank": "x"}')
    assert read_wait(str(tmp_path), 1) is None
    log = (tmp_path / "logs/stacks-rank0.log").read_text()
    assert "the error that has ended a wait:" in log and "line 12 in step" in log
