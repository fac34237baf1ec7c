"""A training epoch on blocks, beside the usual loop on the same batches with torch_geometric's layers."""

from __future__ import annotations

import time
from itertools import islice

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.nn import GraphSAGE

from graphs import BATCH, FANOUTS, partitioned
from table import Row
from trainer.config import TrainSettings
from trainer.load.loader import BatchLoader, LoaderSettings
from trainer.load.open import Graph, open_graph
from trainer.load.pyg import DistNeighborLoader
from trainer.load.seeds import RankLayout
from trainer.nn.models import build_model

HIDDEN = 256


def run(small: bool) -> list[Row]:
    steps = 4 if small else 8
    torch.set_num_threads(2)
    with open_graph(partitioned(small, 1)) as graph:
        (ours, our_losses), (theirs, their_losses) = on_blocks(graph, steps), on_edges(graph, steps)
    return [
        Row("training step on blocks", ours, "s", "model(x, edge_index)[:batch_size]", theirs),
        Row("loss after those steps", our_losses[-1], "", "same loop, other weights", their_losses[-1], "equal"),
    ]


def on_blocks(graph: Graph, steps: int) -> tuple[float, list[float]]:
    loader = BatchLoader(graph, LoaderSettings("train", FANOUTS, BATCH), 0, RankLayout.single(1))
    features = graph.manifest.attrs["x"].shape[1]
    settings = TrainSettings(hidden=HIDDEN, fanouts=FANOUTS, dropout=0.0)
    model = build_model(settings, features, graph.manifest.num_classes)
    return timed(model, ((model, batch, batch.y) for batch in islice(loader.epoch(0), steps + 1)))


def on_edges(graph: Graph, steps: int) -> tuple[float, list[float]]:
    """What torch_geometric's tutorials do: every layer on every edge of the batch."""
    loader = DistNeighborLoader(graph, FANOUTS, batch_size=BATCH, shuffle=True)
    features = graph.manifest.attrs["x"].shape[1]
    model = GraphSAGE(features, HIDDEN, len(FANOUTS), graph.manifest.num_classes)

    def forward(batch: object) -> torch.Tensor:
        return model(batch.x.float(), batch.edge_index)[: batch.batch_size]  # type: ignore[attr-defined]

    batches = islice(iter(loader), steps + 1)
    return timed(model, ((forward, batch, batch.y[: batch.batch_size]) for batch in batches))


def timed(model: nn.Module, steps) -> tuple[float, list[float]]:  # type: ignore[no-untyped-def]
    """Mean seconds a step (the first is a warm-up) and the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    losses, begun, count = [], 0.0, 0
    for count, (forward, batch, y) in enumerate(steps):
        loss = functional.cross_entropy(forward(batch), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        begun = time.perf_counter() if count == 0 else begun
    return (time.perf_counter() - begun) / count, losses
