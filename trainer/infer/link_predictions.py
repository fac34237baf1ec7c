"""Files of link prediction for all nodes: embeddings of sources and targets, and the best targets of each source.

Sources may be the rows of a task table, whose targets are those known at the row's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.core.batch import LinkEnds
from trainer.core.graph_attrs import held_out_links, key_attr
from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType, NodeType, is_link_types, type_name
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.prediction_files import (
    ROWS_AT_ONCE,
    OutputArray,
    TableColumn,
    id_attr,
    id_column,
    id_list,
    key_columns,
    merge_parts,
    own_parts,
    write_array,
    write_table,
)
from trainer.loader.split_links import row_times, rows_of_splits, split_links
from trainer.nn.layerwise_inference import LayerResults, LayerRows, WholeGraph
from trainer.nn.link_embeddings import DotProducts, LinkEmbeddings, best_targets, original_ids
from trainer.nn.link_model import LinkModel
from trainer.sampler.types import RowRequest
from trainer.store.npy import map_npy
from trainer.train.epoch import EVAL_EPOCH, evaluate
from trainer.train.full_ranking import FullRanking
from trainer.train.loaders import link_loaders, typed_link_loaders
from trainer.train.model import embeddings_of
from trainer.train.settings import TrainSettings
from trainer.train.tasks.task import Labels, Task
from trainer.train.timed_ranking import ModelRows, Queries, ranking_of

_MOST_PAIRS = 10**10  #: most pairs of source and target that are scored unless the user asks for more

_TOP_K = 10


def number_of_targets(graph: Graph, links: Sequence[LinkEmbeddings], wanted: int | None) -> int:
    """Return how many targets to list per source: ``wanted``, but at most the number of targets.

    If ``wanted`` is None: ``_TOP_K``, or 0 if there are more than ``_MOST_PAIRS`` pairs of source and target.
    """
    sizes = [[graph.manifest.nodes[of].num_nodes for of in each.ends] for each in links]
    pairs = sum(source * target for source, target in sizes)
    count = (_TOP_K if pairs <= _MOST_PAIRS else 0) if wanted is None else wanted
    return min(count, max(target for _, target in sizes))


def link_metrics(
    links: Sequence[LinkEmbeddings], model: LinkModel, rows: LayerResults, settings: TrainSettings, task: Task,
    layout: RankLayout, scratch: Path,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the metrics on each split of held-out links, with the same negatives as evaluations in training.

    With a ``time_attr``, links of one type are scored at their times, as in training; else from the embeddings of
    ``links``, which are computed from all edges of the graph. ``rows``: the encoder's rows of all nodes. ``scratch``:
    folder for rows. Collective.
    """
    graph, group, target, splits = links[0].graph, links[0].group, model.target, ("val", "test")
    if settings.time_attr is not None and not is_link_types(target):
        return timed_metrics(graph, model, target, settings, task, layout, scratch, group)
    if settings.eval_negatives == "all":
        every = [FullRanking(graph, target, split, settings, layout, group, Path()) for split in splits]
        return {each.split: each.metrics(links, task.names) for each in every if each.num_links}
    found = {}
    if is_link_types(target):
        timeless = replace(settings, time_attr=None)
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
    loaders = link_loaders(settings, graph, target, splits, False, group.rank, layout)
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


