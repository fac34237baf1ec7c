"""Caches on a rank's device the rows of ``x`` that its batches request most."""

from __future__ import annotations

import numpy as np
import torch

from trainer.core.errors import SettingsError
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import NodeType
from trainer.graph.cache_fill import FETCH_BYTES, OpenedGraph
from trainer.graph.cache_policy import BatchPlan, count_rows, most_requested, presample
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
    budget, nodes = cache_bytes(graph, size), graph.manifest.nodes
    if not budget:
        return {}
    if graph.gateway:
        raise SettingsError("a client node cannot cache rows on its device: graph servers send it whole batches")
    counts = count_rows(presample(graph.access, plan), "x")
    widths = {of: 4 * _row_width(graph, of) for of, spec in nodes.items() if "x" in spec.attrs}
    found = {}
    for of, chosen in most_requested(counts, widths, budget, lambda of: [(0, nodes[of].num_nodes)]).items():
        ids, spec = chosen[:_MOST_ROWS], nodes[of].attrs["x"]
        if not len(ids):
            continue
        rows = torch.empty((len(ids), *spec.shape[1:]), dtype=torch.float32, device=device)
        step = max(1, FETCH_BYTES // max(1, rows[:1].nbytes))
        for start in range(0, len(ids), step):
            (gathered,) = graph.access.gather([RowRequest(of, ids[start : start + step], ("x",))])
            rows[start : start + step] = as_tensor(gathered["x"], spec).reshape(-1, *spec.shape[1:])
        found[of] = DeviceRows.of(ids, rows, nodes[of].num_nodes, device)
    graph.access.take_cost()  # the cost is discarded, as it belongs to no batch
    return found


def cache_bytes(graph: OpenedGraph, size: CacheSize) -> int:
    """Return ``size`` in bytes, at most those of all rows of ``x`` as float32, to which percents refer."""
    nodes = graph.manifest.nodes
    every = sum(4 * _row_width(graph, of) * spec.num_nodes for of, spec in nodes.items() if "x" in spec.attrs)
    return round(size.share * every) if size.bytes is None else min(size.bytes, every)


def _row_width(graph: OpenedGraph, of: NodeType) -> int:
    """Return the number of elements of a row of ``x``."""
    return int(np.prod(graph.manifest.nodes[of].attrs["x"].shape[1:]))
