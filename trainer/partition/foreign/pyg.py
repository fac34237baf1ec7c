"""Reads partitions of torch_geometric.distributed, as its ``Partitioner`` writes them (torch_geometric 2.4 and newer).

A folder has ``META.json``, the part of every node and edge (``node_map.pt`` and ``edge_map.pt``, or folders of these
names with a file per type), and ``part_<k>/`` with ``graph.pt``, ``node_feats.pt`` and ``edge_feats.pt``. Ids are those
of the input graph. In a heterogeneous graph, edge ids number the edges of all types together. In torch_geometric 2.4,
whose META.json has no ``node_offset``, ``row`` and ``col`` number the nodes of all types together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.raw_arrays import RawArray, RawGraph, read_data_json
from trainer.data.work_arrays import Piece, WorkArrays, assembled
from trainer.partition.foreign.tensor_files import load_array, load_tensors, tensor_array
from trainer.partition.foreign.types import ForeignFormat, ForeignGraph, graph_name, of_type, part_numbers

META = "META.json"


def _read_meta(folder: Path) -> Mapping[str, Any]:
    """Return the content of META.json. Raises ``DataError`` when it is missing or invalid."""
    path = folder / META
    meta = read_data_json(path)
    if not isinstance(meta, dict) or type(meta.get("num_parts")) is not int or meta["num_parts"] < 1:
        raise DataError(
            f"{path}: num_parts is missing or not a number; expected a file of torch_geometric's Partitioner"
        )
    types = [meta.get("node_types"), meta.get("edge_types")] if meta.get("is_hetero") else []
    if not all(isinstance(listed, list) and listed for listed in types):
        raise DataError(
            f"{path}: node_types or edge_types are missing; expected a file of torch_geometric's Partitioner"
        )
    return meta


@dataclass(frozen=True)
class _Partition:
    folder: Path
    arrays: WorkArrays

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        return _read_meta(self.folder)

    @property
    def hetero(self) -> bool:
        return bool(self.meta.get("is_hetero"))

    @property
    def node_types(self) -> list[NodeType]:
        return list(self.meta["node_types"]) if self.hetero else [HOMO_NODE]

    @property
    def edge_types(self) -> list[EdgeType]:
        return [(a, r, b) for a, r, b in self.meta["edge_types"]] if self.hetero else [HOMO_EDGE]

    def graph(self) -> ForeignGraph:
        num_parts = self.meta["num_parts"]
        files = {of: f"node_map/{of}.pt" if self.hetero else "node_map.pt" for of in self.node_types}
        maps = {of: load_array(self.folder / file) for of, file in files.items()}
        counts = {of: array.rows for of, array in maps.items()}
        parts = {of: part_numbers(a.values, a.rows, num_parts, a.place) for of, a in maps.items()}
        nodes = {}
        for of, start in _starts(counts).items():
            pieces: dict[str, list[tuple[Array, RawArray]]] = {}
            whole: dict[str, RawArray] = {}
            for part_id in range(num_parts):
                content, place = self._of(part_id, "node_feats", of)
                if not content:
                    continue
                ids = _tensor(content, "id" if "id" in content else "global_id", place).values
                ids = ids if "id" in content else ids - start
                for name, value in {**(content.get("feats") or {}), **_present(content, "time")}.items():
                    if value is None:
                        continue
                    array = tensor_array(value, f"{place} [{name}]")
                    if name == "time" and array.rows == counts[of]:  # every part has the times of all nodes
                        whole[name] = array
                    else:
                        pieces.setdefault(name, []).append((ids, array))
            nodes[of] = {**self._assembled(pieces, counts[of], f"node{of_type(of)}"), **whole}
        edges = {of: self._edge_arrays(of, counts) for of in self.edge_types}
        raw = RawGraph(graph_name(self.folder), {}, nodes, edges, counts, hetero=self.hetero)
        return ForeignGraph(raw, parts, num_parts)

    @cached_property
    def _parts(self) -> list[dict[str, Any]]:
        names = ("graph", "node_feats", "edge_feats")
        found = []
        for part_id in range(self.meta["num_parts"]):
            folder = self.folder / f"part_{part_id}"
            needed = [name for name in names if name == "graph" or (folder / f"{name}.pt").exists()]
            files = {name: load_tensors(folder / f"{name}.pt") for name in needed}
            for name, content in files.items():
                if not isinstance(content, Mapping):
                    raise DataError(f"{folder / name}.pt: holds a {type(content).__name__}, expected a dict of tensors")
            found.append(files)
        return found

    def _of(self, part_id: int, file: str, of: NodeType | EdgeType) -> tuple[Mapping[str, Any], str]:
        """Return the tensors of type ``of`` in a file of a part, and a text for messages that names the file and type.

        ``file``: name without ``.pt``. The mapping is empty if the part has no such tensors.
        """
        content: Any = self._parts[part_id].get(file, {})
        place = f"{self.folder}/part_{part_id}/{file}.pt"
        if not self.hetero:
            return content, place
        typed = content.get(of, {})
        return (typed if isinstance(typed, Mapping) else {}), f"{place} [{type_name(of)}]"

    def _edge_arrays(self, of: EdgeType, counts: Mapping[NodeType, int]) -> dict[str, RawArray]:
        all_ids: list[tuple[Array, str]] = []
        ends: list[tuple[Array, Array]] = []
        attrs: dict[str, list[tuple[int, RawArray]]] = {}
        for part_id in range(len(self._parts)):
            content, place = self._of(part_id, "graph", of)
            if not content:
                continue
            ids, row, col = (_tensor(content, key, place).values for key in ("edge_id", "row", "col"))
            if not len(ids) == len(row) == len(col):
                raise DataError(
                    f"{place}: {len(ids)} ids, but {len(row)} sources and {len(col)} targets; make the partition again"
                )
            all_ids.append((ids, place))
            ends.append((row, col))
            content, place = self._of(part_id, "edge_feats", of)
            if content.get("global_id") is not None:
                listed = _tensor(content, "global_id", place).values
                if listed.shape != ids.shape or len(np.unique(listed - ids)) > 1:  # one may count all edge types
                    raise DataError(
                        f"{place}: global_id lists other edges than edge_id in graph.pt; make the partition again"
                    )
            for name, value in {**(content.get("feats") or {}), **_present(content, "edge_time")}.items():
                if value is not None:
                    array = tensor_array(value, f"{place} [{name}]")
                    attrs.setdefault(name, []).append((len(all_ids) - 1, array))
        count = sum(len(ids) for ids, _ in all_ids)
        if self.hetero:  # ids count the edges of all types
            first = min((int(ids.min()) for ids, _ in all_ids if len(ids)), default=0)
            all_ids = [(ids - first, place) for ids, place in all_ids]
        what = f"edge{of_type(of)}"
        if not count:
            return {"edge_index": RawArray(np.empty((2, 0), np.int64), str(self.folder))}
        pairs = (Piece(ids, np.stack(e, axis=1), p) for (ids, p), e in zip(all_ids, ends, strict=True))
        both = assembled(pairs, count, what, self.arrays)
        edge_index = np.ascontiguousarray(both.T)
        if self.hetero and "node_offset" not in self.meta:  # torch_geometric 2.4
            starts = _starts(counts)
            edge_index -= np.array([[starts[of[0]]], [starts[of[2]]]])
        pieces = {name: [(all_ids[at][0], array) for at, array in found] for name, found in attrs.items()}
        place = f"{self.folder}/part_*/graph.pt{'' if of == HOMO_EDGE else f' [{type_name(of)}]'}"
        return {"edge_index": RawArray(edge_index, place), **self._assembled(pieces, count, what)}

    def _assembled(
        self, pieces: Mapping[str, list[tuple[Array, RawArray]]], count: int, what: str
    ) -> dict[str, RawArray]:
        whole = {}
        for name, found in pieces.items():
            values = assembled((Piece(ids, a.values, a.place) for ids, a in found), count, what, self.arrays)
            whole[name] = RawArray(values, found[0][1].place, found[0][1].bfloat16)
        return whole


def _tensor(content: Mapping[str, Any], key: str, place: str) -> RawArray:
    if key not in content:
        raise DataError(f"{place}: {key!r} is missing; expected a file of torch_geometric's Partitioner")
    return tensor_array(content[key], f"{place} [{key}]")


def _present(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: content[key]} if content.get(key) is not None else {}


def _starts(counts: Mapping[NodeType, int]) -> dict[NodeType, int]:
    ends = np.cumsum([0, *counts.values()])
    return {of: int(start) for of, start in zip(counts, ends, strict=False)}


PYG = ForeignFormat(
    key="pyg",
    title="torch_geometric.distributed",
    found=lambda folder: (folder / META).is_file(),
    count=lambda folder: int(_read_meta(folder)["num_parts"]),
    read=lambda folder, arrays: _Partition(folder, arrays).graph(),
)
