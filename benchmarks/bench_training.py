"""Measures training steps on blocks, compared with the usual training loop of torch_geometric."""

from __future__ import annotations

import time
from itertools import islice

import torch
from torch import nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE

from graphs import BATCH, FANOUTS, partitioned
from table import Row, median_seconds
from trainer.core.batch import Batch
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.loader.neighbor_loader import DistNeighborLoader
from trainer.nn.graph_facts import facts_of
from trainer.nn.kernels.precision import PRECISIONS
from trainer.nn.layers import linear_first
from trainer.nn.models import build_model
from trainer.nn.trim import Trimmed
from trainer.train.settings import TrainSettings
from typed_step import typed_step

HIDDEN = 256


def run(small: bool) -> list[Row]:
    steps = 4 if small else 8
    torch.set_num_threads(2)
    with open_graph(partitioned(small, 1)) as graph:
        (ours, our_losses), (theirs, their_losses) = on_blocks(graph, steps), on_edges(graph, steps, trim=False)
        trimmed, _ = on_edges(graph, steps, trim=True)
        rounded, _ = on_blocks(graph, steps, "bfloat16")
        floors = {name: product_seconds(graph, dtype) for name, dtype in PRECISIONS.items()}
    return [
        Row("training step on blocks", ours, "s", "model(x, edge_index)[:batch_size]", theirs),
        Row("… its dense products by themselves", ours, "s", "float32 products", floors["float32"]),
        Row("… in bfloat16", rounded, "s", "in float32", ours),
        Row("… in bfloat16, by themselves", rounded, "s", "bfloat16 products", floors["bfloat16"]),
        Row("Trimmed(model)(batch)", trimmed, "s", "model(x, edge_index)[:batch_size]", theirs),
        Row("loss after those steps", our_losses[-1], "", "same loop, other weights", their_losses[-1], "equal"),
        *[typed_step(name, small) for name in ("rgcn", "rsage", "hgt")],
    ]


def on_blocks(graph: Graph, steps: int, precision: str = "float32") -> tuple[float, list[float]]:
    loader = block_loader(graph)
    settings = TrainSettings(hidden=HIDDEN, fanouts=FANOUTS, dropout=0.0, precision=precision)  # type: ignore[arg-type]
    model = build_model(settings, facts_of(graph.manifest))
    return timed(model, ((model, batch, batch.y) for batch in islice(loader.epoch(0), steps + 1)))


def block_loader(graph: Graph) -> BatchLoader:
    return BatchLoader(graph, LoaderSettings("train", FANOUTS, BATCH), 0, RankLayout.single(1))


def product_seconds(graph: Graph, dtype: torch.dtype) -> float:
    """Return the seconds of the dense matrix products of a training step: a lower bound of its duration."""
    (batch,) = islice(block_loader(graph).epoch(0), 1)
    return sum(seconds_of(*shape, dtype) for shape in products(graph, batch))


def seconds_of(m: int, k: int, n: int, dtype: torch.dtype) -> float:
    a, b, out = (torch.ones(rows, columns, dtype=dtype) for rows, columns in ((m, k), (k, n), (m, n)))
    return median_seconds(lambda: torch.mm(a, b, out=out), 3)


def products(graph: Graph, batch: Batch) -> list[tuple[int, int, int]]:
    """Return (m, k, n) of each matrix product [m, k] @ [k, n] of a training step."""
    facts = facts_of(graph.manifest)
    dims = [facts.in_dims[facts.target], *[HIDDEN] * (len(FANOUTS) - 1), facts.num_classes]
    found = []
    for number, (block, k, n) in enumerate(zip(batch.blocks, dims, dims[1:], strict=False)):
        first = linear_first(block, k, n, number > 0)
        for rows, width in ((block.num_src, k), (block.num_dst, k)) if first else ((block.num_dst, 2 * k),):
            found += [(rows, width, n), (width, rows, n), *([(rows, n, width)] if number else [])]
    return found


def on_edges(graph: Graph, steps: int, trim: bool) -> tuple[float, list[float]]:
    """Train as torch_geometric's tutorials do. Return mean seconds per step and the losses.

    trim: each layer uses only the edges that later layers need.
    """
    loader = DistNeighborLoader(graph, list(FANOUTS), "train", batch_size=BATCH, shuffle=True)
    facts = facts_of(graph.manifest)
    model = GraphSAGE(facts.in_dims[facts.target], HIDDEN, len(FANOUTS), facts.num_classes)
    trimmed = Trimmed(model)

    def forward(batch: Data) -> torch.Tensor:
        batch.x = batch.x.float()
        out = trimmed(batch) if trim else model(batch.x, batch.edge_index)
        return out[: batch.batch_size]  # type: ignore[no-any-return]

    batches = islice(iter(loader), steps + 1)
    return timed(model, ((forward, batch, batch.y[: batch.batch_size]) for batch in batches))


def timed(model: nn.Module, steps) -> tuple[float, list[float]]:  # type: ignore[no-untyped-def]
    """Train on ``steps``, tuples (forward, batch, y). Return mean seconds per step and the losses."""
    # the first step does not count
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
