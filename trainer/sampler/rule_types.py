"""The rules that choose neighbours, other than draws among the in-edges. Imported by settings, without numpy."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from trainer.core.schema import EdgeType

Direction: TypeAlias = Literal["in", "out", "both"]


class PPR(msgspec.Struct, frozen=True, tag="ppr"):
    """The rule that neighbours are the nodes with the highest personalised PageRank.

    The PageRank of a node is the probability that a walk from the seed ends there, if it ends with probability
    ``alpha`` before each step, follows in-edges backwards, and is lost at nodes without in-edges. It is computed by
    forward push: Andersen, Chung, Lang, "Local Graph Partitioning using PageRank Vectors", FOCS 2006.
    """

    alpha: float = 0.15
    eps: float = 1e-4  #: a node is pushed while its residual is at least ``eps`` times its number of in-edges
    edge_types: tuple[EdgeType, ...] = ()  #: edges that the walk follows; empty: all
    #: ``in``: follow edges from target to source, ``out``: from source to target, along reverse edges of the graph;
    #: None: all of ``edge_types`` from target to source, reverse edges among them
    direction: Direction | None = None
    loops: bool = False  #: whether the seed, usually of the highest score, is one of its own neighbours

    name: ClassVar = "ppr"


class Walks(msgspec.Struct, frozen=True, tag="walks"):
    """The rule that neighbours are the nodes that random walks with restart visit most often.

    Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems" (PinSAGE), KDD 2018.
    """

    num_walks: int = 50  #: per seed
    length: int = 4  #: steps of each walk, or traversals of ``metapath``
    restart: float = 0.15  #: probability that a walk returns to the seed before a step
    metapath: tuple[EdgeType, ...] = ()  #: edge types of one step, seed outwards; needed if the graph has several
    loops: bool = False  #: whether the seed is one of its own neighbours, if a walk meets it again

    name: ClassVar = "walks"


Rule: TypeAlias = PPR | Walks  #: how neighbours are chosen, other than drawn among the in-edges
