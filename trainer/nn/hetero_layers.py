"""Heterogeneous graph layers on blocks, from rows of each source type to rows of each target type.

Parameters have the names and shapes of the torch_geometric layers of the same name. If the blocks have all neighbours,
the output is the same, too. Every parameter gets a gradient in every batch, as DistributedDataParallel requires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

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
from trainer.nn.layers import SAGEConv, linear_first, mean_edge_attr, relative_weight, weighted_mean

Blocks = Mapping[EdgeType, Block]

NodeTensors = dict[NodeType, Tensor]

#: If at most this share of a block's targets have edges, the others are left out of the dense product.
_SPARSE_TARGETS = 0.7


class RGCNConv(nn.Module):
    """Relational graph convolution on blocks: ``root(self) + sum over relations of W_r(mean of neighbours by r)``.

    All node types share ``root``. Schlichtkrull et al., "Modeling Relational Data with Graph Convolutional Networks"
    (2018).

    Args:
        need: Node and edge types of the layer; each edge type is one relation.
        in_dim: Width of input rows, the same for all types.
        out_dim: Width of output rows.
        num_bases: Make each W_r a linear combination of this many shared matrices; default: one matrix per relation.

    Shapes:
        - **input:** blocks by edge type, rows [num_src, in_dim] by source type, number of targets by target type.
        - **output:** rows [num_dst, out_dim] by target type.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")  # of a heterogeneous graph
        facts = gf.nn.facts_of(graph.manifest, "paper")
        (need,) = gf.nn.layer_needs(facts.node_types, facts.edge_types, facts.target, num_layers=1)
        settings = gf.LoaderSettings("train", fanouts=(10,), global_batch=512, target=facts.target)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        x = {node_type: torch.randn(len(n_id), 32) for node_type, n_id in batch.n_id.items()}
        conv = gf.nn.RGCNConv(need, 32, 16)
        rows = conv(batch.blocks[0], x, {facts.target: batch.num_seeds})[facts.target]  # [num_seeds, 16]
        ```
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

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> NodeTensors:
        """Return the output rows by target type, [num_dst[type], out_dim].

        blocks: block by edge type. x: input rows by source type; the rows of targets come first. num_dst: number of
        targets by target type.
        """
        out = {of: for_sums(torch.addmm(self.bias, x[of][: num_dst[of]], self.root)) for of in self.need.targets}
        weights = self.weight if self.comp is None else torch.einsum("rb,bio->rio", self.comp, self.weight)
        for edge_type, weight in zip(self.need.edge_types, weights, strict=True):
            _add_mean(out[edge_type[2]], blocks[edge_type], x[edge_type[0]], weight)
        return out


class HeteroSAGEConv(nn.Module):
    """Apply one GraphSAGE layer per edge type, then sum or average the results for each target type.

    The result equals that of torch_geometric's ``HeteroConv({edge_type: SAGEConv(…)}, aggr)``. Rows of a type that is
    the target of no edge type are returned unchanged, which requires ``in_dim == out_dim``.

    Args:
        need: Node and edge types of the layer.
        in_dim: Width of input rows, the same for all types.
        out_dim: Width of output rows.
        aggr: How results of several edge types are combined: ``"sum"`` or ``"mean"``.
        edge_dims: Width of the blocks' ``edge_attr`` by edge type, as in ``SAGEConv``; default: none.

    Shapes:
        - **input:** blocks by edge type, rows [num_src, in_dim] by source type, number of targets by target type.
        - **output:** rows [num_dst, out_dim] by target type.

    Raises:
        SettingsError: For another ``aggr``.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")  # of a heterogeneous graph
        facts = gf.nn.facts_of(graph.manifest, "paper")
        (need,) = gf.nn.layer_needs(facts.node_types, facts.edge_types, facts.target, num_layers=1)
        settings = gf.LoaderSettings("train", fanouts=(10,), global_batch=512, target=facts.target)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        x = {node_type: torch.randn(len(n_id), 32) for node_type, n_id in batch.n_id.items()}
        conv = gf.nn.HeteroSAGEConv(need, 32, 16)
        rows = conv(batch.blocks[0], x, {facts.target: batch.num_seeds})[facts.target]  # [num_seeds, 16]
        ```
    """

    def __init__(
        self, need: LayerNeed, in_dim: int, out_dim: int, aggr: str = "sum",
        edge_dims: Mapping[EdgeType, int] | None = None,
    ):  # fmt: skip
        super().__init__()
        if aggr not in ("sum", "mean"):
            raise SettingsError(f"aggr is {aggr!r}; HeteroSAGEConv combines edge types by 'sum' or 'mean'")
        self.need, self.aggr = need, aggr
        widths = edge_dims or {}
        self.convs = ModuleDict({of: SAGEConv(in_dim, out_dim, widths.get(of, 0)) for of in need.edge_types})

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> NodeTensors:
        """Return the output rows by target type, [num_dst[type], out_dim].

        blocks: block by edge type. x: input rows by source type; the rows of targets come first. num_dst: number of
        targets by target type.
        """
        return {of: self._target(of, blocks, x, x[of][: num_dst[of]]) for of in self.need.targets}

    def _target(self, of: NodeType, blocks: Blocks, x: Mapping[NodeType, Tensor], own: Tensor) -> Tensor:
        convs = {edge_type: conv for edge_type, conv in self.convs.items() if edge_type[2] == of}
        if not convs:
            return own
        scale = 1 / len(convs) if self.aggr == "mean" else 1.0
        root = sum(conv.lin_r.weight for conv in convs.values()) * scale
        bias = sum(conv.lin_l.bias for conv in convs.values()) * scale
        out = for_sums(functional.linear(own, root, bias))
        for edge_type, conv in convs.items():
            _add_mean(out, blocks[edge_type], x[edge_type[0]], conv.lin_l.weight.t() * scale)
            if conv.lin_edge is not None:
                out += conv.lin_edge(mean_edge_attr(blocks[edge_type])) * scale
        return out


class HGTConv(nn.Module):
    """Heterogeneous graph transformer layer on blocks: attention over the neighbours of all edge types, per head.

    The result equals that of torch_geometric's ``HGTConv``. If a block has ``edge_weight``, the attention of its edges
    is multiplied by ``relative_weight`` before it is normalised. Nodes of a type that is the target of no edge type are
    treated as nodes without neighbours. Hu et al., "Heterogeneous Graph Transformer" (2020).

    Args:
        need: Node and edge types of the layer.
        in_dims: Width of input rows by source type.
        out_dim: Width of output rows, a multiple of ``heads``.
        heads: Number of attention heads.

    Shapes:
        - **input:** blocks by edge type, rows [num_src, in_dims[type]] by source type, number of targets by target
          type.
        - **output:** rows [num_dst, out_dim] by target type.

    Raises:
        SettingsError: If ``out_dim`` is not a multiple of ``heads``.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        graph = gf.open("parts")  # of a heterogeneous graph
        facts = gf.nn.facts_of(graph.manifest, "paper")
        (need,) = gf.nn.layer_needs(facts.node_types, facts.edge_types, facts.target, num_layers=1)
        settings = gf.LoaderSettings("train", fanouts=(10,), global_batch=512, target=facts.target)
        batch = next(gf.BatchLoader(graph, settings, 0, graph.layout).epoch(0))
        x = {node_type: torch.randn(len(n_id), 32) for node_type, n_id in batch.n_id.items()}
        conv = gf.nn.HGTConv(need, dict.fromkeys(need.sources, 32), 16, heads=4)
        rows = conv(batch.blocks[0], x, {facts.target: batch.num_seeds})[facts.target]  # [num_seeds, 16]
        ```
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

    def forward(self, blocks: Blocks, x: Mapping[NodeType, Tensor], num_dst: Mapping[NodeType, int]) -> NodeTensors:
        """Return the output rows by target type, [num_dst[type], out_dim].

        blocks: block by edge type. x: input rows by source type; the rows of targets come first. num_dst: number of
        targets by target type.
        """
        used_as_source = {of[0] for of in self.need.edge_types}
        keys_values, width = dict[NodeType, tuple[Tensor, Tensor]](), self.heads * self.dim  # [n, heads, dim] each
        for of in self.need.sources:
            if of in used_as_source:
                lin = self.kqv_lin.lins[of]
                keys = functional.linear(x[of], lin.weight[:width], lin.bias[:width])
                values = functional.linear(x[of], lin.weight[2 * width :], lin.bias[2 * width :])
                keys_values[of] = keys.view(-1, self.heads, self.dim), values.view(-1, self.heads, self.dim)
        return {of: self._target(of, blocks, x[of][: num_dst[of]], keys_values) for of in self.need.targets}

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
        """Return the attention-weighted sums of the neighbours' values, [num_dst, heads * dim].

        ``of``: node type of the targets. ``own``: the targets' input rows. ``blocks``: block by edge type.
        ``keys_values``: keys and values by source type.
        """
        used = [(number, name) for number, name in enumerate(self.need.edge_types) if name[2] == of]
        if not used:
            return own.new_zeros(len(own), self.heads * self.dim)
        lin, width = self.kqv_lin.lins[of], self.heads * self.dim
        query = functional.linear(own, lin.weight[width : 2 * width], lin.bias[width : 2 * width])
        query = query.view(-1, self.heads, self.dim)
        scores = [self._score(number, name, blocks[name], query, keys_values[name[0]][0]) for number, name in used]
        targets = torch.cat([edge_targets(blocks[name]) for _, name in used])
        weights = softmax(torch.cat(scores), index=targets, num_nodes=len(own))
        parts = weights.split([len(score) for score in scores])
        sums = [
            self._mapped(self.v_rel, number, attend(blocks[name], keys_values[name[0]][1], part))
            for (number, name), part in zip(used, parts, strict=True)
        ]
        return for_sums(torch.stack(sums)).sum(0).flatten(1)

    def _score(self, number: int, name: EdgeType, block: Block, query: Tensor, keys: Tensor) -> Tensor:
        """Return the attention scores of a block's edges before the softmax, [num_edges, heads]."""
        mapped = self._mapped(self.k_rel, number, query, transposed=True)
        score = edge_dots(block, mapped, keys) * (self.p_rel["__".join(name)] / math.sqrt(self.dim))
        if block.edge_weight is None:
            return score
        return score + relative_weight(block).log()[:, None].to(score.dtype)

    def _mapped(self, maps: HeteroLinear, number: int, rows: Tensor, transposed: bool = False) -> Tensor:
        of_type = maps.weight.view(self.heads, len(self.need.edge_types), self.dim, self.dim)[:, number]
        return torch.einsum("nhd,hed->nhe" if transposed else "nhd,hde->nhe", rows, of_type)


def _add_mean(out: Tensor, block: Block, x: Tensor, weight: Tensor) -> None:
    """Add ``(mean of each target's sources) @ weight`` to ``out`` [num_dst, out_dim] in place."""
    if block.edge_weight is not None:
        out += weighted_mean(block, x @ weight)
        return
    rows, block = _targets_with_edges(block)
    in_dim, out_dim = weight.shape
    if linear_first(block, in_dim, out_dim, x.requires_grad):
        mean = aggregate(block, x @ weight, "mean")
    else:
        mean = aggregate(block, x, "mean") @ weight
    if rows is None:
        out += mean
    else:
        out.index_add_(0, rows, mean.to(out.dtype))


def _targets_with_edges(block: Block) -> tuple[Tensor | None, Block]:
    """Return the int64 positions of the targets that have edges, and a block of only these targets.

    Returns (None, ``block``) if most targets have edges. Returns the same for a block on a GPU, as the CPU would have
    to wait for the GPU to find the targets.
    """
    if block.indptr.device.type != "cpu":
        return None, block
    rows = block.indptr.diff().nonzero().flatten()
    if len(rows) > _SPARSE_TARGETS * block.num_dst:
        return None, block
    indptr = torch.cat([block.indptr[:1], block.indptr[rows + 1]])
    return rows, Block(indptr, block.indices, block.num_src)
