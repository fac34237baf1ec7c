"""Tests of link prediction with times: no link is scored with later edges, for any number of parts and ranks."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
import yaml

from train_kit import REPOSITORY, command_line, infer_words, job, metrics, write_parts
from trainer.cli import main
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import EdgeType, type_of
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.link_block_loader import LinkBlockLoader
from trainer.loader.link_ends import MOST_GROUPS, TimeGroups
from trainer.nn.graph_facts import facts_of
from trainer.nn.link_model import build_link_model, link_facts
from trainer.sources.load import load_dataset
from trainer.train.loaders import link_loaders
from trainer.train.settings import InferJob, TrainSettings

HOMO, CITES, WRITES = "node__to__node", "paper__cites__paper", "author__writes__paper"
GRAPHS = {HOMO: "synthetic", CITES: "synthetic-hetero", WRITES: "synthetic-hetero"}
OPTIONS: dict[str, Any] = {"num_nodes": 200, "avg_degree": 6, "time": True, "hold_out_time": "edge_time"}
SETTINGS: dict[str, Any] = {
    "task": "link", "time_attr": "edge_time", "batch_size": 90, "eval_batch_size": 25, "negatives": 12,
    "eval_negatives": 20, "hidden": 8, "dropout": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several partition folders, each named ``<edge type of the links>-<number of parts>``."""
    folder = tmp_path_factory.mktemp("timed")
    for name, dataset in GRAPHS.items():
        for number in (1, 2):
            write_parts(folder / f"{name}-{number}", number, dataset, **OPTIONS, hold_out=name)
    return folder


def loaders(opened: Graph, name: str, rank: int = 0, layout: RankLayout | None = None, **settings: Any):
    """Return the loaders of all splits."""
    of: EdgeType = type_of(name)  # type: ignore[assignment]
    given = TrainSettings(**{**SETTINGS, "fanouts": (3, 2), **settings})
    return link_loaders(given, opened, of, ("train", "val", "test"), False, rank, layout or opened.layout)


def seen(loader: LinkBlockLoader, share: Any) -> tuple[list[tuple[int, int, int, int]], list[np.ndarray]]:
    """Sample the batch ``share``. Return the sampled edges of the links' type, and the numbers of each link's trees.

    An edge is (tree, time, source, target) with original ids. A link has the trees of its source, target and negatives.
    """
    of = loader.links.edge_type
    seeds, ends = loader._seeded(share)
    keys = np.concatenate([*seeds.trees.values()])
    assert len(np.unique(keys)) == len(keys), "every tree has draws of its own"
    sampled = loader.sampler.sample(seeds, share.key)
    edges, nodes = sampled.subgraph.edges[of], sampled.subgraph.nodes
    source, target = (sampled.rows[of[k]]["orig_id"] for k in (0, 2))
    trees = nodes[of[2]].tree[edges.dst()]
    assert np.array_equal(trees, nodes[of[0]].tree[edges.src]), "an edge joins nodes of one tree"
    rows = zip(trees, sampled.rows[of]["edge_time"], source[edges.src], target[edges.dst()], strict=True)
    shift = 0 if of[0] == of[2] else len(seeds.nodes[of[0]])  # trees are numbered over all types
    own = [
        np.concatenate([[int(ends.src[k])], [int(ends.dst[k]) + shift], ends.negatives[ends.group[k]].numpy() + shift])
        for k in range(len(ends.src))
    ]
    return [tuple(map(int, row)) for row in rows], own  # type: ignore[misc]


