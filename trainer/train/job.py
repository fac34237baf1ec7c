"""``python -m trainer train``: trains a model from a partition folder, on every rank."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from trainer.core.errors import PartitionError, SettingsError
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.core.remote_settings import CacheSize, RemoteAccess
from trainer.core.schema import NodeType
from trainer.core.slabs import keep_freed_memory
from trainer.graph.cache_fill import FilledCache, device_rows, fill_cache
from trainer.graph.cache_policy import BatchPlan
from trainer.graph.environment import await_own_server, compares_digests, is_client
from trainer.graph.open import Graph, open_client, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings, columns_of
from trainer.nn.graph_facts import facts_of, layer_needs
from trainer.nn.kernels.precision import why_slow
from trainer.nn.models import build_model
from trainer.nn.sharded_embedding import ShardedEmbedding, scatter_tables
from trainer.service.cluster import read_cluster
from trainer.store.digest_check import checked_digests
from trainer.store.manifest import Manifest
from trainer.store.part_store import open_parts
from trainer.train.checkpoint import Checkpoint, check_fits, graph_record, load_checkpoint
from trainer.train.checkpoint_writer import checkpoint_writers
from trainer.train.fit import Fit, FitResult
from trainer.train.metrics import MetricsLog
from trainer.train.settings import InferJob, TrainJob, TrainSettings
from trainer.train.task import node_classification, pick_target


def find_damage(job: TrainJob | InferJob, ranks: Ranks) -> PartitionError | None:
    """Compare the files that this node's ranks open with their digests. Returns the first mismatch, None if there is
    none.

    Reads nothing and returns None if another process of the node checks the files, or the job disables the check.
    Reading may take long, and other ranks wait at the rendezvous until this function returns.
    """
    if not job.digests or job.parts is None or not compares_digests(ranks):
        return None
    try:
        with checked_digests(open_parts(job.parts, job.part_ids, job.remote_access.topology)):
            return None
    except PartitionError as error:
        return error


def open_job_graph(job: TrainJob | InferJob, ranks: Ranks, damage: PartitionError | None = None) -> Graph:
    """Open the job's parts, and connect to the hosts of all other parts. On a client node, connect to the graph
    servers.

    Raises ``damage`` if it is not None, ``SettingsError`` if a node other than a client has no partition folder, and
    the errors of ``open_graph`` and ``open_client``.
    """
    if damage is not None:
        raise damage
    if job.parts is None:
        if job.cluster is None or not is_client(job.cluster, ranks.node_rank):
            raise SettingsError(
                f"no partition folder: give --parts (GNNFLEET_PARTS); only client nodes of a run need none, and node"
                f" {ranks.node_rank} is not a client"
            )
        return open_client(
            read_cluster(job.cluster), ranks, key_file=job.key_file, deadline=job.timeout,
            remote_access=job.remote_access,
        )  # fmt: skip
    return open_graph(
        job.parts, job.part_ids, cluster_file=job.cluster, node_rank=ranks.node_rank, key_file=job.key_file,
        deadline=job.timeout, remote_access=job.remote_access,
    )  # fmt: skip


def check_same_partition(graph: Graph, group: RankGroup) -> None:
    """Check that all ranks, or the servers they are clients of, have the same manifest. Collective.

    Raises ``PartitionError`` with the ranks whose manifest differs from rank 0's.
    """
    digests = group.gather((str(group.ranks), group.agree(lambda: graph.digest)))
    others = [f"{rank}: {digest[:12]}" for rank, digest in digests if digest != digests[0][1]]
    if others:
        group.settle()
        raise PartitionError(
            f"manifest.json in {graph.store.folder} differs between ranks; {digests[0][0]}: {digests[0][1][:12]}, "
            f"{', '.join(others)}. Copy the same partition to all nodes"
        )


def layout_of(graph: Graph, group: RankGroup) -> RankLayout:
    """Return for each part the ranks that read it from disk, or whose home server does. Collective."""
    owned = group.gather(graph.near_parts)
    parts = range(graph.manifest.num_parts)
    return RankLayout(group.size, tuple(tuple(r for r, own in enumerate(owned) if part in own) for part in parts))


def one_host_layout(graph: Graph, group: RankGroup) -> RankLayout:
    """As ``layout_of``, but with each part assigned to the ranks of a single node, which share a disk. Collective.

    A part is assigned to the node with the fewest parts so far, among the nodes whose ranks ``layout_of`` returns for
    the part, or among all nodes if there is none.
    """
    near_by_rank = group.gather((group.ranks.node_rank, graph.near_parts))
    nodes = sorted({node for node, _ in near_by_rank})
    counts = dict.fromkeys(nodes, 0)
    chosen = []
    for part in range(graph.manifest.num_parts):
        near = sorted({node for node, parts in near_by_rank if part in parts}) or nodes
        chosen.append(min(near, key=lambda node: counts[node]))
        counts[chosen[-1]] += 1
    ranks = [tuple(rank for rank, (node, _) in enumerate(near_by_rank) if node == of) for of in chosen]
    return RankLayout(group.size, tuple(ranks))


def batch_plan(graph: Graph, loader: BatchLoader) -> BatchPlan:
    """Return a plan of the loader's batches, for ``fill_cache`` and ``device_rows``."""
    attrs = columns_of(graph, loader.settings)
    columns = {of: ("orig_id", *attrs.get(of, ())) for of in graph.manifest.nodes}
    return BatchPlan(loader.order, columns, loader.requests, loader.settings.threads)


