"""Moves batches to the device they are trained on.

With CUDA a batch is copied from pinned memory on a stream of its own, while the device still works on the one before.
Rows that are asked for most stay on the device: only the others are gathered and copied. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core import slabs
from trainer.core.arrays import Array, Ids
from trainer.store.manifest import AttrSpec
from trainer.store.row_cache import CachedRows


def as_tensor(values: Array, spec: AttrSpec) -> Tensor:
    """Rows as stored in the dtype the dataset gave them; shares memory."""
    if spec.dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class Movable(Protocol):
    """A batch, or a part of one."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


B = TypeVar("B", bound=Movable)


@dataclass(frozen=True)
class DeviceRows:
    """Rows of one type's nodes that stay on the device; which they are is known on the host, where batches are made."""

    slots: npt.NDArray[np.int32]  #: int32 [num_nodes] row of each global id, -1 where it is not kept
    rows: Tensor  #: float [k, f], on the device

    @classmethod
    def of(cls, ids: Ids, rows: Tensor, num_nodes: int, device: torch.device) -> DeviceRows:
        """``rows[i]`` is that of the global id ``ids[i]``."""
        return cls(CachedRows.of(ids, {}, num_nodes).slots, rows.to(device))


def feed(device: torch.device) -> Callable[[B], B]:
    """What brings one batch after another to ``device``."""
    if device.type != "cuda":
        return lambda batch: batch.to(device)
    slabs.use_pinned()
    return CudaFeed(device)


class CudaFeed:
    """Copies on a stream of its own; a batch is handed over when its copy is in line before the device's next work.

    The host runs ahead of the device, so the copy of a batch goes on while the device still works on the one before.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._under_way: deque[tuple[torch.cuda.Event, Any]] = deque()  # their pinned memory must not be used again yet

    def __call__(self, batch: B) -> B:
        while self._under_way and self._under_way[0][0].query():
            self._under_way.popleft()
        with torch.cuda.stream(self._stream):
            moved: B = batch.to(self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._under_way.append((done, batch))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(moved):
            tensor.record_stream(current)  # its memory is the copy stream's, which may not give it away before
        return moved


def tensors_of(value: Any) -> Iterator[Tensor]:
    """All tensors in a dataclass, however deep."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)
