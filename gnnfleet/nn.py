"""Layers, models, decoders, losses and metrics for batches of gnnfleet's loaders.

- ``Trimmed``, ``TrimmedHetero``, ``to_hetero``, ``TrimToLayer``: run torch_geometric's layers, each computing only the
  rows that later layers read.
- ``inference``: torch_geometric's ``BasicGNN.inference`` with gnnfleet's loaders.
- ``SAGEConv``, ``GCNConv``, ``GATConv``, ``HeteroSAGEConv``, ``RGCNConv``, ``HGTConv``: layers on the blocks of a
  ``BatchLoader`` batch (``batch.blocks``); ``build_model``: the bundled trainer's models made of these layers.
- ``TokenTransformer``: a transformer over the nodes around each seed, with ``seed_tokens``, which lists them.
- ``facts_of``: types of a graph and widths of their features, for ``build_model``; ``layer_needs``: the node and edge
  types that each layer of a model needs.
- ``CategoryEmbeddings``, ``categories_of``: trainable embeddings of columns of categories, beside the features.
- ``ShardedEmbedding``, ``embedding_state``, ``load_embedding_state``: trainable embeddings of nodes, sharded over the
  ranks.
- ``DotProduct``, ``MLPDecoder``, and with weights per relation ``DistMult``, ``ComplEx``, ``TransE``, ``RotatE``:
  decoders that score links, with ``score_edges``, ``score_triplets``.
- ``softmax_loss``, ``bce_loss``, ``bpr_loss``, ``margin_loss``, ``unsupervised_loss``: losses of link scores.
- ``LinkSums``, ``mrr``, ``hits_at``, ``auc``, ``ranks``: ranking metrics of link scores.
"""

from __future__ import annotations

from trainer.nn.categories import Category, CategoryEmbeddings, categories_of
from trainer.nn.graph_facts import GraphFacts, LayerNeed, facts_of, layer_needs
from trainer.nn.hetero_layers import HeteroSAGEConv, HGTConv, RGCNConv
from trainer.nn.inference import inference
from trainer.nn.layers import GATConv, GCNConv, SAGEConv
from trainer.nn.link_metrics import LinkScore, LinkSums, auc, hits_at, mrr, ranks
from trainer.nn.links import (
    DotProduct,
    MLPDecoder,
    UnsupervisedLoss,
    bce_loss,
    bpr_loss,
    margin_loss,
    score_edges,
    score_triplets,
    softmax_loss,
    unsupervised_loss,
    walk_pairs,
)
from trainer.nn.models import build_model
from trainer.nn.relation_decoders import ComplEx, DistMult, RotatE, TransE
from trainer.nn.sharded_embedding import ShardedEmbedding, embedding_state, load_embedding_state
from trainer.nn.token_transformer import TokenTransformer, seed_tokens
from trainer.nn.trim import Trimmed, TrimmedHetero, TrimToLayer, to_hetero

__all__ = [
    "Category",
    "CategoryEmbeddings",
    "ComplEx",
    "DistMult",
    "DotProduct",
    "GATConv",
    "GCNConv",
    "GraphFacts",
    "HGTConv",
    "HeteroSAGEConv",
    "LayerNeed",
    "LinkScore",
    "LinkSums",
    "MLPDecoder",
    "RGCNConv",
    "RotatE",
    "SAGEConv",
    "ShardedEmbedding",
    "TokenTransformer",
    "TrimToLayer",
    "TransE",
    "Trimmed",
    "TrimmedHetero",
    "UnsupervisedLoss",
    "auc",
    "bce_loss",
    "bpr_loss",
    "build_model",
    "categories_of",
    "embedding_state",
    "facts_of",
    "hits_at",
    "inference",
    "layer_needs",
    "load_embedding_state",
    "margin_loss",
    "mrr",
    "ranks",
    "score_edges",
    "score_triplets",
    "seed_tokens",
    "softmax_loss",
    "to_hetero",
    "unsupervised_loss",
    "walk_pairs",
]
