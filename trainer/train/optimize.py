"""Optimizers of the model's weights and of embedding rows, with gradients averaged over ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup
from trainer.nn.sharded_embedding import ShardedEmbedding
from trainer.train.settings import TrainSettings

_HIDDEN = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # decorated by torch for torch.compile


def eager(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    # Methods with these decorators import torch._dynamo, which takes as long as importing torch.
    members = {name: inspect.unwrap(getattr(kind, name)) for name in _HIDDEN}
    return type(kind.__name__, (kind,), {**members, "step": torch.no_grad()(inspect.unwrap(kind.step))})


SparseAdam = eager(torch.optim.SparseAdam)


@dataclass(frozen=True)
class _RowTable:
    embedding: ShardedEmbedding
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of a run. ``step`` is collective."""

    model: torch.optim.Optimizer
    rows: _RowTable | None = None  #: None when all reached node types have features
    average: Callable[[], None] | None = None  #: averages gradients over ranks; None if the backward pass averages them
    clip: float | None = None  #: largest norm of the averaged gradient of the model's weights

    @classmethod
    def of(cls, settings: TrainSettings, model: nn.Module, embedding: ShardedEmbedding | None) -> Optimizers:
        optimizer = optimizer_of([*model.parameters()], settings)
        if embedding is None:
            return cls(optimizer, clip=settings.clip)
        lr = settings.lr if settings.embedding_lr is None else settings.embedding_lr
        rows = _RowTable(embedding, SparseAdam([embedding.weight], lr=lr))  # type: ignore[call-arg]
        return cls(optimizer, rows, clip=settings.clip)

    @property
    def lr(self) -> float:
        """The learning rate of the model's weights."""
        return float(self.model.param_groups[0]["lr"])

    def set_rates(self, share: float) -> None:
        """Set each learning rate to a share of its initial value, which a checkpoint holds, too."""
        for optimizer in (self.model, *([self.rows.optimizer] if self.rows else [])):
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * share

    def step(self, loss: Tensor) -> None:
        self.model.zero_grad()
        if self.rows is not None:
            self.rows.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.average is not None:
            self.average()
        if self.clip is not None:
            weights = [weight for group in self.model.param_groups for weight in group["params"]]
            nn.utils.clip_grad_norm_(weights, self.clip)
        self.model.step()
        if self.rows is not None:
            self.rows.embedding.sync_gradients()
            self.rows.optimizer.step()


def optimizer_of(weights: Sequence[Tensor], settings: TrainSettings) -> torch.optim.Optimizer:
    """Return the optimizer of ``settings`` for ``weights``.

    On a GPU, Adam, AdamW and SGD update all weights by one kernel (``fused``), not by several for each. A loaded state
    does not change this: state that was saved on a CPU continues on a GPU, and the other way round. Raises
    ``SettingsError`` for arguments that the optimizer refuses.
    """
    given = settings.optimizer or {"name": "Adam"}
    arguments: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in given.items()}
    name = arguments.pop("name")
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    arguments |= {"lr": settings.lr} | ({} if name == "Rprop" else {"weight_decay": settings.weight_decay})
    if name in ("Adam", "AdamW", "SGD"):
        arguments["fused"] = True if on_gpu(weights) else None
    try:
        optimizer = eager(kind)([{"params": [*weights]}], **arguments)  # a LightGCN has no weights
    except (TypeError, ValueError, IndexError) as error:
        raise SettingsError(f"optimizer {name}: {error}") from None
    if "fused" in arguments:
        optimizer.register_load_state_dict_pre_hook(_keep_fused)
    return optimizer


def on_gpu(weights: Sequence[Tensor]) -> bool:
    return bool(weights) and all(weight.is_cuda and weight.is_floating_point() for weight in weights)


def _keep_fused(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    own = [group["fused"] for group in optimizer.param_groups]
    groups = [{**group, "fused": fused} for group, fused in zip(state["param_groups"], own, strict=False)]
    return {**state, "param_groups": groups}


#: Largest number of weights for which DistributedDataParallel uses a single all-reduce, at the end of the backward
#: pass: its first bucket is 1 MiB.
SMALL = (1 << 20) // 4


class MeanGradients:
    """Averages gradients over ranks after each backward pass: one all-reduce, or one per dtype.

    For small models it replaces DistributedDataParallel, which imports torch._dynamo and so doubles the time to start.
    The constructor copies rank 0's weights to all ranks. ``group``: process group; None: the default one.
    """

    def __init__(self, weights: Iterable[Tensor], size: int, group: Any = None):
        self.weights, self._size, self._group = list(weights), size, group
        with torch.no_grad():
            for same in _by_dtype(weight.detach() for weight in self.weights):
                flat = torch.cat([weight.reshape(-1) for weight in same])
                dist.broadcast(flat, 0, group=group)
                for weight, first in zip(same, _split(flat, same), strict=True):
                    weight.copy_(first)

    def __call__(self, *more: Tensor) -> None:
        """Average the gradients, and the tensors ``more`` in place, over ranks. Collective.

        A missing gradient counts as zero. Raises ``RuntimeError`` when another rank is lost.
        """
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        targets = [*(weight.grad for weight in self.weights if weight.grad is not None), *more]
        for same in _by_dtype(targets):
            flat = torch.cat([one.reshape(-1) for one in same]).mul_(1 / self._size)
            dist.all_reduce(flat, group=self._group)
            for one, mean in zip(same, _split(flat, same), strict=True):
                one.data = mean


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


def _split(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector into tensors with the shapes of ``like``."""
    return [part.view_as(one) for part, one in zip(flat.split([one.numel() for one in like]), like, strict=True)]


def averaged(model: nn.Module, group: RankGroup) -> tuple[nn.Module, Callable[[], None] | None]:
    """Make a model average its gradients over ranks. Collective.

    Returns the model to train, and a function to call after each backward pass, or None if none is needed.
    """
    if group.size == 1 or not any(True for _ in model.parameters()):
        return model, None
    weights = list(model.parameters())
    small = sum(weight.numel() for weight in weights) <= SMALL and not list(model.buffers())
    plain = all(w.requires_grad and w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    # [] for a model that ``MeanGradients`` does not support.
    shapes = group.gather([tuple(weight.shape) for weight in weights] if small and plain else [])
    if shapes[0] and shapes == [shapes[0]] * group.size:
        return model, MeanGradients(weights, group.size)
    from torch.nn.parallel import DistributedDataParallel  # it also reports differences between ranks

    unused = any(getattr(module, "unused", None) for module in model.modules())  # of a model class of the user
    return DistributedDataParallel(model, process_group=group.gradients, find_unused_parameters=unused), None
