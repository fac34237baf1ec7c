"""``ArrayOps`` for torch tensors: the arrays of a subgraph that a CUDA device samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.cuda.launch import cuda, kernel

_DTYPES = {np.int64: torch.int64, np.int32: torch.int32}


class TorchOps:
    """``ArrayOps`` on one device: where the protocol has arrays, these methods take and return tensors."""

    def __init__(self, device: torch.device):
        self.device = device

    def own(self, values: Any) -> Any:
        """Copy a numpy array to the device. With CUDA this waits for the stream, as the array is in pageable memory."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)

    def zeros(self, size: int, dtype: Any) -> Any:
        return torch.zeros(size, dtype=_DTYPES[dtype], device=self.device)

    def arange(self, size: int) -> Any:
        return torch.arange(size, dtype=torch.int32, device=self.device)

    def concatenate(self, arrays: Sequence[Any], dtype: Any) -> Any:
        if not arrays:
            return self.zeros(0, dtype)
        return torch.cat([array.to(_DTYPES[dtype]) for array in arrays])

    def begins(self, counts: Any, first: int) -> Any:
        return begins_of(counts) + first

    def block_rows(self, begin: Any, count: Any, fanout: int, values: Any) -> tuple[Any, Any]:
        widths = count if fanout < 0 else count.clamp(max=fanout)
        indptr = torch.zeros(len(count) + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(widths, 0, dtype=torch.int32, out=indptr[1:])
        indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=self.device)
        copy_rows(len(count), begin, indptr, values, indices)
        return indptr, indices


def begins_of(counts: Tensor) -> Tensor:
    """Return where each of several consecutive ranges begins, int64 [n]. ``counts``: their lengths."""
    return torch.cumsum(counts, 0, dtype=torch.int64) - counts


@kernel
def copy_rows(begin: Any, indptr: Any, values: Any, indices: Any) -> None:
    """Fill ``indices``, the entries of a CSR: each row gets consecutive ``values``, the first from ``begin[row]``.

    One thread fills a row. ``indptr``: the CSR's row offsets.
    """
    for row in range(cuda.grid(1), len(begin), cuda.gridsize(1)):
        first = begin[row]
        start = indptr[row]
        for j in range(indptr[row + 1] - start):
            indices[start + j] = values[first + j]
