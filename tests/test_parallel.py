"""Tests of ``pytest --workers``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest
from parallel import run_tests

def pytest_addoption(parser):
    parser.addoption("--workers", type=int)

def pytest_runtestloop(session):
    run_tests(session, session.config.option.workers)
    return True

@pytest.fixture(scope="session")
def shared():
    yield
    raise OSError("the end of what is shared")
"""

FIRST = """
import os, signal, time, warnings
from pathlib import Path
import pytest

def test_fails(tmp_path):
    print("printed by", os.environ["PYTEST_WORKER"])
    (tmp_path.parents[1] / "pid").write_text(str(os.getpid()))
    assert 1 == 2

def test_stays_with_its_worker(tmp_path):
    assert (tmp_path.parents[1] / "pid").read_text() == str(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)

def test_goes_on_after_a_death():
    warnings.warn("noticed")

@pytest.mark.quiet
def test_quiet():
    Path("quiet").touch()
    time.sleep(0.5)
    Path("quiet").unlink()
"""

SECOND = """
import time
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(20))
def test_beside(number, shared):
    time.sleep(0.05)
    assert not Path("quiet").exists()
"""


def test_files_of_tests_run_side_by_side(tmp_path: Path) -> None:
    for name, text in {"conftest": CONFTEST, "test_first": FIRST, "test_second": SECOND}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = quiet\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "COLUMNS": "200"}
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--workers", "2", "--basetemp", "made"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "2 failed, 22 passed, 1 warning, 1 error" in done.stdout, done.stdout + done.stderr
    assert "printed by 0" in done.stdout and "UserWarning: noticed" in done.stdout
    for line in (
        "FAILED test_first.py::test_fails - assert 1 == 2",
        "FAILED test_first.py::test_stays_with_its_worker - the worker that ran this test died: exit status -9",
        "ERROR test_second.py::test_beside[19] - OSError('the end of what is shared')",
    ):
        assert line in done.stdout
