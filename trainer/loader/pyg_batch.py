"""Makes torch_geometric's batches from sampled subgraphs and gathered attributes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader.utils import (
    filter_custom_hetero_store,
    filter_custom_store,
    filter_data,
    filter_hetero_data,
)
from torch_geometric.sampler import SamplerOutput

from trainer.core import slabs
from trainer.core.arrays import Array, Columns, Ids
from trainer.core.batch import Block
from trainer.core.compiled import njit
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.loader.block_loader import as_label
from trainer.loader.node_seeds import checked_ids
from trainer.sampler.subgraph_sampler import SampledBatch
from trainer.sampler.types import EdgeSet, NodeSet, RowRequest
from trainer.store.manifest import AttrSpec

if TYPE_CHECKING:
    from torch_geometric.sampler import HeteroSamplerOutput

Output: TypeAlias = "SamplerOutput | HeteroSamplerOutput"


def sampler_output(sampled: SampledBatch, hetero: bool, induced: bool, copy_ids: bool) -> Output:
    """Return a subgraph as torch_geometric's sampler output.

    Nodes are original ids; ends of edges are batch positions. ``induced``: leave out the numbers of nodes and edges per
    hop, which induced subgraphs do not have. ``copy_ids``: copy the ids, so that a transform may overwrite them.
    """
    from torch_geometric.sampler import HeteroSamplerOutput, SamplerOutput  # slow, and not needed for blocks

    subgraph, rows = sampled.subgraph, sampled.rows
    node = {of: _original_ids(rows[of], copy_ids) for of in subgraph.nodes}
    edge = {of: _original_ids(rows[of], copy_ids) for of in subgraph.edges if of in rows}
    ends = {of: torch.from_numpy(edges.ends()) for of, edges in subgraph.edges.items()}
    row, col = ({of: both[end] for of, both in ends.items()} for end in (0, 1))
    batch = {of: _as_int64(n.tree) for of, n in subgraph.nodes.items() if n.tree is not None}
    num_nodes, num_edges = None, None
    if not induced:
        num_nodes, num_edges = _per_hop(subgraph.nodes), _per_hop(subgraph.edges)
    if hetero:
        return HeteroSamplerOutput(node, row, col, edge, batch or None, num_nodes, num_edges)
    return SamplerOutput(
        node[HOMO_NODE], row[HOMO_EDGE], col[HOMO_EDGE], edge.get(HOMO_EDGE), batch.get(HOMO_NODE),
        num_nodes and num_nodes[HOMO_NODE], num_edges and num_edges[HOMO_EDGE],
    )  # fmt: skip


class LazyBlocks(Sequence[Any]):
    """The blocks of a batch, first layer first. They are made when they are first read: few models need them."""

    def __init__(self, num_layers: int, make: Callable[[], tuple[Any, ...]]):
        self._num_layers, self._make = num_layers, make

    @cached_property
    def _blocks(self) -> tuple[Any, ...]:
        return self._make()

    def __len__(self) -> int:
        return self._num_layers

    def __getitem__(self, layer: Any) -> Any:
        return self._blocks[layer]

    def __reduce__(self) -> Any:
        return tuple, (self._blocks,)

    def to(self, device: Any, non_blocking: bool = False) -> LazyBlocks:
        """Return blocks that are copied to a device when they are first read."""

        def moved(layer: Any) -> Any:
            if isinstance(layer, Block):
                return layer.to(device, non_blocking)
            return {of: block.to(device, non_blocking) for of, block in layer.items()}

        return LazyBlocks(self._num_layers, lambda: tuple(map(moved, self._blocks)))


def edge_index(row: Tensor, col: Tensor) -> Tensor:
    """Return the edges as one tensor [2, e], without a copy if ``row`` and ``col`` are the rows of one tensor."""
    whole = row._base
    if whole is None or whole is not col._base or whole.shape != (2, len(row)) or len(col) != len(row):
        return torch.stack([row, col])
    same_memory = all(part.data_ptr() == of.data_ptr() for part, of in zip((row, col), whole, strict=True))
    return whole if same_memory and whole.is_contiguous() else torch.stack([row, col])


def sort_edges(out: Output, of: EdgeType | None, by_source: bool = False) -> None:
    """Sort the edges of one type (None: the only type) by target, then by source. Multi-edges keep their order.

    With ``by_source`` they are sorted by source, then by target.
    """
    row, col, edge = (each.get(of) if isinstance(each, dict) else each for each in (out.row, out.col, out.edge))
    if row is None or col is None:
        return
    first, second = (row, col) if by_source else (col, row)
    found: Ids | None = None  # the permutation that sorts the edges; None while they are sorted already
    for keys in (second.numpy(), first.numpy()):
        ordered = keys if found is None else keys[found]
        if (ordered[1:] < ordered[:-1]).any():
            initial = np.arange(len(keys)) if found is None else found
            found = _counting_sort(keys, initial, np.zeros(int(keys.max()) + 2, np.int64), np.empty_like(initial))
    if found is None:
        return
    order = torch.from_numpy(found)
    ends, ids = torch.stack([row, col])[:, order], None if edge is None else edge[order]
    if of is None:
        (out.row, out.col), out.edge = ends, ids
        return
    out.row[of], out.col[of] = ends
    if out.edge is not None:
        out.edge[of] = ids


@njit()
def _counting_sort(keys: Any, order: Any, begin: Any, sorted_: Any) -> Any:
    """Sort the indices ``order`` by their ``keys`` (stable), write them to ``sorted_``, and return ``sorted_``.

    ``begin``: zeros [number of possible keys + 1], overwritten.
    """
    for k in range(len(keys)):
        begin[keys[k] + 1] += 1
    for key in range(1, len(begin)):
        begin[key] += begin[key - 1]
    for k in range(len(order)):
        key = keys[order[k]]
        sorted_[begin[key]] = order[k]
        begin[key] += 1
    return sorted_


def _original_ids(rows: Mapping[str, Array], copy_ids: bool) -> Tensor:
    ids = rows["orig_id"]
    return _as_int64(ids) if copy_ids or ids.dtype != np.int64 or not ids.flags.writeable else torch.from_numpy(ids)


def _as_int64(array: Array) -> Tensor:
    return torch.from_numpy(slabs.cast(array, np.int64))


def _per_hop(sets: Mapping[Any, NodeSet] | Mapping[Any, EdgeSet]) -> dict[Any, list[int]]:
    return {of: list(members.per_hop) for of, members in sets.items()}


Join = Callable[[Output, SampledBatch], Any]

Attrs = Mapping[AnyType, tuple[str, ...]]


def join_of(graph: Graph, attrs: Attrs, custom_cls: Callable[[], Any] | None) -> Join:
    """Return the function that converts a sampler output to a batch, and adds the attributes of its nodes and edges."""
    if isinstance(graph.source, (Data, HeteroData)):
        return _MemoryJoin(graph.source)
    if graph.source is not None:
        return lambda out, _: _join_stores(graph.source, out, custom_cls)
    return _PartitionJoin(graph, attrs, custom_cls)


def _join_stores(stores: Any, out: Output, custom_cls: Callable[[], Any] | None) -> Any:
    homo = isinstance(out, SamplerOutput)
    join = filter_custom_store if homo else filter_custom_hetero_store
    return join(*stores, out.node, out.row, out.col, out.edge, custom_cls)


class _MemoryJoin:
    """Makes batches with the attributes of data in memory, by torch_geometric's ``filter_data``."""

    def __init__(self, data: Data | HeteroData):
        types = [store._key for store in data.edge_stores if isinstance(store.get("adj_t"), Tensor)]
        self._data = copy.copy(data) if types else data
        self._values: dict[EdgeType | None, Tensor] = {}
        for of in types:
            store = _edge_store(self._data, of)
            self._values[of] = store.pop("adj_t").to_sparse_csr().values()
            store.edge_index = torch.empty((2, len(self._values[of])), dtype=torch.int64)

    def __call__(self, out: Output, _: SampledBatch) -> Any:
        for of in self._values:
            sort_edges(out, of)
        filtered = filter_data if isinstance(out, SamplerOutput) else filter_hetero_data
        data = filtered(self._data, out.node, out.row, out.col, out.edge, None)
        for of, values in self._values.items():
            edge = out.edge if of is None or out.edge is None else out.edge.get(of)
            col, row = _edge_store(data, of).pop("edge_index")
            size = [len(out.node if of is None else out.node[end]) for end in ((0, 0) if of is None else of[::-2])]
            ptr = torch.from_numpy(np.searchsorted(row.numpy(), np.arange(size[0] + 1)))
            own = (
                torch.ones(len(row)) if edge is None else values[edge]
            )  # edges that were added to be bidirectional have no value
            _edge_store(data, of).adj_t = torch.sparse_csr_tensor(ptr, col.contiguous(), own, size)
        return data


