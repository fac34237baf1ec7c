"""Parts by how often they visit a node: each node goes where sampling from that part's seeds finds it most.

The idea is GraphLearn-for-PyTorch's frequency partitioner. There chunks of nodes are dealt out in id
order; here nodes choose in order of what they lose by their second choice.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainer.core.arrays import Array, Ids
from trainer.core.compiled import njit
from trainer.core.errors import PartitionError
from trainer.core.schema import NodeType
from trainer.data.dataset import Dataset
from trainer.partition.balance import TRAIN, NodeClasses, node_classes
from trainer.partition.joined import JoinedNodes, Part
from trainer.partition.methods import Fanouts
from trainer.partition.metis import metis_assignment, without_empty_parts
from trainer.partition.visits import InEdges, visit_probabilities

_BATCH = 256  #: seeds of one step and part; the outcome hardly depends on it

_HOME = 0.001  #: how much more likely a visit must be elsewhere before a node leaves METIS's part


def frequency_assignment(
    dataset: Dataset, joined: JoinedNodes, num_parts: int, seed: int, fanouts: Fanouts, balance: str
) -> Part:
    """Part of each node, int32 [total]. Memory: 4 bytes for each node and part, besides what METIS needs.

    METIS deals out the train seeds, equally many to each part; a chance to be visited is then computed for
    every node and part. Raises ``PartitionError`` without train seeds.
    """
    seeds = {of: nodes.splits[TRAIN] for of, nodes in dataset.nodes.items() if len(nodes.splits.get(TRAIN, ()))}
    if not seeds:
        raise PartitionError(
            f"dataset {dataset.name}: method frequency goes by what the train seeds visit, and there are none; "
            "use method metis, or give a train split"
        )
    home = metis_assignment(dataset, joined, num_parts, seed, "seeds", slack=0.0)
    chances = _chances(dataset, joined, joined.split(home), seeds, num_parts, fanouts)
    chances[home, np.arange(joined.total)] += np.float32(_HOME)
    part = np.full(joined.total, -1, np.int32)
    for of, own in joined.split(part).items():
        own[seeds.get(of, [])] = joined.split(home)[of][seeds.get(of, [])]
    _place(chances, part, node_classes(dataset, joined, num_parts, balance), num_parts)
    return without_empty_parts(part, num_parts)


def _chances(
    dataset: Dataset, joined: JoinedNodes, home: Mapping[NodeType, Part], seeds: Mapping[NodeType, Ids],
    num_parts: int, fanouts: Fanouts,
) -> Array:  # fmt: skip
    """float32 [num_parts, total]: how likely a batch of each part's seeds visits each node."""
    graph = InEdges.of(dataset)
    in_batch = min(1.0, _BATCH * num_parts / sum(map(len, seeds.values())))
    chances = np.empty((num_parts, joined.total), np.float32)
    for part_id in range(num_parts):
        own = {of: ids[home[of][ids] == part_id] for of, ids in seeds.items()}
        found = visit_probabilities(graph, own, fanouts, in_batch)
        for of, values in joined.split(chances[part_id]).items():
            values[:] = found[of]
    return chances


def _place(chances: Array, part: Part, classes: NodeClasses, num_parts: int) -> None:
    """Give every node without a part (-1) one: nodes that lose most by their second choice choose first."""
    sizes = classes.sizes(part, num_parts)
    free = np.flatnonzero(part < 0)
    order = free[np.argsort(-_regrets(chances, free), kind="stable")]
    left = np.bincount(classes.of[free], minlength=len(classes.count))
    _choose(chances, order, classes.of, sizes, classes.least, classes.most, left, part)


@njit()
def _regrets(chances: Array, nodes: Array) -> Array:
    """What each node loses by its second choice, float32 [n]."""
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
    """Give each node the part that visits it most and has room; the smallest among equals.

    Once as many nodes of a class are ``left`` as parts below its least lack, they go there only.
    """
    num_kinds, num_parts = sizes.shape
    lack = np.zeros(num_kinds, np.int64)
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
