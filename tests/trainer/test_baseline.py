"""Tests of baselines, the scores of the simplest predictions, and of trainable rows beside features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphs import graph
from train_kit import curve, job, metrics, run_ranks, write_parts
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_NODE
from trainer.graph.open import open_graph
from trainer.loader.link_seeds import link_inputs
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.store.manifest import read_manifest
from trainer.train import model as models
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.model import embedded_nodes, trained_model
from trainer.train.settings import TrainSettings
from trainer.train.tasks.choose import node_task

ALONE = RankGroup(Ranks(), torch.device("cpu"))
SPLITS = {"train": np.arange(6), "val": np.arange(6, 9), "test": np.array([9])}
LINK = ("paper", "cites", "paper")
SETTINGS: dict[str, Any] = {
    "task": "link", "model": "rsage", "epochs": 1, "fanouts": (3, 2), "lr": 0.01, "batch_size": 150, "hidden": 8,
    "negatives": 20, "eval_negatives": 1000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("y", "name", "expected"),
    [
        # class 2 is the most frequent of nodes 0 to 5; it is right for two of nodes 6 to 8, and wrong for node 9
        (np.array([2, 2, 0, 1, 2, 0, 2, 1, 2, 0]), "class 2, the most frequent", {"val": 2 / 3, "test": 0.0}),
        # the mean of nodes 0 to 5 is 4; it misses 4, 4, 10 by 0, 0, 6, and 3 by 1
        (np.array([1, 2, 3, 5, 6, 7, 4, 4, 10, 3], np.float32) + 0.0, "the mean", {"val": 2.0, "test": 1.0}),
        # label 0 applies to most train nodes, label 1 to few: F1 = 4 / (4 + 1 false positive + 1 false negative)
        (
            np.array([[1, 0], [1, 0], [1, 1], [0, 0], [1, -1], [1, 0], [1, 0], [0, 1], [1, 0], [0, 0]], np.int8),
            "each label that most seeds have", {"val": 2 / 3, "test": 0.0},
        ),
    ],
)  # fmt: skip
def test_the_baseline_of_node_tasks(tmp_path: Path, y: np.ndarray, name: str, expected: dict[str, float]) -> None:
    data = graph([(k, (k + 1) % 10) for k in range(10)], 10, {"x": np.ones((10, 2), np.float32), "y": y}, splits=SPLITS)
    classes = 3 if y.ndim == 1 and y.dtype.kind == "i" else 0
    data = replace(data, nodes={HOMO_NODE: replace(data.nodes[HOMO_NODE], num_classes=classes)})
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    with open_graph(tmp_path / "parts") as opened:
        task, _, baseline = node_task(opened, HOMO_NODE, TrainSettings(), tuple(SPLITS), ALONE)
    assert baseline.name == name
    assert {split: of[task.names[0]] for split, of in baseline.metrics.items()} == pytest.approx(expected)


def test_the_baseline_names_the_class_as_the_table_does(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    rows = [f"{k},{'spam' if k % 3 else 'ham'},{'train' if k < 8 else 'val'},{k}" for k in range(12)]
    (tmp_path / "mails.csv").write_text("id,kind,split,size\n" + "\n".join(rows) + "\n")
    (tmp_path / "links.csv").write_text("src,dst\n0,1\n1,2\n")
    nodes = {"files": ["mails.csv"], "id": "id", "features": ["size"], "label": "kind", "split": "split"}
    edges = {"files": ["links.csv"], "source": "src", "target": "dst"}
    data = load_dataset(
        "tables",
        str(tmp_path),
        {"nodes": {"mail": nodes}, "edges": {"mail__to__mail": edges}},
        Scratch(tmp_path / "work", 300 << 20),
    )
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    with open_graph(tmp_path / "parts") as opened:
        _, _, baseline = node_task(opened, HOMO_NODE, TrainSettings(), ("train", "val"), ALONE)
    assert baseline.name == "class spam, the most frequent"


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "parts"
    options = {"hold_out": "paper__cites__paper", "num_nodes": 200, "all_features": True, "num_features": 4}
    return write_parts(folder, 2, "synthetic-hetero", **options)


def test_the_baseline_of_links_ranks_by_the_number_of_links(links: Path, tmp_path: Path) -> None:
    train(job(links, tmp_path / "run", **SETTINGS), Ranks())
    (result,) = metrics(tmp_path / "run", "result")
    with open_graph(links) as opened:
        ends = link_inputs(opened, LINK).ends
        popular = np.bincount(ends.ends_of(np.arange(len(ends)))[1], minlength=200)
        _, targets = opened.store.graph_attrs["test_links"]
    scores = np.tile(popular, (len(targets), 1))
    own = scores[np.arange(len(targets)), targets][:, None]
    rank = 1 + (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    assert result["baseline"] == "the targets with most links"
    assert result["baseline_test_mrr"] == pytest.approx((1 / rank).mean())


@pytest.mark.slow
def test_the_baseline_and_rows_beside_features_do_not_depend_on_the_number_of_ranks(
    links: Path, tmp_path: Path
) -> None:  # fmt: skip
    lines = []
    for ranks in (1, 2):
        run_ranks(ranks, job(links, tmp_path / str(ranks), **SETTINGS))
        (result,) = metrics(tmp_path / str(ranks), "result")
        lines.append(
            [*curve(tmp_path / str(ranks)), *(value for name, value in sorted(result.items()) if "_mrr" in name)]
        )
    assert lines[0] == pytest.approx(lines[1], rel=1e-4, abs=5e-4)  # the last losses are small


def test_targets_with_features_have_trainable_rows_in_link_prediction(
    links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    manifest, settings = read_manifest(links), TrainSettings(**SETTINGS)
    counts = {of: spec.num_nodes for of, spec in manifest.nodes.items()}
    assert embedded_nodes(settings, manifest, LINK, 8) == ({"paper": 200}, "")
    assert embedded_nodes(settings, manifest, ("author", "writes", "paper"), 8) == ({"paper": 200}, "")
    assert embedded_nodes(settings, manifest, "paper", 8) == ({}, "")
    assert embedded_nodes(replace(settings, embeddings="all"), manifest, "paper", 8) == (counts, "")
    assert embedded_nodes(replace(settings, embeddings="featureless"), manifest, LINK, 8) == ({}, "")
    train(job(links, tmp_path / "run", **SETTINGS), Ranks())
    saved = load_checkpoint(tmp_path / "run/checkpoints/last.pt")
    _, embedding = trained_model(saved)
    assert embedding is not None and embedding.num_nodes == {"paper": 200}
    monkeypatch.setattr(models, "_MOST_ROWS", 1000)
    found, why = embedded_nodes(settings, manifest, LINK, 8)
    assert found == {} and "paper nodes have no trainable rows beside their features" in why
