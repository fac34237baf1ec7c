"""Trainable embedding rows for nodes without features, sharded over the ranks of a run or local to one process.

Every rank of the group must call the functions on sharded tables.
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
    """Trainable embedding rows of nodes, each stored on one rank of a process group.

    A training step calls ``lookup`` in the forward pass, then ``loss.backward()``, ``sync_gradients()`` and the step of
    an optimizer over ``[embedding.weight]``. The optimizer must support sparse gradients: SparseAdam, Adagrad, or SGD
    without momentum. All ranks must call ``lookup`` and ``sync_gradients`` equally often, also with empty ids.
    Gradients are averaged over ranks, as by DistributedDataParallel.

    A row's initial value is uniform with variance ``1 / dim`` and depends only on seed, node type and original id.

    This class is no ``nn.Module``, as DistributedDataParallel would treat the shards as replicas.

    Args:
        num_nodes: Number of nodes by node type.
        dim: Width of a row.
        seed: Seed of the initial values.
        device: Device of this rank's rows; default CPU.
        group: Process group; default: ``torch.distributed``'s default group, or this process alone if there is none.

    Shapes:
        - ``weight``: float32 [n, dim], this rank's rows: about 1 / ranks of all rows.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        embedding = gf.nn.ShardedEmbedding({"node": 1000}, dim=32)
        optimizer = torch.optim.SparseAdam([embedding.weight])
        rows = embedding.lookup({"node": torch.tensor([3, 7])})["node"]  # [2, 32]
        rows.square().mean().backward()
        embedding.sync_gradients()
        optimizer.step()
        ```
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
        shards = [torch.empty(0, dim)]
        for of, first in self.first.items():
            ids = np.arange((self.rank - first) % self.size, self.num_nodes[of], self.size)
            shards.append(initial_rows(ids, dim, seed, of))
        self.weight = nn.Parameter(torch.cat(shards).to(device or "cpu"))  #: own rows, float32 [own rows, dim]
        self._pending: list[tuple[Route, Tensor]] = []

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Tables:
        """Fetch rows of nodes from the ranks that store them. All ranks must call this.

        Args:
            n_id: Original ids by node type; repeats allowed. Ranks may pass different or empty ids.

        Shapes:
            - **input:** ``n_id[type]`` int64 [n].
            - **output:** ``result[type]`` float32 [n, dim], on the device of ``weight``.

        Returns:
            Rows by node type, in the order of the ids.

        Raises:
            DataError: For a node type without rows, or an id out of range.
        """
        ids = []
        for of, nodes in n_id.items():
            if of not in self.num_nodes:
                raise DataError(f"the embedding has no rows for node type {of!r}, only for {list(self.num_nodes)}")
            own = nodes.to(self.weight.device)
            if len(own) and not 0 <= int(own.min()) <= int(own.max()) < self.num_nodes[of]:
                raise DataError(
                    f"embedding lookup: ids of {of!r} nodes range from {int(own.min())} to {int(own.max())}; valid ids"
                    f" are 0 to {self.num_nodes[of] - 1}"
                )
            ids.append(own + self.first[of])
        rows = torch.cat(ids) if ids else torch.empty(0, dtype=torch.int64, device=self.weight.device)
        route = plan_route(rows, rows % self.size, self.group)
        found = route.fetch(self.weight.detach()[route.asked // self.size])
        if torch.is_grad_enabled():
            self._pending.append((route, found.requires_grad_()))
        return dict(zip(n_id, found.split([len(of) for of in ids]), strict=True))

    def sync_gradients(self) -> None:
        """Send the gradient of each row that was looked up since the last call to the rank that stores the row.

        Adds the mean over ranks to ``weight.grad``, a sparse tensor. All ranks must call this after ``backward``.
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


def initial_rows(ids: Any, dim: int, seed: int, node_type: NodeType) -> Tensor:
    """Return the initial rows of nodes of one type, float32 [n, dim]. ``ids``: int64 [n], original ids."""
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


def gather_tables(embedding: ShardedEmbedding, shard: Tensor, to: int = 0) -> Tables | None:
    """Gather the shards of all ranks into one table per node type, on the CPU of rank ``to``.

    shard: ``embedding.weight`` or an optimizer state with as many rows. Tables are in the order of original ids.
    Returns None on other ranks. All ranks must call this.
    """
    whole = torch.empty(embedding.total, *shard.shape[1:], dtype=shard.dtype) if embedding.rank == to else None
    for first, count in _pieces(embedding):
        part = _padded(shard.detach()[first : first + count], count, embedding)
        parts = None if whole is None else [torch.empty_like(part) for _ in range(embedding.size)]
        if embedding.size == 1:
            parts = [part]
        else:
            dist.gather(part, parts, group=embedding.group, group_dst=to)
        if whole is not None and parts is not None:
            for rank, received in enumerate(parts):
                target = _of_rank(whole, embedding, rank, first, count)
                target.copy_(received[: len(target)])
    if whole is None:
        return None
    tables = whole.split(list(embedding.num_nodes.values()))
    # Copies, as ``torch.save`` of a view would write all rows.
    return {of: rows.clone() for of, rows in zip(embedding.num_nodes, tables, strict=True)}


def scatter_tables(embedding: ShardedEmbedding, tables: Mapping[str, Tensor] | None) -> Tensor:
    """Split ``tables``, given on rank 0, and return this rank's shard. All ranks must call this."""
    whole = None if tables is None else torch.cat([tables[of] for of in embedding.num_nodes])
    shard = torch.empty_like(embedding.weight.detach())
    for first, count in _pieces(embedding):
        parts = None
        if whole is not None:
            ranks = range(embedding.size)
            parts = [_padded(_of_rank(whole, embedding, rank, first, count), count, embedding) for rank in ranks]
        target = shard[first : first + count]
        target.copy_(_scattered(embedding, parts, count)[: len(target)])
    return shard


def embedding_state(
    embedding: ShardedEmbedding, optimizer: torch.optim.Optimizer | None = None, to: int = 0
) -> dict[str, Any] | None:
    """Gather the embedding and its optimizer state on one rank, for a checkpoint. All ranks must call this.

    Args:
        embedding: Embedding to save.
        optimizer: Optimizer over ``[embedding.weight]``, to save its state too.
        to: Rank that gets the result.

    Shapes:
        - **output:** ``result["tables"][type]`` float32 [num_nodes[type], dim], on CPU; row i is for original id i.

    Returns:
        On rank ``to`` a dict that ``torch.save`` can write: ``tables``, ``optimizer_rows`` (optimizer states with one
        row per node, by name) and ``optimizer_rest`` (all other states). None on other ranks.

    Example:
        ```python
        import gnnfleet as gf

        embedding = gf.nn.ShardedEmbedding({"node": 1000}, dim=32)
        state = gf.nn.embedding_state(embedding)
        print(state["tables"]["node"].shape)  # torch.Size([1000, 32])
        ```
    """
    tables = gather_tables(embedding, embedding.weight, to)
    state = {} if optimizer is None else optimizer.state.get(embedding.weight, {})
    per_row = [
        name for name, value in state.items() if (isinstance(value, Tensor) and value.shape == embedding.weight.shape)
    ]
    gathered = {name: gather_tables(embedding, state[name], to) for name in per_row}
    if tables is None:
        return None
    rest = {name: value for name, value in state.items() if name not in per_row}
    return {"tables": tables, "optimizer_rows": gathered, "optimizer_rest": rest}


def load_embedding_state(
    embedding: ShardedEmbedding, state: Mapping[str, Any] | None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Restore an embedding from the result of ``embedding_state``. All ranks must call this.

    The number of ranks may differ from that at the time of saving.

    Args:
        embedding: Embedding to overwrite, with the same node types, sizes and width.
        state: Saved state on rank 0; None on other ranks.
        optimizer: Optimizer over ``[embedding.weight]``, to restore its state too.

    Example:
        ```python
        import gnnfleet as gf

        embedding = gf.nn.ShardedEmbedding({"node": 1000}, dim=32)
        state = gf.nn.embedding_state(embedding)
        gf.nn.load_embedding_state(embedding, state)
        ```
    """
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


def _pieces(embedding: ShardedEmbedding) -> Iterator[tuple[int, int]]:
    """Divide a shard into pieces, each sent as one message. Yields (index of the first row, number of rows).

    All ranks yield the same pairs, although shards may differ in size by one row.
    """
    most = -(-embedding.total // embedding.size)
    return ((first, min(_ROWS_AT_ONCE, most - first)) for first in range(0, most, _ROWS_AT_ONCE))


def _of_rank(whole: Tensor, embedding: ShardedEmbedding, rank: int, first: int, count: int) -> Tensor:
    """Return a view of ``count`` rows of a rank's shard, from row ``first`` on, or fewer at the shard's end.

    ``whole``: the tables of all node types, concatenated.
    """
    return whole[first * embedding.size + rank :: embedding.size][:count]


def _padded(rows: Tensor, count: int, embedding: ShardedEmbedding) -> Tensor:
    """Return ``rows`` padded with zeros to ``count`` rows, on the device that the process group's backend requires."""
    part = torch.zeros(count, *rows.shape[1:], dtype=rows.dtype, device=wire_device(embedding.group))
    part[: len(rows)] = rows
    return part


def _scattered(embedding: ShardedEmbedding, parts: list[Tensor] | None, count: int) -> Tensor:
    if embedding.size == 1:
        assert parts is not None
        return parts[0]
    part = _padded(embedding.weight.detach()[:0], count, embedding)
    dist.scatter(part, parts, group=embedding.group, group_src=0)
    return part


class Embeddings(Protocol):
    """Interface of trainable rows of some node types, which a model looks up in each batch.

    They need an optimizer of their own.
    """

    dim: int  #: width of a row

    @property
    def num_nodes(self) -> Mapping[NodeType, int]: ...

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Mapping[NodeType, Tensor]:
        """Return the rows of nodes by type, float32 [n, dim]. ``n_id``: original ids by type, int64 [n]."""
