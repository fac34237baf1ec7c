"""Reads labels and splits from files beside a partition of torch_geometric or GLT, or from files that the user names.

The examples of both programs save, beside `NAME-partitions`, the labels of all nodes as `NAME-label/label.pt`, and the
node ids of each split in one file per part, `NAME-train-partitions/partition0.pt`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.errors import DataError
from trainer.core.schema import HOMO_NODE, NodeType
from trainer.data.raw_arrays import RawArray, RawGraph
from trainer.partition.foreign.tensor_files import load_tensors, tensor_array
from trainer.store.npy import map_npy

_SPLITS = ("train", "val", "valid", "test")

_SUFFIX = "-partitions"


@dataclass(frozen=True)
class ExtraFile:
    """A node attribute or split that is stored in files outside the partition itself."""

    name: str  #: of the array, such as `y`, `train_idx`, or `paper__y`
    files: tuple[Path, ...]  #: their rows one after the other
    given: bool  #: whether the user named them; else they were found beside the partition


def extra_files(folder: Path, given: Mapping[str, str]) -> list[ExtraFile]:
    """Return the files in ``given`` (name of the array -> file or folder), and those found beside the partition.

    A relative path is looked up in ``folder`` first, then in the current folder. Files in ``given`` take precedence.
    Raises ``DataError`` when a given file does not exist.
    """
    found = []
    for name, path in given.items():
        there = folder / Path(os.path.expanduser(path))
        there = there if there.exists() else Path(os.path.expanduser(path))
        if not there.exists():
            raise DataError(f"--nodes {name}={path}: {there} does not exist")
        files = _numbered(there) if there.is_dir() else (there,)
        if not files:
            raise DataError(
                f"{there} has no files partition0.pt, …; --nodes {name}= takes a folder with such files, or a .npy "
                "or .pt file"
            )
        found.append(ExtraFile(name, files, True))
    folder = folder.resolve()
    places = [(folder, "")]
    if folder.name.endswith(_SUFFIX):
        places.append((folder.parent, folder.name.removesuffix(_SUFFIX) + "-"))
    for place, prefix in places:
        label = place / f"{prefix}label" / "label.pt"
        if label.is_file() and "y" not in given:
            found.append(ExtraFile("y", (label,), False))
        for split in _SPLITS:
            files = _numbered(place / f"{prefix}{split}{_SUFFIX}")
            if files and f"{split}_idx" not in given:
                found.append(ExtraFile(f"{split}_idx", files, False))
    return found


def with_extra_arrays(raw: RawGraph, files: list[ExtraFile]) -> RawGraph:
    """Add the arrays in ``files`` to the nodes of a graph.

    Raises ``DataError`` if the graph already has an array that the user gave a file for.
    """
    nodes: dict[NodeType, dict[str, RawArray]] = {of: dict(arrays) for of, arrays in raw.nodes.items()}
    plain, notes = dict(raw.plain), list(raw.notes)
    for file in files:
        found = _read(file)
        if isinstance(found, str):
            notes.append(found)
            continue
        of_name, _, name = file.name.rpartition("__")
        for of_file, array in found.items():
            of = of_name or of_file or (None if raw.hetero else HOMO_NODE)
            if of is not None and of not in raw.node_types:
                raise DataError(f"{file.name}: no nodes of type {of!r}; the node types are {', '.join(raw.node_types)}")
            own = plain if of is None else nodes.setdefault(of, {})
            if name in own:
                if file.given:
                    raise DataError(f"{array.place}: {name} is also in {own[name].place}; leave out one of them")
                continue
            own[name] = array
            if not file.given:
                notes.append(f"{name} is read from {array.place}")
    return replace(raw, plain=plain, nodes=nodes, notes=tuple(notes))


def _numbered(folder: Path) -> tuple[Path, ...]:
    found = {}
    for path in folder.glob("*.pt"):
        if match := re.fullmatch(r"(?:partition|part)_?(\d+)\.pt", path.name):
            found[int(match[1])] = path
    return tuple(found[number] for number in sorted(found))


def _read(file: ExtraFile) -> dict[str, RawArray] | str:
    """Return the arrays of a file by node type, '' if it states none; or why it is left out."""
    pieces: dict[str, list[RawArray]] = {}
    for path in file.files:
        if path.suffix == ".npy":
            try:
                content: Any = RawArray(map_npy(path).view(np.ndarray), str(path))
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{path} cannot be read as a numpy array: {error}") from error
        else:
            content = load_tensors(path)
        typed = content if isinstance(content, Mapping) else {"": content}
        if not file.given and any("label" in str(of) for of in typed):
            return f"{path.parent}: left out, it holds links to predict, not nodes; see option hold_out"
        for of, value in typed.items():
            array = value if isinstance(value, RawArray) else tensor_array(value, str(path))
            pieces.setdefault(str(of), []).append(array)
    return {
        of: arrays[0] if len(arrays) == 1 else replace(arrays[0], values=np.concatenate([one.values for one in arrays]))
        for of, arrays in pieces.items()
    }
