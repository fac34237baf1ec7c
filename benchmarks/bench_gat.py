"""Accuracy of the bundled GAT on Cora, beside a plain torch_geometric program with the same recipe.

python benchmarks/bench_gat.py --source FOLDER [--seeds 10] [--epochs 300] [--only gat]. FOLDER holds, or gets, the
download of torch_geometric's `Planetoid`. The recipe is that of Veličković et al., "Graph Attention Networks" (2018).
Of each run, the weights of the best epoch on val (accuracy) are scored on test.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from trainer.core.ranks import Ranks
from trainer.partition.make import PartitionSpec, make_partition
from trainer.train.job import train
from trainer.train.settings import TrainJob, TrainSettings

#: As published: two layers, 8 heads of width 8, one head for the classes, all neighbours, all train nodes per step.
RECIPE: dict[str, Any] = {
    "model": "gat", "hidden": 64, "heads": 8, "output_heads": 1, "activation": "elu", "dropout": 0.6,
    "input_dropout": 0.6, "attention_dropout": 0.6, "lr": 0.005, "weight_decay": 5e-4, "fanouts": (-1, -1),
    "batch_size": 140, "eval_batch_size": 3000,
}  # fmt: skip


def parts_of(source: Path, folder: Path) -> Path:
    options = {"normalize_features": True}
    make_partition(PartitionSpec("Planetoid:Cora", str(folder), str(source), options), say=lambda line: None)
    return folder


def ours(parts: Path, seed: int, epochs: int, **other: Any) -> float:
    """Return the test accuracy of a run of the bundled trainer. ``other``: settings in place of the recipe's."""
    settings = TrainSettings(**{**RECIPE, "epochs": epochs, "seed": seed, "checkpoint_every": 0, **other})
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        result = train(TrainJob(settings, parts, Path(folder)), Ranks())
    assert result.test is not None
    return result.test["accuracy"]


def torch_geometric_alone(source: Path, seed: int, epochs: int) -> float:
    from torch_geometric.datasets import Planetoid
    from torch_geometric.nn import GATConv
    from torch_geometric.transforms import NormalizeFeatures

    data = Planetoid(str(source / "Planetoid"), "Cora", transform=NormalizeFeatures())[0]
    torch.manual_seed(seed)
    first, second = GATConv(data.num_features, 8, 8, dropout=0.6), GATConv(64, 7, 1, concat=False, dropout=0.6)
    model = torch.nn.ModuleList([first, second])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

    def logits() -> torch.Tensor:
        x = functional.dropout(data.x, 0.6, model.training)
        x = functional.dropout(functional.elu(first(x, data.edge_index)), 0.6, model.training)
        out: torch.Tensor = second(x, data.edge_index)
        return out

    best = test = 0.0
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        functional.cross_entropy(logits()[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = logits().argmax(1) == data.y
        if (val := float(right[data.val_mask].float().mean())) > best:
            best, test = val, float(right[data.test_mask].float().mean())
    return test


def report(name: str, run: Callable[[int], float], seeds: Sequence[int]) -> None:
    began, found = time.monotonic(), [run(seed) for seed in seeds]
    mean, spread = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
    seconds = (time.monotonic() - began) / len(found)
    values = " ".join(f"{value:.3f}" for value in found)
    print(f"{name:24} {mean:.4f} ± {spread:.4f}  {seconds:.1f} s a run  ({values})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--only", help="one of the rows, such as torch_geometric")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        parts, plain = parts_of(given.source, Path(folder) / "parts"), {"input_dropout": 0.0, "attention_dropout": 0.0}
        runs: dict[str, Callable[[int], float]] = {
            "gat": lambda seed: ours(parts, seed, given.epochs),
            "torch_geometric": lambda seed: torch_geometric_alone(given.source, seed, given.epochs),
            "gat, only dropout": lambda seed: ours(parts, seed, given.epochs, **plain),
        }
        for name, run in runs.items():
            if given.only in (None, name):
                report(name, run, range(given.seeds))


if __name__ == "__main__":
    main()
