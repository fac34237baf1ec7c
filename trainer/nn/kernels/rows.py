"""Runs kernels over rows: Numba's on a CPU, on as many threads as torch uses; numba-cuda's, or torch, on a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from trainer.core import slabs
from trainer.core.arrays import Array

SMALL = 2048  #: number of rows below which threads cost more time than they save

_CHUNKS_PER_THREAD = 4  #: several chunks, so that all threads stay busy if some rows take longer than others

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


def run_rows(kernel: Callable[..., None], num_rows: int, *args: Any) -> None:
    """Call ``kernel(first, last, *args)`` on half-open ranges that together cover rows 0 to ``num_rows`` once.

    The kernel must release the GIL and write only rows of its range.
    """
    threads = torch.get_num_threads()
    if threads == 1 or num_rows < SMALL:
        kernel(0, num_rows, *args)
        return
    chunks = threads * _CHUNKS_PER_THREAD
    bounds = [num_rows * chunk // chunks for chunk in range(chunks + 1)]
    # Not Numba's thread pools: the only one that is always installed (workqueue) forbids concurrent calls.
    pool = _pool(os.getpid(), threads)
    tasks = [pool.submit(kernel, first, last, *args) for first, last in zip(bounds, bounds[1:], strict=False)]
    for task in tasks:
        task.result()


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    # ``pid`` is part of the cache key, as threads do not survive a fork.
    return ThreadPoolExecutor(threads, thread_name_prefix=f"rows-{pid}")


def as_array(rows: Tensor) -> Array:
    """Return a NumPy array that shares the tensor's memory; uint16 bits for bfloat16."""
    own = rows.detach()
    return (own.view(torch.uint16) if own.dtype == torch.bfloat16 else own).numpy()


def new_rows(count: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor [count, width]. On the CPU, ``core.slabs`` allocates it and reuses its memory."""
    if device.type != "cpu":
        return torch.empty(count, width, dtype=dtype, device=device)
    if dtype == torch.bfloat16:
        return torch.from_numpy(slabs.empty((count, width), np.int16)).view(dtype)
    return torch.from_numpy(slabs.empty((count, width), np.float64 if dtype == torch.float64 else np.float32))


def wide(value: Any) -> Any:
    """In a kernel: convert the bits of a bfloat16 (uint16) to float32, and return any other number unchanged."""
    raise NotImplementedError


def narrow(value: Any, like: Any) -> Any:
    """In a kernel: round ``value`` (float32) to bfloat16 bits if ``like`` is uint16, else return it unchanged."""
    raise NotImplementedError


@overload(wide, inline="always")
def _wide(value):  # type: ignore[no-untyped-def]  # Numba compares signatures, annotations included
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
