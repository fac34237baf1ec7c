"""Sums over a block's edges, with gradients. The sums do not copy a row of features for each edge.

``aggregate`` is for layers in which an edge's weight is a factor of its target times a factor of its source (mean,
symmetric normalisation). ``attend`` is for a learnt weight per edge. On the CPU, Numba kernels compute the sums. On a
GPU, kernels of numba-cuda (``cuda_sums``) add in the same order as on the CPU; without numba-cuda, torch's sparse CSR
product is used.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.core.batch import Block
from trainer.core.compiled import njit
from trainer.nn.kernels.precision import for_sums, sum_dtype
from trainer.nn.kernels.rows import as_array, run_rows, runs_cuda_kernels, wide

Reduce = Literal["sum", "mean"]


def aggregate(
    block: Block,
    x: Tensor,
    reduce: Reduce = "sum",
    dst_scale: Tensor | None = None,
    src_scale: Tensor | None = None,
) -> Tensor:
    """Compute ``out[i] = dst_scale[i] * sum over edges (j -> i) of src_scale[j] * x[j]``, [num_dst, f].

    x: float [num_src, f]; dst_scale [num_dst] and src_scale [num_src]: constants without gradient, None means 1.
    ``mean`` also divides by the number of edges. A target without edges gets 0. For bfloat16 rows the result is
    float32.
    """
    if reduce == "mean":
        per_edge = 1.0 / block.indptr.diff().clamp(min=1).to(sum_dtype(x.dtype))
        dst_scale = per_edge if dst_scale is None else dst_scale * per_edge
    return _Aggregate.apply(x, block, dst_scale, src_scale)  # type: ignore[no-any-return, no-untyped-call]


def attend(block: Block, x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``out[i, h] = sum over edges e = (j -> i) of weight[e, h] * x[j, h]``, with gradients for both inputs.

    x: float [num_src, heads, f]; weight: [num_edges, heads]. Returns [num_dst, heads, f].
    """
    return _Attend.apply(x, weight, block)  # type: ignore[no-any-return, no-untyped-call]


def edge_dots(block: Block, dst: Tensor, src: Tensor) -> Tensor:
    """Compute per edge (j -> i) and head the dot product of ``dst[i]`` and ``src[j]``, with gradients for both inputs.

    dst: float [num_dst, heads, f]; src: [num_src, heads, f]. Returns [num_edges, heads].
    """
    return _EdgeDots.apply(dst, src, block)  # type: ignore[no-any-return, no-untyped-call]


def cuda_kernels(rows: Tensor) -> Any:
    """Return the module ``cuda_sums`` if its kernels can run on the tensor ``rows``, else None."""
    if not runs_cuda_kernels(rows):
        return None
    from trainer.nn.kernels import cuda_sums  # imported here because it imports numba-cuda

    return cuda_sums


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block, dst_scale: Tensor | None, src_scale: Tensor | None) -> Tensor:
        ctx.block, ctx.scales = block, (dst_scale, src_scale)
        return sum_rows(block.indptr, block.indices, x, dst_scale, src_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        dst_scale, src_scale = ctx.scales
        indptr, indices, _ = transpose(ctx.block)
        return sum_rows(indptr, indices, grad, src_scale, dst_scale), None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, block: Block) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, weight)
        return weighted_rows(block.indptr, block.indices, None, weight, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        indptr, indices, edges = transpose(ctx.block)
        return weighted_rows(indptr, indices, edges, weight, grad), edge_dot_products(ctx.block, grad, x), None


class _EdgeDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dst: Tensor, src: Tensor, block: Block) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(dst, src)
        return edge_dot_products(block, dst.detach(), src)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dst, src = ctx.saved_tensors
        grad_dst = weighted_rows(ctx.block.indptr, ctx.block.indices, None, grad, src)
        indptr, indices, edges = transpose(ctx.block)
        return grad_dst, weighted_rows(indptr, indices, edges, grad, dst), None


