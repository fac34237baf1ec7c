"""``python -m trainer infer``: evaluates a checkpoint's model on every node of a partitioned graph."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.graph_attrs import is_task_table
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.core.schema import AnyType, LinkTypes, is_link_types, link_types, seed_types, target_name, type_name
from trainer.core.train_config import is_own_model
from trainer.graph.open import Graph
from trainer.infer.edge_predictions import EdgePredictions, SampledEdges
from trainer.infer.link_predictions import (
    link_metrics,
    number_of_targets,
    timed_metrics,
    write_link_predictions,
    write_list_predictions,
    write_typed_predictions,
)
from trainer.infer.node_predictions import node_metrics, write_node_predictions
from trainer.infer.pair_scores import write_pair_scores
from trainer.infer.prediction_files import writes_parquet
from trainer.nn.edge_model import EdgeModel
from trainer.nn.layerwise_inference import stack_of
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.nn.link_model import LinkModel
from trainer.store.manifest import Manifest
from trainer.train.checkpoint import Checkpoint, graph_record
from trainer.train.fit import metrics_text
from trainer.train.full_ranking import output_rows
from trainer.train.job import (
    check_same_partition,
    find_damage,
    layout_of,
    one_host_layout,
    open_job_graph,
    read_on_first,
)
from trainer.train.model import read_categories, reads_types, source_folders, trained_model
from trainer.train.settings import InferJob, TrainSettings
from trainer.train.tasks.choose import of_record

Metrics = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class InferResult:
    target: AnyType | LinkTypes  #: node type of the predictions, or edge types of the links
    task: str
    epoch: int  #: epoch of the weights that were used
    metrics: Metrics  #: metrics by split and name
    nodes: int  #: of the target type (of a task table: rows); for links, of both types; for labels of edges, of edges
    files: str  #: what was written, in words
    fanouts: tuple[int, ...] | None  #: neighbours per hop of a model without layers; None: layer by layer, with all


def infer(job: InferJob, ranks: Ranks | None = None) -> InferResult:
    """Compute the model's output for all nodes, and write it to folder ``out``.

    Every rank returns the same result, which rank 0 also writes to ``out/infer.json``. Raises ``TrainerError`` on every
    rank for errors that a user can fix.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    damage = find_damage(job, ranks)
    with join_ranks(ranks, pick_device(ranks), "gloo", job.timeout) as group, ExitStack() as stack:
        parquet = group.agree(lambda: writes_parquet(job.parquet))
        graph = group.agree(lambda: stack.enter_context(open_job_graph(job, ranks, damage)))
        check_same_partition(graph, group)
        scratch = group.agree(lambda: _scratch(job.out, group.rank))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        check = partial(_check_graph, manifest=graph.manifest, path=job.checkpoint)
        saved = read_on_first(job.checkpoint, check, group)
        result = _infer(job, graph, saved, scratch, parquet, group)
        if group.rank == 0:
            record = {
                "target": target_name(result.target), "task": result.task, "nodes": result.nodes, "epoch": result.epoch,
                "metrics": {split: dict(values) for split, values in result.metrics.items()}, "fanouts": result.fanouts,
                "checkpoint": str(job.checkpoint),
            }  # fmt: skip
            (job.out / "infer.json").write_text(json.dumps(record, indent=1) + "\n")
            what = "nodes" if isinstance(result.target, str) or result.task == "link" else "edges"
            if isinstance(result.target, str) and is_task_table(result.target, graph.manifest.graph_attrs):
                what = "rows"
            of = f"{len(result.target)} edge types" if is_link_types(result.target) else type_name(result.target)
            print(f"{result.nodes:,} {what} of {of}, weights of epoch {result.epoch}", flush=True)
            for split, values in result.metrics.items():
                print(f"{split} {metrics_text(values)}", flush=True)
            print(result.files, flush=True)
        group.barrier()  # keeps this node's graph server alive until the slowest rank has finished
    return result


