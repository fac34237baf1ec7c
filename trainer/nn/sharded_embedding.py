"""Trainable rows for nodes without features, spread over the ranks of a run.

All ranks call these functions; rows travel in pieces, and only rank 0 ever holds a whole table.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.collectives import broadcast_value
from trainer.core.compiled import njit
from trainer.core.errors import DataError
from trainer.core.rng import GOLDEN, batch_key, fraction, mix, node_key
from trainer.core.row_exchange import Route, group_rank, group_size, plan_route, wire_device
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


_ROWS_AT_ONCE = 1 << 16  #: rows per rank and message


def gather_tables(embedding: ShardedEmbedding, shard: Tensor) -> Tables | None:
    """Rows of all ranks by type and original id, on the CPU of rank 0 (None elsewhere); shard: [as weight, …]."""
    whole = torch.empty(embedding.total, *shard.shape[1:], dtype=shard.dtype) if embedding.rank == 0 else None
    for first, count in _pieces(embedding):
        part = _padded(shard.detach()[first : first + count], count, embedding)
        parts = None if whole is None else [torch.empty_like(part) for _ in range(embedding.size)]
        if embedding.size == 1:
            parts = [part]
        else:
            dist.gather(part, parts, group=embedding.group, group_dst=0)
        if whole is not None and parts is not None:
            for rank, received in enumerate(parts):
                place = _of_rank(whole, embedding, rank, first, count)
                place.copy_(received[: len(place)])
    return None if whole is None else _by_type(embedding, whole)


def scatter_tables(embedding: ShardedEmbedding, tables: Mapping[str, Tensor] | None) -> Tensor:
    """This rank's shard of tables that rank 0 gives (the others None)."""
    whole = None if tables is None else torch.cat([tables[of] for of in embedding.num_nodes])
    shard = torch.empty_like(embedding.weight.detach())
    for first, count in _pieces(embedding):
        parts = None
        if whole is not None:
            ranks = range(embedding.size)
            parts = [_padded(_of_rank(whole, embedding, rank, first, count), count, embedding) for rank in ranks]
        place = shard[first : first + count]
        place.copy_(_handed_out(embedding, parts, count)[: len(place)])
    return shard


def embedding_state(
    embedding: ShardedEmbedding, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any] | None:
    """Tables and optimizer state as plain values and CPU tensors, on rank 0 (None elsewhere)."""
    tables = gather_tables(embedding, embedding.weight)
    state = {} if optimizer is None else optimizer.state.get(embedding.weight, {})
    per_row = [name for name, value in state.items() if _per_row(embedding, value)]
    gathered = {name: gather_tables(embedding, state[name]) for name in per_row}
    if tables is None:
        return None
    rest = {name: value for name, value in state.items() if name not in per_row}
    return {"tables": tables, "optimizer_rows": gathered, "optimizer_rest": rest}


def load_embedding_state(
    embedding: ShardedEmbedding, state: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Go on from ``embedding_state``, given on rank 0 (the others None), of a run with any number of ranks."""
    tables = None if state is None else state["tables"]
    embedding.weight.data.copy_(scatter_tables(embedding, tables))
    if optimizer is None:
        return
    plan: Any = state and (list(state["optimizer_rows"]), dict(state["optimizer_rest"]))
    if embedding.size > 1:
        plan = broadcast_value(plan, embedding.group)
    names, rest = plan
    rows = {name: scatter_tables(embedding, state and state["optimizer_rows"][name]) for name in names}
    optimizer.state[embedding.weight] = {**rest, **rows}


def _per_row(embedding: ShardedEmbedding, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == embedding.weight.shape


def _pieces(embedding: ShardedEmbedding) -> Iterator[tuple[int, int]]:
    """(first own row, rows) of each message, alike on all ranks."""
    most = -(-embedding.total // embedding.size)
    return ((first, min(_ROWS_AT_ONCE, most - first)) for first in range(0, most, _ROWS_AT_ONCE))


def _of_rank(whole: Tensor, embedding: ShardedEmbedding, rank: int, first: int, count: int) -> Tensor:
    """A view of a rank's own rows ``first … first + count`` in the whole table, fewer at its end."""
    return whole[first * embedding.size + rank :: embedding.size][:count]


def _padded(rows: Tensor, count: int, embedding: ShardedEmbedding) -> Tensor:
    """``rows`` as the first of ``count``, where messages start from: their length must be alike on all ranks."""
    part = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=wire_device(embedding.group))
    part[: len(rows)] = rows
    return part


def _handed_out(embedding: ShardedEmbedding, parts: list[Tensor] | None, count: int) -> Tensor:
    if embedding.size == 1:
        assert parts is not None
        return parts[0]
    part = _padded(embedding.weight.detach()[:0], count, embedding)
    dist.scatter(part, parts, group=embedding.group, group_src=0)
    return part


def _by_type(embedding: ShardedEmbedding, whole: Tensor) -> Tables:
    """Copies, so that a checkpoint of one type would not carry the storage of all."""
    pieces = whole.split(list(embedding.num_nodes.values()))
    return {of: rows.clone() for of, rows in zip(embedding.num_nodes, pieces, strict=True)}


class Embeddings(Protocol):
    """Trainable rows of some node types. An ``nn.Module`` becomes part of the model that uses it and is trained with
    it; anything else (rows sharded over ranks) has to be trained beside it.
    """

    dim: int  #: width of a row

    @property
    def num_nodes(self) -> Mapping[NodeType, int]:
        """The types it has rows for."""

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Mapping[NodeType, Tensor]:
        """Rows of nodes, float32 [n, dim]; n_id: int64 [n] original ids of each type. Called once per batch."""


class LocalEmbeddings(nn.Module):
    """One dense ``nn.Embedding`` per type, for a single process."""

    def __init__(self, num_nodes: Mapping[NodeType, int], dim: int):
        from torch_geometric.nn.module_dict import ModuleDict

        super().__init__()
        self.num_nodes, self.dim = dict(num_nodes), dim
        self.tables = ModuleDict({of: nn.Embedding(count, dim) for of, count in num_nodes.items()})

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Mapping[NodeType, Tensor]:
        return {of: self.tables[of](ids) for of, ids in n_id.items()}
