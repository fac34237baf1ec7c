"""Tests of steps and splits with fewer seeds than ranks: the results equal those of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gateway_kit import serving_parts
from graphs import graph, hetero
from own_models_kit import write_models
from ports import free_port
from test_client_train import cluster_file
from train_kit import command_line, curve, finish_all, infer_words, job, metrics, start_words, write_parts
from trainer.core.errors import DataError
from trainer.core.ranks import RankGroup, Ranks
from trainer.core.schema import HOMO_NODE
from trainer.data.dataset import Dataset
from trainer.graph.open import open_graph
from trainer.graph.seed_order import RankLayout
from trainer.infer.infer import infer
from trainer.loader.block_loader import BatchLoader, edge_rows
from trainer.nn.graph_facts import GraphFacts
from trainer.nn.models import build_model
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.store.manifest import AttrSpec
from trainer.train.job import train
from trainer.train.loaders import loader_settings
from trainer.train.model import model_facts
from trainer.train.settings import InferJob, TrainJob, TrainSettings
from trainer.train.tasks.choose import node_task

NODES = 14
RNG = np.random.default_rng(0)
EDGES = RNG.integers(0, NODES, (40, 2))
LABELS = {
    "classification": np.arange(NODES) % 3,
    "regression": RNG.standard_normal(NODES).astype(np.float32),
    "columns": RNG.standard_normal((NODES, 2)).astype(np.float32),
    "multilabel": RNG.integers(0, 2, (NODES, 3)).astype(np.int8),
}
#: Numbers of train, val and test seeds. Steps have at most 4 seeds, so that nine end with a step of one.
COUNTS = {"nine": (9, 2, 1), "two": (2, 1, 1), "one": (1, 1, 0)}

SETTINGS: dict[str, Any] = {"batch_size": 4, "eval_batch_size": 4, "hidden": 8, "fanouts": (3, 3), "dropout": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "sage": {"model": "sage"}, "gcn": {"model": "gcn"}, "gat": {"model": "gat"},
    "sage, edges": {"model": "sage", "edge_attr": "edge_attr"}, "sage, times": {"model": "sage", "time_attr": "time"},
    "rgcn": {"model": "rgcn"}, "hgt": {"model": "hgt"}, "rsage": {"model": "rsage"},
    "rsage, edges": {"model": "rsage", "edge_attr": "edge_attr"},
    "tokens": {"model": "token-transformer", "max_tokens": 9},
    "rsage, times": {"model": "rsage", "time_attr": "time"},
}  # fmt: skip


def dataset(label: str, counts: tuple[int, int, int], typed: bool) -> Dataset:
    y, order, cuts = LABELS[label], np.random.default_rng(1).permutation(NODES), np.cumsum(counts)
    splits = dict(zip(("train", "val", "test"), np.split(order, cuts)[:3], strict=True))
    attrs = {"x": np.eye(NODES, dtype=np.float32), "y": y, "time": np.arange(NODES) % 5}
    of_edges = {"edge_attr": np.arange(len(EDGES) * 2.0, dtype=np.float32).reshape(-1, 2) / 80}
    if not typed:
        data = graph(EDGES, NODES, attrs, splits, edge_attrs=of_edges)
        of = HOMO_NODE
    else:
        cites, writes = ("paper", "cites", "paper"), ("author", "writes", "paper")
        pairs = {cites: EDGES, writes: EDGES % [2, NODES], ("paper", "rev_writes", "author"): EDGES % [NODES, 2]}
        data = hetero({"author": 2, "paper": NODES}, pairs, {cites: of_edges})
        author = replace(data.nodes["author"], attrs={"time": np.zeros(2, np.int64)}, splits={})
        data, of = replace(data, nodes={**data.nodes, "author": author}), "paper"
    nodes = graph([], NODES, attrs, splits).nodes[HOMO_NODE]
    return replace(data, nodes={**data.nodes, of: replace(nodes, num_classes=3 if label == "classification" else 0)})


def parts_of(folder: Path, data: Dataset) -> Path:
    write_partition(data, assign_parts(data, 2, "hash"), folder)
    return folder


@pytest.mark.parametrize(
    ("label", "count"),
    [
        ("classification", "one"),
        pytest.param("regression", "two", marks=pytest.mark.slow),
        ("columns", "nine"),
        pytest.param("multilabel", "two", marks=pytest.mark.slow),
    ],
)
def test_the_shares_of_a_step_add_up_to_the_step(label: str, count: str, tmp_path: Path) -> None:
    for typed in (False, True):
        target = "paper" if typed else HOMO_NODE
        with open_graph(parts_of(tmp_path / str(typed), dataset(label, COUNTS[count], typed))) as opened:
            splits = [split for split, seeds in opened.manifest.nodes[target].splits.items() if seeds]
            task, *_ = node_task(opened, target, TrainSettings(), splits, RankGroup(Ranks()))
            for name, how in MODELS.items():
                settings = job(tmp_path, tmp_path, **SETTINGS, **how).settings
                if (settings.model in ("sage", "gcn", "gat")) == typed:
                    continue
                facts: GraphFacts = model_facts(opened.manifest, target, task.outputs, settings.edge_attr)
                model = build_model(settings, facts).eval()
                for split in splits:
                    loading = loader_settings(settings, target, split, settings.model == "gcn")
                    whole = sums(BatchLoader(opened, loading, 0, RankLayout.single(2)), model, task)
                    for world in (2, 3):
                        layout = RankLayout.everywhere(world, 2)
                        own = [sums(BatchLoader(opened, loading, rank, layout), model, task) for rank in range(world)]
                        place = f"{name}, {split}, {world} ranks"
                        np.testing.assert_allclose(sum(own), whole, rtol=1e-4, atol=1e-4, err_msg=place)


def sums(loader: BatchLoader, model: Any, task: Any) -> torch.Tensor:
    """Return the loss, its gradient's sum, and the sums of the metrics, over all steps of an epoch."""
    total = torch.zeros(2 + task.num_sums, dtype=torch.float64)
    for batch in loader.epoch(1):
        model.zero_grad()
        out = model(batch)
        loss = task.loss_sum(out, batch)
        loss.backward()
        gradient = sum(weight.grad.double().sum() for weight in model.parameters() if weight.grad is not None)
        total += torch.cat([torch.stack([loss.detach().double(), gradient]), task.metric_sums(out.detach(), batch)])
    return total


