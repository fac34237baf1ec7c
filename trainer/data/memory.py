"""Wraps PyG's ``Data`` and ``HeteroData`` as a ``Dataset`` that shares their memory.

The checks of ``trainer.data.build`` are not made on the arrays.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.data.dataset import Dataset, EdgeData, NodeData

if TYPE_CHECKING:
    import torch
    from torch_geometric.data import Data, HeteroData

_Arrays = tuple[dict[str, Array], frozenset[str]]  #: arrays by name, and the names of those with the bits of bfloat16


def dataset_of(data: Data | HeteroData, name: str, time_attrs: tuple[str, ...] = ("time",)) -> Dataset:
    """Wrap ``data`` as a ``Dataset`` that shares its tensors (CUDA tensors are copied to host memory).

    PyG's own rules decide whether an attribute belongs to nodes or edges. A boolean ``<split>_mask`` [N] is both an
    attribute and a split; a mask of another length causes a warning. Attributes that are not dense tensors are ignored.
    An attribute named in ``time_attrs`` is used as a time if it has one integer per node in each node type that has it.

    Edges are read from ``edge_index`` or, if it is missing, from ``adj_t``. An edge type with neither has no edges.
    Raises ``DataError`` if a type without edges has edge attributes, or an edge type begins or ends at an unknown type.
    """
    from torch_geometric.data import HeteroData

    nodes: dict[NodeType, NodeData] = {}
    edges: dict[EdgeType, EdgeData] = {}
    hetero = isinstance(data, HeteroData)
    for store in data.node_stores:
        found = store.num_nodes
        if found is None:
            raise DataError(f"{name}: the number of nodes{_of(store)} is unknown; set num_nodes")
        num_nodes = int(found)
        had_num_nodes = "num_nodes" in store
        store.num_nodes = num_nodes  # PyG prints a warning if it has to infer the number of nodes
        try:
            for key in store:
                store.is_node_attr(key)
        finally:
            if not had_num_nodes:
                del store["num_nodes"]
        for key, value in store.items():
            if not (key.endswith("_mask") and _is_dense(value) and value.dim() and str(value.dtype) == "torch.bool"):
                continue
            if not (store.is_node_attr(key) or store.is_edge_attr(key)):
                warnings.warn(
                    f"{name}: {key}{_of(store)} has {len(value)} entries, but the graph has {num_nodes} nodes: it is "
                    "not used as a split",
                    stacklevel=3,
                )
        attrs, bfloat16 = _arrays(
            {key: value for key, value in store.items() if _by_row(key, value, store, edges=False)}
        )
        masks = {key: mask for key, mask in attrs.items() if key.endswith("_mask") and mask.dtype.kind == "b"}
        full = {key.removesuffix("_mask"): mask for key, mask in masks.items() if mask.shape == (num_nodes,)}
        splits = {key: mask.nonzero()[0] for key, mask in full.items()}
        y, num_classes = None if "y" in bfloat16 else attrs.get("y"), 0
        if y is not None and y.ndim == 1 and y.dtype.kind in "iu" and len(y) and int(y.min()) >= -1:
            num_classes = int(y.max()) + 1
        of = store._key if hetero else HOMO_NODE
        nodes[of] = NodeData(num_nodes, attrs, splits, num_classes, bfloat16)
    for store in data.edge_stores:
        attrs, bfloat16 = _arrays(
            {key: value for key, value in store.items() if _by_row(key, value, store, edges=True)}
        )
        edges[store._key if hetero else HOMO_EDGE] = EdgeData(_edge_index(store, name), attrs, bfloat16)
    for of in edges:
        for end in (of[0], of[2]):
            if end not in nodes:
                raise DataError(
                    f"{name}: edge type {of} ends at {end!r}, which has no nodes; set data[{end!r}].num_nodes"
                )
    store = data._global_store if hetero else data._store
    of_graph = {
        key: value
        for key, value in store.items()
        if key != "edge_index" and _is_dense(value) and str(value.dtype) != "torch.bfloat16"
        and (hetero or not (_by_row(key, value, store, edges=False) or _by_row(key, value, store, edges=True)))
    }  # fmt: skip
    graph_attrs, _ = _arrays(of_graph)
    times = []
    for attr in time_attrs:
        found = [data.attrs[attr] for data in nodes.values() if attr in data.attrs and attr not in data.bfloat16]
        if found and all(values.ndim == 1 and values.dtype.kind in "iu" for values in found):
            times.append(attr)
    return Dataset(name, nodes, edges, "in memory", hetero, graph_attrs, tuple(times))


def shared_array(tensor: torch.Tensor) -> Array:
    """Return a numpy view of a tensor. A bfloat16 tensor becomes uint16 with the same bits.

    Raises ``TypeError`` for a tensor whose dtype numpy does not have.
    """
    import torch

    tensor = tensor.detach().cpu()
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _edge_index(store: Any, name: str) -> Array:
    """Return the edges of an edge type, [2, E]. Edges from ``adj_t`` are in the order of its rows (targets).

    ``adj_t`` is a torch_sparse ``SparseTensor`` or a sparse torch tensor. Repeated entries of a torch tensor are merged
    unless its layout is CSR.
    """
    import torch

    if "edge_index" in store:
        return shared_array(store.edge_index)
    if "adj_t" in store:
        adj_t = store.adj_t
        if not isinstance(adj_t, torch.Tensor):
            targets, sources, _ = adj_t.coo()
            return np.stack([shared_array(sources), shared_array(targets)])
        csr = adj_t if adj_t.layout == torch.sparse_csr else adj_t.to_sparse_csr()
        counts = shared_array(csr.crow_indices().diff())
        targets = np.repeat(np.arange(len(counts)), counts)
        return np.stack([shared_array(csr.col_indices()).astype(np.int64), targets])
    if attrs := [key for key in store if store.is_edge_attr(key)]:
        raise DataError(f"{name}: no edge_index{_of(store)}, but an edge attribute {attrs[0]}")
    return np.empty((2, 0), np.int64)


def _of(store: Any) -> str:
    return "" if store._key is None else f" of {store._key!r}"


def _by_row(key: str, value: Any, store: Any, edges: bool) -> bool:
    if key == "edge_index" or not _is_dense(value) or value.dim() == 0:
        return False
    along = store._parent().__cat_dim__(key, value, store)
    if not isinstance(along, int) or along % value.dim() != 0:
        return False  # not indexed along its first dimension, such as [2, E]
    return bool(store.is_edge_attr(key) if edges else store.is_node_attr(key))


def _is_dense(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _arrays(tensors: Mapping[str, torch.Tensor]) -> _Arrays:
    arrays: dict[str, Array] = {}
    for key, tensor in tensors.items():
        try:
            arrays[key] = shared_array(tensor)
        except TypeError:
            continue  # numpy has no such dtype (float8, quantized)
    return arrays, frozenset(key for key in arrays if str(tensors[key].dtype) == "torch.bfloat16")
