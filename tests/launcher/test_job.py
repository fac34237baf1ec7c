"""Tests of the run folder of a launch: an existing run id, a full disk, and file permissions."""

from __future__ import annotations

import errno
import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import FleetError, UsageError
from launcher.report.launch_file import LaunchFile, Stage
from launcher.run import launch as run_module
from launcher.run.launch import LaunchContext
from launcher.run.options import LaunchOptions, choose_run_id

PROGRAM_GONE = 1  # start_ticks that no running process has


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    run = RunConfig(runs_dir=str(tmp_path / "runs"))
    return ClusterConfig((NodeConfig("a", env={"API_KEY": "hush"}),), DataConfig("synthetic"), run=run)


def launch_context(config: ClusterConfig) -> LaunchContext:
    return LaunchContext(config, LaunchOptions(Path("cluster.yml")), "r1", Console(file=io.StringIO()))


@pytest.mark.parametrize("stage", ["preflight", "partition", "sync"])
def test_the_run_id_of_a_refused_launch_can_be_used_again(config: ClusterConfig, stage: Stage) -> None:
    context = launch_context(config)
    context.enter_stage(stage)
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")  # the launch is still going on
    context.give_up("failed", "preflight refused the run because of node0", 3)
    assert choose_run_id(config, "r1") == "r1"
    again = launch_context(config)
    assert not (again.folder / "result.json").exists(), "else status would show the earlier launch"
    assert "given-up" not in (again.folder / "events.jsonl").read_text()


def test_of_two_launches_at_once_with_one_run_id_the_second_is_refused(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both find the run id unused; the first makes the run folder while the second makes its draft.
    monkeypatch.setattr(run_module, "offline_plan", lambda *_, **__: launch_context(config))
    options = LaunchOptions(Path("cluster.yml"), run_id="r1")
    with pytest.raises(UsageError, match="r1 exists already; choose another id"):
        run_module.launch(config, options, Console(file=io.StringIO()))
    assert (Path(config.run.runs_dir) / "r1/launch.json").exists()
    assert not (Path(config.run.runs_dir) / "r1/result.json").exists()


@pytest.mark.parametrize(("stage", "free"), [("connect", True), ("sync", True), ("start", False), ("train", False)])
def test_the_run_id_of_a_killed_launcher_can_be_used_again_unless_the_run_may_have_started(
    config: ClusterConfig, stage: Stage, free: bool
) -> None:
    context = launch_context(config)
    gone = LaunchFile(**{**vars(context.file), "start_ticks": PROGRAM_GONE}).at(stage)
    gone.write(context.folder)
    if free:
        assert choose_run_id(config, "r1") == "r1"
        return
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")


def test_the_run_id_of_a_started_run_cannot_be_used_again(config: ClusterConfig) -> None:
    context = launch_context(config)
    context.enter_stage("start")
    context.give_up("failed", "something broke", 1)
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")


def test_files_with_environment_variables_are_readable_by_their_user_only(config: ClusterConfig) -> None:
    folder = launch_context(config).folder
    open_to_all = [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077]
    assert "hush" in (folder / "config.yml").read_text()
    assert open_to_all == ["events.jsonl"]


def full(*args: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_refuses_a_launch_without_a_run_file(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = launch_context(config)
    monkeypatch.setattr(run_module, "write_whole", full)
    with pytest.raises(
        FleetError, match=r"run.json cannot be written: No space left on device; nothing has been start"
    ):
        context.write_file("run.json", "{}")
    context.give_up("failed", "run.json cannot be written", 1)
    assert (
        isinstance(context.console.file, io.StringIO) and "No space left on device" in context.console.file.getvalue()
    )
