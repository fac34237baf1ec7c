"""The edges of a part, some at a time."""

from __future__ import annotations

import numpy as np

from trainer.core.errors import PartitionError
from trainer.core.schema import EdgeType
from trainer.sampler.specs import check_type
from trainer.sampler.types import EdgeList
from trainer.store.part_store import PartStore

EDGES_AT_ONCE = 1 << 22  #: at most 96 MiB


def edge_slice(store: PartStore, part_id: int, edge_type: EdgeType, first: int, count: int) -> EdgeList:
    """Edges ``first`` to ``first + count`` of a part, by slot.

    Raises ``PartitionError`` for a part that is not open, an unknown type, or slots that are not there.
    """
    check_type(store, edge_type)
    if part_id not in store.topology:
        raise PartitionError(f"asked for edges of part {part_id}; this process holds parts {sorted(store.parts)}")
    edges, last = store.topology[part_id].edges[edge_type], first + count
    if not 0 <= first <= last <= edges.num_edges:
        raise PartitionError(f"part {part_id} has {edges.num_edges} edges; asked for {first} to {last}")
    begin = np.searchsorted(edges.indptr, first, side="right") - 1
    end = max(begin, np.searchsorted(edges.indptr, last, side="left"))
    widths = np.diff(np.clip(edges.indptr[begin : end + 1], first, last))
    first_target, _ = store.books[edge_type[2]].range_of(part_id)
    return EdgeList(
        src=edges.indices[first:last].astype(np.int64),
        dst=first_target + np.repeat(np.arange(begin, end), widths),
        orig_id=edges.orig_id[first:last].astype(np.int64),
    )
