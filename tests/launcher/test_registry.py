"""Tests of the registry of runs and of launch.json, which records the process that launched a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import FleetError
from launcher.report.launch_file import LaunchFile
from launcher.report.run_folder import known_runs, register, registry_folder


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def made(run_id: str = "r1", **more: object) -> LaunchFile:
    return replace(LaunchFile.mine(run_id, "toy", config="cluster.yml", own_command=["python", "a.py"]), **more)


def test_launch_file_round_trip_at_each_stage(tmp_path: Path) -> None:
    launch = made(overrides=("train.lr=0.1",), resumed_from="r0")
    launch.write(tmp_path / "r1")
    assert LaunchFile.read(tmp_path / "r1") == launch
    launch.at("train", detached=True).write(tmp_path / "r1")
    now = LaunchFile.read(tmp_path / "r1")
    assert now is not None and (now.stage, now.detached, now.started) == ("train", True, launch.started)
    assert LaunchFile.read(tmp_path) is None


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text('{"run_id": "r1"}')
    with pytest.raises(FleetError, match=r"launch.json is damaged"):
        LaunchFile.read(tmp_path)


def test_launcher_is_alive_gone_or_on_another_machine() -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = int(Path(f"/proc/{sleeper.pid}/stat").read_text().rpartition(")")[2].split()[19])
    launch = made(pid=sleeper.pid, start_ticks=ticks)
    assert made().alive() is True
    assert launch.alive() is True
    assert replace(launch, host="renamed-by-dhcp").alive() is True
    assert replace(launch, start_ticks=ticks - 1).alive() is False, "the pid has been reused"
    assert replace(launch, boot_id="the boot before").alive() is False
    assert replace(launch, host="laptop", boot_id="of the laptop").alive() is None
    sleeper.communicate(b"\n", timeout=10)
    assert launch.alive() is False
    assert replace(launch, host="a container here").alive() is None


def test_runs_are_found_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    made("old", started=1.0).write(Path("runs/old"))
    made("new", started=2.0).write(Path("runs/new"))
    register("old", Path("runs/old"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [folder.name for folder in known_runs([Path("runs")])] == ["old"]
    folders = known_runs([tmp_path / "project/runs", tmp_path / "nowhere"])
    assert [folder.name for folder in folders] == ["new", "old"], "each once, the newest first"


def test_a_run_with_a_deleted_folder_is_forgotten(tmp_path: Path) -> None:
    register("gone", tmp_path / "runs/gone")
    assert known_runs([]) == []
    assert json.loads((registry_folder() / "gone.json").read_text()) == {"folder": str(tmp_path / "runs/gone")}


def test_registry_follows_home_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert registry_folder() == tmp_path / ".local/state/gnnfleet/runs"
    assert os.path.isabs(registry_folder())
