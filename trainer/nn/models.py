"""The bundled trainer's models, built by name. A model maps a ``Batch`` or ``HeteroBatch`` to logits of its seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.core.batch import Batch, Block, HeteroBatch
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType
from trainer.core.train_config import EDGE_MODELS
from trainer.nn.categories import CategoryEmbeddings
from trainer.nn.graph_facts import GraphFacts, LayerNeed
from trainer.nn.kernels.activation import FUNCTIONS, Activation
from trainer.nn.kernels.dropout import hash_dropout
from trainer.nn.kernels.precision import PRECISIONS, in_own_precision
from trainer.nn.layers import EdgeDraw, GATConv, GCNConv, SAGEConv
from trainer.nn.sharded_embedding import Embeddings


class ModelSettings(Protocol):
    """Settings from which a model is built. ``TrainSettings`` implements this protocol."""

    @property
    def model(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def output_heads(self) -> int | None: ...
    @property
    def activation(self) -> str: ...
    @property
    def dropout(self) -> float: ...
    @property
    def input_dropout(self) -> float: ...
    @property
    def attention_dropout(self) -> float: ...
    @property
    def fanouts(self) -> tuple[int, ...]: ...
    @property
    def layers(self) -> int | None: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def decoder(self) -> str: ...


def _precision_of(settings: ModelSettings) -> torch.dtype:
    return PRECISIONS[settings.precision]


class BlockModel(nn.Module):
    """Model of a homogeneous graph: one layer per block, with an activation function and dropout in between."""

    def __init__(
        self, layers: Sequence[nn.Module], dropout: float, needs_degree: bool = False,
        precision: torch.dtype = torch.float32, activation: str = "relu", input_dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.needs = (LayerNeed((HOMO_NODE,), (HOMO_NODE,), (HOMO_EDGE,)),) * len(layers)
        self.dropout, self.input_dropout = dropout, input_dropout
        self.activation = activation  #: name of the function between layers, in ``FUNCTIONS``
        self.needs_degree = needs_degree  #: whether batches must have ``degree``
        self.precision = precision  #: dtype of dense products
        self.categories = CategoryEmbeddings({})

    @in_own_precision
    def forward(self, batch: Batch) -> Tensor:
        """Return logits, float [num_seeds, num_classes]."""
        assert len(batch.blocks) == len(self.layers), "one block per layer"
        batch = self.categories(batch)
        h = hash_dropout(batch.x, batch.n_id, self.input_dropout, batch.key, 0, self.training)
        before, bias = None, None
        layer: Any  # a module with ``without_bias`` and ``bias``
        for number, (layer, block) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            if bias is not None:
                p = self.dropout if self.training else 0.0
                before = Activation(bias, batch.n_id[: len(h)], p, batch.key, number, self.activation)
            draw = {"draw": EdgeDraw(batch.n_id, batch.key, number)} if isinstance(layer, GATConv) else {}
            h, bias = layer.without_bias(block, h, batch.degree, before, **draw), layer.bias
        assert bias is not None, "a model has layers"
        return h + bias

    def seed_rows(self, batch: Batch) -> dict[NodeType, Tensor]:
        return {HOMO_NODE: self(batch)}

    def begin(self, batch: HeteroBatch) -> Mapping[NodeType, Tensor]:
        return {HOMO_NODE: self.categories(batch).x[HOMO_NODE]}

    def layer(
        self, number: int, blocks: Mapping[EdgeType, Block], rows: Mapping[NodeType, Tensor],
        num_dst: Mapping[NodeType, int], degree: Mapping[NodeType, Tensor],
    ) -> dict[NodeType, Tensor]:  # fmt: skip
        """Compute layer ``number`` of inference layer by layer (``LayerStack``)."""
        block = self.categories.blocks(blocks)[HOMO_EDGE]
        h = self.layers[number](block, rows[HOMO_NODE], degree.get(HOMO_NODE))
        return {HOMO_NODE: h if number + 1 == len(self.layers) else FUNCTIONS[self.activation](h)}


_Builder = Callable[[ModelSettings, int, int, int], nn.Module]


def sage(settings: ModelSettings, in_dim: int, num_classes: int, edge_dim: int = 0) -> nn.Module:
    """Build a GraphSAGE model. ``edge_dim``: width of the edge features that the layers read; 0: none."""
    dims = _dims(settings, in_dim, num_classes)
    return _block_model(settings, [SAGEConv(a, b, edge_dim) for a, b in dims])


def gcn(settings: ModelSettings, in_dim: int, num_classes: int, edge_dim: int = 0) -> nn.Module:
    dims = _dims(settings, in_dim, num_classes)
    return _block_model(settings, [GCNConv(a, b) for a, b in dims], needs_degree=True)


def gat(settings: ModelSettings, in_dim: int, num_classes: int, edge_dim: int = 0) -> nn.Module:
    """Build a graph attention network.

    Hidden layers concatenate heads of width hidden / heads; the last layer averages its heads, ``output_heads`` or as
    many as hidden layers have.
    """
    if settings.hidden % settings.heads:
        raise SettingsError(f"hidden {settings.hidden} is no multiple of heads {settings.heads}; change one of them")
    dims = _dims(settings, in_dim, num_classes)
    heads, p = settings.heads, settings.attention_dropout
    hidden = [GATConv(a, b // heads, heads, concat=True, dropout=p) for a, b in dims[:-1]]
    return _block_model(settings, [*hidden, GATConv(*dims[-1], settings.output_heads or heads, False, dropout=p)])


def _block_model(settings: ModelSettings, layers: Sequence[nn.Module], needs_degree: bool = False) -> BlockModel:
    return BlockModel(
        layers, settings.dropout, needs_degree, _precision_of(settings), settings.activation, settings.input_dropout
    )


_HeteroBuilder = Callable[[ModelSettings, GraphFacts, Embeddings | None], nn.Module]


def _of_types(name: str) -> _HeteroBuilder:
    # The import takes seconds, so the builder imports when it is called.
    def build(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
        from trainer.nn.hetero_models import BUILDERS, HeteroShape
        from trainer.nn.lightgcn import lightgcn, node_rows

        shape = HeteroShape(
            settings.hidden, len(settings.fanouts), settings.dropout, settings.activation, _precision_of(settings),
            settings.input_dropout,
        )  # fmt: skip
        return {**BUILDERS, "lightgcn": lightgcn, "embedding": node_rows}[name](
            facts, shape, settings.heads, embeddings
        )

    return build


def token_transformer(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
    from trainer.nn.hetero_models import HeteroShape  # the import takes seconds
    from trainer.nn.token_transformer import TokenModel

    shape = HeteroShape(
        settings.hidden, len(settings.fanouts), settings.dropout, None, _precision_of(settings), settings.input_dropout
    )  # fmt: skip
    return TokenModel(facts, shape, settings.heads, settings.layers or 2, settings.max_tokens, embeddings)


#: Models of homogeneous graphs by name; a builder takes (settings, in_dim, num_classes, edge_dim).
HOMO_MODELS: dict[str, _Builder] = {"sage": sage, "gcn": gcn, "gat": gat}

#: Models of graphs with any number of types, by name; a builder takes (settings, facts, embeddings).
HETERO_MODELS: dict[str, _HeteroBuilder] = {
    name: _of_types(name) for name in ("rgcn", "hgt", "rsage", "lightgcn", "embedding")
}
HETERO_MODELS["token-transformer"] = token_transformer


def build_model(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None = None) -> nn.Module:
    """Build the bundled trainer's model ``settings.model`` on CPU.

    Initial weights depend on ``settings.seed`` only.

    Args:
        settings: Model name, width, heads, dropout, fanouts (one layer per fanout), seed and precision; a
            ``TrainSettings``.
        facts: The graph's types, feature widths and number of classes.
        embeddings: Trainable rows of some node types, for heterogeneous models; added to the rows computed from
            features. Default: one learnt vector per node type without features.

    Returns:
        A module that maps a batch of ``BatchLoader`` to logits, float [num_seeds, num_classes].

    Raises:
        SettingsError: If the model is unknown, is for another kind of graph, or does not fit the widths.
        DataError: If the model needs features and the graph has none.

    Example:
        ```python
        import gnnfleet as gf

        graph = gf.open("parts")
        settings = gf.TrainSettings(model="sage", fanouts=(10, 5), hidden=64)
        model = gf.nn.build_model(settings, gf.nn.facts_of(graph.manifest))
        loading = gf.LoaderSettings("train", fanouts=(10, 5), global_batch=512)
        batch = next(gf.BatchLoader(graph, loading, 0, graph.layout).epoch(0))
        logits = model(batch)  # [512, num_classes]
        ```
    """
    name, homo, hetero = settings.model, ", ".join(HOMO_MODELS), ", ".join(HETERO_MODELS)
    if name not in {**HOMO_MODELS, **HETERO_MODELS}:
        raise SettingsError(f"unknown model {name!r}; the models are {homo}, and for heterogeneous graphs {hetero}")
    if facts.hetero and name in HOMO_MODELS:
        raise SettingsError(f"model {name!r} is for homogeneous graphs, and this one is heterogeneous; use {hetero}")
    if facts.edge_dims and name not in EDGE_MODELS:
        raise SettingsError(f"edge_attr: model {name!r} does not read edge features; use {' or '.join(EDGE_MODELS)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.model in HETERO_MODELS:
            return HETERO_MODELS[settings.model](settings, facts, embeddings)
        (edge_dim,) = facts.edge_dims.values() or (0,)
        if facts.target not in facts.in_dims:
            raise DataError(f"nodes have no x; only the models {', '.join(HETERO_MODELS)} work without features")
        model = HOMO_MODELS[settings.model](settings, facts.in_dims[facts.target], facts.num_classes, edge_dim)
        model.categories = CategoryEmbeddings(facts.categories)
        return model


def _dims(settings: ModelSettings, in_dim: int, num_classes: int) -> list[tuple[int, int]]:
    dims = [in_dim, *[settings.hidden] * (len(settings.fanouts) - 1), num_classes]
    return list(zip(dims, dims[1:], strict=False))
