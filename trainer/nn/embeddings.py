"""Rows for node types without features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from trainer.core.schema import NodeType


class Embeddings(Protocol):
    """Trainable rows of some node types. An ``nn.Module`` becomes part of the model that uses it and is trained with
    it; anything else (rows sharded over ranks) has to be trained beside it.
    """

    dim: int  #: width of a row

    @property
    def num_nodes(self) -> Mapping[NodeType, int]:
        """The types it has rows for."""

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Mapping[NodeType, Tensor]:
        """Rows of nodes, float32 [n, dim]; n_id: int64 [n] original ids of each type. Called once per batch."""


class LocalEmbeddings(nn.Module):
    """One dense ``nn.Embedding`` per type, for a single process."""

    def __init__(self, num_nodes: Mapping[NodeType, int], dim: int):
        from torch_geometric.nn.module_dict import ModuleDict

        super().__init__()
        self.num_nodes, self.dim = dict(num_nodes), dim
        self.tables = ModuleDict({of: nn.Embedding(count, dim) for of, count in num_nodes.items()})

    def lookup(self, n_id: Mapping[NodeType, Tensor]) -> Mapping[NodeType, Tensor]:
        return {of: self.tables[of](ids) for of, ids in n_id.items()}
