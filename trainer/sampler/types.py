"""What flows between the stages of sampling.

Node ids are global ids of their node type, edge ids global ids of their edge type: both are
contiguous per part, so a ``PartitionBook`` says who owns a node or an edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.store.manifest import EdgeSpec, NodeSpec


class GraphSchema(Protocol):
    """The types of a graph; a ``Manifest`` is one."""

    @property
    def nodes(self) -> Mapping[NodeType, NodeSpec]: ...

    @property
    def edges(self) -> Mapping[EdgeType, EdgeSpec]: ...


@dataclass(frozen=True)
class TimeBound:
    """Only edges whose time is at most the asking row's may be taken."""

    times: Ids  #: int64 [n] latest time of each row
    attr: str  #: integer attribute
    on: Literal["node", "edge"]  #: of the edge's source node, or of the edge itself
    last: bool = False  #: take the latest ones instead of drawing; among equals the later edge


@dataclass(frozen=True)
class HopRequest:
    """Ask for in-edges of ``nodes`` by one edge type; a pure function of its fields and the graph.

    Row i draws with the key of (``key``, original id of ``nodes[i]``, ``trees[i]`` where given).
    Candidates are its edges that pass ``bound``, ``exclude``, ``sources`` and, with ``weight``, have a
    weight above 0, in original edge order.
    """

    edge_type: EdgeType
    nodes: Ids  #: int64 [n] global ids of the edge type's target type
    fanout: int  #: edges per row; -1 takes all candidates
    shuffle: int  #: how many leading picks must be in drawn order (a later hop may want a prefix)
    key: int  #: uint64: ``rng.batch_key(...)``, salted with ``schema.edge_salt(edge_type)``
    replace: bool = False
    with_edge: bool = False  #: bring edge ids too
    trees: Ids | None = None  #: int64 [n] which subgraph a row belongs to (disjoint sampling)
    bound: TimeBound | None = None
    weight: str | None = None  #: float or integer edge attribute: the chance of an edge goes with it
    exclude: tuple[Ids, Ids] | None = None  #: (targets, sources) int64 [m]: edges between them do not exist
    sources: Ids | None = None  #: int64, ascending: only edges from these (induced subgraphs)


@dataclass(frozen=True)
class HopSample:
    """The edges found, grouped by target in request order."""

    counts: npt.NDArray[np.int32]  #: int32 [n] edges taken per row
    src: Array  #: int32|int64 [counts.sum()] global ids of sources
    edge: Array | None  #: int32|int64 [counts.sum()] global ids of edges, if asked for


@dataclass(frozen=True)
class RowRequest:
    """Ask for rows of attributes of nodes or edges of one type.

    Besides the dataset's attributes nodes have ``orig_id`` and ``in_degree`` (over all edge types that
    end there), edges have ``orig_id``; all int64.
    """

    of: AnyType
    ids: Ids  #: int64 [n] global ids
    attrs: tuple[str, ...]


@dataclass(frozen=True)
class EdgeList:
    """Edges of one type, in no particular order."""

    src: Ids  #: int64 [e] global ids
    dst: Ids  #: int64 [e] global ids
    orig_id: Ids  #: int64 [e] original edge ids


class GraphAccess(Protocol):
    """What samplers and loaders need of a graph, local, remote or both. All methods are thread-safe.

    All raise ``ServiceError`` when an owner does not answer, and ``PartitionError`` for an unknown
    type or attribute, or an id nobody owns.
    """

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """The answers to several requests, in order; one message per owner for all of them."""

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        """For each request, attribute name -> [n, …] in stored dtype; one message per owner."""

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        """Whether there is an edge ``src[i]`` -> ``dst[i]``: bool [n]."""

    def edge_list(self, edge_type: EdgeType) -> EdgeList:
        """All edges of a type. Memory: 24 bytes an edge."""
