"""All nodes of all types in one row, so that one graph can be cut: type after type, original ids ascending."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.schema import NodeType
from trainer.data.dataset import Dataset
from trainer.data.edges import joint_adjacency

Part = npt.NDArray[np.int32]


@dataclass(frozen=True)
class JoinedNodes:
    """Where the nodes of each type begin in the row."""

    starts: Mapping[NodeType, int]
    total: int

    @classmethod
    def of(cls, dataset: Dataset) -> JoinedNodes:
        starts, total = {}, 0
        for node_type, nodes in dataset.nodes.items():
            starts[node_type] = total
            total += nodes.num_nodes
        return cls(starts, total)

    def split(self, values: Array) -> dict[NodeType, Array]:
        """Views of an array over all nodes, type by type."""
        ends = [*list(self.starts.values())[1:], self.total]
        return {of: values[start:end] for (of, start), end in zip(self.starts.items(), ends, strict=True)}


def joined_adjacency(dataset: Dataset, joined: JoinedNodes) -> tuple[Array, Array]:
    """CSR over all nodes: every edge of every type in both directions, without self loops and duplicates.

    Returns ``indptr`` int64 [total + 1] and ``neighbours`` int32|int64 [nnz].
    """
    lists = [(edges.edge_index, joined.starts[of[0]], joined.starts[of[2]]) for of, edges in dataset.edges.items()]
    return joint_adjacency(lists, joined.total, np.int32 if joined.total < 2**31 else np.int64)
