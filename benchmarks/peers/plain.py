"""Writes the benchmark graphs as .npy files, which every compared system can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from graphs import CACHE, LARGE, PEER_SIZES, SMALL
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sources.load import load_dataset


def plain_graph(small: bool) -> Path:
    """Return the folder of the large or small benchmark graph. The first call writes it.

    Files: edge_index.npy [2, E], x.npy, y.npy, train.npy, val.npy, test.npy. All of them use original ids.
    """
    return _written(CACHE / f"plain-{'small' if small else 'large'}", SMALL if small else LARGE)


def peer_graph(size: str) -> Path:
    """Return the folder of the graph ``PEER_SIZES[size]``, with the files of ``plain_graph``."""
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
    for name, array in arrays.items():  # test.npy is last: its existence means that all files are complete
        np.save(folder / f"{name}.npy", array)
    return folder
