"""Reads graphs from files: a folder of .npy/.npz files, one .npz file, or a PyG ``Data`` or ``HeteroData`` as .pt.

Array names: ``edge_index`` [2, E], ``x`` [N, F], ``y`` [N], ``train_idx``/``val_idx``/``test_idx`` (node ids) or
``train_mask``/… (booleans). Any other array with N or E rows becomes an attribute of that name. In a heterogeneous
graph: ``<src>__<rel>__<dst>`` [2, E], ``<src>__<rel>__<dst>__<attr>`` and ``<type>__<name>``.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.graph_attrs import CATEGORIES
from trainer.core.memory import check_unpacked
from trainer.core.schema import EdgeType, NodeType, check_word
from trainer.data.options import SourceOptions
from trainer.data.raw_arrays import RawArray, RawGraph, by_name, read_data_json
from trainer.store.npy import map_npy

_SUBFOLDER = "hetero"  #: sub-folder with typed arrays, for a folder that also holds the graph as a homogeneous one

_COUNTS = "num_nodes.json"  #: number of nodes by node type

_EXPECTED = "a folder of .npy/.npz files, an .npz file or a .pt file"


def source_files(source: str | None, options: SourceOptions) -> list[Path]:
    """Return the files that dataset `file` reads, sorted. Raises ``DataError`` when none is found."""
    if not source:
        raise DataError("dataset file: no source; give the folder of .npy/.npz files, or the .pt file")
    path = Path(os.path.expanduser(source))
    if not os.path.isdir(path):
        if not os.path.exists(path):  # False for every path that cannot exist
            raise DataError(f"{path} does not exist; expected {_EXPECTED}")
        if path.suffix not in (".npz", ".pt"):
            raise DataError(f"{path}: unknown kind of file; expected {_EXPECTED}")
        return [path]
    typed = path / _SUBFOLDER
    folders = [path, typed] if options.hetero and typed.is_dir() else [path]
    try:
        found = [file for place in folders for file in sorted(place.iterdir()) if not file.is_dir()]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    files = [file for file in found if file.suffix in (".npy", ".npz")]
    counts = [file for file in found if file.name == _COUNTS]
    for file in (*files, *counts):
        if not file.is_file():
            what = "is a link to a file that does not exist" if file.is_symlink() else "is no file"
            raise DataError(f"{file} {what}; put the file there, or remove it")
    if not files:
        hint = f"; option hetero: true reads those in {typed}" if typed.is_dir() and not options.hetero else ""
        raise DataError(f"{path}: no .npy or .npz file; expected at least edge_index.npy and x.npy or y.npy{hint}")
    return files if options.hetero is False else files + counts


def read_files(source: str | None, options: SourceOptions) -> RawGraph:
    """Load the arrays of a folder, an .npz file or a .pt file. Arrays in .npy files are memory-mapped."""
    files = source_files(source, options)
    if files[0].suffix == ".pt":
        from trainer.sources.pyg import read_pt  # imports torch, which takes seconds and only .pt files need

        return read_pt(files[0])
    arrays = by_name(
        (name, RawArray(values, str(path) if path.suffix == ".npy" else f"{path} [{name}]"))
        for path in files
        if path.suffix != ".json"
        for name, values in _read(path).items()
    )
    name = Path(os.path.expanduser(str(source))).resolve().stem
    typed = any(name.count("__") == 2 for name in arrays) and "edge_index" not in arrays
    if options.hetero is False or (options.hetero is None and not typed):
        return RawGraph(name, arrays)

    counts: dict[NodeType, int] = {}
    for path in files:
        if path.suffix != ".json":
            continue
        found = read_data_json(path)
        wanted = isinstance(found, dict) and all(type(n) is int and 0 <= n < 1 << 63 for n in found.values())
        if not wanted:
            raise DataError(f"{path}: expected {{node type: number of nodes, …}}, with whole numbers")
        counts |= found
    plain: dict[str, RawArray] = {}
    nodes: dict[NodeType, dict[str, RawArray]] = {}
    edges: dict[EdgeType, dict[str, RawArray]] = {}
    for key, array in arrays.items():
        words = key.split("__")
        if words[-1] == CATEGORIES and "__".join(words[:-1]) in arrays:  # texts of a column of codes
            plain[key] = array
            continue
        for word in words[:3] if len(words) > 2 else words[:-1]:
            check_word(word, array.place)
        if len(words) == 1:
            plain[key] = array
        elif len(words) == 2:
            nodes.setdefault(words[0], {})[words[1]] = array
        elif len(words) <= 4:
            of = (words[0], words[1], words[2])
            edges.setdefault(of, {})["edge_index" if len(words) == 3 else words[3]] = array
        else:
            raise DataError(f"{array.place}: {key} has too many '__'; expected source__relation__target__attribute")
    return RawGraph(name, plain, nodes, edges, counts, hetero=True)


def _read(path: Path) -> dict[str, Array]:
    try:
        if path.suffix == ".npy":
            return {path.stem: map_npy(path).view(np.ndarray)}
        check_unpacked(path, "save large arrays as .npy files, which need no memory")
        with np.load(path, allow_pickle=False) as loaded:
            return {name: loaded[name] for name in loaded.files}
    except DataError:
        raise
    except Exception as error:  # numpy and zipfile raise many types of exceptions for damaged files
        objects = (
            "; it holds Python objects: save plain numeric arrays"
            if "allow_pickle" in str(error) or "Python objects" in str(error)
            else ""
        )
        why = objects or f": {str(error)[:200] or type(error).__name__}"
        raise DataError(f"{path} cannot be read as a numpy array{why}") from error
