"""Predictions of labels of edges, for all edges of a type in the order of their table, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Ids
from trainer.core.ranks import RankGroup
from trainer.core.schema import type_name
from trainer.graph.open import Graph
from trainer.infer.node_predictions import label_names, prediction_columns, predictions
from trainer.infer.prediction_files import ROWS_AT_ONCE, Column, id_attr, id_column, id_list, merge_parts, write_table
from trainer.loader.block_loader import edge_rows
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, StoredEndpoints
from trainer.loader.labelled_edges import labelled_edges
from trainer.nn.edge_model import EdgeModel
from trainer.nn.layerwise_inference import LayerResults
from trainer.sampler.types import RowRequest
from trainer.train.tasks.ranking import SplitScores, in_order
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Task


class EdgePredictions:
    """The output of a trained model for edges. Methods are collective: ranks call them equally often."""

    def __init__(
        self, graph: Graph, model: EdgeModel, rows: LayerResults, task: Task, attr: str | None, group: RankGroup
    ):  # fmt: skip
        """``rows``: the encoder's rows of all nodes. ``attr``: the edge attribute that the model reads."""
        self.graph, self.model, self.rows, self.task, self.group = graph, model, rows, task, group
        self.edge_type = model.edge_type
        self.stored = StoredEndpoints(graph, model.edge_type)
        self.attr = attr if attr in graph.manifest.edges[model.edge_type].attrs else None

    @torch.no_grad()
    def output(self, ends: tuple[Ids, Ids], attr: Tensor | None) -> Tensor:
        """Return the model's output for edges with these ends, as original ids, and these features of their own."""
        rows = [
            self.rows[of].fetch(self.graph.store.to_global(of, ids))
            for of, ids in zip(self.edge_type[::2], ends, strict=True)
        ]
        device = self.model.out.weight.device
        given = None if attr is None else attr.to(device)
        return self.model.head(rows[0].to(device), rows[1].to(device), given).float().cpu()

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics on each split."""
        found = {}
        for split, edges in self.group.agree(lambda: labelled_edges(self.graph, self.edge_type)).items():
            sums, scores = torch.zeros(self.task.num_sums, dtype=torch.float64), SplitScores(self.task)
            for own in _shares(len(edges), self.group):
                out = self.output(edges.ends_of(own), None if self.attr is None else edges.attr(self.attr, own))
                if len(own):
                    labels = Labels(y=edges.y[own])
                    sums += self.task.metric_sums(out, labels)
                    scores.add(out, labels)
            whole = self.group.sum(sums).tolist()
            found[split] = in_order(self.task, self.task.metrics(whole), scores.metrics(self.group))
        return found

    def write(self, out: Path, parquet: bool, probabilities: bool) -> str:
        """Write ``predictions.csv`` with a row per edge: its number in the source, both ids, and the prediction.

        Each rank writes a range of edges to ``part<rank>/predictions.csv``, which are joined in the order of the edges.
        Returns a sentence for the user on what was written.
        """
        graph, count = self.graph, len(self.stored)
        names = label_names(graph, self.edge_type, self.task)
        numbers = self.group.agree(self._numbers) if self.attr is not None else None
        folder = out / f"part{self.group.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        source, target = (self._ids(of, np.arange(1)) for of in self.edge_type[::2])
        columns = [
            Column("edge", "BIGINT"), id_column("source", source), id_column("target", target),
            *prediction_columns(self.task, names, probabilities),
        ]  # fmt: skip

        def blocks() -> Iterator[list[list[Any]]]:
            for own in _shares(count, self.group):
                ends, attr = self.stored.ends_of(own), None
                if numbers is not None and self.attr is not None:
                    wanted = RowRequest(self.edge_type, numbers[own], (self.attr,))
                    (rows,) = graph.access.gather([wanted])
                    attr = edge_rows(rows[self.attr], graph.manifest.edges[self.edge_type].attrs[self.attr])
                values = self.output(ends, attr)
                if isinstance(self.task, Regression):
                    values = self.task.predictions(values)  # in units of y
                ids = [id_list(self._ids(of, nodes)) for of, nodes in zip(self.edge_type[::2], ends, strict=True)]
                yield [own.tolist(), *ids, *predictions(self.task, values, names, probabilities)]

        write_table(folder / "predictions", columns, blocks(), parquet)
        where = merge_parts(out, [folder], parquet, self.group)
        return f"predictions of all {count:,} edges {type_name(self.edge_type)} are in {where}"

    def _ids(self, of: str, nodes: Ids) -> np.ndarray[Any, Any]:
        name = id_attr(self.graph, of)
        (rows,) = self.graph.access.gather([RowRequest(of, self.graph.store.to_global(of, nodes), (name,))])
        return np.asarray(rows[name])

    def _numbers(self) -> Ids:
        """Return for each edge, by original id, the number with which its attributes are requested, int64 [E]."""
        numbers = np.empty(len(self.stored), np.int64)
        for first in range(0, len(numbers), EDGES_AT_ONCE):
            edges = np.arange(first, min(first + EDGES_AT_ONCE, len(numbers)))
            (rows,) = self.graph.access.gather([RowRequest(self.edge_type, edges, ("orig_id",))])
            numbers[rows["orig_id"]] = edges
        return numbers


def _shares(count: int, group: RankGroup) -> Iterator[Ids]:
    """Yield this rank's range of ``count`` positions in pieces, equally many pieces on all ranks."""
    each = -(-count // group.size)
    first, last = min(group.rank * each, count), min((group.rank + 1) * each, count)
    for begin in range(0, each, ROWS_AT_ONCE):
        yield np.arange(min(first + begin, last), min(first + begin + ROWS_AT_ONCE, last))
