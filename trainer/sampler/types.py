"""Types that flow between the stages of sampling: requests, hops, seeds, subgraphs.

Node ids are global ids of their node type, edge ids global ids of their edge type: both are
contiguous per part, so a ``PartitionBook`` says who owns a node or an edge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler import neighbor_kernels
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
    """Requests rows of attributes of nodes or edges of one type.

    Besides the dataset's attributes, nodes have ``orig_id`` and ``in_degree`` (over all edge types that end at them),
    and edges have ``orig_id``; all int64.

    Args:
        of: Node type or edge type.
        ids: Global ids.
        attrs: Names of the attributes.

    Shapes:
        - ``ids``: int64 ``[n]``
        - answer: a mapping of each name to an array ``[n, ...]`` in the stored dtype

    Example:
        ```python
        import gnnfleet as gf
        import numpy as np

        graph = gf.open("parts")
        nodes = graph.store.to_global("node", np.array([0, 1, 2]))
        (rows,) = graph.access.gather([gf.RowRequest("node", nodes, ("x",))])
        ```
    """

    of: AnyType
    ids: Ids
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


Positions = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TimeRule:
    """Temporal sampling: never an edge later than the seed of its tree."""

    attr: str  #: integer attribute
    on: Literal["node", "edge"]
    last: bool = False  #: the latest neighbours rather than drawn ones


@dataclass(frozen=True)
class SampleSettings:
    """How neighbours are drawn; checked against the graph by ``multi_hop.check_settings``."""

    fanouts: Mapping[EdgeType, tuple[int, ...]]  #: seeds outward, -1 takes all; every edge type has as many hops
    replace: bool = False
    disjoint: bool = False  #: a tree per seed that shares no node with the others; implied by ``time``
    weight: str | None = None  #: edge attribute
    time: TimeRule | None = None
    induced: bool = False  #: all edges between the sampled nodes instead of those drawn
    edge_ids: bool = False  #: bring edge ids (PyG's view, edge features)
    #: Ask nodes again where a later hop wants more neighbours, so that ``block(hop)`` is exact for each hop. PyG's
    #: view expands every node once, where it first appears: there it is off, and blocks hold what was drawn.
    ask_again: bool = True

    @property
    def num_hops(self) -> int:
        return max((len(fanouts) for fanouts in self.fanouts.values()), default=0)


@dataclass(frozen=True)
class SeedSet:
    """The seeds of one call. Positions count through the types in the mapping's order."""

    nodes: Mapping[NodeType, Ids]  #: int64 global ids; repeats allowed
    #: int64: what a seed's draws are keyed by besides its node, when disjoint: a seed's place in the *global* batch,
    #: so that it does not matter which rank samples it.
    trees: Mapping[NodeType, Ids] = field(default_factory=dict)
    times: Mapping[NodeType, Ids] = field(default_factory=dict)  #: int64, with ``SampleSettings.time``
    exclude: Mapping[EdgeType, tuple[Ids, Ids]] = field(default_factory=dict)  #: (targets, sources) not to be used

    def without(self, exclude: Mapping[EdgeType, tuple[Ids, Ids]]) -> SeedSet:
        """The same seeds, with edges that do not exist for them."""
        return replace(self, exclude=exclude)


@dataclass(frozen=True)
class NodeSet:
    """Sampled nodes of one type, by first appearance, seeds first; a place in here is a *batch position*."""

    ids: Ids  #: int64 [n] global ids
    per_hop: tuple[int, ...]  #: [hops + 1] how many came with each hop, seeds first
    tree: Positions | None  #: int32 [n] which seed's tree (counted as in ``SeedSet``), when disjoint


@dataclass(frozen=True)
class EdgeRanges:
    """Where the edges of each target lie."""

    begin: npt.NDArray[np.int64]  #: int64 [targets]
    count: Positions  #: int32 [targets]


@dataclass(frozen=True)
class EdgeSet:
    """Sampled edges of one type, grouped by target; ids are batch positions.

    Targets are the nodes known before the last hop (all nodes, when induced); one that was not asked has no edges.
    """

    fanouts: tuple[int, ...]
    row_begin: npt.NDArray[np.int64]  #: int64 [targets] where each target's edges begin
    row_count: Positions  #: int32 [targets]
    src: Positions  #: int32 [e]
    edge: Ids | None  #: int64 [e] global edge ids, if asked for
    per_hop: tuple[int, ...]  #: [hops] how many came with each hop; () when nodes were asked again, or induced
    #: Rows of hops that take all neighbours, kept apart when the others draw with replacement: those are no prefix.
    whole: EdgeRanges | None = None

    def dst(self) -> Positions:
        """Target of each edge, int32 [e]; only where every node was asked once."""
        return np.repeat(np.arange(len(self.row_count), dtype=np.int32), self.row_count)

    def ends(self) -> npt.NDArray[np.int64]:
        """Source and target of each edge, int64 [2, e]; only where every node was asked once."""
        found: npt.NDArray[np.int64] = slabs.empty((2, len(self.src)), np.int64)
        neighbor_kernels.write_ends(read_only(self.src), read_only(self.row_count), found)
        return found


@dataclass(frozen=True)
class SampledSubgraph:
    """Nodes and edges of every type of the graph, sampled or not (then empty)."""

    num_hops: int
    nodes: Mapping[NodeType, NodeSet]
    edges: Mapping[EdgeType, EdgeSet]
    induced: bool = False  #: the edges are all those between the nodes
