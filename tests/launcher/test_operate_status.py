"""``status`` tells the truth, whatever has become of the launcher and the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.verdict import State
from operate_kit import TRAINS, MadeRun


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a registry of its own, and asks from a folder that knows nothing of the run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeRun]:
    yield (made := MadeRun(tmp_path))
    made.kill()


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit status and all that ``gnnfleet`` printed."""
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def status_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    status = run(["status", "--json", *words])
    told: dict = json.loads(capsys.readouterr().out)
    assert told["exit_status"] == status
    return told


@pytest.mark.parametrize("stage", ["connect", "preflight", "partition", "sync"])
def test_launcher_killed_before_the_start_leaves_nothing_on_the_nodes(made, capsys, stage) -> None:
    made.launched(stage)
    status, told = asked(capsys, "status")
    assert status == 1
    assert "run r1 never started: its launcher (alice@" in told and "nothing of it runs on the nodes" in told
    assert "next: " not in told, "there is no checkpoint"


@pytest.mark.parametrize(("stage", "doing"), [("preflight", "checking its nodes"), ("sync", "sending files")])
def test_living_launcher_before_the_start(made, capsys, stage, doing) -> None:
    made.launched(stage, alive=True)
    told = status_of(capsys, "r1")
    assert told["state"] == "preparing" and doing in told["sentence"]
    assert told["launcher"]["alive"] is True


def test_killed_while_starting_tells_which_nodes_run(made, capsys) -> None:
    made.launched("start").start(TRAINS, 0)
    made.await_training(0)
    told = status_of(capsys)
    assert told["state"] == "running" and "died while starting the run" in told["sentence"]
    assert [node["state"] for node in told["nodes"]] == ["training", "not started"]
    assert told["notes"] == ["node1 (local): not started"]


def test_run_without_launcher_is_shown_rank_by_rank(made, capsys) -> None:
    made.launched("train").start()
    made.await_training()
    status, told = asked(capsys, "status")
    assert status == 0
    first, header, *rows = told.splitlines()
    assert first.startswith("run r1 trains: 2 nodes, 2 ranks, epoch 4 of 10, step 13 of 40; its launcher (alice@")
    assert header.split() == ["node", "rank", "state", "epoch", "step", "seeds/s", "loss", "remote", "heartbeat"]
    assert rows[0].split()[:9] == ["node0", "(local)", "0", "training", "4", "13/40", "1,234", "0.5000", "25%"]
    assert "next: gnnfleet follow r1" in told and "next: gnnfleet stop r1" in told


@pytest.mark.parametrize("stage", ["train", "collect"])
def test_ended_run_that_nobody_collected(made, capsys, stage) -> None:
    made.launched(stage).start("print('short')")
    for node in made.nodes:
        node.end()
    told = status_of(capsys)
    assert told["state"] == "done" and told["notes"] == []
    assert told["next"] == ["gnnfleet collect r1"]


def test_failed_run_names_the_first_cause(made, capsys) -> None:
    made.launched("train").start("raise SystemExit(3)")
    for node in made.nodes:
        node.end()
    told = status_of(capsys)
    assert told["state"] == "failed"
    assert "r1 has failed (2 nodes, 2 ranks): node0: rank 0 ended with exit status 3; its launcher" in told["sentence"]
    assert told["next"] == ["gnnfleet collect r1"], "no checkpoint has come here yet"


def test_killed_supervisor_is_seen(made, capsys) -> None:
    made.launched("train").start()
    made.await_training()
    made.nodes[1].supervisor.kill()
    made.nodes[1].supervisor.wait()
    told = status_of(capsys)
    assert [node["state"] for node in told["nodes"]] == ["training", "lost"]
    assert any("the supervisor (pid" in note and "node1" in note for note in told["notes"])


def test_detached_and_foreign_launchers(made, capsys) -> None:
    made.launched("train", detached=True).start()
    made.await_training()
    assert "has left it to itself since" in status_of(capsys)["sentence"]
    made.launched("train", host="laptop", boot_id="of the laptop")
    sentence = status_of(capsys)["sentence"]
    assert sentence.endswith("it was launched by alice@laptop, whose launcher cannot be seen from here")


def test_from_a_machine_that_never_saw_the_run(made, capsys, monkeypatch, tmp_path) -> None:
    """Only a cluster file, its hosts in another order, and one host more."""
    made.start()
    made.await_training()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another home"))
    config = tmp_path / "elsewhere/cluster.yml"
    workdirs = [*reversed([node.workdir for node in made.plan.nodes]), str(tmp_path / "no such folder")]
    nodes = "".join(f"  - {{host: localhost, workdir: {folder}}}\n" for folder in workdirs)
    config.write_text(f"transport: local\nnodes:\n{nodes}data: {{dataset: synthetic}}\n")
    told = status_of(capsys, "--config", str(config))
    assert told["run_id"] == "r1" and told["state"] == "running" and told["folder"] is None
    assert "epoch 4, step 13 of 40" in told["sentence"], "how many epochs the run has, that file does not say"
    assert [node["state"] for node in told["nodes"]] == ["training", "training"]
    assert told["next"][0] == f"gnnfleet follow r1 --config {config}"
    assert asked(capsys, "status", "r9", "--config", str(config)) == (
        2,
        f"error: no run `r9` on the hosts of {config}; the newest there are r1\n",
    )


def test_finished_run_needs_no_node(made, capsys) -> None:
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
