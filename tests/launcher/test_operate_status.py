"""Tests of ``status`` for every state of the launcher and the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.verdict import State
from operate_kit import MadeRun


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own registry and runs in a folder without the run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    yield (made := MadeRun(tmp_path))
    made.kill()


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit status and everything that ``gnnfleet`` printed."""
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def status_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    status = run(["status", "--json", *words])
    told: dict = json.loads(capsys.readouterr().out)
    assert told["exit_status"] == status
    return told


def test_status_on_a_machine_without_the_run_folder(made, capsys, monkeypatch, tmp_path) -> None:
    """Given only a cluster file, with its hosts in another order and one host more."""
    made.start()
    made.await_training()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    config = tmp_path / "elsewhere/cluster.yml"
    workdirs = [*reversed([node.workdir for node in made.plan.nodes]), str(tmp_path / "no such folder")]
    nodes = "".join(f"  - {{host: localhost, workdir: {folder}}}\n" for folder in workdirs)
    config.write_text(f"transport: local\nnodes:\n{nodes}data: {{dataset: synthetic}}\n")
    told = status_of(capsys, "--config", str(config))
    assert told["run_id"] == "r1" and told["state"] == "running" and told["folder"] is None
    assert "epoch 4, step 13 of 40" in told["sentence"], "that file does not contain the run's number of epochs"
    assert [node["state"] for node in told["nodes"]] == ["training", "training"]
    assert told["next"][0] == f"gnnfleet follow r1 --config {config}"
    assert run_cli(capsys, "status", "r9", "--config", str(config)) == (
        2,
        f"error: no run `r9` on the hosts of {config}; the newest there are r1\n",
    )


def test_status_of_a_finished_run_connects_to_no_node(made, capsys) -> None:
    made.launched("end")
    result = {"run_id": "r1", "state": "failed", "exit_status": 137, "seconds": 61.2, "notes": [], "metrics": {}}
    first = {"rank": 1, "sentence": "rank 1 on node1 (gnn2) was killed by signal 9 (SIGKILL)"}
    (made.folder / "result.json").write_text(json.dumps({**result, "nodes": [{}], "first_failure": first}))
    told = status_of(capsys)
    assert told["sentence"] == "run r1 has failed after 61 s: rank 1 on node1 (gnn2) was killed by signal 9 (SIGKILL)"
    assert told["nodes"] == [] and told["next"] == ["gnnfleet report r1"]
    (made.folder / "checkpoints").mkdir()
    (made.folder / "checkpoints/last.pt").write_bytes(b"weights")
    assert status_of(capsys)["next"] == ["gnnfleet resume r1", "gnnfleet report r1"]


def test_every_state_has_an_exit_status() -> None:
    from typing import get_args

    from launcher.report.verdict import EXIT_STATUS

    assert set(EXIT_STATUS) == set(get_args(State))
