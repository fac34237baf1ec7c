"""Exchanges rows between ranks by torch.distributed: each rank requests rows by id from the ranks that own them.

All ranks of the process group must call these functions, even those that request no rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_waited = [0.0]  # seconds that this process spent in exchanges


def take_waited() -> float:
    """Return the seconds spent exchanging rows since the last call, including waiting for other ranks."""
    seconds, _waited[0] = _waited[0], 0.0
    return seconds


def group_size(group: Any = None) -> int:
    """Return the number of ranks of a process group (None: the default one), or 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: Any = None) -> int:
    """Return this process's rank in the group, or 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def wire_device(group: Any = None) -> torch.device:
    """Return the device on which the group's backend expects tensors."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Route:
    """The ids that this rank requests from each rank, and the ids that each rank requests from this rank."""

    order: Tensor  #: int64 [n], positions in this rank's request, sorted by owner
    counts: tuple[int, ...]  #: [ranks], number of ids requested from each owner
    asked: Tensor  #: int64 [m], ids that ranks (including this one) request from this rank, in order of requesting rank
    asked_counts: tuple[int, ...]  #: [ranks], number of ids that each rank requested
    group: Any = None  #: process group; None: the default one

    def fetch(self, answers: Tensor) -> Tensor:
        """Send ``answers`` to the ranks that requested them, and return the rows that this rank requested, [n, …].

        ``answers``: [m, …]; row i belongs to the id ``asked[i]``.
        """
        rows = torch.empty(len(self.order), *answers.shape[1:], dtype=answers.dtype, device=answers.device)
        rows[self.order.to(rows.device)] = _all_to_all(answers, self.asked_counts, self.counts, self.group)
        return rows

    def push(self, rows: Tensor) -> Tensor:
        """Send row i of ``rows``, such as a gradient, to the rank that owns the i-th id requested by this rank.

        ``rows``: [n, …]. Returns the rows that all ranks sent to this rank, [m, …]; row i belongs to id ``asked[i]``.
        """
        return _all_to_all(rows[self.order.to(rows.device)], self.counts, self.asked_counts, self.group)


def plan_route(ids: Tensor, owners: Tensor, group: Any = None) -> Route:
    """Exchange the requested ids between all ranks, and return the route for their rows. All ranks must call this.

    ``ids``: int64 [n], may contain repeats. ``owners``: int64 [n], the rank that owns each id.
    """
    size = group_size(group)
    order = torch.argsort(owners, stable=True) if size > 1 else torch.arange(len(ids), device=ids.device)
    counts = torch.bincount(owners, minlength=size)
    ones = (1,) * size
    asked_counts = _ints(_all_to_all(counts, ones, ones, group))
    asked = _all_to_all(ids[order], _ints(counts), asked_counts, group)
    return Route(order, _ints(counts), asked, asked_counts, group)


def exchange_rows(ids: Tensor, owners: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """Fetch the row of each id from the rank that owns it, and return the rows [n, …]. All ranks must call this.

    ``ids``: int64 [n], may contain repeats. ``owners``: int64 [n], the rank that owns each id. ``answer`` returns the
    rows [m, …] for the ids [m] that are requested from this rank.
    """
    route = plan_route(ids, owners)
    return route.fetch(answer(route.asked))


def _all_to_all(rows: Tensor, counts: tuple[int, ...], into: tuple[int, ...], group: Any) -> Tensor:
    if len(counts) == 1:
        return rows
    device = wire_device(group)
    width = rows.element_size() * rows.shape[1:].numel()
    sent = rows.detach().contiguous().to(device).flatten().view(torch.uint8)  # backends do not support every dtype
    received = torch.empty(sum(into) * width, dtype=torch.uint8, device=device)
    sizes_in, sizes_out = ([count * width for count in side] for side in (into, counts))
    began = time.monotonic()
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    _waited[0] += time.monotonic() - began
    return received.view(rows.dtype).view(sum(into), *rows.shape[1:]).to(rows.device)


def _ints(values: Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())
