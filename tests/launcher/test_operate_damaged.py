"""Tests of run folders that are damaged, of another version, or not writable: one clear message, no wrong state."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.report.run_folder import registry_folder
from operate_kit import MadeRun

COMMANDS = [["status"], ["logs"], ["collect"], ["stop"], ["resume", "r1"], ["follow"], ["attach"]]


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return MadeRun(tmp_path).launched("train")


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("result.json", "{", "result.json is damaged (Expecting"),
        ("result.json", "[]", "delete it, then `gnnfleet collect r1` writes a new one"),
        ("run.json", "{", "run.json is damaged: Expecting"),
        ("launch.json", "[]", "delete it, the run's other files are enough"),
        ("config.yml", "nodes: [", "config.yml:1: not valid YAML"),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(made, capsys, name, text, said) -> None:
    (made.folder / name).write_text(text)
    for words in COMMANDS:
        status, told = run_cli(capsys, *words)
        assert status == 1 and said in told and told.startswith("error: "), words
    assert run_cli(capsys, "runs")[0] == 0, "one damaged folder does not hide other runs"


def test_a_run_with_a_lost_plan_is_not_reported_as_never_started(made, capsys) -> None:
    (made.folder / "run.json").unlink()
    status, told = run_cli(capsys, "status")
    assert status == 3 and "the state of its nodes cannot be determined" in told
    for words in [["stop"], ["resume", "r1"], ["logs"]]:
        status, told = run_cli(capsys, *words)
        assert status in (1, 2) and "has no run.json" in told and "--config cluster.yml" in told
    assert json.loads(run_cli(capsys, "runs", "--json")[1])[0]["state"] == "open"


def test_a_run_without_its_plan_is_found_on_the_hosts_of_the_config(made, capsys) -> None:
    (made.folder / "run.json").unlink()
    status, told = run_cli(capsys, "status", "r1", "--config", str(made.folder / "config.yml"))
    assert "run r1 never started" in told and "its nodes answered" in told


def test_a_result_of_an_older_version_is_read(made, capsys) -> None:
    (made.folder / "result.json").write_text('{"state": "done", "exit_status": 0}')
    assert run_cli(capsys, "status")[0] == 0 and run_cli(capsys, "collect")[0] == 0


def test_a_launch_file_of_a_newer_version_is_read(made, capsys) -> None:
    path = made.folder / "launch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    assert "its launcher (alice@" in run_cli(capsys, "status")[1]


def damaged(made: MadeRun) -> None:
    (registry_folder() / "other.json").write_text("{")
    (registry_folder() / "older.json").write_text("[]")


def deleted(made: MadeRun) -> None:
    (registry_folder() / "gone.json").write_text('{"folder": "/no/such/run"}')


@pytest.mark.parametrize("change", [damaged, deleted])
def test_a_bad_registry_entry_does_not_hide_other_runs(made, capsys, change: Callable[[MadeRun], None]) -> None:
    change(made)
    assert [entry["run_id"] for entry in json.loads(run_cli(capsys, "runs", "--json")[1])] == ["r1"]


def test_without_a_registry_a_run_is_found_by_its_folder(made, capsys) -> None:
    shutil.rmtree(made.top / "state")
    (made.top / "state").write_text("")
    status, told = run_cli(capsys, "stop", str(made.folder))
    assert status == 0 and "no process of it is left on its 2 nodes" in told


def test_a_user_without_a_home_has_no_registry_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert registry_folder() == Path("/nonexistent/gnnfleet/runs")


def test_a_failed_write_of_the_result_is_one_message(made, capsys) -> None:
    (made.folder / "result.json").mkdir()
    status, told = run_cli(capsys, "collect")
    assert status == 1 and "note: the report could not be written: " in told
    assert "run folder:" in told, "the report is printed nevertheless"


def test_after_collect_the_exit_status_is_that_of_the_run(made, capsys) -> None:
    told = {"run_id": "r1", "state": "failed", "exit_status": 137, "seconds": 1.0, "nodes": [{}], "notes": []}
    (made.folder / "result.json").write_text(json.dumps({**told, "metrics": {}}))
    assert [run_cli(capsys, word)[0] for word in ("collect", "follow", "status")] == [137, 137, 1]