def fill_host_cache(
    graph: Graph, loader: BatchLoader, remote_access: RemoteAccess, run_dir: Path, group: RankGroup
) -> FilledCache | None:
    """Cache rows of other hosts for the loader's batches, by ``fill_cache``. Collective."""
    node = f"{group.ranks.node_rank} {group.ranks.host}"
    plan = batch_plan(graph, loader)
    return fill_cache(graph.access, graph.store, plan, node, remote_access.cache, run_dir / "cache", group)


def fill_device_cache(
    graph: Graph, loaders: Mapping[str, BatchLoader], settings: TrainSettings, group: RankGroup
) -> None:
    """Cache on this rank's device the rows that its train batches request most. Raises as ``device_rows`` does."""
    size, loader = CacheSize.parse(settings.device_cache), loaders["train"]
    if size == CacheSize():
        return
    rows = device_rows(graph, batch_plan(graph, loader), size, group.device)
    for one in loaders.values():
        one.keep(rows)


def make_model(
    settings: TrainSettings, manifest: Manifest, target: NodeType, device: torch.device | None = None
) -> tuple[nn.Module, ShardedEmbedding | None]:
    """Return the initial model, and embedding rows [nodes, ``hidden``] of the featureless node types that the model
    reads.
    """
    facts = facts_of(manifest, target)
    reached = layer_needs(facts.node_types, facts.edge_types, target, len(settings.fanouts))[0].sources
    bare = {of: manifest.nodes[of].num_nodes for of in reached if of not in facts.in_dims}
    embedding = ShardedEmbedding(bare, settings.hidden, settings.seed, device) if bare and facts.hetero else None
    return build_model(settings, facts, embedding), embedding


def trained_model(
    saved: Checkpoint, manifest: Manifest, device: torch.device | None = None
) -> tuple[nn.Module, ShardedEmbedding | None]:
    """Build the model of a checkpoint, with its best weights, or its last weights if no epoch was evaluated.

    Under torch.distributed all ranks must call it; only rank 0 needs the embedding tables of ``saved``.

    Args:
        saved: A checkpoint, see ``load_checkpoint``.
        manifest: Manifest of the partition that the model was trained on, see ``read_manifest``.
        device: Device of the model. Default: the CPU.

    Returns:
        The model in evaluation mode, and the trained rows of nodes without features (None if all have features).
    """
    settings, best = TrainSettings(**saved.settings), saved.best
    model, embedding = make_model(settings, manifest, saved.graph["target"], device)
    model.load_state_dict(dict(best.model if best else saved.model))
    if embedding is not None:
        last = saved.embedding and saved.embedding["tables"]
        embedding.weight.data.copy_(scatter_tables(embedding, best.embedding if best else last))
    return model.to(device or "cpu").eval(), embedding


