"""Reuses the memory of freed large arrays, because page faults in new memory cost more than filling an array."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array

LARGE = 1 << 20  #: bytes; smaller arrays come from numpy, as malloc reuses their memory

KEEP = 1 << 30  #: largest total size of free slabs in bytes

IDLE = 64  #: a free slab is released after this many allocations that did not use it (a few batches)

_HUGE = 1 << 22  #: bytes; larger blocks use huge pages, as in numpy


def _map_pages(size: int) -> Array:
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


@dataclass(frozen=True, eq=False)
class _FreeSlab:
    memory: Array  #: uint8
    since: int  #: number of allocations when the slab became free


class Slabs:
    """Allocates large arrays in slabs (blocks of memory), and reuses the slabs of freed arrays. Thread-safe.

    A slab becomes free when nothing refers to its array, to views of the array, or to tensors that share the memory.
    """

    def __init__(self, keep: int = KEEP, make: Callable[[int], Array] = _map_pages):
        """``keep``: largest total size of free slabs in bytes. ``make``: allocates a slab, uint8 [size]."""
        self._keep, self._make = keep, make
        self._free: deque[_FreeSlab] = deque()  # finalizers append without the lock, as they may run in any thread
        self._lock = threading.Lock()
        self._allocations = 0

    @property
    def free_bytes(self) -> int:
        """Total bytes of the free slabs."""
        return sum(len(one.memory) for one in tuple(self._free))

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size < LARGE:
            return np.empty(shape, kind)
        step = 1 << (size.bit_length() - 6)
        slab = self._allocate(-(-size // step) * step)  # at most 1/32 more: arrays of similar size reuse each other's
        lease = (ctypes.c_ubyte * len(slab)).from_buffer(slab.data)
        returning = weakref.finalize(lease, self._give_back, slab)
        returning.atexit = False
        return np.asarray(lease)[:size].view(kind).reshape(shape)  # the array and its views keep ``lease`` alive

    def _allocate(self, size: int) -> Array:
        """Return the smallest free slab of ``size`` to twice ``size`` bytes, or else a new slab."""
        with self._lock:
            self._allocations += 1
            free = []
            with contextlib.suppress(IndexError):  # the last one is taken, by this thread or another
                while True:
                    free.append(self._free.popleft())
            fitting = [one for one in free if size <= len(one.memory) <= 2 * size]
            # A new slab replaces a free one of at least half its size, so that their number stays near that of arrays.
            smaller = [one for one in free if size // 2 <= len(one.memory) < size]
            chosen = min(fitting, key=_size) if fitting else max(smaller, key=_size, default=None)
            self._free.extend(one for one in free if one is not chosen and self._allocations - one.since < IDLE)
        if chosen is not None and len(chosen.memory) >= size:
            return chosen.memory
        del free, fitting, smaller, chosen  # releases the smaller slab before the new one is allocated
        return self._make(size)

    def _give_back(self, slab: Array) -> None:
        self._free.append(_FreeSlab(slab, self._allocations))
        while self.free_bytes > self._keep:
            try:
                self._free.popleft()
            except IndexError:  # another thread removed the last slab
                return


def _size(one: _FreeSlab) -> int:
    return len(one.memory)


_slabs = Slabs()


def use_pinned() -> None:
    """From now on, allocate slabs in page-locked memory, from which a GPU can copy asynchronously."""
    global _slabs
    _slabs = _pinned


def _page_locked(size: int) -> Array:
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


_pinned = Slabs(make=_page_locked)


def cast(array: Array, dtype: npt.DTypeLike) -> Array:
    """Return ``array.astype(dtype, order="C")`` in reused memory."""
    out = empty(array.shape, dtype)
    np.copyto(out, array, casting="unsafe")
    return out


def empty(shape: tuple[int, ...] | int, dtype: Any) -> Array:
    """Allocate an uninitialised array, as ``np.empty`` does. Large arrays reuse freed memory."""
    return _slabs.empty((shape,) if isinstance(shape, int) else shape, dtype)


def glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def give_back_freed_memory() -> None:
    """Return the free memory of malloc's heap to the system."""
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  #: mallopt parameters from glibc's malloc.h

_KEEP = 2**31 - 1  #: trim threshold of the heap in bytes, the largest that mallopt accepts


def keep_freed_memory() -> bool:
    """Stop glibc's malloc from mapping large blocks separately and from returning freed memory to the system.

    Returns whether malloc accepted the settings; False if the C library is not glibc.
    """
    libc = glibc()
    if libc is None:
        return False
    return libc.mallopt(_M_MMAP_MAX, 0) == 1 and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP) == 1
