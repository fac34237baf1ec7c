"""Makes the untrained model of a run, and the trained model of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.graph_attrs import decode_texts, is_task_table, silent_types
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType, NodeType, is_link_types, link_types, seed_types, type_name, types_with_messages
from trainer.core.train_config import is_own_model
from trainer.graph.open import Graph, open_graph
from trainer.loader.block_loader import edge_columns
from trainer.nn.categories import Categories, Category, CategoryEmbeddings, categories_of, find_categories, texts_name
from trainer.nn.graph_facts import GraphFacts, facts_of, layer_needs
from trainer.nn.models import HETERO_MODELS, build_model
from trainer.nn.sharded_embedding import ShardedEmbedding, scatter_tables
from trainer.sampler.rules import check_rule, rule_edges, rule_schema, without_silent
from trainer.sampler.types import RowRequest
from trainer.store.manifest import Manifest
from trainer.train.checkpoint import Checkpoint, load_checkpoint
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose_target import Target, pick_target

#: Bytes of trainable rows that nodes with features get without being asked for.
_MOST_ROWS = 1 << 30

_AT_ONCE = 1 << 18  #: nodes whose in-degrees are requested at once


def model_facts(
    manifest: Manifest, target: Target, outputs: int, edge_attr: tuple[str, ...] | None = None,
    degrees: tuple[int, ...] = (), categories: Categories | None = None,
) -> GraphFacts:  # fmt: skip
    """Return the types and widths from which a model is built.

    ``target``: node type of the seeds, or edge types of the links. ``outputs``: numbers that the model predicts per
    seed. ``edge_attr``: edge attributes that the model reads. ``degrees``: number of nodes by in-degree, if the model
    needs it. ``categories``: columns that the model embeds. Raises ``SettingsError`` as ``edge_columns``.
    """
    node_type = target if isinstance(target, str) else link_types(target)[0][2]
    facts = replace(facts_of(manifest, node_type), degrees=degrees)
    # Embeddings stand beside the features of nodes, and in place of the codes among those of edges.
    every, in_dims = categories or {}, dict(facts.in_dims)
    for of, columns in every.items():
        if isinstance(of, str):
            in_dims[of] = in_dims.get(of, 0) + sum(each.dim for each in columns)
    edge_dims = {
        of: sum(math.prod(spec.shape[1:]) for spec in specs.values()) + sum(each.dim - 1 for each in every.get(of, ()))
        for of, specs in edge_columns(manifest, edge_attr).items()
    }
    embedded = {of: tuple(columns) for of, columns in every.items() if isinstance(of, str) or of in edge_dims}
    wide = {of: dim for of, dim in edge_dims.items() if dim}
    facts = replace(facts, in_dims=in_dims, edge_dims=wide, categories=embedded)
    if isinstance(target, str):
        return replace(facts, num_classes=outputs)
    from trainer.nn.link_model import link_facts

    return link_facts(facts, target)


def _on_rule(manifest: Manifest, settings: TrainSettings, target: Target) -> Manifest:
    """Return the manifest with the edge types that a run's model reads: those of the graph with messages, or
    of ``neighbors``."""
    rule = settings.rule
    silent = silent_types(settings.silent, manifest.edges, manifest.graph_attrs)
    if not rule or not manifest.hetero:
        heard = types_with_messages(manifest.edges, silent)
        return replace(manifest, edges={of: manifest.edges[of] for of in heard})
    rule, ends = without_silent(rule, manifest, silent), seed_types(target)
    check_rule(manifest, rule, ends)
    return replace(manifest, edges=rule_schema(manifest, rule_edges(rule, manifest, ends, len(settings.fanouts))).edges)


def _with_scores(facts: GraphFacts, settings: TrainSettings) -> GraphFacts:
    """Return the facts of a run, whose model class reads the scores of neighbours as features of edges."""
    ruled = settings.rule and is_own_model(settings.model)
    return replace(facts, edge_dims=dict.fromkeys(facts.edge_types, 1)) if ruled else facts


def graph_facts(
    graph: Graph, settings: TrainSettings, target: Target, outputs: int, degrees: tuple[int, ...]
) -> GraphFacts:
    """As ``model_facts``, with the columns of categories of an opened graph, their texts, and the types with ages."""
    found = categories_of(graph.manifest, settings.category_dims, settings.edge_attr)
    read = {of: tuple(replace(column, texts=_texts(graph, of, column.name)) for column in columns)
            for of, columns in found.items()}  # fmt: skip
    manifest = _on_rule(graph.manifest, settings, target)
    facts = _with_scores(model_facts(manifest, target, outputs, settings.edge_attr, degrees, read), settings)
    attr, nodes = settings.time_attr, graph.manifest.nodes
    if attr is None or not _has_own_time(manifest, target) or not facts.hetero or settings.model not in HETERO_MODELS:
        return facts
    return replace(facts, timed=tuple(of for of, spec in nodes.items() if attr in spec.attrs))


def _has_own_time(manifest: Manifest, target: Target) -> bool:
    """Return whether seeds are computed at their own time only: nodes, and rows that list targets."""
    return isinstance(target, str) or is_task_table(link_types(target)[0][0], manifest.graph_attrs)


def _texts(graph: Graph, of: AnyType, name: str) -> tuple[str, ...]:
    return tuple(decode_texts(np.asarray(graph.store.graph_attrs[texts_name(graph.manifest, of, name)])))


def embeddings_of(model: nn.Module) -> CategoryEmbeddings:
    """Return the embeddings of categories of a run's model."""
    found: Any = getattr(model, "encoder", model).categories
    return found  # type: ignore[no-any-return]