def _infer(
    job: InferJob, graph: Graph, saved: Checkpoint, scratch: Path, parquet: bool, group: RankGroup
) -> InferResult:  # fmt: skip
    settings, built = TrainSettings(**saved.settings), source_folders(job.checkpoint)
    if is_own_model(settings.model):
        group.agree(lambda: reads_types(settings.model, built))  # raises errors of its import on all ranks
    model, _ = trained_model(saved, group.device, built)
    target, epoch = saved.built_from["target"], saved.best.epoch if saved.best else saved.epoch
    task = of_record(saved.task)
    layout = layout_of(graph, group) if job.cluster is None else one_host_layout(graph, group)
    group.agree(lambda: read_categories(model, graph, settings.edge_attr))
    how, fanouts = "", None
    lists = not isinstance(target, str) and is_task_table(link_types(target)[0][0], graph.manifest.graph_attrs)
    timed = settings.time_attr is not None and (isinstance(target, str) or lists)
    neighbors = settings.neighbors.name if settings.neighbors else "fanout"
    by_edge = isinstance(model, EdgeModel) and (settings.hide or settings.time_attr is not None)
    stacked = neighbors not in ("ppr", "walks") and stack_of(model) is not None
    if timed or lists or by_edge or not stacked or neighbors == "top":
        fanouts = job.fanouts or settings.eval_fanouts or settings.fanouts
        if len(fanouts) != len(settings.fanouts):
            raise SettingsError(f"fanouts has {len(fanouts)} numbers, but the model has {len(settings.fanouts)} layers")
        top = "the heaviest neighbours" if settings.weight_attr else "the latest neighbours"
        kind = {"fanout": "sampled neighbours", "top": top}.get(neighbors, f"neighbours by {neighbors}")
        on = f"{kind} ({', '.join(map(str, fanouts))})" if max(fanouts) > 0 else "all neighbours"
        at = ", of each node not later than its own time" if timed else ""
        if by_edge:
            at = ", of each edge not later than its own time" if settings.time_attr else ", without the edge itself"
        how = f"; {settings.model} was run on {on}{at}{'' if job.fanouts else ', as in evaluation'}"
        settings = replace(settings, eval_fanouts=fanouts)
    elif job.fanouts:
        raise SettingsError(f"fanouts: {settings.model} is run layer by layer, with all neighbours; leave them out")
    if isinstance(model, EdgeModel) and by_edge:
        sampled = SampledEdges(graph, model, task, settings, layout, group)
        files = sampled.write(job.out, parquet, job.probabilities)
        return InferResult(target, task.kind, epoch, sampled.metrics(), len(sampled.stored), files + how, fanouts)
    if lists and isinstance(model, LinkModel) and not is_link_types(target) and not isinstance(target, str):
        if job.pairs is not None:
            raise SettingsError(f"pairs: {target[0]} is a task table; the best targets of each of its rows are listed")
        if job.without_held_out:
            raise SettingsError(f"--without-held-out: {target[0]} is a task table, whose lists may have any target")
        files = write_list_predictions(
            job.out, graph, model, target, settings, job.top_k, parquet, layout, scratch, group
        )
        metrics = timed_metrics(graph, model, target, settings, task, layout, scratch, group)
        num_rows = graph.manifest.nodes[target[0]].num_nodes
        return InferResult(target[0], task.kind, epoch, metrics, num_rows, files + how, fanouts)
    rows = output_rows(model, target, graph, settings, layout, scratch, group, job.nodes_at_once)
    sizes = {of: spec.num_nodes for of, spec in graph.manifest.nodes.items()}
    if isinstance(target, str):
        files = write_node_predictions(
            job.out, graph, target, rows[target], task, parquet, group, probabilities=job.probabilities
        )
        metrics = node_metrics(graph, target, rows[target], task, group)
        return InferResult(target, task.kind, epoch, metrics, sizes[target], files + how, fanouts)
    if isinstance(model, EdgeModel):
        of_edges = EdgePredictions(graph, model, rows, task, settings.edge_attr, group)
        files = of_edges.write(job.out, parquet, job.probabilities)
        return InferResult(target, task.kind, epoch, of_edges.metrics(), len(of_edges.stored), files + how, fanouts)
    assert isinstance(model, LinkModel)
    links = LinkEmbeddings.of(graph, model, rows, scratch, group)
    forward = [each for each in links if not each.backward]
    count = number_of_targets(graph, forward, job.top_k)
    if is_link_types(target):
        files = write_typed_predictions(job.out, graph, model, rows, forward, count, job.without_held_out, parquet)
    else:
        files = write_link_predictions(job.out, graph, links[0], count, job.without_held_out, parquet)
    if job.pairs is not None:
        write_pair_scores(job.out, graph, forward, job.pairs, parquet)
        files += f"; the scores of the given pairs are in {job.out}/pairs.csv"
    if saved.settings["time_attr"] is not None:
        files += "; embeddings and scores are for a time after all edges of the graph"
    metrics = link_metrics(links, model, rows, settings, task, layout, scratch)
    count = sum(sizes[of] for of in seed_types(target))
    return InferResult(target, task.kind, epoch, metrics, count, files + how, fanouts)


def _check_graph(saved: Checkpoint, manifest: Manifest, path: Path) -> None:
    target = saved.built_from["target"]
    known: Mapping[Any, Any] = manifest.nodes if isinstance(target, str) else manifest.edges
    if missing := [of for of in ([target] if isinstance(target, str) else link_types(target)) if of not in known]:
        raise CheckpointError(
            f"checkpoint {path} belongs to another graph, {saved.graph['dataset']}: the model's target is "
            f"{type_name(missing[0])!r}, but {manifest.dataset} has only {', '.join(map(type_name, known))}"
        )
    here = graph_record(manifest, target)
    if differing := [name for name, value in saved.graph.items() if here.get(name) != value]:
        text = "; ".join(f"{name} is {here.get(name)}, in the checkpoint {saved.graph[name]}" for name in differing)
        raise CheckpointError(f"checkpoint {path} belongs to another graph: {text}")


def _scratch(out: Path, rank: int) -> Path:
    folder = out / f".layers-rank{rank}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    return folder
