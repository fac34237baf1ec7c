"""Model for link prediction: an encoder on blocks, and the dot product of projected rows as score of a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.core.batch import AnyBatch, LinkEnds
from trainer.core.schema import EdgeType, LinkTypes, link_types, seed_types
from trainer.nn.graph_facts import GraphFacts
from trainer.nn.models import HETERO_MODELS, ModelSettings, build_model
from trainer.nn.relation_decoders import RELATION_DECODERS, RelationDecoder
from trainer.nn.sharded_embedding import Embeddings


class LinkModel(nn.Module):
    """Model that scores the links and the negatives of a batch.

    A score is the dot product of two projections, one for sources and one for targets, so scores of u -> v and v -> u
    differ. If the encoder is a LightGCN, it is the dot product of the rows themselves. A ``decoder`` scores links of
    several edge types by the rows themselves, and ranks their sources, too.
    """

    encoder: Any  #: a ``BlockModel`` or ``HeteroModel``

    def __init__(
        self, encoder: nn.Module, target: EdgeType | LinkTypes, width: int, projected: bool = True,
        decoder: RelationDecoder | None = None,
    ):  # fmt: skip
        super().__init__()
        self.encoder, self.target, self.decoder = encoder, target, decoder
        self.needs_degree = self.encoder.needs_degree
        self.timed = getattr(encoder, "timed", ())  #: node types of which batches must have ``age``
        self.as_source, self.as_target = (nn.Linear(width, width) if projected else nn.Identity() for _ in range(2))

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return each link's score, then its source's scores with the m negatives: float [num_seeds, 1 + m].

        With ``LinkEnds.own``, these follow: float [num_seeds, 1 + m + k].
        """
        links = batch.links
        assert links is not None, "a batch of links"
        rows = self.encoder.seed_rows(batch)
        if links.relation is not None:
            return self.typed_scores(torch.cat([rows[of] for of in links.types]), links)
        sources, targets = self.as_source(rows[links.source]), self.as_target(rows[links.target])
        src = sources[links.src]
        positive = (src * targets[links.dst]).sum(1)
        scores = [positive[:, None], _negative_scores(src, targets, links)]
        if links.own is not None:
            scores.append((src[:, None] * targets[links.own.clamp(min=0)]).sum(2))
        return torch.cat(scores, 1)

    def typed_scores(self, rows: Tensor, links: LinkEnds) -> Tensor:
        """As ``forward``, for queries of several edge types. ``rows``: the encoder's rows of all ``links.types``."""
        if self.decoder is None:
            src, targets = self.as_source(rows)[links.src], self.as_target(rows)
            positive = (src * targets[links.dst]).sum(1)
        else:
            assert links.relation is not None
            src, targets = self.decoder.query(rows[links.src], links.relation), rows
            positive = self.decoder.pair_scores(src, rows[links.dst])
        scores = _products if self.decoder is None else self.decoder.all_scores
        return torch.cat([positive[:, None], _negative_scores(src, targets, links, scores)], 1)


def _products(src: Tensor, targets: Tensor) -> Tensor:
    return src @ targets.t()


def _negative_scores(
    src: Tensor, targets: Tensor, links: LinkEnds, scores: Callable[[Tensor, Tensor], Tensor] = _products
) -> Tensor:  # fmt: skip
    """Return the score of each link's source with each of the link's m negatives, float [num_seeds, m].

    ``src``: projected rows of the sources, [num_seeds, width]. ``targets``: projected rows of the target
    type; ``links.negatives`` has indices of these rows.
    """
    if links.group is None:
        return scores(src, targets[links.negatives])
    if not len(links.negatives):  # this rank has no links in the step
        return scores(src, targets[:0])
    rows = [torch.nonzero(links.group == number)[:, 0] for number in range(len(links.negatives))]
    found = [scores(src[of], targets[shared]) for of, shared in zip(rows, links.negatives, strict=True)]
    return torch.cat(found)[torch.argsort(torch.cat(rows))]


def build_link_model(
    settings: ModelSettings,
    facts: GraphFacts,
    target: EdgeType | LinkTypes,
    embeddings: Embeddings | None = None,
    build: Callable[..., nn.Module] = build_model,
) -> LinkModel:
    """Build the model for links of the edge type or types ``target`` on CPU.

    Initial weights depend on ``settings.seed`` only.

    Args:
        settings: As for ``build_model``.
        facts: The graph's types and feature widths, from ``link_facts``.
        target: Type or types of the links.
        embeddings: As for ``build_model``.
        build: Builds the encoder from settings, facts and embeddings.

    Raises the same errors as ``build_model``.
    """
    encoder = link_encoder(settings, facts, embeddings, build)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed + 1)
        made = None if settings.decoder == "dot" else RELATION_DECODERS[settings.decoder]
        decoder = made and made(len(link_types(target)), settings.hidden)
        projected = decoder is None and settings.model not in ("lightgcn", "embedding")
        return LinkModel(encoder, target, settings.hidden, projected, decoder)


def link_encoder(
    settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None, build: Callable[..., nn.Module]
) -> nn.Module:
    """Build the encoder of a model of links or edges, which outputs a row of width ``settings.hidden`` per end."""
    outputs = 0 if settings.model in HETERO_MODELS else settings.hidden
    return build(settings, replace(facts, num_classes=outputs), embeddings)


def link_facts(facts: GraphFacts, target: EdgeType | LinkTypes) -> GraphFacts:
    first, *further = seed_types(target)
    return replace(facts, target=first, further=tuple(further))