def read_categories(model: Any, graph: Graph, edge_attr: tuple[str, ...] | None) -> None:
    """Make a trained model read the columns of categories of ``graph``. ``edge_attr``: as in its settings.

    Raises ``SettingsError`` if the graph lacks one, or its edges have other features.
    """
    read, facts = embeddings_of(model).categories, _facts(model.built_from["facts"])
    there = {(of, column.name, column.at) for of, column in find_categories(graph.manifest, edge_attr)}
    for of, columns in read.items():
        if missing := [each.name for each in columns if (of, each.name, each.at) not in there]:
            raise SettingsError(
                f"the model reads the categories {missing[0]} of {type_name(of)}, which this graph does not have"
            )
    edges = edge_columns(graph.manifest, edge_attr)
    for edge_type in facts.edge_dims if edge_attr else ():
        wanted = facts.width_of(edge_type)
        width = sum(math.prod(spec.shape[1:]) for spec in edges.get(edge_type, {}).values())
        if width != wanted:
            raise SettingsError(
                f"the model reads {wanted} columns of {', '.join(edge_attr or ())} of {type_name(edge_type)}, and this "
                f"graph has {width}"
            )
    embeddings_of(model).adopt({of: [_texts(graph, of, each.name) for each in columns] for of, columns in read.items()})


def same_categories(saved: Checkpoint, facts: GraphFacts, path: str | Path) -> None:
    """Raise ``CheckpointError`` unless a checkpoint's model embeds the same categories as one of ``facts``."""
    before = _facts(saved.built_from["facts"]).categories
    for of in {*before, *facts.categories}:
        if before.get(of, ()) != facts.categories.get(of, ()):
            raise CheckpointError(
                f"{path} cannot be continued: the categories of {type_name(of)}, or the widths of their embeddings, "
                "are others"
            )


def _facts(plain: Mapping[str, Any]) -> GraphFacts:
    """Return the facts that a checkpoint has as plain values."""
    categories = {
        of: tuple(Category(**{**column, "texts": tuple(column["texts"])}) for column in columns)
        for of, columns in plain.get("categories", {}).items()
    }
    return GraphFacts(**{**plain, "categories": categories})


def make_model(
    settings: TrainSettings, facts: GraphFacts, target: Target, rows: Mapping[NodeType, int],
    device: torch.device | None = None, folders: Sequence[Path] = (), edge_outputs: int = 0,
) -> tuple[nn.Module, ShardedEmbedding | None]:  # fmt: skip
    """Return the initial model, and its trainable rows of nodes (None if no node type has any).

    ``facts``: as from ``model_facts``. ``target``: the node type of the seeds, or the edge type whose links are
    predicted. ``rows``: number of nodes of the types with trainable rows. ``folders``: where the file of an own class
    is looked for. ``edge_outputs``: how many numbers are predicted for each edge of type ``target``; 0: its links are
    predicted. The model's attribute ``built_from`` has what ``trained_model`` needs to build it again.
    """
    embedding = ShardedEmbedding(rows, settings.hidden, settings.seed, device) if rows else None
    model: Any
    build: Callable[..., nn.Module] = build_model
    if is_own_model(settings.model):
        from trainer.own.own_model import build_own  # imported here because it imports torch_geometric

        build = partial(build_own, folders=folders)
    if isinstance(target, str):
        model = build(settings, facts, embedding)
    elif edge_outputs and not is_link_types(target):
        from trainer.nn.edge_model import build_edge_model

        model = build_edge_model(settings, facts, target, edge_outputs, embedding, build)
    else:
        from trainer.nn.link_model import build_link_model

        model = build_link_model(settings, facts, target, embedding, build)
    plain = {
        "in_dims": dict(facts.in_dims), "edge_dims": dict(facts.edge_dims),
        "categories": {of: [{**vars(each), "texts": [*each.texts]} for each in columns]
                       for of, columns in facts.categories.items()},
    }  # fmt: skip
    model.built_from = {"facts": {**vars(facts), **plain}, "target": target, "rows": dict(rows)}
    if edge_outputs:
        model.built_from["edge_outputs"] = edge_outputs
    return model, embedding


