"""Large arrays in memory that is used again: new pages cost more time than the rows that are written into them."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.arrays import Array

LARGE = 1 << 20  #: bytes; smaller arrays come from numpy, whose allocator keeps their memory
KEEP = 1 << 28  #: bytes of free slabs that are kept


class Slabs:
    """Memory of arrays that are no more, kept for the next ones. Safe to use from several threads.

    An array's memory comes back once nothing refers to it, views and tensors included.
    """

    def __init__(self, keep: int = KEEP, make: Callable[[int], Array] = lambda size: np.empty(size, np.uint8)):
        """``make``: new memory of so many bytes, uint8."""
        self._keep, self._make = keep, make
        self._free: deque[Array] = deque()  # appended to by finalizers, which may run anywhere: no lock

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """As ``np.empty``."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < LARGE:
            return np.empty(shape, kind)
        slab = self._take(_rounded(size))
        lease = (ctypes.c_ubyte * len(slab)).from_buffer(slab.data)
        returning = weakref.finalize(lease, self._give_back, slab)
        returning.atexit = False
        return np.asarray(lease)[:size].view(kind).reshape(shape)  # ``lease`` lives as long as they do

    def _take(self, size: int) -> Array:
        """The first free slab of that size or a little more, else a new one; smaller ones make room."""
        for _ in range(len(self._free)):
            try:
                slab = self._free.popleft()
            except IndexError:  # another thread was faster
                break
            if size <= len(slab) <= size + size // 2:
                return slab
            self._free.append(slab)
        return self._make(size)

    def _give_back(self, slab: Array) -> None:
        self._free.append(slab)
        while sum(map(len, tuple(self._free))) > self._keep:
            try:
                self._free.popleft()
            except IndexError:  # another thread was faster
                return


def _rounded(size: int) -> int:
    """Up to an eighth more, so that arrays of about one size use each other's memory."""
    step = 1 << (size.bit_length() - 4)
    return -(-size // step) * step


_slabs = Slabs()


def use_pinned() -> None:
    """From now on slabs are page-locked, so that a GPU copies from them while the processor goes on."""
    global _slabs
    _slabs = _pinned


def _page_locked(size: int) -> Array:
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


_pinned = Slabs(make=_page_locked)


def cast(array: Array, dtype: npt.DTypeLike) -> Array:
    """As ``array.astype(dtype, order="C")``: a copy, whatever the dtype was."""
    out = empty(array.shape, dtype)
    np.copyto(out, array, casting="unsafe")
    return out


def empty(shape: tuple[int, ...] | int, dtype: Any) -> Array:
    """As ``np.empty``; large arrays from this process's slabs."""
    return _slabs.empty((shape,) if isinstance(shape, int) else shape, dtype)
