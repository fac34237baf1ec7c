"""Moves batches to the device of the model.

With CUDA, a batch is copied on a separate stream while the device works on the previous batch. Its small arrays are
copied together, in one buffer. The most requested rows of ``x`` can be kept on the device.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.core import slabs
from trainer.core.arrays import Array
from trainer.store.manifest import AttrSpec


def as_tensor(values: Array | Tensor, spec: AttrSpec) -> Tensor:
    """Return gathered rows as a tensor of dtype ``spec.dtype`` that shares their memory.

    Rows that a device gathered are float32 tensors already, and are returned unchanged.
    """
    if isinstance(values, Tensor):
        return values
    if spec.dtype == "bfloat16":
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def tensor_of(values: Array | Tensor) -> Tensor:
    """Return a NumPy array as a tensor that shares its memory. A tensor is returned unchanged."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


class _Movable(Protocol):
    def to(self, device: torch.device, non_blocking: bool = False) -> Any: ...


B = TypeVar("B", bound=_Movable)


@cache
def feed(device: torch.device) -> Callable[[Any], Any]:
    """Return a function that copies batches to ``device``. A process has one copy stream per device."""
    if device.type != "cuda":
        return lambda batch: batch.to(device)
    slabs.use_pinned()
    return _CudaFeed(device)


class _CudaFeed:
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
            pinned = functools.partial(torch.empty, dtype=torch.uint8, pin_memory=True)
            packed, buffer = packed_batch(batch, self._device, pinned)
            moved: B = packed.to(self._device, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        self._in_flight.append((done, (batch, buffer)))
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(moved):
            tensor.record_stream(current)  # the copy stream must not reuse the memory before
        return moved


_ALIGNED = 256  #: bytes; kernels read rows in units of up to 16 bytes, and CUDA aligns its allocations to 256


def packed_batch(batch: B, device: torch.device, new_buffer: Callable[[int], Tensor]) -> tuple[B, Tensor | None]:
    """Copy the tensors of ``batch`` that are in pageable memory to ``device``, all in one copy.

    If the tensors were copied one by one, each copy would wait for the stream. Tensors in pinned memory or on a device
    are not copied.

    Args:
        batch: A batch, made of nested dataclasses, dicts, lists and tuples.
        device: Target of the copy.
        new_buffer: Allocates pinned memory, uint8 [size].

    Returns:
        A new batch, in which the copied tensors are views of one buffer on ``device``; and the pinned buffer. The
        caller must keep the pinned buffer until the copy has finished. It is None if there was nothing to copy.
    """
    small = [tensor for tensor in tensors_of(batch) if tensor.device.type == "cpu" and not tensor.is_pinned()]
    starts = [0]
    for tensor in small:
        starts.append(starts[-1] + -(-tensor.nbytes // _ALIGNED) * _ALIGNED)
    if not starts[-1]:
        return with_tensors(batch, {id(tensor): tensor.to(device) for tensor in small}), None
    buffer = new_buffer(starts[-1])
    for start, tensor in zip(starts, small, strict=False):
        _view(buffer, start, tensor).copy_(tensor)
    copied = buffer.to(device, non_blocking=True)
    return with_tensors(
        batch, {id(tensor): _view(copied, start, tensor) for start, tensor in zip(starts, small, strict=False)}
    ), buffer


def _view(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes of ``buffer`` from ``start`` on as a contiguous tensor with dtype and shape of ``like``."""
    return buffer[start : start + like.nbytes].view(like.dtype).view(like.shape)


def with_tensors(value: Any, tensors: dict[int, Tensor]) -> Any:
    """Return a copy of ``value`` with some of its tensors replaced: tensor t by ``tensors[id(t)]``.

    A tensor t is kept if ``tensors`` has no entry ``id(t)``.
    """
    if isinstance(value, Tensor):
        return tensors.get(id(value), value)
    if is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: with_tensors(getattr(value, field.name), tensors) for field in fields(value)}
        return replace(value, **{name: new for name, new in changed.items() if new is not getattr(value, name)})
    if isinstance(value, dict):
        items = {key: with_tensors(item, tensors) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if isinstance(value, (list, tuple)):
        members = [with_tensors(item, tensors) for item in value]
        return type(value)(members) if any(a is not b for a, b in zip(members, value, strict=True)) else value
    return value


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