OWN = "own_models.py:Own"

RUNS: dict[str, tuple[Callable[[Path], Path], dict[str, Any]]] = {
    "regression": (lambda at: parts_of(at, dataset("regression", COUNTS["nine"], False)), MODELS["sage, edges"]),
    "columns": (lambda at: parts_of(at, dataset("columns", COUNTS["two"], False)), MODELS["gcn"]),
    "multilabel": (lambda at: parts_of(at, dataset("multilabel", COUNTS["two"], True)), MODELS["rsage, edges"]),
    "classification": (lambda at: parts_of(at, dataset("classification", COUNTS["one"], True)), MODELS["rgcn"]),
    "links": (
        lambda at: write_parts(
            at, 2, "synthetic-hetero", num_nodes=40, avg_degree=2, hold_out="paper__cites__paper", hold_out_val=0.02,
            hold_out_test=0.02,
        ),
        {"model": "rsage", "task": "link", "negatives": 9, "eval_negatives": 20, "eval_batch_size": 2},
    ),
    "own classes": (
        lambda at: parts_of(at, dataset("classification", COUNTS["nine"], True)),
        {"model": OWN, "class_weights": "balanced", "label_smoothing": 0.1, "metrics": ("macro_f1", "roc_auc")},
    ),
    "own labels": (
        lambda at: parts_of(at, dataset("multilabel", COUNTS["two"], True)),
        {"model": "torch_geometric.nn.PNA", "metrics": ("roc_auc", "average_precision")},
    ),
    "own links": (
        lambda at: write_parts(
            at, 2, "synthetic-hetero", num_nodes=40, avg_degree=2, hold_out="paper__cites__paper", hold_out_val=0.02,
            hold_out_test=0.02,
        ),
        {"model": OWN, "task": "link", "negatives": 9, "eval_negatives": 20, "eval_batch_size": 2},
    ),
}  # fmt: skip


