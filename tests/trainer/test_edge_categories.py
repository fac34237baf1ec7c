"""Tests of columns of categories of edges: embedded in place of their codes, in models, runs, tasks and inference."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gnnfleet as gf
from fast_cases import fast_cases
from gateway_kit import cluster_file, serving_parts
from graphs import graph, hetero
from train_kit import curve, job, metrics, run_ranks
from trainer.core.batch import Block
from trainer.core.errors import CheckpointError, SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.core.ranks import Ranks
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_EDGE
from trainer.data.dataset import Dataset, EdgeData
from trainer.infer.infer import infer
from trainer.nn.categories import Category, CategoryEmbeddings, categories_of
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.train.job import train
from trainer.train.settings import InferJob, TrainJob

RATES, BACK = ("user", "rates", "item"), ("item", "rev_rates", "user")
NODES, USERS, ITEMS = 240, 60, 40
TEXTS = [f"channel {number}" for number in range(9)]
SPLITS = {"train": np.arange(150), "val": np.arange(150, 190), "test": np.arange(190, NODES)}
NAMES = ("price", "channel")  #: price has two numbers, so the codes are the third column

RNG = np.random.default_rng(0)
EDGES = np.array([(u, v) for v in range(NODES) for u in RNG.choice(NODES, 4, replace=False)])
Y = RNG.integers(0, 3, NODES)
CHANNEL = np.where(RNG.random(len(EDGES)) < 0.2, -1, Y[EDGES[:, 1]] + 3 * RNG.integers(0, 3, len(EDGES)))
PRICE = RNG.standard_normal((len(EDGES), 2)).astype(np.float32)
X = RNG.standard_normal((NODES, 2)).astype(np.float32)

ENDS = np.stack([RNG.integers(0, USERS, 900), RNG.integers(0, ITEMS, 900)])
RATED = RNG.integers(-1, 9, 900)
LABEL = ((RATED + 1) % 2).astype(np.int64)  #: only the category of the edge tells it
SPLIT = RNG.choice([0, 1, 2, -1], 900, p=[0.6, 0.1, 0.2, 0.1]).astype(np.int8)

SETTINGS: dict[str, Any] = {
    "epochs": 3, "batch_size": 60, "fanouts": (3, -1), "lr": 0.03, "dropout": 0.2, "edge_attr": NAMES,
}  # fmt: skip
ARGS = {"torch_geometric.nn.GAT": {"heads": 2, "add_self_loops": False}}

OWN = """
from torch import nn
from torch_geometric.nn import HeteroConv, GATConv, TransformerConv


class Plain(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, edge_dim):
        super().__init__()
        self.first = TransformerConv(in_channels, hidden_channels, edge_dim=edge_dim)
        self.second = TransformerConv(hidden_channels, out_channels, edge_dim=edge_dim)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


class Typed(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, edge_dim, metadata):
        super().__init__()
        self.lins = nn.ModuleDict({of: nn.Linear(width, hidden_channels) for of, width in in_channels.items()})
        self.conv = HeteroConv({
            of: GATConv((hidden_channels, hidden_channels), hidden_channels, edge_dim=edge_dim, add_self_loops=False)
            for of in metadata[1]
        })
        self.out = nn.Linear(hidden_channels, out_channels)

    def forward(self, x_dict, edge_index_dict, edge_attr_dict):
        rows = {of: self.lins[of](x) for of, x in x_dict.items()}
        found = self.conv(rows, edge_index_dict, edge_attr_dict=edge_attr_dict)
        return {of: self.out(h + rows[of]) for of, h in found.items()}


class Weighted(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index, edge_weight):
        return self.lin(x) * edge_weight.mean()
