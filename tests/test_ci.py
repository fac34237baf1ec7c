"""Tests of .ci/run: the order of its steps, and its report of slow tests that fail or reach the time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CUT_OFF = "!!!!!! xdist.dsession.Interrupted: session-timeout: 2000.0 sec exceeded !!!!!!"
FAILED = "FAILED tests/trainer/test_metis.py::test_large - assert 1 == 2"


def ci(folder: Path, make: str) -> tuple[int, list[str], str]:
    """Run .ci/run with a fake ``make``. Return exit status, arguments of all `make` calls, and the last line.

    make: what the fake ``make`` does for each target, as the branches of a shell ``case``.
    """
    shutil.copytree(REPOSITORY / ".ci", folder / ".ci")
    (folder / "make").write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\ncase $1 in\n{make}\nesac\n')
    (folder / "make").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci/run"], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, (folder / "calls").read_text().splitlines(), (done.stdout.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("slow", "attempts", "last"),
    [
        pytest.param("echo 90 passed", 1, "slow tests passed.", id="pass"),
        pytest.param(f"echo '{FAILED}'; echo 1 failed, 9 passed; exit 2", 2, "failed twice (see above).", id="fail"),
        pytest.param(f"echo '{CUT_OFF}'; echo 9 passed; exit 2", 1, "passed, cut off by time.", id="cut off"),
        pytest.param(f"echo '{FAILED}'; echo '{CUT_OFF}'; exit 2", 2, "see above), cut off by time.", id="both"),
        pytest.param("exit 124", 1, "passed, cut off by time.", id="killed"),
        pytest.param(
            f"case $2 in *last-failed*) echo 1 passed;; *) echo '{FAILED}'; echo 9 passed; exit 2;; esac",
            2, "passed, some at the second attempt.", id="second attempt",
        ),
    ],
)  # fmt: skip
def test_slow_tests_are_reported_and_tried_twice(tmp_path: Path, slow: str, attempts: int, last: str) -> None:
    returned, calls, last_line = ci(tmp_path, f"test-slow) {slow};;")
    assert (returned, last_line.endswith(last)) == (0, True), last_line
    assert calls[:2] == ["check", "test"] and len(calls) == 2 + attempts
    assert calls[2].startswith("test-slow ARGS=--session-timeout=3")


@pytest.mark.parametrize(("target", "calls"), [("check", ["check"]), ("test", ["check", "test"])])
def test_check_and_tests_come_first_and_must_pass(tmp_path: Path, target: str, calls: list[str]) -> None:
    assert ci(tmp_path, f"{target}) exit 2;;")[:2] == (2, calls)
