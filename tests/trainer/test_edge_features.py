"""Tests of edge features in the bundled trainer: on blocks, in layers, in runs and in inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from graphs import graph
from train_kit import curve, job, run_ranks, write_parts
from trainer.core.batch import Block
from trainer.core.errors import SettingsError
from trainer.core.ranks import Ranks
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.infer import infer
from trainer.loader.block_loader import BatchLoader
from trainer.nn.layers import SAGEConv
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.loaders import loader_settings
from trainer.train.model import trained_model
from trainer.train.settings import InferJob, TrainSettings

NODES = 200
RNG = np.random.default_rng(0)
EDGES = np.array([(u, v) for v in range(NODES) for u in RNG.choice(NODES, 4, replace=False)])
ATTR = RNG.standard_normal((len(EDGES), 2)).astype(np.float32)
Y = (10 * ATTR[:, 0].reshape(NODES, 4).mean(1)).astype(np.float32)  # only edges tell it
IDS = np.arange(NODES)
SPLITS = {"train": IDS[:120], "val": IDS[120:160], "test": IDS[160:]}

SETTINGS: dict[str, Any] = {
    "epochs": 15, "batch_size": 40, "fanouts": (-1, -1), "lr": 0.02, "dropout": 0.0, "task": "regression",
}  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges") / "parts"
    x = RNG.standard_normal((NODES, 3)).astype(np.float32)
    edge_attrs = {"edge_attr": ATTR, "number": np.arange(len(EDGES)), "odd": np.zeros((len(EDGES), 2, 2), np.float32)}
    data = graph(EDGES, NODES, {"x": x, "y": Y}, splits=SPLITS, edge_attrs=edge_attrs)
    write_partition(data, assign_parts(data, 2, "hash"), folder)
    return folder


def test_blocks_have_the_features_of_their_edges(parts: Path) -> None:
    settings = TrainSettings(fanouts=(2, 3), edge_attr="number", batch_size=30)
    with open_graph(parts) as opened:
        batch = next(
            BatchLoader(opened, loader_settings(settings, "node", "train", False), 0, RankLayout.single(2)).epoch(1)
        )
    n_id = batch.n_id.numpy()
    for block in batch.blocks:
        assert block.edge_attr is not None and block.edge_attr.shape == (len(block.indices), 1)
        targets = n_id[np.repeat(np.arange(block.num_dst), np.diff(block.indptr.numpy()))]
        ends = np.stack([n_id[block.indices.numpy()], targets], 1)
        np.testing.assert_array_equal(EDGES[block.edge_attr[:, 0].long().numpy()], ends)


def test_a_layer_adds_the_mean_of_its_edges() -> None:
    attr = torch.randn(3, 2)
    block = Block(torch.tensor([0, 2, 2, 3], dtype=torch.int32), torch.tensor([3, 1, 0], dtype=torch.int32), 4, attr)
    conv, x = SAGEConv(5, 6, edge_dim=2), torch.randn(4, 5)
    mean = torch.stack([attr[:2].mean(0), torch.zeros(2), attr[2]])
    neighbours = torch.stack([x[[3, 1]].mean(0), torch.zeros(5), x[0]])
    expected = conv.lin_l(neighbours) + conv.lin_r(x[:3]) + mean @ conv.lin_edge.weight.t()
    torch.testing.assert_close(conv(block, x), expected)


@pytest.mark.parametrize("model", fast_cases(["sage", "rsage"], "rsage"))
def test_a_target_of_edge_features_is_learned_only_with_them(model: str, parts: Path, tmp_path: Path) -> None:
    found = {
        name: train(job(parts, tmp_path / name, **SETTINGS, model=model, **more), Ranks()).test
        for name, more in (("with", {"edge_attr": "edge_attr"}), ("without", {}))
    }
    assert found["with"] is not None and found["without"] is not None
    assert found["with"]["mae"] < 0.5 * found["without"]["mae"]


def test_two_processes_train_as_one_and_inference_uses_all_edges(parts: Path, tmp_path: Path) -> None:
    given = {**SETTINGS, "epochs": 2, "edge_attr": "edge_attr"}
    train(job(parts, tmp_path / "one", **given), Ranks())
    for ended in run_ranks(2, job(parts, tmp_path / "two", **given)):
        assert ended.returncode == 0, ended.output
    np.testing.assert_allclose(curve(tmp_path / "two"), curve(tmp_path / "one"), rtol=1e-4)
    checkpoint = tmp_path / "one" / "checkpoints" / "last.pt"
    infer(InferJob(checkpoint, parts, tmp_path / "out", nodes_at_once=30), Ranks())
    saved = load_checkpoint(checkpoint)
    model, _ = trained_model(saved)
    mean, std = saved.task["mean"][0], saved.task["std"][0]
    settings = TrainSettings(**saved.settings)
    sampled = {}
    with open_graph(parts) as opened, torch.no_grad():
        loader = BatchLoader(opened, loader_settings(settings, "node", "test", False), 0, RankLayout.single(2))
        for batch in loader.epoch(0):
            sampled |= dict(zip(batch.n_id.tolist(), (model(batch)[:, 0] * std + mean).tolist(), strict=False))
    said = {}
    for part in (0, 1):
        folder = tmp_path / "out" / f"part{part}"
        said |= dict(
            zip(np.load(folder / "orig_id.npy").tolist(), np.load(folder / "values.npy")[:, 0].tolist(), strict=True)
        )
    assert {node: said[node] for node in sampled} == pytest.approx(sampled, abs=1e-3)


def test_only_edge_types_with_the_attribute_have_features(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", 2, "synthetic-hetero", edge_weight=True)
    train(job(parts, tmp_path / "run", model="rsage", edge_attr="edge_weight"), Ranks())
    names = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt").model
    assert any("writes" in name and "lin_edge" in name for name in names)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"edge_attr": "missing"},
            "no edge type has an attribute 'missing'; there is edge_attr, number, odd",
        ),
        (
            {"edge_attr": "odd"},
            "odd of node__to__node is float32 .*; expected real numbers, one row",
        ),
        (
            {"edge_attr": "number", "model": "gat"},
            "model gat does not read edge features; use sage, for several types rsage",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    settings: dict[str, Any], message: str, parts: Path, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=message):
        train(job(parts, tmp_path, **{**SETTINGS, **settings}), Ranks())
