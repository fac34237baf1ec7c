"""The edges of each split that have labels, and their labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, type_name
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.loader.block_loader import as_label, edge_rows
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, StoredEndpoints
from trainer.sampler.types import RowRequest

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

    def attr(self, name: str, positions: Ids) -> Tensor:
        """Return an attribute of edges as features, float32 [n, d]."""
        graph = self.stored.graph
        (rows,) = graph.access.gather([RowRequest(self.edge_type, self.edges[positions], (name,))])
        return edge_rows(rows[name], graph.manifest.edges[self.edge_type].attrs[name])


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
