"""Tests of tasks of labelled edges: classes and numbers of edges, learned from both ends and the edge's features."""

from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ports import free_port
from train_kit import curve, finish_all, infer_words, job, metrics, run_ranks, start_words
from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import Ranks
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.graph.open import open_graph
from trainer.loader.edge_block_loader import EdgeBlockLoader, labelled_edges
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.job import train
from trainer.train.loaders import loader_settings
from trainer.train.settings import InferJob, TrainSettings
from trainer.train.tasks.choose_target import pick_target

RATES, BACK = ("user", "rates", "item"), ("item", "rev_rates", "user")
USERS, ITEMS, EDGES = 60, 40, 900
RNG = np.random.default_rng(0)
TASTE, KIND = RNG.integers(0, 2, USERS), RNG.integers(0, 2, ITEMS)
ENDS = np.stack([RNG.integers(0, USERS, EDGES), RNG.integers(0, ITEMS, EDGES)])
LIKES = (TASTE[ENDS[0]] == KIND[ENDS[1]]).astype(np.int64)  #: a class that follows from neither end alone
PRICE = RNG.random(EDGES).astype(np.float32)  #: a feature of the edge
STARS = (10 + 3 * LIKES + 4 * PRICE).astype(np.float32)
SPLIT = RNG.choice([0, 1, 2, -1], EDGES, p=[0.6, 0.1, 0.2, 0.1]).astype(np.int8)

SETTINGS: dict[str, Any] = {
    "model": "rsage", "epochs": 15, "fanouts": (4, 4), "hidden": 16, "lr": 0.01, "batch_size": 64, "dropout": 0.0,
}  # fmt: skip


def parts_of(
    folder: Path, y: np.ndarray, split: np.ndarray = SPLIT, num_parts: int = 2, attrs: Any = None, **more: Any
) -> Path:
    """Partition users and items of two kinds, which their features tell, and edges with the labels ``y``."""
    nodes = {
        "user": NodeData(USERS, {"x": np.eye(2, dtype=np.float32)[TASTE], "id": 100 + np.arange(USERS)}),
        "item": NodeData(ITEMS, {"x": np.eye(2, dtype=np.float32)[KIND]}),
    }
    attrs = {"y": y, "edge_split": split, "edge_attr": PRICE[:, None], **(attrs or {})}
    edges = {RATES: EdgeData(ENDS, attrs), BACK: EdgeData(np.ascontiguousarray(ENDS[::-1]), attrs)}
    if y.dtype.kind == "i":
        more["user__rates__item__y__classes"] = np.array([int(y.max()) + 1])
    data = Dataset("rated", nodes, edges, "rated", True, more)
    write_partition(data, assign_parts(data, num_parts, "hash"), folder)
    return folder


def result(run: Path) -> dict[str, Any]:
    return metrics(run, "result")[-1]


def test_classes_of_edges_are_learned_from_both_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = parts_of(tmp_path / "parts", LIKES)
    train(job(parts, tmp_path / "run", **SETTINGS), Ranks())
    shown = capsys.readouterr().out
    assert "task classification: y of user__rates__item is int64 [900], with 2 classes" in shown
    found = result(tmp_path / "run")
    assert found["test_accuracy"] > 0.95 > 0.7 > found["baseline_test_accuracy"]


@pytest.mark.slow
def test_numbers_of_edges_are_learned_with_the_features_of_the_edge(tmp_path: Path) -> None:
    parts = parts_of(tmp_path / "parts", STARS)
    found = {}
    for name, attr in (("without", None), ("with", "edge_attr")):
        train(job(parts, tmp_path / name, **SETTINGS, task="edge-regression", edge_attr=attr), Ranks())
        found[name] = result(tmp_path / name)
    assert found["with"]["test_mae"] < 0.35 < 0.9 < found["without"]["test_mae"]
    assert found["without"]["test_mae"] < found["without"]["baseline_test_mae"]


