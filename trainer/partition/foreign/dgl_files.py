"""Reads DGL's .dgl files without DGL: dicts of tensors (``save_tensors``) and graphs (``save_graphs``, version 2).

The format is ``dmlc::Stream``: little-endian numbers; lists as a uint64 count and the items; strings as a uint64 length
and the bytes; before each object a number that identifies its kind. The layout of the objects is that of DGL 0.5 to 2.5
(``tensor_serialize.cc``, ``heterograph_serialize.cc``, ``unit_graph.cc``, ``ndarray.cc`` and others).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.data.raw_arrays import RawArray

_TENSORS = 0xDD5A9FBE3FA2443F
_GRAPHS = 0xDD2E4FF046B4A13F
_NDARRAY = 0xDD5E40F096B4A13F
_HETERO_GRAPH = 0xDD589FBE35224ABF
_META_GRAPH = 0xDD3C5FFE20046ABF
_UNIT_GRAPH = 0xDD2E60F0F6B4A127
_COO = 0xDD61FFD305DFF127
_CSR = 0xDD6CD31205DFF127

_HEADER = 4096  #: bytes before the first graph of a file
_COO_CODE, _CSR_CODE, _CSC_CODE = 1, 2, 4  #: bits: which forms of a graph a file has
_BFLOAT = 4  #: type code of bfloat16; 0: int, 1: uint, 2: float
_KINDS = {0: "i", 1: "u", 2: "f"}
_MOST_NAMES = 1 << 20  #: items of a list of tensors, texts or types; more are a sign of damage

Tensors = dict[str, RawArray]


@dataclass(frozen=True)
class DglGraph:
    sources: Array  #: int [E], in order of edge ids
    targets: Array  #: int [E]
    nodes: Mapping[str, RawArray]  #: attributes of the nodes
    edges: Mapping[str, RawArray]  #: attributes of the edges


def read_tensor_file(path: Path) -> Tensors:
    """Return the memory-mapped tensors of a file by name. Raises ``DataError``."""
    stream = _Stream(path)
    stream.expect(_TENSORS, "DGL tensors (save_tensors)")
    stream.number("Q")  # their number, which the list repeats
    return stream.named_tensors()


def read_graph_file(path: Path) -> DglGraph:
    """Return the first graph of a file. Raises ``DataError`` unless it has one node type and one edge type."""
    stream = _Stream(path)
    stream.expect(_GRAPHS, "a DGL graph (save_graphs)")
    version, kind = stream.number("Q"), stream.number("Q")
    if (version, kind) != (2, 2):
        raise stream.error(f"it has version {version} and kind {kind}, expected 2 and 2 (DGL 0.5 and newer)")
    stream.at = _HEADER
    stream.at = stream.number("Q")  # skips the labels
    stream.expect(_HETERO_GRAPH, "a graph")
    stream.skip_meta_graph()
    relations = [stream.unit_graph() for _ in range(stream.count())]
    stream.take(8 * stream.count())  # number of nodes of each type
    nodes, edges = ([stream.named_tensors() for _ in range(stream.count())] for _ in range(2))
    if not len(relations) == len(nodes) == len(edges) == 1:
        raise stream.error(f"it has {len(nodes)} node types and {len(relations)} edge types, expected one of each")
    sources, targets = relations[0]
    if sources.shape != targets.shape or sources.ndim != 1 or sources.dtype.kind != "i" or targets.dtype.kind != "i":
        raise stream.error("sources and targets of the edges are not integers [E] of equal number")
    return DglGraph(sources, targets, nodes[0], edges[0])


class _Stream:
    """Reads values one after the other from a memory-mapped file. All methods raise ``DataError``."""

    def __init__(self, path: Path):
        self.path, self.at = path, 0
        try:
            self._bytes: Array = np.memmap(path, np.uint8, "r")
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(f"{path} is missing: the partition is incomplete; copy the folders of all parts") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def error(self, why: str) -> DataError:
        return DataError(f"{self.path} cannot be read as a file of DGL (byte {self.at}): {why}; make it again with DGL")

    def take(self, size: int) -> Array:
        if size < 0 or self.at + size > len(self._bytes):
            raise self.error(f"the file ends after {len(self._bytes):,} bytes")
        start, self.at = self.at, self.at + size
        return self._bytes[start : self.at]

    def number(self, code: str) -> int:
        """Read a number; ``code`` is its type as a format character of ``struct``."""
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)).tobytes())
        return int(value)

    def expect(self, magic: int, what: str) -> None:
        """Read the number of a kind of object; raise unless it is ``magic``. ``what``: the kind, for the message."""
        if (found := self.number("Q")) != magic:
            raise self.error(f"found {found:#x}, expected {what}")

    def count(self) -> int:
        count = self.number("Q")
        if count > _MOST_NAMES:
            raise self.error(f"a list of {count:,} items")
        return count

    def named_tensors(self) -> Tensors:
        return {
            self.take(self.count()).tobytes().decode("utf-8", "replace"): self._tensor() for _ in range(self.count())
        }

    def skip_meta_graph(self) -> None:
        self.expect(_META_GRAPH, "a graph of types")
        self._compressed()

    def unit_graph(self) -> tuple[Array, Array]:
        self.expect(_UNIT_GRAPH, "the edges of a type")
        saved, _ = self.number("q"), self.number("q")
        codes = saved & 0xFFFFFFFF if saved >> 32 else {1: _COO_CODE, 2: _CSR_CODE, 3: _CSC_CODE}.get(saved, 0)
        for code in (_COO_CODE, _CSR_CODE, _CSC_CODE):
            if not codes & code:
                continue
            self.skip_meta_graph()
            if code == _COO_CODE:
                self.expect(_COO, "edges as pairs")
                self.take(16)  # numbers of columns and rows
                rows, columns, ids = (self._tensor().values for _ in range(3))
                self.take(2)  # whether rows and columns are sorted
                found = self._by_id(rows, ids), self._by_id(columns, ids)
            else:
                rows, columns = self._compressed()
                found = (rows, columns) if code == _CSR_CODE else (columns, rows)
            break
        else:
            raise self.error(f"edges in an unknown form ({saved:#x})")
        for code in (_CSR_CODE, _CSC_CODE):  # the same edges again, in other forms
            if codes & code and code > (codes & -codes):
                self.skip_meta_graph()
                self._compressed()
        return found

    def _by_id(self, values: Array, ids: Array) -> Array:
        if not len(ids):
            return values
        if ids.shape != values.shape or not np.array_equal(np.sort(ids), np.arange(len(values))):
            raise self.error("the ids of edges are not a permutation")
        ordered = np.empty_like(values)
        ordered[ids] = values
        return ordered

    def _compressed(self) -> tuple[Array, Array]:
        self.expect(_CSR, "a compressed matrix")
        self.take(16)  # numbers of columns and rows
        indptr, indices, ids = (self._tensor().values for _ in range(3))
        self.take(1)  # whether columns are sorted
        sizes = np.diff(indptr)
        if indptr.ndim != 1 or not len(indptr) or (sizes < 0).any() or (indptr[0], indptr[-1]) != (0, len(indices)):
            raise self.error(f"the limits of rows do not ascend from 0 to {len(indices)}, the number of edges")
        rows = np.repeat(np.arange(len(sizes)), sizes)
        return self._by_id(rows, ids), self._by_id(indices, ids)

    def _tensor(self) -> RawArray:
        self.expect(_NDARRAY, "a tensor")
        self.take(16)  # reserved, device
        dims, kind, bits, lanes = (self.number(code) for code in "iBBH")
        if not 0 <= dims <= 32 or lanes != 1:
            raise self.error(f"a tensor of {dims} dimensions, {lanes} lanes")
        shape = tuple(self.number("q") for _ in range(dims))
        content = self.take(self.number("q"))
        bfloat16 = kind == _BFLOAT
        try:
            dtype: np.dtype[Any] = np.dtype("<u2" if bfloat16 else f"<{_KINDS[kind]}{bits // 8}")
            values = content.view(np.ndarray).view(dtype).reshape(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise self.error(f"a tensor of type {kind} with {bits} bits, shape {list(shape)}: {error}") from error
        return RawArray(values, str(self.path), bfloat16)
