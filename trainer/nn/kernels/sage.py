"""A GraphSAGE layer as one autograd operation: a kernel makes rows [mean | self] for one dense product."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.batch import Block
from trainer.core.compiled import njit
from trainer.nn.kernels.activation import Activation, activate_, column_sums, pass_where_positive
from trainer.nn.kernels.rows import as_array, narrow, new_rows, run_rows, wide
from trainer.nn.kernels.spmm import cuda_kernels, transpose


def sage_rows(
    block: Block, x: Tensor, of_mean: Tensor, of_self: Tensor, before: Activation | None, dtype: torch.dtype
) -> Tensor:
    """Compute ``mean of neighbours @ of_mean.t() + self @ of_self.t()`` from the rows ``x``: ``dtype`` [num_dst, g].

    x: float or bfloat16 [num_src, f]. of_mean, of_self: weights [g, f]. If ``dtype`` is bfloat16, sums are in float32.

    If ``before`` is given, this activation is first applied to ``x``, which is overwritten. The backward pass can then
    run only once.
    """
    bias = None if before is None else before.bias
    return _Sage.apply(x, of_mean, of_self, bias, block, before, dtype)  # type: ignore[no-any-return, no-untyped-call]


class _Sage(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, of_mean: Tensor, of_self: Tensor, bias: Tensor | None, block: Block,
        before: Activation | None, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        rows = x.detach().contiguous() if before is None else activate_(x, before)
        both, weight = mean_and_self(block, rows, dtype), torch.cat([of_mean, of_self], 1).to(dtype)
        ctx.block, ctx.spent, ctx.scale = block, False, 1.0 if before is None else before.scale
        ctx.save_for_backward(both, weight, rows if before is not None else None)
        return torch.mm(both, weight.t(), out=new_rows(len(both), len(weight), dtype, both.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, weight, activated = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError(
                "backward was called twice on a GraphSAGE layer, whose gradient overwrites its saved activations; "
                "run the forward pass again before the second call"
            )
        ctx.spent = activated is not None
        grad = grad.contiguous()
        of_weight = (both.t() @ grad).t().float() if grad.dtype == torch.bfloat16 else (both.t() @ grad).t()
        of_mean, of_self = of_weight.chunk(2, 1)
        if not ctx.needs_input_grad[0]:
            return None, of_mean, of_self, None, None, None, None
        # If ``spent``, a second backward pass raises, so ``both`` can be overwritten.
        of_both = both if ctx.spent else new_rows(len(both), both.shape[1], both.dtype, both.device)
        torch.mm(grad, weight, out=of_both)
        of_rows = sources_of(ctx.block, of_both, activated, ctx.scale)
        of_bias = None if activated is None else column_sums(of_rows)
        return of_rows, of_mean, of_self, of_bias, None, None, None


def mean_and_self(block: Block, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Concatenate the mean of each target's sources and the target's own row: ``dtype`` [num_dst, 2 f].

    x: [num_src, f], contiguous.
    """
    if kernels := cuda_kernels(x):
        return kernels.mean_and_self(block, x, dtype)
    out = new_rows(block.num_dst, 2 * x.shape[1], dtype, x.device)
    total = np.dtype(np.float64 if dtype == torch.float64 else np.float32)
    run_rows(
        _mean_and_self, block.num_dst, block.indptr.numpy(), block.indices.numpy(), as_array(x), as_array(out),
        total.type(1),
    )  # fmt: skip
    return out


def sources_of(block: Block, grad: Tensor, activated: Tensor | None, scale: float) -> Tensor:
    """Return the gradient of the argument ``x`` of ``mean_and_self``, [num_src, f].

    grad: the gradient of the result of ``mean_and_self``, [num_dst, 2 f]. activated: ``x`` if an activation computed
    ``x``, else None.

    If ``activated`` is given, returns the gradient of the activation's input instead: the gradient of ``x`` times
    ``scale`` where ``activated`` is above 0, and 0 elsewhere. ``activated`` may then be overwritten.
    """
    indptr, targets, _ = transpose(block)
    if kernels := cuda_kernels(grad):
        out = kernels.sources_of(block, transpose(block), grad)
        return out if activated is None else pass_where_positive(out, activated.to(out.dtype), scale)
    if activated is None:
        out = new_rows(block.num_src, grad.shape[1] // 2, grad.dtype, grad.device)
    else:
        out = activated.to(grad.dtype)
    share = 1.0 / block.indptr.diff().clamp(min=1).to(torch.float64 if grad.dtype == torch.float64 else torch.float32)
    run_rows(
        _sources, block.num_src, indptr.numpy(), targets.numpy(), share.numpy(), as_array(grad), as_array(out),
        None if activated is None else share.numpy().dtype.type(scale),
    )  # fmt: skip
    return out


@njit()
def _mean_and_self(first: int, last: int, indptr: Any, indices: Any, x: Any, out: Any, one: Any) -> None:
    width = x.shape[1]
    total = np.empty(width, type(one))
    for i in range(first, last):
        begin, end = indptr[i], indptr[i + 1]
        for k in range(width):
            total[k] = type(one)(0)
        e = begin
        while e + 4 <= end:  # four rows at once: four loads in flight, a quarter of the stores
            a, b, c, d = x[indices[e]], x[indices[e + 1]], x[indices[e + 2]], x[indices[e + 3]]
            for k in range(width):
                total[k] += (wide(a[k]) + wide(b[k])) + (wide(c[k]) + wide(d[k]))
            e += 4
        while e < end:
            a = x[indices[e]]
            for k in range(width):
                total[k] += wide(a[k])
            e += 1
        share, row, own = one / type(one)(max(end - begin, 1)), out[i], x[i]
        for k in range(width):
            row[k] = narrow(total[k] * share, row[k])
        for k in range(width):
            row[width + k] = narrow(type(one)(wide(own[k])), row[k])


@njit()
def _sources(first: int, last: int, indptr: Any, targets: Any, share: Any, grad: Any, out: Any, scale: Any) -> None:
    width, num_dst = out.shape[1], len(grad)
    total = np.empty(width, share.dtype)
    for j in range(first, last):
        if j < num_dst:
            own = grad[j]
            for k in range(width):
                total[k] = wide(own[width + k])
        else:
            for k in range(width):
                total[k] = 0
        for e in range(indptr[j], indptr[j + 1]):
            factor, source = share[targets[e]], grad[targets[e]]
            for k in range(width):
                total[k] += factor * wide(source[k])
        row = out[j]
        if scale is None:
            for k in range(width):
                row[k] = narrow(total[k], row[k])
        else:
            for k in range(width):
                row[k] = narrow(total[k] * scale if wide(row[k]) > 0 else type(scale)(0), row[k])
