"""The operator's run folder during a launch: whose id is free again, what a full disk does, who may read it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, RunConfig
from launcher.errors import FleetError, UsageError
from launcher.report.run_folder import LaunchFile, Stage
from launcher.run import launch as run_module
from launcher.run.launch import LaunchContext
from launcher.run.options import LaunchOptions, choose_run_id

PROGRAM_GONE = 1  # start_ticks that no living process has


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    run = RunConfig(runs_dir=str(tmp_path / "runs"))
    return ClusterConfig((NodeConfig("a", env={"API_KEY": "hush"}),), DataConfig("synthetic"), run=run)


def job_of(config: ClusterConfig) -> LaunchContext:
    return LaunchContext(config, LaunchOptions(Path("cluster.yml")), "r1", Console(file=io.StringIO()))


@pytest.mark.parametrize("stage", ["preflight", "partition", "sync"])
def test_the_id_of_a_launch_that_was_refused_is_free_again(config: ClusterConfig, stage: Stage) -> None:
    job = job_of(config)
    job.enter_stage(stage)
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")  # it goes on
    job.give_up("failed", "preflight refused the run because of node0", 3)
    assert choose_run_id(config, "r1") == "r1"
    again = job_of(config)
    assert not (again.folder / "result.json").exists(), "else status would tell of the launch before"
    assert "given-up" not in (again.folder / "events.jsonl").read_text()


@pytest.mark.parametrize(("stage", "free"), [("connect", True), ("sync", True), ("start", False), ("train", False)])
def test_the_id_of_a_launcher_that_was_killed_is_free_unless_it_may_run(
    config: ClusterConfig, stage: Stage, free: bool
) -> None:
    job = job_of(config)
    gone = LaunchFile(**{**vars(job.file), "start_ticks": PROGRAM_GONE}).at(stage)
    gone.write(job.folder)
    if free:
        assert choose_run_id(config, "r1") == "r1"
        return
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")


def test_the_id_of_a_run_that_began_stays_taken(config: ClusterConfig) -> None:
    job = job_of(config)
    job.enter_stage("start")
    job.give_up("failed", "something broke", 1)
    with pytest.raises(UsageError, match="exists already"):
        choose_run_id(config, "r1")


def test_what_holds_the_environment_is_for_its_user_alone(config: ClusterConfig) -> None:
    folder = job_of(config).folder
    open_to_all = [path.name for path in folder.iterdir() if path.stat().st_mode & 0o077]
    assert "hush" in (folder / "config.yml").read_text()
    assert open_to_all == ["events.jsonl"]


def full(*args: object, **more: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_disk_here_refuses_a_launch_that_nobody_could_come_back_to(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(config)
    monkeypatch.setattr(run_module, "write_whole", full)
    with pytest.raises(
        FleetError, match=r"run.json cannot be written: No space left on device; nothing has been start"
    ):
        job.write_file("run.json", "{}")
    job.give_up("failed", "run.json cannot be written", 1)
    assert isinstance(job.console.file, io.StringIO) and "No space left on device" in job.console.file.getvalue()
