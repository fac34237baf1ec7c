"""What is sampled around seeds: the settings, the seeds, and the subgraph as ids only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Ids, read_only
from trainer.core.schema import EdgeType, NodeType
from trainer.sampler import neighbor

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
class Rows:
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
    whole: Rows | None = None

    def dst(self) -> Positions:
        """Target of each edge, int32 [e]; only where every node was asked once."""
        return np.repeat(np.arange(len(self.row_count), dtype=np.int32), self.row_count)

    def ends(self) -> npt.NDArray[np.int64]:
        """Source and target of each edge, int64 [2, e]; only where every node was asked once."""
        found: npt.NDArray[np.int64] = slabs.empty((2, len(self.src)), np.int64)
        neighbor.write_ends(read_only(self.src), read_only(self.row_count), found)
        return found


@dataclass(frozen=True)
class SampledSubgraph:
    """Nodes and edges of every type of the graph, sampled or not (then empty)."""

    num_hops: int
    nodes: Mapping[NodeType, NodeSet]
    edges: Mapping[EdgeType, EdgeSet]
    induced: bool = False  #: the edges are all those between the nodes
