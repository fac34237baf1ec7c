"""torch_geometric's ``(FeatureStore, GraphStore)`` pairs: edges are read once, features stay where they are."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch_geometric.data import remote_backend_utils

from trainer.core.arrays import Array
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.memory import shared_array


def dataset_of_stores(feature_store: Any, graph_store: Any, time_attr: str | None = None) -> Dataset:
    """Topology, sizes and times of a pair of stores; edge ids are places in the stored edge list.

    Raises ``DataError`` when the number of nodes cannot be told, ``SettingsError`` for an unknown time.
    """
    edge_attrs = graph_store.get_all_edge_attrs()
    if not edge_attrs:
        raise DataError("the graph store holds no edges: get_all_edge_attrs() is empty")
    hetero = all(attr.edge_type is not None for attr in edge_attrs)
    edge_index = _edges(graph_store, hetero)
    counts = _counts(feature_store, graph_store, edge_index) if hetero else {HOMO_NODE: _count(edge_attrs, edge_index)}
    times = _times(feature_store, time_attr, hetero) if time_attr is not None else {}
    return Dataset(
        name="stores",
        nodes={of: NodeData(count, _column(time_attr, times, of, count)) for of, count in counts.items()},
        edges={of: EdgeData(index, _column(time_attr, times, of, index.shape[1])) for of, index in edge_index.items()},
        fingerprint="in memory",
        hetero=hetero,
        time_attrs=() if time_attr is None else (time_attr,),
    )


def _edges(graph_store: Any, hetero: bool) -> dict[EdgeType, Array]:
    row, col, _ = graph_store.coo()
    if not hetero:
        row, col = {HOMO_EDGE: row}, {HOMO_EDGE: col}
    return {of: np.stack([shared_array(row[of]), shared_array(col[of])]) for of in row}


def _counts(feature_store: Any, graph_store: Any, edges: Iterable[EdgeType]) -> dict[NodeType, int]:
    groups = [attr.group_name for attr in feature_store.get_all_tensor_attrs()]
    types = dict.fromkeys([end for of in edges for end in (of[0], of[2])])
    types |= dict.fromkeys(group for group in groups if isinstance(group, str))
    try:
        return {of: int(remote_backend_utils.num_nodes(feature_store, graph_store, of)) for of in types}
    except ValueError as error:
        raise DataError(f"the stores do not tell how many nodes there are: {error}") from None


def _count(edge_attrs: list[Any], edge_index: dict[EdgeType, Array]) -> int:
    size = edge_attrs[0].size
    if size is None or None in size:
        raise DataError("the graph store does not tell how many nodes there are; give its edges a size")
    return int(max(size))


def _times(feature_store: Any, time_attr: str, hetero: bool) -> dict[AnyType, Array]:
    """The whole time attribute of every type that has it.

    As in torch_geometric, homogeneous times are the nodes' if called ``time``, else the edges'.
    """
    attrs = [copy.copy(attr) for attr in feature_store.get_all_tensor_attrs() if attr.attr_name == time_attr]
    for attr in attrs:
        attr.index = None
    if not attrs:
        raise SettingsError(f"time_attr {time_attr!r}: the feature store has no such attribute")
    if not hetero and len(attrs) > 1:
        raise SettingsError(f"time_attr {time_attr!r}: the feature store has {len(attrs)} of that name")
    arrays = [shared_array(torch.as_tensor(values)) for values in feature_store.multi_get_tensor(attrs)]
    if not hetero:
        return {HOMO_NODE if time_attr == "time" else HOMO_EDGE: arrays[0]}
    return {attr.group_name: array for attr, array in zip(attrs, arrays, strict=True)}


def _column(name: str | None, times: dict[AnyType, Array], of: AnyType, count: int) -> dict[str, Array]:
    if name is None or of not in times:
        return {}
    if times[of].shape != (count,):
        raise SettingsError(f"time_attr {name!r} of {of!r} has shape {list(times[of].shape)}, expected [{count}]")
    return {name: times[of]}
