"""The links of nodes, read from the edges that lead to them: all, or some that are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.errors import SettingsError
from trainer.core.rng import hashed
from trainer.core.schema import EdgeType, NodeType, edge_salt
from trainer.graph.open import Graph
from trainer.loader.link_seeds import given_or_reverse
from trainer.sampler.settings import bound_here
from trainer.sampler.types import HopRequest, RowRequest, TimeBound, TimeRule

_LINKS = int(hashed(np.uint64(1)))  #: salt of a batch's key: draws of links are independent of those of neighbours


@dataclass(frozen=True)
class Pairs:
    """Pairs of a node, which owns them, and another node. Sorted by owner."""

    owner: Ids  #: int64 [m] index of the owner
    ids: Ids  #: int64 [m] original ids of the other nodes
    times: Ids | None = None  #: int64 [m] of the edges, or of the other nodes, if they restrict the pairs

    def of(self, owners: Ids) -> Pairs:
        """Return the pairs of ``owners``, which is ascending, renumbered by their position in it."""
        own = np.isin(self.owner, owners)
        owner = np.searchsorted(owners, self.owner[own])
        return Pairs(owner, self.ids[own], None if self.times is None else self.times[own])

    def numbers(self) -> Ids:
        """Return for each pair its number among those of its owner, int64 [m]."""
        return np.arange(len(self.owner)) - np.searchsorted(self.owner, self.owner)

    def table(self, count: int, values: Array, fill: float) -> Array:
        """Return the ``values`` of the pairs, [m], as a row per owner: [count, k], with ``fill`` behind the last."""
        numbers = self.numbers()
        found = np.full((count, numbers.max(initial=-1) + 1), fill, values.dtype)
        found[self.owner, numbers] = values
        return found


def leading_type(graph: Graph, edge_type: EdgeType, owner: NodeType, other: NodeType, why: str) -> EdgeType:
    """Return the edge type that leads from ``other`` to ``owner`` nodes: ``edge_type``, or the type of its reverses.

    Between nodes of one type, ``edge_type`` begins at the owners. Raises ``SettingsError``, beginning with ``why``, if
    the graph has no such type.
    """
    if (edge_type[0], edge_type[2]) == (owner, other):
        return given_or_reverse(graph, edge_type, None, why)
    if (edge_type[2], edge_type[0]) != (owner, other):
        raise SettingsError(f"{why}: {edge_type} is not between {owner!r} and {other!r} nodes")
    return edge_type


def links_of(
    graph: Graph, leading: EdgeType, nodes: Ids, places: Ids, most: int, key: int, rule: TimeRule | None = None,
    times: Ids | None = None,
) -> Pairs:  # fmt: skip
    """Return the sources of the in-edges of nodes by one edge type, up to ``most`` per node; -1: all.

    With ``rule``, no edge is later than the ``times`` of its node, if the type has times. What is drawn depends on
    ``key``, the places, and the original ids of the nodes. Raises ``ServiceError`` and ``PartitionError``.

    ``nodes`` [n]: global ids. ``places`` [n]: places in the global batch.
    """
    bound = None
    if rule is not None and times is not None and bound_here(rule, graph.manifest.edges[leading]):
        bound = TimeBound(times, rule.attr, rule.on)
    on = None if bound is None else bound.on
    request = HopRequest(
        leading, nodes, most, 0, key ^ _LINKS ^ edge_salt(leading), with_edge=on == "edge", trees=places, bound=bound
    )
    (sample,) = graph.access.sample_hops([request])
    time = () if rule is None else (rule.attr,)
    asked = [RowRequest(leading[0], sample.src.astype(np.int64), ("orig_id", *(time if on == "node" else ())))]
    if on == "edge" and sample.edge is not None:
        asked.append(RowRequest(leading, sample.edge.astype(np.int64), time))
    rows = graph.access.gather(asked)
    found = None if rule is None or bound is None else rows[-1][rule.attr].astype(np.int64)
    return Pairs(np.repeat(np.arange(len(nodes)), sample.counts), rows[0]["orig_id"].astype(np.int64), found)