"""


def plain(codes: np.ndarray = CHANNEL, texts: list[str] = TEXTS) -> Dataset:
    attrs = {"price": PRICE, "channel": codes, "plan": np.arange(len(EDGES)), "edge_weight": np.ones(len(EDGES))}
    made = graph(EDGES, NODES, {"x": X, "y": Y}, SPLITS, edge_attrs=attrs)
    return replace(made, graph_attrs={"node__to__node__channel__categories": encode_texts(texts)})


def typed(**labels: np.ndarray) -> Dataset:
    """Users and items, whose ratings have a channel, with texts in the forward direction only; labels, if given."""
    made = hetero({"user": USERS, "item": ITEMS}, {RATES: ENDS.T, BACK: ENDS[::-1].T})
    nodes = {of: replace(each, attrs={**each.attrs, "x": X[: each.num_nodes]}) for of, each in made.nodes.items()}
    attrs = {"price": PRICE[:900], "channel": RATED, **labels}
    edges = {RATES: EdgeData(ENDS, attrs), BACK: EdgeData(np.ascontiguousarray(ENDS[::-1]), attrs)}
    texts = {"user__rates__item__channel__categories": encode_texts(TEXTS)}
    texts |= {"user__rates__item__y__classes": np.array([2])} if labels else {}
    return replace(made, nodes=nodes, edges=edges, graph_attrs=texts)


def write(folder: Path, data: Dataset) -> Path:
    write_partition(data, assign_parts(data, 2, "hash"), folder)
    return folder


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("plain") / "parts", plain())


@pytest.fixture(scope="module")
def typed_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("typed") / "parts", typed())


@pytest.fixture(scope="module")
def rated_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("rated") / "parts", typed(y=LABEL, edge_split=SPLIT))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "edge_models.py"
    file.write_text(OWN)
    return file


def case(model: str, own: Path, parts: Path, typed_parts: Path) -> tuple[Path, str, dict[str, Any]]:
    """Return parts, target and settings of a model; ``typed X``: on the graph with types."""
    word = model.removeprefix("typed ")
    of_types = word != model or word in ("rsage", "Typed")
    settings: dict[str, Any] = {**SETTINGS, "model": f"{own}:{word}" if word in ("Plain", "Typed") else word}
    if of_types:
        settings |= {"target": "user"}
    if word in ARGS:
        settings["model_args"] = ARGS[word]
    return (typed_parts, "user", settings) if of_types else (parts, "node", settings)


def with_rows(block: Block, table: torch.Tensor) -> Block:
    """Return a block whose codes are replaced by a one-hot row times the table."""
    assert block.edge_attr is not None
    one_hot = torch.nn.functional.one_hot(block.edge_attr[:, 2].long() + 1, len(table)).float()
    return replace(block, edge_attr=torch.cat([block.edge_attr[:, :2], one_hot @ table], 1))


def test_codes_of_edges_become_rows_after_the_numbers() -> None:
    columns = (
        Category("channel", 3, 2, ("a", "b", "c"), at=1),
        Category("left", 9, 0, at=2),
        Category("d", 2, 1, at=3),
    )
    embeddings = CategoryEmbeddings({RATES: columns})
    assert embeddings.names == {} and embeddings.width(RATES) == 3 and len(embeddings.tables) == 2
    table, other = (each.weight.detach() for each in embeddings.tables.values())
    values = torch.tensor([[0.5, -1, 4, 0], [0.6, 2, 8, 1], [0.7, 3, 0, -1]])  # 3 is no category
    rows = torch.cat([values[:, :1], table[[0, 3, 0]], other[[1, 2, 0]]], 1)
    torch.testing.assert_close(embeddings.edges(RATES, values), rows)
    embeddings.adopt({RATES: [["c", "new", "a"], [], []]})
    found = embeddings.edges(RATES, torch.tensor([[0.0, each, 0, 0] for each in (0, 1, 2, -1)]))
    torch.testing.assert_close(found[:, 1:3], table[[3, 0, 1, 0]])
    assert torch.equal(embeddings.edges(BACK, values), values)


@pytest.mark.parametrize("model", fast_cases(["sage", "Plain"], "sage"))
def test_what_only_a_category_of_edges_tells_is_learned(
    model: str, own: Path, parts: Path, typed_parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    _, _, settings = case(model, own, parts, typed_parts)
    found = train(job(parts, tmp_path / "with", **{**settings, "epochs": 20, "fanouts": (-1,)}), Ranks()).test
    assert found is not None and found["accuracy"] > 0.9
    if model == "sage":
        for name, more in (("left out", {"category_dims": {"channel": 0}}), ("numbers", {"edge_attr": ("price",)})):
            found = train(job(parts, tmp_path / name, **{**settings, "epochs": 5, **more}), Ranks()).test
            assert found is not None and found["accuracy"] < 0.65


@pytest.mark.parametrize(
    "model",
    fast_cases(
        ["sage", "rsage", "torch_geometric.nn.GAT", "typed torch_geometric.nn.GAT", "Plain", "Typed"],
        "sage",
        "rsage",
        "Typed",
    ),
)
def test_an_embedding_is_a_one_hot_row_times_the_table_and_inference_agrees(
    model: str, own: Path, parts: Path, typed_parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    folder, target, settings = case(model, own, parts, typed_parts)
    train(job(folder, tmp_path / "run", **{**settings, "fanouts": (-1, -1)}), Ranks())
    infer(InferJob(tmp_path / "run/checkpoints/last.pt", folder, tmp_path / "out", nodes_at_once=50), Ranks())
    said, loaded = logits_of(tmp_path / "out"), gf.load_model(tmp_path / "run")
    tables = {of: loaded.categories.tables[f"{'__'.join(of)}__channel"].weight for of in loaded.categories.categories}
    assert set(tables) == ({HOMO_EDGE} if target == "node" else {RATES, BACK})
    with gf.open(folder) as opened, torch.no_grad():
        loading = gf.LoaderSettings("test" if target == "node" else "train", (-1, -1), 20, target=target,
                                    edge_attr=NAMES, shuffle=False)  # fmt: skip
        loader = gf.BatchLoader(opened, loading, 0, opened.layout)
        batches = [*loader.epoch(0)]
        found = [loaded(batch) for batch in batches]
        loaded.categories.categories = {}  # the same, with the rows in the batch itself
        for batch, rows in zip(batches, found, strict=True):
            given = batch.typed()
            blocks = tuple({of: with_rows(block, tables[of]) for of, block in layer.items()} for layer in given.blocks)
            if target == "node":
                blocks = tuple(layer[HOMO_EDGE] for layer in blocks)
            plainly = replace(batch, blocks=blocks)
            torch.testing.assert_close(loaded(plainly), rows)
            ids = given.n_id[target][: batch.num_seeds].tolist()
            np.testing.assert_allclose(rows, [said[each] for each in ids], atol=1e-4)


def logits_of(folder: Path) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for part in (0, 1):
        ids, rows = (np.load(folder / f"part{part}" / name) for name in ("orig_id.npy", "logits.npy"))
        found |= dict(zip(ids.tolist(), rows.tolist(), strict=True))
    return found


@pytest.mark.parametrize("hide", fast_cases([False, True], True))
def test_a_label_of_edges_that_follows_from_a_category_is_learned(
    hide: bool, rated_parts: Path, tmp_path: Path
) -> None:
    settings = {"model": "rsage", "task": "edge-classification", "epochs": 8, "fanouts": (4,), "hidden": 16,
                "lr": 0.05, "batch_size": 128, "dropout": 0.0, "hide": hide}  # fmt: skip
    train(job(rated_parts, tmp_path / "with", **settings, edge_attr="channel"), Ranks())
    found = metrics(tmp_path / "with", "result")[-1]["test_accuracy"]
    assert found > 0.97
    if not hide:
        train(job(rated_parts, tmp_path / "without", **settings, edge_attr="price"), Ranks())
        assert metrics(tmp_path / "without", "result")[-1]["test_accuracy"] < 0.75
    infer(InferJob(tmp_path / "with/checkpoints/last.pt", rated_parts, tmp_path / "out"), Ranks())
    with (tmp_path / "out/predictions.csv").open() as file:
        right = np.array([int(row["prediction"]) for row in csv.DictReader(file)]) == LABEL
    said = json.loads((tmp_path / "out/infer.json").read_text())["metrics"]["test"]["accuracy"]
    assert said == pytest.approx(right[SPLIT == 2].mean()) and said > 0.97


@pytest.mark.slow
def test_the_curve_is_that_of_one_process_and_goes_on_after_a_resume(
    own: Path, parts: Path, typed_parts: Path, rated_parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    cases = {name: case(name, own, parts, typed_parts) for name in ("sage", "rsage", "torch_geometric.nn.GAT", "Typed")}
    edges = {**SETTINGS, "model": "rsage", "task": "edge-classification", "category_dims": {"channel": 3}}
    cases["edges"] = rated_parts, "", edges
    for name, (folder, _, settings) in cases.items():
        train(job(folder, tmp_path / name / "alone", **settings), Ranks())
    jobs = [job(folder, tmp_path / name / "together", **settings) for name, (folder, _, settings) in cases.items()]
    jobs += [job(folder, tmp_path / name / "resumed", **settings,
                 resume=str(tmp_path / name / "alone" / "checkpoints" / "epoch-0002.pt"))
             for name, (folder, _, settings) in cases.items()]  # fmt: skip
    for ended in run_ranks(3, *jobs):
        assert ended.returncode == 0, ended.output
    for name in cases:
        whole = curve(tmp_path / name / "alone")
        assert curve(tmp_path / name / "together") == pytest.approx(whole, rel=1e-4)
        resumed = curve(tmp_path / name / "resumed")
        assert resumed == pytest.approx(whole[-len(resumed) :], rel=1e-4) and resumed


def test_a_graph_with_the_same_texts_in_another_order_gives_the_same_predictions(parts: Path, tmp_path: Path) -> None:
    train(job(parts, tmp_path / "run", **SETTINGS), Ranks())
    order = RNG.permutation(9)
    codes = np.where(CHANNEL < 0, -1, np.argsort(order)[CHANNEL])
    other = write(tmp_path / "parts", plain(codes, [TEXTS[each] for each in order]))
    checkpoint = tmp_path / "run/checkpoints/last.pt"
    for name, folder in (("own", parts), ("other", other)):
        infer(InferJob(checkpoint, folder, tmp_path / name), Ranks())
    own, found = logits_of(tmp_path / "own"), logits_of(tmp_path / "other")
    np.testing.assert_allclose([found[each] for each in own], [*own.values()], atol=1e-5)
    with pytest.raises(CheckpointError, match="cannot be continued: the categories of node__to__node, or the widths"):
        train(job(other, tmp_path / "more", **{**SETTINGS, "epochs": 4}, resume=str(checkpoint)), Ranks())
    with pytest.raises(CheckpointError, match="start: the categories of node__to__node are others than in"):
        train(job(other, tmp_path / "new", **SETTINGS, start={"checkpoint": str(checkpoint)}), Ranks())
    data = plain()
    for attrs, message in (
        ({"price": PRICE, "channel": CHANNEL}, "the categories channel of node__to__node, which this graph does not"),
        ({"price": PRICE[:, 0], "channel": CHANNEL}, "reads the categories channel of node__to__node"),
        ({"price": PRICE}, "edge_attr: no edge type has an attribute 'channel'; there is price"),
    ):
        changed = replace(data, edges={HOMO_EDGE: EdgeData(data.edges[HOMO_EDGE].edge_index, attrs)},
                          graph_attrs=data.graph_attrs if attrs["price"].ndim == 1 else {})  # fmt: skip
        folder = write(tmp_path / message[-9:], changed)
        with pytest.raises(SettingsError, match=message):
            infer(InferJob(checkpoint, folder, tmp_path / "out"), Ranks())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"edge_attr": ("price", "chanel")}, "no edge type has an attribute 'chanel'; did you mean 'channel'?"),
        ({"edge_attr": "price", "category_dims": {"channel": 3}},
         "category_dims: no node type, and no edge_attr, has a column of categories 'channel'; there is none"),
        ({"category_dims": {"node__to__node.chanel": 3}}, "did you mean 'node__to__node.channel'?"),
        ({"category_dims": {"channel": 2000}}, "category_dims.channel: expected a whole number from 0 to 1024"),
        ({"model": "Weighted"}, "Weighted reads one number per edge, edge_weight, and channel of node__to__node is a"),
        ({"model": "Weighted", "edge_attr": "price"}, "edge_weight, and these are 2 numbers; name one attribute"),
        ({"model": "gat"}, "edge_attr: model gat does not read edge features"),
        ({"model": "token-transformer", "edge_attr": "channel", "category_dims": {"channel": 1}},
         "token-transformer reads one number per edge, as the score of the neighbour, and no column of categories"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    settings: dict[str, Any], message: str, own: Path, parts: Path, tmp_path: Path
) -> None:  # fmt: skip
    if settings.get("model") == "Weighted":
        settings = {**settings, "model": f"{own}:Weighted"}
    with pytest.raises(SettingsError, match=message.replace("?", r"\?")):
        train(job(parts, tmp_path, **{**SETTINGS, **settings}), Ranks())


def test_labels_and_too_many_categories_are_refused(rated_parts: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="edge_attr: y is the label or the split of the edges"):
        train(job(rated_parts, tmp_path / "y", **{**SETTINGS, "model": "rsage", "edge_attr": ("channel", "y")},
                  task="edge-classification"), Ranks())  # fmt: skip
    manifest = gf.read_manifest(rated_parts)
    name = "user__rates__item__channel__categories"
    many = replace(manifest, graph_attrs={name: replace(manifest.graph_attrs[name], shape=(100_001, 9))})
    with pytest.raises(SettingsError, match="channel of user__rates__item has 100,001 different values"):
        categories_of(many, None, "channel")
    dims = {"user__rates__item.channel": 0, "channel": 4}
    kept = categories_of(replace(manifest), dims, NAMES)
    assert {of: [(each.dim, each.at) for each in columns] for of, columns in kept.items()} == {
        RATES: [(0, 2)], BACK: [(4, 2)]
    }  # fmt: skip


def test_a_client_of_graph_servers_trains_as_one_process_with_all_parts(
    typed_parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = job(typed_parts, tmp_path / "local", **SETTINGS, model="rsage", target="user")
    expected = train(local, Ranks())
    monkeypatch.setenv("NODE_RANK", "2")
    with serving_parts(typed_parts, [[0], [1]]) as servers:
        cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]}, 2)
        train(TrainJob(local.settings, None, tmp_path / "client", (), cluster))
        predicted = infer(InferJob(tmp_path / "client/checkpoints/last.pt", None, tmp_path / "out", (), cluster))
    assert curve(tmp_path / "client") == curve(local.run_dir)
    assert predicted.metrics == infer(InferJob(expected.checkpoint, typed_parts, tmp_path / "out-local")).metrics


def test_tables_of_nodes_and_edges_may_have_categories_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text("id,kind,label\na,x,0\nb,y,1\nc,z,0\nd,,1\n")
    (tmp_path / "links.csv").write_text("s,t,kind,price\na,b,red,1\nb,c,blue,2\nc,d,,3\n")
    tables = {
        "nodes": {"thing": {"files": "nodes.csv", "id": "id", "categories": "kind", "label": "label"}},
        "edges": {"to": {"files": "links.csv", "source": "s", "target": "t", "categories": "kind",
                         "attributes": "price"}},
    }  # fmt: skip
    (tmp_path / "work").mkdir()
    folder = write(
        tmp_path / "parts", load_dataset("tables", str(tmp_path), tables, Scratch(tmp_path / "work", 300 << 20))
    )
    with gf.open(folder) as opened:
        found = categories_of(opened.manifest, None, ("price", "kind"))
        assert [(each.name, each.count) for each in found["node"]] == [("kind", 3)]
        assert [(each.name, each.count, each.at) for each in found[HOMO_EDGE]] == [("kind", 2, 1)]
        texts = opened.store.graph_attrs["node__to__node__kind__categories"]
        assert gf.decode_texts(np.asarray(texts)) == ["blue", "red"]


@pytest.mark.parametrize("of_types", [False, True])
def test_arrays_of_a_folder_may_be_codes_with_texts(of_types: bool, tmp_path: Path) -> None:
    user, rates = ("user__", "user__rates__item") if of_types else ("", "edge_index")
    edge = f"{rates}__" if of_types else ""
    arrays = {
        rates: ENDS, f"{edge}channel": RATED, f"{edge}channel__categories": encode_texts(TEXTS),
        f"{user}city": np.arange(USERS) % 3 - 1, f"{user}city__categories": encode_texts([*"abc"]),
        "item__x" if of_types else "x": X[: ITEMS if of_types else USERS],
    }  # fmt: skip
    (tmp_path / "files").mkdir()
    for name, values in arrays.items():
        np.save(tmp_path / "files" / f"{name}.npy", values)
    folder = write(
        tmp_path / "parts", load_dataset("file", str(tmp_path / "files"), {"target": "user"} if of_types else {})
    )
    found = categories_of(gf.read_manifest(folder), None, "channel")
    counts = {of: [(each.name, each.count) for each in columns] for of, columns in found.items()}
    ends = ("user", RATES) if of_types else ("node", HOMO_EDGE)
    assert counts == dict(zip(ends, ([("city", 3)], [("channel", 9)]), strict=True))
