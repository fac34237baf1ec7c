"""Fixtures that several tests of the launcher use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node_kit import MakeFolder, RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[MakeFolder]:
    made: list[RunFolder] = []

    def make(**more: Any) -> RunFolder:
        made.append(RunFolder(tmp_path / f"node{len(made)}", **more))
        return made[-1]

    yield make
    for run in made:
        run.kill()
