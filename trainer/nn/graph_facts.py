"""What a model needs to know of a graph, and which types each layer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_NODE, EdgeType, NodeType
from trainer.store.manifest import Manifest


@dataclass(frozen=True)
class GraphFacts:
    """The graph as a model sees it."""

    hetero: bool
    target: NodeType  #: type of the seeds
    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    in_dims: Mapping[NodeType, int]  #: width of ``x``, of the types that have it
    num_classes: int


def facts_of(manifest: Manifest, target: NodeType = HOMO_NODE) -> GraphFacts:
    """The facts of a partitioned graph.

    Raises ``SettingsError`` for a target that is no node type, or an ``x`` that is not [n, f].
    """
    if target not in manifest.nodes:
        raise SettingsError(f"no node type {target!r}; there are {', '.join(sorted(manifest.nodes))}")
    shapes = {of: spec.attrs["x"].shape for of, spec in manifest.nodes.items() if "x" in spec.attrs}
    if odd := [of for of, shape in shapes.items() if len(shape) != 2]:
        raise SettingsError(f"x of node type {odd[0]!r} has shape {list(shapes[odd[0]])}; models need [n, f]")
    return GraphFacts(
        hetero=manifest.hetero,
        target=target,
        node_types=tuple(manifest.nodes),
        edge_types=tuple(manifest.edges),
        in_dims={of: shape[1] for of, shape in shapes.items()},
        num_classes=manifest.nodes[target].num_classes,
    )


@dataclass(frozen=True)
class LayerNeed:
    """What one layer reads and writes so that the last layer's target gets its result."""

    sources: tuple[NodeType, ...]  #: types whose rows come in; ``targets`` are among them
    targets: tuple[NodeType, ...]  #: types whose rows go out
    edge_types: tuple[EdgeType, ...]  #: those that end in ``targets``


def layer_needs(
    node_types: Sequence[NodeType], edge_types: Sequence[EdgeType], target: NodeType, num_layers: int
) -> tuple[LayerNeed, ...]:
    """The need of each layer, first layer first; types keep the order of the arguments.

    An edge type is left out of a layer whose result for its target type nobody reads.
    """
    needs: list[LayerNeed] = []
    wanted = {target}
    for _ in range(num_layers):
        edges = tuple(of for of in edge_types if of[2] in wanted)
        read = wanted | {of[0] for of in edges}
        needs.append(LayerNeed(_in_order(node_types, read), _in_order(node_types, wanted), edges))
        wanted = read
    return tuple(reversed(needs))


def _in_order(node_types: Sequence[NodeType], chosen: set[NodeType]) -> tuple[NodeType, ...]:
    return tuple(of for of in node_types if of in chosen)
