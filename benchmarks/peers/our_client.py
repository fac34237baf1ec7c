"""Our client of a graph server, a process: python our_client.py PLAIN SETTINGS.

Settings (JSON): endpoint, key (path or null), fanouts, batch, prefetch, replace, loader (``data``: as in
torch_geometric, ``blocks``: the bundled trainer's), warm, epochs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from epochs import timed_epochs
from torch import Tensor

import trainer
from trainer.core.batch import Batch
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings

if TYPE_CHECKING:
    from torch_geometric.data import Data


class Blocks:
    """The bundled trainer's loader, an epoch at each iteration."""

    def __init__(self, graph: Graph, settings: dict[str, Any]):
        chosen = LoaderSettings(
            "train", tuple(settings["fanouts"]), settings["batch"], prefetch=settings["prefetch"],
            replace=settings["replace"],
        )  # fmt: skip
        self._loader, self._epoch = BatchLoader(graph, chosen, 0, RankLayout.single(graph.manifest.num_parts)), -1

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        return self._loader.epoch(self._epoch)


def look_at_blocks(batch: Batch) -> tuple[Tensor, int, int]:
    return batch.n_id[: batch.num_seeds], sum(len(block.indices) for block in batch.blocks), len(batch.x)


def look_at_data(data: Data) -> tuple[Tensor, int, int]:
    return data.n_id[: data.batch_size], data.edge_index.shape[1], len(data.x)


def loader_of(graph: Graph, settings: dict[str, Any]) -> tuple[Any, Any]:
    """The loader, and how to look at its batches."""
    if settings["loader"] == "blocks":
        return Blocks(graph, settings), look_at_blocks
    from trainer.loader.neighbor_loader import DistNeighborLoader  # needs torch_geometric, which blocks do without

    loader = DistNeighborLoader(
        graph, settings["fanouts"], "train", batch_size=settings["batch"], shuffle=True, prefetch=settings["prefetch"],
        replace=settings["replace"],
    )  # fmt: skip
    return loader, look_at_data


def main(plain: str, text: str) -> None:
    settings = json.loads(text)
    expected = np.load(Path(plain) / "train.npy")
    with trainer.connect(settings["endpoint"], settings["key"]) as graph:
        loader, look = loader_of(graph, settings)
        found = timed_epochs(loader, look, expected, settings["warm"], settings["epochs"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
