"""Tests of columns of categories: embedded beside features, in models, runs, inference and scripts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnfleet as gf
from gateway_kit import cluster_file, serving_parts
from graphs import graph, hetero
from train_kit import curve, job, run_ranks
from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import Ranks
from trainer.data.dataset import Dataset
from trainer.infer.infer import infer
from trainer.nn.categories import Category, CategoryEmbeddings, categories_of
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.train.job import train
from trainer.train.settings import InferJob, TrainJob

NODES = 240
RNG = np.random.default_rng(0)
EDGES = np.array([(u, v) for v in range(NODES) for u in RNG.choice(NODES, 3, replace=False)])
CITY = RNG.integers(-1, 12, NODES)
TEXTS = [f"city {number}" for number in range(12)]
Y = CITY % 4  # only the city tells it
SPLITS = {"train": np.arange(150), "val": np.arange(150, 190), "test": np.arange(190, NODES)}
PLAN = RNG.integers(0, 3, NODES)

SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 60, "fanouts": (3, -1), "lr": 0.05, "dropout": 0.2}


def plain(codes: np.ndarray = CITY, texts: list[str] = TEXTS) -> Dataset:
    attrs = {"x": RNG.standard_normal((NODES, 2)).astype(np.float32), "y": Y, "city": codes, "number": PLAN}
    made = graph(EDGES, NODES, attrs, SPLITS)
    nodes = {"node": replace(made.nodes["node"], num_classes=4)}
    return replace(made, nodes=nodes, graph_attrs={"city__categories": encode_texts(texts)})


def typed() -> Dataset:
    """Users with x and a city, and items with nothing but a brand."""
    pairs = np.stack([RNG.integers(0, NODES, 900), RNG.integers(0, 40, 900)], 1)
    both = {("user", "bought", "item"): pairs, ("item", "by", "user"): pairs[:, ::-1]}
    made = hetero({"user": NODES, "item": 40}, both)
    user = replace(made.nodes["user"], attrs={"x": RNG.random((NODES, 2), np.float32), "y": Y, "city": CITY},
                   splits=SPLITS, num_classes=4)  # fmt: skip
    item = replace(made.nodes["item"], attrs={"a.brand": RNG.integers(-1, 5, 40)}, splits={}, num_classes=0)
    texts = {"user__city__categories": encode_texts(TEXTS), "item__a.brand__categories": encode_texts([*"abcde"])}
    return replace(made, nodes={"user": user, "item": item}, graph_attrs=texts)


def write(folder: Path, data: Dataset) -> Path:
    write_partition(data, assign_parts(data, 2, "hash"), folder)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain") / "parts", plain())


@pytest.fixture(scope="module")
def typed_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("typed") / "parts", typed())


def test_a_missing_or_unknown_code_has_the_first_row_and_texts_decide() -> None:
    embeddings = CategoryEmbeddings({"node": (Category("city", 3, 2, ("a", "b", "c")), Category("plan", 2, 1))})
    assert embeddings.width("node") == 3 and embeddings.names == {"node": ("city", "plan")}
    table, other = (each.weight.detach() for each in embeddings.tables.values())
    assert not table[0].any() and table[1:].all()
    codes = torch.tensor([[-1, 0], [0, 1], [2, -1], [3, 7]])
    expected = torch.cat([table[[0, 1, 3, 0]], other[[1, 2, 0, 0]]], 1)
    torch.testing.assert_close(embeddings.rows("node", codes), expected)
    embeddings.adopt({"node": [["c", "new", "a"], []]})
    codes = torch.tensor([[0, 0], [1, 0], [2, 0], [-1, 0], [9, 0]])
    torch.testing.assert_close(embeddings.rows("node", codes)[:, :2], table[[3, 0, 1, 0, 0]])


@pytest.mark.parametrize("model", ["sage", "rgcn", "torch_geometric.nn.GraphSAGE"])
def test_what_only_a_category_tells_is_learned(model: str, parts: Path, tmp_path: Path) -> None:
    given = {**SETTINGS, "model": model, "epochs": 12}
    found = train(job(parts, tmp_path / "with", **given), Ranks()).test
    assert found is not None and found["accuracy"] > 0.75
    if model == "sage":
        found = train(job(parts, tmp_path / "without", **given, category_dims={"city": 0}), Ranks()).test
        assert found is not None and found["accuracy"] < 0.6


@pytest.mark.slow
def test_the_curve_is_that_of_one_process_and_goes_on_after_a_resume(
    parts: Path, typed_parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    cases: list[tuple[str, Path, dict[str, Any]]] = [
        ("sage", parts, {"category_dims": {"city": 5}, "input_dropout": 0.2}),
        ("rsage", typed_parts, {}),
        ("torch_geometric.nn.GraphSAGE", typed_parts, {"embeddings": "all", "fanouts": (3, 3)}),
    ]
    for model, folder, more in cases:
        train(job(folder, tmp_path / model / "alone", **{**SETTINGS, **more}, model=model), Ranks())
    saved = {model: tmp_path / model / "alone" / "checkpoints" / "epoch-0002.pt" for model, _, _ in cases}
    jobs = [job(folder, tmp_path / model / "together", **{**SETTINGS, **more}, model=model)
            for model, folder, more in cases]  # fmt: skip
    jobs += [job(folder, tmp_path / model / "resumed", **{**SETTINGS, **more}, model=model, resume=str(saved[model]))
             for model, folder, more in cases]  # fmt: skip
    for ended in run_ranks(3, *jobs):
        assert ended.returncode == 0, ended.output
    for model, _, _ in cases:
        whole = curve(tmp_path / model / "alone")
        assert curve(tmp_path / model / "together") == pytest.approx(whole, rel=1e-4)
        assert curve(tmp_path / model / "resumed") == pytest.approx(whole[-3:], rel=1e-4)


def logits_of(folder: Path) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for part in (0, 1):
        ids, rows = (np.load(folder / f"part{part}" / name) for name in ("orig_id.npy", "logits.npy"))
        found |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
    return found


@pytest.mark.parametrize("model", ["sage", "rsage", "own"])
def test_inference_and_a_loaded_model_read_categories(
    model: str, parts: Path, typed_parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    folder, target = (typed_parts, "user") if model == "rsage" else (parts, "node")
    name = "torch_geometric.nn.GraphSAGE" if model == "own" else model
    train(job(folder, tmp_path / "run", **SETTINGS, model=name), Ranks())
    infer(InferJob(tmp_path / "run/checkpoints/last.pt", folder, tmp_path / "out", nodes_at_once=50), Ranks())
    said, loaded = logits_of(tmp_path / "out"), gf.load_model(tmp_path / "run")
    embeddings = loaded.categories
    assert embeddings.names[target] == ("city",) and embeddings.categories[target][0].texts == tuple(TEXTS)
    with gf.open(folder) as opened, torch.no_grad():
        settings = gf.LoaderSettings(
            "test", (-1, -1), 20, target=target, categories=embeddings.names, shuffle=False
        )  # fmt: skip
        for batch in gf.BatchLoader(opened, settings, 0, opened.layout).epoch(0):
            ids = (batch.n_id if target == "node" else batch.n_id[target])[: batch.num_seeds].tolist()
            np.testing.assert_allclose(loaded(batch), [said[each] for each in ids], atol=1e-4)


def test_a_graph_with_the_same_texts_in_another_order_gives_the_same_predictions(parts: Path, tmp_path: Path) -> None:
    train(job(parts, tmp_path / "run", **SETTINGS), Ranks())
    order = RNG.permutation(12)
    codes = np.where(CITY < 0, -1, np.argsort(order)[CITY])
    data = plain(codes, [TEXTS[each] for each in order])
    data = replace(data, nodes={"node": replace(data.nodes["node"], attrs={
        **data.nodes["node"].attrs, "x": plain_x(parts)})})  # fmt: skip
    other = write(tmp_path / "parts", data)
    checkpoint = tmp_path / "run/checkpoints/last.pt"
    for name, folder in (("own", parts), ("other", other)):
        infer(InferJob(checkpoint, folder, tmp_path / name), Ranks())
    own, found = logits_of(tmp_path / "own"), logits_of(tmp_path / "other")
    np.testing.assert_allclose([found[each] for each in own], [*own.values()], atol=1e-5)
    with pytest.raises(CheckpointError, match="cannot be continued: the categories of node, or the widths"):
        train(job(other, tmp_path / "more", **{**SETTINGS, "epochs": 4}, resume=str(checkpoint)), Ranks())
    with pytest.raises(CheckpointError, match="start: the categories of node are others than in"):
        train(job(other, tmp_path / "new", **SETTINGS, start={"checkpoint": str(checkpoint)}), Ranks())


def plain_x(parts: Path) -> np.ndarray:
    with gf.open(parts) as opened:
        loader = gf.DistNeighborLoader(opened, [], batch_size=NODES)
        (batch,) = loader
    return batch.x[torch.argsort(batch.n_id)].numpy()


def test_a_script_appends_embeddings_to_the_features_of_its_batches(parts: Path, typed_parts: Path) -> None:
    with gf.open(parts) as opened:
        embeddings = gf.nn.CategoryEmbeddings(gf.nn.categories_of(opened.manifest, {"city": 4}))
        batch = next(iter(gf.DistNeighborLoader(opened, [2], batch_size=8)))
        x = embeddings.features(batch)
        assert x.shape == (len(batch.n_id), 2 + 4) and torch.equal(x[:, :2], batch.x)
        torch.testing.assert_close(x[:, 2:], embeddings.rows("node", torch.from_numpy(CITY)[batch.n_id][:, None]))
    with gf.open(typed_parts) as opened:
        embeddings = gf.nn.CategoryEmbeddings(gf.nn.categories_of(opened.manifest))
        batch = next(iter(gf.DistNeighborLoader(opened, [2, 2], batch_size=8, input_nodes="user")))
        assert {of: rows.shape[1] for of, rows in embeddings.features(batch).items()} == {"user": 2 + 6, "item": 3}


@pytest.mark.parametrize(
    "dims,message",
    [
        (
            {"citty": 3},
            "category_dims: no node type, and no edge_attr, has a column of categories 'citty'; did you mean",
        ),
        ({"number": 3}, "has a column of categories 'number'; there is node.city"),
        ({"node.city": 2000}, "category_dims.node.city: expected a whole number from 0 to 1024, found 2000"),
    ],
)
def test_widths_that_do_not_fit_are_refused(dims: dict[str, Any], message: str, parts: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        train(job(parts, tmp_path, **SETTINGS, category_dims=dims), Ranks())


def test_too_many_categories_are_refused(parts: Path, tmp_path: Path) -> None:
    manifest = gf.read_manifest(parts)
    large = replace(manifest.graph_attrs["city__categories"], shape=(100_001, 9))
    many = replace(manifest, graph_attrs={"city__categories": large})
    with pytest.raises(SettingsError, match="city of node has 100,001 different values, .* category_dims: {city: 0}"):
        categories_of(many)
    assert categories_of(many, {"city": 0}) == {}


@pytest.mark.parametrize("model", ["sage", "rsage"])
def test_a_client_of_graph_servers_trains_as_one_process_with_all_parts(
    model: str, parts: Path, typed_parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = parts if model == "sage" else typed_parts
    local = job(folder, tmp_path / "local", **SETTINGS, model=model, category_dims={"city": 3})
    expected = train(local, Ranks())
    monkeypatch.setenv("NODE_RANK", "2")
    with serving_parts(folder, [[0], [1]]) as servers:
        cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]}, 2)
        found = train(TrainJob(local.settings, None, tmp_path / "client", (), cluster))
        saved = tmp_path / "client/checkpoints/last.pt"
        predicted = infer(InferJob(saved, None, tmp_path / "out", (), cluster))
    assert found.test == expected.test and curve(tmp_path / "client") == curve(local.run_dir)
    assert predicted.metrics == infer(InferJob(saved, folder, tmp_path / "out-local")).metrics
