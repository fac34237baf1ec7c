"""How likely sampling from some seeds is to visit each node.

The vertex-inclusion probabilities of SALIENT++ (Kaler et al., "Communication-Efficient Graph Neural
Networks with Probabilistic Neighborhood Expansion Analysis and Caching", MLSys 2023), per node type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids, read_only
from trainer.compiled import njit
from trainer.data.dataset import Dataset
from trainer.partition.methods import Fanouts
from trainer.schema import EdgeType, NodeType

Chances = dict[NodeType, npt.NDArray[np.float32]]  #: type -> [num_nodes]
_ALL = np.inf  #: fanout -1


@dataclass(frozen=True)
class InEdges:
    """The sources of each node's in-edges (CSC), per edge type."""

    num_nodes: Mapping[NodeType, int]
    edges: Mapping[EdgeType, tuple[Array, Array]]  #: indptr int64 [targets + 1], sources int32|int64 [E]

    @classmethod
    def of(cls, dataset: Dataset) -> InEdges:
        """Memory: an id per edge and 8 bytes per target of each edge type."""
        counts = {of: nodes.num_nodes for of, nodes in dataset.nodes.items()}
        edges = {of: _in_edges(edges.edge_index, counts[of[2]]) for of, edges in dataset.edges.items()}
        return cls(counts, edges)


@dataclass(frozen=True)
class RowBlock:
    """The in-edges by one type of targets that lie next to each other."""

    edge_type: EdgeType
    first: int  #: global id of the first target
    indptr: Array  #: int64 [targets + 1] into ``sources``
    sources: Array  #: int32|int64 global ids


@dataclass(frozen=True)
class Visits:
    """What a batch is likely to visit."""

    chances: Chances  #: to be in the batch
    asked: tuple[float, ...]  #: for each of the given blocks, how many of its rows are asked for neighbours
    drawn: tuple[float, ...]  #: how many edges they answer with


def visit_probabilities(
    graph: Dataset | InEdges, seeds: Mapping[NodeType, Ids], fanouts: Fanouts, chance: float = 1.0
) -> Chances:
    """The chance of each node to be in a batch, type -> float32 [num_nodes], when each seed is with ``chance``.

    See ``expected_visits``. Edge types without fanouts are not followed.
    """
    graph = InEdges.of(graph) if isinstance(graph, Dataset) else graph
    begin = {of: np.zeros(count, np.float32) for of, count in graph.num_nodes.items()}
    for of, ids in seeds.items():
        begin[of][ids] = chance
    blocks = [RowBlock(of, 0, *edges) for of, edges in graph.edges.items()]
    hops = fanouts if isinstance(fanouts, Mapping) else dict.fromkeys(graph.edges, tuple(fanouts))
    return expected_visits(blocks, begin, hops).chances


def expected_visits(
    blocks: Sequence[RowBlock], seeds: Chances, fanouts: Mapping[EdgeType, Sequence[int]], *, replace: bool = False,
    again: bool = False, add_up: Callable[[npt.NDArray[np.float32]], None] | None = None,
) -> Visits:  # fmt: skip
    """What a batch visits that has each node for a seed with the chance ``seeds`` gives it, type -> [num_nodes].

    A target newly visited asks min(1, fanout / in-degree) of its in-edges; visits are taken as independent, so a
    node's chance to be visited in a hop is 1 - prod(1 - p min(1, fanout / in-degree)) over its out-edges. Exact on
    trees; nodes that cycles lead back to come out somewhat too likely. With ``again`` the nodes known before ask anew
    where a later hop has a larger fanout, as for exact blocks. Weights and times are not looked at.

    ``blocks`` may be some rows only: ``add_up`` then adds to an array, in place, those of whoever has the other
    rows, and is called in the same order everywhere. Memory: 16 bytes per node.
    """
    visited = {of: values.copy() for of, values in seeds.items()}
    fresh = {of: values.copy() for of, values in seeds.items()}
    asking = [_Asking(block, tuple(fanouts.get(block.edge_type, ())), replace, again) for block in blocks]
    for hop in range(max((len(values) for values in fanouts.values()), default=0)):
        for one in asking:
            one.ask(fresh[one.block.edge_type[2]], hop)
        for of, values in visited.items():
            if not any(edge_type[0] == of and hop < len(hops) for edge_type, hops in fanouts.items()):
                fresh[of][:] = 0
                continue
            log_missed = np.zeros(len(values))
            for one in asking:
                if one.block.edge_type[0] == of:
                    one.spread(log_missed, hop)
            told = log_missed.astype(np.float32)
            del log_missed
            if add_up is not None:
                add_up(told)
            _arrive(told, values, fresh[of])
    return Visits(visited, tuple(one.asked for one in asking), tuple(one.drawn for one in asking))


