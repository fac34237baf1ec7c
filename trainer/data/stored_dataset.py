"""Stores a ``Dataset`` in a folder, and reads stored datasets with memory-mapped arrays."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.files import write_whole
from trainer.core.schema import type_name, type_of
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.store.npy import map_npy

_INDEX = "dataset.json"


def store_dataset(dataset: Dataset, folder: Path) -> None:
    """Write a dataset to ``folder``. Raises ``OSError``.

    An array that is the memory map of a .npy file in ``folder`` is not written again.
    """
    serial = 0

    def stored(values: Array) -> str:
        nonlocal serial
        path = _npy_file(values, folder)
        if path is None:
            path = folder / f"stored-{serial:04d}.npy"
            serial += 1
            np.save(path, values)
        return path.relative_to(folder).as_posix()

    index = _changed(dataset, stored)
    nodes = {of: _record(data) for of, data in index.nodes.items()}
    edges = {type_name(of): _record(data) for of, data in index.edges.items()}
    write_whole(folder / _INDEX, json.dumps({**vars(index), "nodes": nodes, "edges": edges}), sync=True)


def read_stored_dataset(folder: Path) -> Dataset:
    """Read a dataset that ``store_dataset`` has stored; its arrays are memory-mapped and read-only."""
    index = json.loads((folder / _INDEX).read_text())
    nodes = {of: NodeData(**_restored(data)) for of, data in index.pop("nodes").items()}
    edges = {type_of(name): EdgeData(**_restored(data)) for name, data in index.pop("edges").items()}
    index |= {name: tuple(index[name]) for name in ("time_attrs", "notes")}
    return _changed(Dataset(nodes=nodes, edges=edges, **index), lambda name: _opened(folder / name))  # type: ignore[arg-type]


def _changed(dataset: Dataset, change: Callable[[Any], Any]) -> Dataset:
    def all_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: change(values) for name, values in arrays.items()}

    nodes = {
        of: replace(data, attrs=all_of(data.attrs), splits=all_of(data.splits)) for of, data in dataset.nodes.items()
    }
    edges = {
        of: replace(data, edge_index=change(data.edge_index), attrs=all_of(data.attrs))
        for of, data in dataset.edges.items()
    }
    return replace(dataset, nodes=nodes, edges=edges, graph_attrs=all_of(dataset.graph_attrs))


def _record(data: NodeData | EdgeData) -> dict[str, Any]:
    return {**vars(data), "bfloat16": sorted(data.bfloat16)}


def _restored(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "bfloat16": frozenset(record["bfloat16"])}


def _npy_file(values: Array, folder: Path) -> Path | None:
    """If ``values`` is the memory map of a whole .npy file in ``folder``, return the path of the file; else None."""
    owner: object = values.base
    if not isinstance(values, np.memmap) or not isinstance(owner, mmap.mmap):
        return None
    path = Path(str(values.filename))
    return path if path.is_relative_to(folder) and path.suffix == ".npy" else None


def _opened(path: Path) -> Array:
    values = map_npy(path)
    return values if values.size and values.ndim else np.array(values)
