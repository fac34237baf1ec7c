"""Labels of edges: those of each split, and the bundled trainer's loader, which samples blocks around their ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.batch import AnyBatch, LinkEnds
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, type_name
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout, SeedShare
from trainer.loader.block_loader import EdgeColumns, LoaderSettings, as_label, edge_columns, edge_rows
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, StoredEndpoints
from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
from trainer.loader.link_ends import TimeGroups
from trainer.loader.link_seeds import LinkInputs
from trainer.sampler.types import RowRequest, SeedSet

SPLIT, LABEL = "edge_split", "y"  #: edge attributes: the position of an edge's split in train, val, test; its label


@dataclass(frozen=True)
class LabelledEdges:
    """The edges of a split, in order of their original ids. Positions are those among them."""

    edge_type: EdgeType
    stored: StoredEndpoints
    orig_id: Ids  #: int64 [n]
    edges: Ids  #: int64 [n] numbers with which rows of their attributes are requested
    y: Tensor  #: [n, …] in the dataset's dtype
    times: Ids | None = None  #: int64 [n]

    def __len__(self) -> int:
        return len(self.orig_id)

    def ends_of(self, positions: Ids) -> tuple[Ids, Ids]:
        return self.stored.ends_of(self.orig_id[positions])

    def add_to(self, digest: Any) -> None:
        digest.update(np.ascontiguousarray(self.orig_id).data)

    def attr(self, columns: EdgeColumns, positions: Ids) -> Tensor:
        """Return attributes of edges as features, float32 [n, d]."""
        graph = self.stored.graph
        (rows,) = graph.access.gather([RowRequest(self.edge_type, self.edges[positions], tuple(columns))])
        return edge_rows(rows, columns)


def labelled_edges(graph: Graph, edge_type: EdgeType, time_attr: str | None = None) -> dict[str, LabelledEdges]:
    """Return the edges of each split that has some, by attribute ``edge_split``.

    Reads the labels of all edges, also those on other hosts, and keeps those of edges in a split.
    ``time_attr``: attribute with their times. Raises ``ServiceError``, and ``SettingsError`` if there is no such one.
    """
    spec = graph.manifest.edges[edge_type]
    if time_attr is not None and time_attr not in spec.attrs:
        raise SettingsError(
            f"time_attr: labels of edges need the times of the edges, and {type_name(edge_type)} has no attribute "
            f"{time_attr!r}; its attributes are: {', '.join(sorted(spec.attrs))}"
        )
    attrs = ("orig_id", SPLIT, LABEL, *([] if time_attr is None else [time_attr]))
    found: list[list[Any]] = [[] for _ in range(3)]
    for first in range(0, spec.num_edges, EDGES_AT_ONCE):
        edges = np.arange(first, min(first + EDGES_AT_ONCE, spec.num_edges))
        (rows,) = graph.access.gather([RowRequest(edge_type, edges, attrs)])
        split = np.asarray(rows[SPLIT]).reshape(-1)
        for number, own in enumerate(found):
            some = split == number
            orig_id, times = (
                np.asarray(rows[each])[some].astype(np.int64) for each in ("orig_id", time_attr or "orig_id")
            )
            own.append((orig_id, edges[some], np.asarray(rows[LABEL])[some], times))
    splits = {}
    for name, own in zip(("train", "val", "test"), found, strict=True):
        if not own or not sum(len(each[0]) for each in own):
            continue
        orig_id, numbers, y, times = (np.concatenate(column) for column in zip(*own, strict=True))
        order = np.argsort(orig_id)
        label = as_label(as_tensor(np.ascontiguousarray(y[order]), spec.attrs[LABEL]))
        splits[name] = LabelledEdges(
            edge_type, StoredEndpoints(graph, edge_type), orig_id[order], numbers[order], label,
            None if time_attr is None else times[order],
        )  # fmt: skip
    return splits


class EdgeBlockLoader(LinkBlockLoader):
    """Yields batches whose seeds are edges with labels ``y``; ``links`` has the positions of their ends in the batch.

    The edges stay in the graph, so that sampled neighbours include them, unless ``hide``: then those of the global
    batch, and their reverses, are left out. With ``edge_attr``, if their type has such attributes, ``links.attr`` has
    their own features. In disjoint sampling, both ends of an edge have a tree of their own; with ``time_attr``, an
    attribute of the edges, it has nothing later than the edge.
    """

    def __init__(
        self, graph: Graph, settings: LoaderSettings, seeds: LabelledEdges, rank: int, layout: RankLayout,
        hide: bool = False,
    ):  # fmt: skip
        self._seeds = seeds
        self._attr = edge_columns(graph.manifest, settings.edge_attr).get(seeds.edge_type)
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
