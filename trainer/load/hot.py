"""Which rows of other hosts a host keeps: those that its batches are most likely to ask for.

The chance of each node to be in a batch (``partition.visits``) is computed for the run's own fanouts, batch size and
seeds. Every rank has the in-edges of its own parts, so all take part; with replicated topology a host computes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.arrays import Array, Ids
from trainer.load.seeds import RankLayout, SeedOrder, split_step
from trainer.partition.visits import Chances, RowBlock, Visits, expected_visits
from trainer.reach import CacheSize
from trainer.sample.types import RowRequest
from trainer.schema import EdgeType, NodeType
from trainer.store.part import Part, PartStore

T = TypeVar("T")

_AT_ONCE = 1 << 24  #: numbers that are added up over ranks in one call
_SPLIT_STEPS = 64  #: steps that tell where the seeds of each part go


class Together(Protocol):
    """All ranks of a run; ``train.team.Team`` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def gather(self, value: T) -> list[T]: ...

    def agree(self, work: Callable[[], T]) -> T: ...


@dataclass(frozen=True)
class BatchPlan:
    """What the batches of a run ask for."""

    target: NodeType  #: of the seeds
    seeds: Ids  #: int64 [n] global ids
    order: SeedOrder
    fanouts: Mapping[EdgeType, tuple[int, ...]]
    columns: Mapping[NodeType, tuple[str, ...]]  #: attributes of every sampled node
    labels: tuple[str, ...] = ()  #: attributes of the seeds alone
    edge_bytes: Mapping[EdgeType, int] = field(default_factory=dict)  #: of others' edges, besides their sources
    replace: bool = False
    again: bool = True  #: earlier nodes are asked again where fanouts grow
    threads: int = 1  #: batches that are made at the same time
    #: The rows that batches of an epoch gather, step by step, for a host with all edges: its leading rank's.
    coming: Callable[[], Iterator[Sequence[RowRequest]]] | None = None

    @property
    def batch(self) -> int:
        """Seeds of a full step over all ranks."""
        return max(1, min(self.order.global_batch, len(self.seeds)))

    @property
    def steps(self) -> float:
        """Full steps of an epoch; a short one counts in part."""
        return len(self.seeds) / self.batch


@dataclass(frozen=True)
class Place:
    """Where a rank is, and what it has at hand."""

    node: str  #: ranks at the same node with the same parts share what is kept
    parts: tuple[int, ...]
    whole_topology: bool  #: the edges of all parts


@dataclass(frozen=True)
class HostVisits:
    """What a batch of one host's ranks is expected to visit."""

    chances: Chances  #: of a node to be in it
    seeds: Chances  #: of a node to be a seed of it
    sampled_bytes: float  #: of edges that other hosts draw or own


def places_of(store: PartStore, node: str, together: Together) -> list[Place]:
    """Every rank's place. Collective."""
    return together.gather(Place(node, tuple(store.parts), store.whole_topology))


def leader_of(places: Sequence[Place], rank: int) -> int:
    """The first rank at the same place: it works for all of them."""
    return places.index(places[rank])


def visits_of_host(
    plan: BatchPlan, store: PartStore, layout: RankLayout, places: Sequence[Place], together: Together
) -> HostVisits | None:
    """On the leading rank of a node that has some parts, but not all: what its ranks visit. Collective.

    None where nothing is asked of others, on the other ranks, and where some part's edges are with none of the ranks.
    """
    num_parts, leader = store.manifest.num_parts, leader_of(places, together.rank)
    alone = all(place.whole_topology for place in places if place.parts)
    if not alone and len({part for place in places for part in place.parts}) < num_parts:
        return None
    found = None
    for host, place in enumerate(places):
        leads = host == leader == together.rank
        if host == leader_of(places, host) and 0 < len(place.parts) < num_parts and (leads or not alone):
            ranks = [rank for rank, other in enumerate(places) if other == place]
            visits = _visits(plan, store, layout, ranks, set(place.parts), None if alone else (places, together))
            found = visits if leads else found
    return found


def seed_chances(plan: BatchPlan, store: PartStore, layout: RankLayout, ranks: Sequence[int]) -> Chances:
    """The chance of each node to be a seed of a batch, the mean over ``ranks``; type -> float32 [num_nodes]."""
    book = store.books[plan.target]
    parts = book.part_of(plan.seeds)
    own, everywhere = np.zeros(book.num_parts), np.zeros(book.num_parts)
    positions = plan.order.epoch(1)
    for step in range(min(plan.order.num_steps, _SPLIT_STEPS)):
        of_batch = parts[plan.order.step(positions, step)]
        mine = np.isin(split_step(of_batch, layout), ranks)
        own += np.bincount(of_batch[mine], minlength=book.num_parts)
        everywhere += np.bincount(of_batch, minlength=book.num_parts)
    share = own / np.maximum(everywhere, 1) / len(ranks) / plan.steps if len(plan.seeds) else own
    chances = {of: np.zeros(spec.num_nodes, np.float32) for of, spec in store.manifest.nodes.items()}
    chances[plan.target][plan.seeds] = share[parts]
    return chances


