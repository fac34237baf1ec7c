"""Negatives of each link alone (``train.hard_negatives``), against plain Python, for any number of ranks and parts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData

from gateway_kit import client_graph, serving_parts, written
from load_kit import WRITES, parts_of
from oracle import layout_of
from plain_sampler import Rule, pick
from test_anchor_loader import SHOWN, plain, typed_data  # noqa: F401 (a fixture)
from train_kit import curve, job, metrics, run_ranks
from trainer.core.batch import LinkEnds
from trainer.core.errors import SettingsError
from trainer.core.graph_attrs import encode_texts
from trainer.data.memory import dataset_of
from trainer.graph.open import open_graph
from trainer.loader.block_loader import sampling_of
from trainer.loader.edge_endpoints import all_times
from trainer.loader.link_ends import TimeGroups
from trainer.loader.node_links import _LINKS
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sampler.types import TimeRule
from trainer.train.job import train
from trainer.train.loaders import link_loaders
from trainer.train.settings import TrainSettings
from trainer.train.tasks.link import LinkPrediction
from trainer.train.tasks.task import Labels

SETTINGS: dict[str, Any] = {
    "task": "link", "model": "rsage", "hidden": 8, "fanouts": (3, 2), "batch_size": 32, "negatives": 6, "dropout": 0.0,
    "eval_negatives": 10, "hard_negatives": "paper__shown__author", "num_hard_negatives": 2,
}  # fmt: skip


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("loss", ["softmax", "in-batch"])
def test_hard_negatives_are_those_of_plain_python(tmp_path: Path, plain: Any, timed: bool, loss: str) -> None:  # noqa: F811
    settings = TrainSettings(**SETTINGS, loss=loss, time_attr="edge_time" if timed else None)
    counts = torch.ones(70, dtype=torch.float64)
    folder = written(tmp_path / "parts", typed_data())
    with serving_parts(folder) as servers, client_graph(servers) as client:
        for graph, world in ((parts_of(typed_data(), 1), 1), (parts_of(typed_data(), 4), 3), (client, 2)):
            found = 0
            for rank in range(world):
                layout = layout_of(world, graph.manifest.num_parts)
                loader = link_loaders(settings, graph, WRITES, ("train",), False, rank, layout, None, counts)["train"]
                assert SHOWN not in sampling_of(graph, loader.settings).fanouts, "these edges carry no messages"
                for share in loader.shares(0):
                    found += check(plain, loader, share, timed)
            assert found > 100


def check(plain: Any, loader: Any, share: Any, timed: bool) -> int:  # noqa: F811
    seeds, ends = loader._seeded(share)
    of_batch, rule = plain.edges[WRITES][:, share.batch], TimeRule("edge_time", "edge") if timed else None
    times = plain.edge_attrs[WRITES]["edge_time"]
    orig = {of: np.argsort(loader.graph.store.to_global(of, np.arange(n))) for of, n in plain.num_nodes.items()}
    limits, drawn = TimeGroups.by_time(times[share.batch]) if timed else None, 0
    table = torch.full((len(share.places), 0), -1) if ends.own is None else ends.own
    for row, place in zip(table.tolist(), share.places.tolist(), strict=True):
        author, paper = map(int, of_batch[:, place])
        until = int(times[share.batch[place]])
        edges, _ = pick(plain, SHOWN, author, Rule(2, time=rule, until=until), share.key ^ _LINKS, place)
        wanted = [int(plain.edges[SHOWN][0][e]) for e in edges if plain.edges[SHOWN][0][e] != paper]
        own = [at for at in row if at >= 0]
        assert orig["paper"][seeds.nodes["paper"][own]].tolist() == wanted
        drawn += len(wanted)
        if limits is not None:
            assert (seeds.times["paper"][own] == limits.times[limits.of[place]]).all()
    if timed:
        trees = np.concatenate(list(seeds.trees.values()))
        assert len(np.unique(trees)) == len(trees), "every tree has draws of its own"
    return drawn


@pytest.mark.parametrize("loss", ["softmax", "bpr", "bce", "in-batch"])
def test_losses_count_the_negatives_of_a_link_alone(loss: str) -> None:
    at, log_q = torch.tensor([0, 1]), torch.tensor([-1.0, -2.0, -0.5, -3.0])
    ends = LinkEnds("a", "b", at, torch.tensor([5, 6]), torch.tensor([5, 7]), own=torch.tensor([[8, -1], [9, 4]]))
    ends = replace(ends, log_q=log_q) if loss == "in-batch" else ends
    out = torch.tensor([[0.5, 9.0, 0.25, 1.5, 7.0], [1.0, -0.5, 0.75, 2.0, -1.0]])
    kept = [(0.5, [0.25, 1.5]), (1.0, [-0.5, 0.75, 2.0, -1.0])]
    if loss == "in-batch":  # corrected, except those of a link alone
        kept = [(1.5, [3.25, 1.5]), (3.0, [0.0, 3.75, 2.0, -1.0])]
    pairs = [(torch.tensor(p), torch.tensor(n)) for p, n in kept]
    soft = torch.nn.functional.softplus
    wanted = {
        "softmax": sum(torch.cat([p[None], n]).logsumexp(0) - p for p, n in pairs),
        "bpr": sum(soft(n - p).mean() for p, n in pairs),
        "bce": sum(soft(-p) + soft(n).mean() for p, n in pairs),
    }
    wanted["in-batch"] = wanted["softmax"]
    assert float(LinkPrediction(8, loss=loss).loss_sum(out, Labels(links=ends))) == pytest.approx(float(wanted[loss]))


def shop(folder: Path, num_parts: int) -> Path:
    """Users like items of their own half of the shop, and are shown others of this half, which they do not like."""
    rng, data = np.random.default_rng(0), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 40, 60
    users, liked = rng.integers(0, 40, 600), rng.integers(0, 15, 600)
    likes = np.unique(np.stack([users, 2 * liked + users % 2]), axis=1)
    likes = likes[:, rng.permutation(likes.shape[1])]
    shown = np.stack([users, 30 + 2 * liked + users % 2])
    held, kept = likes[:, :60], likes[:, 60:]
    for name, ends in (("likes", kept), ("shown", shown)):
        data["user", name, "item"].edge_index = torch.from_numpy(ends)
        data["item", f"rev_{name}", "user"].edge_index = torch.from_numpy(ends[::-1].copy())
    dataset = dataset_of(data, "shop")
    links = {
        "val_links": held[:, :30],
        "test_links": held[:, 30:],
        "held_out_type": encode_texts(["user__likes__item"]),
    }
    dataset = replace(dataset, graph_attrs={**dataset.graph_attrs, **links}, fingerprint="shop")
    write_partition(dataset, assign_parts(dataset, num_parts, "hash"), folder)
    return folder


SHOP: dict[str, Any] = {
    **SETTINGS, "target": "user__likes__item", "model": "lightgcn", "batch_size": 64, "epochs": 3, "lr": 0.05,
    "hard_negatives": "user__shown__item", "fanouts": (-1,), "loss": "bpr",
}  # fmt: skip


def test_training_has_the_same_curve_on_any_ranks(tmp_path: Path) -> None:
    parts, runs = shop(tmp_path / "parts", 2), [tmp_path / "one", tmp_path / "two"]
    train(job(parts, runs[0], **SHOP))
    for each in run_ranks(2, job(parts, runs[1], **SHOP)):
        assert each.returncode == 0, each.output
    assert curve(runs[1]) == pytest.approx(curve(runs[0]), rel=1e-6)
    without = tmp_path / "without"
    train(job(parts, without, **{**SHOP, "hard_negatives": None}))
    assert curve(without)[0] > 0 and abs(curve(without)[0] - curve(runs[0])[0]) > 1e-4
    assert metrics(runs[0], "result")[0]["test_mrr"] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("user__hates__item", "hard_negatives: .* is not an edge type"),
        ("item__rev_shown__user", None),
        ("user__likes__item", "are not the links to predict"),
    ],
)
def test_an_edge_type_that_does_not_fit_is_refused(tmp_path: Path, name: str, message: str | None) -> None:
    given = job(shop(tmp_path / "parts", 1), tmp_path / "run", **{**SHOP, "hard_negatives": name, "epochs": 1})
    if message is None:  # in the direction in which it is read
        train(given)
        return
    with pytest.raises(SettingsError, match=message):
        train(given)


# Candidates of evaluations -------------------------------------------------------------------------------------------


def timed_shop(folder: Path, num_parts: int) -> Path:
    """A shop whose users are shown lists of items at times, and like some of a list then."""
    rng, data = np.random.default_rng(3), HeteroData()
    data["user"].num_nodes, data["item"].num_nodes = 12, 30
    visits = np.unique(np.stack([rng.integers(0, 12, 120), rng.integers(0, 40, 120)]), axis=1)
    shown = np.repeat(visits, 6, axis=1)
    items = rng.integers(0, 30, shown.shape[1])
    likes = np.arange(0, shown.shape[1], 3)[rng.random(shown.shape[1] // 3) < 0.9]
    late, kept = likes[shown[1, likes] >= 25], likes[shown[1, likes] < 25]
    for name, of in (("likes", kept), ("shown", np.arange(shown.shape[1]))):
        ends = torch.from_numpy(np.stack([shown[0, of], items[of]]))
        for edge_type, index in ((("user", name, "item"), ends), (("item", f"rev_{name}", "user"), ends.flip(0))):
            data[edge_type].edge_index, data[edge_type].at = index, torch.from_numpy(shown[1, of])
    dataset = dataset_of(data, "shop")
    attrs = dict(dataset.graph_attrs)
    for split, of in (("val", late[::2]), ("test", late[1::2])):
        attrs[f"{split}_links"], attrs[f"{split}_link_times"] = np.stack([shown[0, of], items[of]]), shown[1, of]
    attrs |= {"held_out_type": encode_texts(["user__likes__item"]), "held_out_time": encode_texts(["at"])}
    write_partition(
        replace(dataset, graph_attrs=attrs, fingerprint="timed"), assign_parts(dataset, num_parts, "hash"), folder
    )
    return folder


def listed(graph: Any, split: str, timed: bool) -> list[tuple[int, int, list[int]]]:
    """Return (user, item, other candidates) for the held-out links of a split, link by link."""
    src, dst = graph.store.graph_attrs[f"{split}_links"]
    times = graph.store.graph_attrs[f"{split}_link_times"] if timed else np.zeros(len(src))
    users, items = graph.access.endpoints(
        ("user", "shown", "item"), np.arange(graph.manifest.edges["user", "shown", "item"].num_edges)
    )
    at = all_times(graph, ("user", "shown", "item"), "at") if timed else np.zeros(len(users))
    held = set(zip(src.tolist(), dst.tolist(), strict=True))
    return [
        (
            int(u),
            int(i),
            sorted(
                {int(j) for v, j, s in zip(users, items, at, strict=True) if v == u and s == t and (u, j) not in held}
            ),
        )
        for u, i, t in zip(src, dst, times, strict=True)
    ]


@pytest.mark.parametrize("timed", [False, True])
def test_held_out_links_are_ranked_among_the_candidates_of_their_row(tmp_path: Path, timed: bool) -> None:
    settings = TrainSettings(**{**LISTED, "time_attr": "at" if timed else None})
    for num_parts, world in ((1, 1), (4, 3), (4, 2)):
        parts = (
            timed_shop(tmp_path / f"parts{num_parts}", num_parts)
            if not (tmp_path / f"parts{num_parts}").exists()
            else tmp_path / f"parts{num_parts}"
        )
        with ExitStack() as stack:
            graph = stack.enter_context(open_graph(parts))
            asked = graph
            if world == 2:
                asked = stack.enter_context(client_graph(stack.enter_context(serving_parts(parts))))
            orig = {of: np.argsort(graph.store.to_global(of, np.arange(n))) for of, n in (("user", 12), ("item", 30))}
            found: list[tuple[int, int, list[int]]] = []
            for rank in range(world):
                layout = layout_of(world, num_parts)
                loader = link_loaders(settings, asked, LIKES, ("val",), False, rank, layout)["val"]
                for share in loader.shares(0):
                    seeds, ends = loader._seeded(share)
                    user, item = orig["user"][seeds.nodes["user"]], orig["item"][seeds.nodes["item"]]
                    own = torch.full((len(ends.src), 0), -1) if ends.own is None else ends.own
                    for u, i, row in zip(ends.src.tolist(), ends.dst.tolist(), own.tolist(), strict=True):
                        found.append((int(user[u]), int(item[i]), [int(item[at]) for at in row if at >= 0]))
            assert sorted(found) == sorted(listed(graph, "val", timed))
            assert sum(len(each[2]) for each in found) > 100


LIKES = ("user", "likes", "item")
LISTED: dict[str, Any] = {
    "task": "link", "model": "rsage", "target": "user__likes__item", "hidden": 8, "fanouts": (3, 2), "batch_size": 32,
    "negatives": 6, "dropout": 0.0, "eval_batch_size": 16, "eval_candidates": "user__shown__item", "epochs": 1,
    "lr": 1e-6,  # rounding differs between numbers of ranks; a larger rate makes it differ in some orders of scores
}  # fmt: skip


@pytest.mark.parametrize(
    "how",
    [
        {"eval_negatives": "all"},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"time_attr": "at"}, marks=pytest.mark.slow),
    ],
)
def test_the_baseline_of_candidates_is_that_of_a_loop_on_any_ranks(tmp_path: Path, how: dict[str, Any]) -> None:
    parts, of_all = timed_shop(tmp_path / "parts", 4), how.get("eval_negatives") == "all"
    names = ("mrr", "hits@2", "auc", *(("recall@2", "ndcg@2") if of_all else ()))
    train(job(parts, tmp_path / "1", **LISTED, **how, metrics=names))
    for each in run_ranks(3, job(parts, tmp_path / "3", **LISTED, **how, metrics=names)):
        assert each.returncode == 0, each.output
    one, three = (metrics(tmp_path / str(ranks), "result")[0] for ranks in (1, 3))
    for name in names:
        assert three[f"test_{name}"] == pytest.approx(one[f"test_{name}"], rel=1e-5)
    with open_graph(parts) as graph:
        rows = listed(graph, "test", "time_attr" in how)
        counts = np.bincount(
            graph.access.endpoints(LIKES, np.arange(graph.manifest.edges[LIKES].num_edges))[1], minlength=30
        )
    rank = [1 + sum(counts[j] > counts[i] for j in c) + sum(counts[j] == counts[i] for j in c) / 2 for _, i, c in rows]
    wanted = {"mrr": np.mean([1 / r for r in rank]), "hits@2": np.mean([r <= 2 for r in rank])}
    if of_all:
        users = {u: sorted({i for v, i, _ in rows if v == u}) for u, _, _ in rows}
        recall = []
        for u, own in users.items():
            every = {*own, *(j for v, _, c in rows if v == u for j in c)}
            places = [
                1 + sum(counts[j] > counts[i] for j in every) + sum(counts[j] == counts[i] for j in every - {i}) / 2
                for i in own
            ]
            recall.append(sum(place <= 2 for place in places) / len(own))
        wanted["recall@2"] = np.mean(recall)
        once = {(u, i): r for (u, i, _), r in zip(rows, rank, strict=True)}
        wanted |= {"mrr": np.mean([1 / r for r in once.values()]), "hits@2": np.mean([r <= 2 for r in once.values()])}
    for name, value in wanted.items():
        assert one[f"baseline_test_{name}"] == pytest.approx(float(value), rel=1e-9), name
