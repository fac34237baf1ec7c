"""Reads partitions of GraphLearn-for-PyTorch (GLT), as its partitioners write them.

A folder has ``META`` (pickled), the part of every node (``node_pb.pt``, or ``node_pb/<type>.pt``), and three folders
per part: ``part<k>/graph/`` with ``rows.pt``, ``cols.pt``, ``eids.pt`` and ``weights.pt``, and ``part<k>/node_feat/``
and ``part<k>/edge_feat/`` with ``feats`` and ``ids``. In a heterogeneous graph, each folder has a subfolder per type.
Features are pickled chunk by chunk (``.pkl``), or in GLT 0.1 one tensor (``.pt``). With `graph_caching`, a folder
``graph/`` beside ``part0`` has the edges of all parts. Ids are those of the input graph, per type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.raw_arrays import RawArray, RawGraph
from trainer.data.work_arrays import Piece, WorkArrays, assembled
from trainer.partition.foreign.tensor_files import load_array, load_pickled_tensors, load_pickled_values
from trainer.partition.foreign.types import ForeignFormat, ForeignGraph, graph_name, of_type, part_numbers

META = "META"

_NODE_FEATURES, _EDGE_FEATURES, _WEIGHTS = "x", "edge_attr", "edge_weight"  #: our names


def _read_meta(folder: Path) -> Mapping[str, Any]:
    path = folder / META
    meta = load_pickled_values(path)
    if not isinstance(meta, dict) or type(meta.get("num_parts")) is not int or meta["num_parts"] < 1:
        raise DataError(f"{path}: num_parts is missing or not a number; expected a file of GLT's partitioners")
    if meta.get("data_cls") not in ("homo", "hetero"):
        raise DataError(f"{path}: data_cls is {meta.get('data_cls')!r}, expected 'homo' or 'hetero'")
    return meta


@dataclass(frozen=True)
class _Edges:
    rows: RawArray
    cols: RawArray
    ids: Array
    weights: RawArray | None


@dataclass(frozen=True)
class _Partition:
    folder: Path
    arrays: WorkArrays

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        return _read_meta(self.folder)

    @property
    def hetero(self) -> bool:
        return bool(self.meta["data_cls"] == "hetero")

    @property
    def num_parts(self) -> int:
        return int(self.meta["num_parts"])

    def graph(self) -> ForeignGraph:
        node_types = list(self.meta["node_types"]) if self.hetero else [HOMO_NODE]
        edge_types = [tuple(of) for of in self.meta["edge_types"]] if self.hetero else [HOMO_EDGE]
        book = "node_pb/{}.pt" if self.hetero else "node_pb.pt"
        books = {of: load_array(self.folder / book.format(of)) for of in node_types}
        counts = {of: book.rows for of, book in books.items()}
        parts = {of: part_numbers(b.values, b.rows, self.num_parts, b.place) for of, b in books.items()}
        nodes = {of: self._features("node_feat", _NODE_FEATURES, of, counts[of]) for of in node_types}
        edges = {of: self._edge_arrays(of) for of in edge_types}
        raw = RawGraph(graph_name(self.folder), {}, nodes, edges, counts, hetero=self.hetero)
        return ForeignGraph(raw, parts, self.num_parts)

    def _typed(self, folder: Path, of: NodeType | EdgeType) -> Path:
        return folder / type_name(of) if self.hetero else folder

    def _features(self, group: str, name: str, of: NodeType | EdgeType, count: int) -> dict[str, RawArray]:
        chunks = (chunk for part_id in range(self.num_parts) for chunk in self._feature_chunks(group, part_id, of))
        first = next(chunks, None) if count else None
        if first is None:
            return {}
        what = f"{'node' if isinstance(of, str) else 'edge'}{of_type(of)}"
        pieces = (Piece(ids, a.values, a.place) for ids, a in chain([first], chunks))
        return {name: RawArray(assembled(pieces, count, what, self.arrays), first[1].place, first[1].bfloat16)}

    def _feature_chunks(self, group: str, part_id: int, of: NodeType | EdgeType) -> Iterator[tuple[Array, RawArray]]:
        folder = self._typed(self.folder / f"part{part_id}" / group, of)
        if (folder / "feats.pkl").exists():
            rows, ids = (load_pickled_tensors(folder / f"{name}.pkl") for name in ("feats", "ids"))
            for array, own in zip_longest(rows, ids):
                if array is None or own is None:
                    raise DataError(
                        f"{folder}: feats.pkl has {'fewer' if array is None else 'more'} tensors than ids.pkl; copy "
                        "both again"
                    )
                yield own.values, array
        elif (folder / "feats.pt").exists():
            yield load_array(folder / "ids.pt").values, load_array(folder / "feats.pt")

    def _edge_arrays(self, of: EdgeType) -> dict[str, RawArray]:
        cached = self._typed(self.folder / "graph", of)
        if (cached / "rows.pt").exists():
            found = [self._read_edges(cached, of, whole=True)]
        else:
            folders = [self._typed(self.folder / f"part{part_id}" / "graph", of) for part_id in range(self.num_parts)]
            found = [self._read_edges(folder, of, whole=False) for folder in folders]
        count = sum(len(edges.ids) for edges in found)
        what = f"edge{of_type(of)}"
        place = found[0].rows.place
        if not count:
            return {"edge_index": RawArray(np.empty((2, 0), np.int64), place)}
        pieces = (Piece(e.ids, np.stack([e.rows.values, e.cols.values], axis=1), e.rows.place) for e in found)
        both = assembled(pieces, count, what, self.arrays)
        arrays = {"edge_index": RawArray(np.ascontiguousarray(both.T), place)}
        if (weights := [(e.ids, e.weights) for e in found if e.weights is not None]) and len(weights) == len(found):
            values = assembled((Piece(ids, w.values, w.place) for ids, w in weights), count, what, self.arrays)
            arrays[_WEIGHTS] = RawArray(values, weights[0][1].place, weights[0][1].bfloat16)
        return {**arrays, **self._features("edge_feat", _EDGE_FEATURES, of, count)}

    def _read_edges(self, folder: Path, of: EdgeType, whole: bool) -> _Edges:
        rows, cols = (load_array(folder / f"{name}.pt") for name in ("rows", "cols"))
        if rows.rows != cols.rows:
            raise DataError(
                f"{folder}: rows.pt has {rows.rows} entries and cols.pt has {cols.rows}; layout CSR or CSC cannot be "
                "read, because the edge ids are lost; partition with layout COO"
            )
        weights = load_array(folder / "weights.pt") if (folder / "weights.pt").exists() else None
        if (folder / "eids.pt").exists():
            ids = load_array(folder / "eids.pt").values
        elif whole:
            # Edges and edge features are in the same order: those of part 0, then part 1, ….
            parts = [self._feature_chunks("edge_feat", part_id, of) for part_id in range(self.num_parts)]
            found = [some for chunks in parts for some, _ in chunks]
            ids = np.concatenate(found) if found else np.arange(rows.rows)
        else:
            raise DataError(
                f"{folder / 'eids.pt'} is missing: the partition is incomplete; copy the folders of all parts"
            )
        if len(ids) != rows.rows:
            raise DataError(f"{folder}: {rows.rows} edges, but {len(ids)} edge ids; the partition is damaged")
        return _Edges(rows, cols, ids, weights)


GLT = ForeignFormat(
    key="glt",
    title="GraphLearn-for-PyTorch",
    found=lambda folder: (folder / META).is_file(),
    count=lambda folder: int(_read_meta(folder)["num_parts"]),
    read=lambda folder, arrays: _Partition(folder, arrays).graph(),
)
