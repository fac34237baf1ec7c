"""Tests of training: equal results on any number of processes, resumed or not; unusual graphs; refused settings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast_cases import fast_grid
from graphs import graph
from train_kit import (
    REPOSITORY,
    FewBatches,
    curve,
    job,
    metrics,
    run_ranks,
    write_parts,
)
from trainer.core.errors import DataError, SettingsError, TrainingError
from trainer.core.ranks import RankGroup, Ranks
from trainer.nn.layers import SAGEConv
from trainer.nn.models import BlockModel
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.checkpoint import load_checkpoint
from trainer.train.epoch import evaluate, train_epoch
from trainer.train.fit import Fit
from trainer.train.job import train
from trainer.train.metrics import MetricsLog
from trainer.train.optimize import Optimizers
from trainer.train.settings import TrainSettings
from trainer.train.tasks.classification import Classification

ALONE = RankGroup(Ranks(), torch.device("cpu"))
MODELS = ("sage", "gcn", "gat")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("data") / "parts", 2)


@pytest.fixture(scope="module")
def alone(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each model for two epochs in one process, and return the parent folder of the run folders."""
    folder = tmp_path_factory.mktemp("alone")
    for model in MODELS:
        train(job(parts, folder / model, model=model, epochs=2), Ranks())
    return folder


