"""CUDA kernels that sum over a block's edges, with one thread per element of the result.

There are no atomic additions, so results do not differ between calls, and the order of additions is that of the CPU.

Imported only where kernels run (``runs_cuda_kernels``). Threads with neighbouring numbers read neighbouring columns of
the same row. A device may round ``a * b + c`` once where the CPU rounds twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.core.batch import Block
from trainer.cuda.elements import from_bits, same, split
from trainer.cuda.launch import cuda, device_function, kernel
from trainer.nn.kernels.cuda_elements import by_dtype, launch, scalar
from trainer.nn.kernels.precision import for_sums, sum_dtype


@device_function
def _row_of(indptr, num_rows, entry):  # type: ignore[no-untyped-def]
    """Return the row of a CSR to which the entry at index ``entry`` belongs."""
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if indptr[middle] <= entry:
            low = middle
        else:
            high = middle
    return low


@kernel
def _edge_targets(n, num_rows, indptr, edges, targets, places):  # type: ignore[no-untyped-def]
    for at in range(cuda.grid(1), n, cuda.gridsize(1)):
        edge = edges[at]
        targets[at] = _row_of(indptr, num_rows, edge)
        places[at] = edge


def transpose(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Group the block's edges by source, as ``spmm.transpose``: torch sorts, and a kernel finds each edge's target."""
    sources, edges = torch.sort(block.indices, stable=True)
    bounds = torch.arange(block.num_src + 1, dtype=sources.dtype, device=sources.device)
    indptr = torch.searchsorted(sources, bounds, out_int32=True)
    targets, places = torch.empty_like(block.indices), torch.empty_like(block.indices)
    launch(_edge_targets, len(edges), block.num_dst, block.indptr, edges, targets, places)
    return indptr, targets, places


