"""Makes the untrained model of a run, and the trained model of a checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from trainer.core.errors import SettingsError
from trainer.core.schema import NodeType, type_of
from trainer.loader.block_loader import edge_attrs
from trainer.nn.graph_facts import GraphFacts, facts_of, layer_needs
from trainer.nn.link_model import build_link_model, link_facts
from trainer.nn.models import HETERO_MODELS, build_model
from trainer.nn.sharded_embedding import ShardedEmbedding, scatter_tables
from trainer.store.manifest import Manifest
from trainer.train.checkpoint import Checkpoint
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose import of_record
from trainer.train.tasks.choose_target import Target

#: Bytes of trainable rows that nodes with features get without being asked for.
_MOST_ROWS = 1 << 30


def model_facts(manifest: Manifest, target: Target, outputs: int, edge_attr: str | None = None) -> GraphFacts:
    """Return the types and widths from which a model is built.

    ``target``: node type of the seeds, or edge type of the links. ``outputs``: numbers that the model predicts per
    seed. ``edge_attr``: edge attribute that the model reads. Raises ``SettingsError`` if no edge type has it.
    """
    facts = facts_of(manifest, target if isinstance(target, str) else target[2])
    if edge_attr is not None:
        specs = edge_attrs(manifest, edge_attr)
        facts = replace(facts, edge_dims={of: math.prod(spec.shape[1:]) for of, spec in specs.items()})
    return replace(facts, num_classes=outputs) if isinstance(target, str) else link_facts(facts, target)


def make_model(
    settings: TrainSettings, manifest: Manifest, target: Target, outputs: int, device: torch.device | None = None
) -> tuple[nn.Module, ShardedEmbedding | None]:
    """Return the initial model, and its trainable rows of nodes (None if no node type has any).

    ``target``: the node type of the seeds, or the edge type whose links are predicted. ``outputs``: width of
    the model's output (``Task.outputs``).
    """
    facts = model_facts(manifest, target, outputs, settings.edge_attr)
    counts, _ = embedded_nodes(settings, manifest, target, outputs)
    embedding = ShardedEmbedding(counts, settings.hidden, settings.seed, device) if counts else None
    if isinstance(target, str):
        return build_model(settings, facts, embedding), embedding
    return build_link_model(settings, facts, target, embedding), embedding


def embedded_nodes(
    settings: TrainSettings, manifest: Manifest, target: Target, outputs: int
) -> tuple[dict[NodeType, int], str]:
    """Return the number of nodes by type of the types with trainable rows, and in words the types left out, if any.

    The choice depends on the graph and the settings only, and so not on the number of ranks. Raises ``SettingsError``
    if the settings demand rows of a model that has none.
    """
    facts = model_facts(manifest, target, outputs, settings.edge_attr)
    if settings.model not in HETERO_MODELS:
        other = f"model {settings.model} has no trainable rows of nodes; {', '.join(HETERO_MODELS)} have"
        if settings.embeddings == "all":
            raise SettingsError(f"embeddings: {other}")
        return {}, "" if isinstance(target, str) else other
    reached = layer_needs(facts.node_types, facts.edge_types, facts.targets, len(settings.fanouts))[0].sources
    counts = {of: manifest.nodes[of].num_nodes for of in reached}
    bare = {of: count for of, count in counts.items() if of not in facts.in_dims and facts.hetero}
    if settings.embeddings == "all":
        return counts, ""
    if isinstance(target, str) or settings.embeddings == "featureless":
        return bare, ""
    # Rows of the sources, which have few links each, are learned by heart (docs/LOG.md, 2026-11-26).
    size = 4 * settings.hidden * counts[target[2]]
    if target[2] not in bare and size > _MOST_ROWS:
        return bare, (
            f"{target[2]} nodes have no trainable rows beside their features: these would take {size / 1e9:.1f} GB "
            "over all ranks, and three times this with the optimizer's state; set train.embeddings: all to train them"
        )
    return {of: count for of, count in counts.items() if of in bare or of == target[2]}, ""


def trained_model(
    saved: Checkpoint, manifest: Manifest, device: torch.device | None = None
) -> tuple[nn.Module, ShardedEmbedding | None]:
    """Build the model of a checkpoint, with its best weights, or its last weights if no epoch was evaluated.

    Under torch.distributed all ranks must call it; only rank 0 needs the embedding tables of ``saved``.

    Args:
        saved: A checkpoint, see ``load_checkpoint``.
        manifest: Manifest of the partition that the model was trained on, see ``read_manifest``.
        device: Device of the model. Default: the CPU.

    Returns:
        The model in evaluation mode, and the trained rows of nodes (None if no node type has any).
    """
    settings, best = TrainSettings(**saved.settings), saved.best
    outputs = of_record(saved.task).outputs
    model, embedding = make_model(settings, manifest, type_of(saved.graph["target"]), outputs, device)
    model.load_state_dict(dict(best.model if best else saved.model))
    if embedding is not None:
        last = saved.embedding and saved.embedding["tables"]
        embedding.weight.data.copy_(scatter_tables(embedding, best.embedding if best else last))
    return model.to(device or "cpu").eval(), embedding
