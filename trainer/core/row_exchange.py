"""Exchanges rows between ranks by torch.distributed: each rank requests ids, their owners answer.

Every rank takes part in every call, also one that asks for nothing. Deadlines are those of the
process group. A single process communicates with nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_waited = [0.0]  # seconds in exchanges, of this process


def take_waited() -> float:
    """Seconds this process was exchanging rows, or waiting for ranks that were not ready to, since it last asked."""
    seconds, _waited[0] = _waited[0], 0.0
    return seconds


def group_size(group: Any = None) -> int:
    """Ranks of a process group (None: the default one); 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: Any = None) -> int:
    """This process's place in the group; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def wire_device(group: Any = None) -> torch.device:
    """Where the group's backend wants its tensors."""
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class Route:
    """Which ids this rank asks of each rank, and which are asked of it; made by ``plan_route``."""

    order: Tensor  #: int64 [n] places of own ids, sorted by owner
    counts: tuple[int, ...]  #: [ranks] own ids per owner
    asked: Tensor  #: int64 [m] ids that this rank owns and others (or itself) asked for, by asking rank
    asked_counts: tuple[int, ...]  #: [ranks] of them per asking rank
    group: Any = None

    def fetch(self, answers: Tensor) -> Tensor:
        """Rows from their owners: give row i for ``asked[i]`` [m, …], get a row for each own id [n, …]."""
        rows = torch.empty(len(self.order), *answers.shape[1:], dtype=answers.dtype, device=answers.device)
        rows[self.order.to(rows.device)] = _all_to_all(answers, self.asked_counts, self.counts, self.group)
        return rows

    def push(self, rows: Tensor) -> Tensor:
        """Rows to their owners: give a row for each own id [n, …], get row i for ``asked[i]`` [m, …]."""
        return _all_to_all(rows[self.order.to(rows.device)], self.counts, self.asked_counts, self.group)


def plan_route(ids: Tensor, owners: Tensor, group: Any = None) -> Route:
    """Tell every owner which ids are wanted of it; ids and owners: int64 [n], repeats allowed."""
    size = group_size(group)
    order = torch.argsort(owners, stable=True) if size > 1 else torch.arange(len(ids), device=ids.device)
    counts = torch.bincount(owners, minlength=size)
    ones = (1,) * size
    asked_counts = _ints(_all_to_all(counts, ones, ones, group))
    asked = _all_to_all(ids[order], _ints(counts), asked_counts, group)
    return Route(order, _ints(counts), asked, asked_counts, group)


def exchange_rows(ids: Tensor, owners: Tensor, answer: Callable[[Tensor], Tensor], group: Any = None) -> Tensor:
    """The row of each id [n, …]; ``answer`` gives the rows [m, …] of ids that this rank is asked for.

    ids and owners (ranks): int64 [n], repeats allowed.
    """
    route = plan_route(ids, owners, group)
    return route.fetch(answer(route.asked))


def _all_to_all(rows: Tensor, counts: tuple[int, ...], into: tuple[int, ...], group: Any) -> Tensor:
    """Send ``counts[r]`` rows to rank r, in order, and return those received, ``into[r]`` from rank r."""
    if len(counts) == 1:
        return rows
    device = wire_device(group)
    width = rows.element_size() * rows.shape[1:].numel()
    sent = rows.detach().contiguous().to(device).flatten().view(torch.uint8)  # any dtype travels as bytes
    received = torch.empty(sum(into) * width, dtype=torch.uint8, device=device)
    sizes_in, sizes_out = ([count * width for count in side] for side in (into, counts))
    began = time.monotonic()
    dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=group)
    _waited[0] += time.monotonic() - began
    return received.view(rows.dtype).view(sum(into), *rows.shape[1:]).to(rows.device)


def _ints(values: Tensor) -> tuple[int, ...]:
    return tuple(values.tolist())
