"""Chooses how operations of layers run: Numba kernels on a CPU, kernels of numba-cuda or torch operations on a GPU."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32)

_SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"  #: run kernels in numba's simulator, for tests

_TORCH_ONLY = os.environ.get("GNNFLEET_TORCH_OPS") == "1"  #: leave kernels of numba-cuda out of layers


def runs_cuda_kernels(rows: Tensor) -> bool:
    """Return whether operations on ``rows`` use kernels of numba-cuda. Otherwise they use Numba or torch operations.

    ``rows``: floating-point rows, or int32 indices of a block. True if ``rows`` are on a CUDA device, or in numba's
    simulator. Exceptions: False if numba-cuda cannot run, or if the environment variable GNNFLEET_TORCH_OPS is 1.
    """
    if not (rows.is_cuda or _SIMULATED) or _TORCH_ONLY:
        return False
    from trainer.cuda.availability import why_no_kernels

    return rows.dtype in _DTYPES and not why_no_kernels(rows.device)
