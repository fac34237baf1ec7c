"""Method `frequency`: assigns each node to the part whose train seeds sample it most often.

A node's visit probability for a part is the probability that a batch of the part's train seeds contains the node. This
is the vertex-inclusion probability of SALIENT++ (Kaler et al., "Communication-Efficient Graph Neural Networks with
Probabilistic Neighborhood Expansion Analysis and Caching", MLSys 2023), computed here for graphs of one or several node
types. Nodes are assigned in descending order of the difference between their two highest visit probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids, read_only
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.schema import EdgeType, NodeType
from trainer.data.dataset import Dataset
from trainer.partition.methods.balance import TRAIN, JoinedNodes, Part, node_classes
from trainer.partition.methods.metis import metis_assignment, without_empty_parts

Fanouts = Sequence[int] | Mapping[EdgeType, Sequence[int]]  #: per hop, seeds outward; for all edge types, or per type

_Chances = dict[NodeType, npt.NDArray[np.float32]]  #: type -> probabilities [num_nodes]

_ALL = np.inf  #: stands for fanout -1


@dataclass(frozen=True)
class TypedInEdges:
    """The sources of each node's in-edges (CSC), per edge type."""

    num_nodes: Mapping[NodeType, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]  #: indptr int64 [targets + 1], sources int32|int64 [E]

    @classmethod
    def of(cls, dataset: Dataset) -> TypedInEdges:
        """Build the CSC of each edge type. Memory: one id per edge, and 8 bytes per target node and edge type."""
        counts = {of: nodes.num_nodes for of, nodes in dataset.nodes.items()}
        edges = {}
        for of, data in dataset.edges.items():
            sources, targets = data.edge_index
            indptr = np.zeros(counts[of[2]] + 1, np.int64)
            np.cumsum(np.bincount(targets, minlength=counts[of[2]]), out=indptr[1:])
            by_target = np.empty_like(sources)
            _fill(sources, targets, indptr[:-1].copy(), by_target)
            edges[of] = indptr, by_target
        return cls(counts, edges)


def visit_probabilities(
    graph: Dataset | TypedInEdges, seeds: Mapping[NodeType, Ids], fanouts: Fanouts, chance: float = 1.0
) -> _Chances:
    """Return the probability that each node is in a batch, for each type as float32 [num_nodes].

    The batch contains each of ``seeds`` with probability ``chance``, and sampled neighbours of them. Edges are assumed
    to be sampled independently, so the result is exact on trees and too high on cycles. Edge types without fanouts are
    not followed; weights and times are ignored. Memory: 16 bytes per node, and 8 bytes per target node and edge type.
    """
    graph = TypedInEdges.of(graph) if isinstance(graph, Dataset) else graph
    hops = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(graph.edges, tuple(fanouts))
    visited = {of: np.zeros(count, np.float32) for of, count in graph.num_nodes.items()}
    for node_type, ids in seeds.items():
        visited[node_type][ids] = chance
    fresh = {of: values.copy() for of, values in visited.items()}
    drawn = {of: np.zeros(len(indptr) - 1, np.float32) for of, (indptr, _) in graph.edges.items()}
    for hop in range(max((len(values) for values in hops.values()), default=0)):
        followed = {of: values[hop] for of, values in hops.items() if of in graph.edges and hop < len(values)}
        log_missed = {of: np.zeros(len(visited[of])) for of in {edge_type[0] for edge_type in followed}}
        for of, fanout in followed.items():
            indptr, sources = graph.edges[of]
            _draw(
                read_only(indptr), read_only(sources), read_only(fresh[of[2]]), float(fanout) if fanout >= 0 else _ALL,
                of[0] == of[2], drawn[of], log_missed[of[0]],
            )  # fmt: skip
        for node_type, values in visited.items():
            if node_type in log_missed:
                _arrive(log_missed[node_type], values, fresh[node_type])
            else:
                fresh[node_type][:] = 0
    return visited


@njit()
def _fill(sources: Array, targets: Array, cursor: Array, by_target: Array) -> None:
    for edge in range(len(sources)):
        by_target[cursor[targets[edge]]] = sources[edge]
        cursor[targets[edge]] += 1


@njit()
def _draw(
    indptr: Array, sources: Array, fresh: Array, fanout: float, same_type: bool, drawn: Array, log_missed: Array
) -> None:
    """Update ``drawn`` and ``log_missed`` for one hop along one edge type, in place.

    ``indptr`` and ``sources``: CSC of the edges, with a row per target. ``same_type``: whether sources and targets have
    the same node type; then edges from a node to itself are ignored. ``fresh``, float32 [rows]: the probability that
    the previous hop visited a target for the first time. ``drawn``, float32 [rows]: the probability that a given
    in-edge of a target has been sampled, up to this hop. ``log_missed``, float64 [sources]: logarithm of the
    probability that a source is not visited in this hop.
    """
    for row in range(len(drawn)):
        degree = indptr[row + 1] - indptr[row]
        before = drawn[row]
        if fresh[row] > 0 and fanout > 0 and degree > 0:
            drawn[row] += fresh[row] * min(1.0, fanout / degree)
        if drawn[row] > before and before < 1:
            factor = -np.inf
            if drawn[row] < 1:
                factor = np.log1p(-np.float64(drawn[row])) - np.log1p(-np.float64(before))
            for slot in range(indptr[row], indptr[row + 1]):
                if not same_type or sources[slot] != row:
                    log_missed[sources[slot]] += factor


