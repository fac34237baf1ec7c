"""Task tables whose rows list targets, and links ranked among all targets at their times, against brute force."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch

from gateway_kit import cluster_file, serving_parts
from train_kit import curve, job, metrics, run_forked, run_ranks
from trainer.core.errors import DataError, SettingsError
from trainer.core.ranks import Ranks, join_ranks
from trainer.core.schema import EdgeType
from trainer.graph.open import Graph, open_graph
from trainer.infer.infer import infer
from trainer.loader.arguments import fanouts_of
from trainer.loader.split_links import split_links
from trainer.nn import link_embeddings
from trainer.nn.layerwise_inference import LayerRows, WholeGraph
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.types import RowRequest
from trainer.train.job import one_host_layout, train
from trainer.train.loaders import link_loaders
from trainer.train.settings import InferJob, TrainJob, TrainSettings
from trainer.train.tasks.choose_target import pick_target
from trainer.train.timed_ranking import Queries, TimedRanking, ranking_of

CUSTOMERS, PRODUCTS, ORDERS, DAY = 40, 30, 900, 86_400
RNG = np.random.default_rng(3)
BUYER, BOUGHT = RNG.integers(0, CUSTOMERS, ORDERS), np.sort(RNG.integers(0, 300, ORDERS)) * DAY
SKU = (BUYER % 6 * 5 + RNG.integers(0, 5, ORDERS)) % PRODUCTS
LISTS: EdgeType = ("next", "lists", "product")
#: Rows: what a customer buys within 30 days, at few times, in no order; some list nothing.
ABOUT, AT = (each.ravel() for each in np.meshgrid(np.arange(CUSTOMERS), np.arange(60, 300, 30) * DAY))
MIXED = RNG.permutation(len(ABOUT))
ABOUT, AT = ABOUT[MIXED], AT[MIXED]
TRUTH = [
    sorted({*SKU[(c == BUYER) & (at < BOUGHT) & (at + 30 * DAY >= BOUGHT)].tolist()})
    for c, at in zip(ABOUT, AT, strict=True)
]
SPLIT = {"val_time": 210 * DAY, "test_time": 240 * DAY}
SMALL: dict[str, Any] = {
    "model": "rsage", "task": "link", "target": "next", "fanouts": (4, 4, 3), "hidden": 8, "batch_size": 64,
    "epochs": 1, "time_attr": "time", "temporal_strategy": "last", "lr": 0.02, "negatives": 12, "eval_negatives": "all",
    "dropout": 0.0, "metrics": ("recall@5", "ndcg@5", "map@5", "mrr"),
}  # fmt: skip


def write(path: Path, names: list[str], rows: Any) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def shop(folder: Path, num_parts: int = 2, skus: np.ndarray = SKU, task: Mapping[str, Any] | None = None) -> Path:
    """Write the tables of a shop and its parts. ``task``: other options of the task table."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "customers.csv", ["id", "age"], [(f"c{k}", 20 + k) for k in range(CUSTOMERS)])
    write(folder / "products.csv", ["sku", "price"], [(f"p{k}", k % 7) for k in range(PRODUCTS)])
    orders = zip(range(ORDERS), BUYER, skus, BOUGHT, strict=True)
    write(folder / "orders.csv", ["id", "buyer", "sku", "at"], [(k, f"c{c}", f"p{s}", t) for k, c, s, t in orders])
    shown = list(zip(ABOUT, AT, TRUTH, strict=True))
    write(
        folder / "next.csv", ["who", "at", "skus"], [(f"c{c}", t, " ".join(f"p{s}" for s in of)) for c, t, of in shown]
    )
    views = [(f"c{c}", f"p{s}", t) for c, t, of in shown for s in {*of, (c + t // DAY) % PRODUCTS, c % PRODUCTS}]
    write(folder / "shown.csv", ["who", "sku", "at"], views)
    options: dict[str, Any] = {
        "nodes": {
            "customer": {"files": "customers.csv", "id": "id", "features": ["age"], "standardize": True},
            "product": {"files": "products.csv", "id": "sku", "features": ["price"], "standardize": True},
            "order": {"files": "orders.csv", "id": "id", "time": "at"},
        },
        "edges": {
            "customer__places__order": {"files": "orders.csv", "source": "buyer", "target": "id"},
            "product__in__order": {"files": "orders.csv", "source": "sku", "target": "id"},
            "customer__shown__product": {"files": "shown.csv", "source": "who", "target": "sku", "time": "at"},
        },
        "tasks": {
            "next": {
                "table": "next.csv", "entity": "customer", "id": "who", "time": "at", "label": "skus",
                "targets": "product", "separator": " ", "split": SPLIT, **(task or {}),
            }
        },
        "undirected": True,
    }  # fmt: skip
    spec = PartitionSpec("tables", str(folder / f"parts{num_parts}"), str(folder), options, num_parts, "hash")
    make_partition(spec, say=lambda line: None)
    return folder / f"parts{num_parts}"


def rows_of(graph: Graph) -> list[tuple[bytes, bytes, list[int]]]:
    """Return key and list of each row, by its number."""
    of = "next"
    ids = graph.store.to_global(of, np.arange(graph.manifest.nodes[of].num_nodes))
    (found,) = graph.access.gather([RowRequest(of, ids, ("key_who", "key_at"))])
    rows, targets = graph.access.endpoints(LISTS, np.arange(graph.manifest.edges[LISTS].num_edges))
    keys = zip(*(np.asarray(found[name]) for name in ("key_who", "key_at")), strict=True)
    return [
        (bytes(who).rstrip(b"\0"), bytes(at).rstrip(b"\0"), sorted(targets[rows == row].tolist()))
        for row, (who, at) in enumerate(keys)
    ]


@pytest.mark.parametrize("form", ["lists", "separator", "rows"])
def test_lists_come_from_a_column_of_lists_a_text_or_a_row_for_each_target(tmp_path: Path, form: str) -> None:
    task: dict[str, Any] = {}
    shown = list(zip(ABOUT, AT, TRUTH, strict=True))
    if form == "lists":
        task = {"table": "next.parquet", "separator": None}
        (tmp_path / "shop").mkdir()
        values = ", ".join(f"('c{c}', {t}, {[f'p{s}' for s in of]}::VARCHAR[])" for c, t, of in shown)
        duckdb.sql(f"COPY (SELECT * FROM (VALUES {values}) t(who, \"at\", skus)) TO '{tmp_path}/shop/next.parquet'")
    if form == "rows":
        task = {"table": "each.csv", "separator": None}
        (tmp_path / "shop").mkdir()
        each = [(f"c{c}", t, f"p{s}") for c, t, of in shown for s in of]
        empty = [(f"c{c}", t, "") for c, t, of in shown if not of]
        later = [each[k] for k in np.random.default_rng(0).permutation(len(each))]  # also repeated, and far apart
        write(tmp_path / "shop" / "each.csv", ["who", "at", "skus"], [*later[:50], *empty, *later])
    with open_graph(shop(tmp_path / "shop", 2, task=task)) as graph:
        found = rows_of(graph)
        wanted = [(f"c{c}".encode(), f"{t}".encode(), of) for c, t, of in shown]
        assert found == wanted if form != "rows" else sorted(found) == sorted(wanted)
        days = np.array([int(at) // DAY for _, at, _ in found])
        listed = np.array([bool(of) for *_, of in found])
        ids = graph.store.to_global("next", np.arange(len(found)))
        for split, some in (("train", days < 210), ("val", days == 210), ("test", days >= 240)):
            assert sorted(graph.store.seeds("next", split)) == sorted(ids[some & listed])
        # The lists are no neighbours: neither of products, nor of rows, nor in a loader of the user.
        assert [of for of in graph.manifest.edges if "next" in of] == [LISTS, ("customer", "has", "next")]
        assert fanouts_of(graph.manifest, [5, 3])[LISTS] == (0, 0)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"targets": "produkt"}, "tasks.next.targets: option nodes has no table 'produkt'; did you mean 'product'"),
        ({"separator": None}, r"next.csv, row \d+: skus has 'p\d+ .*in column 'sku' of nodes.product.*set `separator`"),
        ({"separator": ";"}, r"next.csv, row \d+: skus has 'p\d+ p.*; correct the tables"),
        ({"targets": None}, "tasks.next: separator needs the key targets"),
        ({"label": None}, "tasks.next: targets needs the key label"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shop(tmp_path / "shop", task=task)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"model": "embedding"}, SettingsError, "model embedding has no row for what next asks"),
        ({"hard_negatives": "customer__shown__product"}, SettingsError, "hard_negatives is for links that are edges"),
        ({"eval_candidates": "customer__shown__product", "eval_negatives": 10, "metrics": ()}, SettingsError,
         "needs eval_negatives: all"),
        ({"task": "classification", "metrics": ()}, SettingsError, "whose rows list product nodes; set task link"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str, one_shop: Path
) -> None:
    with pytest.raises(error, match=message):
        train(job(one_shop, tmp_path / "run", **{**SMALL, **settings}))


@pytest.fixture(scope="module")
def one_shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop(tmp_path_factory.mktemp("one") / "shop")


def test_batches_have_nothing_that_is_later_than_a_row(one_shop: Path) -> None:
    """Each end of a link, and each negative, is seen with orders until the time of the row alone."""
    settings = TrainSettings(**SMALL)
    with open_graph(one_shop) as graph:
        assert pick_target(graph, "next", "auto") == pick_target(graph, None, "auto") == LISTS
        (loader,) = link_loaders(settings, graph, LISTS, ("train",), False, 0, graph.layout, ages=("order",)).values()
        links, orders = split_links(graph, LISTS, "time")["train"], 0
        assert links.times is not None
        assert sorted(map(tuple, np.stack(links.all_ends(), 1).tolist())) == [
            (row, sku) for row, of in enumerate(TRUTH) for sku in of if AT[row] < 210 * DAY
        ]
        for share in loader.shares(1):
            seeds, ends = loader._seeded(share)
            sampled = loader.make(seeds, share.key)
            rows, times = links.all_ends()[0][share.positions], links.times[share.positions]
            assert times.tolist() == AT[rows].tolist()
            assert seeds.times["next"].tolist() == times.tolist()
            # Targets and negatives: at the earliest time of the link's group.
            limit = seeds.times["product"]
            assert (limit[ends.dst.numpy()] <= times).all()
            assert ends.group is not None
            assert (limit[ends.negatives.numpy()[ends.group.numpy()]] <= times[:, None]).all()
            assert not len(sampled.subgraph.edges[LISTS].src)
            every = np.concatenate([seeds.times[of] for of in seeds.nodes])
            nodes = sampled.subgraph.nodes["order"]
            assert nodes.tree is not None
            bought = BOUGHT[np.asarray(sampled.rows["order"]["orig_id"])]
            assert (bought <= every[nodes.tree]).all()
            orders += len(bought)
        assert orders > 1000


@pytest.mark.slow
def test_all_ranks_agree_and_lists_come_back_under_the_keys_of_rows(tmp_path: Path) -> None:
    parts = shop(tmp_path / "shop", num_parts=3)
    for ranks in (1, 3):
        for each in run_ranks(ranks, job(parts, tmp_path / f"run{ranks}", **SMALL)):
            assert each.returncode == 0, each.output
    assert curve(tmp_path / "run3") == pytest.approx(curve(tmp_path / "run1"), rel=1e-5)
    (one,), (three,) = (metrics(tmp_path / f"run{ranks}", "result") for ranks in (1, 3))
    for name in ("test_recall@5", "test_mrr", "val_ndcg@5", "baseline_test_recall@5"):
        assert three[name] == pytest.approx(one[name], abs=2e-3)
    result = infer(InferJob(tmp_path / "run1" / "checkpoints" / "last.pt", parts, tmp_path / "out", top_k=PRODUCTS))
    with (tmp_path / "out" / "predictions.csv").open() as file:
        found = list(csv.DictReader(file))
    lists: dict[int, list[str]] = {}
    for line in found:
        row = int(line["row"])
        assert (line["who"], int(line["at"])) == (f"c{ABOUT[row]}", AT[row])
        lists.setdefault(row, []).append(line["prediction"])
    assert sorted(lists) == list(range(len(ABOUT)))  # also rows that list nothing, in no split
    recalls = []
    for row, of in enumerate(TRUTH):
        assert len(set(lists[row])) == PRODUCTS  # also what the customer has bought before
        if of and AT[row] >= 240 * DAY:
            recalls.append(len({f"p{s}" for s in of} & set(lists[row][:5])) / len(of))
    assert result.metrics["test"]["recall@5"] == pytest.approx(one["test_recall@5"], abs=1e-9)
    assert np.mean(recalls) == pytest.approx(one["test_recall@5"], abs=1e-9)


@pytest.mark.slow
def test_lists_do_not_depend_on_what_is_later(tmp_path: Path) -> None:
    """Other products in orders after day 200 change the lists of later rows only: neither end of a link sees them."""
    later = np.where(BOUGHT > 200 * DAY, (SKU + 11) % PRODUCTS, SKU)
    before = shop(tmp_path / "before" / "shop")
    result = train(job(before, tmp_path / "run", **SMALL))
    scores = []
    for number, parts in enumerate((before, shop(tmp_path / "after" / "shop", skus=later))):
        infer(InferJob(result.checkpoint, parts, tmp_path / f"out{number}", top_k=PRODUCTS))
        with (tmp_path / f"out{number}" / "predictions.csv").open() as file:
            scores.append(
                {(int(line["row"]), line["prediction"]): float(line["score"]) for line in csv.DictReader(file)}
            )
    changed = np.zeros(len(AT), bool)
    for (row, product), score in scores[0].items():
        changed[row] |= scores[1][row, product] != score
    assert not changed[AT <= 200 * DAY].any()
    assert changed[AT > 200 * DAY].all()


@pytest.mark.slow
def test_a_client_without_parts_trains_and_predicts_the_same(
    one_shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = train(job(one_shop, tmp_path / "alone", **SMALL))
    with serving_parts(shop(tmp_path / "shop", num_parts=4)) as servers:
        cluster = cluster_file(tmp_path / "cluster.json", servers, {2: [0]})
        monkeypatch.setenv("NODE_RANK", "2")
        settings = job(one_shop, tmp_path, **SMALL).settings
        found = train(TrainJob(settings, None, tmp_path / "client", (), cluster))
        assert curve(tmp_path / "client") == pytest.approx(curve(tmp_path / "alone"), rel=1e-6)
        assert found.test == pytest.approx(alone.test, rel=1e-6)
        ended = infer(InferJob(found.checkpoint, None, tmp_path / "out", (), cluster, top_k=3))
        assert ended.metrics["test"] == pytest.approx(alone.test, rel=1e-6)


# --- ranks of links at their times ----------------------------------------------------------------------------

USER, ITEM, LIKES = 30, 25, ("user", "likes", "item")
NAMES = ("recall@5", "ndcg@5", "precision@5", "map@5", "mrr", "hits@3", "auc")


@cache
def events() -> np.ndarray:
    """Links with times, [4, n]: user, item, time, split; of many times, and also after the links of val and test."""
    rng = np.random.default_rng(8)
    user, item = rng.integers(0, USER, 500), np.minimum(rng.geometric(0.1, 500) - 1, ITEM - 1)
    return np.stack([user, item, rng.integers(0, 40, 500), rng.choice(3, 500, p=[0.6, 0.2, 0.2])])


def likes(folder: Path, num_parts: int) -> Path:
    folder.mkdir(parents=True)
    user, item, time, split = events()
    names = np.array(["train", "val", "test"])[split]
    rows = [(f"u{u}", f"i{i}", t, s) for u, i, t, s in zip(user, item, time, names, strict=True)]
    write(folder / "likes.csv", ["user", "item", "at", "split"], rows)
    write(folder / "users.csv", ["id"], [(f"u{k}",) for k in range(USER)])
    write(folder / "items.csv", ["id"], [(f"i{k}",) for k in range(ITEM)])
    write(folder / "shown.csv", ["user", "item", "at"], [(f"u{u}", f"i{i}", t) for u, i, t in shown_at()])
    options = {
        "nodes": {"user": {"files": "users.csv", "id": "id"}, "item": {"files": "items.csv", "id": "id"}},
        "edges": {
            "user__likes__item": {
                "files": "likes.csv", "source": "user", "target": "item", "time": "at", "split": "split",
            },
            "user__shown__item": {"files": "shown.csv", "source": "user", "target": "item", "time": "at"},
        },
        "undirected": True,
    }  # fmt: skip
    spec = PartitionSpec("tables", str(folder / "parts"), str(folder), options, num_parts, "hash")
    make_partition(spec, say=lambda line: None)
    return folder / "parts"


@cache
def shown_at() -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(9)
    return [(u, i, t) for u, _, t, _ in events().T.tolist() for i in rng.integers(0, ITEM, 4).tolist()]


@cache
def vector(kind: int, node: int, time: int) -> np.ndarray:
    """The embedding of a node at a time, of small integers, so that scores are often equal."""
    return np.random.default_rng([kind, node, time]).integers(-2, 3, 3).astype(np.float32)


def rank(scores: list[float], own: int, among: set[int]) -> float:
    others = [scores[j] for j in among - {own}]
    return 1 + sum(score > scores[own] for score in others) + sum(score == scores[own] for score in others) / 2


def reference(split: int, candidates: bool) -> dict[str, float]:
    """Rank each link of a split, one by one."""
    every = events().T.tolist()
    links = sorted({tuple(each[:3]) for each in every if each[3] == split})
    # A target is seen at the earliest time of the query's group: of at most 8 groups of about equal size.
    queries = sorted({(u, t) for u, _, t in links})
    times = sorted(t for _, t in queries)
    firsts = sorted({times[k * len(times) // 8] for k in range(8)})
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for u, t in queries:
        own = {i for v, i, s in links if (v, s) == (u, t)}
        limit = max(first for first in firsts if first <= t)
        scores = [float(vector(0, u, t) @ vector(1, i, limit)) for i in range(ITEM)]
        known = {i for v, i, s, p in every if v == u and s <= t and (p == 0 or (p == 1 and split == 2))}
        among = set(range(ITEM)) - known
        if candidates:
            known, among = set(), own | {i for v, i, s in shown_at() if (v, s) == (u, t)}
        ranked = sorted(own - known)

        ranks = sorted(rank(scores, i, among) for i in ranked)
        near = [r for r in ranks if r <= 5]
        if ranked:
            found["recall@5"].append(len(near) / len(ranked))
            found["precision@5"].append(len(near) / 5)
            ideal = sum(1 / np.log2(2 + k) for k in range(min(5, len(ranked))))
            found["ndcg@5"].append(sum(1 / np.log2(1 + r) for r in near) / ideal)
            found["map@5"].append(sum((k + 1) / r for k, r in enumerate(near)) / min(5, len(ranked)))
        for i in ranked:
            others = among - set(ranked)
            r = rank(scores, i, others)
            found["mrr"].append(1 / r)
            found["hits@3"].append(r <= 3)
            if others:
                found["auc"].append((len(others) + 1 - r) / len(others))
    return {name: float(np.mean(values)) for name, values in found.items()}


class _Vectors:
    """Rows that depend on nodes and times, in place of a model's."""

    def __init__(self, graph: Graph, whole: WholeGraph) -> None:
        self.graph, self.whole = graph, whole

    def of_queries(self, queries: Queries) -> torch.Tensor:
        assert queries.times is not None
        pairs = zip(queries.sources.tolist(), queries.times.tolist(), strict=True)
        return torch.from_numpy(np.array([vector(0, *pair) for pair in pairs], np.float32).reshape(-1, 3))

    def of_targets(self, time: int) -> LayerRows:
        (found,) = self.graph.access.gather([RowRequest("item", self.whole.own("item"), ("orig_id",))])
        rows = [vector(1, int(node), time) for node in found["orig_id"]]
        return LayerRows(self.whole.shares["item"], np.array(rows, np.float32).reshape(-1, 3))


def _ranked(parts: str, out: str) -> None:
    """Rank links with given embeddings on all ranks, and write the metrics. A function of a process of its own."""
    link_embeddings._TARGETS, link_embeddings._RANKED = 9, 7  # several blocks
    ranks, found = Ranks.from_env(os.environ), []
    with join_ranks(ranks, torch.device("cpu"), "gloo", 60) as group, open_graph(parts) as graph:
        layout = one_host_layout(graph, group)
        links = split_links(graph, LIKES, "edge_time")
        for candidates in (None, "user__shown__item"):
            settings = TrainSettings(
                task="link", time_attr="edge_time", eval_negatives="all", eval_candidates=candidates, hidden=3
            )
            for split in ("val", "test"):
                ranking = ranking_of(graph, LIKES, split, links, settings, layout, group, Path(out))
                assert isinstance(ranking, TimedRanking)
                found.append(ranking.metrics(_Vectors(graph, WholeGraph(graph, layout, group, Path(out))), NAMES))
    if ranks.rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize(("num_parts", "ranks"), [(1, 1), (4, 3)])
def test_ranks_at_the_time_of_each_link_equal_a_reference(tmp_path: Path, num_parts: int, ranks: int) -> None:
    parts = likes(tmp_path / "likes", num_parts)
    for each in run_forked(_ranked, (str(parts), str(tmp_path)), ranks):
        assert each.returncode == 0, each.output
    found = iter(json.loads((tmp_path / "found.json").read_text()))
    for candidates in (False, True):
        for split in (1, 2):
            assert next(found) == pytest.approx(reference(split, candidates), abs=1e-12)


@pytest.mark.slow
def test_links_with_times_train_and_are_ranked_among_all(tmp_path: Path) -> None:
    given = {
        "model": "rsage", "task": "link", "hidden": 8, "fanouts": (4, 3), "batch_size": 64, "epochs": 1,
        "time_attr": "edge_time", "eval_negatives": "all", "target": "user__likes__item",
    }  # fmt: skip
    parts = likes(tmp_path / "likes", 2)
    for ranks in (1, 2):
        for each in run_ranks(ranks, job(parts, tmp_path / f"run{ranks}", **given)):
            assert each.returncode == 0, each.output
    (one,), (two,) = (metrics(tmp_path / f"run{ranks}", "result") for ranks in (1, 2))
    assert two["test_recall@20"] == pytest.approx(one["test_recall@20"], abs=5e-3)
    result = infer(InferJob(tmp_path / "run1" / "checkpoints" / "last.pt", parts, tmp_path / "out"))
    assert result.metrics["test"]["mrr"] == pytest.approx(one["test_mrr"], abs=1e-9)
