"""Arrays in memory that processes of one host share.

The memory belongs to an anonymous file (``memfd_create``), which other processes of the same user open by its path in
/proc. Unlike a file in /dev/shm, it does not outlive the processes, and its size is not limited in containers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array

Place = tuple[int, int]  #: process id, and number of a file descriptor of that process


@dataclass(frozen=True)
class SharedArray:
    """A new array that other processes of this host can map. Use as a context manager.

    After the ``with`` block no further process can map the array; its memory is freed when no process uses it.
    """

    values: Array  #: zeros at first
    place: Place  #: for ``map_shared`` in other processes

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> SharedArray:
        """Allocate a shared array of zeros. Raises ``OSError``."""
        place = os.getpid(), os.memfd_create("gnnfleet")
        os.truncate(place[1], int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return cls(map_shared(place, shape, dtype), place)

    @classmethod
    def of(cls, values: Array) -> SharedArray:
        """Copy ``values`` to a new shared array. Raises ``OSError``."""
        shared = cls.new(values.shape, values.dtype)
        shared.values[...] = values
        return shared

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.place[1])


def map_shared(place: Place, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Map the shared array of another process of this host, given its ``SharedArray.place``, shape and dtype.

    Raises ``OSError`` if that process has ended, or belongs to another user or container.
    """
    if not np.prod(shape):  # numpy cannot map 0 bytes
        return np.empty(shape, dtype)
    process, descriptor = place
    path = f"/proc/{process}/fd/{descriptor}"
    return np.asarray(np.memmap(path, dtype=dtype, mode="r+", shape=shape))
