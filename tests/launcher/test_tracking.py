"""Tests of what launcher and supervisor do for trackers (``train.track``)."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import DataConfig, NodeConfig, RunConfig
from launcher.node import procs
from launcher.node.child_process import Loop
from launcher.node.peers.model import Peers
from launcher.node.spec import NodeSpec, RunNode
from launcher.node.supervisor import tracking
from launcher.node.supervisor.journal import Journal
from launcher.node.supervisor.observer import End, Sight
from launcher.report.run_folder import tracked_runs, tracked_words
from plan_kit import cluster, facts_of, plan_of
from trainer.core.train_config import TrainConfig
from waiting import stretched

#: A process that says where it tracks the run, and then hangs with a process of its own, whatever it is told.
HANGS = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
state = {"id": "7", "url": "http://tracker/7", "folder": "", "problem": "no answer", "pids": [os.getpid(), child.pid]}
state["token"] = os.environ.get("GNNFLEET_TOKEN")
open("track/mlflow.json", "w").write(json.dumps(state))
time.sleep(600)
"""


@pytest.fixture
def loop() -> Any:
    before = signal.getsignal(signal.SIGCHLD)
    yield Loop()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, before)


def test_trackers_that_hang_end_with_the_run(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_PATIENCE", 0.1)
    monkeypatch.setattr(tracking, "_MARGIN", 0.1)
    monkeypatch.setattr(tracking, "_INTERVAL", 0.0)
    monkeypatch.setenv("GNNFLEET_TOKEN", "of the ranks")
    journal = Journal(str(tmp_path), 0)
    command = {
        "argv": [sys.executable, "-c", HANGS],
        "env": {},
        "cwd": str(tmp_path),
        "job": {"trackers": {"mlflow": {}}},
    }
    spec = NodeSpec("r1", "t", 0, str(tmp_path), (RunNode("a", ranks=(0,)),), None, None, 9.0, 1.0, tracker=command)
    tracked = tracking.Tracking(spec, journal, loop, loop.poll)
    tracked.begin(spec, None)
    sight = Sight(spec, Peers(spec), {"ranks": {0: {"seeds_per_s": 9.0, "loss": 1.0}}}, [])
    found, deadline = [], time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        loop.poll(0.05)
        found += tracked.look(sight)
    (finding,) = found
    assert (finding["kind"], finding["stop"]) == ("tracker", False)
    assert finding["text"] == "mlflow: no answer; the run itself is not affected"
    assert tracked.look(sight) == []

    began = time.monotonic()
    end = End("failed", None, report={"reason": "rank 0 was killed"})
    tracked.conclude(end)
    assert tracked.ended(sight, end) == [] and time.monotonic() - began < stretched(10)
    folder = tmp_path / "track"
    state, told = (json.loads((folder / name).read_text()) for name in ("mlflow.json", "end.json"))
    assert state["token"] is None, "the processes of the ranks are ended by it, earlier"
    assert all(process is None or process.zombie for process in map(procs.look, state["pids"]))
    assert told == {"state": "failed", "report": {"reason": "rank 0 was killed"}, "patience": 0.1}
    figures = json.loads((folder / "nodes.json").read_text())
    assert json.loads((folder / "job.json").read_text()) == command["job"] and set(figures) == {"t", "nodes", "ranks"}
    assert "mlflow: run 7, http://tracker/7" in (tmp_path / "logs/supervisor.log").read_text()
    assert [tracked_words(run) for run in tracked_runs(tmp_path)] == ["mlflow: run 7, http://tracker/7"]


def test_a_plan_gives_trackers_the_settings_and_no_secret() -> None:
    data = DataConfig(dataset="synthetic", store="s3://b/p", store_options={"endpoint_url": "http://s3"})
    nodes = [NodeConfig("a", env={"WANDB_API_KEY": "hush", "LANG": "C"}), NodeConfig("b")]
    train = TrainConfig(lr=0.5, track={"wandb": {"project": "p"}, "tensorboard": None})
    config = cluster(*nodes, data=data, train=train, run=RunConfig())
    plan = plan_of(config, facts=facts_of(2))
    specs = [json.loads(node.file("node.json").content.reveal()) for node in plan.nodes]  # type: ignore[attr-defined]
    command = specs[0]["tracker"]
    assert command["argv"][1:] == ["-m", "trainer", "track", plan.nodes[0].run_dir]
    assert command["env"]["WANDB_API_KEY"] == "hush", "for W&B's client"
    job = command["job"]
    assert (job["run_id"], job["trackers"]) == ("r1", {"wandb": {"project": "p"}, "tensorboard": {}})
    shown = job["config"]
    assert shown["train"]["lr"] == 0.5 and shown["cluster"]["hosts"] == "a, b" and shown["cluster"]["ranks"] == 2
    assert not any(word in json.dumps(job) for word in ("hush", "endpoint", "LANG"))
    assert "--track" not in plan.nodes[0].trainer.argv  # type: ignore[union-attr]


def test_trackers_with_another_environment_end_with_the_run(
    tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_PATIENCE", 0.1)
    monkeypatch.setattr(tracking, "_MARGIN", 0.1)
    command = {"argv": ["env", "-i", "sleep", "60"], "env": {}, "cwd": str(tmp_path), "job": {"trackers": {}}}
    spec = NodeSpec("r1", "t", 0, str(tmp_path), (RunNode("a", ranks=(0,)),), None, None, 9.0, 1.0, tracker=command)
    tracked = tracking.Tracking(spec, Journal(str(tmp_path), 0), loop, loop.poll)
    tracked.begin(spec, None)
    time.sleep(0.5)  # until it has its environment
    began, end = time.monotonic(), End("done", None)
    tracked.conclude(end)
    assert tracked.ended(Sight(spec, Peers(spec), {"ranks": {}}, []), end) == []
    assert time.monotonic() - began < stretched(10)
