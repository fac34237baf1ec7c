"""Tests of the predicted probability that a batch visits a node, and of the partition method `frequency`."""

from __future__ import annotations

import numpy as np
import pytest

from graphs import graph, hetero, skewed
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.methods.assign import assign_parts
from trainer.partition.methods.frequency import TypedInEdges, visit_probabilities

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def neighbours(dataset):
    """Return lists of sources by (edge type, target)."""
    rows = {}
    for of, edges in dataset.edges.items():
        for source, target in edges.edge_index.T.tolist():
            rows.setdefault((of, target), []).append(source)
    return rows


def sampled(rows, edge_types, seeds, fanouts, rng):
    """Return all (type, node) that sampling without replacement visits, found with plain loops."""
    visited = {(of, node) for of, ids in seeds.items() for node in ids}
    fresh = set(visited)
    for hop in range(len(next(iter(fanouts.values())))):
        found = set()
        for of in edge_types:
            for node_type, node in sorted(fresh):
                row = rows.get((of, node), []) if node_type == of[2] else []
                fanout = len(row) if fanouts[of][hop] < 0 else min(len(row), fanouts[of][hop])
                found |= {(of[0], row[slot]) for slot in rng.permutation(len(row))[:fanout]}
        fresh = found - visited
        visited |= fresh
    return visited


def frequencies(dataset, seeds, fanouts, turns=1500, chance=1.0):
    """Sample ``turns`` batches. Return the fraction of them that visit each node: type -> [num_nodes].

    chance: probability that a batch contains a seed.
    """
    rng, rows = np.random.default_rng(0), neighbours(dataset)
    counts = {of: np.zeros(nodes.num_nodes) for of, nodes in dataset.nodes.items()}
    for _ in range(turns):
        batch = {of: [node for node in ids if rng.random() < chance] for of, ids in seeds.items()}
        for of, node in sampled(rows, dataset.edges, batch, fanouts, rng):
            counts[of][node] += 1
    return {of: count / turns for of, count in counts.items()}


def test_probabilities_on_a_tree_are_exact():
    # 1..4 -> 0, 5 and 6 -> 1
    dataset = graph([(1, 0), (2, 0), (3, 0), (4, 0), (5, 1), (6, 1)], 8)
    found = visit_probabilities(dataset, {HOMO_NODE: np.array([0])}, (3, 1))[HOMO_NODE]
    assert found.dtype == np.float32
    assert found == pytest.approx([1, 0.75, 0.75, 0.75, 0.75, 0.375, 0.375, 0])
    half = visit_probabilities(dataset, {HOMO_NODE: np.array([0])}, (-1, -1), chance=0.5)[HOMO_NODE]
    assert half == pytest.approx([0.5] * 7 + [0])


def test_probabilities_agree_with_simulated_sampling():
    dataset = skewed(150, 900, seed=3)
    seeds = {HOMO_NODE: np.arange(0, 150, 10)}
    found = visit_probabilities(dataset, seeds, (4, 2), chance=0.3)[HOMO_NODE]
    seen = frequencies(dataset, seeds, {HOMO_EDGE: (4, 2)}, chance=0.3)[HOMO_NODE]
    assert np.abs(found - seen).max() < 0.12 and np.abs(found - seen).mean() < 0.015
    assert (found[seen > 0] > 0).all()


def test_probabilities_by_type_agree_with_simulated_sampling():
    rng = np.random.default_rng(1)
    edges = {CITES: rng.integers(0, 60, (300, 2)), WRITES: rng.integers(0, 60, (200, 2))}
    dataset = hetero({"author": 60, "paper": 60, "venue": 3}, edges)
    fanouts = {CITES: (3, 2), WRITES: (1, -1)}
    seeds = {"paper": np.array([5, 17, 40])}
    found, seen = visit_probabilities(dataset, seeds, fanouts), frequencies(dataset, seeds, fanouts)
    for of in dataset.nodes:
        assert np.abs(found[of] - seen[of]).max() < 0.12, of
    assert found["venue"].tolist() == [0, 0, 0] and found["author"].max() > 0.3
    no_authors = visit_probabilities(dataset, seeds, {CITES: (3, 2)})
    assert no_authors["author"].max() == 0 and no_authors["paper"] == pytest.approx(found["paper"])


def test_rare_visits_to_a_hub_add_up():
    # A hub has a hundred thousand targets, each of which is a seed with probability 1e-6.
    count = 100_000
    edges = np.stack((np.zeros(count, np.int64), np.arange(1, count + 1)))
    dataset = Dataset.homogeneous("hub", NodeData(count + 1), EdgeData(edges), "h")
    found = visit_probabilities(dataset, {HOMO_NODE: np.arange(1, count + 1)}, (5,), chance=1e-6)[HOMO_NODE]
    assert found[0] == pytest.approx(1 - np.exp(-0.1), rel=1e-4)


