"""Encoders of links that are trainable rows: LightGCN, which takes means over the edges, and one without layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch_geometric.nn.module_dict import ModuleDict

from trainer.core.batch import AnyBatch, Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, NodeType
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import GraphFacts, LayerNeed, layer_needs
from trainer.nn.hetero_layers import NodeTensors
from trainer.nn.hetero_models import HeteroShape
from trainer.nn.kernels.spmm import aggregate
from trainer.nn.sharded_embedding import Embeddings


class LightGCN(nn.Module):
    """Encoder of links: each node's trainable row, propagated over all edge types, averaged over the layers.

    He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation" (2020). With in-degree
    d over all edge types, target i gets ``sum_j h_j / sqrt(d_i d_j)``; if only s_i of the d_i neighbours are in the
    batch, their sum is multiplied by ``d_i / s_i``. The input of nodes with features is a linear map of them, plus
    their trainable row, if they have one; then the map begins at 0. There are no other weights.

    Between layers, rows are [n, 2 · width]: a node's row after the layers so far, and the sum of its rows so far.
    """

    needs_degree = True

    def __init__(self, facts: GraphFacts, width: int, num_layers: int, embeddings: Embeddings | None):
        super().__init__()
        self.needs = layer_needs(facts.node_types, facts.edge_types, facts.targets, num_layers)
        self.targets, self.embeddings, self.width = facts.targets, embeddings, width
        read = self.needs[0].sources
        self.categories = CategoryEmbeddings({of: some for of, some in facts.categories.items() if of in read})
        self.lins = ModuleDict(
            {of: nn.Linear(facts.in_dims[of], width, bias=False) for of in read if of in facts.in_dims}
        )
        for of, lin in self.lins.items():
            if embeddings is not None and of in embeddings.num_nodes:  # else all scores, and so all gradients, were 0
                nn.init.zeros_(lin.weight)

    def seed_rows(self, batch: AnyBatch) -> NodeTensors:
        """Return the rows of the seed nodes of each of ``targets``: float [n, width]."""
        typed = batch.typed()
        rows = self.begin(typed)
        for number, blocks in enumerate(typed.blocks):
            hop = len(self.needs) - 1 - number
            counts = {of: sizes[hop] for of, sizes in typed.num_nodes.items()}
            rows = self.layer(number, blocks, rows, counts, typed.degree)
        return {of: rows[of][: typed.num_nodes[of][0]] for of in self.targets}

    def begin(self, batch: HeteroBatch) -> NodeTensors:
        """Return the input of the first layer for each of its source types."""
        of_features = self.categories(batch).x if self.lins else {}
        rows: NodeTensors = {of: lin(of_features[of]) for of, lin in self.lins.items()}
        if self.embeddings is not None:
            embedded = [of for of in self.needs[0].sources if of in self.embeddings.num_nodes]
            for of, own in self.embeddings.lookup({of: batch.n_id[of] for of in embedded}).items():
                rows[of] = rows[of] + own if of in rows else own
        return {of: torch.cat([each, each], 1) for of, each in rows.items()}

    def layer(
        self, number: int, blocks: Mapping[EdgeType, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> NodeTensors:  # fmt: skip
        """Return the output of layer ``number`` for each target type; of the last layer, the means [n, width]."""
        need, width, out = self.needs[number], self.width, {}
        before = {of: rows[of][:, :width].contiguous() for of in need.sources}
        norm = {of: degree[of][: len(rows[of])].clamp(min=1).float().rsqrt() for of in need.sources}
        for of in need.targets:
            count, mine = num_dst[of], [edge_type for edge_type in need.edge_types if edge_type[2] == of]
            h, sampled = torch.zeros_like(before[of][:count]), torch.zeros_like(norm[of][:count])
            for each in mine:
                sampled += blocks[each].indptr.diff()
            scale = norm[of][:count] * degree[of][:count] / sampled.clamp(min=1)
            for each in mine:
                h = h + aggregate(blocks[each], before[each[0]], "sum", scale, norm[each[0]])
            total = rows[of][:count, width:] + h
            last = number + 1 == len(self.needs)
            out[of] = total / (len(self.needs) + 1) if last else torch.cat([h, total], 1)
        return out


def lightgcn(facts: GraphFacts, shape: HeteroShape, heads: int, embeddings: Embeddings | None) -> LightGCN:
    """Build a LightGCN. ``heads`` is ignored. Raises ``SettingsError`` if the task is not link prediction."""
    if facts.num_classes:
        raise SettingsError("model lightgcn is for task link")
    return LightGCN(facts, shape.hidden, shape.num_layers, embeddings)


class NodeRows(nn.Module):
    """Encoder of links without neighbours: the trainable rows of the seed nodes themselves."""

    needs_degree = False

    def __init__(self, facts: GraphFacts, embeddings: Embeddings):
        super().__init__()
        self.needs = (LayerNeed(facts.targets, facts.targets, ()),)
        self.targets, self.embeddings = facts.targets, embeddings
        self.categories = CategoryEmbeddings({})

    def seed_rows(self, batch: AnyBatch) -> NodeTensors:
        """Return the rows of the seed nodes of each of ``targets``: float [n, width]."""
        return self.begin(batch.typed())

    def begin(self, batch: HeteroBatch) -> NodeTensors:
        return dict(self.embeddings.lookup({of: batch.n_id[of] for of in self.targets if of in batch.n_id}))

    def layer(
        self, number: int, blocks: Mapping[EdgeType, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> NodeTensors:  # fmt: skip
        return dict(rows)


def node_rows(facts: GraphFacts, shape: HeteroShape, heads: int, embeddings: Embeddings | None) -> NodeRows:
    """Build a ``NodeRows``. All but ``facts`` and ``embeddings`` is ignored. Raises as ``lightgcn``."""
    if facts.num_classes or embeddings is None:
        raise SettingsError("model embedding has no layers: it is for task link")
    return NodeRows(facts, embeddings)
