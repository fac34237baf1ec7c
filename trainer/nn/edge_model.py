"""Model for labels of edges: an encoder on blocks, and a head on the rows of both ends and the edge's own features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.batch import AnyBatch
from trainer.core.schema import EdgeType
from trainer.nn.graph_facts import GraphFacts
from trainer.nn.link_model import link_encoder
from trainer.nn.models import ModelSettings, build_model
from trainer.nn.sharded_embedding import Embeddings


class EdgeModel(nn.Module):
    """Model that predicts ``outputs`` numbers for each edge of a batch.

    Its head has one hidden layer. It reads the rows of source and target, their product, and ``LinkEnds.attr``, whose
    categories have the embeddings of the encoder.
    """

    encoder: Any  #: a ``BlockModel`` or ``HeteroModel``

    def __init__(self, encoder: nn.Module, edge_type: EdgeType, width: int, attr_width: int, outputs: int):
        super().__init__()
        self.encoder, self.edge_type = encoder, edge_type
        self.needs_degree = self.encoder.needs_degree
        self.hidden, self.out = nn.Linear(3 * width + attr_width, width), nn.Linear(width, outputs)

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return float [num_seeds, outputs]."""
        links = batch.links
        assert links is not None, "a batch of edges"
        rows = self.encoder.seed_rows(batch)
        found: Tensor = self.head(rows[links.source][links.src], rows[links.target][links.dst], links.attr)
        return found

    def head(self, source: Tensor, target: Tensor, attr: Tensor | None) -> Tensor:
        """Return the output for edges, float [n, outputs], from the encoder's rows of their ends, [n, width] each.

        ``attr``: features of the edges as loaders gather them; None: they have none.
        """
        attr = None if attr is None else self.encoder.categories.edges(self.edge_type, attr)
        given = [source, target, source * target, *([] if attr is None else [attr])]
        found: Tensor = self.out(torch.relu(self.hidden(torch.cat(given, 1))))
        return found


def build_edge_model(
    settings: ModelSettings,
    facts: GraphFacts,
    edge_type: EdgeType,
    outputs: int,
    embeddings: Embeddings | None = None,
    build: Callable[..., nn.Module] = build_model,
) -> EdgeModel:
    """Build the model for labels of edges of a type on CPU: as ``build_link_model``, with ``outputs`` per edge."""
    encoder = link_encoder(settings, facts, embeddings, build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + 1)
        return EdgeModel(encoder, edge_type, settings.hidden, facts.edge_dims.get(edge_type, 0), outputs)
