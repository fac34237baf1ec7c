"""Properties of a graph that models are built from, and the node and edge types that each layer needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_NODE, AnyType, EdgeType, NodeType
from trainer.nn.categories import Categories
from trainer.store.manifest import Manifest


@dataclass(frozen=True)
class GraphFacts:
    """Types, feature widths and number of classes of a graph. ``facts_of`` makes it, ``build_model`` reads it.

    Args:
        hetero: Whether the graph is heterogeneous.
        target: Node type of the seeds.
        node_types: All node types.
        edge_types: All edge types, (source type, relation, target type).
        in_dims: Width of a model's input by node type, only of types with features: of ``x``, and of the embeddings of
            ``categories``.
        num_classes: Width of the model's output. 0: a heterogeneous model has no output layer and returns hidden rows.
        edge_dims: Width of the edge features by edge type, with embeddings of ``categories``, only of types with
            features.
        further: Further node types for which a model computes outputs, such as the source type of links.
        degrees: Number of nodes by in-degree, from 0, for models that need it (PNA); empty: not counted.
        categories: Columns of categories that the model embeds, by node type and edge type.
        timed: Node types of whose nodes batches have the age, which the model reads.

    Example:
        ```python
        import gnnfleet as gf

        facts = gf.nn.facts_of(gf.open("parts").manifest)
        print(facts.target, facts.in_dims, facts.num_classes)
        ```
    """

    hetero: bool
    target: NodeType  #: type of the seeds
    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    in_dims: Mapping[NodeType, int]  #: width of ``x`` and of embeddings beside it, only of types with features
    num_classes: int
    further: tuple[NodeType, ...] = ()
    edge_dims: Mapping[EdgeType, int] = field(default_factory=dict)
    degrees: tuple[int, ...] = ()
    categories: Categories = field(default_factory=dict)
    timed: tuple[NodeType, ...] = ()

    @property
    def targets(self) -> tuple[NodeType, ...]:
        """Node types for which a model computes outputs: ``target`` and ``further``."""
        return (self.target, *self.further)

    def width_of(self, of: AnyType) -> int:
        """Return the width of ``x``, or of ``Block.edge_attr`` with a code per column of categories, as gathered."""
        columns = self.categories.get(of, ())
        if isinstance(of, str):
            return self.in_dims.get(of, 0) - sum(column.dim for column in columns)
        return self.edge_dims.get(of, 0) + sum(1 - column.dim for column in columns)


def facts_of(manifest: Manifest, target: NodeType = HOMO_NODE) -> GraphFacts:
    """Make the ``GraphFacts`` of a partitioned graph from its manifest.

    Args:
        manifest: Manifest of the graph: ``graph.manifest``, or ``gnnfleet.read_manifest(folder)``.
        target: Node type of the seeds; default: the only type of a homogeneous graph.

    Returns:
        Types, feature widths and number of classes, for ``build_model`` and ``layer_needs``.

    Raises:
        SettingsError: If ``target`` is not a node type, or an ``x`` is not real numbers of shape [n, f].

    Example:
        ```python
        import gnnfleet as gf

        facts = gf.nn.facts_of(gf.open("parts").manifest)
        needs = gf.nn.layer_needs(facts.node_types, facts.edge_types, facts.target, num_layers=2)
        ```
    """
    if target not in manifest.nodes:
        raise SettingsError(f"no node type {target!r}; the graph has {', '.join(sorted(manifest.nodes))}")
    shapes = {of: spec.attrs["x"].shape for of, spec in manifest.nodes.items() if "x" in spec.attrs}
    if odd := [of for of, shape in shapes.items() if len(shape) != 2]:
        raise SettingsError(f"x of node type {odd[0]!r} has shape {list(shapes[odd[0]])}; models need [n, f]")
    for of in shapes:
        if (dtype := manifest.nodes[of].attrs["x"].dtype).startswith("complex"):
            raise SettingsError(
                f"x of node type {of!r} is {dtype}; models need real numbers, for instance real and imaginary parts"
                " side by side"
            )
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
    """Node and edge types that one layer reads and writes.

    Args:
        sources: Node types whose rows are the layer's input; includes all ``targets``.
        targets: Node types whose rows are the layer's output.
        edge_types: Edge types that end in one of ``targets``.

    Example:
        ```python
        import gnnfleet as gf

        need = gf.nn.LayerNeed(("author", "paper"), ("paper",), (("author", "writes", "paper"),))
        conv = gf.nn.HeteroSAGEConv(need, 32, 32)
        ```
    """

    sources: tuple[NodeType, ...]  #: node types of the input rows; includes all ``targets``
    targets: tuple[NodeType, ...]  #: node types of the output rows
    edge_types: tuple[EdgeType, ...]  #: edge types that end in one of ``targets``


def layer_needs(
    node_types: Sequence[NodeType], edge_types: Sequence[EdgeType], target: NodeType | Collection[NodeType],
    num_layers: int,
) -> tuple[LayerNeed, ...]:  # fmt: skip
    """Compute the node and edge types that each layer of a model needs to compute rows of ``target``.

    Args:
        node_types: All node types.
        edge_types: All edge types.
        target: Node type of the model's output, or several.
        num_layers: Number of layers.

    Returns:
        One need per layer, first layer first. A layer has an edge type only if a later layer or the output needs
        its target type.

    Example:
        ```python
        import gnnfleet as gf

        writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
        needs = gf.nn.layer_needs(("paper", "author"), (writes, cites), "paper", num_layers=2)
        print(needs[0].sources, needs[1].targets)  # ('paper', 'author') ('paper',)
        ```
    """
    needs: list[LayerNeed] = []
    wanted = {target} if isinstance(target, str) else set(target)
    for _ in range(num_layers):
        edges = tuple(of for of in edge_types if of[2] in wanted)
        read = wanted | {of[0] for of in edges}
        needs.append(LayerNeed(_in_order(node_types, read), _in_order(node_types, wanted), edges))
        wanted = read
    return tuple(reversed(needs))


def _in_order(node_types: Sequence[NodeType], chosen: set[NodeType]) -> tuple[NodeType, ...]:
    return tuple(of for of in node_types if of in chosen)