def _edge_store(data: Data | HeteroData, of: EdgeType | None) -> Any:
    return data._store if of is None else data[of]


class _PartitionJoin:
    """Makes batches with the attributes that the sampler gathered from a partition.

    If a transform changed the nodes or edges, the rows of the attributes are selected accordingly.
    """

    def __init__(self, graph: Graph, attrs: Attrs, custom_cls: Callable[[], Any] | None):
        self._graph, self._attrs, self._custom_cls = graph, attrs, custom_cls
        if not graph.manifest.hetero:
            names = ["edge_index", *graph.manifest.graph_attrs, *attrs[HOMO_NODE], *attrs[HOMO_EDGE]]
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise SettingsError(
                    f"{twice[0]!r} is the name of two attributes (of nodes, edges or the graph), but a batch can have"
                    " only one of this name; rename one, or choose attributes by"
                    f" attrs={{{HOMO_NODE!r}: [...], {HOMO_EDGE!r}: [...]}}"
                )
        specs, arrays = graph.manifest.graph_attrs, graph.store.graph_attrs
        self._graph_attrs = {name: as_tensor(np.array(arrays[name]), spec) for name, spec in specs.items()}

    def __call__(self, out: Output, sampled: SampledBatch) -> Any:
        homo = isinstance(out, SamplerOutput)
        data = (self._custom_cls or (Data if homo else HeteroData))()
        for name, value in self._graph_attrs.items():
            setattr(data, name, value)
        if homo:
            self._edges(data, HOMO_EDGE, out.row, out.col, out.edge, sampled)
            self._nodes(data, HOMO_NODE, out.node, sampled)
            return data
        for node_type in self._graph.manifest.nodes:
            self._nodes(data[node_type], node_type, out.node.get(node_type, _no_ids()), sampled)
        for edge_type in self._graph.manifest.edges:
            row, col = out.row.get(edge_type, _no_ids()), out.col.get(edge_type, _no_ids())
            self._edges(data[edge_type], edge_type, row, col, (out.edge or {}).get(edge_type), sampled)
        return data

    def _nodes(self, to: Any, of: NodeType, node: Tensor, sampled: SampledBatch) -> None:
        wanted, rows = node.numpy(), sampled.rows[of]
        if (at := _places_of(wanted, rows["orig_id"])) is not None:
            rows = _take(rows, at)
        else:  # a transform added nodes: all are requested from the graph again
            ids = checked_ids(wanted, self._graph.manifest.nodes[of].num_nodes, of, "nodes of transform_sampler_output")
            request = RowRequest(of, self._graph.store.to_global(of, ids), self._attrs[of])
            (rows,) = self._graph.access.gather([request])
        for name in self._attrs[of]:
            values = as_tensor(rows[name], self._spec(of, name))
            to[name] = as_label(values) if name == "y" else values
        to.num_nodes = len(node)

    def _edges(
        self, to: Any, of: EdgeType, row: Tensor, col: Tensor, edge: Tensor | None, sampled: SampledBatch
    ) -> None:
        to.edge_index = edge_index(row, col)
        rows = None if edge is None or not self._attrs[of] else self._rows_of_edges(of, edge, sampled)
        for name in self._attrs[of]:  # as in torch_geometric, edges without ids have no attributes
            to[name] = None if rows is None else as_tensor(rows[name], self._spec(of, name))

    def _spec(self, of: AnyType, name: str) -> AttrSpec:
        return self._graph.manifest.attrs_of(of)[name]

    @staticmethod
    def _rows_of_edges(of: EdgeType, edge: Tensor, sampled: SampledBatch) -> Columns:
        rows = sampled.rows[of]
        if (at := _places_of(edge.numpy(), rows["orig_id"])) is None:
            raise SettingsError(
                f"transform_sampler_output returned edges of {of} that were not sampled, so attributes are unknown;"
                " return only sampled edges, or an output with edge=None for batches without edge attributes"
            )
        return _take(rows, at)


def _places_of(wanted: Array, ids: Array) -> Array | slice | None:
    """Return the positions of ``wanted`` in ``ids``, a full slice if both are equal, or None if an id is missing."""
    memory, other = ((each.ctypes.data, each.shape, each.strides, each.dtype) for each in (wanted, ids))
    if memory == other or np.array_equal(wanted, ids):
        return slice(None)
    if len(ids) == 0:
        return None if len(wanted) else slice(0)
    order = np.argsort(ids, kind="stable")
    at = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    return at if np.array_equal(ids[at], wanted) else None


def _take(rows: Columns, at: Array | slice) -> Columns:
    return {name: values[at] for name, values in rows.items()}


def _no_ids() -> Tensor:
    return torch.empty(0, dtype=torch.int64)
