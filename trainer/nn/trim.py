"""Trims each layer of a torch_geometric model to the nodes that later layers need.

A batch lists nodes and edges hop by hop, so the last layer needs the edges of the first hop only, the layer
before it those of the first two, and so on. What these modules return has the rows that the last layer
computed, seeds first: ``out[:batch.batch_size]`` is what the untrimmed model gives there (in evaluation mode, if it
has BatchNorm, whose statistics are over the rows that a layer sees). The other rows are by-products.
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

EdgeTensors = dict[EdgeType, Tensor]

#: What normalises by degrees in the edges it is given, or looks further than one hop: trimmed it would differ.
NOT_ONE_HOP = (
    pyg.GCNConv, pyg.GCN2Conv, pyg.LGConv, pyg.FAConv, pyg.PDNConv, pyg.DNAConv, pyg.SGConv, pyg.SSGConv, pyg.TAGConv,
    pyg.ChebConv, pyg.ARMAConv, pyg.APPNP, pyg.MixHopConv, pyg.DirGNNConv, pyg.GPSConv,
)  # fmt: skip


class TrimToLayer(nn.Module):
    """``trim_to_layer`` as a module that also takes (source, target) pairs, as ``to_hetero`` makes of it.

    torch_geometric's own refuses pairs, so its models cannot be trimmed once they are heterogeneous. A model of
    yours can call it at the beginning of each layer and be given to ``to_hetero``.
    """

    def forward(
        self, layer: int, nodes: Any, edges: Any, x: Any, edge_index: Any, edge_attr: Any = None
    ) -> tuple[Any, Any, Any]:
        """``nodes``, ``edges``: sampled per hop, None to leave all as it is; returns x, edge_index, edge_attr."""
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
    """Convolutions one after the other, with an activation and dropout in between; it trims by itself."""

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
        for place, conv in enumerate(self.convs):
            x, edge_index, _ = self._trim(place, num_sampled_nodes_per_hop, num_sampled_edges_per_hop, x, edge_index)
            x = conv(x, edge_index)
            if place < len(self.convs) - 1:
                x = self.dropout(self.act(x))
        return x


class Trimmed(nn.Module):
    """A ``BasicGNN`` (GraphSAGE, GAT, GIN, PNA, …) or a ``ConvStack`` on ``Data`` batches.

    edge_arg: ``edge_weight`` or ``edge_attr`` to hand that attribute of the batch to the convolutions. Raises
    ``SettingsError`` for convolutions that cannot be trimmed.
    """

    def __init__(self, model: BasicGNN | ConvStack, edge_arg: str | None = None):
        super().__init__()
        check_one_hop(model)
        self.model, self.edge_arg, self.num_layers = _with_trim(model), edge_arg, _depth(model)

    def forward(self, batch: Data, x: Tensor | None = None) -> Tensor:
        """Rows [n, out], seeds first; ``x`` stands in for ``batch.x``. Raises ``SettingsError`` without hop counts."""
        attrs = batch[self.edge_arg] if self.edge_arg else None
        hops = Hops.of(batch, batch.x if x is None else x, batch.edge_index, attrs, self.num_layers)
        return hops.through(self.model, self.edge_arg)  # type: ignore[no-any-return]


class TrimmedToHetero(nn.Module):
    """What ``to_hetero`` gives: ``model`` is torch_geometric's own result, with its parameter names."""

    def __init__(self, model: nn.Module, num_layers: int, edge_arg: str | None):
        super().__init__()
        self.model, self.num_layers, self.edge_arg = model, num_layers, edge_arg

    def forward(self, batch: HeteroData, x: Mapping[NodeType, Tensor] | None = None) -> NodeTensors:
        """Rows of every node type, [n, out] each, seeds first; ``x`` stands in for ``batch.x_dict``."""
        attrs = batch.collect(self.edge_arg) if self.edge_arg else None
        hops = Hops.of(batch, batch.x_dict if x is None else x, batch.edge_index_dict, attrs, self.num_layers)
        return hops.through(self.model, self.edge_arg)  # type: ignore[no-any-return]


def to_hetero(
    model: BasicGNN | ConvStack | Sequence[nn.Module],
    metadata: Metadata,
    aggr: str = "sum",
    edge_arg: str | None = None,
) -> TrimmedToHetero:
    """torch_geometric's ``to_hetero`` with layers that trim; a sequence of convolutions becomes a ``ConvStack``.

    Raises ``SettingsError`` for convolutions that cannot be trimmed.
    """
    stack = model if isinstance(model, nn.Module) else ConvStack(model)
    check_one_hop(stack)
    return TrimmedToHetero(pyg.to_hetero(_with_trim(stack), metadata, aggr), _depth(stack), edge_arg)


