"""Splitting a request by owner and putting the answers back in request order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer import slabs
from trainer.arrays import Array, Ids, read_only
from trainer.sample import kernels
from trainer.sample.types import HopRequest, HopSample


def group_by(owners: Ids) -> dict[int, Ids]:
    """Positions of each owner, ascending within an owner; int64 arrays keyed by owner, a small number."""
    if len(owners) == 0:
        return {}
    low = int(owners.min())
    ends = np.cumsum(kernels.count_numbers(owners, low, int(owners.max()) - low + 1))
    begins = np.concatenate([[0], ends[:-1]])
    order = kernels.order_by_number(owners, low, begins.copy())
    runs = enumerate(zip(begins, ends, strict=True), low)
    return {owner: order[begin:end] for owner, (begin, end) in runs if begin < end}


def cut_request(request: HopRequest, at: Ids) -> HopRequest:
    """The same request for the rows ``at`` (int64 positions) only, with the exclusions that concern them."""
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


def merge_samples(num_rows: int, answers: Sequence[tuple[Ids, HopSample]], with_edge: bool) -> HopSample:
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


def _merge_runs(runs: Sequence[tuple[Ids, Array, Array]], begins: Ids) -> Array:
    dtypes = [values.dtype for _, _, values in runs]
    out: Array = np.empty(int(begins[-1]), np.result_type(np.int32, *dtypes))
    for positions, counts, values in runs:
        kernels.scatter_runs(read_only(values), read_only(counts), positions, begins, out)
    return out


def merge_rows(
    num_rows: int, answers: Sequence[tuple[Ids, Array, Ids]], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array:
    """[num_rows, *shape] with ``out[positions] = source[rows]`` for each (positions, source, rows)."""
    out = slabs.empty((num_rows, *shape), dtype)
    for positions, source, rows in answers:
        kernels.take_rows(read_only(_as_words(source, dtype)), rows, positions, _as_words(out, dtype))
    return out


def _as_words(array: Array, dtype: np.dtype[Any]) -> Array:
    """A 2-d view with unsigned words instead of ``dtype``, so one kernel serves every dtype of a width."""
    flat = np.ascontiguousarray(array, dtype=dtype).reshape(len(array), math.prod(array.shape[1:]))
    return flat.view(np.dtype(f"u{dtype.itemsize}")) if dtype.itemsize in (1, 2, 4, 8) else flat.view(np.uint8)
