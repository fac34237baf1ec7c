"""Arrays in memory that processes of one host share.

The memory belongs to an anonymous file (``memfd_create``), which other processes of the same user open by its path in
/proc. Unlike a file in /dev/shm, it does not outlive the processes, and has no size limit of its own in containers.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array
from trainer.core.ranks import RankGroup

Handle = tuple[int, int, int]  #: process id, its file descriptor and the file's inode, of a ``SharedArray``

_NOEXEC_SEAL = 8  # MFD_NOEXEC_SEAL; some systems demand it (sysctl vm.memfd_noexec), Linux before 6.3 does not know it


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
            descriptor = os.memfd_create("gnnfleet", os.MFD_CLOEXEC | _NOEXEC_SEAL)
        except OSError:
            descriptor = os.memfd_create("gnnfleet")
        size = _num_bytes(shape, dtype)
        os.truncate(descriptor, size)
        return cls(_map(descriptor, shape, dtype), (os.getpid(), descriptor, os.fstat(descriptor).st_ino))

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
    descriptor = os.open(path, os.O_RDWR)
    try:
        file = os.fstat(descriptor)
        if (file.st_ino, file.st_size) != (inode, _num_bytes(shape, dtype)):  # a process of another container
            raise OSError(f"{path} is not the expected shared array")
        return _map(descriptor, shape, dtype)
    finally:
        os.close(descriptor)


def _map(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    size = _num_bytes(shape, dtype)
    return np.ndarray(shape, dtype, mmap.mmap(descriptor, size)) if size else np.empty(shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def mappable_ranks(group: RankGroup, key: str) -> list[list[int]]:
    """Return for each rank the other ranks whose shared arrays it can map. Collective.

    ``key``: Only ranks with the same key are tried; '' for a rank that shares nothing.
    """
    try:
        probe = SharedArray.of(np.array([group.rank])) if key else None
    except OSError:  # not allowed here
        probe = None
    try:
        gathered = group.gather((key, probe.handle if probe else None))
        found = [
            rank
            for rank, (other, handle) in enumerate(gathered)
            if probe and rank != group.rank and other == key and handle and _maps(handle, rank)
        ]
        return group.gather(found)
    finally:
        if probe:
            probe.__exit__()


def _maps(handle: Handle, rank: int) -> bool:
    try:
        return bool(map_shared(handle, (1,), np.int64)[0] == rank)
    except OSError:
        return False


def mutual_groups(reachable: Sequence[Iterable[int]], most: int | None = None) -> list[tuple[int, ...]]:
    """Divide ranks into groups in each of which every rank reaches every other.

    A rank joins the first group that it fits in. ``reachable``: for each rank, the ranks that it reaches. ``most``:
    most ranks of a group.
    """
    reached, groups = [set(ranks) for ranks in reachable], list[list[int]]()
    for rank in range(len(reached)):
        for group in groups:
            full = most is not None and len(group) >= most
            if not full and all(one in reached[rank] and rank in reached[one] for one in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]
