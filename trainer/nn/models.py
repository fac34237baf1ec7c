"""Models by name. A model takes a ``Batch`` and returns one row of logits per seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from trainer.batch import Batch
from trainer.errors import SettingsError
from trainer.nn.dropout import hash_dropout
from trainer.nn.layers import GATConv, GCNConv, SAGEConv


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


class BlockModel(nn.Module):
    """One layer per block, with ReLU and dropout in between."""

    def __init__(self, layers: Sequence[nn.Module], dropout: float, needs_degree: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = dropout
        self.needs_degree = needs_degree  #: whether batches must carry ``degree``

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float [num_seeds, num_classes]."""
        assert len(batch.blocks) == len(self.layers), "one block per layer"
        h = batch.x
        for number, (layer, block) in enumerate(zip(self.layers, batch.blocks, strict=True)):
            if number > 0:
                h = hash_dropout(h.relu(), batch.n_id[: len(h)], self.dropout, batch.key, number, self.training)
            h = layer(block, h, batch.degree)
        return h


Builder = Callable[[ModelSettings, int, int], nn.Module]


def sage(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    dims = _dims(settings, in_dim, num_classes)
    return BlockModel([SAGEConv(a, b) for a, b in dims], settings.dropout)


def gcn(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    dims = _dims(settings, in_dim, num_classes)
    return BlockModel([GCNConv(a, b) for a, b in dims], settings.dropout, needs_degree=True)


def gat(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    """Hidden layers concatenate heads of width hidden / heads; the last one averages them."""
    if settings.hidden % settings.heads:
        raise SettingsError(f"hidden {settings.hidden} is no multiple of heads {settings.heads}; change one of them")
    dims = _dims(settings, in_dim, num_classes)
    hidden = [GATConv(a, b // settings.heads, settings.heads, concat=True) for a, b in dims[:-1]]
    return BlockModel([*hidden, GATConv(*dims[-1], settings.heads, concat=False)], settings.dropout)


#: Models by name; a builder takes (settings, in_dim, num_classes).
MODELS: dict[str, Builder] = {"sage": sage, "gcn": gcn, "gat": gat}


def build_model(settings: ModelSettings, in_dim: int, num_classes: int) -> nn.Module:
    """The model of ``settings.model`` on CPU, with weights drawn from ``settings.seed`` alone.

    Raises ``SettingsError`` for an unknown name or dimensions that do not fit it.
    """
    if settings.model not in MODELS:
        raise SettingsError(f"no model {settings.model!r}; there are {', '.join(sorted(MODELS))}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return MODELS[settings.model](settings, in_dim, num_classes)


def _dims(settings: ModelSettings, in_dim: int, num_classes: int) -> list[tuple[int, int]]:
    widths = [in_dim, *[settings.hidden] * (len(settings.fanouts) - 1), num_classes]
    return list(zip(widths, widths[1:], strict=False))
