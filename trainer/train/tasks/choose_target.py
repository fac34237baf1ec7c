"""Chooses what a run learns: the node type with labels, or the edge type whose links are predicted."""

from __future__ import annotations

from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import held_out_names, is_task_table
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, LinkTypes, NodeType, is_link_types, type_name
from trainer.graph.open import Graph
from trainer.store.manifest import Manifest, NodeSpec

Target = NodeType | EdgeType | LinkTypes


def pick_target(graph: Graph, wanted: str | None = None, task: str = "auto", decoder: str = "dot") -> Target:
    """Return the node type whose labels are learned or, for link prediction, the edge type whose links are predicted.

    Several edge types, and those of a ``decoder`` with weights per relation, are a tuple of edge types.

    ``wanted``: name of the type; None if only one type is possible. ``task``: ``auto``, or a kind of task. Raises
    ``SettingsError`` if the type ``wanted`` does not exist, or if it is None and several types are possible. Raises
    ``DataError`` if no type is possible.
    """
    manifest = graph.manifest
    edge_types = {type_name(of): of for of in manifest.edges}
    lists: dict[NodeType, EdgeType] = {}  #: by task table: the type from its rows to the targets that they list
    for of in manifest.edges:
        if is_task_table(of[0], manifest.graph_attrs):
            lists.setdefault(of[0], of)
    if wanted in edge_types and task in ("auto", "link"):
        return _for_decoder((edge_types[wanted],), decoder)
    if task.startswith("edge-"):
        if wanted is not None and edge_types.get(wanted) not in _labelled_types(manifest):
            raise SettingsError(
                f"target is {wanted!r}; task {task} needs an edge type of {manifest.dataset} with the attributes y and "
                f"edge_split: {', '.join(map(type_name, _labelled_types(manifest))) or 'there is none'}"
            )
        if wanted is None and not _labelled_types(manifest):
            raise DataError(
                f"{manifest.dataset}: no edge type has labels y and a split edge_split, as task {task} needs; give an "
                "edge table label and split"
            )
        return edge_types[wanted] if wanted is not None else _only(_labelled_types(manifest), manifest)
    if task == "link" and wanted in lists:
        return lists[wanted]
    if task == "link":
        return _for_decoder(_linked(graph, wanted, decoder), decoder)
    if wanted is not None:
        if wanted not in manifest.nodes:
            raise SettingsError(f"target is {wanted!r}; {manifest.dataset} has {', '.join(sorted(manifest.nodes))}")
        if wanted in lists:
            if task != "auto":
                raise SettingsError(f"target is {wanted!r}, whose rows list {lists[wanted][2]} nodes; set task link")
            return lists[wanted]
        return wanted
    able = [of for of, spec in manifest.nodes.items() if "y" in spec.attrs and trains(spec)]
    if not able and task == "auto" and (held_out := held_out_types(graph)):
        return _for_decoder(tuple(held_out), decoder)
    if not able and task == "auto" and _labelled_types(manifest):
        return _only(_labelled_types(manifest), manifest)
    if not able and task == "auto" and lists:
        return _only([*lists.values()], manifest)
    if not manifest.hetero:
        return HOMO_NODE
    if len(able) > 1:
        names = ", ".join(able)
        raise SettingsError(f"{manifest.dataset}: {names} all have labels y and a train split; choose one as target")
    if not able:
        raise DataError(
            f"{manifest.dataset}: no node type has both labels y and a train split with seeds; to predict links, set "
            "task link"
        )
    return able[0]


def held_out_types(graph: Graph) -> list[EdgeType]:
    """Return the edge types whose val and test links are held out (options ``hold_out`` and ``hold_out_split``)."""
    known = {type_name(of): of for of in graph.manifest.edges}
    return [known[name] for name in held_out_names(graph.store.graph_attrs) if name in known]


def _labelled_types(manifest: Manifest) -> list[EdgeType]:
    """Return the edge types with labels and a split of the edges, without those of reverse edges."""
    has_labels = [of for of, spec in manifest.edges.items() if {"y", "edge_split"} <= set(spec.attrs)]
    return [
        of for of in has_labels if (of[2], of[1].removeprefix("rev_"), of[0]) not in has_labels or of[1][:4] != "rev_"
    ]


def learns_edge_labels(graph: Graph, target: EdgeType | LinkTypes, task: str) -> bool:
    """Return whether labels of edges are learned, not which links exist. ``task``: ``auto``, or a kind of task."""
    if is_link_types(target):
        return False
    held_out = target in held_out_types(graph)
    return task.startswith("edge-") or (task == "auto" and not held_out and target in _labelled_types(graph.manifest))


def _only(types: list[EdgeType], manifest: Manifest) -> EdgeType:
    if len(types) != 1:
        names = ", ".join(map(type_name, types))
        raise SettingsError(f"{manifest.dataset}: set target to the edge type to predict, one of: {names}")
    return types[0]


def _linked(graph: Graph, wanted: str | None, decoder: str) -> LinkTypes:
    """Return the edge types whose links are predicted, unless ``wanted`` is the name of one.

    By default those whose links are held out, or else all, which only a decoder with weights per relation takes
    unasked. Raises ``SettingsError`` for names that are no edge types, and if several edge types are possible.
    """
    manifest = graph.manifest
    names = [type_name(of) for of in manifest.edges]
    rows = {of for of in manifest.nodes if is_task_table(of, manifest.graph_attrs)}
    forward = [of for of in manifest.edges if not of[1].startswith("rev_") and not rows.intersection(of)]
    if wanted is not None and wanted != "all":
        chosen = dict.fromkeys(wanted.split(","))
        if missing := [name for name in chosen if name not in names]:
            known = ", ".join(names)
            raise SettingsError(
                f"target is {missing[0]!r}; task link needs an edge type of {manifest.dataset}: {known}"
            )
        return tuple(of for of in manifest.edges if type_name(of) in chosen)
    if not manifest.hetero:
        return (HOMO_EDGE,)
    held_out = held_out_types(graph)
    if wanted == "all" or decoder != "dot":
        return tuple(forward if wanted == "all" or not held_out else held_out)
    return tuple(held_out) if held_out else (_only(forward, manifest),)


def _for_decoder(types: LinkTypes, decoder: str) -> EdgeType | LinkTypes:
    return types[0] if len(types) == 1 and decoder == "dot" else types


def trains(spec: NodeSpec) -> bool:
    return spec.splits.get("train", 0) > 0


def check_trainable(manifest: Manifest, target: NodeType, needs_features: bool = True) -> None:
    """Raise ``DataError`` if the target has no labels or no train seeds, or a homogeneous graph has no features.

    ``needs_features``: whether the model needs features in a homogeneous graph.
    """
    spec, nodes = manifest.nodes[target], f"nodes of type {target}" if manifest.hetero else "nodes"
    for attr in ("y",) if manifest.hetero or not needs_features else ("x", "y"):
        if attr not in spec.attrs:
            needs = "labels y" if manifest.hetero else "features x and labels y"
            raise DataError(f"{manifest.dataset}: {nodes} have no {attr}; training needs {needs}")
    if not trains(spec):
        of = f" of {target}" if manifest.hetero else ""
        raise DataError(f"{manifest.dataset}: the train split{of} has no seeds")
