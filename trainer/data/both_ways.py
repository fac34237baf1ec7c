"""The opposite of every edge, with attributes, for one or several edge types."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.schema import EdgeType, NodeType, type_name
from trainer.data.dataset import EdgeData
from trainer.data.edges import undirected


def both_ways(
    edges: Mapping[EdgeType, EdgeData], num_nodes: Mapping[NodeType, int], reverse_types: bool, where: str
) -> dict[EdgeType, EdgeData]:
    """Every edge type with its reverse, as torch_geometric's ``ToUndirected`` has it.

    Between two node types ``(a, r, b)`` gets ``(b, rev_r, a)``, edge by edge. Within one node type both directions
    come into the same edge type, unless ``reverse_types`` keeps them apart too.
    Raises ``DataError`` when a reverse type is there already.
    """
    result = dict(edges)
    for of, data in edges.items():
        source, relation, target = of
        if source == target and not reverse_types:
            result[of] = merged(data, num_nodes[source])
            continue
        back = (target, f"rev_{relation}", source)
        if back in result:
            raise DataError(f"{where}: {type_name(back)} is there already; leave out option undirected")
        result[back] = reverse(data)
    return result


def reverse(data: EdgeData) -> EdgeData:
    """The same edges the other way round, attributes shared."""
    return EdgeData(np.ascontiguousarray(data.edge_index[::-1]), data.attrs, data.bfloat16)


def merged(data: EdgeData, num_nodes: int) -> EdgeData:
    """Both directions of every edge, without duplicates, sorted by source then target.

    Of equal edges the first keeps its attributes, those given before those turned round: nothing is added up.
    """
    if not data.attrs:
        return EdgeData(undirected(data.edge_index, num_nodes))
    edge_index, origin = _first_of_equal(data.edge_index)
    return EdgeData(edge_index, {name: values[origin] for name, values in data.attrs.items()}, data.bfloat16)


def _first_of_equal(edge_index: Array) -> tuple[Array, Array]:
    """Coalesced edges, and the place in ``edge_index`` each one's attributes come from."""
    both = np.concatenate([edge_index, edge_index[::-1]], axis=1)
    order = np.lexsort((both[1], both[0]))  # stable, so the given direction comes first
    both = both[:, order]
    new = np.ones(both.shape[1], bool)
    new[1:] = (both[:, 1:] != both[:, :-1]).any(axis=0)
    return np.ascontiguousarray(both[:, new]), order[new] % edge_index.shape[1]