def remote_chances(chances: Array, of: NodeType, store: PartStore) -> Array:
    """``chances`` [num_nodes] with 0 for the nodes of own parts."""
    remote = chances.copy()
    for part_id in store.parts:
        begin, end = store.books[of].range_of(part_id)
        remote[begin:end] = 0
    return remote


def hottest(remote: Mapping[NodeType, Array], row_bytes: Mapping[NodeType, int], budget: int) -> dict[NodeType, Ids]:
    """The ids, ascending, that are worth most per byte of those with a chance above 0; their rows fit ``budget``."""
    types = [of for of in remote if row_bytes.get(of)]
    worth = np.concatenate([remote[of] / np.float32(row_bytes[of]) for of in types] or [np.zeros(0, np.float32)])
    starts = np.cumsum([0, *(len(remote[of]) for of in types)])
    if len({row_bytes[of] for of in types}) == 1:
        best = _largest(worth, budget // row_bytes[types[0]])
    else:
        sizes = np.repeat([row_bytes[of] for of in types], np.diff(starts))
        best = np.argsort(-worth, kind="stable")
        best = np.sort(best[np.cumsum(sizes[best]) <= budget])
    best = best[worth[best] > 0]
    cuts = np.searchsorted(best, starts)
    return {of: best[cuts[place] : cuts[place + 1]] - starts[place] for place, of in enumerate(types)}


def budget_of(size: CacheSize, store: PartStore, row_bytes: Mapping[NodeType, int]) -> int:
    """Bytes that a cache of ``size`` may take: a share is one of all rows of parts that are not here."""
    if size.bytes is not None:
        return size.bytes
    return round(size.share * sum(num_remote(store, of) * width for of, width in row_bytes.items()))


def num_remote(store: PartStore, of: NodeType) -> int:
    """Nodes of parts that are not here."""
    begins_ends = [store.books[of].range_of(part) for part in store.parts]
    return store.books[of].size - sum(end - begin for begin, end in begins_ends)


def _largest(values: Array, count: int) -> Ids:
    """Places of the ``count`` largest, ascending."""
    if count >= len(values):
        return np.arange(len(values))
    return np.sort(np.argpartition(-values, count)[:count])


def _visits(
    plan: BatchPlan, store: PartStore, layout: RankLayout, ranks: Sequence[int], here: set[int],
    shared: tuple[Sequence[Place], Together] | None,
) -> HostVisits:  # fmt: skip
    """What the ``ranks`` of a host with the parts ``here`` visit; ``shared``: each rank looks at its own rows only."""
    if shared is None:
        blocks = [block for part in store.topology.values() for _, block in rows_of(part, 0, 1)]
        begin = seed_chances(plan, store, layout, ranks)
        visits = expected_visits(blocks, begin, plan.fanouts, replace=plan.replace, again=plan.again)
        return HostVisits(visits.chances, begin, 0.0)
    places, together = shared
    own = list(_own_rows(store, places, together.rank))
    begin = seed_chances(plan, store, layout, ranks)
    visits = expected_visits(
        [block for _, block in own], begin, plan.fanouts, replace=plan.replace, again=plan.again,
        add_up=lambda values: _add_up(values, together),
    )  # fmt: skip
    answers = _answer_bytes(visits, own, here) + _edge_bytes(plan, visits, own, here)
    sampled = torch.tensor([answers], dtype=torch.float64)
    return HostVisits(visits.chances, begin, float(together.sum(sampled)))


def _own_rows(store: PartStore, places: Sequence[Place], rank: int) -> Iterator[tuple[int, RowBlock]]:
    """This rank's rows of each part: the ranks that have a part share it."""
    for part_id, part in store.parts.items():
        holders = [other for other, place in enumerate(places) if part_id in place.parts]
        yield from rows_of(part, holders.index(rank), len(holders))


def rows_of(part: Part, share: int, shares: int) -> Iterator[tuple[int, RowBlock]]:
    """One of so many equal shares of a part's rows, by edge type, each with the part's number."""
    for of, edges in part.edges.items():
        rows = len(edges.indptr) - 1
        begin, end = rows * share // shares, rows * (share + 1) // shares
        first = part.nodes[of[2]].start + begin
        yield part.part_id, RowBlock(of, first, edges.indptr[begin : end + 1], edges.indices)


def _answer_bytes(visits: Visits, blocks: Sequence[tuple[int, RowBlock]], here: set[int]) -> float:
    """Bytes of neighbours that are drawn from ``blocks`` for a host with the parts ``here``."""
    counted = zip(blocks, visits.asked, visits.drawn, strict=True)
    return sum(4 * asked + block.sources.itemsize * drawn for (p, block), asked, drawn in counted if p not in here)


def _edge_bytes(plan: BatchPlan, visits: Visits, blocks: Sequence[tuple[int, RowBlock]], here: set[int]) -> float:
    """Bytes of what is gathered of the edges drawn from ``blocks``."""
    counted = zip(blocks, visits.drawn, strict=True)
    return sum(plan.edge_bytes.get(block.edge_type, 0) * drawn for (part, block), drawn in counted if part not in here)


def _add_up(values: Array, together: Together) -> None:
    """Over ranks, in place."""
    for start in range(0, len(values), _AT_ONCE):
        together.sum(torch.from_numpy(values[start : start + _AT_ONCE]))
