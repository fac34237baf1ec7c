"""Reuses large arrays: touching new memory pages takes longer than writing rows into them."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array

LARGE = 1 << 20  #: bytes; smaller arrays come from numpy, whose allocator keeps their memory

KEEP = 1 << 30  #: bytes of free slabs that are kept

IDLE = 64  #: slabs that are taken while one lies free, after which it goes: some batches

_HUGE = 1 << 22  #: bytes from which on huge pages are asked for, as numpy does


def _own_pages(size: int) -> Array:
    """Memory outside malloc's heap: it leaves no hole there when it goes, and goes back to the system at once."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(size, np.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


@dataclass(frozen=True, eq=False)
class _FreeSlab:
    """Memory that nobody uses."""

    memory: Array  #: uint8
    since: int  #: how many slabs had been taken when it came


class Slabs:
    """Memory of arrays that are no more, kept for the next ones. Safe to use from several threads.

    An array's memory comes back once nothing refers to it, views and tensors included.
    """

    def __init__(self, keep: int = KEEP, make: Callable[[int], Array] = _own_pages):
        """``make``: new memory of so many bytes, uint8."""
        self._keep, self._make = keep, make
        self._free: deque[_FreeSlab] = deque()  # appended to by finalizers, which may run anywhere: they take no lock
        self._lock = threading.Lock()
        self._taken = 0  #: slabs

    @property
    def free_bytes(self) -> int:
        """Of slabs that nobody uses."""
        return sum(len(one.memory) for one in tuple(self._free))

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
        """The free slab that fits best, else a new one in place of one that is a little smaller.

        So there are about as many slabs as arrays of that size at once, however their sizes change. Slabs that nobody
        has wanted for long are let go.
        """
        with self._lock:
            self._taken += 1
            free = list(self._all_free())
            fitting = [one for one in free if size <= len(one.memory) <= 2 * size]
            smaller = [one for one in free if size // 2 <= len(one.memory) < size]
            chosen = min(fitting, key=_size) if fitting else max(smaller, key=_size, default=None)
            self._free.extend(one for one in free if one is not chosen and self._taken - one.since < IDLE)
        if chosen is not None and len(chosen.memory) >= size:
            return chosen.memory
        del free, fitting, smaller, chosen  # before the new one is made
        return self._make(size)

    def _all_free(self) -> Iterator[_FreeSlab]:
        """Taken out."""
        while True:
            try:
                yield self._free.popleft()
            except IndexError:
                return

    def _give_back(self, slab: Array) -> None:
        self._free.append(_FreeSlab(slab, self._taken))
        while self.free_bytes > self._keep:
            try:
                self._free.popleft()
            except IndexError:  # another thread was faster
                return


def _size(one: _FreeSlab) -> int:
    return len(one.memory)


def _rounded(size: int) -> int:
    """Up to a 32nd more, so that arrays of about one size use each other's memory."""
    step = 1 << (size.bit_length() - 6)
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


def glibc() -> ctypes.CDLL | None:
    """None with other C libraries (musl has no mallopt) and systems."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def give_back_freed_memory() -> None:
    """Return to the system what lies free between blocks in use: after work that is not done again soon."""
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  #: of glibc's malloc.h

_KEEP = 2**31 - 1  #: bytes free at the end of the heap above which they are returned, the most mallopt takes


def keep_freed_memory() -> bool:
    """Have glibc's malloc neither map large blocks one by one nor return them when free; whether that is done.

    Arrays of a step are some ten to a hundred MiB each. Mapped, each costs a page fault per 4 KiB in every step, which
    took as long as a third of the step itself. Other C libraries and systems are left as they are.
    """
    libc = glibc()
    if libc is None:
        return False
    return libc.mallopt(_M_MMAP_MAX, 0) == 1 and libc.mallopt(_M_TRIM_THRESHOLD, _KEEP) == 1
