"""Bias, activation function and dropout between two layers; with ReLU in one pass over the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from trainer.core.compiled import njit
from trainer.core.rng import LOW_A, LOW_B, STRIDE, mix
from trainer.nn.kernels.dropout import hash_dropout, stream, threshold_of
from trainer.nn.kernels.rows import as_array, narrow, run_rows, runs_cuda_kernels, wide

_STRIDE, _LOW_A, _LOW_B = np.uint32(STRIDE), np.uint32(LOW_A), np.uint32(LOW_B)

_S15, _S16 = np.uint32(15), np.uint32(16)

#: Functions between layers by name.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "elu": functional.elu}


@dataclass(frozen=True)
class Activation:
    """The function ``dropout(relu(h + bias))``, or with another function than ReLU; masks are of ``hash_dropout``."""

    bias: Tensor  #: float [f], bias of the layer that computed ``h``
    n_id: Tensor  #: int64 [n], original ids of the rows
    p: float  #: dropout probability, 0 in evaluation
    key: int  #: uint64 key of the batch
    layer: int  #: number of the layer that follows
    function: str = "relu"  #: a name in ``FUNCTIONS``; kernels know only ReLU

    @property
    def scale(self) -> float:
        """Factor by which dropout multiplies the elements that it keeps."""
        return 1.0 / (1.0 - self.p)

    def of(self, h: Tensor) -> Tensor:
        """Return ``dropout(relu(h + bias))``, with gradients. h: float [n, f]; kernels overwrite it with the result."""
        if self.function != "relu" or (h.device.type != "cpu" and not runs_cuda_kernels(h)):
            rows = FUNCTIONS[self.function](h + self.bias).to(h.dtype)
            return hash_dropout(rows, self.n_id, self.p, self.key, self.layer, self.p > 0)
        return _Activate.apply(h, self.bias, self)  # type: ignore[no-any-return, no-untyped-call]


class _Activate(torch.autograd.Function):
    """``Activation`` as an autograd function that runs kernels.

    The backward pass needs only the saved result: the gradient is 0 where the result is not above 0.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, bias: Tensor, activation: Activation) -> Tensor:
        out = activate_(h, activation)
        ctx.scale = activation.scale
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (out,) = ctx.saved_tensors
        before = pass_where_positive(grad.contiguous(), out, ctx.scale)
        return before, column_sums(before), None


def pass_where_positive(grad: Tensor, out: Tensor, scale: float) -> Tensor:
    """Return ``grad * scale`` where ``out`` is above 0, and 0 elsewhere.

    ``grad`` and ``out``: float or bfloat16 [n, f], contiguous.
    """
    if runs_cuda_kernels(out):
        from trainer.nn.kernels import cuda_elements  # imported here because it imports numba-cuda

        return cuda_elements.pass_where_positive(grad, out, scale)
    before = torch.empty_like(out)
    arrays = (as_array(part) for part in (grad, out, before))
    run_rows(_pass_where_positive, len(out), *arrays, scale)
    return before


def activate_(h: Tensor, activation: Activation) -> Tensor:
    """Overwrite ``h`` (float or bfloat16 [n, f]) with ``dropout(relu(h + bias))`` and return it, without gradients.

    If ``h`` is not contiguous, it is left unchanged, and the result is a new tensor.
    """
    out = h.detach()
    if not out.is_contiguous():
        out = out.contiguous()
    stream_key, threshold = stream(activation.key, activation.layer), threshold_of(activation.p)
    if runs_cuda_kernels(out):
        from trainer.nn.kernels import cuda_elements  # imported here because it imports numba-cuda

        cuda_elements.activate_(out, activation.bias, activation.n_id, threshold, stream_key, activation.scale)
        return out
    bias = activation.bias.detach().to(torch.float64 if out.dtype == torch.float64 else torch.float32).numpy()
    n_id = activation.n_id.contiguous().numpy()
    draw = (np.uint64(stream_key), np.uint32(threshold))
    run_rows(_activate, len(out), as_array(out), bias, n_id, *draw, activation.scale)
    return out


def column_sums(rows: Tensor) -> Tensor:
    if rows.dtype == torch.bfloat16:
        return rows.sum(0, dtype=torch.float32)
    return torch.mv(rows.t(), rows.new_ones(len(rows)))


@njit()
def _activate(
    first: int, last: int, rows: Any, bias: Any, n_id: Any, stream_key: Any, threshold: Any, scale: float
) -> None:
    # ``value <= zero`` keeps NaN, so that a diverged loss shows as NaN.
    factor = bias.dtype.type(scale)
    zero = bias.dtype.type(0)
    bits, states = np.empty(len(bias), np.uint32), np.empty(last - first, np.uint32)
    for i in range(first, last):
        states[i - first] = np.uint32(mix(np.uint64(n_id[i]) ^ stream_key))
    for i in range(first, last):
        row, state = rows[i], states[i - first]
        if threshold == np.uint32(0):
            for k in range(len(bias)):
                value = wide(row[k]) + bias[k]
                row[k] = narrow(zero if value <= zero else value, row[k])
            continue
        for k in range(len(bias)):  # ``rng.column_bits`` in a loop of its own, so that both loops are vectorised
            hashed = np.uint32(state + np.uint32(np.uint32(k) * _STRIDE))
            hashed = np.uint32(np.uint32(hashed ^ (hashed >> _S16)) * _LOW_A)
            hashed = np.uint32(np.uint32(hashed ^ (hashed >> _S15)) * _LOW_B)
            bits[k] = np.uint32(hashed ^ (hashed >> _S16))
        for k in range(len(bias)):
            value = wide(row[k]) + bias[k]
            value = zero if value <= zero else value * factor
            row[k] = narrow(zero if bits[k] < threshold else value, row[k])


@njit()
def _pass_where_positive(first: int, last: int, grad: Any, out: Any, before: Any, scale: float) -> None:
    for i in range(first, last):
        source, result, row = grad[i], out[i], before[i]
        for k in range(out.shape[1]):
            value = wide(source[k])
            row[k] = narrow(value * type(value)(scale) if wide(result[k]) > 0 else type(value)(0), row[k])
