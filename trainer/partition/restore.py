"""Restores the graph and the part of every node from a partition folder: the inverse of ``write_partition``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, id_dtype
from trainer.core.errors import PartitionError
from trainer.core.rounding import from_int8
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.work_arrays import Piece, WorkArrays, assembled
from trainer.partition.clusters import CLUSTER
from trainer.partition.verify import verify_partition
from trainer.store.manifest import AttrSpec, Manifest
from trainer.store.npy import rows_per_chunk
from trainer.store.part_store import PartStore, open_parts


@dataclass(frozen=True)
class PartitionedGraph:
    dataset: Dataset
    parts: Mapping[NodeType, npt.NDArray[np.int32]]  #: type -> [num_nodes], the part of each node
    num_parts: int


def restore_graph(folder: str | Path, work: Path | None = None) -> PartitionedGraph:
    """Return the graph in a partition folder, in the order of its original ids, and the part of every node.

    The result equals the dataset that the folder was made from, but features that were rounded stay rounded. An
    attribute `cluster` that partitioning added is left out. Memory: the size of the graph; with ``work``, arrays of
    64 MiB or more are on disk instead.

    Args:
        folder: partition folder with all parts. Every file is compared with its digest first.
        work: an empty folder on disk for large arrays; None: all are in memory.

    Raises:
        PartitionError: when the folder is incomplete or damaged.
    """
    if problems := verify_partition(folder):
        more = f" ({len(problems)} problems; `gnnfleet partition verify` lists all)" if len(problems) > 1 else ""
        raise PartitionError(f"{Path(folder) / problems[0].path}: {problems[0].problem}{more}")
    return _Restored(open_parts(folder), WorkArrays(work)).graph()


@dataclass(frozen=True)
class _Restored:
    store: PartStore
    arrays: WorkArrays

    @property
    def manifest(self) -> Manifest:
        return self.store.manifest

    def graph(self) -> PartitionedGraph:
        orig_ids = {
            of: np.concatenate([part.nodes[of].orig_id for part in self.store.parts.values()])
            for of in self.manifest.nodes
        }
        nodes = {of: self._nodes(of, orig_ids[of]) for of in self.manifest.nodes}
        edges = {of: self._edges(of, orig_ids) for of in self.manifest.edges}
        dataset = Dataset(
            name=self.manifest.dataset,
            nodes=nodes,
            edges=edges,
            fingerprint=self.manifest.dataset_fingerprint,
            hetero=self.manifest.hetero,
            graph_attrs=dict(self.store.graph_attrs),
            time_attrs=self.manifest.time_attrs,
        )
        parts = {of: np.empty(spec.num_nodes, np.int32) for of, spec in self.manifest.nodes.items()}
        for part_id, part in self.store.parts.items():
            for of, own in part.nodes.items():
                parts[of][own.orig_id] = part_id
        return PartitionedGraph(dataset, parts, self.manifest.num_parts)

    def _nodes(self, of: NodeType, orig_id: Array) -> NodeData:
        spec = self.manifest.nodes[of]
        kept = {
            name: attr
            for name, attr in spec.attrs.items()
            if not (name == CLUSTER and "clusters" in self.manifest.options)
        }
        return NodeData(
            num_nodes=spec.num_nodes,
            attrs={name: self._attr(of, name, attr) for name, attr in kept.items()},
            splits={name: orig_id[self.store.splits[of, name]].astype(np.int64) for name in spec.splits},
            num_classes=spec.num_classes,
            bfloat16=_bfloat16(kept),
        )

    def _edges(self, of: EdgeType, orig_ids: Mapping[NodeType, Array]) -> EdgeData:
        spec = self.manifest.edges[of]
        nodes = max(len(orig_ids[of[0]]), len(orig_ids[of[2]]))
        edge_index = self.arrays.empty((2, spec.num_edges), id_dtype(nodes))
        for part in self.store.parts.values():
            edges, targets = part.edges[of], part.nodes[of[2]].orig_id
            edge_index[0, edges.orig_id] = orig_ids[of[0]][edges.indices]
            edge_index[1, edges.orig_id] = np.repeat(targets, np.diff(edges.indptr))
        attrs = {name: self._attr(of, name, attr) for name, attr in spec.attrs.items()}
        return EdgeData(edge_index, attrs, _bfloat16(spec.attrs))

    def _attr(self, of: AnyType, name: str, spec: AttrSpec) -> Array:
        what = f"{'node' if isinstance(of, str) else 'edge'} of type {type_name(of)}"
        return assembled(self._pieces(of, name), spec.shape[0], what, self.arrays)

    def _pieces(self, of: AnyType, name: str) -> Iterator[Piece]:
        for part_id, part in self.store.parts.items():
            owned = part.table(of)
            values, scales = owned.attrs[name], owned.scales.get(name)
            place = f"{self.store.folder}/part{part_id}: {name}"
            if scales is None:
                yield Piece(owned.orig_id, values, place)
                continue
            step = max(1, rows_per_chunk(values) // 4)  # rows become float32, four times as large
            for start in range(0, max(len(values), 1), step):
                rows = slice(start, start + step)
                yield Piece(owned.orig_id[rows], from_int8(values[rows], scales[rows]), place)


def _bfloat16(attrs: Mapping[str, AttrSpec]) -> frozenset[str]:
    return frozenset(name for name, attr in attrs.items() if attr.dtype == "bfloat16")
