"""Drawing in-edges of nodes of one part."""

from __future__ import annotations

import numpy as np

from trainer.arrays import Array, Ids
from trainer.sample import kernels
from trainer.sample.subgraph import Positions
from trainer.sample.types import HopRequest, HopSample
from trainer.store.part import EdgePart, NodePart

_NO_TREES = np.empty(0, np.int64)


def sample_rows(nodes: NodePart, edges: EdgePart, request: HopRequest, num_sources: int) -> HopSample:
    """The edges that ``request`` asks for; its nodes are owned by the part."""
    counts, picks = _plain(nodes, edges, request)
    return HopSample(counts, edges.indices[picks], _edge_ids(edges, picks) if request.with_edge else None)


def _edge_ids(edges: EdgePart, slots: Ids) -> Array:
    """Global ids, in the narrowest dtype that holds all of the part's."""
    dtype = np.int32 if edges.start + edges.num_edges < 2**31 else np.int64
    return np.add(slots, edges.start, dtype=dtype, casting="unsafe")


def _plain(nodes: NodePart, edges: EdgePart, request: HopRequest) -> tuple[Positions, Ids]:
    rows = request.nodes - nodes.start
    counts = np.empty(len(rows), np.int32)
    longest = kernels.count_picks(edges.indptr, rows, request.fanout, request.replace, counts)
    picks = np.empty(int(counts.sum(dtype=np.int64)), np.int64)
    kernels.pick_positions(
        edges.indptr, rows, nodes.orig_id, _NO_TREES if request.trees is None else request.trees,
        counts, request.replace, request.fanout, request.shuffle, np.uint64(request.key), longest, picks,
    )  # fmt: skip
    return counts, picks
