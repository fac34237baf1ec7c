"""Tests of training on heterogeneous graphs: any number of processes, trainable rows, and target node types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from graphs import hetero
from train_kit import chosen_cases, curve, job, metrics, run_ranks, write_parts
from trainer.core.errors import DataError, SettingsError
from trainer.core.ranks import Ranks
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train

RUNS: dict[str, dict[str, Any]] = {
    "rgcn": {"model": "rgcn", "embedding_lr": 0.02},
    "hgt, temporal": {"model": "hgt", "time_attr": "time"},
    "rsage, the latest": {"model": "rsage", "time_attr": "time", "temporal_strategy": "last"},
    "rsage, weighted": {"model": "rsage", "weight_attr": "edge_weight", "disjoint": True, "replace": True},
    "rsage, ranks": {"model": "rsage", "neighbors": {"name": "ppr", "eps": 1e-3}, "weight_attr": "edge_weight"},
    "tokens, ranks": {"model": "token-transformer", "neighbors": "ppr", "time_attr": "time", "max_tokens": 20},
    "tokens, top": {
        "model": "token-transformer",
        "weight_attr": "edge_weight",
        "time_attr": "time",
        "neighbors": "top",
        "max_tokens": 20,
    },
}
SMALL: dict[str, Any] = {"num_nodes": 300, "time": True, "edge_weight": True}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("typed") / "parts", 3, "synthetic-hetero", **SMALL)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return {name: RUNS[name] for name in sorted(chosen_cases(request, "name") | {"rgcn"})}


@pytest.fixture(scope="module")
def alone(parts: Path, runs: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for name, settings in runs.items():
        train(job(parts, folder / name, epochs=2, batch_size=44, **settings), Ranks())
    return folder


@pytest.fixture(scope="module")
def together(
    parts: Path, runs: dict[str, dict[str, Any]], alone: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Train each model in three processes, and return the parent folder of the run folders."""
    # the run ``resumed`` trains the second epoch of rgcn, from the checkpoint of the run with one process
    folder = tmp_path_factory.mktemp("together")
    jobs = [job(parts, folder / name, epochs=2, batch_size=44, **settings) for name, settings in runs.items()]
    first = str(alone / "rgcn" / "checkpoints" / "epoch-0001.pt")
    resumed = job(parts, folder / "resumed", epochs=2, batch_size=44, resume=first, **RUNS["rgcn"])
    for ended in run_ranks(3, *jobs, resumed):
        assert ended.returncode == 0, ended.output
    return folder


@pytest.mark.parametrize("name", fast_cases(RUNS, "rgcn", "rsage, the latest", "tokens, ranks"))
def test_several_processes_train_the_same_model_and_rows_as_one(name: str, alone: Path, together: Path) -> None:
    assert len(curve(alone / name)) == 2 * 3
    np.testing.assert_allclose(curve(together / name), curve(alone / name), rtol=1e-4)
    ours, theirs = (load_checkpoint(folder / name / "checkpoints" / "last.pt") for folder in (alone, together))
    torch.testing.assert_close(dict(theirs.model), dict(ours.model), atol=1e-3, rtol=1e-3)
    assert ours.embedding is not None and theirs.embedding is not None
    assert {of: len(rows) for of, rows in ours.embedding["tables"].items()} == {"author": 150, "field": 15}
    torch.testing.assert_close(theirs.embedding["tables"], ours.embedding["tables"], atol=1e-3, rtol=1e-3)
    scores = (metrics(folder / name, "result")[0]["test_accuracy"] for folder in (alone, together))
    assert next(scores) == pytest.approx(next(scores), abs=1.5 / 60)


def test_a_resumed_run_continues_with_its_embedding_rows(
    parts: Path, alone: Path, together: Path, tmp_path: Path
) -> None:
    first = str(alone / "rgcn" / "checkpoints" / "epoch-0001.pt")
    train(job(parts, tmp_path, epochs=2, batch_size=44, resume=first, **RUNS["rgcn"]), Ranks())
    assert curve(tmp_path) == curve(alone / "rgcn")[3:]
    np.testing.assert_allclose(curve(together / "resumed"), curve(alone / "rgcn")[3:], rtol=1e-4)
    resumed, whole = (load_checkpoint(folder / "checkpoints" / "last.pt") for folder in (tmp_path, alone / "rgcn"))
    torch.testing.assert_close(resumed.embedding, whole.embedding, atol=0, rtol=0)


