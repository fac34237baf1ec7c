"""Trainable rows for nodes without features, spread over the ranks of a run."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.compiled import njit
from trainer.core.errors import DataError
from trainer.core.rng import GOLDEN, batch_key, fraction, mix, node_key
from trainer.core.row_exchange import Route, group_rank, group_size, plan_route
from trainer.core.schema import NodeType
from trainer.nn.kernels.rows import run_rows

Tables = dict[NodeType, Tensor]  #: rows by node type


class ShardedEmbedding:
    """One row per node of some types, each on one rank.

    A step is ``lookup`` (forward), ``loss.backward()``, ``sync_gradients()``, then a step of any
    optimizer that takes sparse gradients over ``[embedding.weight]`` (SparseAdam, Adagrad, SGD without
    momentum); it changes only rows that were looked up. Every rank has to look up and to sync equally
    often, also with no ids. Gradients become means over ranks, as those of DistributedDataParallel, so
    one loss suits both.

    The types' rows stand one after the other, and row g of them all is on rank g % ranks: who holds a
    row does not depend on partitions. A row begins as a pure function of (seed, type, original id),
    uniform with variance 1 / dim. This is no ``nn.Module``: in a model, DistributedDataParallel would
    take the shards for copies of one table.
    """

    def __init__(
        self, num_nodes: Mapping[NodeType, int], dim: int, seed: int = 0, device: torch.device | None = None,
        group: Any = None,
    ):  # fmt: skip
        self.num_nodes, self.dim, self.group = dict(num_nodes), dim, group
        self.rank, self.size = group_rank(group), group_size(group)
        self.total = sum(self.num_nodes.values())
        bounds = np.cumsum([0, *self.num_nodes.values()]).tolist()
        self.first = dict(zip(self.num_nodes, bounds, strict=False))  #: row of each type's node 0
        self.weight = nn.Parameter(self._initial(seed).to(device or "cpu"))  #: own rows [total / ranks, dim]
        self._pending: list[tuple[Route, Tensor]] = []

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Tables:
        """Rows of nodes, float32 [n, dim] on ``weight``'s device; n_id: int64 [n] original ids of each type.

        Raises ``DataError`` for a node that is not there.
        """
        ids = [self._rows_of(of, nodes.to(self.weight.device)) for of, nodes in n_id.items()]
        rows = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=self.weight.device)
        route = plan_route(rows, rows % self.size, self.group)
        found = route.fetch(self.weight.detach()[route.asked // self.size])
        if torch.is_grad_enabled():
            self._pending.append((route, found.requires_grad_()))
        return dict(zip(n_id, found.split([len(of) for of in ids]), strict=True))

    def sync_gradients(self) -> None:
        """Bring the gradients of all rows looked up since the last call to their owners: ``weight.grad``, sparse.

        Apart from the backward pass: there, which rank communicates when would depend on its graph.
        """
        places, values = [], []
        for route, rows in self._pending:
            grad = torch.zeros_like(rows) if rows.grad is None else rows.grad
            places.append(route.asked // self.size)
            values.append(route.push(grad) / self.size)
        self._pending.clear()
        if places:
            where, shape = torch.cat(places)[None], self.weight.shape
            grad = torch.sparse_coo_tensor(where, torch.cat(values), shape, check_invariants=False).coalesce()
            self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad

    def _rows_of(self, of: NodeType, nodes: Tensor) -> Tensor:
        if of not in self.num_nodes:
            raise DataError(f"no rows for nodes of type {of!r}; there are {list(self.num_nodes)}")
        if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < self.num_nodes[of]:
            raise DataError(
                f"ids of {of!r} nodes from {int(nodes.min())} to {int(nodes.max())}; they go from 0 to"
                f" {self.num_nodes[of] - 1}"
            )
        return nodes + self.first[of]

    def _initial(self, seed: int) -> Tensor:
        shards = [torch.empty(0, self.dim)]
        for of, first in self.first.items():
            ids = np.arange((self.rank - first) % self.size, self.num_nodes[of], self.size)
            shards.append(initial_rows(ids, self.dim, seed, of))
        return torch.cat(shards)


def initial_rows(ids: Any, dim: int, seed: int, node_type: NodeType) -> Tensor:
    """First rows of nodes of one type, float32 [n, dim]; ids: int64 [n] original ids."""
    salt = int.from_bytes(hashlib.sha256(node_type.encode()).digest()[:8], "little")
    rows = torch.empty(len(ids), dim)
    key = np.uint64(batch_key(seed, salt, 0, 0))
    run_rows(_fill, len(ids), ids, rows.numpy(), key, math.sqrt(3 / max(dim, 1)))
    return rows


@njit()
def _fill(first: int, last: int, ids: Any, rows: Any, key: Any, bound: float) -> None:
    for i in range(first, last):
        own = node_key(key, ids[i])
        for k in range(rows.shape[1]):
            rows[i, k] = bound * (2.0 * fraction(mix(own + np.uint64(k) * GOLDEN)) - 1.0)