def transpose(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """Group the block's edges by source.

    Returns three int32 tensors: indptr [num_src + 1], the target of each edge, and its position in the block's edges.
    """
    found = block.__dict__.get("_transposed")  # two operations of a layer may need it
    if found is None:
        found = _transposed(block)
        block.__dict__["_transposed"] = found
    return found


def _transposed(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    if kernels := cuda_kernels(block.indptr):
        return kernels.transpose(block)
    if block.indptr.device.type != "cpu":
        return transpose_torch(block)
    return transpose_cpu(block)


def transpose_cpu(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """As ``transpose``, by a Numba kernel."""
    arrays = _transpose(block.indptr.numpy(), block.indices.numpy(), block.num_src)
    indptr, targets, edges = (torch.from_numpy(array) for array in arrays)
    return indptr, targets, edges


def transpose_torch(block: Block) -> tuple[Tensor, Tensor, Tensor]:
    """As ``transpose``, by torch operations, which run on any device and do not make the host wait for it."""
    sources, edges = torch.sort(block.indices, stable=True)
    bounds = torch.arange(block.num_src + 1, dtype=sources.dtype, device=sources.device)
    indptr = torch.searchsorted(sources, bounds, out_int32=True)
    return indptr, edge_targets(block)[edges].int(), edges.int()


def edge_targets(block: Block) -> Tensor:
    """Return the target of each edge, int64 [num_edges]."""
    return torch.repeat_interleave(block.indptr.diff().long(), output_size=len(block.indices))


def sum_rows(indptr: Tensor, indices: Tensor, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None) -> Tensor:
    """Compute ``out[i] = row_scale[i] * sum over j in row i of col_scale[j] * x[j]`` on a CSR, without gradients.

    A scale that is None means 1.
    """
    if kernels := cuda_kernels(x):
        return kernels.sum_rows(indptr, indices, x, row_scale, col_scale)
    run = sum_rows_cpu if x.device.type == "cpu" else sum_rows_torch
    return run(indptr, indices, x, row_scale, col_scale)


def weighted_rows(indptr: Tensor, indices: Tensor, edges: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    """Compute the sums of ``attend`` for the edges in a CSR, without gradients.

    Slot e of the CSR is the edge from ``indices[e]``. Its weights [heads] are ``weight[edges[e]]``, or ``weight[e]`` if
    ``edges`` is None.
    """
    if kernels := cuda_kernels(x):
        return kernels.weighted_rows(indptr, indices, edges, weight, x)
    run = weighted_rows_cpu if x.device.type == "cpu" else weighted_rows_torch
    return run(indptr, indices, edges, weight, x)


def edge_dot_products(block: Block, dst: Tensor, src: Tensor) -> Tensor:
    """As ``edge_dots``, without gradients."""
    if kernels := cuda_kernels(src):
        return kernels.edge_dots(block, dst, src)
    return (edge_dots_cpu if src.device.type == "cpu" else edge_dots_torch)(block, dst, src)


def edge_softmax(block: Block, score: Tensor) -> Tensor:
    """Normalise ``score`` [num_edges, heads] over the edges of each target by a softmax, with gradients."""
    if kernels := cuda_kernels(score):
        return kernels.edge_softmax(block, score)
    from torch_geometric.utils import softmax  # imported here because importing it takes seconds

    weight: Tensor = softmax(score, index=edge_targets(block), num_nodes=block.num_dst)
    return weight


def sum_rows_cpu(
    indptr: Tensor, indices: Tensor, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    out = x.new_empty(len(indptr) - 1, x.shape[1], dtype=sum_dtype(x.dtype))
    scales = (None if scale is None else scale.to(out.dtype).numpy() for scale in (row_scale, col_scale))
    source = as_array(x.contiguous())
    run_rows(_sum_rows, len(out), indptr.numpy(), indices.numpy(), source, *scales, out.numpy())
    return out


def sum_rows_torch(
    indptr: Tensor, indices: Tensor, x: Tensor, row_scale: Tensor | None, col_scale: Tensor | None
) -> Tensor:
    x = for_sums(x.detach())
    value = x.new_ones(len(indices)) if col_scale is None else col_scale.to(x.dtype)[indices.long()]
    out = _csr_product(indptr, indices, value, x)
    return out if row_scale is None else out * row_scale.to(x.dtype)[:, None]


def weighted_rows_cpu(indptr: Tensor, indices: Tensor, edges: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    out = x.new_empty(len(indptr) - 1, *x.shape[1:], dtype=sum_dtype(x.dtype))
    rows = (as_array(weight.contiguous()), as_array(x.contiguous()), out.numpy())
    edges_ = None if edges is None else edges.numpy()
    run_rows(_weighted_rows, len(out), indptr.numpy(), indices.numpy(), edges_, *rows)
    return out


def weighted_rows_torch(indptr: Tensor, indices: Tensor, edges: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    x = for_sums(x.detach())
    value = (weight if edges is None else weight[edges.long()]).detach().to(x.dtype)
    heads = [
        _csr_product(indptr, indices, value[:, head].contiguous(), x[:, head].contiguous())
        for head in range(x.shape[1])
    ]
    return torch.stack(heads, dim=1)


def edge_dots_cpu(block: Block, grad: Tensor, x: Tensor) -> Tensor:
    out = x.new_empty(len(block.indices), x.shape[1], dtype=sum_dtype(x.dtype))
    rows = (as_array(grad.contiguous()), as_array(x.contiguous()), out.numpy())
    run_rows(_edge_dots, block.num_dst, block.indptr.numpy(), block.indices.numpy(), *rows)
    return out


def edge_dots_torch(block: Block, grad: Tensor, x: Tensor) -> Tensor:
    return (for_sums(grad)[edge_targets(block)] * for_sums(x)[block.indices.long()]).sum(-1)


def _csr_product(indptr: Tensor, indices: Tensor, value: Tensor, x: Tensor) -> Tensor:
    if len(indices) == 0 or x.shape[1] == 0:
        return x.new_zeros(len(indptr) - 1, x.shape[1])
    return torch.sparse_csr_tensor(indptr, indices, value, (len(indptr) - 1, len(x)), check_invariants=False) @ x


@njit()
def _sum_rows(
    first: int, last: int, indptr: Any, indices: Any, x: Any, row_scale: Any, col_scale: Any, out: Any
) -> None:
    width = x.shape[1]
    for i in range(first, last):
        row = out[i]
        row[:] = 0
        for e in range(indptr[i], indptr[i + 1]):
            source = x[indices[e]]
            if col_scale is None:
                for k in range(width):
                    row[k] += wide(source[k])
            else:
                scale = col_scale[indices[e]]
                for k in range(width):
                    row[k] += scale * wide(source[k])
        if row_scale is not None:
            for k in range(width):
                row[k] *= row_scale[i]


@njit()
def _weighted_rows(first: int, last: int, indptr: Any, indices: Any, edges: Any, weight: Any, x: Any, out: Any) -> None:
    heads, width = x.shape[1], x.shape[2]
    for i in range(first, last):
        out[i] = 0
        for e in range(indptr[i], indptr[i + 1]):
            edge = e if edges is None else edges[e]
            for h in range(heads):
                row, source, factor = out[i, h], x[indices[e], h], wide(weight[edge, h])
                for k in range(width):
                    row[k] += factor * wide(source[k])


@njit(fastmath={"reassoc"})
def _edge_dots(first: int, last: int, indptr: Any, indices: Any, grad: Any, x: Any, out: Any) -> None:
    heads, width = x.shape[1], x.shape[2]
    for i in range(first, last):
        for e in range(indptr[i], indptr[i + 1]):
            for h in range(heads):
                row, source = grad[i, h], x[indices[e], h]
                total = out.dtype.type(0)
                for k in range(width):
                    total += wide(row[k]) * wide(source[k])
                out[e, h] = total


@njit()
def _transpose(indptr: Any, indices: Any, num_src: int) -> Any:
    by_source = np.zeros(num_src + 1, np.int32)
    for e in range(len(indices)):
        by_source[indices[e] + 1] += 1
    for source in range(num_src):
        by_source[source + 1] += by_source[source]
    place = by_source[:-1].copy()
    targets = np.empty(len(indices), np.int32)
    edges = np.empty(len(indices), np.int32)
    for target in range(len(indptr) - 1):
        for e in range(indptr[target], indptr[target + 1]):
            at = place[indices[e]]
            targets[at], edges[at] = target, e
            place[indices[e]] = at + 1
    return by_source, targets, edges
