"""Moves batches to the device of the model.

With CUDA, a batch is copied on a separate stream while the device works on the previous batch. The most requested rows
of ``x`` can be kept on the device.
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
    """Return gathered rows as a tensor of dtype ``spec.dtype`` that shares their memory."""
    if spec.dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class Movable(Protocol):
    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


B = TypeVar("B", bound=Movable)


@dataclass(frozen=True)
class DeviceRows:
    """Rows of ``x`` of one node type that are kept on the device."""

    #: int32 [num_nodes], on the host: row of each global id, -1 if it is not on the device
    slots: npt.NDArray[np.int32]
    rows: Tensor  #: float [k, f], on the device

    @classmethod
    def of(cls, ids: Ids, rows: Tensor, num_nodes: int, device: torch.device) -> DeviceRows:
        """Copy ``rows`` to ``device``. Row i belongs to global id ``ids[i]``."""
        return cls(CachedRows.of(ids, {}, num_nodes).slots, rows.to(device))


def feed(device: torch.device) -> Callable[[B], B]:
    if device.type != "cuda":
        return lambda batch: batch.to(device)
    slabs.use_pinned()
    return CudaFeed(device)


class CudaFeed:
    """Copies batches to a CUDA device on a separate stream.

    A call returns before the batch is copied. Work queued later on the current stream runs after the copy.
    """

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._in_flight: deque[tuple[torch.cuda.Event, Any]] = deque()  # until copied

    def __call__(self, batch: B) -> B:
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        with torch.cuda.stream(self._stream):
            moved: B = batch.to(self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._in_flight.append((done, batch))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(moved):
            tensor.record_stream(current)  # the copy stream must not reuse the memory before
        return moved


def tensors_of(value: Any) -> Iterator[Tensor]:
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
