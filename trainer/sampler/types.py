"""Data types of sampling: requests to a graph, answers, seeds and subgraphs.

Node ids are global ids of their node type, edge ids are global ids of their edge type.

Where a CUDA device samples, requests, answers and subgraphs contain torch tensors in place of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler import neighbor_kernels
from trainer.sampler.array_ops import NUMPY, ArrayOps
from trainer.sampler.rule_types import Rule
from trainer.store.manifest import EdgeSpec, NodeSpec


class GraphSchema(Protocol):
    """Node types and edge types of a graph. ``Manifest`` implements this protocol."""

    @property
    def nodes(self) -> Mapping[NodeType, NodeSpec]: ...

    @property
    def edges(self) -> Mapping[EdgeType, EdgeSpec]: ...


@dataclass(frozen=True)
class TimeBound:
    """Restricts the sampled edges of a request: the edges of node i must not be later than ``times[i]``."""

    times: Ids  #: int64 [n] latest time for each node
    attr: str  #: integer attribute
    on: Literal["node", "edge"]  #: whether an edge has the time of its source node, or its own
    last: bool = False  #: return the latest edges instead of drawing; of edges with equal times, the last


@dataclass(frozen=True)
class HopRequest:
    """A request to sample neighbours of ``nodes`` by in-edges of one type.

    The answer depends only on these fields and the graph. The random numbers for ``nodes[i]`` depend on ``key``, on the
    node's original id and, if given, on ``trees[i]``. Candidates are the in-edges, in original order, that ``bound``,
    ``exclude`` and ``sources`` allow; with ``weight``, only those of weight above 0.
    """

    edge_type: EdgeType
    nodes: Ids  #: int64 [n] global ids of the edge type's target type
    fanout: int  #: edges per node; -1 takes all candidates
    shuffle: int  #: number of leading edges that must be in the order of drawing, as a later hop may use only these
    key: int  #: uint64: ``rng.batch_key(...)``, salted with ``schema.edge_salt(edge_type)``
    replace: bool = False
    with_edge: bool = False  #: also return edge ids
    trees: Ids | None = None  #: int64 [n] tree to which each node belongs (disjoint sampling)
    bound: TimeBound | None = None
    weight: str | None = None  #: float or integer edge attribute; an edge's chance is proportional to it
    top: bool = False  #: with ``weight``: return the heaviest edges instead of drawing; of equal weights, the first
    exclude: tuple[Ids, Ids] | None = None  #: (targets, sources), int64 [m] each: edges between them are not candidates
    sources: Ids | None = None  #: int64, ascending: only edges from these nodes (induced subgraphs)
    orig_edge: bool = False  #: edge ids are original ids, not global ids


@dataclass(frozen=True)
class HopSample:
    """The answer to a ``HopRequest``: edges grouped by target, targets in request order."""

    counts: npt.NDArray[np.int32]  #: int32 [n] number of edges per node
    src: Array  #: int32|int64 [counts.sum()] global ids of sources
    edge: Array | None  #: int32|int64 [counts.sum()] ids of edges, if requested
    scores: Array | None = None  #: float32 [counts.sum()], of neighbours that a rule chose
    hops: Array | None = None  #: int8 [counts.sum()], distance at which the rule met each neighbour


@dataclass(frozen=True)
class RowRequest:
    """A request for attributes of nodes or edges of one type.

    Besides the dataset's attributes, nodes have ``orig_id``, and over all edge types ``in_degree`` and
    ``in_degree_without_loops`` (without self loops), and edges have ``orig_id``; all int64.

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


Positions = npt.NDArray[np.int32]


@dataclass(frozen=True)
class TimeRule:
    """The rule of temporal sampling: an edge in a tree must not be later than the time of the tree's seed."""

    attr: str  #: integer attribute
    on: Literal["node", "edge"]  #: whether it is an attribute of source nodes or of edges
    last: bool = False  #: return the latest neighbours instead of drawing


