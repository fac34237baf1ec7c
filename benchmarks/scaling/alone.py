"""Trains on the batches of all hosts in one process that has all parts, to measure the work without a network.

    python -m scaling.alone FOLDER HOSTS SETTINGS

Prints a JSON line: CPU seconds, sampled edges and gathered rows of an epoch, bytes of the model's weights.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from trainer.core.batch import AnyBatch, Batch
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.slabs import keep_freed_memory
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader
from trainer.train.epoch import train_epoch
from trainer.train.loaders import loader_settings
from trainer.train.metrics import MetricsLog
from trainer.train.model import make_model, model_facts
from trainer.train.optimize import Optimizers
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose import node_task
from trainer.train.tasks.choose_target import pick_target


class AllHosts:
    """Yields the batches of every rank, one rank after the other. Counts their edges and rows."""

    def __init__(self, loaders: Sequence[BatchLoader]):
        self.loaders, self.edges, self.rows = loaders, 0, 0

    def __len__(self) -> int:
        return sum(map(len, self.loaders))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[AnyBatch]:
        self.edges = self.rows = 0
        for loader in self.loaders:
            for batch in loader.epoch(epoch):
                assert isinstance(batch, Batch)
                self.edges += sum(len(block.indices) for block in batch.blocks)
                self.rows += len(batch.n_id)
                yield batch


def run(folder: Path, hosts: int, settings: TrainSettings) -> dict[str, float]:
    keep_freed_memory()
    group = RankGroup(Ranks(), torch.device("cpu"))
    layout = RankLayout(hosts, tuple((part,) for part in range(hosts)))
    with open_graph(folder) as graph, tempfile.TemporaryDirectory() as run_dir, MetricsLog(Path(run_dir), 0) as log:
        target = pick_target(graph)
        assert isinstance(target, str)
        task, _, _ = node_task(graph, target, TrainSettings(), ("train",), group)
        facts = model_facts(graph.manifest, target, task.outputs)
        model, _ = make_model(settings, facts, target, {})
        wanted = loader_settings(settings, target, "train", bool(getattr(model, "needs_degree", False)))
        batches = AllHosts([BatchLoader(graph, wanted, rank, layout) for rank in range(hosts)])
        optimizers, cpu, edges, rows = Optimizers.of(settings, model, None), 0.0, 0, 0
        for epoch in range(1, settings.epochs + 1):
            report = train_epoch(model, task, optimizers, batches, epoch, group, log)
            if epoch > 1:
                cpu, edges, rows = cpu + report.cpu_s, edges + batches.edges, rows + batches.rows
    counted = settings.epochs - 1
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return {"cpu": cpu / counted, "edges": edges / counted, "rows": rows / counted, "weight_bytes": weights}


if __name__ == "__main__":
    given = json.loads(sys.argv[3])
    given["fanouts"] = tuple(given["fanouts"])
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), TrainSettings(**given))))
