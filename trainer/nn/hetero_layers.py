"""Layers over several node and edge types: rows of each type in, rows of the target types out.

Parameters are named and shaped as those of the torch_geometric layers of the same name; on blocks with
all neighbours the output is theirs too. A layer only has parameters for the types of its ``LayerNeed``
(with one edge type at least), and every one takes part in every batch, edges or none: gradients are never missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn.dense import HeteroDictLinear, HeteroLinear
from torch_geometric.nn.inits import glorot
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.nn.parameter_dict import ParameterDict
from torch_geometric.utils import softmax

from trainer.core.batch import Block
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, NodeType
from trainer.nn.graph_facts import LayerNeed
from trainer.nn.kernels.precision import for_sums
from trainer.nn.kernels.spmm import aggregate, attend, edge_dots, edge_targets
from trainer.nn.layers import SAGEConv, linear_first

Blocks = Mapping[EdgeType, Block]

Rows = dict[NodeType, Tensor]

#: Share of a block's targets below which the rest, which have no edges, are left out of its dense product.
SPARSE_TARGETS = 0.7


class HeteroLayer(Protocol):
    """Rows [num_src, in_dim] of each source type in, [num_dst[t], out_dim] of each target type t out.

    The first ``num_dst[t]`` rows of a target type are the targets themselves.
    """

    def __call__(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> Rows: ...


class RGCNConv(nn.Module):
    """Relational graph convolution: ``root(self) + sum over relations of W_r(mean of neighbours by r)``.

    Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks" (2018). ``root`` is
    shared by all node types. With ``num_bases``, each W_r is a combination of that many matrices.
    """

    def __init__(self, need: LayerNeed, in_dim: int, out_dim: int, num_bases: int | None = None):
        super().__init__()
        self.need = need
        num_relations = len(need.edge_types)
        self.weight = nn.Parameter(torch.empty(num_bases or num_relations, in_dim, out_dim))
        self.comp = nn.Parameter(torch.empty(num_relations, num_bases)) if num_bases else None
        self.root = nn.Parameter(torch.empty(in_dim, out_dim))
        self.bias = nn.Parameter(torch.zeros(out_dim))
        for weight in (self.weight, self.comp, self.root):
            glorot(weight)

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> Rows:
        out = {of: for_sums(torch.addmm(self.bias, x[of][: num_dst[of]], self.root)) for of in self.need.targets}
        for edge_type, weight in zip(self.need.edge_types, self._weights(), strict=True):
            add_mean(out[edge_type[2]], blocks[edge_type], x[edge_type[0]], weight)
        return out

    def _weights(self) -> Tensor:
        """One matrix per relation, [num_relations, in_dim, out_dim]."""
        if self.comp is None:
            return self.weight
        return torch.einsum("rb,bio->rio", self.comp, self.weight)


class HeteroSAGEConv(nn.Module):
    """A GraphSAGE layer (mean) per edge type, summed or averaged over the edge types that share a target type.

    Equal to ``HeteroConv({edge_type: SAGEConv(…)}, aggr)``. A target type where no edge type ends keeps its rows,
    which needs ``in_dim == out_dim``.
    """

    def __init__(self, need: LayerNeed, in_dim: int, out_dim: int, aggr: str = "sum"):
        super().__init__()
        if aggr not in ("sum", "mean"):
            raise SettingsError(f"aggr is {aggr!r}; SAGE layers of several edge types are put together by sum or mean")
        self.need, self.aggr = need, aggr
        self.convs = ModuleDict({of: SAGEConv(in_dim, out_dim) for of in need.edge_types})

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> Rows:
        return {of: self._target(of, blocks, x, x[of][: num_dst[of]]) for of in self.need.targets}

    def _target(self, of: NodeType, blocks: Blocks, x: Mapping[NodeType, Tensor], own: Tensor) -> Tensor:
        """The sum of all ``lin_r`` is one product with the sum of their weights."""
        convs = {edge_type: conv for edge_type, conv in self.convs.items() if edge_type[2] == of}
        if not convs:
            return own
        scale = 1 / len(convs) if self.aggr == "mean" else 1.0
        root = sum(conv.lin_r.weight for conv in convs.values()) * scale
        bias = sum(conv.lin_l.bias for conv in convs.values()) * scale
        out = for_sums(functional.linear(own, root, bias))
        for edge_type, conv in convs.items():
            add_mean(out, blocks[edge_type], x[edge_type[0]], conv.lin_l.weight.t() * scale)
        return out


class HGTConv(nn.Module):
    """Heterogeneous graph transformer: attention over the neighbours of all edge types at once, per head.

    Hu et al., "Heterogeneous Graph Transformer" (2020). PyG transforms keys and values of all sources once per
    edge type; here the targets' queries and sums are transformed instead, which is equal and fewer rows. A target
    type where no edge type ends is a target without neighbours.
    """

    def __init__(self, need: LayerNeed, in_dims: Mapping[NodeType, int], out_dim: int, heads: int):
        super().__init__()
        if out_dim % heads:
            raise SettingsError(f"width {out_dim} is no multiple of heads {heads}; change one of them")
        self.need, self.heads, self.dim = need, heads, out_dim // heads
        num_maps = heads * len(need.edge_types)
        ends = {of for name in need.edge_types for of in (name[0], name[2])}
        self.kqv_lin = HeteroDictLinear({of: in_dims[of] for of in need.sources if of in ends}, 3 * out_dim)
        self.out_lin = HeteroDictLinear(out_dim, out_dim, types=list(need.targets))
        self.k_rel = HeteroLinear(self.dim, self.dim, num_maps, bias=False)
        self.v_rel = HeteroLinear(self.dim, self.dim, num_maps, bias=False)
        self.skip = ParameterDict({of: nn.Parameter(torch.ones(1)) for of in need.targets if in_dims[of] == out_dim})
        self.p_rel = ParameterDict({"__".join(of): nn.Parameter(torch.ones(1, heads)) for of in need.edge_types})

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> Rows:
        used_as_source = {of[0] for of in self.need.edge_types}
        keys_values = {of: self._keys_values(of, x[of]) for of in self.need.sources if of in used_as_source}
        return {of: self._target(of, blocks, x[of][: num_dst[of]], keys_values) for of in self.need.targets}

    def _keys_values(self, of: NodeType, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, heads, dim] each."""
        lin, width = self.kqv_lin.lins[of], self.heads * self.dim
        keys = functional.linear(x, lin.weight[:width], lin.bias[:width])
        values = functional.linear(x, lin.weight[2 * width :], lin.bias[2 * width :])
        return keys.view(-1, self.heads, self.dim), values.view(-1, self.heads, self.dim)

    def _target(
        self, of: NodeType, blocks: Blocks, own: Tensor, keys_values: Mapping[NodeType, tuple[Tensor, Tensor]]
    ) -> Tensor:
        out = self.out_lin.lins[of](functional.gelu(self._messages(of, blocks, own, keys_values)))
        if of not in self.skip:
            return out
        alpha = self.skip[of].sigmoid()
        return alpha * out + (1 - alpha) * own

    def _messages(
        self, of: NodeType, blocks: Blocks, own: Tensor, keys_values: Mapping[NodeType, tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Attended values, [num_dst, heads * dim]."""
        used = [(place, name) for place, name in enumerate(self.need.edge_types) if name[2] == of]
        if not used:
            return own.new_zeros(len(own), self.heads * self.dim)
        query = self._query(of, own)
        scores = [self._score(place, name, blocks[name], query, keys_values[name[0]][0]) for place, name in used]
        targets = torch.cat([edge_targets(blocks[name]) for _, name in used])
        weights = softmax(torch.cat(scores), index=targets, num_nodes=len(own))
        parts = weights.split([len(score) for score in scores])
        sums = [
            self._rows_by(self.v_rel, place, attend(blocks[name], keys_values[name[0]][1], part))
            for (place, name), part in zip(used, parts, strict=True)
        ]
        return for_sums(torch.stack(sums)).sum(0).flatten(1)

    def _query(self, of: NodeType, own: Tensor) -> Tensor:
        lin, width = self.kqv_lin.lins[of], self.heads * self.dim
        query = functional.linear(own, lin.weight[width : 2 * width], lin.bias[width : 2 * width])
        return query.view(-1, self.heads, self.dim)

    def _score(self, place: int, name: EdgeType, block: Block, query: Tensor, keys: Tensor) -> Tensor:
        """Attention before the softmax, [num_edges, heads]: (W_k k) · q is k · (W_kᵀ q)."""
        turned = self._rows_by(self.k_rel, place, query, transposed=True)
        return edge_dots(block, turned, keys) * (self.p_rel["__".join(name)] / math.sqrt(self.dim))

    def _rows_by(self, maps: HeteroLinear, place: int, rows: Tensor, transposed: bool = False) -> Tensor:
        """Rows [n, heads, dim] times the matrices of edge type number ``place``, one per head."""
        of_type = maps.weight.view(self.heads, len(self.need.edge_types), self.dim, self.dim)[:, place]
        return torch.einsum("nhd,hed->nhe" if transposed else "nhd,hde->nhe", rows, of_type)


def add_mean(out: Tensor, block: Block, x: Tensor, weight: Tensor) -> None:
    """Add (mean of each target's sources) @ weight to ``out`` [num_dst, out_dim] in place."""
    rows, block = targets_with_edges(block)
    in_dim, out_dim = weight.shape
    if linear_first(block, in_dim, out_dim, x.requires_grad):
        mean = aggregate(block, x @ weight, "mean")
    else:
        mean = aggregate(block, x, "mean") @ weight
    if rows is None:
        out += mean
    else:
        out.index_add_(0, rows, mean.to(out.dtype))


def targets_with_edges(block: Block) -> tuple[Tensor | None, Block]:
    """The targets that have edges, int64, and the block of them alone; (None, block) when they are most."""
    rows = block.indptr.diff().nonzero().flatten()
    if len(rows) > SPARSE_TARGETS * block.num_dst:
        return None, block
    indptr = torch.cat([block.indptr[:1], block.indptr[rows + 1]])
    return rows, Block(indptr, block.indices, block.num_src)
