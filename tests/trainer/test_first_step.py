"""Tests of ``set_epoch(epoch, first_step)``: loaders start at this step, with the same batches as in a whole epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnfleet as gf
from train_kit import write_parts

LOADERS: dict[str, Callable[[Any], Any]] = {
    "neighbour": lambda graph: gf.DistNeighborLoader(graph, [4, 2], "train", batch_size=32, shuffle=True),
    "link": lambda graph: gf.DistLinkNeighborLoader(
        graph, [3], edge_label_index=torch.arange(200).view(2, 100), batch_size=16, shuffle=True
    ),
    "ShaDow": lambda graph: gf.DistShaDowKHopSampler(graph, 2, 3, node_idx="train", batch_size=32, shuffle=True),
    "cluster": lambda graph: gf.DistClusterLoader(graph, batch_size=1, shuffle=True),
    "SAINT": lambda graph: gf.DistGraphSAINTNodeSampler(graph, batch_size=40, num_steps=5),
    "zip": lambda graph: gf.DistZipLoader(
        [
            gf.DistNeighborLoader(graph, [3], "train", batch_size=32),
            gf.DistNeighborLoader(graph, [3], "val", batch_size=32),
        ]
    ),
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with gf.open(write_parts(tmp_path_factory.mktemp("data") / "parts", 6)) as opened:
        yield opened


def ids(batch: Any) -> list[list[int]]:
    batches = batch if isinstance(batch, tuple | list) else [batch]
    return [one.n_id.tolist() for one in batches]


@pytest.mark.parametrize("name", LOADERS)
def test_an_epoch_is_continued_at_a_step(name: str, graph: Any, tmp_path: Path) -> None:
    loader = LOADERS[name](graph)
    loader.set_epoch(3)
    whole = [ids(batch) for batch in loader]
    following = [ids(batch) for batch in loader]
    assert len(whole) >= 3
    loader.set_epoch(3, first_step=2)
    assert [ids(batch) for batch in loader] == whole[2:]
    assert [ids(batch) for batch in loader] == following, "the next epoch is whole again"


def test_after_the_last_step_nothing_is_left(graph: Any) -> None:
    loader = LOADERS["neighbour"](graph)
    loader.set_epoch(1, first_step=len(loader))
    assert list(loader) == []


@pytest.mark.parametrize("first_step", [-1, 1.5, True])
def test_a_first_step_that_is_no_number_of_a_step_is_refused(first_step: Any, graph: Any) -> None:
    with pytest.raises(gf.SettingsError, match="first_step must be a whole number of at least 0"):
        LOADERS["neighbour"](graph).set_epoch(0, first_step)
