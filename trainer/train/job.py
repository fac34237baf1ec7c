"""``python -m trainer train``: from a partition folder to a trained model, on every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack

from trainer.core.ranks import RankGroup, Ranks, pick_device
from trainer.core.schema import NodeType
from trainer.core.slabs import keep_freed_memory
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.loader.environment import await_own_server
from trainer.loader.open import Graph
from trainer.nn.precision import why_slow
from trainer.train.checkpoint import check_fits, graph_record
from trainer.train.fit import Fit, FitResult
from trainer.train.metrics import MetricsLog
from trainer.train.regroup import GoOn, with_team
from trainer.train.settings import TrainJob, TrainSettings
from trainer.train.setup import (
    check_same_partition,
    fill_device_cache,
    fill_host_cache,
    layout_of,
    make_model,
    open_places,
    read_on_first,
)
from trainer.train.task import node_classification, pick_target

SPLITS = ("train", "val", "test")


def train(job: TrainJob, ranks: Ranks | None = None) -> FitResult:
    """Train one model on all ranks; every rank returns the same result.

    Raises ``TrainerError`` for what a user can act on, on every rank.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    settings, device = job.settings, pick_device(ranks)
    keep_freed_memory()
    await_own_server()  # it started together with this process
    if ranks.local_rank == 0 and (reason := why_slow(settings.precision, device)):
        warnings.warn(reason, stacklevel=2)
    goes_on = GoOn.from_env(os.environ, job.run_dir)
    with _Run(job, ranks, goes_on is not None) as run:
        return with_team(run.train, ranks, device, settings.backend, settings.timeout, goes_on)


class _Run(ExitStack):
    """What one process opens and makes for a run, once, whoever leaves it; closed at the end."""

    def __init__(self, job: TrainJob, ranks: Ranks, goes_on: bool):
        super().__init__()
        self.job, self.ranks, self.goes_on = job, ranks, goes_on
        self._made: tuple[Fit, Callable[[RankGroup], dict[str, BatchLoader]]] | None = None

    def train(self, group: RankGroup) -> FitResult:
        """From the beginning, or with the ranks that are left from where all of them were."""
        if self._made is None:
            self.close()  # what an attempt has opened that ended with the loss of a rank
            self._made = self._prepare(group)
        else:
            fit, loaders = self._made
            fit.rejoin(group, loaders(group))
        return self._made[0].run()

    def _prepare(self, group: RankGroup) -> tuple[Fit, Callable[[RankGroup], dict[str, BatchLoader]]]:
        graph = group.agree(lambda: self.enter_context(open_places(self.job, self.ranks)))
        check_same_partition(graph, group)
        metrics = group.agree(lambda: self.enter_context(self._metrics_log()))
        return _prepare(self.job, graph, group, metrics, self.goes_on)

    def _metrics_log(self) -> MetricsLog:
        return MetricsLog(self.job.run_dir, self.ranks.rank, self.job.settings.tensorboard)


def _prepare(
    job: TrainJob, graph: Graph, group: RankGroup, metrics: MetricsLog, goes_on: bool
) -> tuple[Fit, Callable[[RankGroup], dict[str, BatchLoader]]]:
    """Task, model, loaders and, when resuming, the state they go on from; and how loaders are made for fewer ranks."""
    settings, manifest = job.settings, graph.manifest
    target = group.agree(lambda: pick_target(manifest, settings.target))
    splits = tuple(split for split in SPLITS if manifest.nodes[target].splits.get(split))
    task = group.agree(lambda: node_classification(graph, target, splits, group))
    model, embedding = group.agree(lambda: make_model(settings, manifest, target, group.device))
    wants_degree = bool(getattr(model, "needs_degree", False))
    wanted = {split: loader_settings(settings, target, split, wants_degree) for split in splits}

    def loaders(of: RankGroup) -> dict[str, BatchLoader]:
        layout = layout_of(graph, of)
        made = of.agree(lambda: {name: BatchLoader(graph, want, of.rank, layout) for name, want in wanted.items()})
        of.agree(lambda: fill_device_cache(graph, made, settings, of))
        return made

    folder, record = job.run_dir / "checkpoints", graph_record(manifest, target)
    first = loaders(group)
    fit = Fit(settings, model, task, first, group, metrics, folder, record, embedding, goes_on)
    if filled := fill_host_cache(graph, first["train"], job.reach, job.run_dir, group):
        fit.foretell(filled)
    if settings.resume is not None:
        path = settings.resume
        fit.restore(read_on_first(path, lambda checkpoint: check_fits(checkpoint, settings, record, path), group))
    return fit, loaders


def loader_settings(settings: TrainSettings, target: NodeType, split: str, want_degree: bool) -> LoaderSettings:
    """How a split is loaded to be trained on, if it is the train split, or else to be scored."""
    training = split == "train"
    return LoaderSettings(
        split=split,
        target=target,
        fanouts=settings.fanouts if training else settings.eval_fanouts or settings.fanouts,
        global_batch=settings.batch_size if training else settings.eval_batch_size,
        seed=settings.seed,
        replace=settings.replace,
        weight=settings.weight_attr,
        time_attr=settings.time_attr,
        last=settings.temporal_strategy == "last",
        disjoint=settings.disjoint,
        shuffle=training,
        threads=settings.sampler_threads,
        prefetch=max(settings.prefetch, settings.sampler_threads + 1),
        want_degree=want_degree,
        deadline=settings.timeout,
    )
