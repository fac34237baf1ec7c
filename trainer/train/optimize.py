"""One optimizer step: the model's weights and the rows of nodes without features; gradients as means over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.ranks import RankGroup
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


#: Values of a model up to which DistributedDataParallel exchanges its gradients in one go at the end of the backward
#: pass: its first bucket is one MiB.
SMALL = (1 << 20) // 4


class MeanGradients:
    """A small model's gradients made means over ranks in one exchange, after each backward pass.

    DistributedDataParallel does the same with such a model, in the same order of sums where there are two ranks, and
    imports torch._dynamo for it, which takes as long again as importing torch. Every rank begins with rank 0's weights.
    """

    def __init__(self, model: nn.Module, size: int):
        self._weights, self._size = list(model.parameters()), size
        values = torch.cat([weight.detach().reshape(-1) for weight in self._weights])
        dist.broadcast(values, 0)
        with torch.no_grad():
            for weight, first in zip(self._weights, self._split(values), strict=True):
                weight.copy_(first)

    def __call__(self) -> None:
        """After ``backward``; raises ``RuntimeError`` when another rank is lost."""
        own = [torch.zeros_like(w) if w.grad is None else w.grad for w in self._weights]
        flat = torch.cat([gradient.reshape(-1) for gradient in own]).mul_(1 / self._size)
        dist.all_reduce(flat)
        for weight, mean in zip(self._weights, self._split(flat), strict=True):
            weight.grad = mean

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """By weight, in its shape."""
        parts = flat.split([weight.numel() for weight in self._weights])
        return [part.view_as(weight) for part, weight in zip(parts, self._weights, strict=True)]


def averaged(model: nn.Module, group: RankGroup) -> tuple[nn.Module, Callable[[], None] | None]:
    """The model to train, and what makes its gradients means over ranks after each backward pass; None: that pass does.

    All ranks call this.
    """
    if group.size == 1:
        return model, None
    looks = group.gather(_look(model))
    if looks[0] and looks == [looks[0]] * group.size:
        return model, MeanGradients(model, group.size)
    from torch.nn.parallel import DistributedDataParallel  # says what differs between ranks

    return DistributedDataParallel(model, process_group=group.gradients, find_unused_parameters=False), None


def _look(model: nn.Module) -> list[tuple[int, ...]]:
    """Shapes of the weights; [] of a model that is large, has buffers, or is not float32 on the CPU."""
    weights = list(model.parameters())
    small = sum(weight.numel() for weight in weights) <= SMALL and not list(model.buffers())
    plain = all(w.requires_grad and w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    return [tuple(weight.shape) for weight in weights] if small and plain else []
