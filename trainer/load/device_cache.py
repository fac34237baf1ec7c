"""Which rows stay on the device: those most likely to be in a rank's batches, whoever owns them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from trainer.arrays import Ids
from trainer.errors import SettingsError
from trainer.load.convert import as_tensor
from trainer.load.device import DeviceRows
from trainer.load.hot import BatchPlan, hottest, rows_of, seed_chances
from trainer.load.open import Graph
from trainer.load.seeds import RankLayout
from trainer.partition.visits import expected_visits
from trainer.reach import CacheSize
from trainer.sample.types import RowRequest
from trainer.schema import NodeType

_FETCH = 64 << 20  #: bytes of rows that are fetched in one call


def device_rows(
    graph: Graph, plan: BatchPlan, layout: RankLayout, rank: int, size: CacheSize, device: torch.device
) -> dict[NodeType, DeviceRows]:
    """Features of the types that have some, as float32 on ``device``, up to ``size`` of them; {} for none.

    A share is one of all rows of the graph. Raises ``SettingsError`` where the edges of some part are not on this
    host, as they are not on a client node; ``ServiceError`` when an owner does not answer.
    """
    specs = graph.manifest.nodes
    widths = {of: 4 * int(np.prod(spec.attrs["x"].shape[1:])) for of, spec in specs.items() if "x" in spec.attrs}
    budget = size.bytes if size.bytes is not None else round(
        size.share * sum(width * specs[of].num_nodes for of, width in widths.items())
    )  # fmt: skip
    if not budget:
        return {}
    if graph.gateway or not graph.store.whole_topology:
        raise SettingsError(
            "device_cache: which rows are asked for most is known only where all edges are; set data.topology to"
            " replicated (--topology replicated), or device_cache to 0"
        )
    blocks = [block for part in graph.store.topology.values() for _, block in rows_of(part, 0, 1)]
    seeds = seed_chances(plan, graph.store, layout, [rank])
    chances = expected_visits(blocks, seeds, plan.fanouts, replace=plan.replace, again=plan.again).chances
    kept = hottest({of: chances[of] for of in widths}, widths, budget)
    return {of: _on_device(graph, of, ids, device) for of, ids in kept.items() if len(ids)}


def bytes_of(rows: Mapping[NodeType, DeviceRows]) -> int:
    """What they take on the device."""
    return sum(kept.rows.nbytes for kept in rows.values())


def _on_device(graph: Graph, of: NodeType, ids: Ids, device: torch.device) -> DeviceRows:
    spec = graph.manifest.nodes[of].attrs["x"]
    rows = torch.empty((len(ids), *spec.shape[1:]), dtype=torch.float32, device=device)
    at_once = max(1, _FETCH // max(1, rows[:1].nbytes))
    for start in range(0, len(ids), at_once):
        (found,) = graph.access.gather([RowRequest(of, ids[start : start + at_once], ("x",))])
        rows[start : start + at_once] = as_tensor(found["x"], spec)
    graph.access.take_cost()  # no batch's
    return DeviceRows.of(ids, rows, graph.manifest.nodes[of].num_nodes, device)
