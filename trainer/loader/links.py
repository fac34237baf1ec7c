"""From links to seed nodes: positives, their negatives, and where each ends up in the batch.

Shapes and orders are those of torch_geometric's ``LinkNeighborLoader``; n positives of this rank's
share, k negatives of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trainer.core.arrays import Ids
from trainer.core.schema import EdgeType, NodeType
from trainer.loader.negatives import NegativeRule
from trainer.sampler.subgraph import SeedSet
from trainer.store.part_store import PartStore

_ROLE = 1 << 32  #: trees are numbered place + role * 2^32, so that no two seeds of a global batch share one


@dataclass(frozen=True)
class LinkBatch:
    """This rank's positives of one step and their negatives, as original ids."""

    edge_type: EdgeType
    src: Ids  #: int64 [n]
    dst: Ids  #: int64 [n]
    places: Ids  #: int64 [n] in the global batch
    owner: Ids  #: int64 [k] which positive of the share a negative belongs to
    neg_j: Ids  #: int64 [k] which of its negatives it is; ascending, owners ascend within
    neg_src: Ids  #: int64 [k]; unused for triplets, whose source is the positive's
    neg_dst: Ids  #: int64 [k]
    times: Ids | None = None  #: int64 [n]


@dataclass(frozen=True)
class LinkIndex:
    """Where the links are in the batch: positions among the nodes of their end's type."""

    src: Ids  #: int64: positives, for binary negatives then the negatives
    dst: Ids  #: int64, as long as ``src``
    neg: Ids | None  #: int64 [n] or [n, amount]: targets of triplets
    owners: Mapping[NodeType, Ids]  #: for disjoint batches: which positive each seed belongs to, per type


@dataclass(frozen=True)
class _End:
    """The seeds at one end of the links, in torch_geometric's order: positives first."""

    ids: Ids  #: original ids
    trees: Ids
    owner: Ids


def seeds_of(
    links: LinkBatch, rule: NegativeRule | None, store: PartStore, disjoint: bool
) -> tuple[SeedSet, LinkIndex]:
    """The seed nodes of a link batch and where its links are found among them.

    Seeds are the distinct end nodes by ascending original id; for disjoint batches every end of every
    link is a seed of its own.
    """
    triplet = rule is not None and rule.triplet
    src, dst = _ends(links, triplet)
    ends = {links.edge_type[0]: [src], links.edge_type[2]: [dst]}
    if links.edge_type[0] == links.edge_type[2]:
        ends = {links.edge_type[0]: [src, dst]}
    seeds, where = (_separate if disjoint else _distinct)(ends, links, store)
    neg = None
    if triplet:
        assert rule is not None
        neg = _neg_index(where[1][len(links.src) :], rule.most, len(links.src))
        where = where[0], where[1][: len(links.src)]
    owners = {of: np.concatenate([end.owner for end in group]) for of, group in ends.items()}
    return seeds, LinkIndex(where[0], where[1], neg, owners)


def excluded(
    edge_type: EdgeType, reverse: EdgeType | None, src: Ids, dst: Ids, store: PartStore
) -> dict[EdgeType, tuple[Ids, Ids]]:
    """What ``SeedSet.exclude`` needs to hide links ``src`` -> ``dst`` (original ids), and their reverses."""
    sources, targets = store.to_global(edge_type[0], src), store.to_global(edge_type[2], dst)
    pairs = {edge_type: [(targets, sources)]}
    if reverse is not None:
        pairs.setdefault(reverse, []).append((sources, targets))
    return {
        of: (np.concatenate([pair[0] for pair in group]), np.concatenate([pair[1] for pair in group]))
        for of, group in pairs.items()
    }


def _ends(links: LinkBatch, triplet: bool) -> tuple[_End, _End]:
    own = np.arange(len(links.src))
    src_role, dst_role = (2, 2) if triplet else (2, 3)
    step = dst_role - 1  # binary negatives have two roles each, triplets one
    neg = links.places[links.owner]
    dst = _End(
        np.concatenate([links.dst, links.neg_dst]),
        np.concatenate([links.places + _ROLE, neg + (dst_role + step * links.neg_j) * _ROLE]),
        np.concatenate([own, links.owner]),
    )
    if triplet:
        return _End(links.src, links.places, own), dst
    src = _End(
        np.concatenate([links.src, links.neg_src]),
        np.concatenate([links.places, neg + (src_role + step * links.neg_j) * _ROLE]),
        np.concatenate([own, links.owner]),
    )
    return src, dst


def _distinct(
    ends: Mapping[NodeType, list[_End]], links: LinkBatch, store: PartStore
) -> tuple[SeedSet, tuple[Ids, Ids]]:
    nodes, where = {}, []
    for of, group in ends.items():
        unique, inverse = np.unique(np.concatenate([end.ids for end in group]), return_inverse=True)
        nodes[of] = store.to_global(of, unique)
        where += np.split(inverse.astype(np.int64), [len(group[0].ids)])[: len(group)]
    return SeedSet(nodes), (where[0], where[1])


def _separate(
    ends: Mapping[NodeType, list[_End]], links: LinkBatch, store: PartStore
) -> tuple[SeedSet, tuple[Ids, Ids]]:
    nodes, trees, times, where = {}, {}, {}, []
    for of, group in ends.items():
        nodes[of] = store.to_global(of, np.concatenate([end.ids for end in group]))
        trees[of] = np.concatenate([end.trees for end in group])
        if links.times is not None:
            times[of] = links.times[np.concatenate([end.owner for end in group])]
        where += np.split(np.arange(len(nodes[of])), [len(group[0].ids)])[: len(group)]
    return SeedSet(nodes, trees, times), (where[0], where[1])


def _neg_index(where: Ids, amount: int, num_positives: int) -> Ids:
    table = where.reshape(amount, num_positives).T
    return np.ascontiguousarray(table[:, 0] if amount == 1 else table)
