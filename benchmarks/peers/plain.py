"""The benchmark graph in files that any system can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from graphs import CACHE, LARGE, SMALL
from trainer.data.load import load_dataset
from trainer.schema import HOMO_EDGE, HOMO_NODE


def plain_graph(small: bool) -> Path:
    """Folder of edge_index.npy [2, E], x.npy, y.npy and train.npy, in original ids; written once."""
    folder = CACHE / f"plain-{'small' if small else 'large'}"
    if not (folder / "train.npy").exists():
        graph = load_dataset(
            "synthetic", None, {name: str(value) for name, value in (SMALL if small else LARGE).items()}
        )
        nodes = graph.nodes[HOMO_NODE]
        arrays = {"edge_index": graph.edges[HOMO_EDGE].edge_index, "x": nodes.attrs["x"], "y": nodes.attrs["y"]}
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in (
            arrays | {"train": nodes.splits["train"]}
        ).items():  # train last: it says that all are there
            np.save(folder / f"{name}.npy", array)
    return folder
