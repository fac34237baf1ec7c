"""Tests that the Python blocks of docs/sampling.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.partition.make import PartitionSpec, make_partition

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sampling.md"
OPTIONS = {"num_nodes": 2500, "avg_degree": 6, "num_features": 8}


def test_the_blocks_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PartitionSpec("synthetic", str(tmp_path / "parts"), options=OPTIONS, num_parts=2, clusters=4)
    make_partition(spec, say=lambda line: None)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(block, names)
    assert len(blocks) >= 3 and {"loader", "links", "model", "embedding"} <= set(names)
    for name in ("loader", "links", "whole"):
        assert len(names[name]) > 0  # type: ignore[arg-type]
