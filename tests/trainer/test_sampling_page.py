"""Tests of docs/sampling.md: its Python blocks run, and it lists the refused arguments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from load_kit import homo_data
from trainer import DistClusterLoader, DistLinkNeighborLoader, DistNeighborLoader
from trainer.core.errors import SettingsError
from trainer.loader.arguments import _UNSUPPORTED
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


def test_the_page_lists_each_refused_argument_with_its_reason() -> None:
    section = PAGE.read_text().split("## What is refused\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    reasons = {name: row[1] for row in rows for name in re.findall(r"`(\w+)=", row[0])}
    assert {*_UNSUPPORTED, "in_order", "keep_inter_cluster_edges"} == {*reasons}
    assert all(reasons.values())
    data, links = homo_data(), torch.zeros(2, 3, dtype=torch.long)
    for name in _UNSUPPORTED:
        with pytest.raises(SettingsError, match=f"^{name}: not supported, as "):
            DistNeighborLoader(data, [2], **{name: object()})
    with pytest.raises(SettingsError, match="^neighbor_sampler: not supported, as "):
        DistLinkNeighborLoader(data, [2], links, neighbor_sampler=object())
    with pytest.raises(SettingsError, match="^in_order=False: batches always come in order, so that "):
        DistNeighborLoader(data, [2], in_order=False)
    with pytest.raises(SettingsError, match="^keep_inter_cluster_edges: not supported, as the other ends"):
        DistClusterLoader(data, 5, keep_inter_cluster_edges=True)
