"""Graph layers on blocks, from rows ``[num_src, in_dim]`` to rows ``[num_dst, out_dim]``.

Parameters have the names and shapes of the torch_geometric layers of the same name. If the blocks have all neighbours,
the output is the same, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.core.batch import Block
from trainer.core.schema import node_salt
from trainer.nn.kernels.activation import Activation
from trainer.nn.kernels.dropout import edge_ids, hash_dropout
from trainer.nn.kernels.precision import product_dtype, sum_dtype
from trainer.nn.kernels.rows import runs_cuda_kernels
from trainer.nn.kernels.sage import sage_rows
from trainer.nn.kernels.spmm import aggregate, attend, edge_softmax, edge_targets


def glorot(weight: Tensor) -> None:
    """Initialise ``weight`` [.., rows, columns] in place, as ``torch_geometric.nn.inits.glorot`` does."""
    # Not imported from torch_geometric, whose import takes seconds.
    bound = math.sqrt(6.0 / (weight.size(-2) + weight.size(-1)))
    weight.data.uniform_(-bound, bound)


#: Multiply-adds of a dense product that take as long as one multiply-add of an aggregation, which is memory-bound.
DENSE_PER_SPARSE = 30


def linear_first(block: Block, in_dim: int, out_dim: int, needs_grad: bool) -> bool:
    """Return whether a linear map costs less before aggregation, on all sources, than after it, on the targets.

    The cost is the number of multiply-adds in the forward and the backward pass. ``in_dim``, ``out_dim``: width of the
    rows before and after the map. ``needs_grad``: whether the layer's input needs a gradient.
    """
    edges, num_src, num_dst = len(block.indices) * DENSE_PER_SPARSE, block.num_src, block.num_dst
    dense = in_dim * out_dim * (3 if needs_grad else 2)
    transform_first = num_src * dense + 2 * edges * out_dim
    aggregate_first = num_dst * dense + (2 if needs_grad else 1) * edges * in_dim
    return transform_first < aggregate_first


class SAGEConv(nn.Module):
    """GraphSAGE layer with mean aggregation on a block: ``lin_l(mean of neighbours) + lin_r(self)``.

    The mean over no neighbours is 0. Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs"
    (2017). Edge features are appended to the neighbours' rows, as in Lo et al., "E-GraphSAGE: A Graph Neural Network
    based Intrusion Detection System for IoT" (2022).

    Args:
        in_dim: Width of input rows.
        out_dim: Width of output rows.
        edge_dim: Width of the blocks' ``edge_attr``; 0: none.

    If the block has ``edge_weight``, the mean is weighted by it.

    Shapes:
        - **input:** block, rows [num_src, in_dim].
        - **output:** rows [num_dst, out_dim].

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        settings = gf.LoaderSettings("train", fanouts=(10, 5), global_batch=512)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        conv = gf.nn.SAGEConv(graph.num_features, 32)
        rows = conv(batch.blocks[0], batch.x)  # [batch.blocks[0].num_dst, 32]
        ```
    """

    def __init__(self, in_dim: int, out_dim: int, edge_dim: int = 0):
        super().__init__()
        self.lin_l = nn.Linear(in_dim, out_dim)
        self.lin_r = nn.Linear(in_dim, out_dim, bias=False)
        self.lin_edge = nn.Linear(edge_dim, out_dim, bias=False) if edge_dim else None

    @property
    def bias(self) -> Tensor:
        """Bias of the layer, [out_dim]."""
        return self.lin_l.bias

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        """Return the rows of the targets, [num_dst, out_dim]. ``x``: [num_src, in_dim]. ``degree`` is ignored."""
        return self.without_bias(block, x) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None
    ) -> Tensor:
        """Apply the activation ``before``, if given, to ``x``. Then compute ``forward`` without the bias.

        On CPU the activation overwrites ``x``.
        """
        rows = self._of_nodes(block, x, before)
        return rows if self.lin_edge is None else rows + self.lin_edge(mean_edge_attr(block))

    def _of_nodes(self, block: Block, x: Tensor, before: Activation | None) -> Tensor:
        of_mean, of_self = self.lin_l.weight, self.lin_r.weight
        if block.edge_weight is not None:
            x = x if before is None else before.of(x)
            if linear_first(block, x.shape[1], len(of_mean), x.requires_grad):
                return x[: block.num_dst] @ of_self.t() + weighted_mean(block, x @ of_mean.t())
            return x[: block.num_dst] @ of_self.t() + weighted_mean(block, x) @ of_mean.t()
        if linear_first(block, x.shape[1], len(of_mean), x.requires_grad):
            x = x if before is None else before.of(x)
            return x[: block.num_dst] @ of_self.t() + aggregate(block, x @ of_mean.t(), "mean")
        if before is not None and before.function != "relu":
            x, before = before.of(x), None
        if x.device.type == "cpu" or runs_cuda_kernels(x):
            return sage_rows(block, x, of_mean, of_self, before, product_dtype(x))
        x = x if before is None else before.of(x)
        return x[: block.num_dst] @ of_self.t() + aggregate(block, x, "mean") @ of_mean.t()


def weighted_mean(block: Block, x: Tensor) -> Tensor:
    """Return the mean of each target's sources by the edges' weights, [num_dst, f]; 0 for a target without edges.

    The importance pooling of Ying et al., "Graph Convolutional Neural Networks for Web-Scale Recommender Systems"
    (2018).
    """
    share = relative_weight(block) / block.indptr.diff()[edge_targets(block)]
    return attend(block, x[:, None], share.to(x.dtype)[:, None])[:, 0]


def relative_weight(block: Block) -> Tensor:
    """Return the edges' weights as multiples of the mean weight of their target's edges, float [num_edges]."""
    assert block.edge_weight is not None
    targets, counts = edge_targets(block), block.indptr.diff()
    total = block.edge_weight.new_zeros(block.num_dst).index_add_(0, targets, block.edge_weight)
    return block.edge_weight * (counts / total)[targets]


def mean_edge_attr(block: Block) -> Tensor:
    """Return the mean of the edge features of each target, float32 [num_dst, d]; 0 for a target without edges."""
    assert block.edge_attr is not None, "the layer has edge_dim, so blocks need edge_attr"
    if block.edge_attr.device.type != "cpu":
        edges = torch.arange(len(block.indices), dtype=torch.int32, device=block.indices.device)
        return aggregate(Block(block.indptr, edges, len(edges)), block.edge_attr, "mean")
    sums = torch.segment_reduce(block.edge_attr, "sum", offsets=block.indptr.long(), initial=0)
    return sums / block.indptr.diff().clamp(min=1)[:, None]


class GCNConv(nn.Module):
    """Graph convolution on a block, with self loops and symmetric normalisation by whole-graph in-degrees.

    With in-degree d, target i gets ``lin(x_i / (d_i + 1) + sum_j x_j / sqrt((d_i + 1)(d_j + 1))) + bias``. If only s_i
    of the d_i neighbours are in the block, their sum is multiplied by d_i / s_i. Self loops of the graph are left out
    of the sum and of d. If the block has ``edge_weight``, a rule made its edges, and degrees of the graph say nothing
    of them: target i with s_i edges gets ``lin((x_i + s_i * (mean of x_j by weight)) / (s_i + 1)) + bias``. Kipf and
    Welling, "Semi-Supervised Classification with Graph Convolutional Networks" (2017).

    Args:
        in_dim: Width of input rows.
        out_dim: Width of output rows.

    Shapes:
        - **input:** block, rows [num_src, in_dim], in-degrees int64 [>= num_src].
        - **output:** rows [num_dst, out_dim].

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        settings = gf.LoaderSettings("train", fanouts=(10, 5), global_batch=512, want_degree=True)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        conv = gf.nn.GCNConv(graph.num_features, 32)
        rows = conv(batch.blocks[0], batch.x, batch.degree)  # [batch.blocks[0].num_dst, 32]
        ```
    """

    def __init__(self, in_dim: int, out_dim: int):
        super().__init__()
        self.lin = nn.Linear(in_dim, out_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_dim))
        glorot(self.lin.weight)

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        """Return the rows of the block's targets, [num_dst, out_dim].

        x: [num_src, in_dim]; degree (required): in-degrees in the whole graph without self loops, int64 [>= num_src].
        """
        return self.without_bias(block, x, degree) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None
    ) -> Tensor:
        """Apply the activation ``before``, if given, to ``x``. Then compute ``forward`` without the bias.

        On CPU the activation overwrites ``x``.
        """
        out_dim, in_dim = self.lin.weight.shape
        x = x if before is None else before.of(x)
        if linear_first(block, in_dim, out_dim, x.requires_grad):
            return self._propagate(block, self.lin(x), degree)
        rows: Tensor = self.lin(self._propagate(block, x, degree))
        return rows

    def _propagate(self, block: Block, x: Tensor, degree: Tensor | None) -> Tensor:
        if block.edge_weight is not None:
            count = block.indptr.diff()[:, None].to(x.dtype)
            return (x[: block.num_dst] + count * weighted_mean(block, x)) / (count + 1)
        assert degree is not None, "GCN needs whole-graph degrees on its batches"
        whole = degree[: block.num_src].to(sum_dtype(x.dtype))
        norm = (whole + 1).rsqrt()
        own = norm[: block.num_dst]
        # the sum below has the block's self loops, too; their number at each target, without synchronising a GPU
        seen = functional.pad(_is_loop(block).cumsum(0), (1, 0))[block.indptr.long()].diff()
        sampled = (block.indptr.diff() - seen).clamp(min=1).to(whole.dtype)
        dst_scale = own * whole[: block.num_dst] / sampled
        neighbours = aggregate(block, x, "sum", dst_scale, norm)
        return neighbours + x[: block.num_dst] * (own.square() - dst_scale * own * seen)[:, None]


@dataclass(frozen=True)
class EdgeDraw:
    """Draws dropout masks of edges by the original ids of their ends, and so alike on any number of ranks."""

    n_id: Tensor  #: int64 [>= num_src], original ids of the source nodes
    key: int  #: uint64 key of the batch
    layer: int  #: number of the layer

    def dropped(self, weight: Tensor, block: Block, p: float, training: bool) -> Tensor:
        """Return ``weight`` [num_edges, heads] with each element zeroed with probability ``p``, others scaled."""
        if not training or p == 0:
            return weight
        ids = edge_ids(self.n_id[block.indices.long()], self.n_id[edge_targets(block)])
        return hash_dropout(weight, ids, p, self.key ^ node_salt("edges"), self.layer, True)


def _is_loop(block: Block) -> Tensor:
    """Return which edges of the block lead from a target to itself: bool [num_edges]."""
    return block.indices == edge_targets(block)


class GATConv(nn.Module):
    """Graph attention layer on a block: per head, a softmax over the sampled neighbours and the node itself.

    The node itself counts once, whether the graph has self loops or not. If the block has ``edge_weight``, attention is
    multiplied by ``relative_weight`` before it is normalised; the node itself has the mean weight.
    Veličković et al., "Graph Attention Networks" (2018).

    Args:
        in_dim: Width of input rows.
        out_dim: Width of a head.
        heads: Number of attention heads.
        concat: Concatenate the heads' outputs; else average them.
        negative_slope: Slope of the LeakyReLU of the attention scores for negative values.
        dropout: Dropout probability of the attention weights in training mode.

    Shapes:
        - **input:** block, rows [num_src, in_dim].
        - **output:** rows [num_dst, heads * out_dim] with ``concat``, else [num_dst, out_dim].

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        settings = gf.LoaderSettings("train", fanouts=(10, 5), global_batch=512)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        conv = gf.nn.GATConv(graph.num_features, 8, heads=4, concat=True)
        rows = conv(batch.blocks[0], batch.x)  # [batch.blocks[0].num_dst, 32]
        ```
    """

    def __init__(
        self, in_dim: int, out_dim: int, heads: int, concat: bool, negative_slope: float = 0.2, dropout: float = 0.0
    ):  # fmt: skip
        super().__init__()
        self.heads, self.out_dim, self.concat, self.negative_slope = heads, out_dim, concat, negative_slope
        self.dropout = dropout
        self.lin = nn.Linear(in_dim, heads * out_dim, bias=False)
        self.att_src = nn.Parameter(torch.empty(1, heads, out_dim))
        self.att_dst = nn.Parameter(torch.empty(1, heads, out_dim))
        self.bias = nn.Parameter(torch.zeros(heads * out_dim if concat else out_dim))
        for weight in (self.lin.weight, self.att_src, self.att_dst):
            glorot(weight)

    def forward(self, block: Block, x: Tensor, degree: Tensor | None = None) -> Tensor:
        """Return the rows of the block's targets. ``x``: [num_src, in_dim]. ``degree`` is ignored."""
        return self.without_bias(block, x) + self.bias

    def without_bias(
        self, block: Block, x: Tensor, degree: Tensor | None = None, before: Activation | None = None,
        draw: EdgeDraw | None = None,
    ) -> Tensor:  # fmt: skip
        """Apply the activation ``before``, if given, to ``x``. Then compute ``forward`` without the bias.

        On CPU the activation overwrites ``x``. ``draw``: of what the dropout of the attention weights is drawn; without
        it, torch's random numbers.
        """
        looped = with_self_loops(block)
        h = self.lin(x if before is None else before.of(x)).view(-1, self.heads, self.out_dim)
        weight = self._attention(looped, h)
        if draw is not None:
            weight = draw.dropped(weight, looped, self.dropout, self.training)
        elif self.dropout:
            weight = functional.dropout(weight, self.dropout, self.training)
        out: Tensor = attend(looped, h, weight)
        return out.flatten(1) if self.concat else out.mean(1)

    def _attention(self, block: Block, h: Tensor) -> Tensor:
        """Return the attention weights [num_edges, heads] of a block ``with_self_loops``.

        They sum to 1 over each target's edges, and are 0 for self loops of the graph.
        """
        of_source = (h * self.att_src).sum(-1)[block.indices.long()]
        of_target = (h[: block.num_dst] * self.att_dst).sum(-1)[edge_targets(block)]
        score = functional.leaky_relu(of_source + of_target, self.negative_slope)
        if block.edge_weight is not None:
            score = score + block.edge_weight.log()[:, None].to(score.dtype)
        loops = _is_loop(block).index_fill_(0, block.indptr[1:].long() - 1, False)  # those of the graph
        return edge_softmax(block, score.masked_fill(loops[:, None], -torch.inf))


def with_self_loops(block: Block) -> Block:
    """Return the block with a self loop as the last edge of each target; weights become relative, with 1 for loops."""
    device, num_edges = block.indptr.device, len(block.indices)
    loops = torch.arange(block.num_dst, dtype=torch.int32, device=device)
    indptr = block.indptr + torch.arange(block.num_dst + 1, dtype=torch.int32, device=device)
    indices = torch.empty(num_edges + block.num_dst, dtype=torch.int32, device=device)
    indices.index_copy_(0, indptr[1:].long() - 1, loops)
    # an edge moves by the loops of the targets before its own; a boolean mask would synchronise a GPU
    moved = torch.arange(num_edges, device=device) + edge_targets(block)
    indices.index_copy_(0, moved, block.indices)
    weight = None
    if block.edge_weight is not None:
        weight = torch.ones(len(indices), device=device).index_copy_(0, moved, relative_weight(block))
    return Block(indptr, indices, block.num_src, edge_weight=weight)
