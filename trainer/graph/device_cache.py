"""Caches on a rank's device the rows of ``x`` that its batches request most."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.errors import SettingsError
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import NodeType
from trainer.graph.cache_fill import FETCH_BYTES, OpenedGraph
from trainer.graph.cache_policy import BatchPlan, RowCounts, count_rows, most_requested, presample
from trainer.graph.device import DeviceRows, as_tensor
from trainer.sampler.types import RowRequest

_MOST_ROWS = 2**31 - 1  #: row numbers of cached rows are int32


def device_rows(
    graph: OpenedGraph, plan: BatchPlan, size: CacheSize, device: torch.device
) -> dict[NodeType, DeviceRows]:
    """Copy the rows of ``x`` that this rank's batches request most to ``device``, as float32.

    ``size``: bytes, or a share of all rows of ``x`` in the graph. If it is 0, the result is {}. Raises
    ``SettingsError`` in a client, and ``ServiceError`` if a host does not answer.
    """
    budget = cache_bytes(graph, size)
    if not budget:
        return {}
    found = {}
    for of, ids in choose_rows(graph, count_requests(graph, plan), budget).items():
        rows = torch.empty((len(ids), row_width(graph, of)), dtype=torch.float32, device=device)
        load_rows(graph, of, ids, rows)
        found[of] = device_rows_of(graph, of, ids, rows)
    return found


def cache_bytes(graph: OpenedGraph, size: CacheSize) -> int:
    """Return ``size`` in bytes, at most those of all rows of ``x`` as float32, to which percents refer."""
    nodes = graph.manifest.nodes
    every = sum(4 * row_width(graph, of) * nodes[of].num_nodes for of in _types(graph))
    return round(size.share * every) if size.bytes is None else min(size.bytes, every)


def count_requests(graph: OpenedGraph, plan: BatchPlan) -> dict[NodeType, RowCounts]:
    """Sample some batches of ``plan``, and count how often they request each row of ``x``.

    Raises ``SettingsError`` in a client, and ``ServiceError`` if a host does not answer.
    """
    if graph.gateway:
        raise SettingsError("a client node cannot cache rows on its device: graph servers send it whole batches")
    return count_rows(presample(graph.access, plan), "x")


def choose_rows(graph: OpenedGraph, counts: Mapping[NodeType, RowCounts], budget: int) -> dict[NodeType, Ids]:
    """Choose the rows to cache in ``budget`` bytes. Returns ascending global ids, for types with cached rows only."""
    widths = {of: 4 * row_width(graph, of) for of in _types(graph)}
    chosen = most_requested(counts, widths, budget, lambda of: [(0, graph.manifest.nodes[of].num_nodes)])
    return {of: ids[:_MOST_ROWS] for of, ids in chosen.items() if len(ids)}


def load_rows(graph: OpenedGraph, of: NodeType, ids: Ids, out: Tensor) -> None:
    """Gather the rows of ``x`` of nodes ``ids`` into ``out``, float32 [n, width] on a device."""
    spec = graph.manifest.nodes[of].attrs["x"]
    step = max(1, FETCH_BYTES // max(1, out[:1].nbytes))
    for start in range(0, len(ids), step):
        (found,) = graph.access.gather([RowRequest(of, ids[start : start + step], ("x",))])
        out[start : start + step] = as_tensor(found["x"], spec).reshape(-1, out.shape[1])
    graph.access.take_cost()  # the cost is discarded, as it belongs to no batch


def device_rows_of(graph: OpenedGraph, of: NodeType, ids: Ids, rows: Tensor) -> DeviceRows:
    """Return cached rows with the index of their ids. ``rows``: float32 [n, width] on the device."""
    spec = graph.manifest.nodes[of]
    return DeviceRows.of(ids, rows.reshape(len(ids), *spec.attrs["x"].shape[1:]), spec.num_nodes, rows.device)


def row_width(graph: OpenedGraph, of: NodeType) -> int:
    """Return the number of elements of a row of ``x``."""
    return int(np.prod(graph.manifest.nodes[of].attrs["x"].shape[1:]))


def _types(graph: OpenedGraph) -> list[NodeType]:
    return [of for of, spec in graph.manifest.nodes.items() if "x" in spec.attrs]
