"""``python -m trainer train``: from a partition folder to a trained model, on every rank."""

from __future__ import annotations

import os
from contextlib import ExitStack

from trainer.config import TrainJob, TrainSettings
from trainer.errors import PartitionError
from trainer.load.loader import BatchLoader, LoaderSettings
from trainer.load.open import Graph, open_graph
from trainer.load.seeds import RankLayout
from trainer.nn.models import build_model
from trainer.partition.format import manifest_digest
from trainer.ranks import Ranks
from trainer.train.checkpoint import Checkpoint, check_fits, graph_record, load_checkpoint
from trainer.train.fit import Fit, FitResult
from trainer.train.metrics import MetricsLog
from trainer.train.task import node_classification
from trainer.train.team import Team, join_team, pick_device

SPLITS = ("train", "val", "test")


def train(job: TrainJob, ranks: Ranks | None = None) -> FitResult:
    """Train one model on all ranks; every rank returns the same result.

    Raises ``TrainerError`` for what a user can act on, on every rank.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    settings = job.settings
    with join_team(ranks, pick_device(ranks), settings.backend, settings.timeout) as team, ExitStack() as stack:
        _check_same_partition(job, team)
        graph = team.agree(lambda: stack.enter_context(_open(job, ranks)))
        metrics = team.agree(lambda: stack.enter_context(MetricsLog(job.run_dir, ranks.rank)))
        fit = _prepare(job, graph, team, metrics)
        result = fit.run()
        team.barrier()  # this node's graph server must outlive the slowest rank
    return result


def _prepare(job: TrainJob, graph: Graph, team: Team, metrics: MetricsLog) -> Fit:
    """Task, model, loaders and, when resuming, the state they go on from."""
    settings, manifest = job.settings, graph.manifest
    splits = tuple(split for split in SPLITS if manifest.splits.get(split))
    task = team.agree(lambda: node_classification(graph, splits, team))
    width = manifest.attrs["x"].shape[1]
    model = team.agree(lambda: build_model(settings, width, manifest.num_classes))
    layout = _layout(graph, team)
    wants_degree = bool(getattr(model, "needs_degree", False))
    loaders = {
        split: BatchLoader(graph, _loader_settings(settings, split, wants_degree), team.rank, layout)
        for split in splits
    }  # fmt: skip
    folder = job.run_dir / "checkpoints"
    fit = Fit(settings, model, task, loaders, team, metrics, folder, graph_record(manifest))
    if settings.resume is not None:
        fit.restore(_resumed(settings.resume, settings, graph, team))
    return fit


def _open(job: TrainJob, ranks: Ranks) -> Graph:
    return open_graph(
        job.parts, job.part_ids, cluster_file=job.cluster, node_rank=ranks.node_rank, key_file=job.key_file,
        deadline=job.settings.timeout,
    )  # fmt: skip


def _check_same_partition(job: TrainJob, team: Team) -> None:
    """Refuse, naming the hosts, when a rank holds another manifest than rank 0."""
    digests = team.gather((str(team.ranks), team.agree(lambda: manifest_digest(job.parts))))
    others = [f"{who}: {digest[:12]}" for who, digest in digests if digest != digests[0][1]]
    if others:
        team.settle()
        raise PartitionError(
            f"manifest.json in {job.parts} differs between ranks; {digests[0][0]}: {digests[0][1][:12]}, "
            f"{', '.join(others)}. Bring all nodes the same partition"
        )


def _layout(graph: Graph, team: Team) -> RankLayout:
    """Which ranks read which part from their own disk."""
    owned = team.gather(tuple(graph.store.parts))
    parts = range(graph.manifest.num_parts)
    return RankLayout(team.size, tuple(tuple(r for r, own in enumerate(owned) if part in own) for part in parts))


def _loader_settings(settings: TrainSettings, split: str, want_degree: bool) -> LoaderSettings:
    training = split == "train"
    return LoaderSettings(
        split=split,
        fanouts=settings.fanouts if training else settings.eval_fanouts or settings.fanouts,
        global_batch=settings.batch_size if training else settings.eval_batch_size,
        seed=settings.seed,
        replace=settings.replace,
        shuffle=training,
        threads=settings.sampler_threads,
        prefetch=settings.prefetch,
        want_degree=want_degree,
        deadline=settings.timeout,
    )


def _resumed(path: str, settings: TrainSettings, graph: Graph, team: Team) -> Checkpoint:
    """The checkpoint that rank 0 reads, on every rank; only rank 0 needs the file."""

    def read() -> Checkpoint | None:
        if team.rank != 0:
            return None
        checkpoint = load_checkpoint(path)
        check_fits(checkpoint, settings, graph.manifest, path)
        return checkpoint

    checkpoint = team.from_first(team.agree(read))
    assert checkpoint is not None
    return checkpoint
