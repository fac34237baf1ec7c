"""Calls of the CUDA driver that neither torch nor numba-cuda offers, by cuda-bindings, on which numba-cuda depends.

Unlike errors of CUDA's runtime, those of the driver are not reported a second time by torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch


@contextmanager
def driver_on(device: torch.device) -> Iterator[Any]:
    """Return the module ``cuda.bindings.driver`` for calls on ``device``. Waits until the device has done all work."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # also makes the device's primary context current
        yield import_module("cuda.bindings.driver")


def checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call. Raises ``RuntimeError`` with the name of the driver's error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None
