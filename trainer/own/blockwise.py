"""Runs torch_geometric's models (``BasicGNN``: GraphSAGE, GAT, GIN, PNA, …) layer by layer on the blocks of a batch.

Each layer computes only the rows that later layers read. Sums and means of neighbours' rows are computed by the kernels
of the bundled models where the convolution adds nothing else to an edge.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.nn.models.basic_gnn import BasicGNN

from trainer.core.batch import Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, NodeType
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import LayerNeed
from trainer.nn.kernels.spmm import Reduce, aggregate
from trainer.nn.trim import check_one_hop, cut_to_last

#: Convolutions whose message is the neighbour's row itself.
_PLAIN = (pyg.SAGEConv, pyg.GINConv)


def runs_on_blocks(model: nn.Module) -> bool:
    """Return whether each layer of ``model`` can be run on a block: a ``BasicGNN`` of convolutions over one hop."""
    if not isinstance(model, BasicGNN):
        return False
    try:
        check_one_hop(model)
    except SettingsError:
        return False
    return True


def prepare(model: BasicGNN) -> None:
    """Make ``model`` run on blocks: its argument ``num_sampled_nodes_per_hop`` is then the tuple of blocks."""
    for conv in model.convs:
        if reduce := _reduce(conv):
            conv.propagate = functools.partial(_propagate, conv.propagate, reduce)
    model._trim = _Blocks([*model.convs])
    if isinstance(knowledge := getattr(model, "jk", None), nn.Module):
        knowledge.register_forward_pre_hook(cut_to_last)


def _reduce(conv: Any) -> Reduce | None:
    plain = type(conv) in _PLAIN and conv.flow == "source_to_target" and not conv.decomposed_layers > 1
    reduce: dict[Any, Reduce] = {"mean": "mean", "add": "sum", "sum": "sum"}
    return reduce.get(conv.aggr) if plain and isinstance(conv.aggr, str) else None


def _propagate(other: Callable[..., Tensor], reduce: Reduce, edge_index: Any, **arguments: Any) -> Tensor:
    if not isinstance(edge_index, Block):
        return other(edge_index, **arguments)
    return aggregate(edge_index, arguments["x"][0], reduce)


def _takes_pairs(conv: nn.Module) -> bool:
    """Return whether a convolution takes rows of sources and rows of targets, as a pair."""
    return "Tuple" in str(inspect.signature(conv.forward).parameters["x"].annotation)


class _Blocks(nn.Module):
    """Takes the place of torch_geometric's ``TrimToLayer`` in a ``BasicGNN``."""

    def __init__(self, convs: list[nn.Module]):
        super().__init__()
        self.pairs = [_takes_pairs(conv) for conv in convs]
        self.plain = [_reduce(conv) is not None for conv in convs]

    def forward(self, number: int, blocks: Any, _: Any, x: Tensor, edge_index: Any, value: Any) -> Any:
        """Return rows, edges and edge values of layer ``number``. ``value``: edge values of another layer, or None."""
        block = blocks[number]
        index = block if self.plain[number] else edge_index_of(block)
        attr = None if value is None else block.edge_attr
        if attr is not None and value.dim() == 1:
            attr = attr.flatten()
        return _layer_rows(self.pairs[number], block, x), index, attr


def _layer_rows(pairs: bool, block: Block, x: Tensor) -> Any:
    """Return the input of a layer: rows of sources and of targets, or of all if the convolution takes one tensor."""
    x = x[: block.num_src]
    return (x, x[: block.num_dst]) if pairs else x


def edge_index_of(block: Block) -> Tensor:
    """Return the edges of a block as ``edge_index``, int64 [2, num_edges], in the order of their targets."""
    targets = torch.arange(block.num_dst, device=block.indptr.device)
    counts = block.indptr.diff().long()
    return torch.stack([block.indices.long(), targets.repeat_interleave(counts, output_size=len(block.indices))])


class BlockwiseStack:
    """The layers of a ``BasicGNN`` for inference layer by layer (``LayerStack``)."""

    needs_degree = False

    def __init__(
        self, model: Any, categories: CategoryEmbeddings, rows_of: Callable[[HeteroBatch], Tensor], weight: bool
    ):  # fmt: skip
        """``rows_of``: returns the input rows of a batch. ``weight``: whether edge features are passed as weights."""
        self.model, self.categories, self.rows_of, self.weight = model, categories, rows_of, weight
        self.needs = (LayerNeed((HOMO_NODE,), (HOMO_NODE,), (HOMO_EDGE,)),) * model.num_layers

    def begin(self, batch: HeteroBatch) -> Mapping[NodeType, Tensor]:
        return {HOMO_NODE: self.rows_of(self.categories(batch))}

    def layer(
        self, number: int, blocks: Mapping[Any, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> Mapping[NodeType, Tensor]:  # fmt: skip
        """Compute one layer as ``BasicGNN.forward`` does."""
        model, block = self.model, self.categories.blocks(blocks)[HOMO_EDGE]
        conv, values = model.convs[number], {}
        if block.edge_attr is not None and (model.supports_edge_weight or model.supports_edge_attr):
            values = {"edge_weight": block.edge_attr.flatten()} if self.weight else {"edge_attr": block.edge_attr}
        index = block if _reduce(conv) else edge_index_of(block)
        h = conv(_layer_rows(_takes_pairs(conv), block, rows[HOMO_NODE]), index, **values)[: block.num_dst]
        if number < model.num_layers - 1:
            act = model.act or nn.Identity()
            h = model.norms[number](act(h)) if model.act_first else act(model.norms[number](h))
        return {HOMO_NODE: h}
