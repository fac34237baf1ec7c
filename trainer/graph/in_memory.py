"""Opens a graph in memory as a graph of one part, which every rank holds completely."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, remote_backend_utils

from trainer.core.arrays import Array
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.edges import first_outside
from trainer.data.memory import dataset_of, shared_array
from trainer.graph.environment import this_process
from trainer.graph.open import Graph
from trainer.partition.cut import EdgeCut, Relabelling, relabel
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.store.manifest import AttrSpec, EdgeSpec, Manifest, NodeSpec
from trainer.store.part_store import EdgePart, NodePart, Part, PartStore


def _dataset_of_stores(feature_store: Any, graph_store: Any, time_attr: str | None = None) -> Dataset:
    """Return a (feature store, graph store) pair as a ``Dataset`` of edges, numbers of nodes, and times.

    Edge ids are positions in the stored edge list. Raises ``DataError`` if the number of nodes is unknown,
    ``SettingsError`` for an unknown time attribute.
    """
    edge_attrs = graph_store.get_all_edge_attrs()
    if not edge_attrs:
        raise DataError("the graph store holds no edges: get_all_edge_attrs() is empty")
    hetero = all(attr.edge_type is not None for attr in edge_attrs)
    row, col, _ = graph_store.coo()
    if not hetero:
        row, col = {HOMO_EDGE: row}, {HOMO_EDGE: col}
    edge_index = {of: np.stack([shared_array(row[of]), shared_array(col[of])]) for of in row}
    counts: dict[NodeType, int]
    if hetero:
        groups = [attr.group_name for attr in feature_store.get_all_tensor_attrs()]
        types = dict.fromkeys([end for of in edge_index for end in (of[0], of[2])])
        types |= dict.fromkeys(group for group in groups if isinstance(group, str))
        try:
            counts = {of: int(remote_backend_utils.num_nodes(feature_store, graph_store, of)) for of in types}
        except ValueError as error:
            raise DataError(f"the number of nodes cannot be read from the stores: {error}") from None
    elif (size := edge_attrs[0].size) is None or None in size:
        raise DataError("the graph store does not know the number of nodes; pass size= with its edges")
    else:
        counts = {HOMO_NODE: int(max(size))}
    times: dict[AnyType, Array] = {}
    if time_attr is not None:
        attrs = [copy.copy(attr) for attr in feature_store.get_all_tensor_attrs() if attr.attr_name == time_attr]
        for attr in attrs:
            attr.index = None
        if not attrs:
            raise SettingsError(f"time_attr {time_attr!r}: the feature store has no attribute of that name")
        if not hetero and len(attrs) > 1:
            raise SettingsError(f"time_attr {time_attr!r}: the feature store has {len(attrs)} attributes of that name")
        # As in torch_geometric, an attribute ``time`` of a homogeneous graph belongs to nodes, any other to edges.
        of_homo = HOMO_NODE if time_attr == "time" else HOMO_EDGE
        for attr, values in zip(attrs, feature_store.multi_get_tensor(attrs), strict=True):
            times[attr.group_name if hetero else of_homo] = shared_array(torch.as_tensor(values))
    return Dataset(
        name="stores",
        nodes={of: NodeData(count, _column(time_attr, times, of, count)) for of, count in counts.items()},
        edges={of: EdgeData(index, _column(time_attr, times, of, index.shape[1])) for of, index in edge_index.items()},
        fingerprint="in memory",
        hetero=hetero,
        time_attrs=() if time_attr is None else (time_attr,),
    )


def _column(name: str | None, times: dict[AnyType, Array], of: AnyType, count: int) -> dict[str, Array]:
    if name is None or of not in times:
        return {}
    if times[of].shape != (count,):
        raise SettingsError(f"time_attr {name!r} of {of!r} has shape {list(times[of].shape)}, expected [{count}]")
    return {name: times[of]}


def as_graph(data: Any, *, time_attr: str | None = None, weight_attr: str | None = None) -> Graph:
    """Return the ``data`` argument of a loader as an opened graph.

    ``data`` is a ``Graph``, ``Data``, ``HeteroData`` or (feature store, graph store). Attributes are not copied, except
    edge weights and times. Raises ``SettingsError`` and ``DataError``.
    """
    if isinstance(data, Graph):
        return data
    if isinstance(data, (Data, HeteroData)):
        times = () if time_attr is None else (time_attr,)
        return graph_of(dataset_of(data, type(data).__name__, times), data)
    pair = data if isinstance(data, (tuple, list)) and len(data) == 2 else (None, None)
    if isinstance(pair[0], FeatureStore) and isinstance(pair[1], GraphStore):
        for store in data:
            if any(base.__module__.startswith("torch_geometric.distributed.") for base in type(store).__mro__):
                raise SettingsError(
                    f"data: {type(store).__name__} of torch_geometric.distributed holds one partition of a graph, but"
                    " the loader needs the whole graph; partition it by `partition make` and open that folder"
                    " (gnnfleet.open), or pass stores of the whole graph"
                )
        if weight_attr is not None:
            raise SettingsError(
                "weight_attr: a (feature store, graph store) pair has no edge weights; pass Data or HeteroData instead"
            )
        features, edges = data
        return graph_of(_dataset_of_stores(features, edges, time_attr), (features, edges))
    hint = f"; open it first: gnnfleet.open({str(data)!r})" if isinstance(data, (str, Path)) else ""
    raise SettingsError(
        "data: expected an opened graph (gnnfleet.open), Data, HeteroData or (feature_store, graph_store),"
        f" not {type(data).__name__}{hint}"
    )


def graph_of(dataset: Dataset, source: Any = None) -> Graph:
    """Open a dataset in memory as a graph of one part. Raises ``DataError`` for an edge with an invalid node id."""
    labels = {of: relabel(np.zeros(data.num_nodes, np.int32), 1) for of, data in dataset.nodes.items()}
    nodes = {}
    for of, data in dataset.nodes.items():
        # Times must be contiguous to gather rows from them.
        times = {name: np.ascontiguousarray(data.attrs[name]) for name in dataset.time_attrs if name in data.attrs}
        nodes[of] = NodePart(0, labels[of].orig_id, {**data.attrs, **times})
    edges = {of: _edge_part(dataset, of, data, labels) for of, data in dataset.edges.items()}
    splits = {(of, name): ids for of, data in dataset.nodes.items() for name, ids in data.splits.items()}
    part = Part(0, nodes, edges)
    manifest = Manifest(
        dataset=dataset.name, fingerprint=dataset.fingerprint, num_parts=1, algorithm="memory", seed=0,
        hetero=dataset.hetero,
        nodes={
            of: NodeSpec(data.num_nodes, (0, data.num_nodes), _attr_specs(data),
                         {name: len(ids) for name, ids in data.splits.items()}, data.num_classes)
            for of, data in dataset.nodes.items()
        },
        edges={
            of: EdgeSpec(data.num_edges, (0, data.num_edges), _attr_specs(data), tuple(edges[of].src_times), 0.0)
            for of, data in dataset.edges.items()
        },
        edge_cut=0.0, balance=1.0,
        graph_attrs={name: AttrSpec(values.dtype.name, values.shape) for name, values in dataset.graph_attrs.items()},
        files=(),
    )  # fmt: skip
    store = PartStore(Path(f"{dataset.name} in memory"), manifest, {0: part}, {}, splits, dataset.graph_attrs)
    return Graph(store, DistGraph(LocalGraph(store), {}), ranks=this_process(), source=source)


def _edge_part(dataset: Dataset, of: EdgeType, data: EdgeData, labels: Mapping[NodeType, Relabelling]) -> EdgePart:
    edge_index = np.ascontiguousarray(data.edge_index)
    if edge_index.ndim != 2 or len(edge_index) != 2 or edge_index.dtype.kind not in "iu":
        raise DataError(
            f"edge_index of {of}: {edge_index.dtype} {list(edge_index.shape)}; expected integer node ids [2, num_edges]"
        )
    for ids, end in zip(edge_index, of[::2], strict=True):
        num_nodes = dataset.nodes[end].num_nodes
        if (position := int(first_outside(ids, num_nodes))) >= 0:
            raise DataError(
                f"edge_index of {of}: {ids[position]} at position {position}, but {end!r} has {num_nodes} nodes;"
                " set num_nodes, or correct the edges"
            )
    cut = EdgeCut.of(edge_index, labels[of[0]], labels[of[2]])
    (group,) = cut.sorted_edges()
    indices, orig_id = (column() for column in group.columns)
    source_attrs = dataset.nodes[of[0]].attrs
    times = {name: source_attrs[name] for name in dataset.time_attrs if name in source_attrs}
    return EdgePart(
        start=0,
        indptr=cut.part_indptr(0),
        indices=indices,
        orig_id=orig_id,
        attrs=_ReorderedRows(data.attrs, orig_id),
        src_times={name: values[indices].astype(np.int64) for name, values in times.items()},
        endpoints=edge_index.T,
    )


class _ReorderedRows(Mapping[str, Array]):
    def __init__(self, attrs: Mapping[str, Array], rows: Array):
        self._attrs, self._rows = attrs, rows
        self._reordered: dict[str, Array] = {}

    def __getitem__(self, name: str) -> Array:
        if name not in self._reordered:
            self._reordered[name] = self._attrs[name][self._rows]
        return self._reordered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._attrs)

    def __len__(self) -> int:
        return len(self._attrs)


def _attr_specs(data: NodeData | EdgeData) -> dict[str, AttrSpec]:
    return {
        name: AttrSpec("bfloat16" if name in data.bfloat16 else values.dtype.name, values.shape)
        for name, values in data.attrs.items()
    }
