"""Splitting a request by owner and putting the answers back in request order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.arrays import Array, Ids
from trainer.sample import kernels
from trainer.sample.types import HopSample


def group_by(owners: Ids) -> dict[int, Ids]:
    """Positions of each owner, ascending within an owner; int64 arrays keyed by owner."""
    if len(owners) == 0:
        return {}
    order = np.argsort(owners, kind="stable")
    ordered = owners[order]
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    return {int(owners[run[0]]): run for run in np.split(order, cuts)}


def merge_samples(
    num_nodes: int, answers: Sequence[tuple[Ids, HopSample]], with_edge_id: bool, id_dtype: np.dtype[Any]
) -> HopSample:
    """One sample in request order from (positions, sample of those positions) pairs."""
    counts = np.zeros(num_nodes, np.int32)
    for positions, sample in answers:
        counts[positions] = sample.counts
    begins = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(counts, out=begins[1:])
    src = np.empty(int(begins[-1]), id_dtype)
    edge_id = np.empty(len(src), np.int64) if with_edge_id else None
    for positions, sample in answers:
        kernels.scatter_runs(sample.src, sample.counts, positions, begins, src)
        if edge_id is not None:
            kernels.scatter_runs(sample.edge_id, sample.counts, positions, begins, edge_id)
    return HopSample(counts, src, edge_id)


def merge_rows(
    num_nodes: int, answers: Sequence[tuple[Ids, Array, Ids]], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array:
    """[num_nodes, *shape] with ``out[positions] = source[rows]`` for each (positions, source, rows)."""
    out = np.empty((num_nodes, *shape), dtype)
    for positions, source, rows in answers:
        kernels.take_rows(_as_words(source, dtype), rows, positions, _as_words(out, dtype))
    return out


def _as_words(array: Array, dtype: np.dtype[Any]) -> Array:
    """A 2-d view with unsigned words instead of ``dtype``, so one kernel serves every dtype of a width."""
    flat = np.ascontiguousarray(array, dtype=dtype).reshape(len(array), math.prod(array.shape[1:]))
    return flat.view(np.dtype(f"u{dtype.itemsize}")) if dtype.itemsize in (1, 2, 4, 8) else flat.view(np.uint8)
