"""The benchmark graph in files that any system can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graphs import CACHE, LARGE, PEER_SIZES, SMALL
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.data.load import load_dataset


def plain_graph(small: bool) -> Path:
    """Folder of edge_index.npy [2, E], x.npy, y.npy and train.npy, val.npy, test.npy, in original ids; written once."""
    return _written(CACHE / f"plain-{'small' if small else 'large'}", SMALL if small else LARGE)


def peer_graph(size: str) -> Path:
    """The same of one of ``PEER_SIZES``."""
    return _written(CACHE / f"peers/{size}-plain", PEER_SIZES[size])


def _written(folder: Path, sizes: Mapping[str, float]) -> Path:
    if (folder / "test.npy").exists():
        return folder
    graph = load_dataset("synthetic", None, {name: str(value) for name, value in sizes.items()})
    nodes = graph.nodes[HOMO_NODE]
    arrays = {"edge_index": graph.edges[HOMO_EDGE].edge_index, "x": nodes.attrs["x"], "y": nodes.attrs["y"]}
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val", "test"):
        arrays[name] = nodes.splits[name]
    for name, array in arrays.items():  # test last: it says that all are there
        np.save(folder / f"{name}.npy", array)
    return folder
