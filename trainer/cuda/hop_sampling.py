"""Samples neighbours on the device, one hop per call. Requests and answers contain tensors in place of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.cuda import neighbor_kernels
from trainer.cuda.array_ops import begins_of
from trainer.cuda.gather_kernels import take_numbers
from trainer.cuda.topology import DeviceEdges, DeviceTopology
from trainer.sampler.neighbor import MOST_EDGES, invalid_weight, too_many_edges
from trainer.sampler.types import HopRequest, HopSample
from trainer.store.part_store import PartStore


@dataclass
class _Hop:
    """The intermediate results of one request. Tensors are on the device; n is the number of requested nodes."""

    request: HopRequest
    edges: DeviceEdges
    trees: Tensor  #: int64 [n], empty if not disjoint
    excluded: tuple[Tensor, Tensor, Tensor]  #: sources, and their range for each node; empty without exclusions
    counts: Tensor  #: int32 [n] edges to draw
    work: Tensor  #: int64 [n] entries of work memory that each node needs
    work_begin: Tensor  #: int64 [n] first entry of each node in the work memory
    slots: Tensor  #: int64, work memory for slots
    values: Tensor  #: float64, work memory for weights, if draws have conditions
    found: Tensor  #: int64 [n] number of candidates


class DeviceHops:
    """Answers requests for sampled neighbours from a topology on the device. Implements ``HopSource``.

    Runs on torch's current stream. Each call waits for the stream, as it must read how large the next tensors will be:
    the number of drawn edges, and the size of the work memory that some draws need.
    """

    def __init__(self, topology: DeviceTopology, store: PartStore, device: torch.device):
        self._topology, self._store, self._device = topology, store, device
        self._no_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._no_values = torch.empty(0, dtype=torch.float64, device=device)
        self._no_bits = torch.empty(0, dtype=torch.uint8, device=device)

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        """Return sampled neighbours, one answer per request, with the same edges as ``LocalGraph.sample_hops``.

        Raises ``PartitionError`` if more than ``MOST_EDGES`` edges are drawn for a request. Raises ``DataError`` if a
        weight is negative or not finite.
        """
        hops = [self._counted(request) for request in requests]
        # Work memory for the requests that need it, and the candidates of draws with conditions.
        needy = [hop for hop in hops if _needs_work(hop.request)]
        sizes = self._read([hop.work.sum() for hop in needy])
        for hop, size in zip(needy, sizes, strict=True):
            hop.work_begin = begins_of(hop.work)
            hop.slots = torch.empty(size, dtype=torch.int64, device=self._device)
        conditional = [hop for hop in needy if _may_have_conditions(hop.request)]
        for hop in conditional:
            request, (excluded, begin, end) = hop.request, hop.excluded
            nodes: Any = request.nodes
            hop.values = torch.empty(len(hop.slots), dtype=torch.float64, device=self._device)
            hop.found = torch.empty(len(nodes), dtype=torch.int64, device=self._device)
            bounds: Any = self._no_ids if request.bound is None else request.bound.times
            weights = None if request.weight is None else hop.edges.weights
            neighbor_kernels.collect(
                len(nodes), hop.edges.indptr.argument, hop.edges.indices.argument, nodes, request.fanout,
                request.shuffle, request.replace, request.bound is not None and request.bound.last,
                request.weight is not None, request.top, self._times(hop), bounds, excluded, begin, end,
                self._no_values if weights is None else weights.argument, self._no_bits, hop.work, hop.work_begin,
                hop.slots, hop.values, hop.found, hop.counts,
            )  # fmt: skip
        lowest = self._read([hop.found.min() for hop in conditional if len(hop.found)])
        for hop in conditional if any(number < 0 for number in lowest) else ():
            wrong = torch.nonzero(hop.found < 0).flatten().tolist()
            if wrong:  # the first edge whose weight is negative or not finite
                edge, of = -1 - int(hop.found[wrong[0]]), hop.request.edge_type  # its global id
                part = self._store.topology[int(self._store.books[of].part_of(np.array([edge]))[0])].edges[of]
                raise invalid_weight(hop.request, part, edge - part.start)
        # The draws.
        begins = [begins_of(hop.counts) for hop in hops]
        totals = self._read([hop.counts.sum(dtype=torch.int64) for hop in hops])
        return [self._drawn(*each) for each in zip(hops, begins, totals, strict=True)]

    def _counted(self, request: HopRequest) -> _Hop:
        """Count for each node the edges to draw, ignoring conditions, and the work memory that it needs."""
        assert request.sources is None, "induced subgraphs are sampled by the CPU"
        assert not request.orig_edge, "original ids of edges are sampled by the CPU"
        nodes: Any = request.nodes
        size = len(nodes)
        trees: Any = self._no_ids if request.trees is None else request.trees
        # Sources of the excluded edges, sorted by target, then by source, and where those of each node begin and end.
        excluded = (self._no_ids,) * 3
        if request.exclude is not None:
            targets, sources = request.exclude
            order = np.lexsort((sources, targets))
            ordered = torch.from_numpy(targets[order]).to(self._device)
            excluded = (
                torch.from_numpy(sources[order]).to(self._device),
                torch.searchsorted(ordered, nodes),
                torch.searchsorted(ordered, nodes, right=True),
            )
        hop = _Hop(
            request, self._topology.edges[request.edge_type], trees, excluded,
            torch.empty(size, dtype=torch.int32, device=self._device),
            torch.empty(size, dtype=torch.int64, device=self._device),
            self._no_ids, self._no_ids, self._no_values, self._no_ids,
        )  # fmt: skip
        _, begin, end = hop.excluded
        neighbor_kernels.count_picks(
            size, hop.edges.indptr.argument, nodes, request.fanout, request.replace, _conditional(request), begin, end,
            hop.counts, hop.work,
        )  # fmt: skip
        return hop

    def _drawn(self, hop: _Hop, begins: Tensor, total: int) -> HopSample:
        request = hop.request
        if total > MOST_EDGES:
            raise too_many_edges(request)
        picks = torch.empty(total, dtype=torch.int64, device=self._device)
        nodes: Any = request.nodes
        size, key, bound = len(nodes), np.uint64(request.key), request.bound
        work_begin = hop.work_begin if _needs_work(request) else hop.work  # zeros, as no node has work
        orig_id = self._topology.nodes[request.edge_type[2]].argument
        if _may_have_conditions(request):
            neighbor_kernels.draw_conditional(
                size, hop.edges.indptr.argument, nodes, orig_id, hop.trees, request.fanout, request.shuffle,
                request.replace, bound is not None and bound.last, request.weight is not None, request.top,
                bound is not None, key, self._times(hop), hop.found, hop.counts, begins, hop.work, work_begin,
                hop.slots, hop.values, hop.values.view(torch.int64), picks,
            )  # fmt: skip
        else:
            neighbor_kernels.draw_picks(
                size, hop.edges.indptr.argument, nodes, orig_id, hop.trees, request.fanout, request.shuffle,
                request.replace, key, hop.counts, begins, hop.work, work_begin, hop.slots, picks,
            )  # fmt: skip
        src = torch.empty(total, dtype=hop.edges.indices.tensor.dtype, device=self._device)
        take_numbers(total, hop.edges.indices.argument, picks, src)
        counts: Any = hop.counts
        sources: Any = src
        edge: Any = picks if request.with_edge else None
        return HopSample(counts, sources, edge)

    def _times(self, hop: _Hop) -> Any:
        return self._no_ids if hop.request.bound is None or hop.edges.times is None else hop.edges.times.argument

    def _read(self, numbers: Sequence[Tensor]) -> list[int]:
        """Copy tensors of one number each to the host, in one copy. Waits for the stream."""
        return torch.stack(list(numbers)).tolist() if numbers else []


def _conditional(request: HopRequest) -> bool:
    """Return whether draws depend on weights or times. Excluded edges do not count: they affect only some nodes."""
    return request.bound is not None or request.weight is not None


def _may_have_conditions(request: HopRequest) -> bool:
    return _conditional(request) or request.exclude is not None


def _needs_work(request: HopRequest) -> bool:
    many = request.fanout > neighbor_kernels.LIST_PICKS and not request.replace
    return many or _may_have_conditions(request)
