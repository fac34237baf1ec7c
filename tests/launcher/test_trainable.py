"""Tests that the launcher refuses a graph on which the bundled trainer cannot train, unless it runs a user command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.cli import main
from launcher.config.schema import ClusterConfig, DataConfig
from launcher.errors import UsageError
from launcher.plan.partition import read_partition_files
from launcher.plan.trainable import check_trainable, is_hetero
from plan_kit import cluster, parts_folder
from trainer.core.train_config import EarlyStop, Neighbors, Schedule, TrainConfig


def config_of(folder: Path, **train: Any) -> ClusterConfig:
    return cluster(data=DataConfig(dataset="file", source="my.npz", folder=str(folder)), train=TrainConfig(**train))


def parts_with(folder: Path, **train_seeds: int) -> Path:
    """Create two parts.

    train_seeds: number of train seeds by node type. A node type with 0 has only a test split.
    """
    parts_folder(folder, 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["nodes"] = {name: {"splits": {"train": n} if n else {"test": 4}} for name, n in train_seeds.items()}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.mark.parametrize(
    ("seeds", "train", "told"),
    [
        ({"node": 0}, {}, "my.npz: the graph has no train split, which the bundled trainer needs (parts in "),
        ({"paper": 9, "author": 0}, {"target": "author"}, "my.npz: node type author has no train split"),
        ({"paper": 9, "author": 0}, {}, ""),
        ({"paper": 9}, {"target": "odd"}, "train.target: there is no odd in synthetic; it has paper"),
        ({}, {}, ""),
    ],
)
def test_parts_need_train_seeds(tmp_path: Path, seeds: dict[str, int], train: dict[str, str], told: str) -> None:
    parts = read_partition_files(parts_with(tmp_path, **seeds))
    assert parts is not None
    if not told:
        check_trainable(config_of(tmp_path, **train), parts)
        return
    with pytest.raises(UsageError, match="nothing was sent. Add train_idx or train_mask|there is no odd") as raised:
        check_trainable(config_of(tmp_path, **train), parts)
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    ("classes", "train", "told"),
    [
        (3, {"class_weights": (1.0, 2.0, 1.0), "metrics": ("macro_f1",), "edge_attr": "w"}, ""),
        (3, {"class_weights": (1.0, 2.0)}, "train.class_weights: 2 numbers, but synthetic has 3 classes"),
        (0, {"class_weights": "balanced"}, "train.class_weights: is for task classification, and y of synthetic are"),
        (0, {"label_smoothing": 0.1}, "train.label_smoothing: is for task classification, and y of synthetic are no"),
        (0, {"task": "classification"}, "train.task: y of synthetic are no classes"),
        (3, {"metrics": ("mae",)}, "train: no metric 'mae' for y of synthetic; there are accuracy, macro_f1, "),
        (3, {"early_stop": EarlyStop(3, metric="rmse")}, "train: no metric 'rmse' for y of synthetic"),
        (3, {"early_stop": EarlyStop(3)}, "train.early_stop: needs evaluations on val, but synthetic has no val split"),
        (3, {"schedule": Schedule(name="plateau")}, "train.schedule: needs evaluations on val, but synthetic has no"),
        (3, {"edge_attr": ("w", "weight")}, "train.edge_attr: synthetic has no attribute 'weight' there; it has w"),
        (3, {"time_attr": "t"}, "train.time_attr: synthetic has no attribute 't' there; it has w, y"),
        (3, {"neighbors": Neighbors("walks")}, ""),
        (
            3,
            {"neighbors": Neighbors("walks", metapath=("a__b__a",))},
            "train.neighbors.metapath: synthetic has no edge",
        ),
        (
            3,
            {"neighbors": Neighbors("ppr", edge_types=("a__b__a",))},
            "train.neighbors.edge_types: synthetic has no ed",
        ),
        (3, {"category_dims": {"w": 8, "node.w": 8}}, ""),
        (3, {"task": "link", "target": "node__to__node"}, ""),
        (3, {"task": "link", "target": "all"}, ""),
        (3, {"task": "link", "target": "next"}, ""),  # the rows of a task table, which list nodes
        (3, {"task": "auto", "target": "next"}, ""),
        (3, {"task": "link", "target": "node"}, "train.target: synthetic has no edge type node; it has next__lists__"),
        (3, {"task": "link", "target": "node__to__node,a__b__c"}, "train.target: synthetic has no edge type a__b__c;"),
        (3, {"task": "edge-regression", "target": "node"}, "train.target: synthetic has no edge type node; it has ne"),
        (3, {"category_dims": {"node.ww": 8}}, "train.category_dims: synthetic has no attribute 'node.ww' there; it"),
    ],
)
def test_settings_fit_the_labels_and_attributes_of_the_parts(
    classes: int, train: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = parts_with(tmp_path, node=9) / "manifest.json"
    nodes = {"splits": {"train": 9}, "attrs": {"y": {}}, "num_classes": classes}
    types: dict[str, Any] = {"nodes": {"node": nodes}, "edges": {"node__to__node": {"attrs": {"w": {}}}}}
    if "target" in train:
        types["nodes"]["next"] = {"splits": {"train": 9}}
        types["edges"]["next__lists__node"] = {"attrs": {}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **types}))
    found = ""
    try:
        check_trainable(config_of(tmp_path, **train), read_partition_files(tmp_path))
    except UsageError as error:
        found = str(error)
    assert found.startswith(told) and found.endswith("nothing was sent" if told else "")
    assert bool(found) == bool(told)


def test_existing_parts_are_refused_before_any_connection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts_with(tmp_path / "parts", node=0)
    config = tmp_path / "c.yml"
    config.write_text(f"nodes: [nowhere1, nowhere2]\ndata: {{dataset: synthetic, folder: {tmp_path}/parts}}\n")
    for words in (["launch"], ["launch", "--dry-run"], ["check"]):
        assert main.run([*words, "-c", str(config)]) == 2
        captured = capsys.readouterr()
        assert "no train split" in captured.err and "connecting" not in captured.out
    assert main.run(["launch", "--dry-run", "-c", str(config), "--", "true"]) == 0


def typed_parts(folder: Path, hetero: bool) -> Path:
    parts_with(folder, node=9)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "hetero": hetero}))
    return folder


TABLES = {"nodes": {"user": {"id": "id"}, "item": {"id": "id"}}, "edges": {"user__buys__item": {"source": "u"}}}


@pytest.mark.parametrize(
    ("data", "hetero"),
    [
        (DataConfig(dataset="synthetic"), False),
        (DataConfig(dataset="synthetic-hetero"), True),
        (DataConfig(dataset="ogbn-mag"), True),
        (DataConfig(dataset="ogbn-arxiv"), None),
        (DataConfig(dataset="tables", options=TABLES), True),
        (DataConfig(dataset="tables", options={"nodes": json.dumps(TABLES["nodes"])}), True),
        (DataConfig(dataset="tables", options={"nodes": "{", "edges": {"a": {}}}), False),
        (DataConfig(dataset="synthetic-hetero", serving="graphs"), None),
        (DataConfig(dataset="tables", options={"nodes": {"n": {}}, "edges": {"e": {"relation": "r"}}}), True),
        (DataConfig(dataset="partition", source="/nowhere"), None),
    ],
)
def test_whether_a_dataset_is_heterogeneous(data: DataConfig, hetero: bool | None) -> None:
    assert is_hetero(data) is hetero


@pytest.mark.parametrize(
    ("options", "train", "refused"),
    [
        ({}, {}, True),
        ({}, {"target": "user"}, True),
        ({"nodes": {"user": {"id": "id", "label": "age"}}}, {}, True),
        ({"nodes": {"user": {"id": "id", "label": "age", "split": "fold"}, "item": {"id": "id"}}}, {}, False),
        ({"hold_out": "user__buys__item"}, {}, False),
        ({"hold_out": "user__buys__item"}, {"task": "classification"}, True),
        ({"edges": {"user__buys__item": {"test_files": "test.csv"}}}, {}, False),
        ({"edges": {"user__buys__item": {"label": "stars", "split": "fold"}}}, {}, False),
        ({}, {"task": "edge-regression"}, False),
        ({}, {"task": "link"}, False),
        ({}, {"target": "user__buys__item"}, False),
        ({"nodes": "wrong"}, {}, False),
        ({"nodes": {"user": "wrong"}}, {}, False),
    ],
)
def test_tables_without_a_split_are_refused_before_partitioning(
    options: dict[str, object], train: dict[str, str], refused: bool
) -> None:
    data = DataConfig(dataset="tables", options=TABLES | options)
    config = cluster(data=data, train=TrainConfig(model="rsage", **train))
    if not refused:
        check_trainable(config, None)
        return
    with pytest.raises(UsageError, match="no node table has a split.*nothing was sent. Give a table label and split"):
        check_trainable(config, None)


def test_walks_in_a_graph_of_several_edge_types_need_a_metapath(tmp_path: Path) -> None:
    path = typed_parts(tmp_path, True) / "manifest.json"
    edges: dict[str, Any] = {"node__to__node": {"attrs": {}}, "node__cites__node": {"attrs": {}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "edges": edges}))
    parts, settings = read_partition_files(tmp_path), {"model": "rgcn", "fanouts": (5,)}
    with pytest.raises(UsageError, match=r"train.neighbors: .* \(node__cites__node, node__to__node\), .* a metapath"):
        check_trainable(config_of(tmp_path, neighbors=Neighbors("walks"), **settings), parts)
    along = Neighbors("walks", metapath=("node__to__node",))
    check_trainable(config_of(tmp_path, neighbors=along, **settings), parts)


@pytest.mark.parametrize("model", ["sage", "gcn", "gat", "rgcn"])
def test_a_model_for_another_kind_of_graph_is_refused(tmp_path: Path, model: str) -> None:
    typed, plain = (read_partition_files(typed_parts(tmp_path / str(hetero), hetero)) for hetero in (True, False))
    source = DataConfig(dataset="partition", source=str(tmp_path / "True"))
    check_trainable(config_of(tmp_path, model=model), plain)
    if model == "rgcn":
        check_trainable(config_of(tmp_path, model=model), typed)
        return
    for config, parts in ((config_of(tmp_path, model=model), typed), (cluster(data=source), None)):
        with pytest.raises(UsageError, match="several types of nodes or edges; nothing was sent. Set train.model to"):
            check_trainable(config, parts)


def test_a_model_that_does_not_fit_is_refused_before_partitioning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yml"
    config.write_text(f"nodes: [nowhere1, nowhere2]\ndata: {{dataset: synthetic-hetero, folder: {tmp_path}/parts}}\n")
    for words in (["launch"], ["launch", "--dry-run"]):
        assert main.run([*words, "-c", str(config)]) == 2
        captured = capsys.readouterr()
        assert "train.model: sage is for homogeneous graphs" in captured.err and "partition" not in captured.out
    assert main.run(["launch", "--dry-run", "-c", str(config), "--", "true"]) == 0
    assert main.run(["launch", "--dry-run", "-c", str(config), "--set", "train.model=rsage"]) == 0