class TrimmedHetero(nn.Module):
    """A stack of ``HeteroConv`` or ``HGTConv``, with an activation and dropout in between.

    With ``target``, types and edge types that do not lead to it are left out besides, layer by layer.
    edge_arg: ``edge_weight`` or ``edge_attr`` to hand that attribute of the batch to the convolutions. Raises
    ``SettingsError`` for convolutions that cannot be trimmed.
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
        """Rows of the types that the last layer gives, seeds first; ``x`` stands in for ``batch.x_dict``."""
        attrs = batch.collect(self.edge_arg) if self.edge_arg else None
        hops = Hops.of(batch, dict(batch.x_dict if x is None else x), batch.edge_index_dict, attrs, len(self.convs))
        rows, indices, attrs = hops.rows, hops.indices, hops.attrs
        for place, conv in enumerate(self.convs):
            rows, indices, attrs = self._wanted(place, rows, indices, attrs)
            rows, indices, attrs = trim_to_layer(place, hops.nodes, hops.edges, rows, indices, attrs)
            rows = conv(rows, indices, **({} if attrs is None else {f"{self.edge_arg}_dict": attrs}))
            if place < len(self.convs) - 1:
                rows = {of: self._between(h) for of, h in rows.items()}
        return rows

    def _wanted(self, place: int, rows: NodeTensors, indices: EdgeTensors, attrs: EdgeTensors | None) -> Any:
        if self.target is None:
            return rows, indices, attrs
        need = layer_needs(tuple(rows), tuple(indices), self.target, len(self.convs) - place)[0]
        kept = None if attrs is None else {of: attrs[of] for of in need.edge_types if of in attrs}
        return {of: rows[of] for of in need.sources}, {of: indices[of] for of in need.edge_types}, kept

    def _between(self, h: Tensor) -> Tensor:
        h = h if self.act is None else self.act(h)
        return functional.dropout(h, self.dropout, self.training)


def check_one_hop(model: nn.Module) -> None:
    """Raise ``SettingsError`` for a convolution whose result for a node depends on more than its sampled in-edges."""
    for layer in model.modules():
        if isinstance(layer, NOT_ONE_HOP) and getattr(layer, "normalize", True):
            raise SettingsError(
                f"{type(layer).__name__} cannot be trimmed: it reads more of the batch than the edges that end in a "
                "layer's targets (degrees of their sources, or further hops); use it untrimmed, or with "
                "normalize=False and edge weights where it has that"
            )


def _with_trim(model: nn.Module) -> nn.Module:
    """The model with a trim step that survives ``to_hetero``, and jumping knowledge of the rows all layers have."""
    model._trim = TrimToLayer()
    if isinstance(knowledge := getattr(model, "jk", None), nn.Module):
        knowledge.register_forward_pre_hook(_cut_to_last)
    return model


def _depth(model: nn.Module) -> int:
    assert isinstance(model.convs, nn.ModuleList)
    return len(model.convs)


def _cut_to_last(_: nn.Module, args: tuple[list[Tensor]]) -> tuple[list[Tensor]]:
    (rows,) = args
    return ([h[: len(rows[-1])] for h in rows],)


@dataclass(frozen=True)
class Hops:
    """A batch with as many hops as the model has layers; every field is per type where the graph has types."""

    nodes: Any  #: sampled per hop, seeds first: [layers + 1]
    edges: Any  #: sampled per hop: [layers]
    rows: Any
    indices: Any
    attrs: Any

    @classmethod
    def of(cls, batch: Data | HeteroData, rows: Any, indices: Any, attrs: Any, num_layers: int) -> Hops:
        """Hops that no layer reads are cut off, missing ones are empty.

        Raises ``SettingsError`` for a batch whose edges are not listed hop by hop.
        """
        nodes, edges = _hop_counts(batch)
        hops = len(next(iter(nodes.values())) if isinstance(nodes, Mapping) else nodes) - 1
        for surplus in range(1, hops - num_layers + 1):
            rows, indices, attrs = trim_to_layer(surplus, nodes, edges, rows, indices, attrs)
        return cls(_fitted(nodes, num_layers + 1), _fitted(edges, num_layers), rows, indices, attrs)

    def through(self, model: nn.Module, edge_arg: str | None) -> Any:
        """What a model with torch_geometric's signature makes of it."""
        extra = {edge_arg: self.attrs} if edge_arg else {}
        counts = {"num_sampled_nodes_per_hop": self.nodes, "num_sampled_edges_per_hop": self.edges}
        return model(self.rows, self.indices, **counts, **extra)


def _hop_counts(batch: Data | HeteroData) -> tuple[Any, Any]:
    names = ("num_sampled_nodes", "num_sampled_edges")
    typed = isinstance(batch, HeteroData)
    nodes, edges = (batch.collect(name, allow_empty=True) if typed else batch.get(name) for name in names)
    if not nodes or not edges or (typed and None in edges.values()):
        raise SettingsError(
            "the batch does not say how many nodes and edges came with each hop, so it cannot be trimmed; "
            "sample with subgraph_type='directional', or use the model untrimmed"
        )
    return nodes, edges


def _fitted(counts: Counts | Mapping[AnyType, Counts], length: int) -> Counts | dict[AnyType, Counts]:
    if isinstance(counts, Mapping):
        return {of: _fitted_one(own, length) for of, own in counts.items()}
    return _fitted_one(counts, length)


def _fitted_one(counts: Counts, length: int) -> Counts:
    return [*counts[:length], *[0] * (length - len(counts))]
