"""The bundled trainer's loader for links of several edge types, each a query for its target, or for both ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from trainer.core.arrays import Ids
from trainer.core.batch import AnyBatch, LinkEnds
from trainer.core.schema import EdgeType, LinkTypes, NodeType, node_salt, reverse_type
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import BlockLoader, LoaderSettings
from trainer.loader.edge_endpoints import EdgeEndpoints
from trainer.loader.link_ends import excluded
from trainer.loader.negatives import NegativeDraw, uniform_negatives
from trainer.sampler.types import SeedSet


@dataclass(frozen=True)
class TypedLinks:
    """Links of several edge types. Positions count those of the first type, then those of the second, and so on."""

    types: LinkTypes
    ends: tuple[EdgeEndpoints, ...]  #: of each type

    def __len__(self) -> int:
        return sum(map(len, self.ends))

    def by_type(self, positions: Ids) -> Iterator[tuple[int, Ids, Ids, Ids]]:
        """Yield for each type that occurs: its number, indices of its links in ``positions``, sources and targets."""
        first = np.array([0, *accumulate(map(len, self.ends))])
        number = np.searchsorted(first, positions, side="right") - 1
        for k, ends in enumerate(self.ends):
            if len(own := np.flatnonzero(number == k)):
                yield k, own, *ends.ends_of(positions[own] - first[k])


class TypedLinkLoader(BlockLoader):
    """Yields batches whose seeds are links of several types; ``batch.links`` has ``relation``.

    The queries of a step, on all ranks, share negatives: ``negatives`` nodes of each type that is asked for, drawn
    uniformly, or each node once if a type has fewer. An answer is no negative of its own query. Ranks without links in
    a step have no negatives either.

    ``both``: each link is also a query for its source. ``hide``: leave the links of the global batch, and their
    reverses, out of the sampled edges.
    """

    def __init__(
        self, graph: Graph, settings: LoaderSettings, links: TypedLinks, negatives: int, both: bool, hide: bool,
        rank: int, layout: RankLayout,
    ):  # fmt: skip
        self.links, self._count, self._both, self._hide = links, negatives, both, hide
        self._reverse = {of: reverse_type(of, graph.manifest.edges) for of in links.types}
        #: node types of the ends, and those that are asked for
        self.types = tuple(dict.fromkeys(end for of in links.types for end in (of[0], of[2])))
        self.asked = tuple(dict.fromkeys(end for of in links.types for end in (of[2], *((of[0],) if both else ()))))
        super().__init__(graph, replace(settings, target=links.types[0][2]), rank, layout, len(links), ("", ()))

    def _load(self, share: SeedShare) -> AnyBatch:
        seeds, ends = self.seeded(share)
        return replace(self._batch(share, self.make(seeds, share.key)), links=ends)

    def _seed_set(self, share: SeedShare) -> SeedSet:
        return self.seeded(share)[0]

    def _part_of(self, positions: Ids) -> Ids:
        parts, store = np.empty(len(positions), np.int64), self.graph.store
        for k, own, _, dst in self.links.by_type(positions):
            of = self.links.types[k][2]
            parts[own] = store.books[of].part_of(store.to_global(of, dst))
        return parts

    def seeded(self, share: SeedShare) -> tuple[SeedSet, LinkEnds]:
        """Return the seeds, each node once, and the queries as positions among them."""
        store, edge_types = self.graph.store, self.links.types
        found = [*self.links.by_type(share.positions)]
        negatives = dict.fromkeys(self.asked, np.empty(0, np.int64))
        for of in self.asked if len(share.positions) else ():
            draw = NegativeDraw(self.graph.manifest.nodes[of].num_nodes)
            negatives[of] = uniform_negatives(draw, self._count, share.key ^ node_salt(of))

        # The nodes of each type, and the position of its first row.
        groups: dict[NodeType, list[Ids]] = {of: [negatives.get(of, np.empty(0, np.int64))] for of in self.types}
        for k, _, src, dst in found:
            groups[edge_types[k][0]].append(src)
            groups[edge_types[k][2]].append(dst)
        nodes = {of: np.unique(np.concatenate(ids)) for of, ids in groups.items()}
        first = dict(zip(self.types, accumulate([0, *map(len, nodes.values())]), strict=False))

        def place(of: NodeType, ids: Ids) -> Ids:
            return first[of] + np.searchsorted(nodes[of], ids)

        # The queries, first those for targets.
        size = len(share.positions)
        ends, relation, group = (np.empty((2, size), np.int64) for _ in range(3))
        for k, own, src, dst in found:
            source, _, target = edge_types[k]
            ends[:, own] = place(source, src), place(target, dst)
            relation[:, own] = [[k], [len(edge_types) + k]]
            group[:, own] = [[self.asked.index(target)], [self.asked.index(source) if self._both else 0]]
        rows = slice(2 if self._both else 1)
        asked, answer = ends[rows].ravel(), ends[::-1][rows].ravel()
        kinds = group[rows].ravel()

        # The negatives of each group, as many for each; those that fill up are left out.
        width = max(map(len, negatives.values()))
        others = np.zeros((len(self.asked), width), np.int64)
        missing = np.ones(others.shape, np.bool_)
        for k, (of, ids) in enumerate(negatives.items()):
            others[k, : len(ids)], missing[k, : len(ids)] = place(of, ids), False
        equal = (answer[:, None] == others[kinds]) | missing[kinds] if size else np.empty((0, width), np.bool_)
        from_, to, negative, of_group, is_answer, number = map(
            torch.from_numpy, (asked, answer, others, kinds, equal, relation[rows].ravel())
        )
        links = LinkEnds(
            edge_types[0][0], edge_types[0][2], from_, to, negative, of_group, is_answer, relation=number,
            types=self.types, per_link=2 if self._both else 1,
        )  # fmt: skip
        seeds = SeedSet({of: store.to_global(of, ids) for of, ids in nodes.items()})
        if not self._hide:
            return seeds, links

        # The links of the global batch, and their reverses, as edges to exclude.
        pairs: dict[EdgeType, list[tuple[Ids, Ids]]] = {}
        for k, _, src, dst in self.links.by_type(share.batch):
            edge_type = edge_types[k]
            for each, both in excluded(edge_type, self._reverse[edge_type], src, dst, store).items():
                pairs.setdefault(each, []).append(both)
        hidden = {
            each: (np.concatenate([both[0] for both in some]), np.concatenate([both[1] for both in some]))
            for each, some in pairs.items()
        }
        return seeds.without(hidden), links
