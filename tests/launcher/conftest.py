"""Shared by the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_kit import MakeFolder, RunFolder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What preflight remembers of one test is not known to the next, nor to the user; XDG_CACHE_HOME."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MakeFolder]:
    """Makes run folders and kills what a failed test leaves."""
    made: list[RunFolder] = []

    def make(**more: Any) -> RunFolder:
        made.append(RunFolder(tmp_path / f"node{len(made)}", **more))
        return made[-1]

    yield make
    for run in made:
        run.kill()
