"""Writes a partition in the layout of torch_geometric.distributed (torch_geometric 2.5 and newer).

The files contain the node attributes `x` and `time`, and the edge attributes `edge_attr` and `edge_time`. Labels and
splits are written as torch_geometric's examples do: ``label/label.pt`` and ``<split>-partitions/partition<k>.pt``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.cut import EdgeCut, EdgeRows, Relabelling, relabel
from trainer.partition.folder import staged
from trainer.partition.foreign.pyg import META
from trainer.partition.restore import PartitionedGraph

if TYPE_CHECKING:
    import torch

_NODE_ATTRS, _EDGE_ATTRS = ("x", "y", "time"), ("edge_attr", "edge_time")  #: attributes that are written


def write_pyg(graph: PartitionedGraph, folder: str | Path) -> list[str]:
    """Write ``graph`` to ``folder``, which must be missing or empty. Every node stays in its part.

    Returns a message for each attribute that was left out because torch_geometric's partitions cannot contain it.
    Raises ``PartitionError`` when the folder is not empty or cannot be written; then no files are left.
    """
    target = Path(folder)
    check_empty(target)
    with staged(target) as root:
        _Writer(root, graph).write()
    return list(_left_out(graph.dataset))


def check_empty(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise PartitionError(f"{folder} exists and is not an empty folder; choose another folder")


@dataclass(frozen=True)
class _Writer:
    root: Path
    graph: PartitionedGraph

    @property
    def dataset(self) -> Dataset:
        return self.graph.dataset

    @property
    def hetero(self) -> bool:
        return self.dataset.hetero

    @cached_property
    def labels(self) -> dict[NodeType, Relabelling]:
        return {of: relabel(part, self.graph.num_parts) for of, part in self.graph.parts.items()}

    @cached_property
    def node_offset(self) -> dict[NodeType, int]:
        return _starts({of: nodes.num_nodes for of, nodes in self.dataset.nodes.items()})

    @cached_property
    def edge_offset(self) -> dict[EdgeType, int]:
        return _starts({of: edges.num_edges for of, edges in self.dataset.edges.items()})

    def write(self) -> None:
        for part_id in range(self.graph.num_parts):
            (self.root / f"part_{part_id}").mkdir()
        self._write_nodes()
        self._write_edges()
        self._write_labels()
        meta = {
            "num_parts": self.graph.num_parts,
            "node_types": list(self.dataset.nodes) if self.hetero else None,
            "edge_types": list(self.dataset.edges) if self.hetero else None,
            "node_offset": list(self.node_offset.values()) if self.hetero else None,
            "is_hetero": self.hetero,
            "is_sorted": True,
        }
        (self.root / META).write_text(json.dumps(meta), encoding="utf-8")

    def _write_nodes(self) -> None:
        for of, part in self.graph.parts.items():
            self._save(self._map("node_map", of), _tensor(part.astype(np.int64)))
        for part_id in range(self.graph.num_parts):
            feats = {of: self._node_feats(of, nodes, part_id) for of, nodes in self.dataset.nodes.items()}
            self._save(f"part_{part_id}/node_feats.pt", feats if self.hetero else feats[HOMO_NODE])

    def _node_feats(self, of: NodeType, nodes: NodeData, part_id: int) -> dict[str, Any]:
        owned = self.labels[of].owned(part_id).astype(np.int64)
        feats: dict[str, Any] = {"global_id": _tensor(owned + self.node_offset[of])}
        if self.hetero:
            feats["id"] = _tensor(owned)
        feats["feats"] = {"x": _tensor(nodes.attrs["x"][owned], "x" in nodes.bfloat16)} if "x" in nodes.attrs else {}
        if "time" in nodes.attrs:
            feats["time"] = _tensor(nodes.attrs["time"])  # of all nodes, as Partitioner does
        return feats

    def _write_edges(self) -> None:
        graphs: list[dict[EdgeType, Any]] = [{} for _ in range(self.graph.num_parts)]
        feats: list[dict[EdgeType, Any]] = [{} for _ in range(self.graph.num_parts)]
        for of, data in self.dataset.edges.items():
            edge_map = np.empty(data.num_edges, np.int64)
            cut = EdgeCut.of(data.edge_index, self.labels[of[0]], self.labels[of[2]])
            for rows in cut.part_rows():
                edge_map[rows.orig_id] = rows.part_id
                graphs[rows.part_id][of], feats[rows.part_id][of] = self._edge_tensors(of, data, rows)
            self._save(self._map("edge_map", of), _tensor(edge_map))
        for part_id in range(self.graph.num_parts):
            for name, by_type in (("graph", graphs[part_id]), ("edge_feats", feats[part_id])):
                self._save(f"part_{part_id}/{name}.pt", by_type if self.hetero else by_type[HOMO_EDGE])

    def _edge_tensors(self, of: EdgeType, data: EdgeData, rows: EdgeRows) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the content of graph.pt and edge_feats.pt for one edge type of a part.

        Edges with times are sorted by target, then by time.
        """
        ids, row = rows.orig_id.astype(np.int64), self.labels[of[0]].orig_id[rows.indices].astype(np.int64)
        col = np.repeat(self.labels[of[2]].owned(rows.part_id), np.diff(rows.indptr)).astype(np.int64)
        times = self._times(of, data, ids, row)
        if times is not None:
            order = np.lexsort((times, col))
            ids, row, col = ids[order], row[order], col[order]
        size = (self.dataset.nodes[of[0]].num_nodes, self.dataset.nodes[of[2]].num_nodes)
        edge_id = _tensor(ids + self.edge_offset[of])
        graph = {"edge_id": edge_id, "row": _tensor(row), "col": _tensor(col), "size": size}
        feats: dict[str, Any] = {}
        if "edge_attr" in data.attrs:
            values = _tensor(data.attrs["edge_attr"][ids], "edge_attr" in data.bfloat16)
            feats = {"global_id": _tensor(ids), "feats": {"edge_attr": values}}
        if "edge_time" in data.attrs:
            feats["edge_time"] = _tensor(data.attrs["edge_time"][ids])
        return graph, feats

    def _times(self, of: EdgeType, data: EdgeData, ids: Array, row: Array) -> Array | None:
        if "edge_time" in data.attrs:
            return data.attrs["edge_time"][ids]
        times = self.dataset.nodes[of[0]].attrs.get("time")
        return None if times is None else times[row]

    def _write_labels(self) -> None:
        nodes = self.dataset.nodes
        labels = {of: _tensor(data.attrs["y"]) for of, data in nodes.items() if "y" in data.attrs}
        if labels:
            self._save("label/label.pt", labels if self.hetero else labels[HOMO_NODE])
        for split in dict.fromkeys(name for data in nodes.values() for name in data.splits):
            pieces = {
                of: np.array_split(data.splits[split], self.graph.num_parts)
                for of, data in nodes.items()
                if split in data.splits
            }
            for part_id in range(self.graph.num_parts):
                seeds = {of: _tensor(pieces[of][part_id].astype(np.int64)) for of in pieces}
                self._save(f"{split}-partitions/partition{part_id}.pt", seeds if self.hetero else seeds[HOMO_NODE])

    def _map(self, name: str, of: NodeType | EdgeType) -> str:
        return f"{name}/{type_name(of)}.pt" if self.hetero else f"{name}.pt"

    def _save(self, path: str, content: Any) -> None:
        import torch

        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(target, "wb") as file:
                torch.save(content, file)
        except RuntimeError as error:  # torch's error when the disk is full
            raise PartitionError(f"{target} cannot be written: {error}; nothing was left behind") from error


def _starts(counts: Mapping[Any, int]) -> dict[Any, int]:
    return {of: int(start) for of, start in zip(counts, np.cumsum([0, *counts.values()]), strict=False)}


def _tensor(values: Array, bfloat16: bool = False) -> torch.Tensor:
    import torch

    tensor = torch.from_numpy(np.require(values, requirements=("C", "W", "O")))
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def _left_out(dataset: Dataset) -> Iterator[str]:
    nodes = [("node", of, name) for of, data in dataset.nodes.items() for name in data.attrs if name not in _NODE_ATTRS]
    edges = [
        ("edge", type_name(of), name)
        for of, data in dataset.edges.items()
        for name in data.attrs
        if name not in _EDGE_ATTRS
    ]
    for kind, of, name in [*nodes, *edges]:
        whose = f" of {of}" if dataset.hetero else ""
        yield f"{kind} attribute {name}{whose} is left out: partitions of torch_geometric have no place for it"
    for name in dataset.graph_attrs:
        yield f"graph attribute {name} is left out: partitions of torch_geometric have no place for it"
