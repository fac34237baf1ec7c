"""``Dataset``, a graph in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.core.arrays import Array, Ids
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType


@dataclass(frozen=True)
class NodeData:
    num_nodes: int
    attrs: Mapping[str, Array] = field(default_factory=dict)  #: name -> [num_nodes, …], such as `x` and `y`
    splits: Mapping[str, Ids] = field(default_factory=dict)  #: name -> node ids, in the order of the source
    num_classes: int = 0  #: if > 0, `y` is integer [num_nodes], -1 = no label; 0: no `y`, or not class labels
    bfloat16: frozenset[str] = frozenset()  #: attributes stored as uint16 with the bits of bfloat16


@dataclass(frozen=True)
class EdgeData:
    edge_index: Array  #: int32|int64 [2, E]; row 0: sources, row 1: targets; messages flow from source to target
    attrs: Mapping[str, Array] = field(default_factory=dict)  #: name -> [E, …]: features, weights, times
    bfloat16: frozenset[str] = frozenset()  #: attributes stored as uint16 with the bits of bfloat16

    @property
    def num_edges(self) -> int:
        return int(self.edge_index.shape[1])


@dataclass(frozen=True)
class Dataset:
    """One graph. Its arrays may be memory-mapped and are treated as read-only."""

    name: str
    nodes: Mapping[NodeType, NodeData]
    edges: Mapping[EdgeType, EdgeData]
    fingerprint: str  #: sha256 of the name, the options, and the sizes and mtimes of the source files
    hetero: bool = False  #: False: the only types are HOMO_NODE and HOMO_EDGE
    graph_attrs: Mapping[str, Array] = field(default_factory=dict)  #: arrays that belong to the graph as a whole
    time_attrs: tuple[str, ...] = ("time",)  #: node attributes with integer times, for temporal sampling
    notes: tuple[str, ...] = ()  #: messages to the user about reading the source, such as arrays left out

    @classmethod
    def homogeneous(cls, name: str, nodes: NodeData, edges: EdgeData, fingerprint: str, **more: Any) -> Dataset:
        return cls(name, {HOMO_NODE: nodes}, {HOMO_EDGE: edges}, fingerprint, **more)

    @property
    def num_nodes(self) -> int:
        return sum(data.num_nodes for data in self.nodes.values())

    @property
    def num_edges(self) -> int:
        return sum(data.num_edges for data in self.edges.values())


def is_time(values: Array, bfloat16: bool) -> bool:
    """Return whether ``values`` are integers below 2**63 of shape [N] or [N, 1].

    ``bfloat16``: whether ``values`` are the bits of bfloat16 numbers, for which the result is False.
    """
    integers = values.dtype.kind in "iu" and not bfloat16 and not (values.size and int(values.max()) >= 2**63)
    return integers and (values.ndim == 1 or values.shape[1:] == (1,))
