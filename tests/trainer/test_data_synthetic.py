"""Tests of synthetic graphs: they follow their options, are reproducible, and can be learnt."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE
from trainer.sources.load import load_dataset

SMALL = {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 8, "homophily": 0.6}


def made(name="synthetic", **options):
    common = SMALL if name == "synthetic" else {"num_nodes": 3000, "num_classes": 5}
    return load_dataset(name, None, {**common, **options})


def digest(dataset):
    hashed = hashlib.sha256()
    for edges in dataset.edges.values():
        hashed.update(edges.edge_index.tobytes())
    for nodes in dataset.nodes.values():
        for values in (*nodes.attrs.values(), *nodes.splits.values()):
            hashed.update(values.tobytes())
    return hashed.hexdigest()


def test_synthetic_is_simple_undirected_and_follows_its_options():
    dataset = load_dataset("synthetic", None, SMALL)
    source, target = dataset.edges[HOMO_EDGE].edge_index
    pairs = source.astype(np.int64) * 3000 + target
    assert len(np.unique(pairs)) == len(pairs) and not np.any(source == target)
    assert np.array_equal(np.sort(pairs), np.sort(target.astype(np.int64) * 3000 + source))
    assert dataset.num_edges == pytest.approx(3000 * 12, rel=0.1)
    y = dataset.nodes["node"].attrs["y"]
    assert np.mean(y[source] == y[target]) == pytest.approx(0.6 + 0.4 / 5, abs=0.03)
    assert sorted(np.unique(y)) == [0, 1, 2, 3, 4]
    assert dataset.nodes["node"].attrs["x"].shape == (3000, 8)


def test_synthetic_degrees_are_skewed_by_the_option():
    def share_of_top_percent(skew):
        degrees = np.bincount(made(skew=skew).edges[HOMO_EDGE].edge_index[1], minlength=3000)
        return np.sort(degrees)[-30:].sum() / degrees.sum()

    assert share_of_top_percent(2.2) > 2 * share_of_top_percent(6.0)


def test_synthetic_neighbours_improve_accuracy_over_features_alone():
    dataset = load_dataset("synthetic", None, {"num_nodes": 5000})
    x, y, train, test = (
        dataset.nodes["node"].attrs["x"],
        dataset.nodes["node"].attrs["y"],
        dataset.nodes["node"].splits["train"],
        dataset.nodes["node"].splits["test"],
    )
    source, target = dataset.edges[HOMO_EDGE].edge_index
    around = np.zeros_like(x)
    np.add.at(around, target, x[source])
    around /= np.maximum(np.bincount(target, minlength=5000), 1)[:, None]

    def accuracy(features):
        centres = np.stack(
            [features[train[y[train] == label]].mean(axis=0) for label in range(dataset.nodes["node"].num_classes)]
        )
        distances = ((features[test][:, None] - centres[None]) ** 2).sum(axis=2)
        return np.mean(distances.argmin(axis=1) == y[test])

    alone, together = accuracy(x), accuracy(np.hstack((x, around * 3)))
    assert 0.3 < alone < 0.7 and alone + 0.15 < together < 0.98


def test_synthetic_is_determined_by_its_seed():
    one, same, other = (digest(made(seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert digest(made("synthetic-hetero")) == digest(made("synthetic-hetero"))


def test_synthetic_equals_that_of_earlier_versions():
    # Fixed values keep benchmarks and loss curves comparable with earlier versions.
    dataset = load_dataset("synthetic", None, {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "train": 240})
    nodes = dataset.nodes["node"]
    assert nodes.attrs["y"][:12].tolist() == [4, 3, 2, 1, 1, 0, 0, 0, 0, 4, 3, 4]
    assert nodes.splits["train"][:6].tolist() == [7, 20, 25, 27, 28, 38]
    assert nodes.attrs["x"][0, :3] == pytest.approx([-0.115541, 0.299999, -0.618993], rel=1e-5)
    assert dataset.num_edges == pytest.approx(35396, rel=1e-3)


def test_synthetic_splits_take_fractions_and_numbers_and_do_not_overlap():
    dataset = load_dataset("synthetic", None, {**SMALL, "train": "240", "val": 0.1, "test": 0.5})
    assert {name: len(ids) for name, ids in dataset.nodes["node"].splits.items()} == {
        "train": 240,
        "val": 300,
        "test": 1500,
    }
    together = np.concatenate(list(dataset.nodes["node"].splits.values()))
    assert len(np.unique(together)) == len(together)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"homophily": 1.5}, "option homophily must be from 0 to 1, not 1.5"),
        ({"num_nodes": 0}, "option num_nodes must be from 1"),
        ({"num_nodes": 10.5}, "option num_nodes must be a whole number"),
        ({"train": 2900, "val": 0.1}, "train=2900.0, val=0.1, test=0.2 do not fit 3000 nodes"),
        ({"avg_degree": 1000}, "option avg_degree must be from 0 to 750"),
    ],
)
def test_synthetic_options_out_of_range(options, message):
    with pytest.raises(DataError, match=message):
        load_dataset("synthetic", None, {**SMALL, **options})


# Weights and times


def test_weights_are_positive_symmetric_and_larger_within_a_class():
    plain, dataset = made(), made(edge_weight=True)
    edges, y = dataset.edges[HOMO_EDGE], dataset.nodes["node"].attrs["y"]
    assert np.array_equal(edges.edge_index, plain.edges[HOMO_EDGE].edge_index) and list(edges.attrs) == ["edge_weight"]
    weight, (source, target) = edges.attrs["edge_weight"], edges.edge_index
    by_pair = dict(zip(zip(source.tolist(), target.tolist(), strict=True), weight.tolist(), strict=True))
    assert weight.dtype == np.float32 and weight.min() > 0
    assert all(by_pair[v, u] == value for (u, v), value in by_pair.items())
    inside = y[source] == y[target]
    assert weight[inside].mean() > 3 * weight[~inside].mean()


def test_most_edges_go_forward_in_time_and_splits_follow_time():
    dataset = made(time=True, edge_weight=True)
    nodes, edges = dataset.nodes["node"], dataset.edges[HOMO_EDGE]
    time, (source, target) = nodes.attrs["time"], edges.edge_index
    assert time.dtype == np.int64 and dataset.time_attrs == ("time",)
    assert 0.75 < np.mean(time[source] <= time[target]) < 0.95
    edge_time = edges.attrs["edge_time"]
    both = np.maximum(time[source], time[target])
    assert np.all(edge_time >= both) and 0.15 < np.mean(edge_time > both) < 0.35
    train, val, test = (time[nodes.splits[name]] for name in ("train", "val", "test"))
    assert train.max() <= val.min() and val.max() <= test.min() and test.max() == time.max()
    assert np.array_equal(nodes.attrs["x"], made().nodes["node"].attrs["x"])


# Papers, authors and fields


def test_papers_authors_and_fields():
    dataset = made("synthetic-hetero")
    assert {of: data.num_nodes for of, data in dataset.nodes.items()} == {"paper": 3000, "author": 1500, "field": 150}
    assert [list(dataset.nodes[of].attrs) for of in dataset.nodes] == [["x", "y"], [], []]
    relations = {relation for _, relation, _ in dataset.edges}
    assert relations == {
        f"{prefix}{word}" for prefix in ("", "rev_") for word in ("writes", "cites", "disputes", "about")
    }
    for (source, _, target), edges in dataset.edges.items():
        sizes = dataset.nodes[source].num_nodes, dataset.nodes[target].num_nodes
        assert edges.edge_index.min() == 0 and np.all(edges.edge_index.max(axis=1) < sizes)
        pairs = edges.edge_index[0] * sizes[1] + edges.edge_index[1]
        assert len(np.unique(pairs)) == len(pairs)
    cites, y = dataset.edges["paper", "cites", "paper"].edge_index, dataset.nodes["paper"].attrs["y"]
    disputes = dataset.edges["paper", "disputes", "paper"].edge_index
    assert np.mean(y[cites[0]] == y[cites[1]]) == pytest.approx(0.5 + 0.5 / 5, abs=0.03)
    assert np.mean((y[disputes[0]] + 1) % 5 == y[disputes[1]]) == pytest.approx(0.5 + 0.5 / 5, abs=0.03)
    one_way = made("synthetic-hetero", undirected=False, all_features=True)
    assert len(one_way.edges) == 4 and one_way.nodes["author"].attrs["x"].shape == (1500, 32)


def neighbour_means(edges, x, num_nodes):
    around = np.zeros((num_nodes, x.shape[1]))
    np.add.at(around, edges[1], x[edges[0]])
    return around / np.maximum(np.bincount(edges[1], minlength=num_nodes), 1)[:, None]


def test_separate_relations_predict_better_than_merged_ones():
    dataset = made("synthetic-hetero", num_nodes=4000)
    papers, classes = dataset.nodes["paper"], dataset.nodes["paper"].num_classes
    x, y, train, test = papers.attrs["x"], papers.attrs["y"], papers.splits["train"], papers.splits["test"]
    between = {of[1]: data.edge_index for of, data in dataset.edges.items() if of[0] == of[2]}
    authors = neighbour_means(dataset.edges["paper", "rev_writes", "author"].edge_index, x, 2000)
    by_author = neighbour_means(dataset.edges["author", "writes", "paper"].edge_index, authors, 4000)

    def accuracy(*features):
        columns = np.hstack([*features, np.ones((4000, 1))])
        known = columns[train]
        weights = np.linalg.solve(known.T @ known + np.eye(columns.shape[1]), known.T @ np.eye(classes)[y[train]])
        return np.mean((columns[test] @ weights).argmax(axis=1) == y[test])

    alone = accuracy(x)
    mixed = accuracy(x, neighbour_means(np.hstack(list(between.values())), x, 4000))
    by_relation = accuracy(x, *(neighbour_means(edges, x, 4000) for edges in between.values()))
    assert alone < mixed < by_relation - 0.03 and by_relation < accuracy(
        x, *(neighbour_means(edges, x, 4000) for edges in between.values()), by_author
    ) < 0.95  # fmt: skip


def test_papers_cite_mostly_earlier_ones_and_every_relation_has_times_and_weights():
    dataset = made("synthetic-hetero", time=True, edge_weight=True)
    time = dataset.nodes["paper"].attrs["time"]
    source, target = dataset.edges["paper", "cites", "paper"].edge_index
    assert 0.75 < np.mean(time[target] <= time[source]) < 0.95
    assert all(sorted(edges.attrs) == ["edge_time", "edge_weight"] for edges in dataset.edges.values())
    authors, papers = dataset.edges["author", "writes", "paper"].edge_index
    assert np.all(dataset.edges["author", "writes", "paper"].attrs["edge_time"] >= time[papers])
    assert time[dataset.nodes["paper"].splits["train"]].max() <= time[dataset.nodes["paper"].splits["test"]].min()
