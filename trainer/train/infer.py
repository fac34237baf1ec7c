"""``python -m trainer infer``: evaluates a checkpoint's model on every node of a partitioned graph."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.core.arrays import Array
from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.ranks import RankGroup, Ranks, join_ranks, pick_device
from trainer.core.schema import NodeType
from trainer.core.texts import decode_texts
from trainer.graph.open import Graph
from trainer.nn.graph_facts import facts_of
from trainer.sampler.types import RowRequest
from trainer.store.manifest import Manifest
from trainer.train.checkpoint import Checkpoint, graph_record
from trainer.train.job import (
    check_same_partition,
    find_damage,
    layout_of,
    one_host_layout,
    open_job_graph,
    read_on_first,
)
from trainer.train.layerwise_inference import LayerRows, NodeRange, WholeGraph, stack_of
from trainer.train.model import trained_model
from trainer.train.settings import InferJob

_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class InferResult:
    """Result of full-graph inference, over all ranks."""

    target: NodeType
    epoch: int  #: epoch of the weights that were used
    accuracy: Mapping[str, float]  #: accuracy by split, 0 to 1
    nodes: int


def infer(job: InferJob, ranks: Ranks | None = None) -> InferResult:
    """Write the logits of all nodes of the target type into ``out/part<p>/logits.npy``.

    float32 [nodes of the part, num_classes]; ``orig_id.npy`` in the same folder has the original id of each row. Every
    rank returns the same result, which rank 0 also writes to ``out/infer.json``. Raises ``TrainerError`` on every rank
    for errors that a user can fix.
    """
    ranks = ranks or Ranks.from_env(os.environ)
    damage = find_damage(job, ranks)
    with join_ranks(ranks, pick_device(ranks), "gloo", job.timeout) as group, ExitStack() as stack:
        graph = group.agree(lambda: stack.enter_context(open_job_graph(job, ranks, damage)))
        check_same_partition(graph, group)
        scratch = group.agree(lambda: _scratch(job.out, group.rank))
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        check = partial(_check_graph, manifest=graph.manifest, path=job.checkpoint)
        saved = read_on_first(job.checkpoint, check, group)
        weight = saved.settings["weight_attr"]
        model, _ = trained_model(saved, graph.manifest, group.device)
        target, epoch = saved.graph["target"], saved.best.epoch if saved.best else saved.epoch
        layout = layout_of(graph, group) if job.cluster is None else one_host_layout(graph, group)
        whole = WholeGraph(graph, layout, group, scratch, job.nodes_at_once, weight)
        rows = whole.run(stack_of(model, facts_of(graph.manifest, target)))[target]
        _write_parts(job.out, graph, target, rows, group)
        group.barrier()  # the rows of a part may come from several ranks
        _write_predictions(job.out, graph, target, rows, group)
        result = InferResult(
            target, epoch, _accuracy(graph, target, rows, group), graph.manifest.nodes[target].num_nodes
        )
        if group.rank == 0:
            _report(result, job)
        group.barrier()  # keeps this node's graph server alive until the slowest rank has finished
    return result


def _check_graph(saved: Checkpoint, manifest: Manifest, path: Path) -> None:
    target = saved.graph["target"]
    if target not in manifest.nodes:
        raise CheckpointError(
            f"checkpoint {path} is of another graph, {saved.graph['dataset']}: its model classifies {target!r} nodes;"
            f" {manifest.dataset} has only {', '.join(manifest.nodes)}"
        )
    here = graph_record(manifest, target)
    if differing := [name for name, value in saved.graph.items() if here.get(name) != value]:
        text = "; ".join(f"{name} is {here.get(name)}, in the checkpoint {saved.graph[name]}" for name in differing)
        raise CheckpointError(f"checkpoint {path} is of another graph: {text}")
    if saved.settings["time_attr"] is not None:
        raise CheckpointError(
            f"checkpoint {path} is of a model trained with time_attr {saved.settings['time_attr']!r}, which leaves out "
            "neighbours later than the seed; full-graph inference cannot. Evaluate it by sampling, as training does"
        )


def _scratch(out: Path, rank: int) -> Path:
    folder = out / f".layers-rank{rank}"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    except OSError as error:
        raise SettingsError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    return folder


def _write_parts(out: Path, graph: Graph, target: NodeType, rows: LayerRows, group: RankGroup) -> None:
    """Write this rank's rows into ``part<p>/logits.npy``.

    The rank that has the first nodes of a part creates the file.
    """
    own, offsets = rows.shares.own(group.rank), graph.manifest.nodes[target].offsets
    for piece in own:
        if piece.first == offsets[piece.part_id]:
            _new_part(out, graph, target, piece.part_id, rows.values.shape[1])
    group.barrier()
    for piece in own:
        logits = _shared_file(out, piece)
        begin = piece.first - offsets[piece.part_id]
        logits[begin : begin + piece.last - piece.first] = rows.values[piece.row : piece.row + piece.last - piece.first]
        logits.flush()


def _new_part(out: Path, graph: Graph, target: NodeType, part_id: int, width: int) -> None:
    folder = out / f"part{part_id}"
    folder.mkdir(parents=True, exist_ok=True)
    offsets = graph.manifest.nodes[target].offsets
    ids = np.arange(offsets[part_id], offsets[part_id + 1])
    name = "id" if "id" in graph.manifest.nodes[target].attrs else "orig_id"
    (found,) = graph.access.gather([RowRequest(target, ids, ("orig_id", name))])
    np.save(folder / "orig_id.npy", np.asarray(found["orig_id"], np.int64))
    np.save(folder / "id.npy", np.asarray(found[name]))
    np.lib.format.open_memmap(folder / "logits.npy", mode="w+", dtype=np.float32, shape=(len(ids), width)).flush()


def _write_predictions(out: Path, graph: Graph, target: NodeType, rows: LayerRows, group: RankGroup) -> None:
    """Write ``part<p>/predictions.csv`` of the parts whose first nodes this rank has: id, class and its probability.

    The id is that of the node table (dataset `tables`), else the original id; the class is its text where the label is
    one.
    """
    offsets = graph.manifest.nodes[target].offsets
    prefix = f"{target}__" if graph.manifest.hetero else ""
    texts = graph.store.graph_attrs.get(f"{prefix}y__categories")
    names = decode_texts(np.asarray(texts)) if texts is not None else None
    for piece in rows.shares.own(group.rank):
        if piece.first == offsets[piece.part_id]:
            _write_part_predictions(out / f"part{piece.part_id}", names)


def _write_part_predictions(folder: Path, names: Sequence[str] | None) -> None:
    logits, ids = np.load(folder / "logits.npy", mmap_mode="r"), np.load(folder / "id.npy", mmap_mode="r")
    with (folder / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "prediction", "probability"])
        for begin in range(0, len(logits), _ROWS_AT_ONCE):
            some = ids[begin : begin + _ROWS_AT_ONCE]
            scores = torch.softmax(torch.from_numpy(np.array(logits[begin : begin + _ROWS_AT_ONCE])), 1).max(1)
            classes = scores.indices.tolist()
            writer.writerows(
                zip(
                    decode_texts(some) if some.ndim == 2 else some.tolist(),
                    [names[k] for k in classes] if names else classes,
                    [f"{value:.6f}" for value in scores.values.tolist()],
                    strict=True,
                )
            )


def _shared_file(out: Path, piece: NodeRange) -> np.memmap[Any, Any]:
    path = out / f"part{piece.part_id}" / "logits.npy"
    if not path.exists():
        raise SettingsError(
            f"{path} does not exist: ranks that share part {piece.part_id} must see the same --out; "
            "give a shared folder, or give each host its own parts (--part-ids, --cluster)"
        )
    return np.lib.format.open_memmap(path, mode="r+")


def _accuracy(graph: Graph, target: NodeType, rows: LayerRows, group: RankGroup) -> dict[str, float]:
    """For each split, the share of nodes whose label is predicted correctly. Collective."""
    spec = graph.manifest.nodes[target]
    splits = [split for split, count in spec.splits.items() if count] if "y" in spec.attrs else []
    sums = torch.zeros(len(splits), 2, dtype=torch.float64)
    for number, split in enumerate(splits):
        seeds = np.asarray(graph.store.seeds(target, split))
        seeds = seeds[rows.shares.owners(seeds) == group.rank]
        (found,) = graph.access.gather([RowRequest(target, seeds, ("y",))])
        sums[number, 0] = _right(rows.values[rows.shares.rows(seeds)], found["y"])
        sums[number, 1] = len(seeds)
    return {split: right / count for split, (right, count) in zip(splits, group.sum(sums).tolist(), strict=True)}


def _right(logits: Array, y: Array) -> int:
    return int((logits.argmax(1) == y).sum()) if len(y) else 0


def _report(result: InferResult, job: InferJob) -> None:
    """Write ``infer.json`` and print the result."""
    record = {
        "target": result.target, "nodes": result.nodes, "epoch": result.epoch, "accuracy": dict(result.accuracy),
        "checkpoint": str(job.checkpoint),
    }  # fmt: skip
    (job.out / "infer.json").write_text(json.dumps(record, indent=1) + "\n")
    scores = "".join(f"  {split} {accuracy:.4f}" for split, accuracy in result.accuracy.items())
    print(f"{result.nodes:,} {result.target} nodes, weights of epoch {result.epoch}:{scores}", flush=True)
    print(
        f"predictions are in {job.out}/part*/predictions.csv, logits in logits.npy beside them, and the row number of "
        "each node in the source in orig_id.npy",
        flush=True,
    )
