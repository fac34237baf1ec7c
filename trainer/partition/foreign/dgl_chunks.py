"""Reads DGL's chunked graph format, the input of its distributed partitioning: ``metadata.json`` and files per chunk.

The part of each node is read from the output of DGL's partition algorithms, if the folder contains it
(``partition_meta.json``, and ``<node type>.txt`` with a part number per line).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.files import read_json
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.data.raw_arrays import RawArray, RawGraph, read_data_json
from trainer.data.work_arrays import Piece, WorkArrays, assembled
from trainer.partition.foreign.dgl import EDGE_NAMES, NODE_NAMES, as_mask, renamed
from trainer.partition.foreign.types import ForeignFormat, ForeignGraph, part_numbers
from trainer.store.npy import map_npy

METADATA, PARTITION = "metadata.json", "partition_meta.json"


@dataclass(frozen=True)
class _Chunks:
    paths: tuple[Path, ...]
    kind: str  #: ``csv``, ``numpy`` or ``parquet``
    delimiter: str = ","

    def read(self, path: Path) -> Array:
        """Return the rows of a file. Values of a CSV file are int64 or float64 [rows, columns]; it has no header."""
        try:
            if self.kind == "csv":
                with suppress(ValueError):  # not all values are integers
                    return np.loadtxt(path, np.int64, delimiter=self.delimiter, comments=None, ndmin=2)
                return np.loadtxt(path, np.float64, delimiter=self.delimiter, comments=None, ndmin=2)
            return map_npy(path) if self.kind == "numpy" else _read_parquet(path)
        except FileNotFoundError:
            raise DataError(f"{path} is missing; copy all files of the chunked graph") from None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as {self.kind}: {error}") from error


@dataclass(frozen=True)
class _Graph:
    folder: Path
    arrays: WorkArrays

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        path = self.folder / METADATA
        meta = read_data_json(path)
        missing = [key for key in ("node_type", "edge_type", "edges") if not isinstance(meta, dict) or key not in meta]
        if missing:
            raise DataError(f"{path}: {missing[0]} is missing; expected the metadata of DGL's chunked graph format")
        return dict(meta)

    @cached_property
    def counts(self) -> dict[NodeType, int]:
        types, where = self.meta["node_type"], f"{self.folder / METADATA}: num_nodes_per_type"
        listed = self.meta.get("num_nodes_per_type")
        if listed is None:
            chunked = self.meta.get("num_nodes_per_chunk")
            listed = [sum(sizes) for sizes in chunked] if isinstance(chunked, list) else []
        if not isinstance(types, list) or len(types) != len(listed) or not all(type(n) is int for n in listed):
            raise DataError(f"{where}: expected one number of nodes for each type in node_type")
        return dict(zip(types, listed, strict=True))

    def graph(self) -> ForeignGraph:
        edge_types: dict[str, EdgeType] = {}
        for name in self.meta["edge_type"]:
            words = name.split(":")
            if len(words) != 3 or not {words[0], words[2]} <= set(self.counts):
                raise DataError(
                    f"{self.folder / METADATA}: {name!r} is not source:relation:target with types from node_type"
                )
            edge_types[name] = words[0], words[1], words[2]

        edges: dict[EdgeType, dict[str, RawArray]] = {}
        for name, edge_type in edge_types.items():
            where = f"{self.folder / METADATA}: edges of {name}"
            edge_index = self._edge_index(name, where)
            attrs = self._attrs("edge_data", name, EDGE_NAMES, edge_index.shape[1])
            edges[edge_type] = {"edge_index": RawArray(edge_index, where), **attrs}
        nodes = {of: self._attrs("node_data", of, NODE_NAMES, count) for of, count in self.counts.items()}

        # The part of each node.
        assigned, num_parts, parts = _assignment_folder(self.folder), _count(self.folder), dict[NodeType, Any]()
        if assigned is not None:
            for of, count in self.counts.items():
                path = assigned / f"{of}.txt"
                numbers = _Chunks((path,), "csv").read(path).reshape(-1)
                parts[of] = part_numbers(numbers, count, num_parts, str(path))

        counts, hetero = self.counts, list(self.counts) != ["_N"] or len(edges) != 1
        if not hetero:
            nodes, counts = {HOMO_NODE: nodes["_N"]}, {HOMO_NODE: counts["_N"]}
            edges, parts = {HOMO_EDGE: next(iter(edges.values()))}, {HOMO_NODE: parts["_N"]} if parts else {}
        raw = RawGraph(str(self.meta.get("graph_name", self.folder.name)), {}, nodes, edges, counts, hetero=hetero)
        return ForeignGraph(raw, parts, num_parts)

    def _edge_index(self, name: str, where: str) -> Array:
        """Return the edges of a type, [2, E]. The chunks, which take as much memory, are freed."""
        chunks = self._chunks(self.meta["edges"].get(name), where)
        found = [chunks.read(path) for path in chunks.paths]
        for path, pairs in zip(chunks.paths, found, strict=True):
            if pairs.ndim != 2 or pairs.shape[1] != 2:
                raise DataError(f"{path}: the shape is {list(pairs.shape)}, expected [edges, 2]: source and target")
        return np.ascontiguousarray(np.concatenate(found).T)

    def _attrs(self, key: str, name: str, names: Mapping[str, str], count: int) -> dict[str, RawArray]:
        found = (self.meta.get(key) or {}).get(name) or {}
        attrs = {}
        for ours, entry in renamed(found, names).items():
            of = f"{key} of {name}"
            chunks = self._chunks(entry, f"{self.folder / METADATA}: {of}, {ours}")
            pieces, start = [], 0
            for path in chunks.paths:
                rows = chunks.read(path)
                pieces.append(Piece(np.arange(start, start + len(rows)), rows, str(path)))
                start += len(rows)
            values = assembled(pieces, count, f"row of {of}:", self.arrays)
            values = values.reshape(-1) if chunks.kind == "csv" and values.shape[1:] == (1,) else values
            attrs[ours] = RawArray(as_mask(ours, values), str(chunks.paths[0]))
        return attrs

    def _chunks(self, entry: Any, where: str) -> _Chunks:
        form = entry.get("format", {}) if isinstance(entry, dict) else {}
        paths = entry.get("data") if isinstance(entry, dict) else None
        if form.get("name") not in ("csv", "numpy", "parquet") or not isinstance(paths, list) or not paths:
            raise DataError(f"{where}: expected `format.name` csv, numpy or parquet, and a list of files as `data`")
        return _Chunks(tuple(self._located(path) for path in paths), form["name"], form.get("delimiter", ","))

    def _located(self, path: str) -> Path:
        there = self.folder / path
        if there.exists():
            return there
        for start in range(1, len(there.parts)):
            if (moved := self.folder.joinpath(*Path(path).parts[start:])).is_file():
                return moved
        return there


def _read_parquet(path: Path) -> Array:
    try:
        import duckdb
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs the package duckdb: pip install duckdb") from None
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        with duckdb.connect() as connection:
            columns = list(connection.execute("SELECT * FROM read_parquet(?)", [str(path)]).fetchnumpy().values())
            query = "SELECT value FROM parquet_kv_metadata(?) WHERE key::VARCHAR = 'shape'"
            shape = connection.execute(query, [str(path)]).fetchone()
    except duckdb.Error as error:
        raise ValueError(str(error).splitlines()[0]) from None
    arrays = [np.stack(list(map(np.asarray, c))) if c.dtype == object else np.ma.getdata(c)[:, None] for c in columns]
    values = np.concatenate(arrays, axis=1)
    return values.reshape(ast.literal_eval(shape[0].decode())) if shape else values


def _assignment_folder(folder: Path) -> Path | None:
    found = (
        [folder] if (folder / PARTITION).is_file() else sorted(path.parent for path in folder.glob(f"*/{PARTITION}"))
    )
    if len(found) > 1:
        raise DataError(f"{folder}: several assignments to parts ({found[0].name}, {found[1].name}); keep one of them")
    return found[0] if found else None


def _count(folder: Path) -> int:
    if (assigned := _assignment_folder(folder)) is None:
        return 0
    path = assigned / PARTITION
    try:
        count = read_json(path)["num_parts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: num_parts cannot be read: {error!r}") from error
    if type(count) is not int or count < 1:
        raise DataError(f"{path}: num_parts is {count!r}, expected a number")
    return count


DGL_CHUNKED = ForeignFormat(
    key="dgl-chunked",
    title="DGL's chunked graph format",
    found=lambda folder: (folder / METADATA).is_file(),
    count=_count,
    read=lambda folder, arrays: _Graph(folder, arrays).graph(),
)
