"""Seeds of temporal batches of links: each end of a link is the seed of a tree without edges later than the link.

All links of a step are scored with the same negatives, but have different times. A tree for each pair of negative and
link would take too long to sample. Therefore the links of a step are divided into a few groups of similar time. Each
negative has one tree per group, whose edges are not later than the earliest link of the group.

The tree of a link's target has the same limit: if it had later edges, a model could tell targets from negatives by
these edges. The tree of a link's source has edges up to the link's own time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch import LinkEnds
from trainer.core.schema import EdgeType
from trainer.loader.link_loader import ROLE
from trainer.loader.node_links import Pairs
from trainer.sampler.types import SeedSet
from trainer.store.part_store import PartStore

MOST_GROUPS = 8  #: most groups of a step


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


@dataclass(frozen=True)
class TimedLinks:
    """The links of one rank in one step, as original ids, and the negatives of the step."""

    src: Ids  #: int64 [n]
    dst: Ids  #: int64 [n]
    times: Ids  #: int64 [n]
    places: Ids  #: int64 [n] places in the global batch
    negatives: Ids  #: int64 [m]
    groups: TimeGroups  #: of the global batch
    own: Pairs  #: further negatives of each link alone


def tree_seeds(edge_type: EdgeType, links: TimedLinks, store: PartStore) -> tuple[SeedSet, LinkEnds]:
    """Return the seeds of a temporal batch, and the positions of link ends and negatives among them.

    Seeds of the source type are the links' sources. Seeds of the target type are the links' targets, and all negatives
    once for each time group that has links on this rank, and the negatives of each link alone, with the limit of its
    group. ``LinkEnds.own`` has the positions of these, in their order.

    The random key of a link end's tree depends on the link's place in the global batch. The random key of a negative's
    tree depends on the negative and the group. Neither key depends on the numbers of ranks and parts.
    """
    groups, group = np.unique(links.groups.of[links.places], return_inverse=True)
    num_links, num_negatives = len(links.src), len(links.negatives)
    numbers = (groups[:, None] + 2) * ROLE + np.arange(num_negatives)
    source = _Seeds(links.src, links.places, links.times)
    own, limits = links.own, links.groups.times[groups]
    roles = MOST_GROUPS + 2 + own.numbers()
    target = _Seeds(
        np.concatenate([links.dst, np.tile(links.negatives, len(groups)), own.ids]),
        np.concatenate([links.places + ROLE, numbers.ravel(), links.places[own.owner] + roles * ROLE]),
        np.concatenate([limits[group], np.repeat(limits, num_negatives), limits[group][own.owner]]),
    )
    first, seeds = 0, {edge_type[0]: source, edge_type[2]: target}  # first: position of the first target
    if edge_type[0] == edge_type[2]:
        first, seeds = num_links, {edge_type[0]: source.then(target)}
    shared = np.arange(len(groups) * num_negatives).reshape(len(groups), num_negatives)
    ends = LinkEnds(
        edge_type[0], edge_type[2], torch.arange(num_links), torch.arange(num_links) + first,
        torch.from_numpy(shared + first + num_links), torch.from_numpy(group.astype(np.int64)),
        torch.from_numpy(links.dst[:, None] == links.negatives),
        own=torch.arange(len(own.ids)) + first + num_links + shared.size if len(own.ids) else None,
    )  # fmt: skip
    seed_set = SeedSet(
        {of: store.to_global(of, each.ids) for of, each in seeds.items()},
        {of: each.trees for of, each in seeds.items()},
        {of: each.times for of, each in seeds.items()},
    )
    return seed_set, ends


@dataclass(frozen=True)
class _Seeds:
    ids: Ids  #: int64 [s] original ids
    trees: Ids  #: int64 [s] keys of their trees
    times: Ids  #: int64 [s]

    def then(self, other: _Seeds) -> _Seeds:
        pairs = ((self.ids, other.ids), (self.trees, other.trees), (self.times, other.times))
        return _Seeds(*map(np.concatenate, pairs))
