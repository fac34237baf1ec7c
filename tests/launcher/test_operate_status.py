"""Tests of ``gnnfleet status`` for every state of the launcher and of nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.verdict import State
from operate_kit import LocalRun


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def local_run(tmp_path: Path) -> Iterator[LocalRun]:
    yield (local_run := LocalRun(tmp_path))
    local_run.kill()


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def status_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    status = run(["status", "--json", *words])
    status_json: dict = json.loads(capsys.readouterr().out)
    assert status_json["exit_status"] == status
    return status_json


def test_status_on_a_machine_without_the_run_folder(local_run, capsys, monkeypatch, tmp_path) -> None:
    # The user has only a cluster file, which lists the hosts of the run in another order and one more host.
    local_run.start()
    local_run.await_training()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    config = tmp_path / "elsewhere/cluster.yml"
    workdirs = [*reversed([node.workdir for node in local_run.plan.nodes]), str(tmp_path / "no such folder")]
    nodes = "".join(f"  - {{host: localhost, workdir: {folder}}}\n" for folder in workdirs)
    config.write_text(f"transport: local\nnodes:\n{nodes}data: {{dataset: synthetic}}\n")
    status_json = status_of(capsys, "--config", str(config))
    assert status_json["run_id"] == "r1" and status_json["state"] == "running" and status_json["folder"] is None
    assert "epoch 4, step 13 of 40" in status_json["sentence"], "that file does not contain the run's number of epochs"
    assert [node["state"] for node in status_json["nodes"]] == ["training", "training"]
    assert status_json["next"][0] == f"gnnfleet follow r1 --config {config}"
    assert run_cli(capsys, "status", "r9", "--config", str(config)) == (
        2,
        f"error: no run `r9` on the hosts of {config}; the newest there are r1\n",
    )


def test_status_of_a_finished_run_connects_to_no_node(local_run, capsys) -> None:
    local_run.launched("end")
    result = {"run_id": "r1", "state": "failed", "exit_status": 137, "seconds": 61.2, "notes": [], "metrics": {}}
    first = {"rank": 1, "sentence": "rank 1 on node1 (gnn2) was killed by signal 9 (SIGKILL)"}
    (local_run.folder / "result.json").write_text(json.dumps({**result, "nodes": [{}], "first_failure": first}))
    status_json = status_of(capsys)
    assert (
        status_json["sentence"]
        == "run r1 has failed after 61 s: rank 1 on node1 (gnn2) was killed by signal 9 (SIGKILL)"
    )
    assert status_json["nodes"] == [] and status_json["next"] == ["gnnfleet report r1"]
    (local_run.folder / "checkpoints").mkdir()
    (local_run.folder / "checkpoints/last.pt").write_bytes(b"weights")
    assert status_of(capsys)["next"] == ["gnnfleet resume r1", "gnnfleet report r1"]


def test_every_state_has_an_exit_status() -> None:
    from typing import get_args

    from launcher.report.verdict import EXIT_STATUS

    assert set(EXIT_STATUS) == set(get_args(State))
