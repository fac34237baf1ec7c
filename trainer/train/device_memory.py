"""An error that says what to lower when a GPU's memory is exhausted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.core.errors import TrainingError
from trainer.core.ranks import RankGroup
from trainer.core.remote_settings import CacheSize
from trainer.train.settings import TrainSettings

#: Messages of CUDA, cuBLAS and NCCL; torch raises ``OutOfMemoryError`` only for its own allocations.
_EXHAUSTED = re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED")


@contextmanager
def memory_errors(group: RankGroup, settings: TrainSettings) -> Iterator[None]:
    """In the ``with`` block, convert CUDA's out-of-memory errors to ``TrainingError``.

    The message names settings to lower.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not _EXHAUSTED.search(str(error)):
            raise
        reason = (str(error).splitlines() or [""])[0].removeprefix("CUDA out of memory. ")
        words = ", ".join(_lowered(settings))
        raise TrainingError(f"CUDA out of memory on {group.ranks}; lower one of {words} ({reason})") from error


def _lowered(settings: TrainSettings) -> list[str]:
    """Return settings to lower, such as ``batch_size (1024)``; those that save the most memory come first."""
    batch = [f"batch_size ({settings.batch_size})", f"fanouts ({', '.join(map(str, settings.fanouts))})"]
    cache = CacheSize.parse(settings.device_cache)
    cached = [f"device_cache ({settings.device_cache})"] if cache != CacheSize() else []
    precision = [] if settings.precision == "bfloat16" else ["precision (to bfloat16)"]
    sampling = [] if settings.sampling == "cpu" else ["sampling (to cpu)"]
    return [
        *cached,
        *batch,
        f"hidden ({settings.hidden})",
        *precision,
        f"eval_batch_size ({settings.eval_batch_size})",
        *sampling,
    ]
