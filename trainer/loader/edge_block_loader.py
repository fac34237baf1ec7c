"""The bundled trainer's loader for labels of edges: samples blocks around the ends of edges."""

from __future__ import annotations

from dataclasses import replace

from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import AnyBatch, LoaderSettings
from trainer.loader.labelled_edges import LabelledEdges
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_seeds import LinkInputs


class EdgeBlockLoader(LinkBlockLoader):
    """Yields batches whose seeds are edges with labels ``y``; ``links`` has the positions of their ends in the batch.

    The edges stay in the graph, so that sampled neighbours include them. With ``edge_attr``, if their type has the
    attribute, ``links.attr`` has their own features.
    """

    def __init__(
        self, graph: Graph, settings: LoaderSettings, seeds: LabelledEdges, rank: int, layout: RankLayout
    ):  # fmt: skip
        self._seeds, attr = seeds, settings.edge_attr
        self._attr = attr if attr in graph.manifest.edges[seeds.edge_type].attrs else None
        inputs = LinkInputs(seeds.edge_type, seeds, are_edges=False)
        super().__init__(graph, settings, inputs, LinkBlockSettings(negatives=0, hide=False), rank, layout)

    def _load(self, share: SeedShare) -> AnyBatch:
        batch, positions = super()._load(share), share.positions
        assert batch.links is not None
        attr = None if self._attr is None else self._seeds.attr(self._attr, positions)
        return replace(batch, y=self._seeds.y[positions], links=replace(batch.links, attr=attr))
