"""Heterogeneous models: input rows for each node type, layers on blocks, and an output layer for the seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.nn.parameter_dict import ParameterDict

from trainer.core.batch import AnyBatch, Block, HeteroBatch
from trainer.core.errors import SettingsError
from trainer.core.schema import EdgeType, NodeType, node_salt
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import GraphFacts, LayerNeed, layer_needs
from trainer.nn.hetero_layers import HeteroSAGEConv, HGTConv, NodeTensors, RGCNConv
from trainer.nn.kernels.activation import FUNCTIONS
from trainer.nn.kernels.dropout import hash_dropout
from trainer.nn.kernels.precision import in_own_precision, product_dtype
from trainer.nn.sharded_embedding import Embeddings


@dataclass(frozen=True)
class HeteroShape:
    hidden: int  #: width of all rows but the logits
    num_layers: int
    dropout: float = 0.0
    activation: str | None = "relu"  #: name of the function after each layer; None: HGT layers have their own
    precision: torch.dtype = torch.float32  #: dtype of dense products
    input_dropout: float = 0.0  #: dropout probability of features

    def activated(self, rows: Mapping[NodeType, Tensor]) -> dict[NodeType, Tensor]:
        return {of: h if self.activation is None else FUNCTIONS[self.activation](h) for of, h in rows.items()}


_AGES = (0.25, 0.5, 1.0, 2.0, 4.0)  #: frequencies of ``_age_features``


def _age_features(age: Tensor) -> Tensor:
    """Return features of ages [n], in any unit, for a linear layer: float32 [n, 11], of the logarithm of the age."""
    log = age.clamp(min=0).log1p()
    waves = log[:, None] * torch.tensor(_AGES, device=age.device)
    return torch.cat([log[:, None] / 20, waves.sin(), waves.cos()], 1)


class InputRows(nn.Module):
    """Input rows [n, hidden] of each node type: ``relu(linear(x))``, plus the nodes' embedding rows if there are any.

    Types of ``facts.timed`` also get a linear map of features of the ages. All nodes of a type without features and
    embeddings get the same vector.
    """

    def __init__(self, facts: GraphFacts, types: tuple[NodeType, ...], hidden: int, embeddings: Embeddings | None):
        super().__init__()
        featured = [of for of in types if of in facts.in_dims]
        known = () if embeddings is None else embeddings.num_nodes
        self.embedded = tuple(of for of in types if of in known)
        self.lins = ModuleDict({of: nn.Linear(facts.in_dims[of], hidden) for of in featured})
        alone = [of for of in types if of not in facts.in_dims and of not in self.embedded]
        self.vectors = ParameterDict({of: nn.Parameter(torch.randn(1, hidden)) for of in alone})
        if self.embedded and embeddings is not None and embeddings.dim != hidden:
            raise SettingsError(f"embeddings are {embeddings.dim} wide, hidden rows {hidden}; make them equal")
        self.embeddings = embeddings if self.embedded else None
        width = 1 + 2 * len(_AGES)
        self.timed = tuple(of for of in types if of in facts.timed)
        self.ages = ModuleDict({of: nn.Linear(width, hidden, bias=False) for of in self.timed})

    def forward(self, batch: HeteroBatch) -> NodeTensors:
        rows = {of: lin(batch.x[of]).relu() for of, lin in self.lins.items()}
        rows |= {of: vector.expand(len(batch.n_id[of]), -1) for of, vector in self.vectors.items()}
        if self.embeddings is not None:
            found = self.embeddings.lookup({of: batch.n_id[of] for of in self.embedded})
            rows |= {of: rows[of] + own if of in rows else own for of, own in found.items()}
        for of, lin in self.ages.items():
            rows[of] = rows[of] + lin(_age_features(batch.age[of]))
        return rows


class HeteroModel(nn.Module):
    """Model with ``InputRows``, one layer per hop, and a linear output layer for the seeds."""

    needs_degree = False

    def __init__(
        self, facts: GraphFacts, shape: HeteroShape, make_layer: Callable[[LayerNeed], nn.Module],
        embeddings: Embeddings | None = None,
    ):  # fmt: skip
        super().__init__()
        self.target, self.targets, self.shape, self.precision = facts.target, facts.targets, shape, shape.precision
        needs = layer_needs(facts.node_types, facts.edge_types, facts.targets, shape.num_layers)
        self.inputs = InputRows(facts, needs[0].sources, shape.hidden, embeddings)
        self.timed = self.inputs.timed  #: node types of which batches must have ``age``
        # If no edge type ends in the target, no layer has an input, and the model has no layers.
        with_edges = tuple(need for need in needs if need.edge_types)
        self.layers = nn.ModuleList(make_layer(need) for need in with_edges)
        self.needs = with_edges or (LayerNeed(facts.targets, facts.targets, ()),)
        self.head = nn.Linear(shape.hidden, facts.num_classes) if facts.num_classes else nn.Identity()
        read = {*needs[0].sources, *needs[0].edge_types}
        self.categories = CategoryEmbeddings({of: some for of, some in facts.categories.items() if of in read})

    def forward(self, batch: AnyBatch) -> Tensor:
        """Return logits, float [num_seeds, num_classes]."""
        return self.head(self.embed(batch))  # type: ignore[no-any-return]

    def embed(self, batch: AnyBatch) -> Tensor:
        """Return the seeds' rows before the output layer, float [num_seeds, hidden]."""
        return self.seed_rows(batch)[self.target][: batch.num_seeds]

    @in_own_precision
    def seed_rows(self, batch: AnyBatch) -> NodeTensors:
        """Return the rows of the seed nodes before the output layer, for each of ``targets``: float [n, hidden]."""
        typed = self.categories(batch.typed())
        assert len(typed.blocks) == self.shape.num_layers, "one block per layer"
        if self.shape.input_dropout:
            x = self._dropped(typed.x, typed, self.shape.num_layers + 1, self.shape.input_dropout)
            typed = replace(typed, x=x)
        rows = self._dropped(self.inputs(typed), typed, 0, self.shape.dropout)
        for number, (layer, blocks) in enumerate(zip(self.layers, typed.blocks, strict=False), start=1):
            hop = self.shape.num_layers - number
            rows = layer(blocks, rows, {of: counts[hop] for of, counts in typed.num_nodes.items()})
            rows = self._dropped(self.shape.activated(rows), typed, number, self.shape.dropout)
        return {of: rows[of][: typed.num_nodes[of][0]] for of in self.targets}

    def begin(self, batch: HeteroBatch) -> NodeTensors:
        return self.inputs(self.categories(batch))  # type: ignore[no-any-return]

    def layer(
        self, number: int, blocks: Mapping[EdgeType, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> NodeTensors:  # fmt: skip
        """Compute layer ``number`` of inference layer by layer (``LayerStack``)."""
        if number < len(self.layers):
            rows = self.shape.activated(self.layers[number](self.categories.blocks(blocks), rows, num_dst))
        if number + 1 < len(self.needs):
            return dict(rows)
        return {of: self.head(rows[of]) for of in self.targets}

    def _dropped(self, rows: Mapping[NodeType, Tensor], batch: HeteroBatch, number: int, p: float) -> NodeTensors:
        # The masks depend on node type and original id, and therefore not on the number of ranks.
        return {
            of: hash_dropout(
                h.to(product_dtype(h)), batch.n_id[of][: len(h)], p, batch.key ^ node_salt(of), number, self.training
            )
            for of, h in rows.items()
        }


def widths(need: LayerNeed, hidden: int) -> Mapping[NodeType, int]:
    return dict.fromkeys(need.sources, hidden)


def rgcn(facts: GraphFacts, shape: HeteroShape, heads: int, embeddings: Embeddings | None) -> HeteroModel:
    """Build an R-GCN model. ``heads`` is ignored."""
    return HeteroModel(facts, shape, lambda need: RGCNConv(need, shape.hidden, shape.hidden), embeddings)


def hgt(facts: GraphFacts, shape: HeteroShape, heads: int, embeddings: Embeddings | None) -> HeteroModel:
    """Build an HGT model. As in the paper, layers have skip connections, and no ReLU follows them."""
    layer = lambda need: HGTConv(need, widths(need, shape.hidden), shape.hidden, heads)  # noqa: E731
    return HeteroModel(facts, replace(shape, activation=None), layer, embeddings)


def rsage(facts: GraphFacts, shape: HeteroShape, heads: int, embeddings: Embeddings | None) -> HeteroModel:
    """Build a model of one GraphSAGE layer per hop and edge type. ``heads`` is ignored."""
    layer = lambda need: HeteroSAGEConv(need, shape.hidden, shape.hidden, edge_dims=facts.edge_dims)  # noqa: E731
    return HeteroModel(facts, shape, layer, embeddings)


#: Models by name; a builder takes (facts, shape, heads, embeddings).
BUILDERS = {"rgcn": rgcn, "hgt": hgt, "rsage": rsage}
