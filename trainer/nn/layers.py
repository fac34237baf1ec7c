"""Graph layers on blocks: rows ``[num_src, in_dim]`` in, rows ``[num_dst, out_dim]`` out.

Parameters are those of the torch_geometric layers of the same name; on a block with all
neighbours the output is theirs too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.core.batch import Block
from trainer.nn.kernels.activation import Activation
from trainer.nn.kernels.precision import product_dtype, sum_dtype
from trainer.nn.kernels.sage import sage_rows
from trainer.nn.kernels.spmm import aggregate, attend, edge_targets


def glorot(weight: Tensor) -> None:
    """Draw ``weight`` [.., rows, columns] in place, with the same numbers as torch_geometric's function of that name,
    which takes seconds to import."""
    bound = math.sqrt(6.0 / (weight.size(-2) + weight.size(-1)))
    weight.data.uniform_(-bound, bound)


#: Multiply-adds of a dense product that take as long as one of an aggregation, which waits for memory.
DENSE_PER_SPARSE = 30


def linear_first(block: Block, in_dim: int, out_dim: int, needs_grad: bool) -> bool:
    """Whether to transform all sources before aggregating is cheaper than to aggregate and then transform.

    A backward pass costs the dense products twice and the aggregation once more; the latter only
    where its input ``needs_grad``, which after a transformation it always does.
    """
    edges, num_src, num_dst = len(block.indices) * DENSE_PER_SPARSE, block.num_src, block.num_dst
    dense = in_dim * out_dim * (3 if needs_grad else 2)
    transform_first = num_src * dense + 2 * edges * out_dim
    aggregate_first = num_dst * dense + (2 if needs_grad else 1) * edges * in_dim
    return transform_first < aggregate_first


class SAGEConv(nn.Module):
    """GraphSAGE with mean: ``lin_l(mean of neighbours) + lin_r(self)``; 0 for the mean of none."""

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        self.lin_l = nn.Linear(in_dim, out_dim)
        self.lin_r = nn.Linear(in_dim, out_dim, bias=False)

    @property
    def bias(self) -> Tensor:
        return self.lin_l.bias

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        return self.without_bias(block, x) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None
    ) -> Tensor:
        """``before``: applied to ``x`` first, which is used up."""
        of_mean, of_self = self.lin_l.weight, self.lin_r.weight
        if linear_first(block, x.shape[1], len(of_mean), x.requires_grad):
            x = x if before is None else before.of(x)
            return x[: block.num_dst] @ of_self.t() + aggregate(block, x @ of_mean.t(), "mean")
        if x.device.type == "cpu":
            return sage_rows(block, x, of_mean, of_self, before, product_dtype(x))
        x = x if before is None else before.of(x)
        return x[: block.num_dst] @ of_self.t() + aggregate(block, x, "mean") @ of_mean.t()


class GCNConv(nn.Module):
    """Graph convolution with self loops and symmetric normalisation by whole-graph in-degrees.

    With d the in-degree, target i gets ``lin(x_i / (d_i + 1) + sum_j x_j / sqrt((d_i + 1)(d_j + 1)))``.
    Of d_i neighbours the block holds s_i; their sum is scaled by d_i / s_i, so its expectation over
    samples is the full sum, and with all neighbours it is the full sum. A self loop already in the
    graph counts as one more neighbour.
    """

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        self.lin = nn.Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim))
        glorot(self.lin.weight)

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        """``degree``: in-degrees in the whole graph, [>= num_src]."""
        return self.without_bias(block, x, degree) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None
    ) -> Tensor:
        """``before``: applied to ``x`` first, which is used up."""
        assert degree is not None, "GCN needs whole-graph degrees on its batches"
        out_dim, in_dim = self.lin.weight.shape
        x = x if before is None else before.of(x)
        if linear_first(block, in_dim, out_dim, x.requires_grad):
            return self._propagate(block, self.lin(x), degree)
        rows: Tensor = self.lin(self._propagate(block, x, degree))
        return rows

    def _propagate(self, block: Block, x: Tensor, degree: Tensor) -> Tensor:
        whole = degree[: block.num_src].to(sum_dtype(x.dtype))
        norm = (whole + 1).rsqrt()
        sampled = block.indptr.diff().clamp(min=1).to(whole.dtype)
        dst_scale = norm[: block.num_dst] * whole[: block.num_dst] / sampled
        neighbours = aggregate(block, x, "sum", dst_scale, norm)
        return neighbours + x[: block.num_dst] * norm[: block.num_dst, None].square()


class GATConv(nn.Module):
    """Graph attention: softmax over the block's neighbours and the node itself, per head.

    Heads are concatenated ([num_dst, heads * out_dim]) or averaged ([num_dst, out_dim]).
    """

    def __init__(self, in_dim: int, out_dim: int, heads: int, concat: bool, negative_slope: float = 0.2):
        super().__init__()
        self.heads, self.out_dim, self.concat, self.negative_slope = heads, out_dim, concat, negative_slope
        self.lin = nn.Linear(in_dim, heads * out_dim, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_dim))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim))
        for weight in (self.lin.weight, self.att_src, self.att_dst):
            glorot(weight)

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        return self.without_bias(block, x) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None
    ) -> Tensor:
        """``before``: applied to ``x`` first, which is used up."""
        looped = with_self_loops(block)
        h = self.lin(x if before is None else before.of(x)).view(-1, self.heads, self.out_dim)
        out: Tensor = attend(looped, h, self._attention(looped, h))
        return out.flatten(1) if self.concat else out.mean(1)

    def _attention(self, block: Block, h: Tensor) -> Tensor:
        """Weights [num_edges, heads] that sum to 1 over each target's edges."""
        from torch_geometric.utils import softmax  # takes seconds, and only this layer needs it

        of_source = (h * self.att_src).sum(-1)[block.indices.long()]
        targets = edge_targets(block)
        of_target = (h[: block.num_dst] * self.att_dst).sum(-1)[targets]
        score = functional.leaky_relu(of_source + of_target, self.negative_slope)
        weight: Tensor = softmax(score, index=targets, num_nodes=block.num_dst)
        return weight


def with_self_loops(block: Block) -> Block:
    """The block with one more edge per target, from itself, at the end of its row; those there stay."""
    device = block.indptr.device
    loops = torch.arange(block.num_dst, dtype=torch.int32, device=device)
    indptr = block.indptr + torch.arange(block.num_dst + 1, dtype=torch.int32, device=device)
    indices = torch.empty(len(block.indices) + block.num_dst, dtype=torch.int32, device=device)
    last = indptr[1:].long() - 1
    indices[last] = loops
    neighbour = torch.ones(len(indices), dtype=torch.bool, device=device)
    neighbour[last] = False
    indices[neighbour] = block.indices
    return Block(indptr, indices, block.num_src)
