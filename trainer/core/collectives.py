"""Sends values (as MessagePack) and tensors (as raw bytes) between ranks by torch.distributed, without pickle.

torch's ``all_gather_object`` and ``broadcast_object_list`` unpickle what another rank sends, and unpickling can run
any code.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainer.core.errors import PeerError
from trainer.core.row_exchange import group_rank, group_size, wire_device

T = TypeVar("T")

MOST_BYTES = 1 << 28  #: largest encoded value of one rank, in bytes, without tensors

_TUPLE, _TENSOR = 1, 2  # MessagePack extension types


def gather_values(value: T, group: Any = None) -> list[T]:
    """Collect ``value`` from every rank, and return all values, in rank order, on every rank.

    Values must not contain tensors. All ranks of ``group`` (None: the default process group) must call this. Raises
    ``PeerError`` when the bytes of another rank cannot be decoded.
    """
    size, device = group_size(group), wire_device(group)
    own = torch.frombuffer(bytearray(encode(value, [])), dtype=torch.uint8).to(device)
    lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device), group=group)
    counts = [_checked_length(int(length)) for length in lengths]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return [decode(_bytes_of(part[:count]), []) for part, count in zip(parts, counts, strict=True)]


def broadcast_value(value: T, group: Any = None) -> T:
    """Return on every rank the ``value`` that rank 0 of the group passed.

    All ranks of ``group`` (None: the default process group) must call this. Raises ``PeerError`` when the bytes of
    rank 0 cannot be decoded.
    """
    device, sends = wire_device(group), group_rank(group) == 0
    tensors: list[Tensor] = []
    head = torch.frombuffer(bytearray(encode(value, tensors)), dtype=torch.uint8) if sends else torch.empty(0)
    length = torch.tensor([len(head)], device=device)
    dist.broadcast(length, group=group, group_src=0)
    head = head.to(device) if sends else torch.empty(_checked_length(int(length)), dtype=torch.uint8, device=device)
    dist.broadcast(head, group=group, group_src=0)
    if not sends:
        value = decode(_bytes_of(head), tensors)
    for tensor in tensors:
        if tensor.numel():
            raw = tensor.contiguous().flatten().view(torch.uint8).to(device)
            dist.broadcast(raw, group=group, group_src=0)
            if not sends:
                tensor.copy_(raw.to(tensor.device).view(tensor.dtype).view(tensor.shape))
    return value


def encode(value: object, tensors: list[Tensor]) -> bytes:
    """Encode ``value`` as MessagePack.

    Tensors are appended to ``tensors``, and only their dtype, shape and device type are encoded. Raises ``TypeError``
    for an object of an unsupported type.
    """
    return msgspec.msgpack.encode(_plain(value, tensors))


def decode(data: bytes, tensors: list[Tensor]) -> Any:
    """Decode the bytes that ``encode`` returned.

    Allocates the tensors of the value without filling them, and appends them to ``tensors`` in the order of ``encode``.
    Raises ``PeerError`` when ``data`` cannot be decoded.
    """

    def extended(code: int, inner: memoryview) -> object:
        if code == _TUPLE:
            return tuple(msgspec.msgpack.decode(inner, type=list, ext_hook=extended))
        dtype, shape, kind = msgspec.msgpack.decode(inner, type=tuple[str, list[int], str])
        wanted = getattr(torch, dtype, None)
        if code != _TENSOR or not isinstance(wanted, torch.dtype) or min(shape, default=0) < 0:
            raise ValueError(f"unexpected MessagePack extension {code} ({dtype} {shape})")
        tensors.append(torch.empty(shape, dtype=wanted, device=kind))
        return tensors[-1]

    try:
        return msgspec.msgpack.decode(data, ext_hook=extended)
    except (ValueError, TypeError, RuntimeError, RecursionError) as error:
        raise PeerError(f"the message of another rank cannot be decoded: {error}") from error


def _plain(value: object, tensors: list[Tensor]) -> object:
    """Replace tuples and tensors in ``value`` by MessagePack extensions, and numpy scalars by Python numbers."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([_plain(item, tensors) for item in value]))
    if isinstance(value, list):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        about = (str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type)
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(about))
    raise TypeError(f"a {type(value).__name__} cannot be sent to other ranks")


def _bytes_of(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _checked_length(length: int) -> int:
    if not 0 < length <= MOST_BYTES:
        raise PeerError(f"another rank announced a value of {length} bytes, expected 1 to {MOST_BYTES}")
    return length
