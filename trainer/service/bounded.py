"""A graph for one request: it refuses what would take more memory than an answer may."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import Cost
from trainer.core.errors import ServiceError
from trainer.core.schema import EdgeType
from trainer.sampler.specs import row_spec
from trainer.sampler.subgraph_sampler import CountedAccess
from trainer.sampler.types import EdgeList, HopRequest, HopSample, RowRequest
from trainer.store.part_store import PartStore

_BYTES_OF_EDGE = 4  # at least: its source


def check_rows(store: PartStore, requests: Sequence[RowRequest], limit: int) -> None:
    """Raise ``ServiceError`` for rows of more than ``limit`` bytes together, ``PartitionError`` for unknown ones."""
    total = 0
    for request in requests:
        for name in request.attrs:
            dtype, shape = row_spec(store, request.of, name)
            total += len(request.ids) * math.prod(shape) * dtype.itemsize
    if total > limit:
        raise ServiceError(f"an answer of {total} bytes is over {limit}; ask for fewer nodes at once")


class BoundedGraph:
    """``graph`` for one request whose neighbours and rows may take ``limit`` bytes."""

    def __init__(self, graph: CountedAccess, store: PartStore, limit: int):
        self._graph, self._store, self._limit = graph, store, limit
        self._edges = 0

    def sample_hops(self, requests: Sequence[HopRequest]) -> list[HopSample]:
        samples = self._graph.sample_hops(requests)
        self._edges += sum(len(sample.src) for sample in samples)
        if self._edges * _BYTES_OF_EDGE > self._limit:
            raise ServiceError(
                f"{self._edges} edges and more take over {self._limit} bytes; make batches or fanouts smaller"
            )
        return samples

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        check_rows(self._store, requests, self._limit)
        return self._graph.gather(requests)

    def has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> npt.NDArray[np.bool_]:
        return self._graph.has_edges(edge_type, src, dst)

    def edge_list(self, edge_type: EdgeType) -> EdgeList:
        return self._graph.edge_list(edge_type)

    def take_cost(self) -> Cost:
        return self._graph.take_cost()
