"""Tests of .ci/run: the order of its steps, and its report of slow tests that fail or reach the time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from waiting import DEADLINE

REPOSITORY = Path(__file__).resolve().parents[1]
COLLECTED = "3 workers [90 items]"
CUT_OFF = "!!!!!! xdist.dsession.Interrupted: session-timeout: 2000.0 sec exceeded !!!!!!"
FAILED = "FAILED tests/trainer/test_metis.py::test_large - assert 1 == 2"
PASSED = "CI: check, tests and slow tests passed"


def ci(folder: Path, make: str) -> tuple[int, list[str], str]:
    """Run .ci/run with a fake ``make``. Return exit status, arguments of all `make` calls, and the last line.

    make: what the fake ``make`` does for each target, as the branches of a shell ``case``.
    """
    shutil.copytree(REPOSITORY / ".ci", folder / ".ci")
    (folder / "make").write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\ncase $1 in\n{make}\nesac\n')
    (folder / "make").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci/run"], env=env, capture_output=True, text=True, timeout=DEADLINE)
    return done.returncode, (folder / "calls").read_text().splitlines(), (done.stdout.splitlines() or [""])[-1]


def output(*lines: str, then: str = "exit 2") -> str:
    """Return the shell command of a ``make`` that prints these lines."""
    return "; ".join([f"echo '{line}'" for line in (COLLECTED, *lines)] + [then])


@pytest.mark.parametrize(
    ("first", "second", "status", "last"),
    [
        pytest.param(output("90 passed", then=""), "", 0, f"{PASSED}.", id="pass"),
        pytest.param(
            output(FAILED, "1 failed, 89 passed"), output(FAILED, "1 failed"), 1,
            "SLOW TESTS FAILED, and again when they ran alone (see above).", id="fail",
        ),
        pytest.param(
            output(FAILED, "1 failed, 89 passed"), output("1 passed", then=""), 0,
            f"{PASSED}, 1 OF THE SLOW TESTS ONLY AT THE SECOND ATTEMPT.", id="second attempt",
        ),
        pytest.param(
            output(CUT_OFF, "=== 8 passed, 1 skipped in 2000.00s ==="), "", 0,
            f"{PASSED}; 81 of 90 SLOW TESTS HAVE NOT RUN, cut off by time.", id="cut off",
        ),
        pytest.param(
            output(FAILED, CUT_OFF, "1 failed, 9 passed"), output("1 passed", then=""), 0,
            "1 OF THE SLOW TESTS ONLY AT THE SECOND ATTEMPT; 80 of 90 SLOW TESTS HAVE NOT RUN, cut off by time.",
            id="both",
        ),
        pytest.param(
            output(FAILED, "1 failed, 89 passed"), output(CUT_OFF, "no tests ran"), 1,
            "SLOW TESTS FAILED, and again when they ran alone (see above).", id="second attempt cut off",
        ),
        pytest.param("exit 124", "", 1, "slow tests DID NOT COME TO THEIR END (see above).", id="killed"),
        pytest.param("echo ImportError; exit 2", "", 1, "slow tests DID NOT COME TO THEIR END (see above).", id="none"),
    ],
)  # fmt: skip
def test_slow_tests_decide_and_are_tried_twice(tmp_path: Path, first: str, second: str, status: int, last: str) -> None:
    make = f"test-slow) case $2 in *last-failed*) {second or 'exit 9'};; *) {first};; esac;;"
    returned, calls, last_line = ci(tmp_path, make)
    assert (returned, last_line.endswith(last)) == (status, True), last_line
    assert calls[:2] == ["check", "test"] and len(calls) == (4 if second else 3)
    assert calls[2].startswith("test-slow ARGS=--session-timeout=3")


@pytest.mark.parametrize(("target", "calls"), [("check", ["check"]), ("test", ["check", "test"])])
def test_check_and_tests_come_first_and_must_pass(tmp_path: Path, target: str, calls: list[str]) -> None:
    assert ci(tmp_path, f"{target}) exit 2;;")[:2] == (2 if target == "check" else 1, calls)


def test_a_test_that_fails_beside_others_is_tried_again_alone_and_reported(tmp_path: Path) -> None:
    make = f"test) case $2 in *last-failed*) AGAIN;; *) {output(FAILED, '1 failed')};; esac;;"
    (tmp_path / "passes").mkdir()
    status, calls, last = ci(tmp_path / "passes", make.replace("AGAIN", "echo '1 passed'"))
    assert (status, last) == (0, f"{PASSED}, 1 OF THE TESTS ONLY AT THE SECOND ATTEMPT.")
    assert calls[:3] == ["check", "test", "test ARGS=--last-failed --last-failed-no-failures=none -n 0"]
    (tmp_path / "fails").mkdir()
    assert ci(tmp_path / "fails", make.replace("AGAIN", "exit 2"))[:2] == (1, calls[:3])