@dataclass(frozen=True)
class SampleSettings:
    """How neighbours are drawn. ``settings.check_settings`` checks that the settings fit a graph."""

    #: neighbours per hop, seeds outward; -1 takes all. Every edge type has the same number of hops. With ``rule``, the
    #: edge types are those of ``rules.rule_edges``.
    fanouts: Mapping[EdgeType, tuple[int, ...]]
    replace: bool = False
    disjoint: bool = False  #: a tree per seed that shares no nodes with others; implied by ``time``
    weight: str | None = None  #: edge attribute
    top: bool = False  #: with ``weight``: return the heaviest neighbours instead of drawing
    time: TimeRule | None = None
    induced: bool = False  #: return all edges between the sampled nodes instead of the drawn ones
    edge_ids: bool = False  #: return edge ids (for torch_geometric's batches and edge features)
    #: Request the neighbours of a node again if a later hop needs more of them, so that the block of each hop is exact.
    #: False for torch_geometric's batches, which expand every node only once, in the hop after it was found.
    ask_again: bool = True
    rule: Rule | None = None  #: None: neighbours are drawn among the in-edges

    @property
    def num_hops(self) -> int:
        return max((len(fanouts) for fanouts in self.fanouts.values()), default=0)


@dataclass(frozen=True)
class SeedSet:
    """The seeds of one call of the sampler, numbered consecutively over all types, in the order of ``nodes``."""

    nodes: Mapping[NodeType, Ids]  #: int64 global ids; repeats allowed
    #: int64 per seed, for disjoint sampling: the seed's place in the *global* batch. It is part of the random key of
    #: the seed's draws, which therefore do not depend on the rank.
    trees: Mapping[NodeType, Ids] = field(default_factory=dict)
    times: Mapping[NodeType, Ids] = field(default_factory=dict)  #: int64 per seed, with ``SampleSettings.time``
    exclude: Mapping[EdgeType, tuple[Ids, Ids]] = field(default_factory=dict)  #: (targets, sources) of edges to exclude

    def without(self, exclude: Mapping[EdgeType, tuple[Ids, Ids]]) -> SeedSet:
        return replace(self, exclude=exclude)


@dataclass(frozen=True)
class NodeSet:
    """The sampled nodes of one type in order of first appearance, seeds first.

    The index of a node in this order is its *batch position*.
    """

    ids: Ids  #: int64 [n] global ids
    per_hop: tuple[int, ...]  #: [hops + 1] number of new nodes per hop, seeds first
    tree: Positions | None  #: int32 [n] seed of each node's tree (counted as in ``SeedSet``), when disjoint


@dataclass(frozen=True)
class EdgeRanges:
    """The range of each target's edges in an array of edges."""

    begin: npt.NDArray[np.int64]  #: int64 [targets]
    count: Positions  #: int32 [targets]


@dataclass(frozen=True)
class EdgeSet:
    """The sampled edges of one type, grouped by target. Sources and targets are batch positions.

    Targets are the nodes found before the last hop, or all nodes in an induced subgraph.
    """

    fanouts: tuple[int, ...]
    row_begin: npt.NDArray[np.int64]  #: int64 [targets] where each target's edges begin
    row_count: Positions  #: int32 [targets]
    src: Positions  #: int32 [e]
    edge: Ids | None  #: int64 [e] edge ids, if requested: global ids, unless original ids were
    per_hop: tuple[int, ...]  #: [hops] number of edges per hop; () if nodes were requested again, or induced
    #: Rows of hops that take all neighbours, stored separately if other hops draw with replacement: such draws are not
    #: a prefix of the whole row.
    whole: EdgeRanges | None = None
    scores: npt.NDArray[np.float32] | None = None  #: float32 [e], of edges that a rule made
    hops: npt.NDArray[np.int8] | None = None  #: int8 [e], distance at which the rule met the source

    def dst(self) -> Positions:
        """Return the target of each edge, int32 [e].

        Must not be called if the neighbours of a node were requested several times (``SampleSettings.ask_again``).
        """
        return np.repeat(np.arange(len(self.row_count), dtype=np.int32), self.row_count)

    def ends(self) -> npt.NDArray[np.int64]:
        """Return the source and target of each edge, int64 [2, e].

        Must not be called if the neighbours of a node were requested several times (``SampleSettings.ask_again``).
        """
        found: npt.NDArray[np.int64] = slabs.empty((2, len(self.src)), np.int64)
        neighbor_kernels.write_ends(read_only(self.src), read_only(self.row_count), found)
        return found


@dataclass(frozen=True)
class SampledSubgraph:
    """Sampled nodes and edges of every type of the graph. Types that were not sampled are empty."""

    num_hops: int
    nodes: Mapping[NodeType, NodeSet]
    edges: Mapping[EdgeType, EdgeSet]
    induced: bool = False  #: the edges are all edges between the nodes
    ops: ArrayOps = NUMPY  #: for the kind of its arrays: numpy arrays, or tensors of a device
