"""One hop on the parts of this process: neighbours and rows straight from the memory maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array, Ids
from trainer.errors import PartitionError
from trainer.partition.book import PartitionBook
from trainer.sample import kernels
from trainer.sample.grouping import group_by, merge_rows, merge_samples
from trainer.sample.types import HopRequest, HopSample
from trainer.store.part import Part, PartStore


class LocalGraph:
    """Answers for the opened parts of a ``PartStore``; safe to call from several threads."""

    def __init__(self, store: PartStore):
        self.store = store
        self.book: PartitionBook = store.book

    def sample_hop(self, request: HopRequest) -> HopSample:
        """Neighbours of owned nodes. Raises ``PartitionError`` for a node of another part."""
        if len(self.store.parts) == 1:
            (part,) = self.store.parts.values()
            self._check_owned(request.nodes)
            return _sample_part(part, request)
        samples = [
            (at, _sample_part(self.store.parts[p], replace(request, nodes=request.nodes[at])))
            for p, at in self._by_part(request.nodes).items()
        ]
        return merge_samples(len(request.nodes), samples, request.with_edge_id, self.id_dtype)

    def gather(self, nodes: Ids, attrs: Sequence[str]) -> Mapping[str, Array]:
        """Rows of owned nodes; name -> [n, …]. Raises ``PartitionError``."""
        groups = self._by_part(nodes)
        return {name: self._rows(name, nodes, groups, *self._spec(name)) for name in attrs}

    @property
    def id_dtype(self) -> np.dtype[Any]:
        """dtype of stored global ids."""
        return next(iter(self.store.parts.values())).indices.dtype if self.store.parts else np.dtype(np.int64)

    def _rows(
        self, name: str, nodes: Ids, groups: Mapping[int, Ids], dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Array:
        answers = [(at, *_column(self.store.parts[p], name, nodes[at])) for p, at in groups.items()]
        return merge_rows(len(nodes), answers, dtype, shape)

    def _by_part(self, nodes: Ids) -> dict[int, Ids]:
        if len(self.store.parts) == 1:
            self._check_owned(nodes)
            return {part_id: np.arange(len(nodes)) for part_id in self.store.parts}
        groups = group_by(self.book.part_of(nodes))
        if foreign := set(groups) - set(self.store.parts):
            raise self._foreign(foreign)
        return groups

    def _check_owned(self, nodes: Ids) -> None:
        ((part_id, _),) = self.store.parts.items()
        start, end = self.book.range_of(part_id)
        if len(nodes) and (nodes.min() < start or nodes.max() >= end):
            raise self._foreign(set(self.book.part_of(nodes).tolist()) - {part_id})

    def _foreign(self, part_ids: set[int]) -> PartitionError:
        unknown = {p for p in part_ids if not 0 <= p < self.book.num_parts}
        what = f"ids outside 0..{self.book.num_nodes - 1}" if unknown else f"nodes of parts {sorted(part_ids)}"
        return PartitionError(f"asked for {what}; this process holds parts {sorted(self.store.parts)}")

    def _spec(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        if name in ("orig_id", "in_degree"):
            return np.dtype(np.int64), ()
        spec = self.store.manifest.attrs.get(name)
        if spec is None:
            raise PartitionError(f"no node attribute {name!r}; there are {sorted(self.store.manifest.attrs)}")
        return np.dtype(spec.dtype), tuple(spec.shape[1:])


def _sample_part(part: Part, request: HopRequest) -> HopSample:
    rows = request.nodes - part.start
    counts = np.empty(len(rows), np.int32)
    longest = kernels.count_picks(part.indptr, rows, request.fanout, request.replace, counts)
    picks = np.empty(int(counts.sum(dtype=np.int64)), np.int64)
    kernels.pick_positions(
        part.indptr, rows, part.orig_id, counts, request.replace, request.fanout, request.shuffle,
        np.uint64(request.key), longest, picks,
    )  # fmt: skip
    return HopSample(counts, part.indices[picks], part.edge_id[picks] if request.with_edge_id else None)


def _column(part: Part, name: str, nodes: Ids) -> tuple[Array, npt.NDArray[np.int64]]:
    """The array to take from and the rows to take."""
    rows = nodes - part.start
    if name == "in_degree":
        return part.indptr[rows + 1] - part.indptr[rows], np.arange(len(rows))
    return (part.orig_id if name == "orig_id" else part.attrs[name]), rows