def timed_metrics(
    graph: Graph, model: LinkModel, edge_type: EdgeType, settings: TrainSettings, task: Task, layout: RankLayout,
    scratch: Path, group: RankGroup,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the metrics on val and test as in training: of links at their times. Collective."""
    links = group.agree(lambda: split_links(graph, edge_type, settings.time_attr))
    splits = [split for split in ("val", "test") if split in links]
    if settings.eval_negatives == "all":
        ranked = {of: ranking_of(graph, edge_type, of, links, settings, layout, group, scratch) for of in splits}
        return {split: dict(each.score(model, task.names).metrics) for split, each in ranked.items()}
    names = embeddings_of(model).names
    loaders = group.agree(
        lambda: link_loaders(
            settings, graph, edge_type, splits, model.needs_degree, group.rank, layout, names, None, model.timed, links
        )
    )
    return {split: dict(evaluate(model, task, loader, group).metrics) for split, loader in loaders.items()}


def write_link_predictions(
    out: Path, graph: Graph, links: LinkEmbeddings, count: int, held_out: bool, parquet: bool
) -> str:  # fmt: skip
    """Write ``source/part<p>/embedding.npy`` and ``target/part<p>/embedding.npy``, float32 [nodes of the part, width].

    If ``count`` is not 0, also writes the ``count`` best targets of each source: the table
    ``source/part<p>/predictions.csv``, and the arrays of ``LinkEmbeddings.best_targets`` as ``targets.npy`` and
    ``scores.npy`` beside it. ``held_out``: leave out the links held out for val and test, too. Returns a sentence for
    the user on what was written. Collective.
    """
    source, _, target = links.edge_type
    for role, of, rows in (("source", source, links.source), ("target", target, links.target)):
        array = OutputArray("embedding", rows.values.shape[1], "float32")
        write_array(out / role, graph, of, rows, array, links.group)
    table = _write_best(out / "source", graph, links, count, held_out, parquet) if count else ""
    links.group.barrier()
    text = f"embeddings: {out}/source/part*/embedding.npy and {out}/target, ids in id.npy beside them"
    if not count:
        return f"{text}\n--top-k 10 also lists the best targets of each source"
    return f"the {count} best new targets of each source{_kept(graph, [links], held_out)}: {table}\n{text}"


def write_typed_predictions(
    out: Path, graph: Graph, model: LinkModel, rows: LayerResults, links: Sequence[LinkEmbeddings], count: int,
    held_out: bool, parquet: bool,
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
        tables.append(_write_best(out / type_name(each.edge_type), graph, each, most, held_out, parquet))
    group.barrier()
    text = f"embeddings: {out}/{links[0].ends[0]}/part*/embedding.npy, ids in id.npy beside them"
    if not count:
        return f"{text}\n--top-k 10 also lists the best targets of each source and edge type"
    kept = _kept(graph, links, held_out)
    return f"the {count} best new targets of each source{kept}: {tables[0]}, and so for each edge type\n{text}"


def _kept(graph: Graph, links: Sequence[LinkEmbeddings], held_out: bool) -> str:
    """Say that lists have links which exist, but were held out, if so."""
    attrs, splits = graph.store.graph_attrs, ("val", "test")
    some = any(held_out_links(attrs, each.edge_type, of)[0] is not None for each in links for of in splits)
    return ", with links of val and test (--without-held-out leaves them out)" if some and not held_out else ""


def _write_best(
    folder: Path, graph: Graph, links: LinkEmbeddings, count: int, held_out: bool, parquet: bool
) -> str:  # fmt: skip
    """Write the ``count`` best targets of each source to ``folder``, and return the path of the table of all parts."""
    best, scores = (LayerRows(links.source.shares, each) for each in links.best_targets(count, held_out))
    return _write_lists(folder, graph, links.ends, best, scores, parquet, links.group)


def _write_lists(
    folder: Path, graph: Graph, ends: tuple[NodeType, NodeType], best: LayerRows, scores: LayerRows, parquet: bool,
    group: RankGroup,
) -> str:  # fmt: skip
    """Write lists of targets of each source, ``targets.npy`` and ``scores.npy``, and the table ``predictions.csv``.

    ``ends``: node types of sources and targets. ``best``: original ids, -1 for none. Rows of a task table have their
    number, from 0, and the columns of their key. Returns the path of the table of all parts. Collective.
    """
    for name, rows in (("targets", best), ("scores", scores)):
        array = OutputArray(name, rows.values.shape[1], str(rows.values.dtype))
        write_array(folder, graph, ends[0], rows, array, group)
    own = [*own_parts(folder, graph, ends[0], best, group)]
    for part in own:
        _write_part(part, graph, ends, parquet)
    return str(merge_parts(folder, own, parquet, group))


def _write_part(folder: Path, graph: Graph, ends: tuple[NodeType, NodeType], parquet: bool) -> None:
    ids, best, scores = (map_npy(folder / f"{name}.npy") for name in ("id", "targets", "scores"))
    keys = {name: map_npy(folder / f"{key_attr(name)}.npy") for name in key_columns(graph, ends[0])}
    target, name = ends[1], id_attr(graph, ends[1])

    def target_ids(nodes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        wanted = RowRequest(target, graph.store.to_global(target, nodes), (name,))
        return np.asarray(graph.access.gather([wanted])[0][name])

    def blocks() -> Iterator[list[list[Any]]]:
        step = max(1, ROWS_AT_ONCE // best.shape[1])
        for begin in range(0, len(best), step):
            some = np.array(best[begin : begin + step])
            known = some >= 0
            sources = [np.repeat(each[begin : begin + step], known.sum(1), axis=0) for each in (ids, *keys.values())]
            score = np.array(scores[begin : begin + step])[known]
            yield [*map(id_list, sources), id_list(target_ids(some[known])), score.tolist()]

    source = [id_column("row" if keys else "source", ids), *(id_column(name, each) for name, each in keys.items())]
    columns = [
        *source,
        id_column("prediction" if keys else "target", target_ids(np.arange(1))),
        TableColumn("score", "DOUBLE"),
    ]
    write_table(folder / "predictions", columns, blocks(), parquet)


def write_list_predictions(
    out: Path, graph: Graph, model: LinkModel, edge_type: EdgeType, settings: TrainSettings, wanted: int | None,
    parquet: bool, layout: RankLayout, scratch: Path, group: RankGroup,
) -> str:  # fmt: skip
    """Write the ``wanted`` best targets of each row, under the row's key, to ``predictions.csv``. Collective.

    No target is left out. The rows of each split, and those of none, are grouped by time as in evaluations, so that
    metrics are those of the lists. Returns a sentence for the user on what was written.
    """
    table, _, target = edge_type
    num_targets = graph.manifest.nodes[target].num_nodes
    count, whole = min(wanted or _TOP_K, num_targets), WholeGraph(graph, layout, group, scratch)
    rows, shares = ModelRows(graph, edge_type, settings, whole, model), whole.shares[table]
    split = np.full(graph.manifest.nodes[table].num_nodes, -1)
    for number, some in enumerate(group.agree(lambda: rows_of_splits(graph, table)).values()):
        split[some] = number
    times = group.agree(lambda: row_times(graph, table, settings.time_attr))
    ids = np.full((shares.owned(group.rank), count), -1, np.int64)
    scores = np.full(ids.shape, -np.inf, np.float32)
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    for number in np.unique(split):
        of_split = np.flatnonzero(split == number)
        queries = Queries(of_split, of_split, None if times is None else times[of_split])
        gid = graph.store.to_global(table, of_split)
        mine = shares.owners(gid) == group.rank
        for at, time in enumerate(queries.groups.times.tolist()):
            own = np.flatnonzero((queries.groups.of == at) & mine)
            with torch.no_grad():
                best = best_targets(
                    rows.of_queries(queries.at(own)), rows.of_targets(time), num_targets, count, lambda block: nothing,
                    DotProducts(),
                )  # fmt: skip
            ids[shares.rows(gid[own])], scores[shares.rows(gid[own])] = best
    lists = LayerRows(shares, original_ids(graph, target, ids)), LayerRows(shares, scores)
    tables = _write_lists(out, graph, (table, target), *lists, parquet, group)
    return f"the {count} best targets of each row are in {tables}"