@pytest.mark.parametrize("name", GRAPHS)
def test_a_link_sees_exactly_the_edges_that_are_not_later(name: str, parts: Path) -> None:
    of: EdgeType = type_of(name)  # type: ignore[assignment]
    left = load_dataset(GRAPHS[name], None, {"num_classes": 4, "num_features": 12, **OPTIONS, "hold_out": name}).edges[
        of
    ]
    all_edges = list(zip(left.attrs["edge_time"].tolist(), *left.edge_index.tolist(), strict=True))
    with open_graph(parts / f"{name}-2") as opened:
        # all neighbours, one hop: the edges of a tree are those that end at its root and are early enough
        for split, loader in loaders(opened, name, fanouts=(-1,), model="rsage", edge_attr="edge_time").items():
            share = next(loader.shares(1))
            times = loader.links.times[share.positions]
            ends = loader.links.ends.ends_of(share.positions)
            if split == "train":
                assert np.array_equal(np.sort(loader.links.times), np.sort(left.attrs["edge_time"]))
                assert {*zip(times.tolist(), *map(np.ndarray.tolist, ends), strict=True)} <= {*all_edges}
            hidden = {*zip(*map(np.ndarray.tolist, ends), strict=True)} if split == "train" else set()
            if name == HOMO:  # the reverses are of the same type
                hidden |= {(b, a) for a, b in hidden}
            edges, own = seen(loader, share)
            by_tree: dict[int, set[tuple[int, int, int]]] = {}
            for tree, *edge in edges:
                by_tree.setdefault(tree, set()).add(tuple(edge))  # type: ignore[arg-type]
            groups = TimeGroups.by_time(times)
            limits = groups.times[groups.of]
            assert (limits <= times).all() and len(own) == len(times)
            drawn = loader.ends(share)[2]
            for k, trees in enumerate(own):
                roots = [ends[0][k], ends[1][k], *drawn]
                for number, (tree, root) in enumerate(zip(trees.tolist(), roots, strict=True)):
                    if number == 0 and of[0] != of[2]:
                        continue  # a source of another type has no in-edges of the links' type
                    limit = limits[k] if number else times[k]
                    expected = {(t, u, v) for t, u, v in all_edges if v == root and t <= limit and (u, v) not in hidden}
                    assert by_tree.get(tree, set()) == expected


def test_groups_are_few_and_begin_at_their_earliest_link() -> None:
    times = np.random.default_rng(0).integers(0, 1000, 500)
    groups = TimeGroups.by_time(times)
    assert len(groups.times) == MOST_GROUPS and np.bincount(groups.of).min() > 50
    for number, first in enumerate(groups.times):
        assert times[groups.of == number].min() == first
    assert TimeGroups.by_time(np.array([7, 7, 7])).times.tolist() == [7]
    assert len(TimeGroups.by_time(np.empty(0, np.int64)).times) == 0


@pytest.mark.parametrize("name", GRAPHS)
def test_batches_do_not_depend_on_the_number_of_parts(name: str, parts: Path) -> None:
    with open_graph(parts / f"{name}-1") as one, open_graph(parts / f"{name}-2") as two:
        for ours, theirs in zip(loaders(one, name).values(), loaders(two, name).values(), strict=True):
            for a, b in zip(ours.epoch(1), theirs.epoch(1), strict=True):
                assert len(a.blocks) == 2 and str(a.links) == str(b.links)
                for x, y in zip(_tensors(a), _tensors(b), strict=True):
                    assert torch.equal(x, y)


def _tensors(batch: Any) -> list[torch.Tensor]:
    hetero = isinstance(batch.n_id, dict)
    found = [*batch.n_id.values(), *batch.x.values()] if hetero else [batch.n_id, batch.x]
    blocks = [block for layer in batch.blocks for block in (layer.values() if hetero else [layer])]
    return [*found, *(part for block in blocks for part in (block.indptr, block.indices)), batch.input_id]


