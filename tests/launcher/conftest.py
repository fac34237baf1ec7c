"""Fixtures that several tests of the launcher use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.report import metrics, profile
from launcher.report.profile import Analysis
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


@pytest.fixture(scope="session", autouse=True)
def one_analysis_of_equal_metrics() -> Iterator[None]:
    """Analyse equal metrics of reports once, as each analysis starts a Python; ``test_profile`` tests the function."""
    found: dict[tuple[tuple[str, str, bytes], ...], Analysis] = {}

    def analyse(files: Iterable[Path]) -> Analysis:
        files = list(files)
        try:
            key = tuple((file.parent.name, file.name, file.read_bytes()) for file in files)
        except OSError:
            return profile.analyse(files)
        if key not in found:
            found[key] = profile.analyse(files)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "analyse", analyse)
        yield