def embedded_nodes(
    settings: TrainSettings, manifest: Manifest, target: Target, outputs: int, folders: Sequence[Path] = ()
) -> tuple[dict[NodeType, int], str]:
    """Return the number of nodes by type of the types with trainable rows, and in words the types left out, if any.

    The choice depends on the graph and the settings only, and so not on the number of ranks. Raises ``SettingsError``
    if the settings demand rows of a model that has none.
    """
    categories = categories_of(manifest, settings.category_dims, settings.edge_attr)
    seen = _on_rule(manifest, settings, target)
    facts = model_facts(seen, target, outputs, settings.edge_attr, categories=categories)
    own = is_own_model(settings.model)
    if settings.model not in HETERO_MODELS and not own:
        other = f"model {settings.model} has no trainable rows of nodes; {', '.join(HETERO_MODELS)} have"
        if settings.embeddings == "all":
            raise SettingsError(f"embeddings: {other}")
        return {}, "" if isinstance(target, str) else other
    if settings.model == "embedding":
        return {of: manifest.nodes[of].num_nodes for of in facts.targets}, ""
    needs = layer_needs(facts.node_types, facts.edge_types, facts.targets, len(settings.fanouts))
    # Rows to predict are others than those of training.
    reached = [of for of in needs[0].sources if not is_task_table(of, manifest.graph_attrs)]
    counts = {of: manifest.nodes[of].num_nodes for of in reached}
    if settings.model == "lightgcn" and settings.embeddings != "featureless":
        return counts, ""
    bare = {of: count for of, count in counts.items() if of not in facts.in_dims and (facts.hetero or own)}
    if _has_own_time(manifest, target) and not own:  # they have their age: events, of which later ones are not trained
        bare = {of: count for of, count in bare.items() if settings.time_attr not in manifest.nodes[of].attrs}
    if own and not (facts.hetero and not reads_types(settings.model, folders)):
        if settings.embeddings == "all":
            raise SettingsError(
                f"embeddings: {settings.model} reads the features of nodes as they are; only nodes without features "
                "have trainable rows"
            )
        return bare, ""
    if settings.embeddings == "all":
        return counts, ""
    if isinstance(target, str) or settings.embeddings == "featureless":
        return bare, ""
    # Rows of the sources, which have few links each, are learned by heart (docs/LOG.md, 2026-11-26).
    ends = slice(2, None) if settings.decoder == "dot" else slice(None, None, 2)  # those that are ranked
    ranked = list(dict.fromkeys(end for of in link_types(target) for end in of[ends]))
    size = 4 * settings.hidden * sum(counts[of] for of in ranked if of not in bare)
    if size > _MOST_ROWS:
        names = " and ".join(of for of in ranked if of not in bare)
        return bare, (
            f"{names} nodes have no trainable rows beside their features: these would take {size / 1e9:.1f} GB over "
            "all ranks, and three times this with the optimizer's state; set train.embeddings: all to train them"
        )
    return {of: count for of, count in counts.items() if of in bare or of in ranked}, ""


def check_on_graph(settings: TrainSettings, parts: Path) -> None:
    """Make the own class of ``settings`` for a partitioned graph, and run it on a small batch of random numbers.

    Raises ``SettingsError`` if it fails, and the errors of ``open_graph`` and ``pick_target``.
    """
    with open_graph(parts) as graph:
        target, manifest, outputs = (
            pick_target(graph, settings.target, settings.task, settings.decoder),
            graph.manifest,
            settings.hidden,
        )
    if isinstance(target, str) and "y" in manifest.nodes[target].attrs:
        spec = manifest.nodes[target]
        of_classes = spec.num_classes and settings.task in ("auto", "classification")
        outputs = spec.num_classes if of_classes else math.prod(spec.attrs["y"].shape[1:])
    seen = _on_rule(manifest, settings, target)
    columns = categories_of(manifest, settings.category_dims, settings.edge_attr)
    facts = _with_scores(model_facts(seen, target, outputs, settings.edge_attr, (1, 1), columns), settings)
    rows, _ = embedded_nodes(settings, manifest, target, outputs)
    make_model(settings, facts, target, dict.fromkeys(rows, 1))


def reads_types(model: str, folders: Sequence[Path]) -> bool:
    """Return whether the own class ``model`` reads a typed graph as it is; if not, ``to_hetero`` converts it."""
    from trainer.own.model_class import load_class, takes_types  # imported here because it imports torch_geometric

    return takes_types(load_class(model, folders), True)


