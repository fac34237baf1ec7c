"""Checks that the settings of neighbour sampling, and types and attributes in requests, fit a graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError, SettingsError
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name
from trainer.sampler.rules import MOST_CHOSEN, check_rule, rule_edges
from trainer.sampler.types import GraphSchema, SampleSettings, TimeRule
from trainer.store.manifest import LOOPLESS_DEGREE, AttrSpec, EdgeSpec, NodeSpec
from trainer.store.part_store import PartStore

_FANOUT_LIMIT = 2**31  # counts are int32


def check_settings(schema: GraphSchema, settings: SampleSettings) -> None:
    """Raise ``SettingsError`` for settings that contradict each other or do not fit the graph."""
    weight, time, rule = settings.weight, settings.time, settings.rule
    targets = {of[2] for of in settings.fanouts}
    if rule is not None:
        check_rule(schema, rule, targets)
        if time is not None and time.last:
            raise SettingsError(
                f"{rule.name}: the rule draws no neighbours, so it cannot take the latest; leave last off"
            )
    known = schema.edges if rule is None else rule_edges(rule, schema, targets, settings.num_hops)
    for edge_type, fanouts in settings.fanouts.items():
        if edge_type not in known:
            raise SettingsError(f"fanouts: the graph has no edge type {edge_type}; it has {list(known)}")
        if len(fanouts) != settings.num_hops:
            raise SettingsError(
                f"fanouts of {edge_type} are {list(fanouts)}, but another edge type has {settings.num_hops} hops;"
                " give every edge type the same number of hops (0: no neighbours at that hop)"
            )
        if bad := [fanout for fanout in fanouts if not -1 <= fanout < _FANOUT_LIMIT]:
            raise SettingsError(f"fanout {bad[0]}; it must be below {_FANOUT_LIMIT}, or -1 for all neighbours")
        if rule is not None and (bad := [k for k in fanouts if not 1 <= k <= MOST_CHOSEN]):
            raise SettingsError(f"{rule.name}: {bad[0]} neighbours; expected a number from 1 to {MOST_CHOSEN}")

    # Settings that contradict each other.
    if weight is not None and time is not None and not settings.top:
        raise SettingsError(
            f"weights {weight!r} and times {time.attr!r} cannot be used together to draw neighbours (torch_geometric"
            " does not allow this either); pass one of them, or take the heaviest neighbours (neighbors: top)"
        )
    if settings.top and weight is None:
        raise SettingsError("neighbors: top takes the heaviest or latest neighbours; give weight_attr or time_attr")
    if settings.top and time is not None and time.last:
        raise SettingsError(
            "neighbors: top with weight_attr takes the heaviest neighbours, temporal_strategy: last the latest; leave"
            " out one of them"
        )
    if settings.induced and (settings.disjoint or time is not None):
        cause = "disjoint" if time is None else "temporal, because temporal subgraphs are disjoint"
        raise SettingsError(
            f"induced subgraphs cannot be {cause} (torch_geometric does not allow this either);"
            " use directional or bidirectional subgraphs"
        )
    if settings.replace and (settings.top or (time is not None and time.last)):
        which = "heaviest" if settings.top else "latest"
        raise SettingsError(
            f"the {which} neighbours are not drawn at random, so replace has no effect; leave replace off"
        )

    if weight is not None:
        weights = {of: spec.attrs[weight] for of, spec in schema.edges.items() if weight in spec.attrs}
        if not weights:
            names = _names(schema.edges)
            raise SettingsError(f"no edge type has the weight attribute {weight!r}; attributes are {names}")
        for of, attr in weights.items():
            if len(attr.shape) != 1 or attr.dtype == "bfloat16" or attr.stored.kind not in "biuf":
                raise SettingsError(
                    f"weights {weight!r} of {of} are {attr.dtype} {list(attr.shape)}; expected one real number per"
                    " edge, of a numpy dtype"
                )

    if time is not None:
        name, on_edges = time.attr, time.on == "edge"
        if on_edges:
            specs = {type_name(of): each.attrs[name] for of, each in schema.edges.items() if name in each.attrs}
        else:
            specs = {of: each.attrs[name] for of, each in schema.nodes.items() if name in each.attrs}
        if not specs:
            known_attrs = _names(schema.edges) if on_edges else _names(schema.nodes)
            raise SettingsError(f"no {time.on} type has the time attribute {name!r}; attributes are {known_attrs}")
        for where, spec in specs.items():
            check_times(name, where, spec, time.on)
        # Without the times of sources, sampling would raise no error and ignore the times.
        for of, edges in schema.edges.items():
            if not on_edges and name in schema.nodes[of[0]].attrs and name not in edges.src_times:
                raise SettingsError(
                    f"the partition does not store {name!r} of {of[0]} with the edges {of};"
                    f" make the partition again with dataset option time_attrs: partition make --option"
                    f" time_attrs={name} (data.options.time_attrs: {name} in a cluster file)"
                )


def check_times(attr: str, of: str, spec: AttrSpec, on: str = "node") -> None:
    if len(spec.shape) != 1 or spec.stored.kind not in "iu" or spec.dtype in ("uint64", "bfloat16"):
        raise SettingsError(
            f"times {attr!r} of {of} are {spec.dtype} {list(spec.shape)};"
            f" expected one integer per {on} (int64 or narrower)"
        )


def _names(specs: Mapping[NodeType, NodeSpec] | Mapping[EdgeType, EdgeSpec]) -> list[str]:
    return sorted({name for spec in specs.values() for name in spec.attrs})


def bound_here(rule: TimeRule, spec: EdgeSpec) -> bool:
    """Return whether edges of this type have the time attribute; if not, the time rule does not restrict them."""
    return rule.attr in (spec.src_times if rule.on == "node" else spec.attrs)


def check_type(store: PartStore, of: AnyType) -> None:
    manifest = store.manifest
    known: Collection[AnyType] = manifest.nodes if isinstance(of, str) else manifest.edges
    if of not in known:
        kind = "node" if isinstance(of, str) else "edge"
        raise PartitionError(f"no {kind} type {of!r} in {store.folder}; there are {list(known)}")


def row_spec(store: PartStore, of: AnyType, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape of an attribute's value for one node or edge.

    Raises ``PartitionError`` for an unknown attribute.
    """
    check_type(store, of)
    if name == "orig_id" or (name in ("in_degree", LOOPLESS_DEGREE) and isinstance(of, str)):
        return np.dtype(np.int64), ()
    attrs = store.manifest.attrs_of(of)
    if name not in attrs:
        raise PartitionError(f"no attribute {name!r} of {of!r}; there are {sorted(attrs)}")
    return attrs[name].stored, tuple(attrs[name].shape[1:])


def blank_rows(count: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return a read-only array of zeros, ``dtype`` [count, …], that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), (count, *shape))
