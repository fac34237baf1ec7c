"""Predictions of node tasks for all nodes: classes, numbers or labels, and their metrics on each split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.graph_attrs import CATEGORIES, key_attr
from trainer.core.ranks import RankGroup
from trainer.core.schema import AnyType, NodeType
from trainer.graph.device import as_tensor
from trainer.graph.open import Graph
from trainer.infer.prediction_files import (
    ROWS_AT_ONCE,
    OutputArray,
    TableColumn,
    id_column,
    id_list,
    key_columns,
    merge_parts,
    own_parts,
    write_array,
    write_table,
)
from trainer.loader.block_loader import as_label
from trainer.nn.layerwise_inference import LayerRows
from trainer.sampler.types import RowRequest
from trainer.sources.read_tables import COLUMNS
from trainer.store.npy import map_npy
from trainer.train.tasks.labels import label_texts
from trainer.train.tasks.ranking import SplitScores, in_order
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Task


def write_node_predictions(
    out: Path, graph: Graph, target: NodeType, rows: LayerRows, task: Task, parquet: bool, group: RankGroup, *,
    probabilities: bool = False,
) -> str:  # fmt: skip
    """Write the model's output for all nodes, and the predictions as ``part<p>/predictions.csv``. Collective.

    ``predictions.csv`` of the first rank has the rows of all parts; rows of a task table have their number, from 0,
    and the columns of their key. ``probabilities``: for classification,
    with a column for the probability of each class.

    The output is ``part<p>/logits.npy``, float32 [nodes of the part, classes or labels]; for regression
    ``part<p>/values.npy``, float64 [nodes of the part, columns], in units of ``y``. Returns a sentence for the user on
    what was written.
    """
    array = OutputArray("logits", task.outputs, "float32")
    if isinstance(task, Regression):
        array = OutputArray("values", task.outputs, "float64", task.predictions)
    write_array(out, graph, target, rows, array, group)
    names, own = label_names(graph, target, task), [*own_parts(out, graph, target, rows, group)]
    for folder in own:
        _write_part(folder, array.name, task, names, key_columns(graph, target), parquet, probabilities)
    tables = merge_parts(out, own, parquet, group)
    return (
        f"predictions are in {tables}, the model's output is in {array.name}.npy beside them, and the row number of "
        "each node in the source in orig_id.npy"
    )


def _write_part(
    folder: Path, array: str, task: Task, names: Sequence[str] | None, keys: Sequence[str], parquet: bool,
    probabilities: bool,
) -> None:  # fmt: skip
    values, ids = map_npy(folder / f"{array}.npy"), map_npy(folder / "id.npy")
    key = {name: map_npy(folder / f"{key_attr(name)}.npy") for name in keys}

    def blocks() -> Iterator[list[list[Any]]]:
        for begin in range(0, len(values), ROWS_AT_ONCE):
            block = torch.from_numpy(np.array(values[begin : begin + ROWS_AT_ONCE]))
            shown = [id_list(each[begin : begin + ROWS_AT_ONCE]) for each in (ids, *key.values())]
            yield [*shown, *predictions(task, block, names, probabilities)]

    row = [id_column("row" if keys else "id", ids), *(id_column(name, each) for name, each in key.items())]
    columns = [*row, *prediction_columns(task, names, probabilities)]
    write_table(folder / "predictions", columns, blocks(), parquet)


def label_names(graph: Graph, target: AnyType, task: Task) -> Sequence[str] | None:
    """Return the names of the classes, or of the columns of ``y``; None if they have none."""
    return label_texts(graph, target, CATEGORIES if task.kind == "classification" else COLUMNS)


def prediction_columns(task: Task, names: Sequence[str] | None, probabilities: bool) -> list[TableColumn]:
    if task.kind == "classification":
        each = (names or [*map(str, range(task.outputs))]) if probabilities else ()
        best = [TableColumn("prediction", "VARCHAR" if names else "BIGINT"), TableColumn("probability", "DOUBLE", 6)]
        return [*best, *(TableColumn(f"probability_{name}", "DOUBLE", 6) for name in each)]
    if task.outputs == 1:
        return [TableColumn("prediction", "DOUBLE")]
    word, digits = ("probability", 6) if task.kind == "multilabel" else ("prediction", 9)
    return [TableColumn(f"{word}_{name}", "DOUBLE", digits) for name in names or map(str, range(task.outputs))]


def predictions(
    task: Task, values: Tensor, names: Sequence[str] | None, probabilities: bool
) -> list[list[Any]]:  # fmt: skip
    if task.kind == "classification":
        each = values.softmax(1)
        scores = each.max(1)
        classes: list[int] = scores.indices.tolist()
        shown = [[names[k] for k in classes] if names else classes, scores.values.tolist()]
        return [*shown, *(each.t().tolist() if probabilities else ())]
    if task.kind == "multilabel":
        values = values.sigmoid()
    columns: list[list[Any]] = values.t().tolist()
    return columns


def node_metrics(
    graph: Graph, target: NodeType, rows: LayerRows, task: Task, group: RankGroup
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Return the metrics by split and name; {} if the nodes have no labels. Collective."""
    spec = graph.manifest.nodes[target]
    splits = [split for split, count in spec.splits.items() if count] if "y" in spec.attrs else []
    sums = torch.zeros(len(splits), task.num_sums, dtype=torch.float64)
    scores = [SplitScores(task) for _ in splits]
    for number, split in enumerate(splits):
        seeds = np.asarray(graph.store.seeds(target, split))
        seeds = seeds[rows.shares.owners(seeds) == group.rank]
        for begin in range(0, len(seeds), ROWS_AT_ONCE):
            some = seeds[begin : begin + ROWS_AT_ONCE]
            (found,) = graph.access.gather([RowRequest(target, some, ("y",))])
            y = as_label(as_tensor(np.ascontiguousarray(found["y"]), spec.attrs["y"]))
            out = torch.from_numpy(rows.values[rows.shares.rows(some)])
            sums[number] += task.metric_sums(out, Labels(y))
            scores[number].add(out, Labels(y))
    totals = group.sum(sums).tolist()
    return {
        split: in_order(task, task.metrics(total), each.metrics(group))
        for split, total, each in zip(splits, totals, scores, strict=True)
    }
