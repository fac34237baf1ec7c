"""Reads partitions of DGL, as ``dgl.distributed.partition_graph`` and DGL's dispatch pipeline write them.

A folder has ``<name>.json`` with the id ranges of every part, and per part ``graph.dgl`` (the part's edges, and ids of
the nodes), ``node_feat.dgl`` and ``edge_feat.dgl``. DGL renumbers nodes and edges: first those of part 0, then part 1,
…, and within a part one type after the other. The ids of the input graph are stored only by the dispatch pipeline with
`--save-orig-nids` and `--save-orig-eids`. Without them, the original ids number the nodes and edges of each type from 0
in DGL's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import DataError
from trainer.core.files import read_json
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.raw_arrays import RawArray, RawGraph, read_data_json
from trainer.data.work_arrays import Piece, WorkArrays, assembled
from trainer.partition.foreign.dgl_files import DglGraph, Tensors, read_graph_file, read_tensor_file
from trainer.partition.foreign.types import ForeignFormat, ForeignGraph

NODE_NAMES = {"feat": "x", "features": "x", "label": "y", "labels": "y"}  #: usual names of DGL's examples -> ours

EDGE_NAMES = {"feat": "edge_attr", "feats": "edge_attr"}


@dataclass(frozen=True)
class _Ranges:
    """Ids that DGL gave the nodes or edges of one type: for each part a contiguous range.

    DGL's ids number the nodes of all types together, and the edges of all types together. *Ids per type* number the
    nodes or edges of one type from 0, in the same order.
    """

    starts: Ids  #: [num_parts], first id of each part, ascending
    sizes: Ids  #: [num_parts], number of ids

    @classmethod
    def of(cls, listed: Sequence[Any], num_parts: int, place: str) -> _Ranges:
        """Parse ranges [[start, end], …], or [end, …] as in old files. Raises ``DataError``."""
        pairs = listed
        if listed and all(type(end) is int for end in listed):
            pairs = list(zip([0, *listed[:-1]], listed, strict=True))
        try:
            ranges = np.asarray(pairs, np.int64).reshape(-1, 2)
        except (TypeError, ValueError, OverflowError):
            raise DataError(f"{place}: expected a range [start, end] per part") from None
        if len(ranges) != num_parts or (np.diff(ranges, axis=1) < 0).any() or (np.diff(ranges[:, 0]) < 0).any():
            raise DataError(f"{place}: expected {num_parts} ascending ranges [start, end]")
        return cls(ranges[:, 0], ranges[:, 1] - ranges[:, 0])

    @property
    def count(self) -> int:
        return int(self.sizes.sum())

    def own(self, part_id: int) -> tuple[int, int]:
        end = int(self.sizes[: part_id + 1].sum())
        return end - int(self.sizes[part_id]), end

    def per_type(self, ids: Array, place: str) -> Ids:
        """Convert DGL's ids to ids per type. Raises ``DataError`` for an id of another type."""
        part = np.searchsorted(self.starts, ids, side="right") - 1
        offset = ids - self.starts[part]
        wrong = (part < 0) | (offset < 0) | (offset >= self.sizes[part])
        if wrong.any():
            raise DataError(f"{place}: id {ids[wrong][0]} is not in the ranges of its type; the partition is damaged")
        return (np.cumsum(self.sizes) - self.sizes)[part] + offset