def keep_sources(model: str, folders: Sequence[Path], target: Path) -> None:
    """Copy the file of the own class ``model``, and the modules beside it that it imports, to the folder ``target``.

    Files of an installed package, and files that are there already, are not copied. Raises ``SettingsError``.
    """
    from trainer.own.model_class import load_class, save_sources  # imported here because it imports torch_geometric

    try:
        save_sources(load_class(model, folders), target)
    except OSError as error:
        raise SettingsError(f"{target} cannot be written: {error.strerror}") from error


def in_degrees(graph: Graph, settings: TrainSettings, folders: Sequence[Path], group: RankGroup) -> tuple[int, ...]:
    """Return the number of nodes by in-degree, from 0, if the model is an own class that needs it. Collective.

    In a graph with types, counts the nodes of all types in which edges end, by their edges of all types. Returns () for
    any other model.
    """

    def needed() -> bool:
        from trainer.own.model_class import load_class, reads_degrees

        return reads_degrees(load_class(settings.model, folders))

    if not is_own_model(settings.model) or not group.agree(needed):
        return ()
    nodes = graph.manifest.nodes

    def own_counts() -> Tensor:
        degrees = [np.empty(0, np.int64)]
        for of in {edge_type[2] for edge_type in graph.manifest.edges}:
            own = np.arange(group.rank, nodes[of].num_nodes, group.size)
            for first in range(0, len(own), _AT_ONCE):
                (rows,) = graph.access.gather([RowRequest(of, own[first : first + _AT_ONCE], ("in_degree",))])
                degrees.append(np.asarray(rows["in_degree"], np.int64))
        return torch.from_numpy(np.bincount(np.concatenate(degrees)))

    counts = group.agree(own_counts)
    longest = max(group.gather(len(counts)))
    found = group.sum(torch.cat([counts, counts.new_zeros(longest - len(counts))]))
    return tuple(int(count) for count in found)


def trained_model(
    saved: Checkpoint, device: torch.device | None = None, folders: Sequence[Path] = ()
) -> tuple[nn.Module, ShardedEmbedding | None]:
    """Build the model of a checkpoint, with its best weights, or its last weights if no epoch was evaluated.

    Under torch.distributed all ranks must call it; only rank 0 needs the embedding tables of ``saved``.

    Args:
        saved: A checkpoint, see ``load_checkpoint``.
        device: Device of the model. Default: the CPU.
        folders: Where the file of an own class is looked for; default: the current folder. Its code is run.

    Returns:
        The model in evaluation mode, and the trained rows of nodes (None if no node type has any).

    Raises:
        SettingsError: The file of an own class is missing, or the class does not fit any more.
    """
    settings, best, built = TrainSettings(**saved.settings), saved.best, saved.built_from
    facts = _facts(built["facts"])
    model, embedding = make_model(
        settings, facts, built["target"], built["rows"], device, folders, built.get("edge_outputs", 0)
    )
    model.load_state_dict(dict(best.model if best else saved.model))
    if embedding is not None:
        last = saved.embedding and saved.embedding["tables"]
        embedding.weight.data.copy_(scatter_tables(embedding, best.embedding if best else last))
    encoder = getattr(model, "encoder", model)
    if hasattr(encoder, "other_fanouts"):
        encoder.other_fanouts = True  # it may be given other batches than those of its training
    return model.to(device or "cpu").eval(), embedding


def load_model(run: str | Path) -> Any:
    """Load the trained model of a run, on the CPU, with the weights of its best epoch.

    The code of an own class is run, from the files that are kept with the run.

    Args:
        run: Folder of the run, such as ``runs/RUN``, or one of its checkpoint files.

    Returns:
        The own class's module if it is called with tensors of one graph as it is; for graphs with types or without
        features a module that takes the batches of ``BatchLoader``, as for the bundled models. Its attribute
        ``built_from`` has the settings, the graph's types and widths, and the best epoch with its metrics.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        SettingsError: The file of the class is missing, or the class does not fit any more.

    Example:
        ```python
        import gnnfleet as gf

        model = gf.load_model("runs/toy-1")
        print(model.built_from["settings"]["model"], model.built_from["metrics"])
        ```
    """
    path = Path(run)
    file = path / "checkpoints" / "last.pt" if path.is_dir() else path
    saved = load_checkpoint(file)
    model: Any
    model, _ = trained_model(saved, folders=source_folders(file))
    best = saved.best
    about = {
        **saved.built_from, "settings": saved.settings, "task": saved.task, "dataset": saved.graph["dataset"],
        "epoch": best.epoch if best else saved.epoch, "metrics": dict(best.metrics) if best else {},
    }  # fmt: skip
    if getattr(model, "reads_tensors", False):
        model = model.own
    model.built_from = about
    return model


def source_folders(checkpoint: Path) -> tuple[Path, ...]:
    """Return where the file of an own class is looked for, for a checkpoint: in its run folder, then here."""
    run = checkpoint.absolute().parent.parent
    return run, run / "files", Path()
