"""Test of ``status --watch`` while a launch passes from one stage to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.cli.main import run
from launcher.manage import status
from operate_kit import MadeRun
from waiting import wait_until


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeRun]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(status, "_EVERY", 0.2)
    yield (made := MadeRun(tmp_path).launched("sync", alive=True))
    made.kill()


def test_status_watch_follows_a_run_from_preparation_to_its_end(
    made: MadeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    rendered = status.rendered
    monkeypatch.setattr(status, "rendered", lambda now: told.append(now.verdict.state) or rendered(now))

    def run_continues() -> None:
        while not told:
            time.sleep(0.02)
        made.start("import time; time.sleep(4); raise SystemExit(3)")
        wait_until(
            lambda: all((node.path / "state.json").exists() for node in made.nodes)
        )  # launchers wait for this too
        made.launched("train", alive=True)

    threading.Thread(target=run_continues, daemon=True).start()
    assert run(["status", "--watch", str(made.folder)]) == 1
    stages = list(dict.fromkeys(told))
    assert stages[0] == "preparing" and "running" in stages and stages[-1] == "failed"
    assert "never started" not in stages
