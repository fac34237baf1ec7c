"""Tests of what a user sees after a rank has waited longer than its timeout, in runs of two local nodes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from launching import Running, local_config

pytestmark = pytest.mark.slow

TRAIN = {"epochs": 4000, "batch_size": 30, "timeout": 10}

#: A user script that trains nothing, whose rank 1 waits for a file; its process group gives up after 6 s.
SCRIPT = """
import datetime, os, time, torch, torch.distributed as dist, gnnfleet as gf
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
graph = gf.open()
def load():
    while not os.path.exists("/nonexistent"):
        time.sleep(0.1)
dist.barrier()
print("all here", flush=True)
if dist.get_rank() == 1:
    load()
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("what", ["rank1", "server"])
def test_a_stopped_process_is_named_as_the_cause(what: str, tmp_path: Path, local_workdirs: Path) -> None:
    data = {"topology": "partitioned", "cache": "0"}
    config = local_config(tmp_path, [1, 1], local_workdirs, train=TRAIN, data=data)
    running = Running(config, "--run-id", f"waits-{what}").await_epoch(3)
    state = json.loads((local_workdirs / f"node1/runs/waits-{what}/node1/state.json").read_text())
    os.kill(next(one["pid"] for one in state["processes"] if one["name"] == what), signal.SIGSTOP)
    done = running.end()
    assert done.status == 1, done.output
    (finding,) = done.result["findings"]
    who = "rank 1 on" if what == "rank1" else "the graph server of"
    assert f"The run failed: {who} node1 (local) is stopped (SIGSTOP or a debugger): rank 0 on node0" in done.output
    assert (finding["kind"], finding["node_rank"]) == ("stall", 1)
    if what == "rank1":
        assert "waited 10 s for other ranks (" in finding["text"] and finding["rank"] == 1
        assert any(line.startswith("rank 1: state T") for line in finding["stacks"]), finding
    else:
        assert re.search(
            r"for the graph server of node1 \(local\) to answer a (sample|gather) request$", finding["text"]
        )
        assert any(line.startswith("graph server of node1 (local): state T") for line in finding["stacks"]), finding
    for k, name in ((0, "rank0"), (0, "server"), (1, "rank1"), (1, "server")):
        assert (done.run_dir / f"logs/node{k}/stacks-{name}.log").stat().st_size > 100


def test_a_script_whose_rank_does_not_join_a_collective(tmp_path: Path, local_workdirs: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    config = local_config(tmp_path, [1, 1], local_workdirs)
    done = Running(config, "--", "python", "own.py").await_line("all here").end()
    assert done.status == 1, done.output
    (finding,) = done.result["findings"]
    assert finding["text"] == (
        "rank 0 on node0 (local) waited 6 s for other ranks (all_reduce at own.py:12); not there: rank 1 on "
        "node1 (local) (at own.py:7 in load())"
    )
    assert finding["stacks"] == ["rank 0: all_reduce at own.py:12", "rank 1: own.py:7 in load()"]
