"""Files of link prediction for all nodes: embeddings of sources and targets, and the best targets of each source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.core.batch import LinkEnds
from trainer.core.schema import is_link_types, type_name
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
from trainer.nn.layerwise_inference import LayerResults, LayerRows
from trainer.nn.link_embeddings import LinkEmbeddings
from trainer.nn.link_model import LinkModel
from trainer.sampler.types import RowRequest
from trainer.store.npy import map_npy
from trainer.train.epoch import EVAL_EPOCH
from trainer.train.full_ranking import FullRanking
from trainer.train.loaders import link_loaders, typed_link_loaders
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import Labels, Task

MOST_PAIRS = 10**10  #: most pairs of source and target that are scored unless the user asks for more

_TOP_K = 10


def number_of_targets(graph: Graph, links: Sequence[LinkEmbeddings], wanted: int | None) -> int:
    """Return how many targets to list per source: ``wanted``, but at most the number of targets.

    If ``wanted`` is None: ``_TOP_K``, or 0 if there are more than ``MOST_PAIRS`` pairs of source and target.
    """
    sizes = [[graph.manifest.nodes[of].num_nodes for of in each.ends] for each in links]
    pairs = sum(source * target for source, target in sizes)
    count = (_TOP_K if pairs <= MOST_PAIRS else 0) if wanted is None else wanted
    return min(count, max(target for _, target in sizes))


def link_metrics(
    links: Sequence[LinkEmbeddings], model: LinkModel, rows: LayerResults, settings: TrainSettings, task: Task,
    layout: RankLayout,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the metrics on each split of held-out links, with the same negatives as evaluations in training.

    Embeddings are computed from all edges of the graph, even if ``settings`` has a ``time_attr``. ``rows``: the
    encoder's rows of all nodes. Collective.
    """
    graph, group, target, splits = links[0].graph, links[0].group, model.target, ("val", "test")
    if settings.eval_negatives == "all":
        every = [FullRanking(graph, target, split, settings, layout, group, Path()) for split in splits]
        return {each.split: each.metrics(links, task.names) for each in every if each.num_links}
    timeless = replace(settings, time_attr=None)
    found = {}
    if is_link_types(target):
        for split, typed in typed_link_loaders(timeless, graph, target, splits, False, group.rank, layout).items():
            sums = torch.zeros(task.num_sums, dtype=torch.float64)
            for share in typed.shares(EVAL_EPOCH):
                seeds, ends = typed.seeded(share)
                table = torch.cat([rows[of].fetch(seeds.nodes[of]) for of in ends.types])
                with torch.no_grad():
                    out = model.typed_scores(table.to(group.device), ends.to(group.device)).cpu()
                sums += task.metric_sums(out, Labels(links=ends))
            found[split] = task.metrics(group.sum(sums).tolist())
        return found
    (own,), (source, _, end), store = links, target, graph.store
    loaders = link_loaders(timeless, graph, target, splits, False, group.rank, layout)
    for split, loader in loaders.items():
        sums = torch.zeros(task.num_sums, dtype=torch.float64)
        for share in loader.shares(EVAL_EPOCH):
            src, dst, negatives = loader.ends(share)
            left = own.source.fetch(store.to_global(source, src))
            right = own.target.fetch(store.to_global(end, dst))
            wrong = own.target.fetch(store.to_global(end, negatives))
            others = loader.own(share, src, dst)
            scores = (left[others.owner] * own.target.fetch(store.to_global(end, others.ids))).sum(1).numpy()
            alone = torch.from_numpy(others.table(len(src), scores, -np.inf))
            out = torch.cat([(left * right).sum(1, keepdim=True), left @ wrong.t(), alone], 1)
            pairs = LinkEnds(source, end, *map(torch.from_numpy, (src, dst, negatives)))
            pairs = replace(pairs, own=alone.isneginf().long().neg())
            sums += task.metric_sums(out, Labels(links=pairs))
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
    table = _write_best(out / "source", graph, links, count, parquet) if count else ""
    links.group.barrier()
    text = f"embeddings: {out}/source/part*/embedding.npy and {out}/target, ids in id.npy beside them"
    if not count:
        return f"{text}\n--top-k 10 also lists the best targets of each source"
    return f"the {count} best new targets of each source: {table}\n{text}"


def write_typed_predictions(
    out: Path, graph: Graph, model: LinkModel, rows: LayerResults, links: Sequence[LinkEmbeddings], count: int,
    parquet: bool,
) -> str:  # fmt: skip
    """Write predictions of several edge types, as ``write_link_predictions`` does for one. Collective.

    The embeddings of each node type are in ``<node type>/part<p>/embedding.npy``, as the decoder reads them, and its
    weights in ``relations.npy``, a row per line of ``relations.csv``. The best targets of each source are in
    ``<edge type>/``.
    """
    group, tables = links[0].group, []
    for of in dict.fromkeys(end for each in links for end in each.ends):
        array = OutputArray("embedding", rows[of].values.shape[1], "float32")
        write_array(out / of, graph, of, rows[of], array, group)
    if model.decoder is not None and group.rank == 0:
        np.save(out / "relations.npy", model.decoder.relation.detach().cpu().numpy())
        names = "".join(f"{each.relation},{type_name(each.edge_type)}\n" for each in links)
        (out / "relations.csv").write_text(f"relation,edge_type\n{names}")
    for each in links if count else ():
        most = min(count, graph.manifest.nodes[each.ends[1]].num_nodes)
        tables.append(_write_best(out / type_name(each.edge_type), graph, each, most, parquet))
    group.barrier()
    text = f"embeddings: {out}/{links[0].ends[0]}/part*/embedding.npy, ids in id.npy beside them"
    if not count:
        return f"{text}\n--top-k 10 also lists the best targets of each source and edge type"
    return f"the {count} best new targets of each source: {tables[0]}, and so for each edge type\n{text}"


def _write_best(folder: Path, graph: Graph, links: LinkEmbeddings, count: int, parquet: bool) -> str:
    """Write the ``count`` best targets of each source to ``folder``, and return the path of the table of all parts."""
    source, target = links.ends
    best, scores = links.best_targets(count)
    for name, values in (("targets", best), ("scores", scores)):
        array = OutputArray(name, count, str(values.dtype))
        write_array(folder, graph, source, LayerRows(links.source.shares, values), array, links.group)
    own = [*own_parts(folder, graph, source, links.source, links.group)]
    for part in own:
        _write_part(part, graph, target, parquet)
    return str(merge_parts(folder, own, parquet, links.group))


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
