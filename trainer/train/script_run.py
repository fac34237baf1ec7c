"""``gnnfleet.run``: all that a script needs besides its model and its loop, on any number of ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.parameter import is_lazy

from trainer.core.errors import SettingsError
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.core.rng import batch_key
from trainer.core.waits import report_uncaught
from trainer.graph.environment import open_any
from trainer.graph.open import Graph
from trainer.loader.pyg_loader import RankLoader
from trainer.nn.sharded_embedding import ShardedEmbedding, gather_tables
from trainer.own.dropout import BatchDropout
from trainer.train.checkpoint_writer import cpu_copy
from trainer.train.optimize import MeanGradients
from trainer.train.script_checkpoint import Stateful
from trainer.train.steplog import StepLog

Model = TypeVar("Model", bound=nn.Module)


@contextmanager
def run(
    parts: str | Path | None = None, *, seed: int = 0, timeout: float = 600.0, checkpoint_seconds: float = 60.0
) -> Iterator[Run]:  # fmt: skip
    """Begin a training run of a script, and end it after the ``with`` block.

    The same script runs alone, under torchrun and under the launcher. All ranks join a process group, open the graph
    and set torch's random seed. At the end of the block they wait for each other, close the graph and leave the group.
    After an exception a rank waits for nobody, and the others end with an error in their next collective call, which
    the launcher does not take for the cause. A process can have one run.

    Args:
        parts: Partition folder; in a run of the launcher that of the run is opened instead.
        seed: Seed of torch's random numbers: initial weights, and dropout in each step. Loaders have their own.
        timeout: Seconds that a rank waits for the others in a collective call.
        checkpoint_seconds: Seconds between checkpoints within an epoch; 0: only after epochs.

    Yields:
        The run: graph, device, epochs, steps and scores.

    Raises:
        SettingsError: ``parts`` is missing and no launcher gives it, or there is a process group already.
        PartitionError: The partition is missing or damaged on any rank.
        ServiceError: Another host does not answer.

    Example:
        ```python
        import torch
        import gnnfleet as gf

        with gf.run("parts") as run:
            model = run.model(torch.nn.Linear(run.graph.num_features, run.graph.num_classes))
            optimizer = torch.optim.Adam(model.parameters())
            train = gf.DistNeighborLoader(run.graph, [5], "train", batch_size=64, shuffle=True)
            for epoch in run.epochs(2, optimizer=optimizer):
                for batch in run.train(train):
                    seeds = batch.batch_size
                    loss = torch.nn.functional.cross_entropy(model(batch.x[:seeds]), batch.y[:seeds])
                    optimizer.zero_grad()
                    run.backward(loss)
                    optimizer.step()
        ```
    """
    report_uncaught()
    if dist.is_available() and dist.is_initialized():
        raise SettingsError("gnnfleet.run makes the process group itself; leave out init_process_group")
    ranks = Ranks.from_env(os.environ)
    device, alone = pick_device(ranks), ranks.world_size == 1
    if alone:  # for calls of torch.distributed in the script
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with join_ranks(ranks, device, "auto", timeout) as group:
            given = "GNNFLEET_CLUSTER" in os.environ  # by the launcher
            with group.agree(lambda: open_any(None if given else parts)) as graph:
                torch.manual_seed(seed)
                began = Run(graph, group, seed, checkpoint_seconds)
                yield began
                began._end()
                group.barrier()  # keeps the graph server of this node running until the slowest rank is done
    finally:
        if alone:
            dist.destroy_process_group()


class Run:
    """A training run of a script, from ``gnnfleet.run``. All ranks must call its methods in the same order.

    Attributes:
        graph: The opened graph.
        group: All ranks, with collective calls such as ``run.group.sum(tensor)``.
        device: Device of this rank: a GPU if the node has one for each of its processes, else the CPU.
        epoch: Number of the current epoch, from 1.
        loss: Mean loss over all seeds of the epoch, on all ranks; set when the loop over ``train`` ends.
        scores: Mean of each name that ``score`` was called with, over the seeds of all ranks; set when the loop over
            ``evaluate`` ends.
    """

    def __init__(self, graph: Graph, group: RankGroup, seed: int, checkpoint_seconds: float):
        self.graph, self.group, self.device = graph, group, group.device
        self.epoch, self.loss = 0, float("nan")
        self.scores: dict[str, float] = {}
        self._seed, self._checkpoint_seconds = seed, checkpoint_seconds
        self._models: dict[str, nn.Module] = {}
        self._rows: dict[str, ShardedEmbedding] = {}
        self._best_rows: dict[str, ShardedEmbedding] = {}  #: rows of the best epoch
        self._mean: MeanGradients | None = None  #: None with one rank
        self._log: StepLog | None = None  #: None before ``epochs``
        self._metric = "accuracy"  #: name of the scores
        self._progress = _Progress()
        self._first_step: int | None = None  #: where ``train`` begins in this epoch; None if it has begun
        self._loader: RankLoader | None = None  #: the loader of the current batch
        self._losses: list[Tensor] = []  #: results of ``backward`` in the current step
        self._sums: dict[str, tuple[Tensor | float, int]] = {}  #: sum and number of this rank's values, by score

    @property
    def rank(self) -> int:
        """Rank of this process, from 0."""
        return self.group.rank

    @property
    def output(self) -> Path:
        """Folder for files of the script, which exists: ``output``, which the launcher collects into ``runs/RUN``."""
        path = Path(os.environ.get("GNNFLEET_RUN_DIR", "."), "output")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def print(self, text: str) -> None:
        """Print a line on the first rank."""
        if self.rank == 0:
            print(text, flush=True)

    def model(self, module: Model, name: str = "model") -> Model:
        """Move a module to the device, and train it on all ranks: ``backward`` averages its gradients.

        It starts with the first rank's weights, and needs no ``DistributedDataParallel``. Call this before the
        optimizer is made, once for each module that is trained.

        Args:
            name: Name of the module in checkpoints. The first module is called ``model``.

        Returns:
            The module itself.

        Raises:
            SettingsError: The module has weights without a shape, or the name is taken.
        """
        if any(is_lazy(weight) for weight in (*module.parameters(), *module.buffers())):
            raise SettingsError(
                f"{type(module).__name__} has weights without a shape, which each rank would draw for itself; give all"
                " widths, or call the module on a batch before run.model"
            )
        if name in self._models or self._log is not None:
            why = "the run has a module of this name; pass name=" if name in self._models else "the epochs have begun"
            raise SettingsError(f"run.model, name {name!r}: {why}")
        self._models[name] = module.to(self.device)
        if self.group.size > 1:
            self._mean = MeanGradients(self._all_weights(), self.group.size, self.group.gradients)
        return module

    def epochs(
        self, epochs: int, *, best: str = "val", metric: str = "accuracy", better: str = "higher", patience: int = 0,
        **state: Stateful | ShardedEmbedding,
    ) -> Iterator[int]:  # fmt: skip
        """Yield the numbers of the epochs to train, from 1 to ``epochs``; in a resumed run those that are left.

        After each epoch, its loss and scores are recorded and printed, and a checkpoint is saved. After the last one,
        the modules have the weights of the best epoch, which the first rank also saves as ``output/model.pt``, a state
        dict. A ``break`` in an epoch leaves out what follows it: end a run early by ``patience``.

        Args:
            best: Score by which the best epoch is chosen. Without this score, the last epoch counts as the best.
            metric: Name of the scores in reports.
            better: Which scores are better, ``higher`` or ``lower``.
            patience: End after so many epochs without a better score; 0: never.
            state: All that is to be continued in a resumed run besides the modules, by name: the optimizer, a
                scheduler, a ``ShardedEmbedding`` and its optimizer. Each has ``state_dict`` and ``load_state_dict``, or
                is a ``ShardedEmbedding``. ``backward`` also exchanges the gradients of these embeddings.

        Raises:
            SettingsError: No module or none of its optimizers is given, or the epochs have begun before.
            CheckpointError: The checkpoint cannot be read, or does not fit.
        """
        if not self._models or self._log is not None:
            why = "a run has one loop over its epochs" if self._models else "call model = run.model(…) before"
            raise SettingsError(f"run.epochs: {why}")
        if better not in ("higher", "lower") or "run" in state:
            raise SettingsError("run.epochs: better is 'higher' or 'lower', and no object can be called 'run'")
        weights = {id(weight) for weight in self._all_weights()}
        optimizers = {
            name: one
            for name, one in state.items()
            if isinstance(one, torch.optim.Optimizer)
            and any(id(weight) in weights for group in one.param_groups for weight in group["params"])
        }
        if not optimizers:
            raise SettingsError("run.epochs: pass the model's optimizer, as in run.epochs(20, optimizer=optimizer)")
        for name, one in state.items():
            if isinstance(one, ShardedEmbedding):
                self._rows[name] = one
                self._best_rows[f"best {name}"] = ShardedEmbedding(
                    one.num_nodes, one.dim, 0, one.weight.device, one.group
                )
        model = self._models.get("model") or next(iter(self._models.values()))
        optimizer = optimizers.get("optimizer") or next(iter(optimizers.values()))
        self._metric = metric
        log = self._log = StepLog(
            model, optimizer, checkpoint_seconds=self._checkpoint_seconds,
            metric=metric, better=better,
        )  # fmt: skip
        others = {
            name: one for name, one in (state | self._models).items() if one is not model and one is not optimizer
        }
        if others.keys() & {"model", "optimizer"}:  # the names of the two that StepLog saves
            raise SettingsError("run.epochs: pass the optimizer of the model as optimizer=, others by other names")
        start = log.restore(**others, **self._best_rows, run=self._progress)
        at, sign = self._progress, 1 if better == "higher" else -1
        for epoch in range(start.epoch, epochs + 1):
            if patience and at.best_epoch and epoch > at.best_epoch + patience:
                self.print(f"ended early: {best} has not improved for {patience} epochs")
                break
            self.epoch, self.scores = epoch, {}
            self._first_step = start.first_step(epoch)
            if not self._first_step:
                at.loss_sum, at.seeds = torch.zeros((), dtype=torch.float64), 0
            yield epoch
            self._first_step = None
            self._reduce_scores()
            score = self.scores.get(best)
            if patience and score is None:
                raise SettingsError(f"run.epochs: patience needs a score in each epoch: run.score({best}=…)")
            first = not at.best_epoch or math.isnan(at.best_score)
            if score is not None and (first or (score - at.best_score) * sign > 0):
                at.best_epoch, at.best_score = epoch, score
                at.best_weights = {name: cpu_copy(one.state_dict()) for name, one in self._models.items()}
                for one, kept in zip(self._rows.values(), self._best_rows.values(), strict=True):
                    kept.weight.data.copy_(one.weight.data)
            log.epoch(epoch, self.loss, **self.scores)
            scores = "".join(f"  {name} {value:.4f}" for name, value in self.scores.items())
            self.print(f"epoch {epoch}/{epochs}  loss {self.loss:.4f}{scores}")
        # The best weights, for what the script does next.
        self.scores = {}
        for module in self._models.values():
            module.eval()
        if at.best_epoch:
            for name, module in self._models.items():
                module.load_state_dict(at.best_weights[name])
            for one, kept in zip(self._rows.values(), self._best_rows.values(), strict=True):
                one.weight.data.copy_(kept.weight.data)
            self.scores[best] = at.best_score
        for name, module in self._models.items():
            if self.rank == 0:
                torch.save(cpu_copy(module.state_dict()), self.output / f"{name}.pt")
        for name, one in self._rows.items():
            if tables := gather_tables(one, one.weight):
                torch.save(tables, self.output / f"{name}.pt")

    def train(self, loader: RankLoader, steps: int | None = None) -> Iterator[Any]:
        """Yield this rank's batches of the epoch, on the device, with the modules in training mode.

        Every step must call ``backward``. A resumed run begins with the step after its checkpoint. Torch's random
        numbers, such as dropout, depend on the seed of the run, the epoch, the step and the rank.

        Args:
            loader: A loader of gnnfleet.
            steps: Number of steps in an epoch; default: all batches of the loader.

        Raises:
            SettingsError: Not in a loop over ``epochs``, or a step ended without ``backward``.
        """
        if self._first_step is None or self._log is None:
            raise SettingsError("run.train: an epoch, an iteration of run.epochs(…), has one loop over run.train")
        first, self._first_step = self._first_step, None
        count, at = min(len(loader), len(loader) if steps is None else steps), self._progress
        self._use(loader).set_epoch(self.epoch - 1, first)
        self._log.loader = loader
        for module in self._models.values():
            module.train()
        if self._mean is not None:
            self._mean.weights = [weight for weight in self._all_weights() if weight.requires_grad]
        for step, batch in zip(range(first, count), loader, strict=False):
            self._losses = []
            torch.manual_seed(batch_key(self._seed, self.rank, self.epoch, step) >> 1)
            with BatchDropout(batch, loader.order.key(self.epoch - 1, step)):
                yield self._on_device(batch)
            del batch  # frees its memory before the next batch is requested
            if not self._losses:
                raise SettingsError(f"step {step} of epoch {self.epoch}: call run.backward(loss), not loss.backward()")
            loss, (seeds, all_seeds) = torch.stack(self._losses).sum(), loader.step_inputs
            at.loss_sum, at.seeds = at.loss_sum + loss.double() * all_seeds, at.seeds + all_seeds
            self._log.step(self.epoch, step, count, loss, seeds)
        self.loss = float(at.loss_sum) / max(at.seeds, 1)

    def backward(self, loss: Tensor, seeds: int | None = None) -> Tensor:
        """Compute the gradients of the mean loss over the seeds of all ranks. Takes the place of ``loss.backward()``.

        The gradients are the same for any number of ranks, up to rounding, also if ranks have different numbers of
        seeds. A weight that no rank has used has no gradient.

        Args:
            loss: Mean over this rank's seeds of the batch.
            seeds: Number of them; default: the number of inputs (seed nodes, links, clusters) that the loader gave this
                rank. If it is passed, all ranks must pass it, and the ranks add it up.

        Returns:
            The loss over all ranks, without gradient; in the first step as on any other number of ranks.

        Raises:
            SettingsError: Not in a loop over ``train``, or a weight has a sparse gradient.
        """
        if self._loader is None or not torch.is_grad_enabled() or not loss.requires_grad:
            raise SettingsError("run.backward: needs a loss that depends on weights, in a loop over run.train")
        own, whole = self._loader.step_inputs
        if seeds is not None:
            own, whole = seeds, int(self.group.sum(torch.tensor(seeds)))
        share = own * self.group.size / max(whole, 1)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        # The mean loss over no seeds is NaN, but its gradients are zero.
        whole_loss = loss.detach().float() * share if own else torch.zeros((), device=loss.device)
        for rows in self._rows.values():
            rows.sync_gradients()
        if self._mean is not None:
            weights = self._mean.weights
            if any(weight.grad is not None and weight.grad.is_sparse for weight in weights):
                raise SettingsError("run.backward: a weight has a sparse gradient; use gnnfleet.nn.ShardedEmbedding")
            used = [weight.grad is not None for weight in weights]
            # The loss, and on how many ranks each weight has a gradient, are averaged with the gradients.
            more = torch.tensor([0.0, *map(float, used)]).to(self.device)
            more[0] = whole_loss
            self._mean(more)
            whole_loss = more[0].clone()
            if not all(used):
                for weight, ranks in zip(weights, more[1:].tolist(), strict=True):
                    weight.grad = weight.grad if ranks else None
        self._losses.append(whole_loss)
        return whole_loss

    def evaluate(self, loader: RankLoader) -> Iterator[Any]:
        """Yield this rank's batches, on the device, with the modules in evaluation mode and without gradients.

        Each evaluation draws the same neighbours. At the end, ``scores`` has the means of what ``score`` was called
        with. All ranks must iterate all batches.
        """
        of_step, training = self._loader, {name: module.training for name, module in self._models.items()}
        self._use(loader).set_epoch(0)
        for module in self._models.values():
            module.eval()
            for buffer in module.buffers() if self.group.size > 1 else ():
                if buffer.is_floating_point():  # such as the statistics of BatchNorm, which each rank has its own of
                    buffer.copy_(self.group.sum(buffer.detach().cpu() / self.group.size))
        with torch.no_grad():
            yield from map(self._on_device, loader)
        self._reduce_scores()
        # A step of ``train`` goes on with its loader and mode.
        self._loader = of_step
        for name, module in self._models.items():
            module.train(training[name])

    def score(self, **values: Tensor | float) -> None:
        """Add values of this rank's seeds in a batch, such as ``run.score(val=out.argmax(1) == y)``.

        Args:
            values: By name, a value for each seed [n], or the mean over the batch's seeds. In a resumed run, scores
                of training steps are those of the remaining steps.
        """
        for name, value in values.items():
            value = torch.as_tensor(value).detach()
            if value.dim() == 0:
                value = value.expand(self._loader.step_inputs[0] if self._loader else 1)
            before, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = before + value.sum(dtype=torch.float64), count + value.numel()

    def _reduce_scores(self) -> None:
        sums: dict[str, tuple[float, int]] = {}
        for found in self.group.gather({name: (float(value), count) for name, (value, count) in self._sums.items()}):
            for name, (value, count) in found.items():
                before, number = sums.get(name, (0.0, 0))
                sums[name] = before + value, number + count
        self._sums = {}
        self.scores |= {name: value / max(count, 1) for name, (value, count) in sums.items()}

    def _end(self) -> None:
        self._reduce_scores()
        if self._log is not None:
            if self.scores:
                self.print(", ".join(f"{name} {self._metric} {value:.4f}" for name, value in self.scores.items()))
                self._log.result(**self.scores)
            self._log.close()

    def _all_weights(self) -> list[nn.Parameter]:
        return [weight for module in self._models.values() for weight in module.parameters()]

    def _use(self, loader: Any) -> Any:
        if not isinstance(loader, RankLoader):
            raise SettingsError(f"{type(loader).__name__} is not a loader of gnnfleet, such as DistNeighborLoader")
        self._loader = loader
        return self._loader

    def _on_device(self, batch: Any) -> Any:
        if isinstance(batch, tuple):  # of DistZipLoader
            return tuple(map(self._on_device, batch))
        return batch.to(self.device, non_blocking=True)


@dataclass
class _Progress:
    """What a run continues with after a resume, besides modules and optimizers."""

    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))  #: of the epoch's steps
    seeds: int = 0  #: of all ranks in these steps
    best_epoch: int = 0  #: 0: none
    best_score: float = 0.0
    best_weights: Mapping[str, Any] = field(default_factory=dict)  #: state dict by name of the module

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