def _make_sum_rows(load: Any, scaled_rows: bool, scaled_columns: bool) -> Callable[..., None]:
    def sum_rows(n, width, indptr, indices, x, row_scale, col_scale, out, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            i, k = split(item, width)
            total = zero
            for e in range(indptr[i], indptr[i + 1]):
                j = indices[e]
                if scaled_columns:
                    total += col_scale[j] * load(x[j, k])
                else:
                    total += load(x[j, k])
            if scaled_rows:
                total *= row_scale[i]
            out[i, k] = total

    return sum_rows


_sum_rows = {
    (bits, rows, columns): kernel(_make_sum_rows(from_bits if bits else same, rows, columns))
    for bits in (False, True) for rows in (False, True) for columns in (False, True)
}  # fmt: skip


def sum_rows(indptr: Tensor, indices: Tensor, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None) -> Tensor:
    """Return the same weighted sums as ``spmm.sum_rows_cpu``, added in the same order."""
    x, dtype = x.detach(), sum_dtype(x.dtype)
    out = x.new_empty(len(indptr) - 1, x.shape[1], dtype=dtype)
    none = out.new_empty(0)
    scales = [none if scale is None else scale.to(dtype) for scale in (row_scale, col_scale)]
    run = _sum_rows[x.dtype == torch.bfloat16, row_scale is not None, col_scale is not None]
    launch(run, out.numel(), out.shape[1], indptr, indices, x, *scales, out, scalar(0.0, dtype))
    return out


def _make_weighted_rows(load_weight: Any, load: Any, mapped: bool) -> Callable[..., None]:
    def weighted_rows(n, heads, width, indptr, indices, edges, weight, x, out, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            row, k = split(item, width)
            i, h = split(row, heads)
            total = zero
            for e in range(indptr[i], indptr[i + 1]):
                edge = edges[e] if mapped else e
                total += load_weight(weight[edge, h]) * load(x[indices[e], h, k])
            out[i, h, k] = total

    return weighted_rows


_LOADS = {False: same, True: from_bits}

_weighted_rows = {
    (weight, x, mapped): kernel(_make_weighted_rows(_LOADS[weight], _LOADS[x], mapped))
    for weight in _LOADS for x in _LOADS for mapped in (False, True)
}  # fmt: skip


def weighted_rows(indptr: Tensor, indices: Tensor, edges: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    """Return the same sums as ``spmm.weighted_rows_cpu``, added in the same order, for all heads in one launch."""
    weight, x = weight.detach(), x.detach()
    out = x.new_empty(len(indptr) - 1, *x.shape[1:], dtype=sum_dtype(x.dtype))
    run = _weighted_rows[weight.dtype == torch.bfloat16, x.dtype == torch.bfloat16, edges is not None]
    places = indices if edges is None else edges
    launch(run, out.numel(), *x.shape[1:], indptr, indices, places, weight, x, out, scalar(0.0, x.dtype))
    return out


def _make_edge_dots(load_dst: Any, load_src: Any) -> Callable[..., None]:
    def edge_dots(n, heads, width, num_dst, indptr, indices, dst, src, out, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            e, h = split(item, heads)
            i, j = _row_of(indptr, num_dst, e), indices[e]
            total = zero
            for k in range(width):
                total += load_dst(dst[i, h, k]) * load_src(src[j, h, k])
            out[e, h] = total

    return edge_dots


_edge_dots = {(dst, src): kernel(_make_edge_dots(_LOADS[dst], _LOADS[src])) for dst in _LOADS for src in _LOADS}


def edge_dots(block: Block, dst: Tensor, src: Tensor) -> Tensor:
    """Return the same dot products as ``spmm.edge_dots_cpu``, with one thread per edge and head."""
    dst, src = dst.detach(), src.detach()
    out = src.new_empty(len(block.indices), src.shape[1], dtype=sum_dtype(src.dtype))
    run = _edge_dots[dst.dtype == torch.bfloat16, src.dtype == torch.bfloat16]
    launch(
        run, out.numel(), *src.shape[1:], block.num_dst, block.indptr, block.indices, dst, src, out,
        scalar(0.0, src.dtype),
    )  # fmt: skip
    return out


def _make_mean_and_self(load: Any, store: Any) -> Callable[..., None]:
    def mean_and_self(n, width, indptr, indices, x, out, zero, one):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            i, k = split(item, width)
            e, end = indptr[i], indptr[i + 1]
            share = one / type(one)(max(end - e, 1))
            total = zero
            while e + 4 <= end:  # the CPU's order of additions
                a, b, c, d = indices[e], indices[e + 1], indices[e + 2], indices[e + 3]
                total += (load(x[a, k]) + load(x[b, k])) + (load(x[c, k]) + load(x[d, k]))
                e += 4
            while e < end:
                total += load(x[indices[e], k])
                e += 1
            out[i, k] = store(total * share)
            out[i, width + k] = store(load(x[i, k]))

    return mean_and_self


_mean_and_self = by_dtype(_make_mean_and_self)


def mean_and_self(block: Block, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same rows [mean | self] as ``sage.mean_and_self``. ``x`` is converted to ``dtype`` first."""
    x = x.detach().to(dtype)
    width = x.shape[1]
    out = x.new_empty(block.num_dst, 2 * width)
    zero, one = scalar(0.0, dtype), scalar(1.0, dtype)
    launch(_mean_and_self(dtype), block.num_dst * width, width, block.indptr, block.indices, x, out, zero, one)
    return out


def _make_sources(load: Any, store: Any) -> Callable[..., None]:
    def sources(n, width, num_dst, indptr, targets, share, grad, out, zero):  # type: ignore[no-untyped-def]
        for item in range(cuda.grid(1), n, cuda.gridsize(1)):
            j, k = split(item, width)
            total = load(grad[j, width + k]) if j < num_dst else zero
            for e in range(indptr[j], indptr[j + 1]):
                i = targets[e]
                total += share[i] * load(grad[i, k])
            out[j, k] = store(total)

    return sources


_sources = by_dtype(_make_sources)


def sources_of(block: Block, transposed: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Tensor:
    """Return the gradient of the input of ``mean_and_self``, [num_src, f], in the dtype of ``grad``.

    ``grad``: the gradient of its output, [num_dst, 2 f]. ``transposed``: the result of ``transpose(block)``.
    """
    indptr, targets, _ = transposed
    width = grad.shape[1] // 2
    out = grad.new_empty(block.num_src, width)
    share = 1.0 / block.indptr.diff().clamp(min=1).to(sum_dtype(grad.dtype))
    launch(
        _sources(grad.dtype),
        out.numel(),
        width,
        block.num_dst,
        indptr,
        targets,
        share,
        grad.detach(),
        out,
        scalar(0.0, grad.dtype),
    )
    return out


@kernel
def _softmax(n, heads, indptr, score, out, zero, lowest):  # type: ignore[no-untyped-def]
    for item in range(cuda.grid(1), n, cuda.gridsize(1)):
        i, h = split(item, heads)
        begin, end = indptr[i], indptr[i + 1]
        largest = lowest
        for e in range(begin, end):
            largest = max(largest, score[e, h])
        total = zero
        for e in range(begin, end):
            value = math.exp(score[e, h] - largest)
            out[e, h] = value
            total += value
        for e in range(begin, end):
            out[e, h] = out[e, h] / total


@kernel
def _softmax_gradient(n, heads, indptr, weight, grad, out, zero):  # type: ignore[no-untyped-def]
    for item in range(cuda.grid(1), n, cuda.gridsize(1)):
        i, h = split(item, heads)
        total = zero
        for e in range(indptr[i], indptr[i + 1]):
            total += weight[e, h] * grad[e, h]
        for e in range(indptr[i], indptr[i + 1]):
            out[e, h] = weight[e, h] * (grad[e, h] - total)


class _EdgeSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, score: Tensor, indptr: Tensor) -> Tensor:
        score = for_sums(score.detach())
        out, lowest = torch.empty_like(score), scalar(-math.inf, score.dtype)
        launch(
            _softmax,
            (len(indptr) - 1) * score.shape[1],
            score.shape[1],
            indptr,
            score,
            out,
            scalar(0.0, score.dtype),
            lowest,
        )
        ctx.save_for_backward(out, indptr)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weight, indptr = ctx.saved_tensors
        out, heads = torch.empty_like(weight), weight.shape[1]
        launch(
            _softmax_gradient,
            (len(indptr) - 1) * heads,
            heads,
            indptr,
            weight,
            grad.to(weight.dtype),
            out,
            scalar(0.0, weight.dtype),
        )
        return out, None


def edge_softmax(block: Block, score: Tensor) -> Tensor:
    """Normalise ``score`` [num_edges, heads] over each target's edges by a softmax, with gradients."""
    return _EdgeSoftmax.apply(score, block.indptr)  # type: ignore[no-any-return, no-untyped-call]
