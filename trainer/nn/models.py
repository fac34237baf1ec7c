"""Models by name. A model takes a ``Batch`` (or ``HeteroBatch``) and returns one row of logits per seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from trainer.core.batch import Batch
from trainer.core.errors import DataError, SettingsError
from trainer.nn.graph_facts import GraphFacts
from trainer.nn.kernels.activation import Activation
from trainer.nn.kernels.precision import PRECISIONS, in_own_precision
from trainer.nn.layers import GATConv, GCNConv, SAGEConv
from trainer.nn.sharded_embedding import Embeddings


class ModelSettings(Protocol):
    """What a model needs of the settings; ``TrainSettings`` has it."""

    @property
    def model(self) -> str: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def fanouts(self) -> tuple[int, ...]: ...
    @property
    def seed(self) -> int: ...
    @property
    def precision(self) -> str: ...


def precision_of(settings: ModelSettings) -> torch.dtype:
    """Of dense products."""
    return PRECISIONS[settings.precision]


class BlockModel(nn.Module):
    """One layer per block, with ReLU and dropout in between."""

    def __init__(
        self, layers: Sequence[nn.Module], dropout: float, needs_degree: bool = False,
        precision: torch.dtype = torch.float32,
    ):  # fmt: skip
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = dropout
        self.needs_degree = needs_degree  #: whether batches must carry ``degree``
        self.precision = precision  #: of dense products

    @in_own_precision
    def forward(self, batch: Batch) -> Tensor:
        """Logits, float [num_seeds, num_classes]."""
        assert len(batch.blocks) == len(self.layers), "one block per layer"
        h, before, bias = batch.x, None, None
        layer: Any  # a module with ``without_bias`` and ``bias``
        for number, (layer, block) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            if bias is not None:
                p = self.dropout if self.training else 0.0
                before = Activation(bias, batch.n_id[: len(h)], p, batch.key, number)
            h, bias = layer.without_bias(block, h, batch.degree, before), layer.bias
        assert bias is not None, "a model has layers"
        return h + bias


Builder = Callable[[ModelSettings, int, int], nn.Module]


def sage(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    dims = _dims(settings, in_dim, num_classes)
    return BlockModel([SAGEConv(a, b) for a, b in dims], settings.dropout, precision=precision_of(settings))


def gcn(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    dims = _dims(settings, in_dim, num_classes)
    return BlockModel([GCNConv(a, b) for a, b in dims], settings.dropout, True, precision_of(settings))


def gat(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    """Hidden layers concatenate heads of width hidden / heads; the last one averages them."""
    if settings.hidden % settings.heads:
        raise SettingsError(f"hidden {settings.hidden} is no multiple of heads {settings.heads}; change one of them")
    dims = _dims(settings, in_dim, num_classes)
    hidden = [GATConv(a, b // settings.heads, settings.heads, concat=True) for a, b in dims[:-1]]
    last = GATConv(*dims[-1], settings.heads, concat=False)
    return BlockModel([*hidden, last], settings.dropout, precision=precision_of(settings))


HeteroBuilder = Callable[[ModelSettings, GraphFacts, Embeddings | None], nn.Module]


def _of_types(name: str) -> HeteroBuilder:
    """A builder of ``hetero_models``, imported when it is used: torch_geometric, which it needs, takes seconds."""

    def build(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None) -> nn.Module:
        from trainer.nn.hetero_models import BUILDERS, HeteroShape

        shape = HeteroShape(settings.hidden, len(settings.fanouts), settings.dropout, precision=precision_of(settings))
        return BUILDERS[name](facts, shape, settings.heads, embeddings)

    return build


#: Models of homogeneous graphs by name; a builder takes (settings, in_dim, num_classes).
HOMO_MODELS: dict[str, Builder] = {"sage": sage, "gcn": gcn, "gat": gat}

#: Models of graphs with any number of types.
HETERO_MODELS: dict[str, HeteroBuilder] = {name: _of_types(name) for name in ("rgcn", "hgt", "rsage")}


def build_model(settings: ModelSettings, facts: GraphFacts, embeddings: Embeddings | None = None) -> nn.Module:
    """The model of ``settings.model`` on CPU, with weights drawn from ``settings.seed`` alone.

    ``embeddings``: rows of node types without features; without it such a type has one learnt vector for all
    its nodes. Raises ``SettingsError`` for an unknown name, a model that does not fit the kind of graph, or dimensions
    that do not fit the model, ``DataError`` for a homogeneous graph without features or embeddings.
    """
    _check_kind(settings.model, facts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        if settings.model in HETERO_MODELS:
            return HETERO_MODELS[settings.model](settings, facts, embeddings)
        return HOMO_MODELS[settings.model](settings, _only_width(facts), facts.num_classes)


def _check_kind(model: str, facts: GraphFacts) -> None:
    homo, hetero = ", ".join(HOMO_MODELS), ", ".join(HETERO_MODELS)
    if model not in {**HOMO_MODELS, **HETERO_MODELS}:
        raise SettingsError(f"no model {model!r}; there are {homo}, and for heterogeneous graphs {hetero}")
    if facts.hetero and model in HOMO_MODELS:
        raise SettingsError(f"model {model!r} is for graphs with one node and one edge type; this one takes {hetero}")


def _only_width(facts: GraphFacts) -> int:
    if facts.target not in facts.in_dims:
        raise DataError(f"nodes have no x; of the models only {', '.join(HETERO_MODELS)} do without features")
    return facts.in_dims[facts.target]


def _dims(settings: ModelSettings, in_dim: int, num_classes: int) -> list[tuple[int, int]]:
    dims = [in_dim, *[settings.hidden] * (len(settings.fanouts) - 1), num_classes]
    return list(zip(dims, dims[1:], strict=False))
