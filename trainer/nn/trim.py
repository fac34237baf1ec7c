"""Trims each layer of a torch_geometric model to the nodes and edges that later layers need.

The output of the seeds, ``out[:batch.batch_size]``, equals that of the untrimmed model, except with BatchNorm in
training mode. Other rows must not be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.typing import Metadata
from torch_geometric.utils import trim_to_layer

from trainer.core.errors import SettingsError
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.nn.graph_facts import layer_needs
from trainer.nn.hetero_layers import NodeTensors

Counts = list[int]  #: sampled per hop

_EdgeTensors = dict[EdgeType, Tensor]

#: Convolutions that normalise by the degrees of an edge's source and target, unless ``normalize`` is False.
_BY_DEGREES = (pyg.GCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.FAConv, pyg.PDNConv, pyg.DNAConv)

#: Convolutions that read several hops, or other edges than the in-edges.
FURTHER = (
    pyg.SGConv, pyg.SSGConv, pyg.TAGConv, pyg.ChebConv, pyg.ARMAConv, pyg.APPNP, pyg.MixHopConv, pyg.DirGNNConv,
    pyg.GatedGraphConv, pyg.PANConv,
)  # fmt: skip

#: Modules that read the rows of all given nodes, such as their mean.
ALL_NODES = (pyg.GPSConv, pyg.HANConv, pyg.GraphNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.GraphSizeNorm)


class TrimToLayer(nn.Module):
    """torch_geometric's ``trim_to_layer`` as a module, for models that ``gnnfleet.nn.to_hetero`` converts.

    Call this module at the beginning of each layer.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        x, edge_index = torch.randn(6, 8), torch.tensor([[1, 2, 3, 4, 5], [0, 0, 1, 2, 2]])
        trim = gf.nn.TrimToLayer()  # a batch of 1 seed, 2 nodes in the first hop and 3 in the second
        x, edge_index, _ = trim(1, [1, 2, 3], [2, 3], x, edge_index)  # [3, 8], [2, 2]
        ```
    """

    def forward(
        self, layer: int, nodes: Any, edges: Any, x: Any, edge_index: Any, edge_attr: Any = None
    ) -> tuple[Any, Any, Any]:
        """Remove nodes and edges that neither this layer nor later layers need.

        Args:
            layer: Number of the layer, from 0.
            nodes: Numbers of sampled nodes per hop, or a (source, target) pair of such lists; None to trim nothing.
            edges: Numbers of sampled edges per hop; None to trim nothing.
            x: Rows of the previous layer, or a (source, target) pair.
            edge_index: Edges of the previous layer.
            edge_attr: Edge attributes of the previous layer.

        Shapes:
            - **input:** x [num_nodes, f], edge_index [2, num_edges], edge_attr [num_edges, …].
            - **output:** the same with fewer nodes and edges.

        Returns:
            ``x``, ``edge_index`` and ``edge_attr`` for the layer.
        """
        if nodes is None or edges is None:
            return x, edge_index, edge_attr
        if not isinstance(x, tuple):
            return trim_to_layer(layer, nodes, edges, x, edge_index, edge_attr)
        name = ("src", "to", "dst")
        ends, indices, attrs = trim_to_layer(
            layer, dict(zip(name[::2], nodes, strict=True)), {name: edges}, dict(zip(name[::2], x, strict=True)),
            {name: edge_index}, None if edge_attr is None else {name: edge_attr},
        )  # fmt: skip
        return (ends["src"], ends["dst"]), indices[name], None if attrs is None else attrs[name]


class ConvStack(nn.Module):
    """A sequence of convolutions with activation and dropout in between, each with trimmed input."""

    def __init__(self, convs: Sequence[nn.Module], act: nn.Module | None = None, dropout: float = 0.0):
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.act = nn.ReLU() if act is None else act
        self.dropout = nn.Dropout(dropout)
        self._trim = TrimToLayer()

    def forward(
        self,
        x: Tensor,
        edge_index: Tensor,
        num_sampled_nodes_per_hop: Counts | None = None,
        num_sampled_edges_per_hop: Counts | None = None,
    ) -> Tensor:
        """Return the rows of the last convolution, seeds first. Without counts per hop nothing is trimmed."""
        for number, conv in enumerate(self.convs):
            x, edge_index, _ = self._trim(number, num_sampled_nodes_per_hop, num_sampled_edges_per_hop, x, edge_index)
            x = conv(x, edge_index)
            if number < len(self.convs) - 1:
                x = self.dropout(self.act(x))
        return x


class Trimmed(nn.Module):
    """Run a torch_geometric model on homogeneous batches, each layer only on the nodes that later layers need.

    Args:
        model: A ``BasicGNN`` (GraphSAGE, GAT, GIN, PNA, …) or a ``ConvStack``.
        edge_arg: ``"edge_weight"`` or ``"edge_attr"`` to pass this attribute of the batch to the convolutions.

    Shapes:
        - **input:** ``Data`` batch with ``num_sampled_nodes`` and ``num_sampled_edges``.
        - **output:** rows [n, out], seeds first.

    Raises:
        SettingsError: For convolutions that cannot be trimmed.

    Example:
        ```python
        import gnnfleet as gf
        from torch_geometric.nn import GraphSAGE

        graph = gf.open("parts")
        loader = gf.DistNeighborLoader(graph, [10, 5], "train", batch_size=512)
        model = gf.nn.Trimmed(GraphSAGE(graph.num_features, 32, num_layers=2, out_channels=graph.num_classes))
        batch = next(iter(loader))
        logits = model(batch)[: batch.batch_size]  # [512, num_classes]
        ```
    """

    def __init__(self, model: BasicGNN | ConvStack, edge_arg: str | None = None):
        super().__init__()
        check_one_hop(model)
        self.model, self.edge_arg, self.num_layers = _with_trim(model), edge_arg, _depth(model)

    def forward(self, batch: Data, x: Tensor | None = None) -> Tensor:
        """Run the model on a batch.

        Args:
            batch: Batch of a neighbour loader.
            x: Input rows to use instead of ``batch.x``, [num_nodes, f].

        Returns:
            Rows [n, out], seeds first.

        Raises:
            SettingsError: If the batch has no counts per hop.
        """
        attrs = batch[self.edge_arg] if self.edge_arg else None
        hops = _Hops.of(batch, batch.x if x is None else x, batch.edge_index, attrs, self.num_layers)
        return hops.through(self.model, self.edge_arg)  # type: ignore[no-any-return]


class _TrimmedToHetero(nn.Module):
    """Result of ``to_hetero``. ``model`` is the module that torch_geometric's ``to_hetero`` made."""

    def __init__(self, model: nn.Module, num_layers: int, edge_arg: str | None):
        super().__init__()
        self.model, self.num_layers, self.edge_arg = model, num_layers, edge_arg

    def forward(self, batch: HeteroData, x: Mapping[NodeType, Tensor] | None = None) -> NodeTensors:
        """Return the rows of every node type, [n, out] each, seeds first. ``x``: used in place of ``batch.x_dict``.

        Raises ``SettingsError`` if the batch has no counts per hop.
        """
        attrs = batch.collect(self.edge_arg) if self.edge_arg else None
        hops = _Hops.of(batch, batch.x_dict if x is None else x, batch.edge_index_dict, attrs, self.num_layers)
        return hops.through(self.model, self.edge_arg)  # type: ignore[no-any-return]


def to_hetero(
    model: BasicGNN | ConvStack | Sequence[nn.Module],
    metadata: Metadata,
    aggr: str = "sum",
    edge_arg: str | None = None,
) -> _TrimmedToHetero:
    """Make a homogeneous model heterogeneous, as torch_geometric's ``to_hetero`` does, and trim its layers.

    Args:
        model: A ``BasicGNN``, or a sequence of convolutions, which are connected by ReLU.
        metadata: Node types and edge types: ``graph.metadata()``.
        aggr: How results of several edge types are combined: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"mul"``.
        edge_arg: ``"edge_weight"`` or ``"edge_attr"`` to pass this attribute of the batch to the convolutions.

    Returns:
        A module that is called with a ``HeteroData`` batch and, optionally, input rows by node type (default:
        ``batch.x_dict``). It returns the rows of every node type, [n, out] each, seeds first.

    Raises:
        SettingsError: For convolutions that cannot be trimmed.

    Example:
        ```python
        import torch
        import gnnfleet as gf
        from torch_geometric.nn import SAGEConv

        graph = gf.open("parts")  # of a heterogeneous graph
        loader = gf.DistNeighborLoader(graph, [10, 5], ("paper", "train"), batch_size=512)
        model = gf.nn.to_hetero([SAGEConv((32, 32), 32), SAGEConv((32, 32), 16)], graph.metadata())
        batch = next(iter(loader))
        x = {node_type: torch.randn(batch[node_type].num_nodes, 32) for node_type in batch.node_types}
        rows = model(batch, x)["paper"][: batch["paper"].batch_size]  # [512, 16]
        ```
    """
    stack = model if isinstance(model, nn.Module) else ConvStack(model)
    check_one_hop(stack)
    return _TrimmedToHetero(pyg.to_hetero(_with_trim(stack), metadata, aggr), _depth(stack), edge_arg)


class TrimmedHetero(nn.Module):
    """Run heterogeneous convolutions on a batch, each layer only on the nodes that later layers need.

    Args:
        convs: ``HeteroConv`` or ``HGTConv`` modules, connected by activation and dropout.
        target: Node type of the output; layers skip node and edge types that do not contribute to it.
        dropout: Dropout probability between layers.
        act: Activation between layers; None for none.
        edge_arg: ``"edge_weight"`` or ``"edge_attr"`` to pass this attribute of the batch to the convolutions.

    Shapes:
        - **input:** ``HeteroData`` batch with ``num_sampled_nodes`` and ``num_sampled_edges``.
        - **output:** rows [n, out] by node type, seeds first.

    Raises:
        SettingsError: For convolutions that cannot be trimmed.

    Example:
        ```python
        import torch
        import gnnfleet as gf
        from torch_geometric.nn import HGTConv

        graph = gf.open("parts")  # of a heterogeneous graph
        loader = gf.DistNeighborLoader(graph, [10, 5], ("paper", "train"), batch_size=512)
        model = gf.nn.TrimmedHetero([HGTConv(32, 32, graph.metadata(), heads=4) for _ in range(2)], "paper")
        batch = next(iter(loader))
        x = {node_type: torch.randn(batch[node_type].num_nodes, 32) for node_type in batch.node_types}
        rows = model(batch, x)["paper"][: batch["paper"].batch_size]  # [512, 32]
        ```
    """

    def __init__(
        self, convs: Sequence[nn.Module], target: NodeType | None = None, *, dropout: float = 0.0,
        act: Callable[[Tensor], Tensor] | None = torch.relu, edge_arg: str | None = None,
    ):  # fmt: skip
        super().__init__()
        self.convs = nn.ModuleList(convs)
        self.target, self.dropout, self.act, self.edge_arg = target, dropout, act, edge_arg
        check_one_hop(self)

    def forward(self, batch: HeteroData, x: Mapping[NodeType, Tensor] | None = None) -> NodeTensors:
        """Run the model on a batch.

        Args:
            batch: Batch of a neighbour loader.
            x: Input rows by node type to use instead of ``batch.x_dict``, [num_nodes, f] each.

        Returns:
            Rows of the last layer's node types, [n, out] each, seeds first.

        Raises:
            SettingsError: If the batch has no counts per hop.
        """
        attrs = batch.collect(self.edge_arg) if self.edge_arg else None
        hops = _Hops.of(batch, dict(batch.x_dict if x is None else x), batch.edge_index_dict, attrs, len(self.convs))
        rows, indices, attrs = hops.rows, hops.indices, hops.attrs
        for number, conv in enumerate(self.convs):
            if self.target is not None:
                need = layer_needs(tuple(rows), tuple(indices), self.target, len(self.convs) - number)[0]
                attrs = None if attrs is None else {of: attrs[of] for of in need.edge_types if of in attrs}
                rows, indices = {of: rows[of] for of in need.sources}, {of: indices[of] for of in need.edge_types}
            rows, indices, attrs = trim_to_layer(number, hops.nodes, hops.edges, rows, indices, attrs)
            rows = conv(rows, indices, **({} if attrs is None else {f"{self.edge_arg}_dict": attrs}))
            if number < len(self.convs) - 1:
                rows = rows if self.act is None else {of: self.act(h) for of, h in rows.items()}
                rows = {of: functional.dropout(h, self.dropout, self.training) for of, h in rows.items()}
        return rows


def check_one_hop(model: nn.Module) -> None:
    """Raise ``SettingsError`` if a layer's result for a node depends on more than the node and its in-edges."""
    if name := next(iter(by_degrees(model, "trimmed")), None):
        raise SettingsError(
            f"{name} cannot be trimmed: its result for a node depends on degrees of the node's neighbours; use the "
            "model without trimming, or pass normalize=False and edge weights if the layer accepts them"
        )


def by_degrees(model: nn.Module, verb: str) -> list[str]:
    """Return the names of the layers whose result for a node depends on the degrees of its neighbours: on two hops.

    Raises ``SettingsError`` if a layer depends on anything else than two hops of in-edges. ``verb``: for the message,
    what cannot be done with such a layer.
    """
    found = []
    for layer in model.modules():
        name = type(layer).__name__
        by_batch = isinstance(layer, pyg.InstanceNorm) and not layer.track_running_stats
        by_graph = isinstance(layer, pyg.LayerNorm) and layer.mode == "graph"
        if isinstance(layer, FURTHER) or (isinstance(layer, pyg.AntiSymmetricConv) and layer.num_iters > 1):
            why = "further hops, or other edges than the node's in-edges"
        elif getattr(layer, "flow", "source_to_target") != "source_to_target":
            why, name = "the node's out-edges, which are not sampled", f"{name} with flow={layer.flow!r}"
        elif by_batch or by_graph or isinstance(layer, ALL_NODES):
            why = "the rows of all nodes that it is given"
        else:
            symmetric = isinstance(layer, pyg.EGConv) and "symnorm" in layer.aggregators
            if symmetric or (isinstance(layer, _BY_DEGREES) and layer.normalize):
                found.append(name)
            continue
        raise SettingsError(f"{name} cannot be {verb}: its result for a node depends on {why}; use the whole graph")
    return found


def _with_trim(model: nn.Module) -> nn.Module:
    model._trim = TrimToLayer()
    if isinstance(knowledge := getattr(model, "jk", None), nn.Module):
        knowledge.register_forward_pre_hook(cut_to_last)
    return model


def _depth(model: nn.Module) -> int:
    assert isinstance(model.convs, nn.ModuleList)
    return len(model.convs)


def cut_to_last(_: nn.Module, args: tuple[list[Tensor]]) -> tuple[list[Tensor]]:
    (rows,) = args
    return ([h[: len(rows[-1])] for h in rows],)


@dataclass(frozen=True)
class _Hops:
    """The inputs of a model for one batch, with exactly one hop per layer.

    For a ``HeteroData``, each field is a dict by node or edge type.
    """

    nodes: Any  #: sampled nodes per hop, seeds first: [layers + 1]
    edges: Any  #: sampled edges per hop: [layers]
    rows: Any  #: input rows [num_nodes, f]
    indices: Any  #: edge_index [2, num_edges]
    attrs: Any  #: edge attributes [num_edges, …], or None

    @classmethod
    def of(cls, batch: Data | HeteroData, rows: Any, indices: Any, attrs: Any, num_layers: int) -> _Hops:
        """Make the inputs: cut off hops that no layer reads, and add empty hops if there are too few.

        ``rows``: node rows. ``indices``: the edges. ``attrs``: edge attributes. Raises ``SettingsError`` for a batch
        without counts per hop.
        """
        names, typed = ("num_sampled_nodes", "num_sampled_edges"), isinstance(batch, HeteroData)
        nodes, edges = (batch.collect(name, allow_empty=True) if typed else batch.get(name) for name in names)
        if not nodes or not edges or (typed and None in edges.values()):
            raise SettingsError(
                "the batch has no num_sampled_nodes and num_sampled_edges (counts per hop), so it cannot be trimmed; "
                "sample with subgraph_type='directional', or use the model without trimming"
            )
        hops = len(next(iter(nodes.values())) if isinstance(nodes, Mapping) else nodes) - 1
        for surplus in range(1, hops - num_layers + 1):
            rows, indices, attrs = trim_to_layer(surplus, nodes, edges, rows, indices, attrs)
        return cls(_fitted(nodes, num_layers + 1), _fitted(edges, num_layers), rows, indices, attrs)

    def through(self, model: nn.Module, edge_arg: str | None) -> Any:
        """Call ``model`` with these inputs. Its arguments must be named as those of torch_geometric's ``BasicGNN``.

        ``edge_arg``: name of the argument for the edge attributes; None to leave them out.
        """
        extra = {edge_arg: self.attrs} if edge_arg else {}
        counts = {"num_sampled_nodes_per_hop": self.nodes, "num_sampled_edges_per_hop": self.edges}
        return model(self.rows, self.indices, **counts, **extra)


def _fitted(counts: Counts | Mapping[AnyType, Counts], length: int) -> Counts | dict[AnyType, Counts]:
    if isinstance(counts, Mapping):
        return {of: _fitted_one(own, length) for of, own in counts.items()}
    return _fitted_one(counts, length)


def _fitted_one(counts: Counts, length: int) -> Counts:
    return [*counts[:length], *[0] * (length - len(counts))]
