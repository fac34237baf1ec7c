"""Tests that full-graph inference equals sampled inference with all neighbours, for any number of ranks."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fast_cases import fast_cases
from forked import fork
from graphs import graph
from ports import free_port
from train_kit import finish_all, infer_words, job, metrics, start_words, write_parts
from trainer.cli import main
from trainer.core.errors import CheckpointError
from trainer.core.ranks import Ranks
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.infer import infer
from trainer.infer.prediction_files import TableColumn, write_table
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.checkpoint import load_checkpoint
from trainer.train.job import train
from trainer.train.model import load_model, trained_model
from trainer.train.settings import InferJob

MODELS = {
    "sage": False,
    "gcn": False,
    "gat": False,
    "rgcn": True,
    "hgt": True,
    "rsage": True,
    "token-transformer": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the partitions ``homo`` and ``hetero``, and with one run folder for each trained model."""
    folder = tmp_path_factory.mktemp("infer")
    write_parts(folder / "homo", 3)
    write_parts(folder / "hetero", 3, "synthetic-hetero", num_nodes=300)
    for model, hetero in MODELS.items():
        options: dict[str, Any] = {"model": model, "eval_fanouts": (-1, -1), "epochs": 2, "lr": 0.01}
        depth = {"layers": 3} if model == "token-transformer" else {}
        train(job(parts_of(folder, hetero), folder / model, **options, **depth), Ranks())
    return folder


def parts_of(folder: Path, hetero: bool) -> Path:
    return folder / ("hetero" if hetero else "homo")


def sampled_logits(parts: Path, checkpoint: Path) -> dict[int, np.ndarray]:
    """Return the logits of the seeds of all splits, by original id, from batches with all neighbours."""
    model, _ = trained_model(load_checkpoint(checkpoint))
    target = load_checkpoint(checkpoint).graph["target"]
    found = {}
    with open_graph(parts) as graph, torch.no_grad():
        for split in ("train", "val", "test"):
            settings = LoaderSettings(split, (-1, -1), 100, want_degree=True, shuffle=False, target=target)
            for batch in BatchLoader(graph, settings, 0, RankLayout.single(3)).epoch(0):
                ids = batch.n_id if isinstance(batch.n_id, torch.Tensor) else batch.n_id[target]
                found |= dict(zip(ids.tolist(), model(batch).numpy(), strict=False))
    return found


def whole_logits(out: Path) -> np.ndarray:
    ids = np.concatenate([np.load(out / f"part{part}" / "orig_id.npy") for part in range(3)])
    assert sorted(ids.tolist()) == list(range(len(ids)))
    logits = np.concatenate([np.load(out / f"part{part}" / "logits.npy") for part in range(3)])
    return logits[np.argsort(ids)]


@pytest.mark.parametrize("model", fast_cases(MODELS, "sage", "hgt"))
def test_logits_equal_those_of_sampling_all_neighbours(model: str, trained: Path, tmp_path: Path) -> None:
    parts, checkpoint = parts_of(trained, MODELS[model]), trained / model / "checkpoints" / "last.pt"
    result = infer(InferJob(checkpoint, parts, tmp_path, nodes_at_once=50), Ranks())
    logits = whole_logits(tmp_path)
    for node, row in sampled_logits(parts, checkpoint).items():
        np.testing.assert_allclose(logits[node], row, atol=1e-4, rtol=1e-4)
    ended = metrics(trained / model, "result")[0]
    assert result.metrics["test"]["accuracy"] == pytest.approx(ended["test_accuracy"])
    assert result.metrics["val"]["accuracy"] == pytest.approx(ended["val_accuracy"])
    assert json.loads((tmp_path / "infer.json").read_text())["metrics"] == dict(result.metrics)
    assert not list(tmp_path.glob(".layers*"))


