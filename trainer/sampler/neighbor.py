"""Samples neighbours of nodes of one part: chooses the kernel that draws them for a request."""

from __future__ import annotations

import numpy as np

from trainer.core import slabs
from trainer.core.arrays import Array, Ids, read_only
from trainer.core.errors import DataError, PartitionError
from trainer.sampler import neighbor_kernels
from trainer.sampler.requests import cut_request, merge_samples
from trainer.sampler.types import HopRequest, HopSample
from trainer.sampler.weighted_temporal import TOO_MANY, Conditions, Draws, allow, pick_candidates
from trainer.store.part_store import EdgePart, NodePart

MOST_EDGES = 1 << 28  #: largest number of edges in one answer, limited by the array size on the wire


def sample_rows(nodes: NodePart, edges: EdgePart, request: HopRequest, num_sources: int) -> HopSample:
    """Sample the edges that ``request`` asks for. The nodes of the request must be in this part.

    ``num_sources``: number of nodes of the source type.

    Raises ``DataError`` for a weight that is negative or not finite, and ``PartitionError`` for more than
    ``MOST_EDGES`` edges or an attribute that is missing or not usable as weight or time.
    """
    if request.bound is not None or request.weight is not None or request.sources is not None:
        return _conditional(nodes, edges, request, num_sources)
    if request.exclude is None:
        return _plain(nodes, edges, request)
    affected = np.isin(request.nodes, request.exclude[0])  # the other rows use the faster kernel
    at, others = np.flatnonzero(affected), np.flatnonzero(~affected)
    if len(at) == 0:
        return _plain(nodes, edges, request)
    answers = [
        (at, _conditional(nodes, edges, cut_request(request, at), num_sources)),
        (others, _plain(nodes, edges, cut_request(request, others))),
    ]
    return merge_samples(len(request.nodes), answers, request.with_edge)


def _plain(nodes: NodePart, edges: EdgePart, request: HopRequest) -> HopSample:
    indptr, asked = read_only(edges.indptr), read_only(request.nodes)
    counts = np.empty(len(asked), np.int32)
    longest = neighbor_kernels.count_picks(indptr, asked, nodes.start, request.fanout, request.replace, counts)
    total = int(counts.sum(dtype=np.int64))
    if total > MOST_EDGES:
        raise too_many_edges(request)
    src = slabs.empty(total, edges.indices.dtype)
    orig_edge = read_only(edges.orig_id if request.orig_edge else edges.orig_id[:0])
    edge = slabs.empty(
        total if request.with_edge else 0, edges.orig_id.dtype if request.orig_edge else _edge_dtype(edges)
    )
    neighbor_kernels.draw_edges(
        indptr, read_only(edges.indices), asked, nodes.start, read_only(nodes.orig_id), _trees(request), counts,
        request.replace, request.fanout, request.shuffle, np.uint64(request.key), longest, edges.start, orig_edge,
        src, edge,
    )  # fmt: skip
    return HopSample(counts, src, edge if request.with_edge else None)


def _conditional(nodes: NodePart, edges: EdgePart, request: HopRequest, num_sources: int) -> HopSample:
    rows = request.nodes - nodes.start
    counts = np.empty(len(rows), np.int32)
    longest = neighbor_kernels.count_picks(
        read_only(edges.indptr), read_only(request.nodes), nodes.start, -1, False, counts
    )
    # Sources of excluded edges, sorted by target, then by source, and where those of each node begin and end.
    excluded = begin = end = np.empty(0, np.int64)
    if request.exclude is not None:
        targets, sources = request.exclude
        order = np.lexsort((sources, targets))
        excluded, ordered = sources[order], targets[order]
        begin, end = np.searchsorted(ordered, request.nodes), np.searchsorted(ordered, request.nodes, "right")
    # Times of the edges or of their sources.
    bound = request.bound
    times: Array = np.empty(0, np.int64)
    if bound is not None:
        known = edges.src_times if bound.on == "node" else edges.attrs
        if bound.attr not in known:
            raise PartitionError(
                f"no time attribute {bound.attr!r} of the {bound.on}s of {request.edge_type}; there are {sorted(known)}"
            )
        times = known[bound.attr]
        if times.ndim != 1 or times.dtype.kind not in "iu":
            raise PartitionError(
                f"{bound.attr!r} of {request.edge_type} is {times.dtype} {list(times.shape)}, not integer times"
            )
    # The sources that are allowed, as one bit for each node of the source type; empty: all.
    bits = np.empty(0, np.uint8)
    if request.sources is not None:
        bits = np.zeros(num_sources // 8 + 1, np.uint8)
        if len(request.sources):
            if request.sources.min() < 0 or request.sources.max() >= num_sources:
                raise PartitionError(
                    f"the request has ids of type {request.edge_type[0]!r} outside 0 to {num_sources - 1}"
                )
            allow(request.sources, bits)
    weights: Array = np.empty(0, np.float32)
    if (name := request.weight) is not None:
        if name not in edges.attrs:
            raise PartitionError(f"no attribute {name!r} of {request.edge_type}; there are {sorted(edges.attrs)}")
        weights = edges.attrs[name]
        if weights.ndim != 1 or weights.dtype.kind not in "biuf":
            raise PartitionError(
                f"{name!r} of {request.edge_type} is {weights.dtype} {list(weights.shape)}, not weights"
            )
    conditions = Conditions(
        times=read_only(times),
        bounds=read_only(np.empty(0, np.int64) if bound is None else bound.times),
        excluded=read_only(excluded),
        excluded_begin=read_only(begin),
        excluded_end=read_only(end),
        allowed=read_only(bits),
        weights=read_only(weights),
    )
    draws = Draws(
        request.fanout, request.shuffle, request.replace, bound is not None and bound.last,
        request.weight is not None, request.top, np.uint64(request.key),
    )  # fmt: skip
    picks, wrong = pick_candidates(
        edges.indptr, edges.indices, rows, nodes.orig_id, _trees(request), conditions, draws, longest, counts,
        MOST_EDGES,
    )  # fmt: skip
    if wrong == TOO_MANY:
        raise too_many_edges(request)
    if wrong >= 0:
        raise invalid_weight(request, edges, wrong)
    edge = None
    if request.with_edge and request.orig_edge:
        edge = edges.orig_id[picks]
    elif request.with_edge:
        edge = np.add(picks, edges.start, dtype=_edge_dtype(edges), casting="unsafe")
    return HopSample(counts, edges.indices[picks], edge)


def _edge_dtype(edges: EdgePart) -> type[np.int32] | type[np.int64]:
    return np.int32 if edges.start + edges.num_edges < 2**31 else np.int64


def invalid_weight(request: HopRequest, edges: EdgePart, slot: int) -> DataError:
    """Return the error for an edge of a part whose weight is negative or not finite."""
    name = str(request.weight)
    return DataError(
        f"edge {edges.orig_id[slot]} of {request.edge_type} has the weight {edges.attrs[name][slot]} in {name!r}; "
        "weights must be finite and not negative"
    )


def too_many_edges(request: HopRequest) -> PartitionError:
    return PartitionError(
        f"{len(request.nodes)} nodes with fanout {request.fanout} have more than {MOST_EDGES} neighbours by "
        f"{request.edge_type}; use smaller batches or fanouts"
    )


def _trees(request: HopRequest) -> Ids:
    return np.empty(0, np.int64) if request.trees is None else request.trees
