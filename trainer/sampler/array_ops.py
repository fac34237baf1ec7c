"""Array operations for growing a subgraph: the protocol ``ArrayOps``, and its implementation for numpy.

``trainer.cuda.array_ops`` implements the protocol for torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trainer.core.arrays import Array, read_only
from trainer.sampler import neighbor_kernels


class ArrayOps(Protocol):
    """The array operations of ``multi_hop``, for one kind of arrays: numpy arrays, or torch tensors on a device."""

    def own(self, values: Array) -> Array:
        """Convert a numpy array to an array of this kind, which may share its memory."""

    def zeros(self, size: int, dtype: Any) -> Array:
        """Return an array of zeros of a numpy dtype."""

    def arange(self, size: int) -> Array:
        """Return 0, 1, … as int32 [size]."""

    def concatenate(self, arrays: Sequence[Array], dtype: Any) -> Array:
        """Concatenate any number of arrays to one array of the numpy dtype ``dtype``.

        If ``arrays`` has only one array, the result may share its memory.
        """

    def begins(self, counts: Array, first: int) -> Array:
        """Return ``first`` plus the exclusive cumulative sum of ``counts``, int64 [n]."""

    def block_rows(self, begin: Array, count: Array, fanout: int, values: Array) -> tuple[Array, Array]:
        """Return a CSR with the first ``fanout`` values of each row (-1: all): int32 offsets [n + 1], and the values.

        The values of row i are the ``count[i]`` elements of ``values`` from position ``begin[i]`` on.
        """


class _NumpyOps:
    """``ArrayOps`` for numpy arrays."""

    def own(self, values: Array) -> Array:
        return values

    def zeros(self, size: int, dtype: Any) -> Array:
        return np.zeros(size, dtype)

    def arange(self, size: int) -> Array:
        return np.arange(size, dtype=np.int32)

    def concatenate(self, arrays: Sequence[Array], dtype: Any) -> Array:
        return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)

    def begins(self, counts: Array, first: int) -> Array:
        found: npt.NDArray[np.int64] = first + np.cumsum(counts, dtype=np.int64) - counts
        return found

    def block_rows(self, begin: Array, count: Array, fanout: int, values: Array) -> tuple[Array, Array]:
        indptr = np.empty(len(begin) + 1, np.int32)
        indices = neighbor_kernels.block_rows(read_only(begin), read_only(count), fanout, read_only(values), indptr)
        return indptr, indices


NUMPY = _NumpyOps()
