"""Predictions of a task table whose rows list targets: the best targets of each row, as known at its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from trainer.core.ranks import RankGroup
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.link_predictions import TOP_K, write_best
from trainer.loader.split_links import row_times, rows_of_splits
from trainer.nn.layerwise_inference import LayerRows, WholeGraph
from trainer.nn.link_embeddings import DotProducts, best_targets, original_ids
from trainer.nn.link_model import LinkModel
from trainer.train.settings import TrainSettings
from trainer.train.timed_ranking import Queries, Rows


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
    count, whole = min(wanted or TOP_K, num_targets), WholeGraph(graph, layout, group, scratch)
    rows, shares = Rows(graph, edge_type, settings, whole, model), whole.shares[table]
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
    tables = write_best(out, graph, (table, target), *lists, parquet, group)
    return f"the {count} best targets of each row are in {tables}"
