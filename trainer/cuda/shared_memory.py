"""Arrays in memory that processes of one host share.

The memory belongs to an anonymous file (``memfd_create``), which other processes of the same user open by its path in
/proc. Unlike a file in /dev/shm, it does not outlive the processes, and has no size limit of its own in containers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.ranks import RankGroup

Handle = tuple[int, int, int]  #: process id, its file descriptor and the file's inode, of a ``SharedArray``

_CLOEXEC, _NOEXEC_SEAL = 1, 8  # MFD_…; some systems demand the seal (vm.memfd_noexec), Linux before 6.3 has none


@dataclass(frozen=True)
class SharedArray:
    """A new array that other processes of this host can map. Use as a context manager.

    After the ``with`` block no further process can map the array; its memory is freed when no process uses it.
    """

    values: Array  #: zeros at first
    handle: Handle  #: for ``map_shared`` in other processes

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> SharedArray:
        """Allocate a shared array of zeros. Raises ``OSError``."""
        try:
            descriptor = _memfd(_CLOEXEC | _NOEXEC_SEAL)
        except OSError:
            descriptor = _memfd(_CLOEXEC)
        try:
            os.truncate(descriptor, _num_bytes(shape, dtype))
            return cls(_map(descriptor, shape, dtype), (os.getpid(), descriptor, os.fstat(descriptor).st_ino))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def of(cls, values: Array) -> SharedArray:
        """Copy ``values`` to a new shared array. Raises ``OSError``."""
        shared = cls.new(values.shape, values.dtype)
        shared.values[...] = values
        return shared

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle[1])


def map_shared(handle: Handle, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Map the shared array of another process of this host, given its ``SharedArray.handle``, shape and dtype.

    Raises ``OSError`` if that process has ended, or belongs to another user or container.
    """
    process, number, inode = handle
    path = f"/proc/{process}/fd/{number}"
    file = os.stat(path)  # before it is opened: in another container, the process is another one
    if (file.st_ino, file.st_size) != (inode, _num_bytes(shape, dtype)):
        raise OSError(f"{path} is not the expected shared array")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _map(descriptor, shape, dtype)
    finally:
        os.close(descriptor)


def _memfd(flags: int) -> int:
    """Return the descriptor of a new anonymous file. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gnnfleet", flags)
    libc = ctypes.CDLL(None, use_errno=True)  # Pythons built with an old glibc, as conda's, lack the function
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "no memfd_create")
    descriptor = int(libc.memfd_create(b"gnnfleet", ctypes.c_uint(flags)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _map(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    size = _num_bytes(shape, dtype)
    return np.ndarray(shape, dtype, mmap.mmap(descriptor, size)) if size else np.empty(shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def mappable_ranks(group: RankGroup, key: str) -> list[list[int]]:
    """Return for each rank the other ranks whose shared arrays it can map. Collective.

    ``key``: Only ranks with the same key are tried; '' for a rank that shares nothing.
    """
    if group.size == 1:
        return [[]]
    with ExitStack() as opened:
        handle = None
        if key:
            with suppress(OSError):  # shared memory is not allowed here
                handle = opened.enter_context(SharedArray.of(np.array([group.rank]))).handle
        gathered = group.gather((key, handle))
        found = [
            rank
            for rank, (other_key, other) in enumerate(gathered)
            if handle and other and rank != group.rank and other_key == key and _maps(other, rank)
        ]
        return group.gather(found)  # the memory stays open until all have mapped it


def _maps(handle: Handle, rank: int) -> bool:
    try:
        return bool(map_shared(handle, (1,), np.int64)[0] == rank)
    except OSError:
        return False


def mutual_groups(reachable: Sequence[Iterable[int]]) -> list[tuple[int, ...]]:
    """Divide ranks into groups in each of which every rank reaches every other.

    A rank joins the first group that it fits in. ``reachable``: for each rank, the ranks that it reaches.
    """
    reached, groups = [set(ranks) for ranks in reachable], list[list[int]]()
    for rank in range(len(reached)):
        for group in groups:
            if all(one in reached[rank] and rank in reached[one] for one in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]
