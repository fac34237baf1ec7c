"""Tests of ``assign_parts``: edge cuts are small, balance bounds hold, and any graph can be partitioned."""

from __future__ import annotations

import json
import typing

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphs import DEBIAN, NO_DEBIAN, bipartite, blocks, empty, graph, odd, ring, skewed, star
from launcher.config.resolve import resolve_run
from launcher.config.schema import ClusterConfig, DataConfig, NodeConfig, PartitionConfig
from launcher.plan.partition import partitioning
from trainer.core.errors import PartitionError
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.core.train_config import TrainConfig
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.partition.cli import partition
from trainer.partition.methods.assign import (
    BALANCES,
    CHOSEN_BY,
    KEEP,
    METHODS,
    assign_parts,
    fanouts_of,
    hash_part,
    method_options,
)

RUN = METHODS[1:]  #: all but `auto`, which chooses one of them

GRAPHS = [ring(23), star(40), skewed(200, 3000), empty(9), odd(), graph([(0, 0)], 1), bipartite()]


def sizes(assignment, of=HOMO_NODE, ids=slice(None)):
    """Return the number of nodes of type ``of`` in each part.

    ids: count only these nodes.
    """
    return np.bincount(assignment.parts[of][ids], minlength=assignment.num_parts)


def typed_blocks(num_blocks=4, size=40, seed=0):
    """Return papers and authors in complete bipartite blocks, without edges between blocks."""
    rng = np.random.default_rng(seed)
    paper, author = rng.permutation(num_blocks * size), rng.permutation(num_blocks * size // 4)
    pairs = [
        (author[b * size // 4 + a], paper[b * size + p])
        for b in range(num_blocks) for a in range(size // 4) for p in range(size)
    ]  # fmt: skip
    nodes = {
        "paper": NodeData(len(paper), splits={"train": np.arange(0, len(paper), 2)}),
        "author": NodeData(len(author)),
    }
    edges = {("author", "writes", "paper"): EdgeData(np.array(pairs).T)}
    return Dataset("typed-blocks", nodes, edges, "b", hetero=True)


# Cuts


@pytest.mark.parametrize(
    "size", [8, pytest.param(80, marks=pytest.mark.slow)]
)  # with 80, METIS gets only a sample of the edges
def test_metis_finds_the_known_best_cut_of_directed_blocks(size):
    dataset = blocks(4, size)
    assignment = assign_parts(dataset, 4, balance="nodes")
    assert assignment.edge_cut == pytest.approx(4 / dataset.num_edges)
    assert assignment.balance == 1.0


def test_metis_cuts_all_types_as_one_graph():
    assignment = assign_parts(typed_blocks(), 4, balance="types")
    assert assignment.edge_cut == 0 and assignment.edge_cuts == {("author", "writes", "paper"): 0}
    assert sizes(assignment, "paper").tolist() == [40] * 4 and sizes(assignment, "author").tolist() == [10] * 4


def test_cut_of_each_edge_type_and_of_all():
    assignment = assign_parts(bipartite(), 3, "random", 1)
    cut = {}
    for (source, relation, target), edges in bipartite().edges.items():
        ends = assignment.parts[source][edges.edge_index[0]], assignment.parts[target][edges.edge_index[1]]
        cut[source, relation, target] = int((ends[0] != ends[1]).sum())
        assert assignment.edge_cuts[source, relation, target] == cut[source, relation, target] / max(edges.num_edges, 1)
    assert assignment.edge_cut == sum(cut.values()) / 12 and 0 < assignment.edge_cut < 1


def test_metis_on_a_directed_star_and_ring():
    assert assign_parts(star(1000), 4).balance < 1.04
    assert assign_parts(ring(1000), 4, balance="nodes").edge_cut <= 8 / 1000


# Balance


@pytest.mark.parametrize("balance", BALANCES)
def test_only_the_named_groups_are_balanced(balance):
    # All seeds lie in one of two joined blocks; the best cut would give one part all of them.
    size = 100
    inner = [(b * size + i, b * size + j) for b in range(2) for i in range(size) for j in range(i)]
    dataset = graph([*inner, (0, size)], 2 * size, splits={"train": range(size)})
    assignment = assign_parts(dataset, 2, balance=balance)
    of_seeds = sizes(assignment, ids=range(size))
    assert np.ptp(sizes(assignment)) <= 12
    if "seeds" in balance:
        assert np.ptp(of_seeds) <= 6
    else:
        assert of_seeds.min() == 0 and assignment.edge_cut == 1 / dataset.num_edges


def test_types_are_balanced_against_the_best_cut():
    # Authors write only papers of the first half, so the best cut leaves one part without authors.
    rng = np.random.default_rng(0)
    writes = np.stack((rng.integers(0, 60, 4000), rng.integers(0, 300, 4000)))
    cites = np.concatenate([rng.integers(0, 300, (2, 6000)), rng.integers(300, 600, (2, 6000))], axis=1)
    nodes = {"author": NodeData(60), "paper": NodeData(600)}
    edges = {("author", "writes", "paper"): EdgeData(writes), ("paper", "cites", "paper"): EdgeData(cites)}
    dataset = Dataset("halves", nodes, edges, "h", hetero=True)
    by_nodes, by_types = (assign_parts(dataset, 2, balance=balance) for balance in ("nodes", "types"))
    assert sizes(by_nodes, "author").min() < 10
    assert sizes(by_types, "author").min() >= 29 and sizes(by_types, "paper").min() >= 291


def test_isolated_nodes_fill_up_the_smaller_parts():
    dense = blocks(3, 20)
    dataset = graph(dense.edges[HOMO_EDGE].edge_index.T, 60 + 301)
    assert sorted(sizes(assign_parts(dataset, 3, balance="nodes"))) == [120, 120, 121]


def bounds(count, num_parts):
    mean = count / num_parts
    return min(np.floor(mean), np.ceil(0.97 * mean)), max(np.ceil(mean), np.floor(1.03 * mean))


def assert_bounded(assignment, dataset, balance):
    """Assert that the numbers of nodes in the parts are almost equal, for each node type.

    They may differ from the mean by 3 % or one node.

    balance: which nodes are counted: "seeds" (train seeds), "types" (all nodes), or "types+seeds" (train seeds and
    other nodes, separately).
    """
    for of, nodes in dataset.nodes.items():
        seeds = np.isin(np.arange(nodes.num_nodes), nodes.splits.get("train", []) if "seeds" in balance else [])
        groups = [seeds] if balance == "seeds" else [seeds, ~seeds] if "types" in balance else []
        for group in groups:
            least, most = bounds(group.sum(), assignment.num_parts)
            found = sizes(assignment, of, group)
            assert least <= found.min() and found.max() <= most


@st.composite
def typed_graphs(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = {f"t{i}": draw(st.sampled_from([1, 0, 2, 3, 30, 200])) for i in range(draw(st.integers(1, 3)))}
    count["t0"] = max(count["t0"], 1)
    nodes = {
        of: NodeData(n, splits={"train": rng.permutation(n)[: draw(st.integers(0, n))]} if draw(st.booleans()) else {})
        for of, n in count.items()
    }
    edges, filled = {}, [of for of, n in count.items() if n]
    for relation in range(draw(st.integers(0, 4))):
        source, target = draw(st.sampled_from(filled)), draw(st.sampled_from(filled))
        shape, skew = (2, draw(st.sampled_from([0, 1, 5, 100, 3000]))), draw(st.sampled_from([1, 5]))
        ends = rng.random(shape) ** skew * [[count[source]], [count[target]]]
        edges[source, f"r{relation}", target] = EdgeData(ends.astype(np.int64))
    return Dataset("drawn", nodes, edges, "d", hetero=True)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(typed_graphs(), st.sampled_from([1, 2, 3, 7, 40]), st.sampled_from(RUN), st.sampled_from(BALANCES))
def test_any_graph_is_divided_within_bounds(tmp_path_factory, dataset, num_parts, method, balance):
    num_parts = min(num_parts, dataset.num_nodes)
    seeds = sum(len(nodes.splits.get("train", ())) for nodes in dataset.nodes.values())
    if method == "frequency" and not seeds and num_parts > 1:
        with pytest.raises(PartitionError, match="needs train seeds, and the dataset has none"):
            assign_parts(dataset, num_parts, method, balance=balance)
        return
    scratch = Scratch(tmp_path_factory.mktemp("scratch"), 2000)
    assignment = assign_parts(dataset, num_parts, method, scratch=scratch, balance=balance)
    for of, nodes in dataset.nodes.items():
        assert assignment.parts[of].dtype == np.int32 and len(assignment.parts[of]) == nodes.num_nodes
    total = sum(sizes(assignment, of) for of in dataset.nodes)
    assert len(total) == num_parts and total.sum() == dataset.num_nodes
    assert method == "hash" or total.min() > 0
    if method == "random":
        assert all(np.ptp(sizes(assignment, of)) <= 1 for of in dataset.nodes) and np.ptp(total) <= 1
    elif method != "hash":
        assert_bounded(assignment, dataset, balance)


@pytest.mark.parametrize("method", ["metis", "random", "frequency"])
@pytest.mark.parametrize("dataset", [empty(7), star(6), ring(7)], ids=lambda dataset: dataset.name)
def test_no_part_is_empty_with_as_many_nodes_as_parts(dataset, method):
    assert sizes(assign_parts(dataset, 7, method)).tolist() == [1] * 7


# Random and hash


def test_random_follows_the_seed():
    one, same, other = (assign_parts(ring(1000), 7, "random", seed).parts[HOMO_NODE] for seed in (1, 1, 2))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_hash_depends_only_on_type_id_and_seed():
    small, large = assign_parts(ring(50), 4, "hash"), assign_parts(skewed(5000, 9000), 4, "hash")
    assert np.array_equal(small.parts[HOMO_NODE], large.parts[HOMO_NODE][:50])
    ids = np.array([49, 3, 17])
    assert np.array_equal(hash_part(HOMO_NODE, ids, 4, 0), small.parts[HOMO_NODE][ids])
    for node_type, seed in (("paper", 0), (HOMO_NODE, 1)):
        assert np.mean(hash_part(node_type, np.arange(5000), 4, seed) == large.parts[HOMO_NODE]) < 0.3


def test_parts_by_hash_are_about_equal():
    assert np.abs(sizes(assign_parts(empty(70_000), 7, "hash")) - 10_000).max() < 500  # five standard deviations


# Arguments


@pytest.mark.parametrize("method", RUN)
def test_equal_arguments_give_equal_parts(tmp_path, method):
    graph, scratch = skewed(300, 9000), Scratch(tmp_path, 20_000)
    one, same = (assign_parts(graph, 3, method, seed=5, scratch=scratch).parts[HOMO_NODE] for _ in range(2))
    assert np.array_equal(one, same)


@pytest.mark.parametrize(
    ("num_parts", "method", "options", "problem"),
    [
        (
            2,
            "mettis",
            {},
            "unknown partition method 'mettis'; choose one of auto, metis, streaming, frequency, random, hash",
        ),
        (6, "metis", {}, "5 nodes cannot be divided into 6 .*num_parts must be from 1 to the number of nodes"),
        (2, "metis", {"balance": "edges"}, r"unknown balance 'edges'; choose one of nodes, types, seeds, types\+seeds"),
        (2, "metis", {"ballance": "nodes"}, "unknown partition option 'ballance'; the options are balance, fanouts"),
        (2, "frequency", {"fanouts": (5, -2)}, r"fanouts \(5, -2\): expected whole numbers, one per hop"),
        (2, "frequency", {"fanouts": {"paper": (5,)}}, "'paper' is not an edge type; write source__relation__target"),
    ],
)
def test_invalid_arguments_are_refused(num_parts, method, options, problem):
    with pytest.raises(PartitionError, match=problem):
        assign_parts(ring(5), num_parts, method, **options)


def test_options_are_json_and_contain_only_those_of_the_method():
    typed = {("a", "to", "b"): (3, -1), "b__to__a": [2, 2]}
    options = method_options("frequency", balance=None, fanouts=typed)
    assert options == {"balance": "types+seeds", "fanouts": {"a__to__b": [3, -1], "b__to__a": [2, 2]}}
    assert json.loads(json.dumps(options)) == options
    assert fanouts_of(options["fanouts"]) == {("a", "to", "b"): (3, -1), ("b", "to", "a"): (2, 2)}
    assert method_options("metis", fanouts=(3, 3)) == {"balance": "types+seeds"}
    assert method_options("hash", balance="nodes", fanouts=(3, 3)) == {}
    assert assign_parts(ring(5), 2, balance="nodes").options == {"balance": "nodes"}


def test_choices_and_defaults_equal_the_launchers():
    hints, default = typing.get_type_hints(PartitionConfig), PartitionConfig()
    assert typing.get_args(hints["method"]) == (*METHODS, KEEP)
    assert typing.get_args(hints["balance"]) == BALANCES
    assert method_options(default.method) == {"balance": default.balance, CHOSEN_BY: "auto"}


def test_the_launchers_command_is_accepted(monkeypatch):
    made = []
    monkeypatch.setattr("trainer.partition.cli.make_partition", lambda spec, say: made.append(spec))
    how = PartitionConfig(method="frequency", balance="types", clusters=3, seed=2)
    config = ClusterConfig((NodeConfig("a"),), DataConfig("synthetic", partition=how), TrainConfig(fanouts=(7, -1)))
    result = CliRunner().invoke(partition, partitioning(resolve_run(config)).command.argv[4:])
    assert result.exit_code == 0, result.output
    assert (made[0].method, made[0].balance, made[0].clusters, made[0].seed) == ("frequency", "types", 3, 2)
    assert made[0].method_record()["fanouts"] == [7, -1]


# Real data


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_metis_cuts_far_less_of_real_data_than_random():
    train = np.load(DEBIAN / "train_idx.npy").astype(np.int64)
    edges = EdgeData(np.load(DEBIAN / "edge_index.npy"))
    dataset = Dataset.homogeneous("debian", NodeData(63666, splits={"train": train}), edges, "d")
    assignment = assign_parts(dataset, 4)
    assert assignment.edge_cut < 0.25 * assign_parts(dataset, 4, "random").edge_cut
    assert_bounded(assignment, dataset, "types+seeds")


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_balance_of_real_types_costs_little():
    count = json.loads((DEBIAN / "hetero" / "num_nodes.json").read_text())
    nodes = {of: NodeData(n) for of, n in count.items()}
    train = {"train": np.load(DEBIAN / "train_idx.npy").astype(np.int64)}
    nodes["package"] = NodeData(count["package"], splits=train)
    edges = {tuple(p.stem.split("__")): EdgeData(np.load(p)) for p in sorted((DEBIAN / "hetero").glob("*.npy"))}
    dataset = Dataset("debian", nodes, edges, "d", hetero=True)
    free, balanced = (assign_parts(dataset, 4, balance=balance) for balance in ("nodes", "types+seeds"))
    assert_bounded(balanced, dataset, "types+seeds")
    assert sizes(free, "tag").max() > 2 * sizes(free, "tag").mean()
    assert balanced.edge_cut < free.edge_cut + 0.03