def few_seeds_job(alone: Path, folder: Path, name: str) -> TrainJob:
    """Return the job ``name`` of ``RUNS``, whose parts and model classes are in ``alone``."""
    how = {**SETTINGS, **RUNS[name][1]}
    how["model"] = f"{alone}/{OWN}" if how["model"] == OWN else how["model"]
    return job(alone / f"{name}-parts", folder / name, **how)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    write_models(folder)
    for name, (write, _) in RUNS.items():
        write(folder / f"{name}-parts")
        train(few_seeds_job(folder, folder, name), Ranks())
        infer(infer_job(folder, folder, name))
    return folder


def infer_job(alone: Path, folder: Path, name: str) -> InferJob:
    return InferJob(alone / name / "checkpoints" / "last.pt", alone / f"{name}-parts", folder / f"{name}-out")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "place"), [(2, "worker"), (3, "worker"), (3, "client")])
def test_ranks_without_seeds_train_score_and_infer_as_one_process(
    world: int, place: str, alone: Path, tmp_path: Path
) -> None:
    lines: list[list[list[str]]] = [[] for _ in range(world)]
    with ExitStack() as open_servers:
        for name in RUNS:
            trained = few_seeds_job(alone, tmp_path, name)
            inferred = infer_job(alone, tmp_path, name)
            words, where = [command_line(trained), infer_words(inferred)], []
            if place == "client":
                servers = open_servers.enter_context(serving_parts(alone / f"{name}-parts", ((0,), (1,))))
                ranks = {2 + rank: [rank] for rank in range(world)}
                where = ["--cluster", str(cluster_file(tmp_path / f"{name}.json", servers, ranks, 2))]
                for command in words:
                    at = command.index("--parts")
                    del command[at : at + 2]
            for own in lines:
                own.extend([*command, *where] for command in words)
        variables = [
            {"NODE_RANK": str(2 + rank), "GNNFLEET_PART_IDS": ""} if place == "client" else {} for rank in range(world)
        ]
        port = free_port(len(lines[0]))
        started = [start_words(lines[rank], rank, world, port, **variables[rank]) for rank in range(world)]
        for ended in finish_all(started, 600):
            assert ended.returncode == 0, ended.output
    for name in RUNS:
        np.testing.assert_allclose(curve(tmp_path / name), curve(alone / name), rtol=1e-4, err_msg=name)
        for ours, theirs in zip(metrics(tmp_path / name, "eval"), metrics(alone / name, "eval"), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        found, expected = (json.loads((at / f"{name}-out" / "infer.json").read_text()) for at in (tmp_path, alone))
        for split, values in expected["metrics"].items():
            assert found["metrics"][split] == pytest.approx(values, rel=1e-3, abs=1e-6, nan_ok=True)


def test_a_step_of_one_seed_without_neighbours_trains_a_batch_norm(tmp_path: Path) -> None:
    data = graph(
        EDGES % 12, NODES, {"x": np.eye(NODES, dtype=np.float32), "y": LABELS["classification"]}, {"train": [13]}
    )
    how = {**SETTINGS, "model": "torch_geometric.nn.GraphSAGE", "model_args": {"norm": "batch"}, "epochs": 2}
    result = train(job(parts_of(tmp_path / "parts", data), tmp_path / "run", **how), Ranks())
    assert result.step_loss[1] < result.step_loss[0]


@pytest.mark.parametrize("typed", [False, True])
def test_no_train_seeds_are_one_clear_error(typed: bool, tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "parts", dataset("regression", (0, 2, 2), typed))
    how = {"model": "rsage", "target": "paper"} if typed else {"model": "sage"}
    with pytest.raises(DataError, match="the train split.* has no seeds"):
        train(job(parts, tmp_path / "run", **{**SETTINGS, **how}), Ranks())


def test_features_of_no_edges_keep_their_width() -> None:
    assert edge_rows({"a": torch.empty(0, 3, 2)}, {"a": AttrSpec("float32", (40, 3, 2))}).shape == (0, 6)
    assert edge_rows({"a": torch.empty(0)}, {"a": AttrSpec("float32", (40,))}).shape == (0, 1)