def test_the_heaviest_and_the_latest_neighbours_are_those_of_evaluation(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", 3, edge_weight=True)
    top: dict[str, Any] = {
        "neighbors": "top", "weight_attr": "edge_weight", "edge_attr": "edge_weight", "fanouts": (4, 2)
    }  # fmt: skip
    train(job(parts, tmp_path / "run", lr=0.01, **top), Ranks())
    checkpoint = tmp_path / "run" / "checkpoints" / "last.pt"
    result = infer(InferJob(checkpoint, parts, tmp_path / "out", nodes_at_once=50), Ranks())
    assert "sage was run on the heaviest neighbours (4, 2), as in evaluation" in result.files
    logits, ended = whole_logits(tmp_path / "out"), metrics(tmp_path / "run", "result")[0]
    assert result.metrics["test"]["accuracy"] == pytest.approx(ended["test_accuracy"])
    model = load_model(tmp_path / "run")
    with open_graph(parts) as graph, torch.no_grad():
        heaviest = LoaderSettings("train", (4, 2), 100, weight="edge_weight", top=True, edge_attr="edge_weight")
        for batch in BatchLoader(graph, heaviest, 0, RankLayout.single(3)).epoch(0):
            np.testing.assert_allclose(logits[batch.n_id[: batch.num_seeds]], model(batch).numpy(), atol=1e-4)


@pytest.mark.slow
def test_results_on_two_ranks_differ_only_by_rounding(trained: Path, tmp_path: Path) -> None:
    # Two processes infer three models, one with all nodes of a part at once and two with 23 nodes at once.
    chosen = {"gat": 10_000, "rgcn": 23, "token-transformer": 23}
    runs = []
    for model, at_once in chosen.items():
        parts, checkpoint = parts_of(trained, MODELS[model]), trained / model / "checkpoints" / "last.pt"
        infer(InferJob(checkpoint, parts, tmp_path / f"{model}-1"), Ranks())
        runs.append(infer_words(InferJob(checkpoint, parts, tmp_path / f"{model}-2", nodes_at_once=at_once)))
    port = free_port(len(runs))
    for ended in finish_all([start_words(runs, rank, 2, port) for rank in range(2)]):
        assert ended.returncode == 0, ended.output
    for model in chosen:
        one, two = (whole_logits(tmp_path / f"{model}-{size}") for size in (1, 2))
        np.testing.assert_allclose(two, one, atol=1e-5, rtol=1e-5)


def test_the_command_prints_the_accuracy(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = infer_words(InferJob(trained / "sage" / "checkpoints" / "last.pt", trained / "homo", tmp_path / "out"))
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    test = metrics(trained / "sage", "result")[0]["test_accuracy"]
    assert printed.startswith("600 nodes of node, weights of epoch ") and f"test accuracy {test:.4f}" in printed


def test_a_checkpoint_of_another_graph_is_refused(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "sage" / "checkpoints" / "last.pt"
    with pytest.raises(CheckpointError, match="graph, synthetic: the model's target is 'node', but synthetic-hetero"):
        infer(InferJob(checkpoint, trained / "hetero", tmp_path), Ranks())


def test_nodes_with_times_are_computed_at_their_own_time(tmp_path: Path) -> None:
    parts = write_parts(tmp_path / "parts", 2, "synthetic-hetero", num_nodes=100, time=True)
    result = train(job(parts, tmp_path / "run", model="rsage", time_attr="time", fanouts=(-1, -1)), Ranks())
    found = infer(InferJob(tmp_path / "run" / "checkpoints" / "last.pt", parts, tmp_path / "out"), Ranks())
    assert found.metrics["test"] == pytest.approx(result.test)
    assert "of each node not later than its own time" in found.files


@pytest.mark.slow
def test_edges_of_weight_zero_are_ignored(tmp_path: Path) -> None:
    edges = [(v, (v + d) % 12) for v in range(12) for d in (1, 5)]
    weights = {"w": np.tile(np.array([1.0, 0.0]), 12)}
    found = {}
    for name, chosen, attrs in (("some", edges, weights), ("fewer", edges[::2], {"w": np.ones(12)})):
        data = graph(chosen, 12, edge_attrs=attrs)
        write_partition(data, assign_parts(data, 2, "random"), tmp_path / name)
        train(job(tmp_path / name, tmp_path / f"run-{name}", weight_attr="w", fanouts=(-1, -1)), Ranks())
        checkpoint = tmp_path / f"run-{name}" / "checkpoints" / "last.pt"
        infer(InferJob(checkpoint, tmp_path / name, tmp_path / f"out-{name}"), Ranks())
        found[name] = [np.load(tmp_path / f"out-{name}" / f"part{part}" / "logits.npy") for part in (0, 1)]
    for some, fewer in zip(found["some"], found["fewer"], strict=True):
        np.testing.assert_allclose(some, fewer, atol=1e-6)


def test_one_table_has_the_predictions_of_all_parts(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "sage" / "checkpoints" / "last.pt"
    infer(InferJob(checkpoint, trained / "homo", tmp_path, probabilities=True, parquet=True), Ranks())
    with (tmp_path / "predictions.csv").open() as file:
        rows = {int(row["id"]): row for row in csv.DictReader(file)}
    shares = torch.from_numpy(whole_logits(tmp_path)).softmax(1).numpy()
    assert sorted(rows) == list(range(len(shares)))
    for node, row in rows.items():
        each = [float(row[f"probability_{k}"]) for k in range(shares.shape[1])]
        np.testing.assert_allclose(each, shares[node], atol=1e-6)
        assert (int(row["prediction"]), float(row["probability"])) == (int(np.argmax(each)), max(each))
    duckdb = pytest.importorskip("duckdb")
    count = duckdb.sql(f"SELECT count(*), sum(id) FROM '{tmp_path}/predictions.parquet'").fetchall()
    assert count == [(len(rows), sum(rows))]
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_dir()) == [
        "infer.json", "predictions.csv", "predictions.parquet"
    ]  # fmt: skip


MERGE = """
import os, sys, torch
from pathlib import Path
from trainer.core.ranks import Ranks, join_ranks
from trainer.core import ranks
from trainer.infer import prediction_files
ranks._PIECE = 7
with join_ranks(Ranks.from_env(os.environ), torch.device("cpu"), "gloo", 60.0) as group:
    out = Path(sys.argv[1]) / f"host{group.rank}"
    own = [out / f"part{part}" for part in sys.argv[2 + group.rank].split()]
    print(prediction_files.merge_parts(out, own, True, group))
"""


def test_tables_of_hosts_with_their_own_folders_become_one(tmp_path: Path) -> None:
    # In the first host's folder there are also tables of an earlier call.
    duckdb = pytest.importorskip("duckdb")
    columns = [TableColumn("id", "BIGINT"), TableColumn("prediction", "VARCHAR")]
    for host, parts in ((0, (0, 1, 2, 10)), (1, (1, 2)), (2, (10,))):
        for part in parts:
            folder = tmp_path / f"host{host}/part{part}"
            folder.mkdir(parents=True)
            write_table(folder / "predictions", columns, [[[part, part], [f"host {host}", "ü"]]], True)
    (tmp_path / "host0/predictions.csv").write_text("id\n")
    env = {**os.environ, "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    started = [
        fork(["-c", MERGE, str(tmp_path), "0", "1 2", "10"], {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(3)
    ]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    assert outputs[0].strip().endswith(f"{tmp_path}/host0/predictions.csv and .parquet")
    expected = [(part, text) for part, host in ((0, 0), (1, 1), (2, 1), (10, 2)) for text in (f"host {host}", "ü")]
    with (tmp_path / "host0/predictions.csv").open() as file:
        assert [(int(row["id"]), row["prediction"]) for row in csv.DictReader(file)] == expected
    assert duckdb.sql(f"SELECT * FROM '{tmp_path}/host0/predictions.parquet'").fetchall() == expected
    names = {"part0", "part1", "part2", "part10", "predictions.csv", "predictions.parquet"}
    assert {path.name for path in (tmp_path / "host0").iterdir()} == names