@dataclass(frozen=True)
class _Partition:
    config: Path
    arrays: WorkArrays

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        return _read_config(self.config)

    @property
    def num_parts(self) -> int:
        return int(self.meta["num_parts"])

    @cached_property
    def hetero(self) -> bool:
        return len(self.meta["node_map"]) > 1 or len(self.meta["edge_map"]) > 1 or "_N" not in self.meta["node_map"]

    @cached_property
    def nodes(self) -> dict[NodeType, _Ranges]:
        return {
            name if self.hetero else HOMO_NODE: _Ranges.of(found, self.num_parts, f"{self.config}: node_map of {name}")
            for name, found in self.meta["node_map"].items()
        }

    @cached_property
    def edges(self) -> dict[EdgeType, _Ranges]:
        ranges: dict[EdgeType, _Ranges] = {}
        for name, found in self.meta["edge_map"].items():
            of, words = HOMO_EDGE, name.split(":")
            if self.hetero:
                if len(words) != 3 or not {words[0], words[2]} <= set(self.nodes):
                    raise DataError(
                        f"{self.config}: edge type {name!r} is not source:relation:target (files of DGL before 1.0); "
                        "convert the files with DGL's tools/change_etype_to_canonical_etype.py"
                    )
                of = words[0], words[1], words[2]
            ranges[of] = _Ranges.of(found, self.num_parts, f"{self.config}: edge_map of {name}")
        return ranges

    def graph(self) -> ForeignGraph:
        node_ids, edge_ids = self._original("orig_nids", self.nodes), self._original("orig_eids", self.edges)
        place, arrays = str(self.config), {}
        for of, ranges in self.edges.items():
            edge_index, original = self.arrays.empty((2, ranges.count), np.int64), edge_ids.get(of)
            for part_id in range(self.num_parts):
                start, end = ranges.own(part_id)
                edge_index[:, start:end] = self._own_edges(of, part_id)
            for row, end_type in enumerate((of[0], of[2])):
                if end_type in node_ids:
                    edge_index[row] = node_ids[end_type][edge_index[row]]
            if original is not None:
                edge_index = assembled([Piece(original, edge_index.T, place)], ranges.count, "edge", self.arrays).T
            edge_index = np.ascontiguousarray(edge_index)  # frees what it is a copy of
            attrs = self._attrs("edge_feats", of, ranges, original, EDGE_NAMES)
            arrays[of] = {"edge_index": RawArray(edge_index, place), **attrs}
        nodes = {of: self._attrs("node_feats", of, self.nodes[of], node_ids.get(of), NODE_NAMES) for of in self.nodes}
        counts = {of: ranges.count for of, ranges in self.nodes.items()}
        part_ids = np.arange(self.num_parts, dtype=np.int32)
        parts = {of: np.repeat(part_ids, ranges.sizes) for of, ranges in self.nodes.items()}
        for node_type, ids in node_ids.items():  # in the order of the input graph
            own, parts[node_type] = parts[node_type], np.empty_like(parts[node_type])
            parts[node_type][ids] = own
        notes = () if node_ids else (
            f"{self.config}: DGL renumbered the nodes and does not store the ids of the input graph; original ids are "
            "DGL's",
        )  # fmt: skip
        raw = RawGraph(str(self.meta["graph_name"]), {}, nodes, arrays, counts, hetero=self.hetero, notes=notes)
        return ForeignGraph(raw, parts, self.num_parts)

    def _file(self, part_id: int, key: str) -> Path:
        entry = self.meta.get(f"part-{part_id}")
        path = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(path, str):
            hint = (
                "; GraphBolt's format cannot be read; partition with use_graphbolt=False" if key == "part_graph" else ""
            )
            raise DataError(f"{self.config}: the entry part-{part_id} has no {key}{hint}")
        return self.config.parent / path

    @cached_property
    def _graphs(self) -> list[DglGraph]:
        return [read_graph_file(self._file(part_id, "part_graph")) for part_id in range(self.num_parts)]

    @cached_property
    def _features(self) -> dict[str, list[Tensors]]:
        keys, parts = ("node_feats", "edge_feats"), range(self.num_parts)
        return {key: [read_tensor_file(self._file(part_id, key)) for part_id in parts] for key in keys}

    def _original(self, name: str, types: Mapping[Any, _Ranges]) -> dict[Any, Ids]:
        """Return the ids that nodes or edges have in the input graph, by type, in order of DGL's ids.

        The ids are read from the files ``<name>.dgl``. Returns {} if a part has no such file. ``types``: DGL's id
        ranges of each type.
        """
        files = [self._file(part_id, "part_graph").with_name(f"{name}.dgl") for part_id in range(self.num_parts)]
        if not all(file.exists() for file in files):
            return {}
        found = [read_tensor_file(file) for file in files]
        ids = {}
        for of, ranges in types.items():
            keys, pieces = self._keys(of), []
            for tensors, file in zip(found, files, strict=True):
                key = next((key for key in keys if key in tensors), None)
                if key is None:
                    raise DataError(f"{file}: no ids of {keys[0]}; the file has {', '.join(tensors) or 'nothing'}")
                pieces.append(tensors[key].values)
            ids[of] = np.concatenate(pieces)
            ids[of] = ids[of] - ids[of].min(initial=ranges.count)  # ids of edges may count all types
            if not np.array_equal(np.sort(ids[of]), np.arange(ranges.count)):
                raise DataError(
                    f"{files[0]}: the ids of {type_name(of)} must be 0 to {ranges.count - 1}, each exactly once"
                )
        return ids

    def _keys(self, of: NodeType | EdgeType) -> tuple[str, ...]:
        if not self.hetero:
            return ("_N",) if isinstance(of, str) else ("_N:_E:_N", "_E")
        return (of,) if isinstance(of, str) else (":".join(of),)

    def _own_edges(self, of: EdgeType, part_id: int) -> Ids:
        """Return the edges of one type that a part owns, [2, e], in order of DGL's edge ids.

        The node ids in the result are ids per type (see ``_Ranges``).
        """
        graph, ranges, place = self._graphs[part_id], self.edges[of], str(self._file(part_id, "part_graph"))
        if not {"_ID", "inner_edge"} <= graph.edges.keys() or "_ID" not in graph.nodes:
            raise DataError(
                f"{place}: _ID or inner_edge is missing; expected a file of dgl.distributed.partition_graph"
            )
        ids, inner = graph.edges["_ID"].values, graph.edges["inner_edge"].values
        node_ids = graph.nodes["_ID"].values
        if not ids.shape == inner.shape == graph.sources.shape or ids.dtype.kind != "i" or node_ids.dtype.kind != "i":
            raise DataError(f"{place}: _ID or inner_edge has a wrong shape or dtype; the file is damaged")
        for ends in (graph.sources, graph.targets):
            if len(ends) and (ends.min() < 0 or ends.max() >= len(node_ids)):
                raise DataError(f"{place}: an edge ends at a node that the part does not have; the file is damaged")
        start, size = int(ranges.starts[part_id]), int(ranges.sizes[part_id])
        mine = np.flatnonzero((inner != 0) & (ids >= start) & (ids < start + size))
        mine = mine[np.argsort(ids[mine], kind="stable")]
        if not np.array_equal(ids[mine], np.arange(start, start + size)):
            raise DataError(
                f"{place}: {len(mine)} edges of type {type_name(of)} have ids from {start} to {start + size - 1}, "
                "expected one edge per id; the file is damaged"
            )
        return np.stack([
            self.nodes[of[0]].per_type(node_ids[graph.sources[mine]], place),
            self.nodes[of[2]].per_type(node_ids[graph.targets[mine]], place),
        ])  # fmt: skip

    def _attrs(
        self, key: str, of: NodeType | EdgeType, ranges: _Ranges, original: Ids | None, names: Mapping[str, str]
    ) -> dict[str, RawArray]:
        """Return the attributes of a type, in original order. ``key``: `node_feats` or `edge_feats`."""
        prefixes = tuple(f"{name}/" for name in self._keys(of))
        found: dict[str, dict[int, RawArray]] = {}  # by name and part
        for part_id, tensors in enumerate(self._features[key]):
            for full, array in tensors.items():
                if prefix := next((prefix for prefix in prefixes if full.startswith(prefix)), ""):
                    found.setdefault(full.removeprefix(prefix), {})[part_id] = array
        what = f"{'node' if isinstance(of, str) else 'edge'} of type {type_name(of)}"
        attrs = {}
        for name, by_part in renamed(found, names).items():
            pieces = []
            for part_id, array in by_part.items():
                ids = np.arange(*ranges.own(part_id))
                ids = ids if original is None else original[ids]
                pieces.append(Piece(ids, array.values, f"{array.place} [{name}]"))
            values = as_mask(name, assembled(pieces, ranges.count, what, self.arrays))
            attrs[name] = RawArray(values, pieces[0].place, next(iter(by_part.values())).bfloat16)
        return attrs


