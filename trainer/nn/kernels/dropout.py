"""Dropout whose mask is a pure function of batch key, layer, original id of the node or edge, and column.

The loss therefore does not depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.compiled import njit
from trainer.core.rng import LOW_A, LOW_B, STRIDE, batch_key, column_bits, mix
from trainer.nn.kernels.precision import sum_dtype
from trainer.nn.kernels.rows import as_array, narrow, run_rows, runs_cuda_kernels, wide

# The state of a row is SplitMix64's finaliser (``rng.mix``), the bits of a column are ``rng.column_bits``.
_MASK32 = 0xFFFFFFFF


def hash_dropout(h: Tensor, n_id: Tensor, p: float, key: int, layer: int, training: bool) -> Tensor:
    """Zero each element of ``h`` (float [n, f]) with probability ``p``, and scale the others by 1/(1-p).

    n_id: int64 [n], original ids of nodes, or ``edge_ids``; key: uint64, random key of the batch. Returns ``h`` itself
    if not ``training`` or ``p`` is 0.
    """
    if not training or p == 0:
        return h
    return _HashDropout.apply(h, n_id, p, stream(key, layer))  # type: ignore[no-any-return, no-untyped-call]


def stream(key: int, layer: int) -> int:
    """Return the uint64 key of one layer's dropout masks. ``key``: random key of the batch."""
    return batch_key(key, layer, 0, 0)


def edge_ids(src: Tensor, dst: Tensor) -> Tensor:
    """Return an id for each edge from the original ids of its ends, int64 [E]."""
    return src * -7046029254386353131 + dst  # an odd factor: edges of different ends rarely have the same id


class _HashDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, n_id: Tensor, p: float, stream_key: int) -> Tensor:
        ctx.mask = (n_id, p, stream_key)
        return mask_rows(h, n_id, p, stream_key)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return mask_rows(grad, *ctx.mask), None, None, None


def mask_rows(h: Tensor, n_id: Tensor, p: float, stream_key: int) -> Tensor:
    """Return ``h`` times its dropout mask. Uses torch operations where no kernel runs on the device of ``h``.

    ``n_id``: original ids of the rows. ``p``: dropout probability. ``stream_key``: key of the mask, from ``stream``.
    """
    if runs_cuda_kernels(h):
        from trainer.nn.kernels import cuda_elements  # imported here because it imports numba-cuda

        return cuda_elements.mask_rows(h, n_id, p, stream_key, threshold_of(p))
    if h.device.type != "cpu":
        return mask_rows_torch(h, n_id, p, stream_key)
    return mask_rows_cpu(h, n_id, p, stream_key)


def mask_rows_cpu(h: Tensor, n_id: Tensor, p: float, stream_key: int) -> Tensor:
    """Return ``h`` (on the CPU) times its dropout mask, by a Numba kernel."""
    out = torch.empty_like(h, memory_format=torch.contiguous_format)
    arrays = (as_array(h.contiguous()), n_id.contiguous().numpy(), as_array(out))
    factor = torch.tensor(1.0 / (1.0 - p), dtype=sum_dtype(h.dtype)).numpy()[()]
    run_rows(_mask_rows, len(h), *arrays, np.uint64(stream_key), np.uint32(threshold_of(p)), factor)
    return out


def mask_rows_torch(h: Tensor, n_id: Tensor, p: float, stream_key: int) -> Tensor:
    """Return the same values as ``mask_rows_cpu``, bit for bit, computed by torch operations on any device."""
    state = mix_tensor(n_id ^ signed(stream_key))
    columns = torch.arange(h.shape[1], device=h.device)
    bits = (state[:, None] + columns * STRIDE) & _MASK32
    bits = ((bits ^ (bits >> 16)) * LOW_A) & _MASK32
    bits = ((bits ^ (bits >> 15)) * LOW_B) & _MASK32
    bits = bits ^ (bits >> 16)
    return (h.detach() * (1.0 / (1.0 - p))).masked_fill_(bits < threshold_of(p), 0)


def threshold_of(p: float) -> int:
    """Return ``p`` as a uint32 threshold: elements whose 32 random bits are below it are dropped."""
    return min(round(p * 2**32), _MASK32)


def signed(value: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return value - 2**64 if value >= 2**63 else value


def mix_tensor(value: Tensor) -> Tensor:
    """Return ``rng.mix`` of each number, int64 [n]."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & (2 ** (64 - shift) - 1))) * signed(factor)
    return value ^ ((value >> 31) & (2**33 - 1))


@njit()
def _mask_rows(
    first: int, last: int, h: Any, n_id: Any, out: Any, stream_key: Any, threshold: Any, factor: Any
) -> None:
    zero = type(factor)(0)
    for i in range(first, last):
        state = np.uint32(mix(np.uint64(n_id[i]) ^ stream_key))
        source, row = h[i], out[i]
        for k in range(h.shape[1]):
            row[k] = narrow(wide(source[k]) * factor if column_bits(state, k) >= threshold else zero, row[k])
