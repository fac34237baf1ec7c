"""A ``ShardedEmbedding`` in checkpoints: whole tables on rank 0, so that a run of any size can read them.

All ranks call these functions; rows travel in pieces, and only rank 0 ever holds a whole table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.row_exchange import wire_device
from trainer.nn.sharded_embedding import ShardedEmbedding, Tables

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
    plan: list[Any] = [state and (list(state["optimizer_rows"]), dict(state["optimizer_rest"]))]
    if embedding.size > 1:
        dist.broadcast_object_list(plan, group=embedding.group, group_src=0)
    names, rest = plan[0]
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