@njit()
def _arrive(log_missed: Array, visited: Array, fresh: Array) -> None:
    for node in range(len(visited)):
        fresh[node] = (1.0 - visited[node]) * -np.expm1(log_missed[node])
        visited[node] += fresh[node]


_BATCH = 256  #: seeds per step and part; has little effect on the result

_HOME = 0.001  #: a node is moved out of METIS's part only if another part visits it with a probability higher by this


def frequency_assignment(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, seed: int, fanouts: Fanouts, balance: str
) -> Part:
    """Return the part of each node, int32 [total].

    ``joined``: numbers the nodes of all types consecutively. METIS assigns the train seeds, the same number to each
    part. Any other node is assigned to a part whose seeds visit it with high probability. All parts get about the same
    number of nodes of each class. ``balance``, such as ``types+seeds``, states what distinguishes classes: the node
    type, being a train seed, or both. Memory: what METIS needs, and 4 bytes per node and part. Raises
    ``PartitionError`` when the dataset has no train seeds.
    """
    seeds = {of: nodes.splits[TRAIN] for of, nodes in dataset.nodes.items() if len(nodes.splits.get(TRAIN, ()))}
    if not seeds:
        raise PartitionError(
            f"dataset {dataset.name}: method frequency needs train seeds, and the dataset has none; "
            "use method metis, or add a train split"
        )
    home = metis_assignment(dataset, joined, num_parts, seed, "seeds", slack=0.0)
    chances = _chances(dataset, joined, joined.split(home), seeds, num_parts, fanouts)
    chances[home, np.arange(joined.total)] += np.float32(_HOME)
    part = np.full(joined.total, -1, np.int32)
    for of, own in joined.split(part).items():
        own[seeds.get(of, [])] = joined.split(home)[of][seeds.get(of, [])]
    classes = node_classes(dataset, joined, num_parts, balance)
    sizes = classes.sizes(part, num_parts)
    free = np.flatnonzero(part < 0)
    order = free[np.argsort(-_regrets(chances, free), kind="stable")]
    left = np.bincount(classes.of[free], minlength=len(classes.count))
    _choose(chances, order, classes.of, sizes, classes.least, classes.most, left, part)
    return without_empty_parts(part, num_parts)


def _chances(
    dataset: Dataset, joined: JoinedNodes, home: Mapping[NodeType, Part], seeds: Mapping[NodeType, Ids],
    num_parts: int, fanouts: Fanouts,
) -> Array:  # fmt: skip
    """Return the visit probability of each node for each part, float32 [num_parts, total]."""
    graph = TypedInEdges.of(dataset)
    in_batch = min(1.0, _BATCH * num_parts / sum(map(len, seeds.values())))
    chances = np.empty((num_parts, joined.total), np.float32)
    for part_id in range(num_parts):
        own = {of: ids[home[of][ids] == part_id] for of, ids in seeds.items()}
        found = visit_probabilities(graph, own, fanouts, in_batch)
        for of, values in joined.split(chances[part_id]).items():
            values[:] = found[of]
    return chances


@njit()
def _regrets(chances: Array, nodes: Array) -> Array:
    regrets = np.zeros(len(nodes), np.float32)
    for position in range(len(nodes)):
        best = second = np.float32(0)
        for part_id in range(len(chances)):
            chance = chances[part_id, nodes[position]]
            if chance > best:
                best, second = chance, best
            elif chance > second:
                second = chance
        regrets[position] = best - second
    return regrets


@njit()
def _choose(
    chances: Array, order: Array, of: Array, sizes: Array, least: Array, most: Array, left: Array, part: Array
) -> None:
    """Assign the nodes in ``order``, one after the other, to parts, and write them to ``part``.

    A node gets the part with the highest visit probability, ``chances`` [parts, nodes], among the parts with fewer than
    ``most`` nodes of the node's class. Ties go to the part with the fewest nodes of the class. Each part gets at least
    ``least`` nodes of each class. ``of``: class of each node. ``sizes`` [classes, parts]: number of assigned nodes.
    ``left`` [classes]: number of unassigned nodes.
    """
    num_kinds, num_parts = sizes.shape
    lack = np.zeros(num_kinds, np.int64)
    # Once all left nodes are needed for parts to reach ``least``, only parts below ``least`` are considered.
    for kind in range(num_kinds):
        for part_id in range(num_parts):
            lack[kind] += max(0, least[kind] - sizes[kind, part_id])
    for node in order:
        kind = of[node]
        room = least[kind] if lack[kind] >= left[kind] else most[kind]
        best = -1
        for part_id in range(num_parts):
            if sizes[kind, part_id] < room:
                better = best < 0 or chances[part_id, node] > chances[best, node]
                equal = not better and chances[part_id, node] == chances[best, node]
                if better or (equal and sizes[kind, part_id] < sizes[kind, best]):
                    best = part_id
        lack[kind] -= sizes[kind, best] < least[kind]
        left[kind] -= 1
        sizes[kind, best] += 1
        part[node] = best
