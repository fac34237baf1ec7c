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
from trainer.store.manifest import AttrSpec
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
    store, arrays = open_parts(folder), WorkArrays(work)
    manifest = store.manifest
    orig_ids = {of: np.concatenate([part.nodes[of].orig_id for part in store.parts.values()]) for of in manifest.nodes}
    nodes: dict[NodeType, NodeData] = {}
    for of, spec in manifest.nodes.items():
        added = {CLUSTER} if "clusters" in manifest.options else ()
        kept = {name: attr for name, attr in spec.attrs.items() if name not in added}
        nodes[of] = NodeData(
            num_nodes=spec.num_nodes,
            attrs={name: _attr(store, arrays, of, name, attr) for name, attr in kept.items()},
            splits={name: orig_ids[of][store.splits[of, name]].astype(np.int64) for name in spec.splits},
            num_classes=spec.num_classes,
            bfloat16=_bfloat16(kept),
        )
    edges: dict[EdgeType, EdgeData] = {}
    for edge_type, edge_spec in manifest.edges.items():
        source, target = orig_ids[edge_type[0]], orig_ids[edge_type[2]]
        edge_index = arrays.empty((2, edge_spec.num_edges), id_dtype(max(len(source), len(target))))
        for part in store.parts.values():
            own, targets = part.edges[edge_type], part.nodes[edge_type[2]].orig_id
            edge_index[0, own.orig_id] = source[own.indices]
            edge_index[1, own.orig_id] = np.repeat(targets, np.diff(own.indptr))
        attrs = {name: _attr(store, arrays, edge_type, name, attr) for name, attr in edge_spec.attrs.items()}
        edges[edge_type] = EdgeData(edge_index, attrs, _bfloat16(edge_spec.attrs))
    dataset = Dataset(
        name=manifest.dataset,
        nodes=nodes,
        edges=edges,
        fingerprint=manifest.dataset_fingerprint,
        hetero=manifest.hetero,
        graph_attrs=dict(store.graph_attrs),
        time_attrs=manifest.time_attrs,
    )
    parts = {of: np.empty(spec.num_nodes, np.int32) for of, spec in manifest.nodes.items()}
    for part_id, part in store.parts.items():
        for of, owned in part.nodes.items():
            parts[of][owned.orig_id] = part_id
    return PartitionedGraph(dataset, parts, manifest.num_parts)


def _attr(store: PartStore, arrays: WorkArrays, of: AnyType, name: str, spec: AttrSpec) -> Array:
    what = f"{'node' if isinstance(of, str) else 'edge'} of type {type_name(of)}"
    return assembled(_pieces(store, of, name), spec.shape[0], what, arrays)


def _pieces(store: PartStore, of: AnyType, name: str) -> Iterator[Piece]:
    for part_id, part in store.parts.items():
        owned = part.table(of)
        values, scales = owned.attrs[name], owned.scales.get(name)
        place = f"{store.folder}/part{part_id}: {name}"
        if scales is None:
            yield Piece(owned.orig_id, values, place)
            continue
        step = max(1, rows_per_chunk(values) // 4)  # rows become float32, four times as large
        for start in range(0, max(len(values), 1), step):
            rows = slice(start, start + step)
            yield Piece(owned.orig_id[rows], from_int8(values[rows], scales[rows]), place)


def _bfloat16(attrs: Mapping[str, AttrSpec]) -> frozenset[str]:
    return frozenset(name for name, attr in attrs.items() if attr.dtype == "bfloat16")
