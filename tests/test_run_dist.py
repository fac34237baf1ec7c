"""Tests of run_dist.sh, which passes shell variables as options to launch.py."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "run_dist.sh"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a fake interpreter that prints its arguments, one per line, and exits with status 7."""
    path = tmp_path / "python with space"
    path.write_text('#!/bin/sh\nfor word; do echo "[$word]"; done\necho complaint >&2\nexit 7\n')
    path.chmod(0o755)
    return path


def run(python: Path, *words: str, cwd: Path = Path("/"), **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(python), "LOG_DIR": str(python.parent / "logs"), **variables}
    return subprocess.run([SCRIPT, *words], env=variables, capture_output=True, text=True, timeout=30, cwd=cwd)


def words_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line[1:-1] for line in done.stdout.splitlines() if line.startswith("[")]


def test_without_variables_it_launches_the_local_template(python: Path) -> None:
    here = SCRIPT.parent
    assert words_of(run(python)) == [f"{here}/launch.py", "--config", f"{here}/templates/local.yml"]


def test_variables_become_options(python: Path) -> None:
    done = run(
        python, PROCS="2", EPOCHS="3", BATCH_SIZE="512", FANOUTS="15,10,5", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500",
        DATASET="file", DATA_SOURCE="my data", VENV="~/env", RUNS_DIR="my runs",
    )  # fmt: skip
    assert words_of(done)[3:] == [
        *("--num_training_procs", "2", "--epochs", "3", "--batch_size", "512", "--num_neighbors", "15,10,5"),
        *("--master_addr", "10.0.0.1", "--master_port", "29500", "--runs-dir", "my runs"),
        *("--set", "data.dataset=file", "--set", "data.options={}", "--set", "data.folder=parts/file"),
        *("--set", "data.source=my data", "--set", "defaults.venv=~/env"),
    ]


def test_another_dataset_has_its_own_options_and_folder(python: Path) -> None:
    # If DATASET differs from the dataset in CONFIG, the dataset options and partition folder in CONFIG are not used.
    words = words_of(run(python, DATASET="Planetoid:Cora", DATA_OPTIONS="undirected: true"))
    assert words[3:] == [
        *("--set", "data.dataset=Planetoid:Cora", "--set", "data.options={undirected: true}"),
        *("--set", "data.folder=parts/Planetoid-Cora"),
    ]


def test_nodes_as_hosts_and_as_a_number(python: Path) -> None:
    hosts = words_of(run(python, NODES="me@a me@b:2222"))
    assert hosts[3:] == ["--set", 'nodes=["me@a","me@b:2222"]', "--set", "transport=ssh"]
    assert words_of(run(python, NODES="3"))[3:] == ["--set", "nodes=3", "--set", "transport=local"]


def test_further_arguments_reach_launch_py_unchanged(python: Path) -> None:
    done = run(python, "--dry-run", "--", "python", "my train.py", "$HOME")
    assert words_of(done)[3:] == ["--dry-run", "--", "python", "my train.py", "$HOME"]


def test_exit_status_and_output_are_passed_on(python: Path) -> None:
    done = run(python)
    [log] = (python.parent / "logs").iterdir()
    assert done.returncode == 7
    assert "complaint" in log.read_text() and f"[{SCRIPT.parent}/launch.py]" in log.read_text()
    assert done.stdout.startswith(log.read_text()) and str(log) in done.stdout


def test_paths_are_relative_to_the_working_directory(python: Path) -> None:
    # A CONFIG that is not in the working directory is looked up in the folder of run_dist.sh.
    (python.parent / "mine.yml").touch()
    assert words_of(run(python, cwd=python.parent, CONFIG="mine.yml"))[2] == "mine.yml"
    run(python, cwd=python.parent, LOG_DIR="here")
    assert len(list((python.parent / "here").iterdir())) == 1
