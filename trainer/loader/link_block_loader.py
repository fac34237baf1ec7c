"""The bundled trainer's loader for link prediction: samples blocks around links and negatives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.core.arrays import Array, Ids
from trainer.core.batch import AnyBatch, LinkEnds
from trainer.core.schema import EdgeType, reverse_type
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import BlockLoader, LoaderSettings, sampling_of
from trainer.loader.link_ends import Ends, TimeGroups, excluded, seeds_of, timed_seeds_of
from trainer.loader.link_seeds import LinkInputs
from trainer.loader.negatives import NegativeDraw, linked_in_step, uniform_negatives
from trainer.loader.node_links import Pairs, links_of
from trainer.sampler.types import SeedSet

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class LinkBlockSettings:
    negatives: int  #: negative targets per step; a target type with fewer nodes gives each of its nodes once
    hide: bool  #: leave the links of the global batch, and their reverses, out of the sampled edges
    #: [nodes of the target type], log of each target's share of the links: the negatives of a step are then the targets
    #: of the step's links, with this correction; None: negatives are drawn uniformly
    log_q: Array | None = None
    own: EdgeType | None = None  #: edge type that leads to the source of a link from further negatives of this link
    num_own: int = -1  #: largest number of these per link; -1: all
    #: These are a list of candidates: with times, those of the link's own time, without targets of the loader's links
    listed: bool = False


class LinkBlockLoader(BlockLoader):
    """Yields batches whose seeds are links; ``batch.links`` has the positions of their ends in the batch.

    All links of a step, on all ranks, share the same negatives (Lerer et al., "PyTorch-BigGraph: A Large-scale Graph
    Embedding System", 2019): nodes of the target type, drawn uniformly. A negative can form a link of the graph by
    chance. Ranks without links in a step have no negatives either. With ``log_q``, the negatives are the targets of the
    step's links on all ranks, and those that the step links to the same source are no negatives of a link. With
    ``own``, each link also has negatives of its own: nodes to which its source has edges of that type, all or some
    that are drawn, except the link's target.

    If the links have times, neighbours later than a link are not sampled for it (``timed_seeds_of``).
    """

    def __init__(
        self, graph: Graph, settings: LoaderSettings, links: LinkInputs, link_settings: LinkBlockSettings, rank: int,
        layout: RankLayout,
    ):  # fmt: skip
        self.links, self.link_settings = links, link_settings
        self._draw = NegativeDraw(graph.manifest.nodes[links.edge_type[2]].num_nodes)
        self._reverse = reverse_type(links.edge_type, graph.manifest.edges)
        self._rule = sampling_of(graph, settings).time
        if link_settings.listed:  # all links, as one ascending number each
            sources, targets = links.all_ends()
            self._pairs = np.unique(sources * graph.manifest.nodes[links.edge_type[2]].num_nodes + targets)
        super().__init__(graph, replace(settings, target=links.edge_type[2]), rank, layout, len(links), ("", ()))

    def _load(self, share: SeedShare) -> AnyBatch:
        seeds, ends = self._seeded(share)
        return replace(self._made(share, seeds), links=ends)

    def ends(self, share: SeedShare) -> tuple[Ids, Ids, Ids]:
        """Return sources and targets of this rank's links in one step, and the step's negatives, as original ids."""
        count, negatives = self.link_settings.negatives, _NONE
        if len(share.positions) and count:
            if self.link_settings.log_q is None:
                negatives = uniform_negatives(self._draw, count, share.key)
            else:
                negatives = np.unique(self.links.ends.ends_of(share.batch)[1])
        return *self.links.ends.ends_of(share.positions), negatives

    def _seed_set(self, share: SeedShare) -> SeedSet:
        return self._seeded(share)[0]

    def _part_of(self, positions: Ids) -> Ids:
        of, store = self.links.edge_type[2], self.graph.store
        return store.books[of].part_of(store.to_global(of, self.links.ends.ends_of(positions)[1]))

    def _seeded(self, share: SeedShare) -> tuple[SeedSet, LinkEnds]:
        links, store = self.links, self.graph.store
        src, dst, negatives = self.ends(share)
        own = self.own(share, src, dst)
        if links.times is None:
            source, _, target = links.edge_type
            nodes = Ends(source, src), Ends(target, dst), Ends(target, negatives), Ends(target, own.ids)
            seeds, where = seeds_of(nodes, store)
            sources, targets, shared, alone = map(torch.from_numpy, where)
            ends = LinkEnds(source, target, sources, targets, shared, own=alone if len(alone) else None)
        else:
            groups, times = self._groups(links.times[share.batch]), links.times[share.positions]
            seeds, ends = timed_seeds_of(
                links.edge_type, src, dst, times, share.places, groups, negatives, own, store
            )  # fmt: skip
        if ends.own is not None:
            ends = replace(ends, own=torch.from_numpy(own.table(len(src), ends.own.numpy(), -1)))
        if self.link_settings.log_q is not None:
            # The batch's share of each target, and all targets that the step links to a link's source.
            equal = linked_in_step(src, negatives, *links.ends.ends_of(share.batch))
            log_q = torch.from_numpy(self.link_settings.log_q[np.concatenate([dst, negatives])])
            ends = replace(ends, equal=torch.from_numpy(equal), log_q=log_q)
        if self.link_settings.hide:
            seen = links.ends.ends_of(share.batch)
            seeds = seeds.without(excluded(links.edge_type, self._reverse, *seen, store))
        return seeds, ends

    def _groups(self, times: Ids) -> TimeGroups:
        return TimeGroups.by_time(times)

    def own(self, share: SeedShare, src: Ids, dst: Ids) -> Pairs:
        """Return the negatives of each of this rank's links alone, none later than the link.

        ``src``, ``dst``: ends of the links.
        """
        of, links, how = self.link_settings.own, self.links, self.link_settings
        if of is None:
            return Pairs(_NONE, _NONE)
        nodes = self.graph.store.to_global(links.edge_type[0], src)
        times = None if links.times is None else links.times[share.positions]
        found = links_of(self.graph, of, nodes, share.places, how.num_own, share.key, self._rule, times)
        if not how.listed:
            others = found.ids != dst[found.owner]
            return Pairs(found.owner[others], found.ids[others])
        kept = np.ones(len(found.ids), np.bool_)
        if times is not None and found.times is not None:
            kept = found.times == times[found.owner]
        num_targets, every = self.graph.manifest.nodes[links.edge_type[2]].num_nodes, self._pairs
        key = src[found.owner] * num_targets + found.ids
        at = np.searchsorted(every, key)
        kept &= every[np.minimum(at, len(every) - 1)] != key
        owner, ids = np.divmod(np.unique(found.owner[kept] * num_targets + found.ids[kept]), num_targets)
        return Pairs(owner, ids)
