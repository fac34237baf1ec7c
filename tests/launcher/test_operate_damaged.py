"""Tests of commands on run folders that are damaged, read-only or of another version of gnnfleet."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.manage import show_logs
from launcher.manage.show_logs import LogFilter
from launcher.report.run_folder import registry_folder
from operate_kit import LocalRun

COMMANDS = [["status"], ["logs"], ["collect"], ["stop"], ["resume", "r1"], ["follow"], ["attach"]]


@pytest.fixture(autouse=True)
def other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.fixture
def local_run(tmp_path: Path) -> LocalRun:
    return LocalRun(tmp_path).launched("train")


def run_cli(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = run(list(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("result.json", "{", "result.json is damaged (Expecting"),
        ("result.json", "[]", "delete it, then `gnnfleet collect r1` writes a new one"),
        ("run.json", "{", "run.json is damaged: Expecting"),
        ("launch.json", "[]", "delete it, the run's other files are enough"),
        ("config.yml", "nodes: [", "config.yml:1: not valid YAML"),
    ],
)
def test_a_damaged_file_is_named_with_a_remedy(local_run, capsys, name, text, message) -> None:
    (local_run.folder / name).write_text(text)
    for words in COMMANDS:
        status, output = run_cli(capsys, *words)
        assert status == 1 and message in output and output.startswith("error: "), words
    assert run_cli(capsys, "runs")[0] == 0, "one damaged folder does not hide other runs"


def test_a_run_with_a_lost_plan_is_not_reported_as_never_started(local_run, capsys) -> None:
    (local_run.folder / "run.json").unlink()
    status, output = run_cli(capsys, "status")
    assert status == 3 and "the state of its nodes cannot be determined" in output
    for words in [["stop"], ["resume", "r1"], ["logs"]]:
        status, output = run_cli(capsys, *words)
        assert status in (1, 2) and "has no run.json" in output and "--config cluster.yml" in output
    assert json.loads(run_cli(capsys, "runs", "--json")[1])[0]["state"] == "open"


def test_a_run_without_its_plan_is_found_on_the_hosts_of_the_config(local_run, capsys) -> None:
    (local_run.folder / "run.json").unlink()
    status, output = run_cli(capsys, "status", "r1", "--config", str(local_run.folder / "config.yml"))
    assert "run r1 never started" in output and "its nodes answered" in output


def test_a_result_of_an_older_version_is_read(local_run, capsys) -> None:
    (local_run.folder / "result.json").write_text('{"state": "done", "exit_status": 0}')
    assert run_cli(capsys, "status")[0] == 0 and run_cli(capsys, "collect")[0] == 0


def test_a_launch_file_of_a_newer_version_is_read(local_run, capsys) -> None:
    path = local_run.folder / "launch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "more": 1}))
    assert "its launcher (alice@" in run_cli(capsys, "status")[1]


def damaged(local_run: LocalRun) -> None:
    (registry_folder() / "other.json").write_text("{")
    (registry_folder() / "older.json").write_text("[]")


def deleted(local_run: LocalRun) -> None:
    (registry_folder() / "gone.json").write_text('{"folder": "/no/such/run"}')


@pytest.mark.parametrize("change", [damaged, deleted])
def test_a_bad_registry_entry_does_not_hide_other_runs(local_run, capsys, change: Callable[[LocalRun], None]) -> None:
    change(local_run)
    assert [entry["run_id"] for entry in json.loads(run_cli(capsys, "runs", "--json")[1])] == ["r1"]


def test_without_a_registry_a_run_is_found_by_its_folder(local_run, capsys) -> None:
    shutil.rmtree(local_run.top / "state")
    (local_run.top / "state").write_text("")
    status, output = run_cli(capsys, "stop", str(local_run.folder))
    assert status == 0 and "no process of it is left on its 2 nodes" in output


def test_a_run_is_found_in_the_folder_where_the_command_runs(local_run, capsys, monkeypatch) -> None:
    shutil.rmtree(local_run.top / "state", ignore_errors=True)
    for place, name in ((local_run.folder, "."), (local_run.folder / "logs", ".."), (local_run.folder.parent, "link")):
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        if name == "link":
            Path("link").symlink_to(local_run.folder)
        assert run_cli(capsys, "status", name)[1].startswith("run r1 ")


def test_a_user_without_a_home_has_no_registry_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert registry_folder() == Path("/nonexistent/gnnfleet/runs")


def test_a_failed_write_of_the_result_is_one_message(local_run, capsys) -> None:
    (local_run.folder / "result.json").mkdir()
    status, output = run_cli(capsys, "collect")
    assert status == 1 and "note: the report could not be written: " in output
    assert "run folder:" in output, "the report is printed nevertheless"


def test_after_collect_the_exit_status_is_that_of_the_run(local_run, capsys) -> None:
    output = {"run_id": "r1", "state": "failed", "exit_status": 137, "seconds": 1.0, "nodes": [{}], "notes": []}
    (local_run.folder / "result.json").write_text(json.dumps({**output, "metrics": {}}))
    assert [run_cli(capsys, word)[0] for word in ("collect", "follow", "status")] == [137, 137, 1]


def test_a_pipe_among_collected_logs_is_left_out_and_does_not_block(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("2026-11-20T21:00:00.123Z here\n")
    os.mkfifo(tmp_path / "rank1.log")
    assert [line.text for lines in show_logs._lines_here(tmp_path, 0, LogFilter()) for line in lines] == ["here"]
