"""bfloat16 in Numba kernels, which know no such type: its 16 bits as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from trainer.core import slabs
from trainer.core.arrays import Array


def as_array(rows: Tensor) -> Array:
    """The tensor's memory; uint16 for bfloat16."""
    own = rows.detach()
    return (own.view(torch.uint16) if own.dtype == torch.bfloat16 else own).numpy()


def new_rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """As ``torch.empty`` on CPU, in memory that is used again (``slabs``): such arrays come with every step."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(slabs.empty((count, width), np.int16)).view(dtype)
    return torch.from_numpy(slabs.empty((count, width), np.float64 if dtype == torch.float64 else np.float32))


def wide(value: Any) -> Any:
    """In a kernel: the float32 of a bfloat16's bits; any other number as it is."""
    raise NotImplementedError


def narrow(value: Any, like: Any) -> Any:
    """In a kernel: ``value`` (float32) as a bfloat16's bits, to nearest even, if ``like`` is such bits; else itself."""
    raise NotImplementedError


@overload(wide, inline="always")
def _wide(value):  # type: ignore[no-untyped-def]  # Numba compares signatures, annotations too
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


@overload(narrow, inline="always")
def _narrow(value, like):  # type: ignore[no-untyped-def]
    if like == types.uint16:
        return _rounded
    return lambda value, like: value


def _rounded(value, like):  # type: ignore[no-untyped-def]
    bits = np.float32(value).view(np.uint32)
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