T = TypeVar("T")


def renamed(found: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Rename attributes by ``names``, unless an attribute has the new name already. Sorts by name."""
    result: dict[str, T] = {}
    for name, value in sorted(found.items()):
        ours = names.get(name, name)
        result[name if ours in found or ours in result else ours] = value
    return result


def as_mask(name: str, values: Array) -> Array:
    """Convert an array named `<split>_mask`, which DGL stores as uint8, to booleans. Return other arrays unchanged."""
    if name.endswith("_mask") and values.dtype.kind in "iu" and values.size and 0 <= values.min() <= values.max() <= 1:
        return values.astype(bool)
    return values


def _configs(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            meta = read_json(path)
        except (OSError, ValueError):
            continue
        if isinstance(meta, dict) and {"num_parts", "node_map", "edge_map", "graph_name"} <= meta.keys():
            found.append(path)
    return found


def _config(folder: Path) -> Path:
    found = _configs(folder)
    if len(found) != 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder}: several partitions of DGL ({names}); keep one of these files in the folder")
    return found[0]


def _read_config(path: Path) -> Mapping[str, Any]:
    meta: Mapping[str, Any] = read_data_json(path)
    if type(meta["num_parts"]) is not int or meta["num_parts"] < 1:
        raise DataError(f"{path}: num_parts is {meta['num_parts']!r}, expected a number")
    for key in ("node_map", "edge_map"):
        if not isinstance(meta[key], dict) or not all(isinstance(ranges, list) for ranges in meta[key].values()):
            raise DataError(f"{path}: {key} is not a range of ids per part and type; partition with reshuffle=True")
    return meta


DGL = ForeignFormat(
    key="dgl",
    title="DGL",
    found=lambda folder: bool(_configs(folder)),
    count=lambda folder: int(_read_config(_config(folder))["num_parts"]),
    read=lambda folder, arrays: _Partition(_config(folder), arrays).graph(),
)
