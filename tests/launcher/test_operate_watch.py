"""Test of ``status --watch`` while a launch passes from one stage to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.manage import status
from operate_kit import LocalRun
from waiting import wait_until


@pytest.fixture
def local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRun]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(status, "_EVERY", 0.2)
    yield (local_run := LocalRun(tmp_path).launched("sync", alive=True))
    local_run.kill()


def test_status_watch_follows_a_run_from_preparation_to_its_end(
    local_run: LocalRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    rendered = status.rendered
    monkeypatch.setattr(status, "rendered", lambda now: states.append(now.verdict.state) or rendered(now))

    def run_continues() -> None:
        while not states:
            time.sleep(0.02)
        local_run.start("import time; time.sleep(4); raise SystemExit(3)")
        wait_until(
            lambda: all((node.path / "state.json").exists() for node in local_run.nodes)
        )  # launchers wait for this too
        local_run.launched("train", alive=True)

    threading.Thread(target=run_continues, daemon=True).start()
    assert run(["status", "--watch", str(local_run.folder)]) == 1
    stages = list(dict.fromkeys(states))
    assert stages[0] == "preparing" and "running" in stages and stages[-1] == "failed"
    assert "never started" not in stages
