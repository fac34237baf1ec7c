"""Tests, on a fake device, that a training step never waits for the device and has the same loss as on the CPU.

Some code waits for the device on purpose and is not covered: a loss that is read for a metrics line (once a second),
sums at the end of an epoch or an evaluation, checkpoints, and embeddings of nodes without features, because ranks
exchange the rows of embeddings on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainer.train.epoch as epoch_module
from fake_device import DEVICE, Synchronised, move_module, on_device, read, without_synchronisation
from oracle import assert_identical
from own_models_kit import write_models
from train_kit import SMALL, job, write_parts
from trainer.core.batch import LinkEnds
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_EDGE
from trainer.graph.device import packed_batch, tensors_of, with_tensors
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.train.epoch import EpochReport, EpochSums, evaluate, train_epoch
from trainer.train.fit import Fit
from trainer.train.job import _prepare, open_job_graph
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.settings import TrainSettings
from trainer.train.tasks.multilabel import MultiLabel
from trainer.train.tasks.task import Labels

GRAPHS: dict[str, dict[str, Any]] = {
    "plain": {"dataset": "synthetic", "num_nodes": 300, "edge_weight": True},
    "typed": {"dataset": "synthetic-hetero", "num_nodes": 200, "all_features": True, "edge_weight": True},
}

# Looking up trainable rows checks the ids, which waits for the device.
TYPED_LINKS = {
    "task": "link",
    "target": "paper__cites__paper",
    "negatives": 16,
    "batch_size": 300,
    "embeddings": "featureless",
}

OWN = "own_models.py:Own"

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "sage", {"device_cache": "30%"}),
    ("plain", "gat", {"attention_dropout": 0.5, "input_dropout": 0.3, "activation": "elu"}),
    (
        "plain",
        "sage",
        {
            "optimizer": "SGD",
            "clip": 0.5,
            "schedule": "cosine",
            "class_weights": "balanced",
            "label_smoothing": 0.1,
        },
    ),
    ("plain", "sage", {"task": "link", "negatives": 16, "batch_size": 1000}),
    ("typed", "rsage", {"edge_attr": "edge_weight"}),
    ("coded", "sage", {"edge_attr": ("channel", "edge_weight")}),
    ("plain", "torch_geometric.nn.GraphSAGE", {"dropout": 0.3}),
    ("typed", OWN, {"dropout": 0.3}),
]

SLOW_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("plain", "sage", {}),
    ("plain", "sage", {"edge_attr": "edge_weight"}),
    ("plain", "gcn", {}),
    ("plain", "rgcn", {}),
    ("plain", "sage", {"task": "regression"}),
    ("typed", "rgcn", {}),
    ("typed", "hgt", {"device_cache": "30%"}),
    ("typed", "rsage", TYPED_LINKS),
    ("plain", OWN, {"dropout": 0.3}),
    ("plain", "torch_geometric.nn.GIN", {"dropout": 0.3}),
    ("plain", "torch_geometric.nn.PNA", {"dropout": 0.3}),
    ("typed", "torch_geometric.nn.PNA", {"dropout": 0.3}),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("graphs")
    write_models(folder)
    found = {name: write_parts(folder / name, **options) for name, options in GRAPHS.items()}
    plain = load_dataset("synthetic", options={**SMALL, "num_nodes": 300, "edge_weight": True})
    edges, codes = plain.edges[HOMO_EDGE], np.arange(plain.edges[HOMO_EDGE].edge_index.shape[1]) % 5 - 1
    texts = {"node__to__node__channel__categories": encode_texts([*"abcd"])}
    coded = {HOMO_EDGE: replace(edges, attrs={**edges.attrs, "channel": codes})}
    data = replace(plain, edges=coded, graph_attrs={**plain.graph_attrs, **texts})
    write_partition(data, assign_parts(data, 1, "hash"), folder / "coded")
    return {**found, "coded": folder / "coded"}


class Quiet(MetricsLog):
    """A metrics log that never logs a step, since logging would read the loss from the device."""

    def step_due(self) -> bool:
        return False


def prepared(parts: Path, run_dir: Path, **settings: Any) -> tuple[Fit, RankGroup, MetricsLog]:
    made = job(parts, run_dir, **{"batch_size": 40, "eval_batch_size": 20, "eval_negatives": 20, **settings})
    group, metrics = RankGroup(Ranks()), Quiet(run_dir, 0)
    return _prepare(made, open_job_graph(made, Ranks()), group, metrics), group, metrics


def trained(fit: Fit, group: RankGroup, metrics: MetricsLog) -> EpochReport:
    return train_epoch(fit.model, fit.task, fit.optimizers, fit.loaders["train"], 1, group, metrics)


def moved(fit: Fit, settings: TrainSettings) -> None:
    """Move model and optimizer of ``fit`` to the fake device."""
    move_module(fit.model)
    fit.optimizers = Optimizers.of(settings, fit.model, None)


def fake_feed(device: torch.device) -> Any:
    """Return a function that copies batches to the fake device, in place of ``_CudaFeed``."""

    def bring(batch: Any) -> Any:
        there = {id(tensor): on_device(tensor) for tensor in tensors_of(batch)}
        return with_tensors(batch, there).to(device)

    return bring


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Yield a rank with the fake device. At the end of an epoch, ``train_epoch`` may read its losses."""
    reduce_losses = EpochSums.reduce_losses

    def reduce_read_losses(tally: EpochSums, group: RankGroup) -> None:
        tally.losses = read(tally.losses)
        reduce_losses(tally, group)

    monkeypatch.setattr(epoch_module, "feed", fake_feed)
    monkeypatch.setattr(EpochSums, "reduce_losses", reduce_read_losses)
    yield RankGroup(Ranks(), DEVICE)


