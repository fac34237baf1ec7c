"""Rules that choose neighbours other than by draws among the in-edges: the edge types that they make, and checks.

A rule makes edges of its own between the nodes of the graph. In a homogeneous graph they replace those of its only
edge type. In a heterogeneous graph their relation is the name of the rule: ``("author", "ppr", "paper")`` joins papers
with the authors of the highest PageRank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import get_args

import msgspec

from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, reverse_type, types_with_messages
from trainer.sampler.rule_types import PPR, Direction, Rule, Walks
from trainer.sampler.types import GraphSchema, SampleSettings
from trainer.store.manifest import EdgeSpec, NodeSpec

#: Lowest ``alpha * eps``: the push of a seed looks at up to 1 / (alpha * eps) edges.
_LEAST_PUSH = 1e-7

MOST_CHOSEN = 1 << 12  #: neighbours of a seed

MOST_STEPS = 1 << 16  #: of all walks of a seed


@dataclass(frozen=True)
class _RuleSchema:
    """The schema of a graph whose edges are those of a rule."""

    nodes: Mapping[NodeType, NodeSpec]
    edges: Mapping[EdgeType, EdgeSpec]


def rule_schema(schema: GraphSchema, edge_types: Iterable[EdgeType]) -> _RuleSchema:
    return _RuleSchema(schema.nodes, {of: EdgeSpec(0, (0,), {}, (), 0.0) for of in edge_types})


def rule_edges(rule: Rule, schema: GraphSchema, targets: Collection[NodeType], num_layers: int) -> list[EdgeType]:
    """Return the types of the edges that ``rule`` makes to nodes of the types ``targets``, in ``num_layers`` hops."""
    if HOMO_EDGE in schema.edges:
        return [HOMO_EDGE]
    found: dict[EdgeType, None] = {}
    ends = [*targets]
    for _ in range(num_layers):
        more = [(source, rule.name, target) for target in ends for source in _rule_sources(rule, schema, target)]
        ends = list(dict.fromkeys(source for source, _, _ in more))
        found |= dict.fromkeys(more)
    return list(found)


def _rule_sources(rule: Rule, schema: GraphSchema, target: NodeType) -> list[NodeType]:
    """Return the node types in which ``rule`` finds neighbours of ``target`` nodes, in the order of the schema."""
    if isinstance(rule, Walks):
        return [target]
    met, new = set[NodeType](), {target}
    while new:
        new = {source for source, _, end in walked_edges(rule, schema) if end in new} - met
        met |= new
    return [of for of in schema.nodes if of in met]


def walked_edges(rule: PPR, schema: GraphSchema) -> Sequence[EdgeType]:
    """Return the edge types that ``rule`` follows from target to source, in the order of the schema."""
    known, given = schema.edges, rule.edge_types or tuple(schema.edges)
    if rule.direction is None:
        return [of for of in known if of in given]
    back = {of: reverse_type(of, known) for of in known}
    if not rule.edge_types:  # ``rev_r`` is the reverse of ``r``, not the other way round
        given = tuple(of for of in known if not (of[1].startswith("rev_") and back[of] not in (None, of)))
    forward = () if rule.direction == "out" else given
    reverses = () if rule.direction == "in" else [back[of] for of in given]
    return [of for of in known if of in forward or of in reverses]


def without_silent(rule: Rule, schema: GraphSchema, silent: Collection[EdgeType]) -> Rule:
    """Return a rule that does not follow edges of the types ``silent``, unless it names them."""
    if not silent or not isinstance(rule, PPR) or rule.edge_types:
        return rule
    return msgspec.structs.replace(rule, edge_types=tuple(types_with_messages(schema.edges, silent)))


def check_rule(schema: GraphSchema, rule: Rule, targets: Collection[NodeType]) -> None:
    """Raise ``SettingsError`` for a rule that does not fit the graph. ``targets``: types of the seeds."""
    asked = rule.edge_types if isinstance(rule, PPR) else rule.metapath
    if unknown := [of for of in asked if of not in schema.edges]:
        raise SettingsError(f"{rule.name}: the graph has no edge type {unknown[0]}; it has {list(schema.edges)}")
    for kind, names in ((Real, ("alpha", "eps", "restart")), (Integral, ("num_walks", "length"))):
        for name in names:
            if not isinstance(value := getattr(rule, name, 1), kind):
                what = "a number" if kind is Real else "a whole number"
                raise SettingsError(f"{rule.name}: {name} must be {what}, not {value!r}")
    if isinstance(rule, PPR):
        if rule.direction not in (None, *get_args(Direction)):
            raise SettingsError(f"ppr: direction must be in, out, both or None, not {rule.direction!r}")
        if not 0 < rule.alpha < 1 or not 0 < rule.eps < 1:
            raise SettingsError(f"ppr: alpha {rule.alpha:g} and eps {rule.eps:g}; both must be above 0 and below 1")
        if rule.alpha * rule.eps < _LEAST_PUSH:
            raise SettingsError(
                f"ppr: alpha {rule.alpha:g} times eps {rule.eps:g} is below {_LEAST_PUSH:g}: a seed could look at"
                f" {1 / (rule.alpha * rule.eps):.1g} edges; use a larger eps"
            )
        # A part stores the edges that end in its nodes; those that begin in a node are spread over all parts.
        for edge_type in rule.edge_types or schema.edges if rule.direction in ("out", "both") else ():
            if reverse_type(edge_type, schema.edges) not in (None, edge_type):
                continue
            source, relation, target = edge_type
            if edge_type == HOMO_EDGE:
                raise SettingsError(
                    f"ppr: direction {rule.direction}: a graph without types stores its edges at their targets. For"
                    " both directions partition it with option undirected: true, and leave direction out; for the"
                    " other one alone exchange sources and targets of its edges"
                )
            options = "undirected: true" + (" and reverse_types: true" if source == target else "")
            raise SettingsError(
                f"ppr: direction {rule.direction}: the graph has no edge type {(target, f'rev_{relation}', source)},"
                f" the reverses of {edge_type}; partition it with {options}, or leave {edge_type} out of edge_types"
            )
        return
    if rule.num_walks < 1 or rule.length < 1 or not 0 <= rule.restart < 1:
        raise SettingsError(
            f"walks: num_walks {rule.num_walks}, length {rule.length} and restart {rule.restart:g}; expected at least"
            " 1 walk of at least 1 step, and a restart from 0 to below 1"
        )
    if (steps := rule.num_walks * rule.length * max(1, len(rule.metapath))) > MOST_STEPS:
        raise SettingsError(f"walks: {steps} steps for each seed; at most {MOST_STEPS} are possible")
    path = metapath_of(rule, schema)
    ends = [of[0] for of in path[:-1]], [of[2] for of in path[1:]]
    if ends[0] != ends[1] or path[-1][0] != path[0][2]:
        raise SettingsError(
            f"walks: metapath {list(path)} is not a way back to its first node type. List the edge types seed outwards:"
            " the first ends at the seed's type, each next one at the source type of the one before, and the last"
            " begins at the seed's type"
        )
    for of in targets:
        metapath_of(rule, schema, of)


def metapath_of(rule: Walks, schema: GraphSchema, start: NodeType | None = None) -> Sequence[EdgeType]:
    """Return the edge types of a step from a node of type ``start``, seed outwards; without it, as ``rule`` has them.

    The metapath is a circle: a node of another type on it walks round from where its type is first reached.
    """
    path: Sequence[EdgeType] = rule.metapath
    if not path and list(schema.nodes) == [HOMO_NODE]:
        path = [HOMO_EDGE]
    elif not path and len(schema.edges) == 1:
        path = list(schema.edges)
    if not path:
        raise SettingsError(f"walks: the graph has several edge types; choose a metapath among {list(schema.edges)}")
    ends = [target for _, _, target in path]
    if start is None:
        return path
    if start not in ends:
        raise SettingsError(f"walks: seeds are {start!r} nodes, but the metapath has only {', '.join(map(repr, ends))}")
    return [*path[ends.index(start) :], *path[: ends.index(start)]]


def num_requests(schema: GraphSchema, settings: SampleSettings) -> int:
    """Return about how many consecutive requests a batch needs at most."""
    rule, layers = settings.rule, settings.num_hops
    if isinstance(rule, PPR):  # three for the rows of each round of the push
        layers *= 3 * math.ceil(math.log(rule.alpha * rule.eps) / math.log(1 - rule.alpha))
    elif rule is not None:
        layers *= 1 + rule.length * len(metapath_of(rule, schema))
    return layers + 2 + settings.induced
