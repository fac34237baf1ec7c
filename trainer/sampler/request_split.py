"""Splits requests by the part or host that answers them, and merges the answers in request order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainer.core.arrays import Array, Ids, read_only
from trainer.sampler import neighbor_kernels
from trainer.sampler.types import HopRequest, HopSample
from trainer.store.part_store import BookKey

Groups = Mapping[int, Array]  #: host -> int32 positions, ascending


class RequestSplit:
    """Splits the arrays of several requests by the host that answers for each id.

    Use an instance only while the arrays exist: it caches results by the ``id()`` of an array, and Python gives the
    ``id()`` of a deleted array to new arrays.
    """

    def __init__(self, group: Callable[[BookKey, Ids], Groups]):
        self._group = group  #: returns positions of ids by the host that answers for them
        self._groups: dict[tuple[BookKey, int], Groups] = {}
        self._cuts: dict[tuple[int, int], Ids] = {}

    def groups(self, of: BookKey, ids: Ids) -> Groups:
        """Group the positions in ``ids`` (int64 [n]) by the host that answers for the id."""
        key = of, id(ids)
        if key not in self._groups:
            self._groups[key] = self._group(of, ids)
        return self._groups[key]

    def cut(self, array: Ids, at: Array) -> Ids:
        """Return ``array[at]``. ``at`` must be an array that ``groups`` returned."""
        # Equal arguments give the same object, so that a message contains an array only once.
        if len(at) == len(array):
            return array
        key = id(array), id(at)
        if key not in self._cuts:
            self._cuts[key] = array[at]
        return self._cuts[key]

    def hop(self, request: HopRequest, host: int, at: Array) -> HopRequest:
        """Return the share of a request that ``host`` answers. ``at``: positions of its nodes, from ``groups``."""
        bound, exclude = request.bound, request.exclude
        if exclude is not None:
            near = self.groups(request.edge_type[2], exclude[0]).get(host)
            exclude = None if near is None else (self.cut(exclude[0], near), self.cut(exclude[1], near))
        return replace(
            request,
            nodes=self.cut(request.nodes, at),
            trees=None if request.trees is None else self.cut(request.trees, at),
            bound=None if bound is None else replace(bound, times=self.cut(bound.times, at)),
            exclude=exclude,
        )


def cut_request(request: HopRequest, at: Array) -> HopRequest:
    nodes, exclude = request.nodes[at], request.exclude
    if exclude is not None:
        near = np.isin(exclude[0], nodes)
        exclude = (exclude[0][near], exclude[1][near]) if near.any() else None
    return replace(
        request,
        nodes=nodes,
        trees=None if request.trees is None else request.trees[at],
        bound=None if request.bound is None else replace(request.bound, times=request.bound.times[at]),
        exclude=exclude,
    )


def merge_samples(num_rows: int, answers: Sequence[tuple[Array, HopSample]], with_edge: bool) -> HopSample:
    """Merge the answers to the shares of a request into one answer, in request order.

    ``answers``: for each share, the positions of its nodes in the request, and the answer. ``with_edge``: whether
    answers contain edge ids.
    """
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
        neighbor_kernels.scatter_runs(read_only(values), read_only(counts), positions, begins, out)
    return out