class _Asking:
    """The rows of a block hop by hop."""

    def __init__(self, block: RowBlock, fanouts: tuple[int, ...], replace: bool, again: bool):
        self.block, self.replace = block, replace
        self.asked = self.drawn = 0.0
        self._fanouts = [float(fanout) if fanout >= 0 else _ALL for fanout in fanouts]
        self._grow = again and self._fanouts != sorted(self._fanouts, reverse=True)
        self._levels: list[npt.NDArray[np.float32]] = []  #: newly visited at each hop; only where fanouts grow
        self._share = np.zeros(len(block.indptr) - 1, np.float32)  #: chance of each in-edge to have been drawn so far
        self._before = np.zeros_like(self._share)

    def ask(self, fresh: npt.NDArray[np.float32], hop: int) -> None:
        """Take in who is newly visited, [num_nodes] of the target type."""
        if hop >= len(self._fanouts):
            return
        block, own = self.block, fresh[self.block.first :][: len(self._share)]
        self._before[:] = self._share
        if self._grow:
            self._levels.append(own.copy())
            self._share[:] = 0
        levels = self._levels if self._grow else [own]
        widest = self._fanouts[hop]
        repeats = self._grow and hop > 0 and widest > max(self._fanouts[:hop])
        for level in range(hop, hop - len(levels), -1):
            widest = max(widest, self._fanouts[level])
            asked, drawn = _ask(
                read_only(block.indptr), read_only(levels[level - hop - 1]), widest, self.replace, self._share
            )
            if level == hop or repeats:
                self.asked, self.drawn = self.asked + asked, self.drawn + drawn

    def spread(self, log_missed: npt.NDArray[np.float64], hop: int) -> None:
        """Add, for each source, the logarithm of the chance that none of its targets draws it in this hop."""
        if hop < len(self._fanouts):
            block = self.block
            first = block.first if block.edge_type[0] == block.edge_type[2] else -1
            _spread(
                read_only(block.indptr), read_only(block.sources), read_only(self._before), read_only(self._share),
                first, log_missed,
            )  # fmt: skip


def _in_edges(edge_index: Array, num_targets: int) -> tuple[Array, Array]:
    sources, targets = edge_index
    indptr = np.zeros(num_targets + 1, np.int64)
    np.cumsum(np.bincount(targets, minlength=num_targets), out=indptr[1:])
    by_target = np.empty_like(sources)
    _fill(sources, targets, indptr[:-1].copy(), by_target)
    return indptr, by_target


@njit()
def _fill(sources: Array, targets: Array, cursor: Array, by_target: Array) -> None:
    for edge in range(len(sources)):
        by_target[cursor[targets[edge]]] = sources[edge]
        cursor[targets[edge]] += 1


@njit()
def _ask(indptr: Array, fresh: Array, fanout: float, replace: bool, share: Array) -> tuple[float, float]:
    """Add to ``share`` the chance of a row's edges to be drawn; how many rows ask for how many edges."""
    rows = edges = 0.0
    for row in range(len(fresh)):
        degree = indptr[row + 1] - indptr[row]
        if fresh[row] > 0 and fanout > 0:
            rows += fresh[row]
            if degree > 0:
                picked = min(1.0, fanout / degree)
                edges += fresh[row] * degree * picked
                if replace and fanout < np.inf:
                    edges += fresh[row] * (fanout - degree * picked)
                    picked = 1.0 - (1.0 - 1.0 / degree) ** fanout
                share[row] += fresh[row] * picked
    return rows, edges


@njit()
def _spread(indptr: Array, sources: Array, before: Array, share: Array, first: int, log_missed: Array) -> None:
    """From ``before`` the shares have grown to ``share``, which adds to ``log_missed`` of their sources.

    first: global id of row 0 where sources are of the targets' type, else -1: what asks for itself has been
    visited already.
    """
    for row in range(len(share)):
        if share[row] > before[row] and before[row] < 1:
            factor = -np.inf
            if share[row] < 1:
                factor = np.log1p(-np.float64(share[row])) - np.log1p(-np.float64(before[row]))
            for slot in range(indptr[row], indptr[row + 1]):
                if first < 0 or sources[slot] != first + row:
                    log_missed[sources[slot]] += factor


@njit()
def _arrive(log_missed: Array, visited: Array, fresh: Array) -> None:
    for node in range(len(visited)):
        fresh[node] = (1.0 - visited[node]) * -np.expm1(log_missed[node])
        visited[node] += fresh[node]