@pytest.mark.parametrize(
    ("graph", "model", "more"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_a_training_step_does_not_wait_for_the_device(
    graph: str, model: str, more: dict[str, Any], folders: dict[str, Path], tmp_path: Path, fake: RankGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = f"{folders[graph].parent}/{model}" if model == OWN else model
    fit, group, metrics = prepared(folders[graph], tmp_path, model=model, **more)
    settings, weights = fit.settings, {name: value.clone() for name, value in fit.model.state_dict().items()}
    with monkeypatch.context() as plain:
        plain.setattr(epoch_module, "feed", lambda device: lambda batch: batch.to(device))
        expected = trained(fit, group, metrics).step_loss
    fit.model.load_state_dict(weights)
    moved(fit, settings)
    with without_synchronisation():
        losses = trained(fit, fake, metrics).step_loss
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_fill_(x > 0, 0).nonzero(),
        lambda x: torch.tensor(0.5, device=x.device),
        lambda x: x.new_tensor([1.0]),
        lambda x: x.cpu(),
        lambda x: torch.randn(3).to(x.device),
        lambda x: torch.repeat_interleave(x.long()),
        lambda x: torch.bincount(x.long().abs()),
    ],
)
def test_what_synchronises_is_refused(work: Any) -> None:
    x = on_device(torch.randn(4))
    with without_synchronisation(), pytest.raises(Synchronised):
        work(x)


class Reads(nn.Module):
    """A model whose forward pass reads a value of its output."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.model(batch)
        return out * (out.detach().abs().max().item() > 0)


def test_a_read_in_a_step_is_found(folders: dict[str, Path], tmp_path: Path, fake: RankGroup) -> None:
    fit, _, metrics = prepared(folders["plain"], tmp_path)
    moved(fit, fit.settings)
    with without_synchronisation(), pytest.raises(Synchronised, match="_local_scalar_dense reads values"):
        train_epoch(Reads(fit.model), fit.task, fit.optimizers, fit.loaders["train"], 1, fake, metrics)


@pytest.mark.parametrize(
    "task,more",
    [
        ("classification", {"metrics": ("macro_f1", "accuracy")}),
        ("regression", {}),
        pytest.param("link", {}, marks=pytest.mark.slow),
    ],
)
def test_an_evaluation_waits_only_at_its_end(
    task: str, more: dict[str, Any], folders: dict[str, Path], tmp_path: Path, fake: RankGroup
) -> None:
    fit, _, _ = prepared(folders["plain"], tmp_path, task=task, **more)
    batches = Counted(fit.loaders["val" if "val" in fit.loaders else "train"])
    move_module(fit.model)
    with without_synchronisation(), pytest.raises(Synchronised, match="a copy to the host"):
        evaluate(fit.model, fit.task, batches, fake)
    assert batches.used == len(batches) > 1


class Counted:
    """Batches that count how many of them were used."""

    def __init__(self, batches: Any):
        self._batches, self.used = batches, 0

    def __len__(self) -> int:
        return len(self._batches)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        for batch in self._batches.epoch(epoch, first_step):
            yield batch
            self.used += 1


def test_labels_are_scored_without_waiting() -> None:
    task, out = MultiLabel(3), torch.randn(5, 3)
    y = torch.tensor([[0, 1, -1]] * 5)
    with without_synchronisation():
        there = Labels(on_device(y))
        loss, sums = task.loss_sum(on_device(out), there), task.metric_sums(on_device(out), there)
    assert torch.equal(read(loss), task.loss_sum(out, Labels(y)))
    assert torch.equal(read(sums), task.metric_sums(out, Labels(y)))


def test_a_batch_is_copied_in_one_aligned_buffer(folders: dict[str, Path], tmp_path: Path) -> None:
    fit, _, _ = prepared(folders["typed"], tmp_path, model="rsage", edge_attr="edge_weight")
    sizes: list[int] = []

    def buffer(size: int) -> Tensor:
        sizes.append(size)
        return torch.full((size,), 77, dtype=torch.uint8)

    for batch in fit.loaders["train"].epoch(1):
        packed, kept = packed_batch(batch, torch.device("cpu"), buffer)
        assert kept is not None and len(sizes) == 1 and sizes.pop() == len(kept)
        assert_identical(packed, batch)
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors_of(packed) if tensor.nbytes]
        assert len(starts) > 10 and all(start % 256 == 0 for start in starts)
    empty = LinkEnds("a", "b", *[torch.empty(0, dtype=torch.int64)] * 3)
    assert packed_batch(empty, torch.device("cpu"), buffer)[1] is None and not sizes
