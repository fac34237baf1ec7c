"""What one step changes: the model's weights, and the rows of nodes without features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.config import TrainSettings
from trainer.nn.sharded import ShardedEmbedding


@dataclass(frozen=True)
class RowTable:
    """Sharded rows with the optimizer that changes those looked up."""

    embedding: ShardedEmbedding
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Optimizers:
    """All of a run's optimizers; every rank steps equally often."""

    model: torch.optim.Optimizer
    rows: RowTable | None = None  #: None when every node that counts has features

    @classmethod
    def of(cls, settings: TrainSettings, model: nn.Module, embedding: ShardedEmbedding | None) -> Optimizers:
        """Adam for the model, SparseAdam for rows."""
        adam = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        if embedding is None:
            return cls(adam)
        lr = settings.lr if settings.embedding_lr is None else settings.embedding_lr
        return cls(adam, RowTable(embedding, torch.optim.SparseAdam([embedding.weight], lr=lr)))

    def step(self, loss: Tensor) -> None:
        """One update downhill of ``loss``, whose mean over ranks counts."""
        self.model.zero_grad()
        if self.rows is not None:
            self.rows.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.model.step()
        if self.rows is not None:
            self.rows.embedding.sync_gradients()
            self.rows.optimizer.step()
