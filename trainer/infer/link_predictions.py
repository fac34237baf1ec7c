"""Files of link prediction for all nodes: embeddings of sources and targets, and the best targets of each source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.core.batch import LinkEnds
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.prediction_files import (
    ROWS_AT_ONCE,
    Column,
    OutputArray,
    id_attr,
    id_column,
    id_list,
    merge_parts,
    own_parts,
    write_array,
    write_table,
)
from trainer.nn.layerwise_inference import LayerRows
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.sampler.types import RowRequest
from trainer.store.npy import map_npy
from trainer.train.epoch import EVAL_EPOCH
from trainer.train.full_ranking import FullRanking
from trainer.train.loaders import link_loaders
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import Labels, Task

MOST_PAIRS = 10**10  #: most pairs of source and target that are scored unless the user asks for more

_TOP_K = 10


def number_of_targets(graph: Graph, links: LinkEmbeddings, wanted: int | None) -> int:
    """Return how many targets to list per source: ``wanted``, but at most the number of targets.

    If ``wanted`` is None: ``_TOP_K``, or 0 if there are more than ``MOST_PAIRS`` pairs of source and target.
    """
    source, target = (graph.manifest.nodes[of].num_nodes for of in links.edge_type[::2])
    count = (_TOP_K if source * target <= MOST_PAIRS else 0) if wanted is None else wanted
    return min(count, target)


def link_metrics(
    links: LinkEmbeddings, settings: TrainSettings, task: Task, layout: RankLayout
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the metrics on each split of held-out links, with the same negatives as evaluations in training.

    Embeddings are computed from all edges of the graph, even if ``settings`` has a ``time_attr``. Collective.
    """
    (source, _, target), graph, group = links.edge_type, links.graph, links.group
    if settings.eval_negatives == "all":
        every = [
            FullRanking(graph, links.edge_type, split, settings, layout, group, Path()) for split in ("val", "test")
        ]
        return {each.split: each.metrics(links, task.names) for each in every if each.links.shape[1]}
    timeless, store = replace(settings, time_attr=None), graph.store
    loaders = link_loaders(timeless, graph, links.edge_type, ("val", "test"), False, group.rank, layout)
    found = {}
    for split, loader in loaders.items():
        sums = torch.zeros(task.num_sums, dtype=torch.float64)
        for share in loader.shares(EVAL_EPOCH):
            src, dst, negatives = loader.ends(share)
            rows = links.source.fetch(store.to_global(source, src))
            right = links.target.fetch(store.to_global(target, dst))
            wrong = links.target.fetch(store.to_global(target, negatives))
            out = torch.cat([(rows * right).sum(1, keepdim=True), rows @ wrong.t()], 1)
            ends = LinkEnds(source, target, *map(torch.from_numpy, (src, dst, negatives)))
            sums += task.metric_sums(out, Labels(links=ends))
        found[split] = task.metrics(group.sum(sums).tolist())
    return found


def write_link_predictions(out: Path, graph: Graph, links: LinkEmbeddings, count: int, parquet: bool) -> str:
    """Write ``source/part<p>/embedding.npy`` and ``target/part<p>/embedding.npy``, float32 [nodes of the part, width].

    If ``count`` is not 0, also writes the ``count`` best targets of each source: the table
    ``source/part<p>/predictions.csv``, and the arrays of ``LinkEmbeddings.best_targets`` as ``targets.npy`` and
    ``scores.npy`` beside it. Returns a sentence for the user on what was written. Collective.
    """
    source, _, target = links.edge_type
    for role, of, rows in (("source", source, links.source), ("target", target, links.target)):
        array = OutputArray("embedding", rows.values.shape[1], "float32")
        write_array(out / role, graph, of, rows, array, links.group)
    if count:
        best, scores = links.best_targets(count)
        for name, values in (("targets", best), ("scores", scores)):
            array = OutputArray(name, count, str(values.dtype))
            write_array(out / "source", graph, source, LayerRows(links.source.shares, values), array, links.group)
        own = [*own_parts(out / "source", graph, source, links.source, links.group)]
        for folder in own:
            _write_part(folder, graph, target, parquet)
        table = merge_parts(out / "source", own, parquet, links.group)
    links.group.barrier()
    text = f"embeddings are in {out}/source/part*/embedding.npy and {out}/target, ids in id.npy beside them"
    if not count:
        return f"{text}; --top-k 10 also lists the best targets of each source"
    return f"the {count} best new targets of each source are in {table}; {text}"


def _write_part(folder: Path, graph: Graph, target: str, parquet: bool) -> None:
    ids, best, scores = (map_npy(folder / f"{name}.npy") for name in ("id", "targets", "scores"))
    name = id_attr(graph, target)

    def target_ids(nodes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        wanted = RowRequest(target, graph.store.to_global(target, nodes), (name,))
        return np.asarray(graph.access.gather([wanted])[0][name])

    def blocks() -> Iterator[list[list[Any]]]:
        step = max(1, ROWS_AT_ONCE // best.shape[1])
        for begin in range(0, len(best), step):
            some = np.array(best[begin : begin + step])
            known = some >= 0
            sources = np.repeat(np.array(ids[begin : begin + step]), known.sum(1), axis=0)
            score = np.array(scores[begin : begin + step])[known]
            yield [id_list(sources), id_list(target_ids(some[known])), score.tolist()]

    columns = [id_column("source", ids), id_column("target", target_ids(np.arange(1))), Column("score", "DOUBLE")]
    write_table(folder / "predictions", columns, blocks(), parquet)
