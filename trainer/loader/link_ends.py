"""The ends of links as seeds of a batch: of links with and without times, and of their negatives.

All links of a step of the bundled trainer are scored with the same negatives, but may have different times. A tree for
each pair of negative and link would take too long to sample. Therefore the links of a step are divided into a few
groups of similar time. Each negative has one tree per group, whose edges are not later than the earliest link of the
group.

The tree of a link's target has the same limit: if it had later edges, a model could tell targets from negatives by
these edges. The tree of a link's source has edges up to the link's own time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch import LinkEnds
from trainer.core.schema import EdgeType, NodeType
from trainer.loader.node_links import Pairs
from trainer.sampler.types import SeedSet
from trainer.store.part_store import PartStore

ROLE = 1 << 32  #: the tree of a seed has the number place + role * 2^32, which no other seed of the global batch has

MOST_GROUPS = 8  #: most groups of a step


@dataclass(frozen=True)
class Ends:
    """Sources, targets or negatives of links, all of one node type."""

    of: NodeType
    ids: Ids  #: int64 [n] original ids
    trees: Ids | None = None  #: int64 [n] numbers of their trees; None: a node is a seed only once
    times: Ids | None = None  #: int64 [n]; with ``trees``


def seeds_of(ends: Sequence[Ends], store: PartStore) -> tuple[SeedSet, list[Ids]]:
    """Return the seeds of a batch, and for each of ``ends`` the position of its nodes among the seeds of their type.

    With trees, each end is a separate seed, in the given order. Otherwise the seeds of a type are its distinct nodes,
    by ascending original id.
    """
    nodes, trees, times = dict[NodeType, Ids](), dict[NodeType, Ids](), dict[NodeType, Ids]()
    where = [np.empty(0, np.int64)] * len(ends)
    for of in dict.fromkeys(each.of for each in ends):
        numbers = [number for number, each in enumerate(ends) if each.of == of]
        group = [ends[number] for number in numbers]
        ids = np.concatenate([each.ids for each in group])
        if group[0].trees is None:
            ids, places = np.unique(ids, return_inverse=True)
        else:
            places = np.arange(len(ids))
            trees[of] = np.concatenate([each.trees for each in group if each.trees is not None])
            if group[0].times is not None:
                times[of] = np.concatenate([each.times for each in group if each.times is not None])
        nodes[of] = store.to_global(of, ids)
        pieces = np.split(places.astype(np.int64), np.cumsum([len(each.ids) for each in group])[:-1])
        for number, piece in zip(numbers, pieces, strict=True):
            where[number] = piece
    return SeedSet(nodes, trees, times), where


def excluded(
    edge_type: EdgeType, reverse: EdgeType | None, src: Ids, dst: Ids, store: PartStore
) -> dict[EdgeType, tuple[Ids, Ids]]:
    """Return the edges that sampling must leave out: the links ``src`` -> ``dst`` of type ``edge_type``.

    If ``reverse`` is given, also returns the edges ``dst`` -> ``src`` of type ``reverse``. ``src``, ``dst``: original
    ids. The result has for each edge type two arrays of global ids: targets and sources. It lacks types of which the
    graph has no edges.
    """
    sources, targets = store.to_global(edge_type[0], src), store.to_global(edge_type[2], dst)
    found = {edge_type: (targets, sources)}
    if reverse == edge_type:
        found = {edge_type: (np.concatenate([targets, sources]), np.concatenate([sources, targets]))}
    elif reverse is not None:
        found[reverse] = (sources, targets)
    return {of: ends for of, ends in found.items() if of in store.manifest.edges}


@dataclass(frozen=True)
class TimeGroups:
    """The links of one global batch, grouped by time."""

    of: Ids  #: int64 [links] group of each link
    times: Ids  #: int64 [groups] earliest time of each group, ascending

    @classmethod
    def by_time(cls, times: Ids) -> TimeGroups:
        """Divide links with the given times, int64 [n], into at most ``MOST_GROUPS`` groups of about equal size.

        Links of equal time are in the same group. The groups do not depend on the order of the links.
        """
        count = min(MOST_GROUPS, len(times))
        first = np.unique(np.sort(times)[np.arange(count) * len(times) // max(count, 1)])
        return cls(np.searchsorted(first, times, side="right") - 1, first)


def timed_seeds_of(
    edge_type: EdgeType, src: Ids, dst: Ids, times: Ids, places: Ids, groups: TimeGroups, negatives: Ids, own: Pairs,
    store: PartStore,
) -> tuple[SeedSet, LinkEnds]:  # fmt: skip
    """Return the seeds of a temporal batch, and the positions of link ends and negatives among them.

    Seeds of the source type are the links' sources. Seeds of the target type are the links' targets, and all negatives
    once for each time group that has links on this rank, and the negatives of each link alone, with the limit of its
    group. ``LinkEnds.own`` has the positions of these, in their order.

    The number of a link end's tree depends on the link's place in the global batch, that of a negative's tree on the
    negative and the group. Neither depends on the numbers of ranks and parts.

    ``src``, ``dst``, ``times``, ``places``: of this rank's links, int64 [n]. ``groups``: of the global batch.
    ``negatives``: of the step. ``own``: further negatives of each link alone.
    """
    present, group = np.unique(groups.of[places], return_inverse=True)
    limits = groups.times[present]
    numbers = (present[:, None] + 2) * ROLE + np.arange(len(negatives))
    roles = MOST_GROUPS + 2 + own.numbers()
    source, _, target = edge_type
    ends = [
        Ends(source, src, places, times),
        Ends(target, dst, places + ROLE, limits[group]),
        Ends(target, np.tile(negatives, len(present)), numbers.ravel(), np.repeat(limits, len(negatives))),
        Ends(target, own.ids, places[own.owner] + roles * ROLE, limits[group][own.owner]),
    ]
    seeds, where = seeds_of(ends, store)
    sources, targets, shared, alone = map(torch.from_numpy, where)
    links = LinkEnds(
        source, target, sources, targets, shared.reshape(numbers.shape), torch.from_numpy(group.astype(np.int64)),
        torch.from_numpy(dst[:, None] == negatives), own=alone if len(alone) else None,
    )  # fmt: skip
    return seeds, links
