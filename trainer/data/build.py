"""From named arrays, wherever they came from, to a checked ``Dataset``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array
from trainer.data import dataset as checks
from trainer.data.dataset import Dataset
from trainer.data.edges import undirected
from trainer.data.options import SourceOptions
from trainer.errors import DataError

_SPLIT_SUFFIXES = ("_idx", "_mask")
_SPLIT_NAMES = {"valid": "val", "validation": "val"}  #: other people's names for the same split
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class RawGraph:
    """Arrays as they were found; ``places`` says where each came from, for messages."""

    name: str
    arrays: Mapping[str, Array]
    places: Mapping[str, str]
    num_nodes: int | None = None


def build_dataset(raw: RawGraph, options: SourceOptions, fingerprint: str) -> Dataset:
    """Check the arrays and sort them into edges, attributes and splits.

    ``edge_index`` [2, E] is needed; ``<split>_idx`` and ``<split>_mask`` become splits; every other
    array with one row per node becomes an attribute; what is left over is named in ``notes``.
    Raises ``DataError`` for arrays that contradict each other.
    """
    arrays, places = {name: _native(values) for name, values in raw.arrays.items()}, raw.places
    if "edge_index" not in arrays:
        raise DataError(f"{raw.name}: no edge_index; expected integers [2, number of edges], found {_found(arrays)}")
    num_nodes = _num_nodes(raw, options)
    edge_index = arrays.pop("edge_index")
    checks.check_edge_index(edge_index, num_nodes, places["edge_index"])
    splits = _splits(arrays, places, num_nodes, options)
    attrs, notes = _attrs(arrays, places, num_nodes)
    num_classes = _num_classes_asked(raw, options) or 0
    if "y" in attrs:
        attrs["y"], found = checks.class_labels(attrs["y"], places["y"])
        num_classes = checks.check_num_classes(options.num_classes, attrs["y"], found, places["y"])
        checks.check_labelled(attrs["y"], splits, places["y"])
    if options.undirected:
        edge_index = undirected(edge_index, num_nodes)
    return Dataset(raw.name, num_nodes, edge_index, attrs, splits, num_classes, fingerprint, tuple(notes))


def _native(values: Array) -> Array:
    """The array in this machine's byte order; kernels would misread another."""
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _found(arrays: Mapping[str, Array]) -> str:
    return ", ".join(sorted(arrays)) or "nothing"


def _num_nodes(raw: RawGraph, options: SourceOptions) -> int:
    """Never guessed from the edges: that would drop isolated nodes at the end."""
    if options.num_nodes is not None or raw.num_nodes is not None:
        return options.num_nodes if options.num_nodes is not None else int(raw.num_nodes or 0)
    for name in ("x", "y"):
        if name in raw.arrays and raw.arrays[name].ndim:
            return len(raw.arrays[name])
    raise DataError(f"{raw.name}: neither x nor y tells the number of nodes; give option num_nodes")


def _num_classes_asked(raw: RawGraph, options: SourceOptions) -> int | None:
    if options.num_classes is not None and not 1 <= options.num_classes <= _MOST_CLASSES:
        raise DataError(
            f"{raw.name}: option num_classes must be from 1 to {_MOST_CLASSES}, not {options.num_classes}; "
            "the model's last layer is as wide"
        )
    return options.num_classes


def _splits(
    arrays: dict[str, Array], places: Mapping[str, str], num_nodes: int, options: SourceOptions
) -> dict[str, npt.NDArray[np.int64]]:
    splits: dict[str, npt.NDArray[np.int64]] = {}
    for key in sorted(arrays):
        suffix = next((suffix for suffix in _SPLIT_SUFFIXES if key.endswith(suffix)), None)
        if suffix is None:
            continue
        prefix = key.removesuffix(suffix)
        name = _SPLIT_NAMES.get(prefix, prefix)
        if name in splits:
            raise DataError(f"{places[key]}: split {name!r} is given twice, as ids and as a mask; remove one")
        values = arrays.pop(key)
        if suffix == "_mask" and values.dtype.kind != "b":
            raise DataError(
                f"{places[key]}: a mask of {values.dtype}, expected booleans; name it {prefix}_idx if it holds ids"
            )
        splits[name] = checks.split_ids(_column(values, places[key], options), num_nodes, places[key])
    usual = [name for name in ("train", "val", "test") if name in splits]
    return {name: splits[name] for name in dict.fromkeys([*usual, *splits])}


def _column(values: Array, where: str, options: SourceOptions) -> Array:
    if values.ndim != 2 or values.dtype.kind != "b":
        return values
    if options.split is None or not 0 <= options.split < values.shape[1]:
        raise DataError(f"{where}: the mask has {values.shape[1]} columns; choose one with option split (from 0)")
    return values[:, options.split]


def _attrs(
    arrays: Mapping[str, Array], places: Mapping[str, str], num_nodes: int
) -> tuple[dict[str, Array], list[str]]:
    attrs, notes = {}, []
    for name, values in arrays.items():
        by_node = values.ndim > 0 and len(values) == num_nodes and values.dtype.kind in "biuf"
        if name in ("x", "y") or by_node:
            checks.check_attr(name, values, num_nodes, places[name])
            attrs[name] = values
        else:
            what = f"{values.dtype} {list(values.shape)}"
            notes.append(f"{places[name]}: left out, {what} is not one row of numbers per node")
    return attrs, notes
