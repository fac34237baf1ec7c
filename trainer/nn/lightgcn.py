"""Encoders of links that are trainable rows: LightGCN, which takes means over the edges, and one without layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

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
    batch, their sum is multiplied by ``d_i / s_i``. It reads no features, and has no other weights.

    Between layers, rows are [n, 2 · width]: a node's row after the layers so far, and the sum of its rows so far.
    """

    needs_degree = True

    def __init__(self, facts: GraphFacts, num_layers: int, embeddings: Embeddings):
        super().__init__()
        self.needs = layer_needs(facts.node_types, facts.edge_types, facts.targets, num_layers)
        self.targets, self.embeddings = facts.targets, embeddings
        self.categories = CategoryEmbeddings({})

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
        found = self.embeddings.lookup({of: batch.n_id[of] for of in self.needs[0].sources})
        return {of: torch.cat([rows, rows], 1) for of, rows in found.items()}

    def layer(
        self, number: int, blocks: Mapping[EdgeType, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> NodeTensors:  # fmt: skip
        """Return the output of layer ``number`` for each target type; of the last layer, the means [n, width]."""
        need, width, out = self.needs[number], self.embeddings.dim, {}
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
    if facts.num_classes or embeddings is None:
        raise SettingsError("model lightgcn has embeddings only: it is for task link")
    return LightGCN(facts, shape.num_layers, embeddings)


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
