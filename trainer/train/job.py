"""``python -m trainer train``: trains a model from a partition folder, on every rank."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.core.batch import DeviceRows
from trainer.core.errors import PartitionError, SettingsError, TrainingError
from trainer.core.graph_attrs import is_task_table
from trainer.core.memory import size_text
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import is_link_types, link_types, type_name
from trainer.core.slabs import keep_freed_memory
from trainer.core.train_config import is_own_model
from trainer.graph.cache_fill import cache_bytes, device_rows, fill_cache
from trainer.graph.cache_policy import BatchPlan
from trainer.graph.environment import await_own_server, compares_digests, is_client
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, BlockLoader, columns_of
from trainer.nn.kernels.precision import why_slow
from trainer.sampler.rule_types import PPR
from trainer.store.digest_check import checked_digests
from trainer.store.part_store import open_parts
from trainer.train.checkpoint import Checkpoint, check_fits, graph_record, load_checkpoint, settings_record
from trainer.train.checkpoint_writer import checkpoint_writers
from trainer.train.device_sampling import choose_sampling, plan_sampling
from trainer.train.fit import Fit, FitResult
from trainer.train.loaders import (
    SPLITS,
    check_link_settings,
    edge_loaders,
    link_loaders,
    loader_settings,
    typed_link_loaders,
)
from trainer.train.metrics import MetricsLog
from trainer.train.model import (
    embedded_nodes,
    embeddings_of,
    graph_facts,
    in_degrees,
    keep_sources,
    make_model,
    same_categories,
)
from trainer.train.schedule import check_task
from trainer.train.settings import InferJob, TrainJob, TrainSettings
from trainer.train.tasks.baseline import Baseline, LinkCounts, link_baseline
from trainer.train.tasks.choose import edge_task, metric_names, node_task
from trainer.train.tasks.choose_target import learns_edge_labels, pick_target
from trainer.train.tasks.task import Task

if TYPE_CHECKING:
    from trainer.loader.edge_block_loader import LabelledEdges
    from trainer.train.full_ranking import FullRanking
    from trainer.train.timed_ranking import TimedRanking

_OWN_SHARE = "BatchNorm normalises each process's share of a batch, so the loss curve depends on their number"

#: Messages of CUDA, cuBLAS and NCCL; torch raises ``OutOfMemoryError`` only for its own allocations.
_EXHAUSTED = re.compile(r"CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED")


def find_damage(job: TrainJob | InferJob, ranks: Ranks) -> PartitionError | None:
    """Check the digests of all files that the ranks of this node open.

    Returns an error for the first file that does not match its digest, or None. Also returns None if another process of
    the node checks the files, or the job disables the check.
    """
    if not job.digests or job.parts is None or not compares_digests(ranks):
        return None
    try:
        with checked_digests(open_parts(job.parts, job.part_ids, job.remote_access.topology)):
            return None
    except PartitionError as error:
        return error


def open_job_graph(job: TrainJob | InferJob, ranks: Ranks, damage: PartitionError | None = None) -> Graph:
    """Open the job's parts, and connect to the hosts of all other parts. On a client, connect to the graph servers.

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
        from trainer.graph.connect import open_client
        from trainer.service.cluster import read_cluster

        return open_client(
            read_cluster(job.cluster), ranks, key_file=job.key_file, deadline=job.timeout,
            remote_access=job.remote_access,
        )  # fmt: skip
    return open_graph(
        job.parts, job.part_ids, cluster_file=job.cluster, node_rank=ranks.node_rank, key_file=job.key_file,
        deadline=job.timeout, remote_access=job.remote_access,
    )  # fmt: skip