@pytest.fixture(scope="module")
def together(parts: Path, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each model for two epochs in three processes, and return the parent folder of the run folders."""
    # the run ``resumed`` trains the second epoch of sage, from the checkpoint of the run with one process
    folder = tmp_path_factory.mktemp("together")
    first = str(alone / "sage" / "checkpoints" / "epoch-0001.pt")
    jobs = [job(parts, folder / model, model=model, epochs=2) for model in MODELS]
    for ended in run_ranks(3, *jobs, job(parts, folder / "resumed", epochs=2, resume=first)):
        assert ended.returncode == 0, ended.output
    return folder


@pytest.mark.parametrize("model", MODELS)
def test_several_processes_train_the_same_model_as_one(model: str, alone: Path, together: Path) -> None:
    np.testing.assert_allclose(curve(together / model), curve(alone / model), rtol=1e-5)
    ours, theirs = (load_checkpoint(folder / model / "checkpoints" / "last.pt") for folder in (alone, together))
    for name, value in ours.model.items():
        torch.testing.assert_close(theirs.model[name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_every_seed_counts_once_on_several_processes(alone: Path, together: Path) -> None:
    epochs = [line for rank in range(3) for line in metrics(together / "sage", "epoch", rank)]
    assert sum(line["seeds"] for line in epochs) == 2 * 180
    assert all(line["seeds"] > 0 for line in epochs)
    for ours, theirs in zip(metrics(together / "sage", "eval"), metrics(alone / "sage", "eval"), strict=True):
        assert ours["accuracy"] == theirs["accuracy"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_a_resumed_run_continues_the_curve_exactly(parts: Path, alone: Path, tmp_path: Path) -> None:
    first = str(alone / "sage" / "checkpoints" / "epoch-0001.pt")
    train(job(parts, tmp_path, epochs=2, resume=first), Ranks())
    assert curve(tmp_path) == curve(alone / "sage")[3:]
    resumed, whole = (load_checkpoint(folder / "checkpoints" / "last.pt") for folder in (tmp_path, alone / "sage"))
    assert all(torch.equal(resumed.model[name], whole.model[name]) for name in whole.model)
    assert torch.cat(resumed.step_loss).tolist() == curve(alone / "sage")
    assert metrics(tmp_path, "result")[0]["test_accuracy"] == metrics(alone / "sage", "result")[0]["test_accuracy"]


def test_resuming_a_finished_run_only_evaluates(
    parts: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    train(job(parts, tmp_path, epochs=2, resume=str(alone / "sage" / "checkpoints" / "last.pt")), Ranks())
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "nothing to train: the checkpoint is at epoch 2 of 2; increase --epochs to train further"
    ended, before = (metrics(folder, "result")[0] for folder in (tmp_path, alone / "sage"))
    assert ended["test_accuracy"] == before["test_accuracy"] and ended["epoch_seconds"] == []


def test_the_best_weights_load_as_documented(
    parts: Path, alone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "runs" / "RUN").mkdir(parents=True)
    (tmp_path / "runs" / "RUN" / "checkpoints").symlink_to(alone / "sage" / "checkpoints")
    (tmp_path / "parts").symlink_to(parts)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(snippet, found)
    best = load_checkpoint(alone / "sage" / "checkpoints" / "last.pt").best
    assert best is not None
    assert all(torch.equal(value, best.model[name]) for name, value in found["model"].state_dict().items())


def test_the_docs_list_the_keys_of_a_checkpoint(alone: Path) -> None:
    saved = torch.load(alone / "sage" / "checkpoints" / "last.pt", weights_only=True)
    page = (REPOSITORY / "docs" / "ARCHITECTURE.md").read_text()
    table = page.split("## Checkpoints")[1].split("\n## ")[0]
    keys = {key for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)}
    assert keys == set(saved)


def test_several_processes_resume_from_a_run_of_one(alone: Path, together: Path) -> None:
    np.testing.assert_allclose(curve(together / "resumed"), curve(alone / "sage")[3:], rtol=1e-5)


def test_training_learns_and_reports_the_best_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_parts(tmp_path / "parts", 1, noise=1.0, homophily=0.8)
    train(job(data, tmp_path / "run", epochs=12, fanouts=(10, 5), hidden=32, lr=0.01), Ranks())
    result, evals = metrics(tmp_path / "run", "result")[0], metrics(tmp_path / "run", "eval")
    val = {line["epoch"]: line["accuracy"] for line in evals if line["split"] == "val"}
    assert result["test_accuracy"] > 0.8
    assert result["val_accuracy"] == max(val.values()) == val[result["best_epoch"]]
    assert result["epochs"] == len(result["epoch_seconds"]) == 12
    said = capsys.readouterr().out
    assert f"test accuracy {result['test_accuracy']:.4f} (weights of epoch {result['best_epoch']}" in said
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"last.pt", "epoch-0011.pt", "epoch-0012.pt", f"epoch-{result['best_epoch']:04d}.pt"}


def test_a_nan_loss_names_epoch_and_step(tmp_path: Path) -> None:
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    optimizers = Optimizers(torch.optim.Adam(model.parameters()))
    with MetricsLog(tmp_path, 0) as log, pytest.raises(TrainingError, match="loss is nan in epoch 4 at step 2"):
        train_epoch(model, Classification(2), optimizers, FewBatches(bad_step=2), 4, ALONE, log)


def test_a_nan_output_gives_no_score() -> None:
    with pytest.raises(TrainingError, match="output is NaN on seeds of an evaluation split"):
        evaluate(BlockModel([SAGEConv(5, 2)], 0.0), Classification(2), FewBatches(bad_step=1), ALONE)


NODES = np.arange(12)
X, Y = np.stack([NODES, -NODES], axis=1) / 12, NODES % 3
SPLITS = {"train": NODES[:7], "val": NODES[7:9], "test": NODES[9:]}


def edge_case(folder: Path, edges: list[tuple[int, int]], attrs: dict[str, np.ndarray], splits: Any = SPLITS) -> Path:
    """Partition a graph of 12 nodes into 5 parts in ``folder``, and return ``folder``."""
    data = graph(edges, 12, attrs, splits)
    write_partition(data, assign_parts(data, 5, "random"), folder)
    return folder


CHAIN = [(v, v + 1) for v in range(11)]
TRAINABLE = {
    "half features, byte labels": (CHAIN, {"x": X.astype(np.float16), "y": Y.astype(np.uint8)}, SPLITS),
    "true and false as features": (CHAIN, {"x": X > 0.5, "y": Y.astype(np.uint64)}, SPLITS),
    "16-bit words as features": (CHAIN, {"x": NODES[:, None].astype(np.uint16), "y": Y.astype(np.int8)}, SPLITS),
    "further attributes": (CHAIN, {"x": X, "y": Y, "flag": Y > 0, "time": NODES.astype(np.uint32)}, SPLITS),
    "one class": (CHAIN, {"x": X, "y": Y * 0}, SPLITS),
    "no edges": ([], {"x": X, "y": Y}, SPLITS),
    "a hub and many nodes without in-edges": ([(v, 0) for v in range(12)], {"x": X, "y": Y}, SPLITS),
    "train split only": (CHAIN, {"x": X, "y": Y}, {"train": NODES[:1]}),
    "empty val split": (CHAIN, {"x": X, "y": Y}, {"train": NODES[:3], "val": NODES[:0], "test": NODES[5:]}),
}


@pytest.mark.parametrize(("name", "model"), fast_grid(TRAINABLE, MODELS, share=3))
def test_unusual_graphs_train(name: str, model: str, tmp_path: Path) -> None:
    parts = edge_case(tmp_path / "parts", *TRAINABLE[name])
    result = train(job(parts, tmp_path, model=model, batch_size=3, fanouts=(2, 2), hidden=8), Ranks())
    splits = TRAINABLE[name][2]
    assert len(result.step_loss[0]) == -(-len(splits["train"]) // 3) and torch.isfinite(result.step_loss[0]).all()
    assert (result.val is not None) == (len(splits.get("val", ())) > 0)
    assert (result.test is not None) == ("test" in splits)


@pytest.mark.parametrize(
    "attrs,splits,message",
    [
        ({"y": Y}, SPLITS, "small: nodes have no x; training needs features x and labels y"),
        ({"x": X}, SPLITS, "small: nodes have no y; training needs features x and labels y"),
        ({"x": X, "y": Y}, {"test": NODES}, "small: the train split has no seeds"),
        ({"x": X, "y": Y}, {"train": NODES[:0]}, "small: the train split has no seeds"),
    ],
)
def test_a_graph_that_cannot_be_trained_on_is_one_clear_error(
    attrs: dict[str, np.ndarray], splits: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=f"^{message}$"):
        train(job(edge_case(tmp_path / "parts", CHAIN, attrs, splits), tmp_path), Ranks())


def test_the_loop_accepts_any_model_and_loader(tmp_path: Path) -> None:
    # The training loop requires of a model only one output per batch.
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    settings = TrainSettings(epochs=30, lr=0.05, fanouts=(2,), eval_every=10, checkpoint_every=0)
    loaders = {"train": FewBatches(seeds=64), "val": FewBatches(seeds=64)}
    with MetricsLog(tmp_path, 0) as log:
        result = Fit(settings, model, Classification(2), loaders, ALONE, log, tmp_path / "checkpoints", {}).run()
    assert evaluate(model, Classification(2), FewBatches(seeds=64), ALONE).metrics["accuracy"] > 0.9
    assert [line["epoch"] for line in metrics(tmp_path, "eval")] == [10, 20, 30]
    assert result.test is None and result.checkpoint == tmp_path / "checkpoints" / "epoch-0030.pt"
    assert {path.name for path in result.checkpoint.parent.iterdir()} == {"epoch-0030.pt", "last.pt"}


def test_step_lines_are_rate_limited(tmp_path: Path) -> None:
    model = BlockModel([SAGEConv(5, 2)], 0.0)
    optimizers = Optimizers(torch.optim.SGD(model.parameters()))
    with MetricsLog(tmp_path, 0) as log:
        train_epoch(model, Classification(2), optimizers, FewBatches(steps=50), 1, ALONE, log)
    lines = metrics(tmp_path, "step")
    assert all(later["t"] - earlier["t"] > 0.99 for earlier, later in zip(lines, lines[1:], strict=False))
    assert lines[0].keys() == {
        "t", "kind", "rank", "epoch", "step", "steps", "loss", "seeds", "lr", "seeds_per_s", "wait_s",
        "step_s", "own_s", "batch_s", "spent", "behind", "traffic", "remote_share",
    }  # fmt: skip


def test_an_unusable_run_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="metrics-rank0.jsonl cannot be written: .*; choose another --run-dir"):
        MetricsLog(tmp_path / "file", 0)


def test_a_seed_without_label_is_an_error_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_parts(tmp_path / "parts", 1)
    file = data / "part0" / "nodes" / "node" / "attrs" / "y.npy"
    labels = np.load(file)
    seed = int(np.load(data / "shared" / "nodes" / "node" / "seeds" / "val.npy")[3])
    labels[seed] = -1
    np.save(file, labels)
    with pytest.raises(DataError, match=f"1 seeds of the val split have no class in 0 … 3, .* node {seed} with y = -1"):
        train(replace(job(data, tmp_path / "run"), digests=False), Ranks())
    assert "epoch" not in capsys.readouterr().out
