"""Makes the loaders of a run: of seed nodes, or of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import (
    HELD_OUT_TIME,
    TEST_LINKS,
    VAL_LINKS,
    decode_texts,
    held_out_links,
    is_task_table,
)
from trainer.core.schema import (
    HOMO_EDGE,
    EdgeType,
    LinkTypes,
    NodeType,
    is_link_types,
    reverse_type,
    seed_types,
    target_name,
    type_name,
)
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import LoaderSettings, sampling_of
from trainer.sampler.settings import check_settings
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose_target import Target, held_out_types

if TYPE_CHECKING:
    from trainer.loader.edge_block_loader import EdgeBlockLoader, LabelledEdges
    from trainer.loader.link_block_loader import LinkBlockLoader
    from trainer.loader.link_seeds import LinkInputs
    from trainer.loader.typed_link_loader import TypedLinkLoader

SPLITS = ("train", "val", "test")


def link_loaders(
    settings: TrainSettings, graph: Graph, edge_type: EdgeType, splits: Sequence[str], want_degree: bool, rank: int,
    layout: RankLayout, categories: Mapping[NodeType, tuple[str, ...]] | None = None, counts: Tensor | None = None,
    ages: tuple[NodeType, ...] = (), given: Mapping[str, LinkInputs] | None = None,
) -> dict[str, LinkBlockLoader]:  # fmt: skip
    """Return a loader of links for each of ``splits``: all edges for ``train``, else the split's held-out links.

    Of a task table with lists, the links of each split are those from its rows.

    With ``time_attr``, an attribute of the links' edge type, neighbours later than a link are not sampled for it.
    ``want_degree``: whether batches contain the in-degrees of nodes. ``categories``: columns of categories in batches.
    ``counts``: number of links by target, [targets], for negatives of loss ``in-batch``. ``ages``: as for
    ``loader_settings``. ``given``: result of ``split_links``, if it is known.

    Raises ``SettingsError`` for disjoint sampling without times, and if the links lack the attribute ``time_attr``.
    Raises ``DataError`` if there are no edges of the type, if the held-out links are of another type, or if they were
    held out without the times of ``time_attr``.
    """
    # imported here because they import torch_geometric, which takes seconds
    from trainer.loader.edge_endpoints import all_times
    from trainer.loader.link_block_loader import LinkBlockLoader, LinkBlockSettings
    from trainer.loader.link_seeds import link_inputs
    from trainer.loader.node_links import leading_type
    from trainer.loader.split_links import split_links

    check_link_settings(settings, graph, edge_type)
    # those that the settings name as lists of a link's source, and their reverses
    if any(edge_type in (of, reverse_type(of, graph.manifest.edges)) for of in settings.silent):
        raise SettingsError("hard_negatives and eval_candidates: edges of these types are not the links to predict")
    own = {
        name: None if of is None else leading_type(graph, named_type(graph, name, of), edge_type[0], edge_type[2], name)
        for name, of in (("hard_negatives", settings.hard_negatives), ("eval_candidates", settings.eval_candidates))
    }
    given = split_links(graph, edge_type, settings.time_attr) if given is None else given
    loaders: dict[str, LinkBlockLoader] = {}
    for split in splits:
        links = given.get(split)
        if links is None and split != "train":
            continue
        if links is None:
            times = None if settings.time_attr is None else all_times(graph, edge_type, settings.time_attr)
            links = link_inputs(graph, None if edge_type == HOMO_EDGE else edge_type, edge_label_time=times)
        if split == "train":
            log_q = None
            if settings.loss == "in-batch" and counts is not None:
                log_q = (counts.clamp(min=1) / counts.sum().clamp(min=1)).log().float().numpy()
            hard = own["hard_negatives"]
            how = LinkBlockSettings(settings.negatives, links.are_edges, log_q, hard, settings.num_hard_negatives)
        elif (listed := own["eval_candidates"]) is not None:
            how = LinkBlockSettings(0, False, own=listed, listed=True)
        else:
            how = LinkBlockSettings(int(settings.eval_negatives), False)
        loading = loader_settings(settings, edge_type, split, want_degree, categories, ages)
        loaders[split] = LinkBlockLoader(graph, loading, links, how, rank, layout)
    return loaders


def typed_link_loaders(
    settings: TrainSettings, graph: Graph, types: LinkTypes, splits: Sequence[str], want_degree: bool, rank: int,
    layout: RankLayout, categories: Mapping[NodeType, tuple[str, ...]] | None = None,
) -> dict[str, TypedLinkLoader]:  # fmt: skip
    """Return a loader of the links of several edge types for each of ``splits``, as ``link_loaders`` for one type."""
    from trainer.loader.edge_endpoints import HeldEndpoints, StoredEndpoints
    from trainer.loader.typed_link_loader import TypedLinkLoader, TypedLinks  # imports torch_geometric

    check_link_settings(settings, graph, types)
    loaders: dict[str, TypedLinkLoader] = {}
    for split in splits:
        training = split == "train"
        if training:
            links = TypedLinks(types, tuple(StoredEndpoints(graph, of) for of in types))
        else:
            given = (held_out_links(graph.store.graph_attrs, of, split)[0] for of in types)
            pairs = (np.empty((2, 0), np.int64) if ids is None else np.asarray(ids) for ids in given)
            links = TypedLinks(types, tuple(HeldEndpoints(*each) for each in pairs))
        if training or len(links):
            loaders[split] = TypedLinkLoader(
                graph, loader_settings(settings, types, split, want_degree, categories), links,
                settings.negatives if training else int(settings.eval_negatives), both=settings.decoder != "dot",
                hide=training and bool(settings.fanouts), rank=rank, layout=layout,
            )  # fmt: skip
    return loaders


def named_type(graph: Graph, setting: str, name: str) -> EdgeType:
    """Return the edge type that a setting names. Raises ``SettingsError``."""
    from trainer.loader.link_seeds import canonical  # imports torch_geometric

    return canonical(graph, tuple(name.split("__")), where=setting)


def check_link_settings(settings: TrainSettings, graph: Graph, target: EdgeType | LinkTypes) -> None:
    if is_link_types(target):
        given = {
            name: getattr(settings, name) for name in ("time_attr", "disjoint", "hard_negatives", "eval_candidates")
        }
        for name, value in {**given, "in-batch": settings.loss == "in-batch"}.items():
            if value:
                raise SettingsError(f"{name} is for links of one edge type and decoder dot; leave it out")
        if not any(graph.manifest.edges[of].num_edges for of in target):
            raise DataError(f"{graph.manifest.dataset}: there are no edges of type {target_name(target)} to learn from")
        return
    edge_type = target
    if is_task_table(edge_type[0], graph.store.graph_attrs):
        table = edge_type[0]
        if settings.model in ("lightgcn", "embedding"):
            raise SettingsError(f"model {settings.model} has no row for what {table} asks; use rsage, rgcn or hgt")
        if settings.hard_negatives is not None:
            raise SettingsError(
                f"hard_negatives is for links that are edges, and {table} is a task table; leave it out"
            )
        if settings.eval_candidates is not None and settings.eval_negatives != "all":
            raise SettingsError("eval_candidates of a task table needs eval_negatives: all")
        if not graph.manifest.nodes[table].splits.get("train"):
            raise DataError(f"{graph.manifest.dataset}: no rows of {table} that list targets are in the train split")
        if settings.time_attr is not None:
            check_settings(graph.manifest, sampling_of(graph, loader_settings(settings, edge_type, "train", False)))
        return
    if settings.disjoint and settings.time_attr is None:
        raise SettingsError("disjoint cannot be used with task link, which samples one subgraph per batch")
    held_out, name = held_out_types(graph), type_name(edge_type)
    if held_out and edge_type not in held_out:
        raise DataError(
            f"{graph.manifest.dataset}: links of {', '.join(map(type_name, held_out))} are held out, and target is "
            f"{name}; set option hold_out and train.target to the same edge type"
        )
    if not graph.manifest.edges[edge_type].num_edges:
        raise DataError(f"{graph.manifest.dataset}: there are no edges of type {name} to learn from")
    if (attr := settings.time_attr) is None:
        return
    if attr not in graph.manifest.edges[edge_type].attrs:
        known = ", ".join(sorted(graph.manifest.edges[edge_type].attrs)) or "none"
        raise SettingsError(
            f"time_attr: task link needs the times of the links, and the edges {name} have no attribute {attr!r}; "
            f"their attributes are: {known}"
        )
    check_settings(graph.manifest, sampling_of(graph, loader_settings(settings, edge_type, "train", False)))
    attrs = graph.store.graph_attrs
    held_out_time = decode_texts(np.asarray(attrs[HELD_OUT_TIME])) if HELD_OUT_TIME in attrs else []
    if (VAL_LINKS in attrs or TEST_LINKS in attrs) and held_out_time != [attr]:
        raise DataError(
            f"{graph.manifest.dataset}: time_attr is {attr}, but the validation and test links were held out without "
            f"these times; set option hold_out_time: {attr} and make the parts again"
        )


def edge_loaders(
    settings: TrainSettings, graph: Graph, seeds: Mapping[str, LabelledEdges], want_degree: bool, rank: int,
    layout: RankLayout, categories: Mapping[NodeType, tuple[str, ...]] | None = None,
) -> dict[str, EdgeBlockLoader]:  # fmt: skip
    """Return a loader of the labelled edges of each split."""
    from trainer.loader.edge_block_loader import (
        LABEL,
        SPLIT,
        EdgeBlockLoader,  # imports torch_geometric
    )

    for name in settings.edge_attr or ():
        if name in (SPLIT, LABEL):
            raise SettingsError(f"edge_attr: {name} is the label or the split of the edges, not a feature")
    return {
        split: EdgeBlockLoader(
            graph,
            loader_settings(settings, edges.edge_type, split, want_degree, categories),
            edges,
            rank,
            layout,
            hide=settings.hide,
        )
        for split, edges in seeds.items()
    }


def loader_settings(
    settings: TrainSettings, target: Target, split: str, want_degree: bool,
    categories: Mapping[NodeType, tuple[str, ...]] | None = None, ages: tuple[NodeType, ...] = (),
) -> LoaderSettings:  # fmt: skip
    """Return the settings of the loader that the bundled trainer uses for a split.

    Args:
        settings: Settings of the run.
        target: Node type of the seeds, or edge types of the links.
        split: Name of the split; ``"train"`` gets the fanouts, the batch size and the shuffling of training.
        want_degree: Whether batches contain the in-degrees of nodes, which GCN needs.
        categories: Columns of categories that the model embeds, by node type: ``model.categories.names``.
        ages: Node types of whose nodes the model reads the age: ``model.timed``.
    """
    training = split == "train"
    return LoaderSettings(
        split=split,
        target=seed_types(target)[0],
        ends=seed_types(target),
        fanouts=settings.fanouts if training else settings.eval_fanouts or settings.fanouts,
        global_batch=settings.batch_size if training else settings.eval_batch_size,
        seed=settings.seed,
        replace=settings.replace,
        weight=settings.weight_attr,
        time_attr=settings.time_attr,
        last=settings.temporal_strategy == "last",
        top=settings.neighbors is not None and settings.neighbors.name == "top",
        rule=settings.rule,
        disjoint=settings.disjoint,
        edge_attr=settings.edge_attr,
        categories=categories or {},
        ages=ages,
        shuffle=training,
        threads=settings.sampler_threads,
        prefetch=max(settings.prefetch, settings.sampler_threads + 1),
        want_degree=want_degree,
        deadline=settings.timeout,
        silent=settings.silent,
    )
