"""Tests of inference for regression, several labels per node and links, from tables to predictions."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from ports import free_port
from train_kit import finish_all, infer_words, job, metrics, start_words, write_parts
from trainer.core.errors import DataError, SettingsError
from trainer.core.graph_attrs import held_out_links
from trainer.core.ranks import Ranks
from trainer.core.schema import EdgeType
from trainer.graph.open import open_graph
from trainer.infer import prediction_files
from trainer.infer.infer import infer
from trainer.infer.prediction_files import TableColumn, write_table
from trainer.nn import link_embeddings
from trainer.partition.make import PartitionSpec, make_partition
from trainer.train.job import train
from trainer.train.settings import InferJob

CITES: EdgeType = ("paper", "cites", "paper")
RNG = np.random.default_rng(1)
HOMES = 120
SIZE = RNG.uniform(30, 200, HOMES)
PRICE = 1000 * SIZE * RNG.uniform(0.95, 1.05, HOMES)
#: Ids that CSV must quote.
NAMES = [f'home "{k}", {"garden" if k % 2 else "roof"}' for k in range(HOMES)]


def homes(folder: Path, label: Any, **options: Any) -> Path:
    """Write tables of homes and edges, and partition the graph.

    label: column or columns of ``y``.
    """
    folder.mkdir()
    with (folder / "homes.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "size", "price", "garden", "large", "small"])
        for k in range(HOMES):
            price = "" if k == 5 else f"{PRICE[k]:.2f}"
            writer.writerow([NAMES[k], f"{SIZE[k]:.3f}", price, k % 2, int(SIZE[k] > 100), int(SIZE[k] <= 100)])
    with (folder / "near.csv").open("w", newline="") as file:
        rows = [(NAMES[k], NAMES[(k + 1) % HOMES]) for k in range(HOMES)]
        csv.writer(file).writerows([("a", "b"), *rows])
    features = [name for name in ("size", "garden") if name not in label]
    nodes = {"files": "homes.csv", "id": "name", "label": label, "features": features, "standardize": True}
    shares = {"train": 0.6, "val": 0.2, "test": 0.2}
    given = {
        "nodes": {"home": {**nodes, "split": shares}},
        "edges": {"near": {"files": "near.csv", "source": "a", "target": "b"}},
        "undirected": True,
        **options,
    }
    spec = PartitionSpec("tables", str(folder / "parts"), str(folder), given, 2, "random")
    make_partition(spec, say=lambda line: None)
    return folder / "parts"


def predictions(out: Path, parts: int = 2) -> list[dict[str, str]]:
    found = []
    for part in range(parts):
        with (out / f"part{part}" / "predictions.csv").open(newline="") as file:
            found += list(csv.DictReader(file))
    return found


@pytest.mark.slow
def test_a_table_with_prices_is_learned_and_predicted_in_its_unit(tmp_path: Path) -> None:
    parts = homes(tmp_path / "homes", "price")
    settings: dict[str, Any] = {"epochs": 40, "lr": 0.02, "fanouts": (3,), "dropout": 0.0, "batch_size": 16}
    result = train(job(parts, tmp_path / "run", **settings), Ranks())
    assert result.metric.name == "mae" and result.test is not None
    assert result.test["mae"] < 0.3 * np.abs(PRICE - np.median(PRICE)).mean()
    out = tmp_path / "out"
    found = infer(InferJob(tmp_path / "run" / "checkpoints" / "last.pt", parts, out), Ranks())
    assert found.task == "regression"
    said = {row["id"]: float(row["prediction"]) for row in predictions(out)}
    assert sorted(said) == sorted(NAMES)
    values = np.concatenate([np.load(out / f"part{part}" / "values.npy")[:, 0] for part in (0, 1)])
    assert sorted(said.values()) == pytest.approx(sorted(values), rel=1e-8)
    with open_graph(parts) as graph:
        gids = graph.store.to_global("node", np.arange(HOMES))
        seeds = {split: graph.store.seeds("node", split) for split in ("train", "val", "test")}
        held = np.flatnonzero(np.isin(gids, seeds["test"]))
        assert gids[5] not in np.concatenate(list(seeds.values())), "a home without a price is in no split"
    error = np.mean([abs(said[NAMES[k]] - PRICE[k]) for k in held])
    assert found.metrics["test"]["mae"] == pytest.approx(error, rel=1e-4)
    files = str(out / "part*" / "predictions.parquet")
    rows = duckdb.sql(f"SELECT id, prediction FROM '{files}'").fetchall()
    assert dict(rows) == said


def test_several_columns_of_labels_keep_their_names(tmp_path: Path) -> None:
    parts = homes(tmp_path / "homes", ["small", "large"])
    train(job(parts, tmp_path / "run", epochs=60, lr=0.02, fanouts=(3,)), Ranks())
    assert metrics(tmp_path / "run", "result")[0]["metric"] == "micro_f1"
    out = tmp_path / "out"
    found = infer(InferJob(tmp_path / "run" / "checkpoints" / "last.pt", parts, out, parquet=False), Ranks())
    assert found.metrics["test"]["micro_f1"] > 0.9
    rows = predictions(out)
    assert list(rows[0]) == ["id", "probability_small", "probability_large"]
    assert all(0 <= float(row["probability_large"]) <= 1 for row in rows)
    assert not list(out.glob("part*/*.parquet"))


def test_whole_numbers_are_a_plain_target_with_num_classes_0(tmp_path: Path) -> None:
    parts = homes(tmp_path / "homes", "large", num_classes=0)
    result = train(job(parts, tmp_path / "run", fanouts=(3,)), Ranks())
    assert result.metric.name == "mae"


# --- links ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("linked")
    write_parts(folder / "hetero", 2, "synthetic-hetero", hold_out="author__writes__paper", num_nodes=200)
    write_parts(folder / "homo", 2, hold_out="node__to__node", num_nodes=200, avg_degree=5)
    for name, parts, model in (("rsage", "hetero", "rsage"), ("sage", "homo", "sage")):
        settings: dict[str, Any] = {"task": "link", "model": model, "negatives": 20, "eval_negatives": 10_000}
        train(job(folder / parts, folder / name, fanouts=(-1, -1), lr=0.01, **settings), Ranks())
    yield folder


def arrays(out: Path, role: str, name: str) -> np.ndarray:
    """Return an array that inference wrote per part, joined in order of original id."""
    folders = [out / role / f"part{part}" for part in (0, 1)]
    values, ids = (np.concatenate([np.load(one / f"{of}.npy") for one in folders]) for of in (name, "orig_id"))
    assert sorted(ids.tolist()) == list(range(len(ids)))
    return values[np.argsort(ids)]


@pytest.mark.parametrize(("name", "without"), [("rsage", False), ("sage", False), ("rsage", True)])
def test_links_are_scored_by_embeddings(
    name: str, without: bool, linked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_embeddings, "_TARGETS", 37)  # several blocks
    monkeypatch.setattr(link_embeddings, "_SOURCES", 50)
    monkeypatch.setattr(prediction_files, "ROWS_AT_ONCE", 41)
    parts = linked / ("homo" if name == "sage" else "hetero")
    given = InferJob(linked / name / "checkpoints" / "last.pt", parts, tmp_path, top_k=5, without_held_out=without)
    result = infer(given, Ranks())
    assert ("--without-held-out" in result.files) != without
    ended = metrics(linked / name, "result")[0]
    for metric in ("mrr", "hits@10", "auc"):  # evaluation used all neighbours and all targets
        assert result.metrics["test"][metric] == pytest.approx(ended[f"test_{metric}"], abs=1e-3)
    scores = arrays(tmp_path, "source", "embedding") @ arrays(tmp_path, "target", "embedding").T
    of = ("node", "to", "node") if name == "sage" else ("author", "writes", "paper")
    with open_graph(parts) as graph:
        src, dst = graph.access.endpoints(of, np.arange(graph.manifest.edges[of].num_edges))
        for split in ("val", "test") if without else ():
            links, _ = held_out_links(graph.store.graph_attrs, of, split)
            assert links is not None and np.isfinite(scores[links[0], links[1]]).any()
            scores[links[0], links[1]] = -np.inf
    scores[src, dst] = -np.inf
    if name == "sage":
        np.fill_diagonal(scores, -np.inf)
    best, found = arrays(tmp_path, "source", "targets"), arrays(tmp_path, "source", "scores")
    np.testing.assert_allclose(found, -np.sort(-scores, 1)[:, :5], atol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, best, 1), found, atol=1e-5)
    rows = predictions(tmp_path / "source")
    assert len(rows) == best.size
    for row in rows[:50]:
        assert scores[int(row["source"]), int(row["target"])] == pytest.approx(float(row["score"]), abs=1e-5)


@pytest.mark.slow
def test_given_pairs_are_scored_in_their_order(linked: Path, tmp_path: Path) -> None:
    pairs = [(int(a), int(b)) for a, b in RNG.integers(0, 100, (20, 2))]
    file = tmp_path / "pairs.csv"
    file.write_text("author,paper\n" + "".join(f"{a},{b}\n" for a, b in pairs))
    given = InferJob(linked / "rsage" / "checkpoints" / "last.pt", linked / "hetero", tmp_path / "out", pairs=file)
    infer(given, Ranks())
    scores = arrays(tmp_path / "out", "source", "embedding") @ arrays(tmp_path / "out", "target", "embedding").T
    with (tmp_path / "out" / "pairs.csv").open() as written:
        rows = list(csv.DictReader(written))
    assert [(int(row["source"]), int(row["target"])) for row in rows] == pairs
    assert [float(row["score"]) for row in rows] == pytest.approx([scores[pair] for pair in pairs], abs=1e-5)
    file.write_text("author,paper\n" + "".join(f"{a}.0, {b} \n" for a, b in pairs))
    infer(given, Ranks())
    with (tmp_path / "out" / "pairs.csv").open() as written:
        assert [row["score"] for row in csv.DictReader(written)] == [row["score"] for row in rows]
    for head, pairs_read in (("", pairs), ("0,paper\n", [])):
        file.write_text(head + "".join(f"{a},{b}\n" for a, b in pairs_read))
        infer(given, Ranks())
        with (tmp_path / "out" / "pairs.csv").open() as written:
            assert [(int(row["source"]), int(row["target"])) for row in csv.DictReader(written)] == pairs_read
    for text in ("012", "1.5", "9" * 19, "9" * 5000, ""):  # ids of tables neither
        file.write_text(f"author,paper\n0,{text}\n")
        with pytest.raises(DataError, match="in row 1 is not the id of a node of type paper"):
            infer(given, Ranks())
    file.write_text("author,paper\n0,1\n0,x7\n")
    with pytest.raises(DataError, match="pairs.csv, target 'x7' in row 2 is not the id of a node of type paper"):
        infer(given, Ranks())


@pytest.mark.slow
def test_two_ranks_write_the_same_links(linked: Path, tmp_path: Path) -> None:
    checkpoint = linked / "rsage" / "checkpoints" / "last.pt"
    infer(InferJob(checkpoint, linked / "hetero", tmp_path / "one", parquet=False), Ranks())
    words = infer_words(InferJob(checkpoint, linked / "hetero", tmp_path / "two"))
    port = free_port()
    for ended in finish_all([start_words([words], rank, 2, port) for rank in range(2)]):
        assert ended.returncode == 0, ended.output
    for role, name in (("source", "embedding"), ("target", "embedding"), ("source", "scores")):
        one, two = (arrays(tmp_path / out, role, name) for out in ("one", "two"))
        np.testing.assert_allclose(two, one, atol=1e-5, err_msg=f"{role} {name}")


# --- files ---------------------------------------------------------------------------------------------------


def test_parquet_has_the_same_rows_as_csv(tmp_path: Path) -> None:
    names = ["a", "", 'x "y", z', "two\nlines", "ü"]
    blocks = [[names[:2], [1.5, -0.1]], [names[2:], [1e-9, 123456.789, 0.25]]]
    write_table(
        tmp_path / "predictions", [TableColumn("id", "VARCHAR"), TableColumn("prediction", "DOUBLE")], blocks, True
    )
    rows = duckdb.sql(f"SELECT * FROM '{tmp_path}/predictions.parquet'").fetchall()
    assert rows == list(zip(names, [1.5, -0.1, 1e-9, 123456.789, 0.25], strict=True))
    with (tmp_path / "predictions.csv").open(newline="") as file:
        assert [(row["id"], float(row["prediction"])) for row in csv.DictReader(file)] == rows
    assert sorted(path.name for path in tmp_path.iterdir()) == ["predictions.csv", "predictions.parquet"]


def test_parquet_without_duckdb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_files.importlib.util, "find_spec", lambda name: None)
    assert not prediction_files.writes_parquet(None) and not prediction_files.writes_parquet(False)
    with pytest.raises(SettingsError, match="--parquet needs the package duckdb"):
        prediction_files.writes_parquet(True)
