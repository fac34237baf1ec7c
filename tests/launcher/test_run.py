"""Tests of launch.py with a user script on two ranks of one node, with real tmux."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.node import procs
from launching import own_ports
from run_kit import make_parts
from waiting import DEADLINE

ROOT = Path(__file__).resolve().parents[2]


# Real processes: launch.py, tmux, torch.distributed.run and an own script on two ranks of one node.

OWN_SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
rank, how = int(os.environ["RANK"]), sys.argv[1]
dist.init_process_group("gloo")
local, parts = os.environ["LOCAL_RANK"], os.environ["GNNFLEET_PART_IDS"]
print(f"rank {rank} of {dist.get_world_size()}, local {local}, parts {parts}")
dist.barrier()
if how == "raise" and rank == 1:
    raise ValueError("rank 1 does not like this")
if how == "wait":
    Path(os.environ["PID_FOLDER"], f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(120)
dist.barrier()
"""


class Launched:
    def __init__(self, folder: Path, *own: str):
        self.folder = folder
        self.env = {**os.environ, "TMUX_TMPDIR": str(folder), "PID_FOLDER": str(folder)}
        words = ["--config", "cluster.yml", "--run-id", "r1", "--", "python", "train_mine.py", *own]
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *words],
            cwd=folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self, timeout: float = 120.0) -> str:
        return self.process.communicate(timeout=timeout)[0]

    def pid_of(self, rank: int) -> int:
        """Return the pid that the user script of a rank has written."""
        file = self.folder / f"pid{rank}"
        deadline = time.monotonic() + DEADLINE
        while not (file.exists() and file.read_text()):
            assert time.monotonic() < deadline and self.process.poll() is None, "the script did not start to wait"
            time.sleep(0.05)
        return int(file.read_text())

    def nothing_is_left(self) -> bool:
        sessions = subprocess.run(["tmux", "ls"], env=self.env, capture_output=True, text=True, timeout=DEADLINE)
        spec = json.loads((self.folder / "work/runs/r1/node0/node.json").read_text())
        left = procs.with_token(procs.node_token(spec["token"], 0))
        return "gnnfleet" not in sessions.stdout and left == []

    @property
    def result(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "runs/r1/result.json").read_text())
        return result


@pytest.fixture
def start() -> Iterator[Callable[..., Launched]]:
    folder = Path(tempfile.mkdtemp(prefix="gf-"))  # short, since the length of tmux's socket path is limited
    launched: list[Launched] = []
    make_parts(folder / "parts", 1)
    (folder / "train_mine.py").write_text(OWN_SCRIPT)
    (folder / "cluster.yml").write_text(
        "transport: local\nnodes: 1\ndefaults: {procs: 2, workdir: " + str(folder / "work") + "}\n"
        "data: {dataset: toy, folder: parts, mode: verify}\n" + f"run: {json.dumps({'grace': 2, **own_ports()})}\n"
    )

    def begin(*own: str) -> Launched:
        launched.append(Launched(folder, *own))
        return launched[0]

    yield begin
    for one in launched:
        if one.process.poll() is None:
            one.process.kill()
        subprocess.run(["tmux", "kill-server"], env=one.env, capture_output=True, timeout=DEADLINE)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow  # test_supervisor_messages and test_report, and with a launcher tests/cluster/test_failures.py
def test_a_rank_that_raises_is_named_with_its_exception(start: Callable[..., Launched]) -> None:
    run = start("raise")
    output = run.output()
    assert run.process.returncode == 1, output
    assert "node0/rank1 | rank 1 of 2, local 1, parts 0" in output  # rank 0 may be stopped before it prints anything
    assert {path.name for path in (run.folder / "runs/r1/logs/node0").iterdir()} >= {"rank0.log", "rank1.log"}
    assert "The run failed: rank 1 on node0 (local) raised ValueError: rank 1 does not like this" in output
    report = output[output.index("The run failed:") :]
    assert report.count("Traceback") == 1, "the other rank's traceback is folded"
    assert "Connection closed by peer" not in output, "follow-up errors are folded"
    assert "stopped after it: 1 rank" in output or "1 follow-up error" in output
    assert run.result["first_failure"]["rank"] == 1
    assert run.nothing_is_left()


@pytest.mark.slow  # covered by test_supervisor_messages, without launch.py
def test_a_rank_killed_with_sigkill_is_described(start: Callable[..., Launched]) -> None:
    run = start("wait")
    os.kill(run.pid_of(1), signal.SIGKILL)
    output = run.output()
    assert run.process.returncode == 137, output
    assert "The run failed: rank 1 on node0 (local) was killed by signal 9 (SIGKILL)" in output
    assert run.nothing_is_left()


@pytest.mark.slow  # test_failures_local covers Ctrl-C
def test_sigterm_stops_the_node_too(start: Callable[..., Launched]) -> None:
    run = start("wait")
    for rank in (0, 1):
        run.pid_of(rank)
    run.process.send_signal(signal.SIGTERM)
    output = run.output(30)
    assert run.process.returncode == 130, output
    assert run.result["state"] == "stopped"
    assert "Stopped by SIGTERM after" in output
    assert (run.folder / "runs/r1/logs/node0/rank0.log").exists()
    assert run.nothing_is_left()