@pytest.mark.slow
def test_several_processes_learn_the_same(tmp_path: Path) -> None:
    settings = {**SETTINGS, "epochs": 2, "edge_attr": "edge_attr"}
    jobs = [
        job(parts_of(tmp_path / f"parts{size}", STARS, num_parts=size), tmp_path / f"run{size}", **settings)
        for size in (1, 2)
    ]  # fmt: skip
    train(jobs[0], Ranks())
    for ended in run_ranks(2, jobs[1]):
        assert ended.returncode == 0, ended.output
    assert curve(jobs[1].run_dir) == pytest.approx(curve(jobs[0].run_dir), rel=1e-4)
    one, two = (result(each.run_dir) for each in jobs)
    assert two["test_mae"] == pytest.approx(one["test_mae"], rel=1e-3)


def test_a_run_can_be_continued(tmp_path: Path) -> None:
    parts, short = parts_of(tmp_path / "parts", LIKES), {**SETTINGS, "epochs": 2}
    train(job(parts, tmp_path / "whole", **{**SETTINGS, "epochs": 4}), Ranks())
    train(job(parts, tmp_path / "first", **short), Ranks())
    resumed = str(tmp_path / "first" / "checkpoints" / "last.pt")
    train(job(parts, tmp_path / "second", **{**SETTINGS, "epochs": 4, "resume": resumed}), Ranks())
    assert result(tmp_path / "second")["test_accuracy"] == result(tmp_path / "whole")["test_accuracy"]


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_predictions_of_all_edges_have_their_ids_in_the_order_of_the_table(size: int, tmp_path: Path) -> None:
    of = "user__rates__item"
    names = {f"{of}__y__categories": encode_texts(["no", "yes"]), f"{of}__key_columns": encode_texts(["buyer", "sku"])}
    runs = {}
    for name, y, more in (("class", LIKES, names), ("number", STARS, {})):
        parts = parts_of(tmp_path / name, y, **more)
        runs[name] = job(parts, tmp_path / f"run-{name}", **{**SETTINGS, "epochs": 6, "edge_attr": "edge_attr"})
        train(runs[name], Ranks())
        job_of = InferJob(tmp_path / f"run-{name}" / "checkpoints" / "last.pt", parts, tmp_path / f"out-{name}")
        lines, port = [infer_words(job_of)], free_port()
        for ended in finish_all([start_words(lines, rank, size, port) for rank in range(size)]):
            assert ended.returncode == 0, ended.output
        with (tmp_path / f"out-{name}" / "predictions.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [int(row["edge"]) for row in rows] == list(range(EDGES))
        source, target = ("buyer", "sku") if name == "class" else ("source", "target")
        assert [int(row[source]) for row in rows] == (100 + ENDS[0]).tolist()
        assert [int(row[target]) for row in rows] == ENDS[1].tolist()
        record = json.loads((tmp_path / f"out-{name}" / "infer.json").read_text())
        found = np.array([row["prediction"] for row in rows])
        test = SPLIT == 2
        if name == "class":
            right = (found == np.where(y > 0, "yes", "no"))[test].mean()
            assert record["metrics"]["test"]["accuracy"] == pytest.approx(right) and right > 0.7
        else:
            error = np.abs(found.astype(float) - y)[test].mean()
            assert record["metrics"]["test"]["mae"] == pytest.approx(error, rel=1e-4) and error < 1.5
            assert result(tmp_path / "run-number")["test_mae"] == pytest.approx(error, rel=0.3)  # of sampled neighbours


def test_edges_are_hidden_and_nothing_later_is_seen(tmp_path: Path) -> None:
    """Each edge has a time of its own; predictions are those of evaluations, for any number of ranks."""
    at = np.random.default_rng(3).permutation(EDGES)
    parts = {size: parts_of(tmp_path / f"parts{size}", LIKES, num_parts=size, attrs={"at": at}) for size in (1, 2)}
    hidden = {**SETTINGS, "epochs": 1, "hide": True, "eval_batch_size": 50}
    cases = {"hide": hidden, "time": {**hidden, "time_attr": "at", "edge_attr": "edge_attr"}}
    with open_graph(parts[2]) as graph:
        edges = labelled_edges(graph, RATES, "at")["train"]
        assert edges.times is not None and edges.times.tolist() == at[edges.orig_id].tolist()
        for name, given in cases.items():
            settings = TrainSettings(**{**given, "fanouts": (-1, -1)})
            loading = loader_settings(settings, "item", "train", False)
            loader = EdgeBlockLoader(graph, loading, edges, 0, graph.layout, hide=True)
            for batch in islice(loader.epoch(1), 2):
                links, own = batch.links, edges.orig_id[batch.input_id.numpy()]
                assert batch.n_id["user"][links.src].tolist() == ENDS[0, own].tolist()
                assert batch.n_id["item"][links.dst].tolist() == ENDS[1, own].tolist()
                pairs = set(map(tuple, ENDS[:, own].T.tolist()))
                block = batch.blocks[-1][RATES]  # of the items themselves
                for k in range(block.num_dst):
                    users = batch.n_id["user"][block.indices[block.indptr[k] : block.indptr[k + 1]].long()].tolist()
                    item = int(batch.n_id["item"][k])
                    there = [e for e in np.flatnonzero(ENDS[1] == item) if (ENDS[0, e], item) not in pairs]
                    if name == "time":
                        (seed,) = np.flatnonzero(links.dst.numpy() == k)
                        there = [e for e in there if at[e] <= at[own[seed]]]
                    assert sorted(users) == sorted(ENDS[0, there].tolist())
    for name, given in cases.items():
        ended = train(job(parts[1], tmp_path / name, **given), Ranks())
        tables = []
        for size in (1, 2) if name == "time" else (1,):
            out, port = tmp_path / f"out-{name}{size}", free_port()
            words = [infer_words(InferJob(ended.checkpoint, parts[size], out))]
            for each in finish_all([start_words(words, rank, size, port) for rank in range(size)]):
                assert each.returncode == 0, each.output
            tables.append((out / "predictions.csv").read_text())
            found = json.loads((out / "infer.json").read_text())["metrics"]["test"]
            assert found == pytest.approx(dict(ended.test), rel=1e-6)
        assert tables == tables[:1] * len(tables) and len(tables[0].splitlines()) == 1 + EDGES


def test_which_edges_are_learned(tmp_path: Path) -> None:
    held = {"held_out_type": np.frombuffer(b"user__rates__item", np.uint8)[None].copy()}
    held["test_links"] = ENDS[:, :3]
    with open_graph(parts_of(tmp_path / "a", LIKES, **held)) as graph:
        assert pick_target(graph) == RATES == pick_target(graph, task="edge-classification")
        with pytest.raises(
            SettingsError, match="needs an edge type of rated with the attributes y and edge_split: user"
        ):
            pick_target(graph, "item__rev_rates__user", "edge-classification")
    for y, split, task, message in (
        (LIKES, np.where(SPLIT == 0, -1, SPLIT), "auto", "no edges of user__rates__item are in the train split"),
        (
            STARS,
            SPLIT,
            "edge-classification",
            r"y of user__rates__item must be one class per edge .* not float32 \[900",
        ),
        (np.where(np.arange(EDGES) == 7, np.nan, STARS), SPLIT * 0, "auto", "1 seeds of the train .* no y, .* edge 7;"),
    ):
        folder = tmp_path / message[:9]
        with pytest.raises(DataError, match=message):
            train(
                job(parts_of(folder, y.astype(y.dtype), split), tmp_path / "run", **{**SETTINGS, "task": task}), Ranks()
            )
    with pytest.raises(SettingsError, match="edge_attr: y is the label or the split of the edges"):
        train(job(tmp_path / "a", tmp_path / "run", **SETTINGS, task="edge-classification", edge_attr="y"), Ranks())
    with pytest.raises(SettingsError, match="time_attr: labels of edges need the times"):
        train(job(tmp_path / "a", tmp_path / "run", **SETTINGS, task="edge-classification", time_attr="t"), Ranks())
