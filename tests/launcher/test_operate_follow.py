"""Tests of ``gnnfleet follow``: the run continues after the command has ended, and each event is recorded only once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.command import Command
from launcher.config.schema import ClusterConfig, DataConfig
from launcher.errors import TransportError
from launcher.manage.follow import _LateTransport
from launcher.transport.local import LocalTransport
from node_kit import ROOT
from operate_kit import LocalRun


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    yield (local_run := LocalRun(tmp_path).launched("train").start())
    local_run.kill()


def follow(*words: str) -> subprocess.Popen[str]:
    code = "import sys; from launcher.cli.main import run; sys.exit(run(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "follow", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    assert process.stdout is not None
    printed = []
    while not printed or (printed[-1] and "here is rank" not in printed[-1]):
        printed.append(process.stdout.readline())
    assert printed[-1], printed
    return process


def still_runs(local_run: LocalRun) -> bool:
    stops = [node.path / "control" / "stop" for node in local_run.nodes]
    return not any(stop.exists() for stop in stops) and all(node.supervisor.poll() is None for node in local_run.nodes)


def test_a_signal_ends_following_only_and_events_are_recorded_once(local_run: LocalRun) -> None:
    local_run.await_training()
    for number in (signal.SIGTERM, signal.SIGINT):
        viewer = follow()
        viewer.send_signal(number)
        printed, _ = viewer.communicate(timeout=60)
        assert "Detached: run r1 goes on" in printed and viewer.returncode == 0
        assert still_runs(local_run)
    events = [json.loads(line) for line in (local_run.folder / "events.jsonl").read_text().splitlines()]
    recorded = [event for event in events if "node_rank" in event]
    wrote = [
        json.loads(line) for node in local_run.nodes for line in (node.path / "events.jsonl").read_text().splitlines()
    ]
    assert sorted(recorded, key=lambda event: event["t"]) == sorted(wrote, key=lambda event: event["t"])


@pytest.mark.slow
def test_closing_the_output_ends_following_only(local_run: LocalRun) -> None:
    # The reader of the output ends first, as in `gnnfleet follow | head`.
    local_run.await_training()
    viewer = follow()
    assert viewer.stdout is not None
    viewer.stdout.close()
    metric = {"t": 0, "kind": "step", "rank": 0, "epoch": 5, "step": 1, "steps": 40, "loss": 0.1, "seeds_per_s": 1.0}
    log = local_run.nodes[0].path / "logs" / "rank0.log"
    with log.open("a") as out:
        out.write("something more to print\n" * 3)
    with (local_run.nodes[0].path / "metrics-rank0.jsonl").open("a") as out:
        out.write(json.dumps(metric) + "\n")
    assert viewer.wait(60) == 1
    assert still_runs(local_run)


def test_a_node_that_is_reached_late_is_started_again_as_its_connection_does(tmp_path: Path) -> None:
    class Scheduled(LocalTransport):
        def start_session(self, name: str, command: Command) -> Any:
            return name, command

    late = _LateTransport(ClusterConfig(nodes=(), data=DataConfig(dataset="synthetic")), 0, TransportError("no job"))
    with pytest.raises(TransportError, match="no job"):
        late.start_session("s", Command(("true",)))
    late._transport = Scheduled(0)
    assert late.start_session("s", Command(("true",))) == ("s", Command(("true",)))
