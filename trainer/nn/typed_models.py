"""Models of graphs with any number of node and edge types; ``models.build_model`` calls these builders by name."""

from __future__ import annotations

from torch import nn

from trainer.nn.embeddings import Embeddings
from trainer.nn.graph_facts import GraphFacts
from trainer.nn.hetero_layers import HeteroSAGEConv, HGTConv, RGCNConv
from trainer.nn.hetero_models import HeteroModel, HeteroShape, widths
from trainer.nn.settings import ModelSettings, precision_of


def rgcn(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
    width = settings.hidden
    return HeteroModel(facts, _shape(settings), lambda need: RGCNConv(need, width, width), embeddings)


def hgt(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
    """As in the paper: no activation between layers, which mix each node's own row back in."""
    width, heads = settings.hidden, settings.heads
    shape = _shape(settings, relu=False)
    return HeteroModel(facts, shape, lambda need: HGTConv(need, widths(need, width), width, heads), embeddings)


def rsage(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
    width = settings.hidden
    return HeteroModel(facts, _shape(settings), lambda need: HeteroSAGEConv(need, width, width), embeddings)


def _shape(settings: ModelSettings, relu: bool = True) -> HeteroShape:
    return HeteroShape(settings.hidden, len(settings.fanouts), settings.dropout, relu, precision_of(settings))
