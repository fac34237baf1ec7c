"""The bundled trainer's loader for labels of edges: samples blocks around the ends of edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trainer.core.arrays import Ids
from trainer.core.batch import AnyBatch, LinkEnds
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import LoaderSettings
from trainer.loader.labelled_edges import LabelledEdges
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_ends import TimeGroups
from trainer.loader.link_seeds import LinkInputs
from trainer.sampler.types import SeedSet


class EdgeBlockLoader(LinkBlockLoader):
    """Yields batches whose seeds are edges with labels ``y``; ``links`` has the positions of their ends in the batch.

    The edges stay in the graph, so that sampled neighbours include them, unless ``hide``: then those of the global
    batch, and their reverses, are left out. With ``edge_attr``, if their type has the attribute, ``links.attr`` has
    their own features. In disjoint sampling, both ends of an edge have a tree of their own; with ``time_attr``, an
    attribute of the edges, it has nothing later than the edge.
    """

    def __init__(
        self, graph: Graph, settings: LoaderSettings, seeds: LabelledEdges, rank: int, layout: RankLayout,
        hide: bool = False,
    ):  # fmt: skip
        self._seeds, attr = seeds, settings.edge_attr
        self._attr = attr if attr in graph.manifest.edges[seeds.edge_type].attrs else None
        trees = settings.disjoint or settings.time_attr is not None
        times = np.zeros(len(seeds), np.int64) if trees and seeds.times is None else seeds.times
        inputs = LinkInputs(seeds.edge_type, seeds, are_edges=False, times=times)
        super().__init__(graph, settings, inputs, LinkBlockSettings(negatives=0, hide=hide), rank, layout)

    def of_positions(self, positions: Ids, key: int) -> AnyBatch:
        """Return the batch of these edges alone. ``key``: random key of its samples."""
        places = np.arange(len(positions))
        return self._load(SeedShare(0, key, len(positions), positions, places, positions))

    def _groups(self, times: Ids) -> TimeGroups:
        """Return a group per time: there are no negatives, for which the target's tree would have to be cut."""
        distinct, of = np.unique(times, return_inverse=True)
        return TimeGroups(of, distinct)

    def _seeded(self, share: SeedShare) -> tuple[SeedSet, LinkEnds]:
        seeds, ends = super()._seeded(share)
        return (seeds if self.settings.time_attr is not None else replace(seeds, times={})), ends

    def _load(self, share: SeedShare) -> AnyBatch:
        batch, positions = super()._load(share), share.positions
        assert batch.links is not None
        attr = None if self._attr is None else self._seeds.attr(self._attr, positions)
        return replace(batch, y=self._seeds.y[positions], links=replace(batch.links, attr=attr))