def check_same_partition(graph: Graph, group: RankGroup) -> None:
    """Check that all ranks have the same manifest. A client has the manifest of its servers. Collective.

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
    """Return for each part the ranks whose host (for a client: whose home server) holds it. Collective."""
    gathered = group.gather((graph.near_parts, float(os.environ.get("GNNFLEET_BATCH_SHARE") or 1)))
    owned, shares = [own for own, _ in gathered], tuple(share for _, share in gathered)
    near = [tuple(r for r, own in enumerate(owned) if part in own) for part in range(graph.manifest.num_parts)]
    return RankLayout(group.size, tuple(near), () if len(set(shares)) == 1 else shares)


def one_host_layout(graph: Graph, group: RankGroup) -> RankLayout:
    """Assign each part to the ranks of one node, even if several nodes hold the part. Collective."""
    near_by_rank = group.gather((group.ranks.node_rank, graph.near_parts))
    # A part goes to the near node, or else any node, with the fewest parts so far.
    nodes = sorted({node for node, _ in near_by_rank})
    counts = dict.fromkeys(nodes, 0)
    chosen = []
    for part in range(graph.manifest.num_parts):
        near = sorted({node for node, parts in near_by_rank if part in parts}) or nodes
        chosen.append(min(near, key=lambda node: counts[node]))
        counts[chosen[-1]] += 1
    ranks = [tuple(rank for rank, (node, _) in enumerate(near_by_rank) if node == of) for of in chosen]
    return RankLayout(group.size, tuple(ranks))


def batch_plan(graph: Graph, loader: BlockLoader) -> BatchPlan:
    attrs = columns_of(graph, loader.settings)
    columns = {of: ("orig_id", *attrs.get(of, ())) for of in graph.manifest.nodes}
    keeps_edges = isinstance(loader.settings.rule, PPR)
    return BatchPlan(loader.order, columns, loader.requests, loader.settings.threads, keeps_edges)


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
    damage = find_damage(job, ranks)  # raised within the group, so that all ranks end
    with ExitStack() as stack, join_ranks(ranks, device, settings.backend, settings.timeout) as group:
        if settings.track and group.rank == 0:  # under a launcher, the supervisor does this
            from trainer.track.start import tracked

            stack.enter_context(tracked(job.run_dir, settings.track, {"train": settings_record(settings)}))
        graph = group.agree(lambda: stack.enter_context(open_job_graph(job, ranks, damage)))
        check_same_partition(graph, group)
        metrics = group.agree(lambda: stack.enter_context(MetricsLog(job.run_dir, ranks.rank)))
        with memory_errors(group, settings):
            result = _prepare(job, graph, group, metrics).run()
        group.barrier()  # keeps this node's graph server alive until the slowest rank has finished
    return result


def _prepare(job: TrainJob, graph: Graph, group: RankGroup, metrics: MetricsLog) -> Fit:
    """Make all that training needs, from what is predicted to the checkpoint that it continues from. Collective."""
    settings, manifest, is_first = job.settings, graph.manifest, group.rank == 0

    # What is predicted.
    target = group.agree(lambda: pick_target(graph, settings.target, settings.task, settings.decoder))
    of_edges = not isinstance(target, str) and learns_edge_labels(graph, target, settings.task)
    splits: tuple[str, ...] = SPLITS
    edges: dict[str, LabelledEdges] = {}  # of each split, if labels of edges are learned
    task: Task
    baseline: Baseline | None
    if isinstance(target, str):
        splits = tuple(split for split in SPLITS if manifest.nodes[target].splits.get(split))
        task, why, baseline = node_task(graph, target, settings, splits, group)
    elif of_edges and not is_link_types(target):
        from trainer.loader.edge_block_loader import labelled_edges

        edges = group.agree(lambda: labelled_edges(graph, target, settings.time_attr))
        splits = tuple(edges)
        task, why, baseline = edge_task(graph, target, settings, edges, group)
    else:
        from trainer.train.tasks.link import LinkPrediction

        names = group.agree(lambda: metric_names(settings, "link"))
        types = link_types(target)
        of = type_name(types[0]) if len(types) == 1 else f"{len(types)} edge types"
        task, why = LinkPrediction(settings.hidden, names, settings.loss), f"links of {of}"
    if is_first:
        print(f"task {task.kind}: {why}", flush=True)

    # The model.
    folders = (Path(), job.run_dir)
    degrees = in_degrees(graph, settings, folders, group)
    facts = group.agree(lambda: graph_facts(graph, settings, target, task.outputs, degrees))
    rows, left_out = group.agree(lambda: embedded_nodes(settings, manifest, target, task.outputs, folders))
    outputs = task.outputs if of_edges else 0
    model, embedding = group.agree(lambda: make_model(settings, facts, target, rows, group.device, folders, outputs))
    if left_out and is_first:
        print(f"note: {left_out}", flush=True)
    if is_own_model(settings.model):
        group.agree(lambda: keep_sources(settings.model, folders, job.run_dir / "files") if is_first else None)
        if is_first and any(isinstance(module, _BatchNorm) for module in model.modules()):
            print(f"note: {settings.model}: {_OWN_SHARE}", flush=True)

    # The batches of each split.
    loaders: dict[str, BlockLoader]
    rankings: Mapping[str, FullRanking | TimedRanking] = {}  # of the splits whose links are ranked among all targets
    needs_degree, columns = bool(getattr(model, "needs_degree", False)), embeddings_of(model).names
    layout = layout_of(graph, group)
    shared = needs_degree, group.rank, layout, columns
    if isinstance(target, str):
        ages = getattr(model, "timed", ())
        wanted = {split: loader_settings(settings, target, split, needs_degree, columns, ages) for split in splits}
        loaders = group.agree(lambda: {of: BatchLoader(graph, want, group.rank, layout) for of, want in wanted.items()})
    elif of_edges:
        loaders = group.agree(lambda: {**edge_loaders(settings, graph, edges, *shared)})
    else:
        group.agree(lambda: check_link_settings(settings, graph, target))
        attrs = graph.store.graph_attrs
        from trainer.loader.split_links import split_links

        links = {of: group.agree(lambda of=of: split_links(graph, of, settings.time_attr)) for of in link_types(target)}  # type: ignore[misc]
        held_out = [split for split in splits[1:] if any(split in given for given in links.values())]
        ranked = held_out if settings.eval_negatives == "all" else []
        if ranked:
            # imported here because they import torch_geometric
            from trainer.train.full_ranking import FullRanking
            from trainer.train.timed_ranking import ranking_of

            every = settings, layout, group, job.run_dir
            rankings = {
                split: FullRanking(graph, target, split, *every) if is_link_types(target)
                else ranking_of(graph, target, split, links[target], *every)
                for split in ranked
            }  # fmt: skip
        sampled = [split for split in splits if split not in ranked]
        train_links = {of: given.get("train") for of, given in links.items()}
        counts = LinkCounts.counted(graph, train_links, settings.decoder != "dot", group)
        if is_link_types(target):
            typed = group.agree(lambda: typed_link_loaders(settings, graph, target, sampled, *shared))
            loaders = {**typed}
        else:
            edge_type, given = target, links[target]
            ages = getattr(model, "timed", ())
            of_links = group.agree(
                lambda: link_loaders(
                    settings, graph, edge_type, sampled, *shared, counts.of_targets(graph), ages, given
                )
            )
            loaders = {**of_links}
        assert isinstance(task, LinkPrediction)
        popularity = {split: ranking.popularity for split, ranking in rankings.items()}
        baseline = link_baseline(loaders, popularity, task, counts, graph, group)
        if not held_out and is_first:
            name = type_name(link_types(target)[0])
            text = f"no links of {name} are held out, so nothing is evaluated; set option hold_out: {name}"
            if is_task_table(link_types(target)[0][0], attrs):
                text = f"no rows of {link_types(target)[0][0]} are in val or test, so nothing is evaluated"
            print(f"note: {text}", flush=True)

    group.agree(lambda: check_task(settings, task, "val" in loaders or "val" in rankings))

    # Rows on the devices, and where batches are made.
    size = CacheSize.parse(settings.device_cache)
    reserved = cache_bytes(graph, size)
    plan = group.agree(lambda: plan_sampling(graph, loaders, settings.sampling, group.device, reserved))
    if size != CacheSize():

        def fill() -> list[DeviceRows]:  # of the rows of other hosts and this one that train batches request most
            rows = device_rows(graph, batch_plan(graph, loaders["train"]), size, group.device)
            for one in loaders.values():
                one.keep(rows)
            return list(rows.values())

        filled = group.agree(fill)
        if is_first:
            count, num_bytes = sum(len(each.rows) for each in filled), sum(each.rows.nbytes for each in filled)
            print(f"{count:,} rows ({size_text(num_bytes)}) cached on each device", flush=True)
        # by the memory that is left
        plan = group.agree(lambda: plan_sampling(graph, loaders, settings.sampling, group.device))
    sampling = choose_sampling(graph, loaders, plan, group)
    if sampling.why and is_first:
        print(sampling, flush=True)

    # The training loop.
    folder, record = job.run_dir / "checkpoints", graph_record(manifest, target)
    writers = checkpoint_writers(group, embedding is not None, bool(int(os.environ.get("GNNFLEET_RESTARTS") or 0)))
    fit = Fit(settings, model, task, loaders, group, metrics, folder, record, embedding, writers, baseline, rankings)

    # Rows of other hosts that this host keeps, and the state to continue from.
    node, cache = f"{group.ranks.node_rank} {group.ranks.host}", job.remote_access.cache
    of_train = batch_plan(graph, loaders["train"])
    if cached := fill_cache(graph.access, graph.store, of_train, node, cache, job.run_dir / "cache", group):
        fit.log_prediction(cached)
    if path := os.environ.get("GNNFLEET_RESUME") or settings.resume:

        def check(saved: Checkpoint) -> None:
            check_fits(saved, settings=settings, graph=record, path=path, kind=task.kind)
            same_categories(saved, facts, path)

        fit.restore(read_on_first(path, check, group))
    elif settings.start is not None:
        from trainer.train.start import start_from

        started = start_from(settings.start, model, embedding, group)
        if is_first:
            print(started, flush=True)
    return fit


@contextmanager
def memory_errors(group: RankGroup, settings: TrainSettings) -> Iterator[None]:
    """In the ``with`` block, convert CUDA's out-of-memory errors to ``TrainingError``.

    The message names settings to lower.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not _EXHAUSTED.search(str(error)):
            raise
        reason = (str(error).splitlines() or [""])[0].removeprefix("CUDA out of memory. ")
        cached = CacheSize.parse(settings.device_cache) != CacheSize()
        words = [  # those that save the most memory come first
            *([f"device_cache ({settings.device_cache})"] if cached else []),
            f"batch_size ({settings.batch_size})",
            f"fanouts ({', '.join(map(str, settings.fanouts))})",
            f"hidden ({settings.hidden})",
            *([] if settings.precision == "bfloat16" else ["precision (to bfloat16)"]),
            f"eval_batch_size ({settings.eval_batch_size})",
            *([] if settings.sampling == "cpu" else ["sampling (to cpu)"]),
        ]
        raise TrainingError(
            f"CUDA out of memory on {group.ranks}; lower one of {', '.join(words)} ({reason})"
        ) from error
