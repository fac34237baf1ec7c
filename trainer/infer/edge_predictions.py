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
from trainer.core.rng import batch_key
from trainer.core.schema import type_name
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.node_predictions import label_names, prediction_columns, predictions
from trainer.infer.prediction_files import (
    ROWS_AT_ONCE,
    TableColumn,
    id_attr,
    id_column,
    id_list,
    key_columns,
    merge_parts,
    write_table,
)
from trainer.loader.block_loader import edge_columns, edge_rows
from trainer.loader.edge_block_loader import EdgeBlockLoader, LabelledEdges, labelled_edges
from trainer.loader.edge_endpoints import EDGES_AT_ONCE, StoredEndpoints, all_times
from trainer.nn.edge_model import EdgeModel
from trainer.nn.layerwise_inference import LayerResults
from trainer.sampler.types import RowRequest
from trainer.train.epoch import evaluate
from trainer.train.loaders import loader_settings
from trainer.train.settings import TrainSettings
from trainer.train.tasks.ranking import SplitScores, in_order
from trainer.train.tasks.regression import Regression
from trainer.train.tasks.task import Labels, Task


class EdgePredictions:
    """The output of a trained model for edges. Methods are collective: ranks call them equally often."""

    def __init__(
        self, graph: Graph, model: EdgeModel, rows: LayerResults, task: Task, attr: tuple[str, ...] | None,
        group: RankGroup,
    ):  # fmt: skip
        """``rows``: the encoder's rows of all nodes. ``attr``: the edge attributes that the model reads."""
        self.graph, self.model, self.rows, self.task, self.group = graph, model, rows, task, group
        self.edge_type = model.edge_type
        self.stored = StoredEndpoints(graph, model.edge_type)
        self.attr = edge_columns(graph.manifest, attr).get(model.edge_type)
        self.block = 1  #: edges that are computed together; 1: any number
        self._numbers: Ids | None = None

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

        The columns of the ids are those of the edge table, else ``source`` and ``target``.

        Each rank writes a range of edges to ``part<rank>/predictions.csv``, which are joined in the order of the edges.
        Returns a sentence for the user on what was written.
        """
        graph, count = self.graph, len(self.stored)
        names = label_names(graph, self.edge_type, self.task)
        self.group.agree(self._prepare)
        folder = out / f"part{self.group.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        source, target = (self._ids(of, np.arange(1)) for of in self.edge_type[::2])
        rest = prediction_columns(self.task, names, probabilities)
        keys = key_columns(graph, type_name(self.edge_type))
        if len({"edge", *keys, *(each.name for each in rest)}) < 3 + len(rest):  # none, or names that are taken
            keys = ["source", "target"]
        columns = [TableColumn("edge", "BIGINT"), id_column(keys[0], source), id_column(keys[1], target), *rest]

        def blocks() -> Iterator[list[list[Any]]]:
            for own in _shares(count, self.group, self.block):
                ends, values = self.stored.ends_of(own), self.outputs(own)
                if isinstance(self.task, Regression):
                    values = self.task.predictions(values)  # in units of y
                ids = [id_list(self._ids(of, nodes)) for of, nodes in zip(self.edge_type[::2], ends, strict=True)]
                yield [own.tolist(), *ids, *predictions(self.task, values, names, probabilities)]

        write_table(folder / "predictions", columns, blocks(), parquet)
        where = merge_parts(out, [folder], parquet, self.group)
        return f"predictions of all {count:,} edges {type_name(self.edge_type)} are in {where}"

    def outputs(self, edges: Ids) -> Tensor:
        """Return the model's output for edges by original id, [n, outputs]. Collective."""
        attr = None
        if self._numbers is not None and self.attr is not None:
            wanted = RowRequest(self.edge_type, self._numbers[edges], tuple(self.attr))
            (rows,) = self.graph.access.gather([wanted])
            attr = edge_rows(rows, self.attr)
        return self.output(self.stored.ends_of(edges), attr)

    def _prepare(self) -> None:
        if self.attr is not None:
            self._numbers = _edge_numbers(self.stored)

    def _ids(self, of: str, nodes: Ids) -> np.ndarray[Any, Any]:
        name = id_attr(self.graph, of)
        (rows,) = self.graph.access.gather([RowRequest(of, self.graph.store.to_global(of, nodes), (name,))])
        return np.asarray(rows[name])


class SampledEdges(EdgePredictions):
    """The output for edges, each computed from neighbours sampled for it: without the edge itself, or not later.

    All edges are computed in blocks of ``eval_batch_size``, so that the result does not depend on the ranks.
    """

    def __init__(
        self, graph: Graph, model: EdgeModel, task: Task, settings: TrainSettings, layout: RankLayout, group: RankGroup
    ):  # fmt: skip
        super().__init__(graph, model, {}, task, settings.edge_attr, group)
        self.settings, self.layout, self.block = settings, layout, settings.eval_batch_size

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the metrics on each split, as evaluations in training compute them."""
        edges = self.group.agree(lambda: labelled_edges(self.graph, self.edge_type, self.settings.time_attr))
        splits = {split: "val" if split == "train" else split for split in edges}
        loaders = self.group.agree(lambda: {name: self._loader(edges[name], split) for name, split in splits.items()})
        return {
            split: dict(evaluate(self.model, self.task, loader, self.group).metrics)
            for split, loader in loaders.items()
        }

    @torch.no_grad()
    def outputs(self, edges: Ids) -> Tensor:
        key = batch_key(self.settings.seed, 0, 0, int(edges[0]) // self.block if len(edges) else 0)
        batch = self._all.of_positions(edges, key).to(self.group.device)
        found: Tensor = self.model(batch).float().cpu()
        return found

    def _prepare(self) -> None:
        count, attr = len(self.stored), self.settings.time_attr
        times = None if attr is None else all_times(self.graph, self.edge_type, attr)
        numbers = _edge_numbers(self.stored) if self.attr is not None else np.arange(count)
        every = LabelledEdges(self.edge_type, self.stored, np.arange(count), numbers, torch.zeros(count), times)
        self._all = self._loader(every, "test")

    def _loader(self, edges: LabelledEdges, split: str) -> EdgeBlockLoader:
        degree = bool(getattr(self.model, "needs_degree", False))
        names = self.model.encoder.categories.names
        loading = loader_settings(self.settings, self.edge_type, split, degree, names)
        return EdgeBlockLoader(self.graph, loading, edges, self.group.rank, self.layout, self.settings.hide)


def _edge_numbers(edges: StoredEndpoints) -> Ids:
    """Return for each edge, by original id, the number with which its attributes are requested, int64 [E]."""
    numbers = np.empty(len(edges), np.int64)
    for first in range(0, len(numbers), EDGES_AT_ONCE):
        some = np.arange(first, min(first + EDGES_AT_ONCE, len(numbers)))
        (rows,) = edges.graph.access.gather([RowRequest(edges.edge_type, some, ("orig_id",))])
        numbers[rows["orig_id"]] = some
    return numbers


def _shares(count: int, group: RankGroup, block: int = 1) -> Iterator[Ids]:
    """Yield this rank's range of ``count`` positions in pieces, equally many pieces on all ranks.

    ``block``: the pieces are blocks of so many positions; 1: of any.
    """
    each = -(-count // (block * group.size)) * block
    first, last = min(group.rank * each, count), min((group.rank + 1) * each, count)
    size = block if block > 1 else ROWS_AT_ONCE
    for begin in range(0, each, size):
        yield np.arange(min(first + begin, last), min(first + begin + size, last))
