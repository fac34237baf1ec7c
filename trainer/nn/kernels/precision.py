"""Precision of layers: float32, or matrix products in bfloat16 with float32 weights and sums."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_Forward = TypeVar("_Forward", bound=Callable[..., Any])

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_CPU_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  #: bfloat16 flags in /proc/cpuinfo; the last is Arm's


def in_own_precision(forward: _Forward) -> _Forward:
    """Decorate ``forward(batch)`` of a model to compute dense products in ``self.precision`` and return float32."""

    @functools.wraps(forward)
    def run(self: Any, batch: Any) -> Any:
        if self.precision == torch.float32:
            return forward(self, batch)
        device = next(self.parameters()).device
        with torch.autocast(device.type, self.precision):
            out = forward(self, batch)
            return {name: rows.float() for name, rows in out.items()} if isinstance(out, dict) else out.float()

    return run  # type: ignore[return-value]


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a matrix product with ``x``: the dtype of autocast if it is enabled, else that of ``x``."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which rows of ``dtype`` are summed: float32 for bfloat16."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def for_sums(rows: Tensor) -> Tensor:
    return rows.to(sum_dtype(rows.dtype))


def why_slow(precision: str, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return why ``precision`` is probably slower than float32 on this processor, or None if no reason is known.

    ``device``: device of the model. ``cpuinfo``: file that lists the features of the processor.
    """
    if precision == "float32":
        return None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return None
        what = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no units for it (8.0)"
    elif not cpuinfo.exists() or _CPU_FLAGS & set(cpuinfo.read_text().split()):
        return None
    else:
        what = f"this processor ({platform.machine()}) has no instructions for it (avx512_bf16, amx_bf16)"
    return f"precision {precision}: {what}, so it is probably slower than float32"
