"""Dropout of any model with masks that do not depend on the number of ranks.

``KeyedDropout`` takes the place of ``torch.nn.functional.dropout``, which ``torch.nn.Dropout`` and torch_geometric's
layers call, while a model runs. Which nodes or edges the rows of a call belong to is found once, on a test batch in
which all numbers of nodes and edges differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch_geometric.data import Data, HeteroData

from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, node_salt
from trainer.nn.kernels.dropout import edge_ids, hash_dropout

#: What the rows of a tensor belong to: nodes of a type up to a hop, or edges of a type in a layer.
RowsOf: TypeAlias = tuple[str, NodeType | EdgeType, int]


class KeyedDropout(TorchFunctionMode):
    """Draws dropout masks from the batch's key and the ids of the rows.

    Args:
        rows: What rows can belong to, with their number, and a function that returns their ids, int64 [rows].
        key: Random key of the batch.
        known: What the rows of each call belong to, as ``found`` of the test batch; None: this is the test batch.
    """

    def __init__(
        self, rows: Mapping[RowsOf, tuple[int, Callable[[], Tensor]]], key: int, known: list[RowsOf | None] | None
    ):  # fmt: skip
        super().__init__()
        self.rows, self.key, self.known = rows, key, known
        self.found: list[RowsOf | None] = []  #: what the rows of each call belong to; None: nothing known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(self, rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return rows
        number, count = len(self.found), len(rows) if rows.dim() else 0
        if self.known is None or number >= len(self.known):
            of = next((of for of, (size, _) in self.rows.items() if size == count), None)
        else:
            of = self.known[number]
            of = of if of is not None and of in self.rows and self.rows[of][0] == count else None
        self.found.append(of)
        if of is None or p >= 1 or not rows.is_floating_point():
            return functional.dropout(rows, p, True)
        flat = rows.flatten(1).contiguous() if rows.dim() > 1 else rows[:, None]
        return hash_dropout(flat, self.rows[of][1](), p, self.key, number, True).reshape(rows.shape)


class BatchDropout(KeyedDropout):
    """The same for a batch of torch_geometric: rows are known by their number, which another type rarely shares.

    The nodes of a type, also up to a hop, and its edges, also with self loops in place of the given ones. In disjoint
    batches, which have a node several times, torch draws the masks.
    """

    def __init__(self, batch: Any, key: int):
        super().__init__({}, key, None)
        self._batch = batch

    def _dropout(self, rows: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not self.rows and isinstance(self._batch, Data | HeteroData):
            self.rows = dict(_rows_of_batch(self._batch, rows.device))
        return super()._dropout(rows, p, training, inplace)


def _rows_of_batch(batch: Data | HeteroData, device: Any) -> Iterator[tuple[RowsOf, tuple[int, Callable[[], Tensor]]]]:
    # Ids are computed where the batch is, and copied to the device: reading a number from a device would wait for it.
    def later(ids: Callable[..., Tensor], *args: Any) -> Callable[[], Tensor]:
        return lambda: ids(*args).to(device)

    nodes = {store._key or HOMO_NODE: store for store in batch.node_stores if store.get("n_id") is not None}
    n_id = {of: store.n_id for of, store in nodes.items() if store.get("batch") is None}
    for of, ids in n_id.items():
        yield ("nodes", of, -1), (len(ids), later(salted, ids, of))
        totals = accumulate(map(int, nodes[of].get("num_sampled_nodes") or ()))
        for hop, count in enumerate(totals):
            yield ("nodes", of, hop), (count, later(salted, ids[:count], of))
    for store in batch.edge_stores:
        of = store._key or HOMO_EDGE
        if "edge_index" not in store or of[0] not in n_id or of[2] not in n_id:
            continue
        src, dst = store.edge_index
        edges = partial(edges_by_ends, n_id[of[0]], n_id[of[2]], src, dst)
        yield ("edges", of, 0), (len(src), later(edges))
        if of[0] == of[2]:
            others, ids = src != dst, n_id[of[0]]
            yield ("loops", of, 0), (int(others.sum()) + len(ids), later(with_loops, edges, others, ids))


def salted(n_id: Tensor, of: NodeType) -> Tensor:
    """Return ids that differ between node types, int64 [n]. ``n_id``: original ids, int64 [n]."""
    salt = node_salt(of)
    return n_id ^ (salt - (1 << 64) if salt >= 1 << 63 else salt)


def edges_by_ends(src_ids: Tensor, dst_ids: Tensor, src: Tensor, dst: Tensor) -> Tensor:
    """Return an id for each edge from the original ids of its ends, int64 [E].

    ``src``, ``dst``: int64 [E], positions in ``src_ids`` and ``dst_ids``.
    """
    return edge_ids(src_ids[src], dst_ids[dst])


def with_loops(edges: Callable[[], Tensor], others: Tensor, nodes: Tensor) -> Tensor:
    """Return ids of the edges that ``others`` (bool [E]) selects, and of a loop for each of ``nodes``."""
    return torch.cat([edges()[others], edge_ids(nodes, nodes)])
