"""Tests of how the launcher runs the partitioner: its output is shown and its end is reported."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.command import Command
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, PartitionConfig
from launcher.files import CODE_ROOT
from launcher.plan.partition import PartitionFailed, local_trainer, partitioning, run_partitioner, runnable
from launcher.report.profile import analyse
from trainer.core.train_config import TrainConfig


def partitioner(code: str) -> tuple[str, str]:
    """Run ``code`` in place of the partitioner. Return the console output and the error message, or ""."""
    shown = io.StringIO()
    try:
        run_partitioner(Command((sys.executable, "-c", code), {}), Console(file=shown, width=200))
    except PartitionFailed as failed:
        return shown.getvalue(), str(failed)
    return shown.getvalue(), ""


def test_output_is_printed_line_by_line_with_a_prefix() -> None:
    assert partitioner("print('load 1 s'); print('error: 0.1 %'); print('write 1 s')") == (
        "partition | load 1 s\npartition | error: 0.1 %\npartition | write 1 s\n", ""
    )  # fmt: skip


@pytest.mark.parametrize("reason", ["x.npy: 5 rows, but 6 nodes", "first line\\nsecond line"])
def test_the_reason_of_a_failure_is_reported_once(reason: str) -> None:
    shown, failure = partitioner(f"import sys; print('load 1 s', flush=True); sys.exit('error: {reason}')")
    assert shown == "partition | load 1 s\n"
    assert failure == reason.replace("\\n", "\n")


def test_a_failure_without_a_message_points_to_the_output() -> None:
    shown, failure = partitioner("{}['missing']")
    assert "partition | KeyError: 'missing'" in shown
    assert failure == "partitioning failed (exit status 1): see its output above"


def test_a_killed_partitioner_is_reported_with_what_to_do() -> None:
    _, failure = partitioner("import os; os.kill(os.getpid(), 9)")
    assert failure.startswith(
        "partitioning was killed by signal 9 (SIGKILL); if memory ran out, set data.partition.memory"
    )


@pytest.mark.parametrize("path", ["", ":/elsewhere"])
def test_no_file_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    for name in ("trainer", "launcher", "numpy", "json", "click"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path)
    command = local_trainer("partition", "tables", "--help")
    done = subprocess.run(
        runnable(command), env={**os.environ, **command.env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "python -m trainer partition tables" in done.stdout, done.stderr
    metrics = tmp_path / "metrics-rank0.jsonl"
    metrics.write_text('{"t": 1.0, "kind": "start", "rank": 0}\n')
    assert analyse([metrics]).traffic == ()


@pytest.mark.parametrize("words", [("trainer", "partition", "tables", "--help"), ("launcher", "plan", "--help")])
def test_programs_started_by_hand_import_no_file_of_the_current_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    for name in ("numpy", "click", "yaml", "rich"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the {name}.py of the current folder')")
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CODE_ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "Usage:" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({}, "--method auto --seed 0 --balance types+seeds"),
        ({"method": "metis", "balance": "nodes", "seed": 3}, "--method metis --seed 3 --balance nodes"),
        ({"method": "frequency"}, "--method frequency --seed 0 --balance types+seeds --fanouts 7,-1"),
        ({"method": "random", "balance": "nodes"}, "--method random --seed 0"),
        ({"method": "hash", "clusters": 50}, "--method hash --seed 0 --clusters 50"),
    ],
)
def test_the_partitioner_gets_the_options_of_its_method(how: dict[str, Any], words: str) -> None:
    data = DataConfig("synthetic", folder="/parts", partition=PartitionConfig(**how))
    config = ClusterConfig((NodeConfig("a"), NodeConfig("b")), data, TrainConfig(fanouts=(7, -1)))
    argv = partitioning(resolve_run(config)).command.argv
    assert " ".join(argv[1:]) == f"-m trainer partition make --dataset synthetic --num-parts 2 {words} --out /parts"
