"""Which part owns each node, by one of several methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.schema import EdgeType, NodeType
from trainer.data.dataset import Dataset
from trainer.partition.frequency import frequency_assignment
from trainer.partition.hashing import hash_part, random_parts
from trainer.partition.joined import JoinedNodes, Part
from trainer.partition.methods import fanouts_of, method_options
from trainer.partition.metis import metis_assignment


@dataclass(frozen=True)
class PartitionAssignment:
    """The part of every node, and how good the division is."""

    algorithm: str
    seed: int
    num_parts: int
    parts: Mapping[NodeType, npt.NDArray[np.int32]]  #: type -> [num_nodes] part of each node
    edge_cuts: Mapping[EdgeType, float]  #: fraction of these edges whose ends lie in different parts
    edge_cut: float  #: the same over all edges
    balance: float  #: most nodes of a part / mean nodes of a part, over all types
    options: Mapping[str, Any] = field(default_factory=dict)  #: what the method was told beyond the above


def assign_parts(
    dataset: Dataset, num_parts: int, method: str = "metis", seed: int = 0, **options: Any
) -> PartitionAssignment:
    """Divide the nodes into ``num_parts`` parts of about equal size, the same for equal arguments.

    `metis` cuts few edges; `frequency` has nodes where sampling visits them most; `random` balances exactly;
    `hash` depends on type, id and seed alone, so its parts may be empty, others' never. ``options`` are those
    of ``methods.method_options``. Raises ``PartitionError`` for arguments that cannot be met.
    """
    told = method_options(method, **options)
    if not 1 <= num_parts <= dataset.num_nodes:
        raise PartitionError(
            f"dataset {dataset.name}: {dataset.num_nodes} nodes cannot be divided into {num_parts} non-empty parts; "
            f"num_parts must be from 1 to the number of nodes"
        )
    joined = JoinedNodes.of(dataset)
    part = np.zeros(joined.total, np.int32)
    if num_parts > 1:
        part = _assign(dataset, joined, num_parts, method, seed, told)
    return _assignment(dataset, joined, part, num_parts, method, seed, told)


def _assign(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, method: str, seed: int, told: Mapping[str, Any]
) -> Part:
    if method == "metis":
        return metis_assignment(dataset, joined, num_parts, seed, told["balance"])
    if method == "frequency":
        fanouts = fanouts_of(told["fanouts"])
        return frequency_assignment(dataset, joined, num_parts, seed, fanouts, told["balance"])
    if method == "random":
        return random_parts(joined, num_parts, seed)
    by_type = [hash_part(of, np.arange(nodes.num_nodes), num_parts, seed) for of, nodes in dataset.nodes.items()]
    return np.concatenate(by_type)


def _assignment(
    dataset: Dataset, joined: JoinedNodes, part: Part, num_parts: int, method: str, seed: int, told: Mapping[str, Any]
) -> PartitionAssignment:
    parts = joined.split(part)
    cut = {
        of: _count_cut(edges.edge_index[0], edges.edge_index[1], parts[of[0]], parts[of[2]])
        for of, edges in dataset.edges.items()
    }
    return PartitionAssignment(
        algorithm=method,
        seed=seed,
        num_parts=num_parts,
        parts=parts,
        edge_cuts={of: count / max(dataset.edges[of].num_edges, 1) for of, count in cut.items()},
        edge_cut=sum(cut.values()) / max(dataset.num_edges, 1),
        balance=float(np.bincount(part, minlength=num_parts).max()) * num_parts / len(part),
        options=told,
    )


@njit()
def _count_cut(sources: Array, targets: Array, source_part: Array, target_part: Array) -> int:
    cut = 0
    for edge in range(len(sources)):
        cut += source_part[sources[edge]] != target_part[targets[edge]]
    return cut
