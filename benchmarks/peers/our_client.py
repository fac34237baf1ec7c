"""Loads epochs from a graph server with gnnfleet's client and prints one JSON line.

python our_client.py PLAIN SETTINGS
PLAIN is a folder from ``plain.py``. SETTINGS is JSON: endpoint, key (path or null), fanouts, batch, prefetch, replace,
loader (``data``: ``DistNeighborLoader``, ``blocks``: ``BatchLoader``), warm and epochs (numbers of untimed and of timed
epochs).
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

import gnnfleet as gf

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from trainer.core.batch import Batch


class Blocks:
    """A ``BatchLoader`` as an iterable. Each iteration yields the batches of the next epoch."""

    def __init__(self, graph: gf.Graph, settings: dict[str, Any]):
        chosen = gf.LoaderSettings(
            "train", tuple(settings["fanouts"]), settings["batch"], prefetch=settings["prefetch"],
            replace=settings["replace"],
        )  # fmt: skip
        self._loader, self._epoch = gf.BatchLoader(graph, chosen, 0, gf.RankLayout.single(graph.manifest.num_parts)), -1

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        return self._loader.epoch(self._epoch)


def look_at_blocks(batch: Batch) -> tuple[Tensor, int, int]:
    return batch.n_id[: batch.num_seeds], sum(len(block.indices) for block in batch.blocks), len(batch.x)


def look_at_data(data: Data) -> tuple[Tensor, int, int]:
    return data.n_id[: data.batch_size], data.edge_index.shape[1], len(data.x)


def loader_of(graph: gf.Graph, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the loader, and a function from a batch to (seeds, number of edges, number of nodes)."""
    if settings["loader"] == "blocks":
        return Blocks(graph, settings), look_at_blocks
    loader = gf.DistNeighborLoader(  # imports torch_geometric, which ``BatchLoader`` does not
        graph, settings["fanouts"], "train", batch_size=settings["batch"], shuffle=True, prefetch=settings["prefetch"],
        replace=settings["replace"],
    )  # fmt: skip
    return loader, look_at_data


def main(plain: str, text: str) -> None:
    settings = json.loads(text)
    expected = np.load(Path(plain) / "train.npy")
    with gf.connect(settings["endpoint"], settings["key"]) as graph:
        loader, look = loader_of(graph, settings)
        found = timed_epochs(loader, look, expected, settings["warm"], settings["epochs"])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
