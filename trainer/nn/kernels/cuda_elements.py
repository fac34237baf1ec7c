"""CUDA kernels with one thread per element of the rows: dropout masks, and bias, ReLU and dropout between two layers.

Imported only where kernels run (``runs_cuda_kernels``). bfloat16 rows are arrays of their bits (uint16), as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.rng import column_bits, mix
from trainer.cuda.elements import from_bits, same, split, to_bits
from trainer.cuda.launch import Kernel, cuda, device_function, kernel
from trainer.nn.kernels.precision import sum_dtype

_mix, _column_bits = device_function(mix), device_function(column_bits)


def by_dtype(make: Callable[[Any, Any], Callable[..., None]]) -> Callable[[torch.dtype], Kernel]:
    """Return a function that takes the dtype of rows and returns the kernel for rows of this dtype.

    ``make(load, store)`` returns the kernel's Python function. That function calls ``load`` to convert an element of a
    row to the dtype of the computation, and ``store`` to convert a result to the dtype of the rows.
    """
    plain, bits = kernel(make(same, same)), kernel(make(from_bits, to_bits))
    return lambda dtype: bits if dtype == torch.bfloat16 else plain


def launch(run: Kernel, items: int, *args: Any) -> None:
    """Launch a kernel over ``items`` items, with this number as its first argument."""
    run(items, items, *args)


def scalar(value: float, dtype: torch.dtype) -> Any:
    """Return ``value`` as a numpy scalar of the dtype in which rows of ``dtype`` are summed."""
    return np.float64(value) if sum_dtype(dtype) == torch.float64 else np.float32(value)


def _make_mask_rows(load: Any, store: Any) -> Callable[..., None]:
    def mask_rows(n, width, h, n_id, out, stream_key, threshold, factor, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            i, k = split(item, width)
            state = np.uint32(_mix(np.uint64(n_id[i]) ^ stream_key) & np.uint64(0xFFFFFFFF))
            kept = _column_bits(state, k) >= threshold
            out[i, k] = store(load(h[i, k]) * factor if kept else zero)

    return mask_rows


_mask_rows = by_dtype(_make_mask_rows)


def mask_rows(h: Tensor, n_id: Tensor, p: float, stream_key: int, threshold: int) -> Tensor:
    """Return ``h`` times its dropout mask, bit for bit as on the CPU. ``threshold``: ``dropout.threshold_of(p)``."""
    h = h.detach()
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    factor, zero = scalar(1.0 / (1.0 - p), h.dtype), scalar(0.0, h.dtype)
    launch(
        _mask_rows(h.dtype),
        h.numel(),
        h.shape[1],
        h,
        n_id,
        out,
        np.uint64(stream_key),
        np.uint32(threshold),
        factor,
        zero,
    )
    return out


def _make_activate(load: Any, store: Any) -> Callable[..., None]:
    def activate(n, width, rows, bias, n_id, stream_key, threshold, factor, zero):  # type: ignore[no-untyped-def]
        # ``value <= zero`` keeps NaN, as on the CPU.
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            i, k = split(item, width)
            value = load(rows[i, k]) + bias[k]
            if threshold == np.uint32(0):
                rows[i, k] = store(zero if value <= zero else value)
            else:
                state = np.uint32(_mix(np.uint64(n_id[i]) ^ stream_key) & np.uint64(0xFFFFFFFF))
                value = zero if value <= zero else value * factor
                rows[i, k] = store(zero if _column_bits(state, k) < threshold else value)

    return activate


_activate = by_dtype(_make_activate)


def activate_(out: Tensor, bias: Tensor, n_id: Tensor, threshold: int, stream_key: int, scale: float) -> None:
    """Overwrite ``out`` (float or bfloat16 [n, f]) with ``dropout(relu(out + bias))``.

    ``n_id``: original ids of the rows. ``threshold``: ``dropout.threshold_of(p)`` for the dropout probability p.
    ``stream_key``: key of the dropout mask. ``scale``: factor of the elements that dropout keeps.
    """
    bias = bias.detach().to(sum_dtype(out.dtype))
    launch(
        _activate(out.dtype), out.numel(), out.shape[1], out, bias, n_id, np.uint64(stream_key),
        np.uint32(threshold), scalar(scale, out.dtype), scalar(0.0, out.dtype),
    )  # fmt: skip


def _make_pass_where_positive(load: Any, store: Any) -> Callable[..., None]:
    def pass_where_positive(n, width, grad, out, before, scale, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            i, k = split(item, width)
            before[i, k] = store(load(grad[i, k]) * scale if load(out[i, k]) > zero else zero)

    return pass_where_positive


_pass_where_positive = by_dtype(_make_pass_where_positive)


def pass_where_positive(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    """Return ``grad * scale`` where ``out`` is above 0, and 0 elsewhere. ``grad``, ``out``: [n, f], of one dtype."""
    before = torch.empty_like(out)
    launch(
        _pass_where_positive(out.dtype),
        out.numel(),
        out.shape[1],
        grad.detach(),
        out,
        before,
        scalar(scale, out.dtype),
        scalar(0.0, out.dtype),
    )
    return before
