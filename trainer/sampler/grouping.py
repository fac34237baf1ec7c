"""Splitting a request by owner and putting the answers back in request order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.core.arrays import Array, Ids, read_only
from trainer.sampler import neighbor
from trainer.sampler.types import HopRequest, HopSample


def cut_request(request: HopRequest, at: Array) -> HopRequest:
    """The same request for the rows ``at`` (positions) only, with the exclusions that concern them."""
    nodes = request.nodes[at]
    return replace(
        request,
        nodes=nodes,
        trees=None if request.trees is None else request.trees[at],
        bound=None if request.bound is None else replace(request.bound, times=request.bound.times[at]),
        exclude=None if request.exclude is None else _exclusions_of(nodes, *request.exclude),
    )


def _exclusions_of(nodes: Ids, targets: Ids, sources: Ids) -> tuple[Ids, Ids] | None:
    concerned = np.isin(targets, nodes)
    return (targets[concerned], sources[concerned]) if concerned.any() else None


def merge_samples(num_rows: int, answers: Sequence[tuple[Array, HopSample]], with_edge: bool) -> HopSample:
    """One sample in request order from (positions, sample of those positions) pairs."""
    counts = np.zeros(num_rows, np.int32)
    for positions, sample in answers:
        counts[positions] = sample.counts
    begins = np.zeros(num_rows + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    src = _merge_runs([(at, sample.counts, sample.src) for at, sample in answers], begins)
    if not with_edge:
        return HopSample(counts, src, None)
    edges = [(at, sample.counts, sample.edge) for at, sample in answers if sample.edge is not None]
    return HopSample(counts, src, _merge_runs(edges, begins))


def _merge_runs(runs: Sequence[tuple[Array, Array, Array]], begins: Ids) -> Array:
    dtypes = [values.dtype for _, _, values in runs]
    out: Array = np.empty(int(begins[-1]), np.result_type(np.int32, *dtypes))
    for positions, counts, values in runs:
        neighbor.scatter_runs(read_only(values), read_only(counts), positions, begins, out)
    return out
