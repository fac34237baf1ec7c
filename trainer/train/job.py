"""``python -m trainer train``: from a partition folder to a trained model, on every rank."""

from __future__ import annotations

import os
from contextlib import ExitStack

from trainer.config import TrainJob, TrainSettings
from trainer.load.loader import BatchLoader, LoaderSettings
from trainer.load.open import Graph
from trainer.ranks import Ranks
from trainer.schema import NodeType
from trainer.train.checkpoint import check_fits, graph_record
from trainer.train.fit import Fit, FitResult
from trainer.train.metrics import MetricsLog
from trainer.train.setup import check_same_partition, layout_of, make_model, open_places, read_on_first
from trainer.train.task import node_classification, pick_target
from trainer.train.team import Team, join_team, pick_device

SPLITS = ("train", "val", "test")


def train(job: TrainJob, ranks: Ranks | None = None) -> FitResult:
    """Train one model on all ranks; every rank returns the same result.

    Raises ``TrainerError`` for what a user can act on, on every rank.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    settings = job.settings
    with join_team(ranks, pick_device(ranks), settings.backend, settings.timeout) as team, ExitStack() as stack:
        check_same_partition(job, team)
        graph = team.agree(lambda: stack.enter_context(open_places(job, ranks)))
        metrics = team.agree(lambda: stack.enter_context(MetricsLog(job.run_dir, ranks.rank)))
        fit = _prepare(job, graph, team, metrics)
        result = fit.run()
        team.barrier()  # this node's graph server must outlive the slowest rank
    return result


def _prepare(job: TrainJob, graph: Graph, team: Team, metrics: MetricsLog) -> Fit:
    """Task, model, loaders and, when resuming, the state they go on from."""
    settings, manifest = job.settings, graph.manifest
    target = team.agree(lambda: pick_target(manifest, settings.target))
    splits = tuple(split for split in SPLITS if manifest.nodes[target].splits.get(split))
    task = team.agree(lambda: node_classification(graph, target, splits, team))
    model, embedding = team.agree(lambda: make_model(settings, manifest, target, team.device))
    layout = layout_of(graph, team)
    wants_degree = bool(getattr(model, "needs_degree", False))
    wanted = {split: _loader_settings(settings, target, split, wants_degree) for split in splits}
    loaders = team.agree(
        lambda: {split: BatchLoader(graph, of, team.rank, layout) for split, of in wanted.items()}
    )  # fmt: skip
    folder, record = job.run_dir / "checkpoints", graph_record(manifest, target)
    fit = Fit(settings, model, task, loaders, team, metrics, folder, record, embedding)
    if settings.resume is not None:
        path = settings.resume
        fit.restore(read_on_first(path, lambda checkpoint: check_fits(checkpoint, settings, record, path), team))
    return fit


def _loader_settings(settings: TrainSettings, target: NodeType, split: str, want_degree: bool) -> LoaderSettings:
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
        prefetch=settings.prefetch,
        want_degree=want_degree,
        deadline=settings.timeout,
    )