def read_on_first(path: str | Path, check: Callable[[Checkpoint], None], group: RankGroup) -> Checkpoint:
    """Read and check a checkpoint on rank 0, and send it to all ranks without embedding tables. Collective.

    Raises ``CheckpointError`` on rank 0, and a ``PeerError`` with the same message on the other ranks.
    """

    def read() -> Checkpoint | None:
        if group.rank != 0:
            return None
        checkpoint = load_checkpoint(path)
        check(checkpoint)
        return checkpoint

    own = group.agree(read)
    content = group.from_first(own.without_tables().content() if own else None)
    assert content is not None
    return own or Checkpoint.of_content(content)


SPLITS = ("train", "val", "test")


def train(job: TrainJob, ranks: Ranks | None = None) -> FitResult:
    """Train one model on all ranks. Every rank returns the same result.

    Raises ``TrainerError`` on every rank for errors that a user can fix.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    settings, device = job.settings, pick_device(ranks)
    keep_freed_memory()
    await_own_server()  # the launcher starts it at the same time as this process
    if ranks.local_rank == 0 and (reason := why_slow(settings.precision, device)):
        warnings.warn(reason, stacklevel=2)
    damage = find_damage(job, ranks)
    with ExitStack() as stack, join_ranks(ranks, device, settings.backend, settings.timeout) as group:
        graph = group.agree(lambda: stack.enter_context(open_job_graph(job, ranks, damage)))
        check_same_partition(graph, group)
        metrics = group.agree(lambda: stack.enter_context(MetricsLog(job.run_dir, ranks.rank, settings.tensorboard)))
        result = _prepare(job, graph, group, metrics).run()
        group.barrier()  # keeps this node's graph server alive until the slowest rank has finished
    return result


def _prepare(job: TrainJob, graph: Graph, group: RankGroup, metrics: MetricsLog) -> Fit:
    """Make task, model and loaders, and restore the checkpoint when resuming. Collective."""
    settings, manifest = job.settings, graph.manifest
    target = group.agree(lambda: pick_target(manifest, settings.target))
    splits = tuple(split for split in SPLITS if manifest.nodes[target].splits.get(split))
    task = group.agree(lambda: node_classification(graph, target, splits, group))
    model, embedding = group.agree(lambda: make_model(settings, manifest, target, group.device))
    wants_degree = bool(getattr(model, "needs_degree", False))
    wanted = {split: loader_settings(settings, target, split, wants_degree) for split in splits}
    layout = layout_of(graph, group)
    loaders = group.agree(lambda: {name: BatchLoader(graph, want, group.rank, layout) for name, want in wanted.items()})
    group.agree(lambda: fill_device_cache(graph, loaders, settings, group))
    folder, record = job.run_dir / "checkpoints", graph_record(manifest, target)
    writers = checkpoint_writers(group, embedding is not None, bool(int(os.environ.get("GNNFLEET_RESTARTS") or 0)))
    fit = Fit(settings, model, task, loaders, group, metrics, folder, record, embedding, writers)
    if filled := fill_host_cache(graph, loaders["train"], job.remote_access, job.run_dir, group):
        fit.log_prediction(filled)
    if path := os.environ.get("GNNFLEET_RESUME") or settings.resume:
        fit.restore(read_on_first(path, lambda checkpoint: check_fits(checkpoint, settings, record, path), group))
    return fit


def loader_settings(settings: TrainSettings, target: NodeType, split: str, want_degree: bool) -> LoaderSettings:
    """Return the settings of the loader that the bundled trainer uses for a split.

    Args:
        settings: Settings of the run.
        target: Node type of the seeds.
        split: Name of the split; ``"train"`` gets the fanouts, the batch size and the shuffling of training.
        want_degree: Also provide the in-degrees of nodes, as GCN needs.
    """
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