def test_rows_of_featureless_nodes_are_learnt(tmp_path: Path) -> None:
    # A paper's features do not predict its class; its fields do, once the model has learnt which field has which class.
    rng = np.random.default_rng(0)
    y = rng.integers(2, size=600)
    about = np.stack([rng.integers(60, size=2400) * 2 + np.tile(y, 4), np.tile(np.arange(600), 4)])
    papers = NodeData(600, {"x": np.ones((600, 1), np.float32), "y": y}, split_of(600), 2)
    nodes = {"paper": papers, "field": NodeData(120)}
    data = Dataset("fields", nodes, {("field", "of", "paper"): EdgeData(about)}, "fields", hetero=True)
    write_partition(data, assign_parts(data, 1, "hash"), tmp_path / "parts")
    common: dict[str, Any] = {"model": "rsage", "epochs": 8, "hidden": 4, "lr": 0.01, "fanouts": (-1,)}
    learnt = train(job(tmp_path / "parts", tmp_path / "learnt", **common, embedding_lr=0.1), Ranks())
    still = train(job(tmp_path / "parts", tmp_path / "still", **common, embedding_lr=1e-9), Ranks())
    assert learnt.test is not None and still.test is not None
    assert learnt.test["accuracy"] > 0.9 > 0.8 > still.test["accuracy"]


def split_of(count: int) -> dict[str, np.ndarray]:
    ids = np.arange(count)
    return {"train": ids[::2], "val": ids[1::4], "test": ids[3::4]}


WRITES = ("author", "writes", "paper")


@pytest.mark.parametrize(
    "labelled,settings,error,message",
    [
        ((), {}, DataError, "typed: no node type has both labels y and a train split with seeds"),
        (
            ("author", "paper"),
            {},
            SettingsError,
            "typed: author, paper all have labels y and a train split; choose one",
        ),
        (("paper",), {"target": "venue"}, SettingsError, "target is 'venue'; typed has author, paper"),
        (("paper",), {"target": "author"}, DataError, "typed: nodes of type author have no y; training needs labels y"),
        (("paper",), {"model": "sage"}, SettingsError, "model 'sage' is for homogeneous graphs"),
        (("paper",), {"weight_attr": "w"}, SettingsError, "no edge type has the weight attribute 'w'"),
        (("paper",), {"time_attr": "t"}, SettingsError, "time_attr 't' is neither a node-level nor an edge-level"),
    ],
)
def test_a_graph_or_model_that_cannot_be_trained_is_one_clear_error(
    labelled: tuple[str, ...], settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    data = hetero({"author": 4, "paper": 6}, {WRITES: [(0, 0), (1, 2)]})
    for of, nodes in data.nodes.items():
        if of not in labelled:
            nodes.attrs.pop("y")  # type: ignore[attr-defined]
            object.__setattr__(nodes, "num_classes", 0)
            nodes.splits.clear()  # type: ignore[attr-defined]
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    with pytest.raises(error, match=message):
        train(job(tmp_path / "parts", tmp_path / "run", **{"model": "rgcn", **settings}), Ranks())


def test_the_target_may_be_chosen(tmp_path: Path) -> None:
    data = hetero({"author": 4, "paper": 6}, {WRITES: [(0, 0), (1, 2)], ("paper", "by", "author"): [(2, 1), (0, 0)]})
    write_partition(data, assign_parts(data, 2, "hash"), tmp_path / "parts")
    result = train(job(tmp_path / "parts", tmp_path / "run", model="hgt", target="author"), Ranks())
    assert len(result.step_loss[0]) == 1 and torch.isfinite(result.step_loss[0]).all()
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt").graph["target"] == "author"