def test_in_edges_can_be_given_instead_of_a_dataset():
    given = TypedInEdges({HOMO_NODE: 3}, {HOMO_EDGE: (np.array([0, 2, 2, 2]), np.array([1, 2], np.int32))})
    assert visit_probabilities(given, {HOMO_NODE: np.array([0])}, [1])[HOMO_NODE].tolist() == [1, 0.5, 0.5]


# Parts


def communities(num=4, size=100, seed=0):
    """Return groups of nodes with in-edges only from their own group. Every fifth node is a train seed."""
    rng = np.random.default_rng(seed)
    target = np.repeat(np.arange(num * size), 8)
    source = target // size * size + rng.integers(0, size, len(target))
    order = rng.permutation(num * size)
    dataset = graph(np.stack((order[source], order[target]), axis=1), num * size, splits={"train": order[::5]})
    return dataset, order


def test_nodes_go_to_the_part_whose_seeds_visit_them():
    dataset, order = communities()
    assignment = assign_parts(dataset, 4, "frequency", fanouts=(5, 5))
    assert assignment.edge_cut == 0 and assignment.options["fanouts"] == [5, 5]
    parts = assignment.parts[HOMO_NODE]
    assert [np.ptp(parts[order[c * 100 : c * 100 + 100]]) for c in range(4)] == [0] * 4
    assert np.bincount(parts[dataset.nodes[HOMO_NODE].splits["train"]]).tolist() == [20] * 4


def test_parts_depend_on_fanouts():
    # Two relations join each author to opposite groups of papers; only the relation with a fanout counts.
    pairs = np.array([(paper // 20, paper) for paper in range(40)])
    swapped = np.array([(1 - paper // 20, paper) for paper in range(40)])
    ring = [(b * 20 + i, b * 20 + (i + s) % 20) for b in range(2) for i in range(20) for s in range(1, 6)]
    by, against = ("author", "by", "paper"), ("author", "against", "paper")
    edges = {by: EdgeData(pairs.T), against: EdgeData(swapped.T), CITES: EdgeData(np.array(ring).T)}
    nodes = {"author": NodeData(2), "paper": NodeData(40, splits={"train": np.arange(40)})}
    dataset = Dataset("two", nodes, edges, "t", hetero=True)
    for followed, same in ((by, True), (against, False)):
        fanouts = {followed: (5,), CITES: (2,)}
        assignment = assign_parts(dataset, 2, "frequency", fanouts=fanouts, balance="seeds")
        papers = assignment.parts["paper"]
        assert (papers[:20] == papers[0]).all() and (papers[20:] == papers[20]).all() and papers[0] != papers[20]
        assert (assignment.parts["author"] == (papers[[0, 20]] if same else papers[[20, 0]])).all()


def remote_share(dataset, parts, num_parts, fanouts):
    """Sample batches from the train seeds of each part. Return the fraction of visited nodes in other parts."""
    rng, rows, remote, seen = np.random.default_rng(0), neighbours(dataset), 0, 0
    train = dataset.nodes[HOMO_NODE].splits["train"]
    for part_id in range(num_parts):
        own = train[parts[train] == part_id]
        for _ in range(20):
            batch = {HOMO_NODE: rng.choice(own, 10, replace=False).tolist()}
            visited = [node for _, node in sampled(rows, dataset.edges, batch, fanouts, rng)]
            remote, seen = remote + (parts[visited] != part_id).sum(), seen + len(visited)
    return remote / seen


def test_fewer_visits_leave_their_part_than_with_random_parts():
    rng = np.random.default_rng(2)
    target = rng.integers(0, 600, 4000)
    near = (target + rng.integers(-20, 21, 4000)) % 600
    dataset = graph(np.stack((near, target), axis=1), 600, splits={"train": rng.permutation(600)[:200]})
    share = {
        method: remote_share(dataset, assign_parts(dataset, 4, method).parts[HOMO_NODE], 4, {HOMO_EDGE: (4, 3)})
        for method in ("frequency", "random")
    }
    assert share["frequency"] < 0.25 * share["random"]


def test_parts_have_equal_numbers_of_seeds():
    for count in (1, 3, 7, 50):
        dataset = graph(np.random.default_rng(0).integers(0, 300, (900, 2)), 300, splits={"train": range(count)})
        assignment = assign_parts(dataset, 7, "frequency")
        found = np.bincount(assignment.parts[HOMO_NODE][:count], minlength=7)
        assert np.ptp(found) <= 1 and np.bincount(assignment.parts[HOMO_NODE]).min() >= 41


def test_train_seeds_are_required():
    for splits in ({}, {"train": []}, {"val": [1]}):
        dataset = graph([(0, 1)], 4, splits=splits)
        with pytest.raises(PartitionError, match="dataset small: method frequency needs train seeds"):
            assign_parts(dataset, 2, "frequency")
