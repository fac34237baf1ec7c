"""Run a compiled kernel over the rows of an output, on as many threads as torch uses."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

SMALL = 2048  #: rows below which handing over to threads costs more than it saves

CHUNKS_PER_THREAD = 4  #: so that a chunk of heavy rows does not keep the others waiting


def run_rows(kernel: Callable[..., None], num_rows: int, *args: Any) -> None:
    """Call ``kernel(first, last, *args)`` on ranges that cover ``0 … num_rows`` once.

    The kernel must release the GIL and write only its own rows; the result then does not depend
    on the number of threads. Numba's own thread pools are avoided: which one is there depends on
    the machine, and the one always there may not be entered from two threads at a time.
    """
    threads = torch.get_num_threads()
    if threads == 1 or num_rows < SMALL:
        kernel(0, num_rows, *args)
        return
    chunks = threads * CHUNKS_PER_THREAD
    bounds = [num_rows * chunk // chunks for chunk in range(chunks + 1)]
    pool = _pool(os.getpid(), threads)
    tasks = [pool.submit(kernel, first, last, *args) for first, last in zip(bounds, bounds[1:], strict=False)]
    for task in tasks:
        task.result()


@functools.cache
def _pool(pid: int, threads: int) -> ThreadPoolExecutor:
    """One pool per process: a forked child has the parent's pool object but not its threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"rows-{pid}")