@pytest.mark.parametrize("name", GRAPHS)
def test_scores_do_not_depend_on_the_number_of_ranks(name: str, parts: Path) -> None:
    of: EdgeType = type_of(name)  # type: ignore[assignment]
    settings = TrainSettings(**{**SETTINGS, "fanouts": (3, 2), "model": "rsage"})
    with open_graph(parts / f"{name}-2") as opened:
        model = build_link_model(settings, link_facts(facts_of(opened.manifest, of[2]), of), of).eval()
        scores: list[dict[tuple[int, int], np.ndarray]] = []
        for layout in (RankLayout.single(2), RankLayout(2, ((0,), (1,)))):
            scores.append({})
            for rank in range(layout.world_size):
                for batch in loaders(opened, name, rank, layout)["train"].epoch(1):
                    out = model(batch).detach().numpy()
                    assert out.shape == (batch.num_seeds, 13 if batch.num_seeds else 1)
                    scores[-1] |= {(batch.step, int(k)): row for k, row in zip(batch.input_id, out, strict=True)}
        assert scores[0].keys() == scores[1].keys() and len(scores[0]) == opened.manifest.edges[of].num_edges
        for link, row in scores[0].items():
            np.testing.assert_allclose(scores[1][link], row, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time_attr": "when"}, "the edges node__to__node have no attribute 'when'; their attributes are: edge_time"),
        ({"time_attr": "time"}, "the edges node__to__node have no attribute 'time'"),
        ({"weight_attr": "edge_time"}, "cannot be used together"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str, parts: Path) -> None:
    with open_graph(parts / f"{HOMO}-1") as opened, pytest.raises(SettingsError, match=message):
        loaders(opened, HOMO, **settings)


def test_links_held_out_at_random_have_no_times(tmp_path: Path) -> None:
    folder = write_parts(tmp_path / "parts", num_nodes=60, avg_degree=5, time=True, hold_out=HOMO)
    with (
        open_graph(folder) as opened,
        pytest.raises(DataError, match="set option hold_out_time: edge_time and make the"),
    ):
        loaders(opened, HOMO)


# --- from tables to predictions ------------------------------------------------------------------------------


def shop(folder: Path) -> None:
    """Write tables of users, items and ratings. Which items are rated changes with time."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    users, items = [f"u-{k:03d}" for k in range(60)], [f"sku {k}" for k in range(40)]
    (folder / "users.csv").write_text("user_id,age\n" + "".join(f"{u},{20 + k % 50}\n" for k, u in enumerate(users)))
    rows = ", ".join(f"('{item}', {k % 20 + 0.5})" for k, item in enumerate(items))
    duckdb.sql(f"COPY (SELECT * FROM (VALUES {rows}) t(sku, price)) TO '{folder}/items.parquet'")
    with (folder / "rated.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user_id", "sku", "at"])
        for k in rng.permutation(600):
            day = f"2024-{1 + k // 50:02d}-{1 + k % 28:02d} 12:00:00"
            writer.writerow([users[rng.integers(60)], items[(k // 20 + rng.integers(10)) % 40], day])


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert not ended.value.code


def test_the_documented_shop_is_learned_from_tables_to_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (REPOSITORY / "docs" / "data.md").read_text()
    (text,) = (block for block in re.findall(r"```yaml\n(.*?)```", page, re.S) if "time_attr: edge_time" in block)
    config = yaml.safe_load(text)
    shop(tmp_path / "shop")
    options = [
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in config["data"]["options"].items()
    ]
    source, folder = str(tmp_path / "shop"), str(tmp_path / "parts")
    words = ["--dataset", "tables", "--source", source, "--num-parts", "2", "--method", "hash", "--out", folder]
    run("partition", "make", *words, *(word for each in options for word in ("--option", each)))
    said = capsys.readouterr().out
    assert "links from edge_time 17" in said and "earlier ones are for training" in said
    assert "no train split" not in said
    given = {**config["train"], "fanouts": tuple(config["train"]["fanouts"]), "epochs": 2, "batch_size": 100}
    item = job(tmp_path / "parts", tmp_path / "run", **given)
    run(*command_line(item))
    assert "test MRR" in capsys.readouterr().out
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("user,item\nu-001,sku 39\nu-059,sku 0\n")
    inferred = InferJob(tmp_path / "run" / "checkpoints" / "last.pt", tmp_path / "parts", tmp_path / "out")
    run(*infer_words(inferred), "--pairs", str(pairs), "--top-k", "3")
    assert "scores are for a time after all edges of the graph" in capsys.readouterr().out
    with (tmp_path / "out" / "pairs.csv").open(newline="") as file:
        assert [(row["source"], row["target"]) for row in csv.DictReader(file)] == [
            ("u-001", "sku 39"),
            ("u-059", "sku 0"),
        ]
    rows = [row for part in (0, 1) for row in _rows(tmp_path / "out" / "source" / f"part{part}" / "predictions.csv")]
    assert len(rows) == 180 and {row["source"] for row in rows} == {f"u-{k:03d}" for k in range(60)}
    assert {row["target"] for row in rows} <= {f"sku {k}" for k in range(40)}
    (trained,) = metrics(tmp_path / "run", "result")
    found = json.loads((tmp_path / "out" / "infer.json").read_text())["metrics"]
    assert found["test"]["mrr"] == pytest.approx(trained["test_mrr"], rel=1e-6)  # each link at its time
    assert found["val"]["mrr"] == pytest.approx(trained["val_mrr"], rel=1e-6)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
