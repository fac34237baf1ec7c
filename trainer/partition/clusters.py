"""Divides each part into clusters for Cluster-GCN (Chiang et al., 2019), by METIS on the edges within the part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.memory import size_text
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.cut import relabel
from trainer.partition.methods.assign import PartitionAssignment, assign_parts
from trainer.partition.methods.metis import metis_memory

CLUSTER = "cluster"  #: name of the node attribute


def with_clusters(
    dataset: Dataset, assignment: PartitionAssignment, clusters: int, memory: int | None = None
) -> Dataset:  # fmt: skip
    """Divide each part into ``clusters`` clusters, and add the cluster of each node as attribute `cluster`, int32 [N].

    Part p has the clusters p * clusters to (p + 1) * clusters - 1, some of which may be empty. Raises
    ``PartitionError`` when a node type already has an attribute of this name, and when METIS needs more than ``memory``
    bytes for the edges within a part.
    """
    for of, nodes in dataset.nodes.items():
        if CLUSTER in nodes.attrs:
            raise PartitionError(f"dataset {dataset.name}: {of!r} has an attribute {CLUSTER!r} already; rename it")
    found = {of: np.zeros(nodes.num_nodes, np.int32) for of, nodes in dataset.nodes.items()}
    labels = {of: relabel(part, assignment.num_parts) for of, part in assignment.parts.items()}
    for part_id in range(assignment.num_parts):
        own = {of: NodeData(len(label.owned(part_id))) for of, label in labels.items()}
        edges, num_nodes, num_edges = {}, sum(data.num_nodes for data in own.values()), 0
        for edge_type, data in dataset.edges.items():  # the edges within the part
            source, target = (labels[end].global_id for end in (edge_type[0], edge_type[2]))
            source_range, target_range = (
                labels[end].offsets[part_id : part_id + 2] for end in (edge_type[0], edge_type[2])
            )
            sources, targets = data.edge_index
            count = _count_inner(sources, targets, source, target, source_range, target_range)
            num_edges += count
            if memory is not None and (needed := metis_memory(num_nodes, num_edges)) > memory:
                raise PartitionError(
                    f"dataset {dataset.name}: METIS needs about {size_text(needed)} to divide part {part_id} into "
                    f"clusters, but data.partition.memory (--memory) leaves {size_text(memory)}; raise it, or make "
                    "more parts"
                )
            inner = np.empty((2, count), source.dtype)
            _fill_inner(sources, targets, source, target, source_range, target_range, inner)
            edges[edge_type] = EdgeData(inner)
        graph = Dataset(dataset.name, own, edges, dataset.fingerprint, dataset.hetero)
        if num_nodes:
            divided = assign_parts(graph, min(clusters, num_nodes), "metis", assignment.seed, balance="nodes")
            for of, cluster in divided.parts.items():
                found[of][labels[of].owned(part_id)] = part_id * clusters + cluster
    more = {of: replace(data, attrs={**data.attrs, CLUSTER: found[of]}) for of, data in dataset.nodes.items()}
    return replace(dataset, nodes=more)


@njit()
def _count_inner(sources: Array, targets: Array, source: Array, target: Array, src: Ids, dst: Ids) -> int:
    count = 0
    for edge in range(len(sources)):
        count += src[0] <= source[sources[edge]] < src[1] and dst[0] <= target[targets[edge]] < dst[1]
    return count


@njit()
def _fill_inner(sources: Array, targets: Array, source: Array, target: Array, src: Ids, dst: Ids, inner: Array) -> None:
    end = 0
    for edge in range(len(sources)):
        low, high = source[sources[edge]], target[targets[edge]]
        if src[0] <= low < src[1] and dst[0] <= high < dst[1]:
            inner[0, end] = low - src[0]
            inner[1, end] = high - dst[0]
            end += 1
