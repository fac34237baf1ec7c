"""Fixtures shared by the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_kit import MakeFolder, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MakeFolder]:
    """Returns a factory of run folders; kills processes that a failed test leaves behind."""
    made: list[RunFolder] = []

    def make(**more: Any) -> RunFolder:
        made.append(RunFolder(tmp_path / f"node{len(made)}", **more))
        return made[-1]

    yield make
    for run in made:
        run.kill()
