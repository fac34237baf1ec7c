"""What one step changes: the model's weights, and the rows of nodes without features."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.nn.sharded_embedding import ShardedEmbedding
from trainer.train.settings import TrainSettings

_HIDDEN = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # from torch.compile, by a decorator


def eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """An optimizer of torch's without what hides it from torch.compile, which is never used here.

    Making one and stepping it would import torch._dynamo, which takes as long again as importing torch.
    """
    members = {name: inspect.unwrap(getattr(kind, name)) for name in _HIDDEN}
    return type(kind.__name__, (kind,), {**members, "step": torch.no_grad()(inspect.unwrap(kind.step))})


Adam, SparseAdam = eager(torch.optim.Adam), eager(torch.optim.SparseAdam)


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
    average: Callable[[], None] | None = None  #: makes gradients means over ranks; None: the backward pass does

    @classmethod
    def of(cls, settings: TrainSettings, model: nn.Module, embedding: ShardedEmbedding | None) -> Optimizers:
        """Adam for the model, SparseAdam for rows."""
        adam = Adam(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)  # type: ignore[call-arg]
        if embedding is None:
            return cls(adam)
        lr = settings.lr if settings.embedding_lr is None else settings.embedding_lr
        return cls(adam, RowTable(embedding, SparseAdam([embedding.weight], lr=lr)))  # type: ignore[call-arg]

    def step(self, loss: Tensor) -> None:
        """One update downhill of ``loss``, whose mean over ranks counts."""
        self.model.zero_grad()
        if self.rows is not None:
            self.rows.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.average is not None:
            self.average()
        self.model.step()
        if self.rows is not None:
            self.rows.embedding.sync_gradients()
            self.rows.optimizer.step()
