"""Tests of ``gnnfleet sweep`` on namespaced hosts: it is killed, a host dies, and bad trials are pruned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from launching import REPOSITORY, write_config
from netns import NetCluster
from operator_kit import Operator, run_processes
from ssh_nodes import ssh_nodes
from waiting import DEADLINE, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2000)]

#: A script with a score of its own, known from its first epoch on, and epochs of three seconds.
SCRIPT = """
import os, time
import torch
import gnnfleet as gf

model = torch.nn.Linear(1, 1)
log = gf.StepLog(model, torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(1, 5 if float(os.environ["SCORE"]) > 0.5 else 1000):
    log.step(epoch, 0, 1, torch.tensor(1.0), 1)
    time.sleep(3)
    log.epoch(epoch, 1.0, val=float(os.environ["SCORE"]))
log.result(val=float(os.environ["SCORE"]))
"""


class Sweeping:
    """A process of ``gnnfleet sweep``, and the records of its trials."""

    def __init__(self, operator: Operator, *words: str):
        self.folder = operator.cwd / "sweeps" / "toy"
        self.log = operator.cwd / "sweep.log"
        argv = [sys.executable, str(REPOSITORY / "launch.py"), "sweep", *words]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                argv, cwd=operator.cwd, env=operator.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    @property
    def trials(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("trials/t*.json"))]

    def await_trials(self, condition: Callable[[list[dict]], object]) -> list[dict]:
        def met() -> list[dict]:
            assert self.process.poll() is None, self.log.read_text()
            trials = self.trials
            return trials if condition(trials) else []

        return wait_until(met)

    def end(self) -> int:
        return self.process.wait(4 * DEADLINE)


def ended(trials: list[dict]) -> int:
    return sum(trial["state"] not in ("waiting", "running") for trial in trials)


@pytest.fixture
def cluster(make_cluster: Callable[..., NetCluster]) -> NetCluster:
    return make_cluster(4)


@pytest.fixture
def operator(cluster: NetCluster, tmp_path: Path) -> Iterator[Operator]:
    yield Operator(cluster, tmp_path / "home")


def test_twelve_trials_survive_the_death_of_the_sweep_and_of_a_host(cluster: NetCluster, operator: Operator) -> None:
    train = {"epochs": 60, "fanouts": [4], "hidden": 8, "batch_size": 64}
    data = {"options": {"num_nodes": 600, "num_features": 4}}
    config = write_config(operator.cwd, ssh_nodes(cluster), name="toy", data=data, train=train)
    words = ["--config", str(config), "--set", "train.lr=1e-3,3e-3,1e-2", "--set", "train.hidden=4,8,12,16",
             "--nodes-per-run", "2", "--plain"]  # fmt: skip
    sweep = Sweeping(operator, *words)
    sweep.await_trials(
        lambda trials: ended(trials) >= 1 and any(t["scores"] for t in trials if t["state"] == "running")
    )
    os.kill(sweep.process.pid, signal.SIGKILL)
    sweep.process.wait()

    sweep = Sweeping(operator, *words)
    died = cluster.hosts[3]

    def is_used(trials: list[dict]) -> bool:
        running = [trial for trial in trials if trial["state"] == "running" and trial["scores"]]
        return ended(trials) >= 4 and any(died.address in trial["hosts"] for trial in running)

    sweep.await_trials(is_used)
    died.power_cut()
    assert sweep.end() == 0, sweep.log.read_text()
    output, trials = sweep.log.read_text(), sweep.trials
    assert [trial["state"] for trial in trials] == ["done"] * 12 and all(trial["score"] for trial in trials)
    assert f"{died.address} cannot be reached; the sweep goes on without" in output
    assert "12 done, of 12" in output

    # No trial ran twice, except the one that lost its host.
    again = [trial for trial in trials if trial["attempt"] > 1]
    runs = [operator.cwd / "runs" / f"toy-t{k:03}" for k in range(12)]
    runs += [operator.cwd / "runs" / f"toy-t{trial['number']:03}-2" for trial in again]
    assert sorted((operator.cwd / "runs").iterdir()) == sorted(runs) and [trial["losses"] for trial in again] == [1]
    assert run_processes(cluster) == []

    # The parts were made once, and sent to each host once.
    logs = [path.read_text() for path in operator.cwd.glob("sweeps/toy/launches/*.log")]
    assert len(logs) == len(runs) and sum("partition | write" in log for log in logs) == 1
    sent: dict[tuple[str, ...], list[int]] = {}
    for run in sorted(runs, key=lambda run: json.loads((run / "launch.json").read_text())["started"]):
        hosts = tuple(node["host"] for node in yaml.safe_load((run / "config.yml").read_text())["nodes"])
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        sent.setdefault(hosts, []).append(sum(event["bytes"] for event in events if event["kind"] == "synced"))
    assert len(sent) == 2 and all(first > 0 and not any(later) for first, *later in sent.values()), sent

    best = operator.gnnfleet("--config", "sweeps/toy/best.yml", "--run-id", "again", "--epochs", "1")
    assert best.status == 0, best.output
    assert (sweep.folder / "sweep.html").is_file()


def test_pruned_trials_stop_within_an_epoch(cluster: NetCluster, operator: Operator) -> None:
    config = write_config(operator.cwd, ssh_nodes(cluster), name="toy")
    (operator.cwd / "own.py").write_text(SCRIPT)
    sweep = Sweeping(
        operator, "--config", str(config), "--set", "nodes.*.env.SCORE=0.9,0.8,0.7,0.6,0.1,0.2", "--pruner", "median",
        "--nodes-per-run", "1", "--plain", "--", "python", "own.py",
    )  # fmt: skip
    assert sweep.end() == 0, sweep.log.read_text()
    trials = sweep.trials
    assert [trial["state"] for trial in trials] == ["done"] * 4 + ["pruned"] * 2, sweep.log.read_text()
    for trial in trials[4:]:
        assert max(map(int, trial["scores"])) <= trial["pruned_at"] + 1
    assert run_processes(cluster) == []
