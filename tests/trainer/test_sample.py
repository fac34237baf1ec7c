"""Sampling: the picks of one hop, and the subgraph grown from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from partitions import random_graph, store_of
from trainer.errors import DataError, PartitionError, SettingsError
from trainer.rng import batch_key, mix, shuffled
from trainer.sample import kernels
from trainer.sample.multi_hop import RelabelTable, SampledSubgraph, sample_multi_hop
from trainer.sample.one_hop import LocalGraph
from trainer.sample.types import HopRequest


def sample_one(edge_index, num_nodes, node, fanout, key, *, replace=False, shuffle=0):
    """Original source ids picked for one node of an unpartitioned graph."""
    graph = LocalGraph(store_of(edge_index, num_nodes))
    request = HopRequest(np.array([node]), fanout, shuffle, key, replace)
    return graph.sample_hop(request).src


def star(degree):
    """Node 0 with ``degree`` in-edges from 1…degree."""
    return np.stack([np.arange(1, degree + 1), np.zeros(degree, np.int64)])


def sample(store, seeds, fanouts, key=7, **more):
    return sample_multi_hop(LocalGraph(store), seeds, fanouts, key, RelabelTable(store.manifest.num_nodes), **more)


def test_mixer_is_splitmix64():
    """First outputs of the reference SplitMix64 generator seeded with 0."""
    golden = 0x9E3779B97F4A7C15
    outputs = [int(mix(np.uint64((golden * i) % 2**64))) for i in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_batch_keys_differ_in_every_word():
    words = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    assert len({batch_key(*word) for word in words}) == len(words)


def test_shuffled_is_a_permutation_that_depends_on_the_key():
    orders = [shuffled(1000, key) for key in (1, 2)]
    assert all(np.array_equal(np.sort(order), np.arange(1000)) for order in orders)
    assert (orders[0] != orders[1]).mean() > 0.9
    assert np.array_equal(shuffled(1000, 1), orders[0])


@pytest.mark.parametrize(("degree", "fanout"), [(12, 4), (100, 10), (100, 90), (5000, 20)])
def test_smaller_fanout_is_a_prefix_of_a_larger_one(degree, fanout):
    """Whatever way the shuffle is carried out: whole row, list of displaced places, scratch row."""
    graph, key = star(degree), 99
    picks = sample_one(graph, degree + 1, 0, fanout, key)
    whole = sample_one(graph, degree + 1, 0, -1, key, shuffle=fanout)
    assert len(set(picks)) == fanout
    assert np.array_equal(whole[:fanout], picks)
    assert np.array_equal(np.sort(whole), np.arange(1, degree + 1))


def test_row_taken_whole_keeps_edge_order_when_nobody_wants_a_prefix():
    assert np.array_equal(sample_one(star(9), 10, 0, -1, 3), np.arange(1, 10))


@pytest.mark.parametrize("degree", [12, 80])
def test_picks_are_uniform_and_independent_of_place(degree):
    """Chi-square of every (place, neighbour) count, against uniform and against numpy's sampler."""
    fanout, draws = 4, 6000
    graph = LocalGraph(store_of(star(degree), degree + 1))
    ours = np.zeros((fanout, degree))
    theirs = np.zeros(degree)
    rng = np.random.default_rng(0)
    for step in range(draws):
        picks = graph.sample_hop(HopRequest(np.array([0]), fanout, 0, batch_key(0, 0, 0, step))).src - 1
        ours[np.arange(fanout), picks] += 1
        theirs[rng.choice(degree, fanout, replace=False)] += 1
    assert stats.chisquare(ours.ravel()).pvalue > 1e-4
    assert stats.chi2_contingency(np.stack([ours.sum(axis=0), theirs])).pvalue > 1e-4


def test_pairs_of_picks_are_uniform():
    """Both picks together: all ordered pairs of five neighbours come equally often."""
    graph = LocalGraph(store_of(star(5), 6))
    seen = np.zeros((5, 5))
    for step in range(8000):
        a, b = graph.sample_hop(HopRequest(np.array([0]), 2, 0, batch_key(1, 0, 0, step))).src - 1
        seen[a, b] += 1
    assert np.all(np.diag(seen) == 0)
    assert stats.chisquare(seen[~np.eye(5, dtype=bool)]).pvalue > 1e-4


def test_replacement_draws_independently():
    graph = LocalGraph(store_of(star(6), 7))
    seen = np.zeros((6, 6))
    for step in range(8000):
        a, b = graph.sample_hop(HopRequest(np.array([0]), 2, 0, batch_key(2, 0, 0, step), True)).src - 1
        seen[a, b] += 1
    assert stats.chisquare(seen.ravel()).pvalue > 1e-4


def test_replacement_fills_the_fanout_from_few_neighbours():
    assert len(sample_one(star(2), 3, 0, 10, 5, replace=True)) == 10
    assert len(sample_one(star(2), 3, 1, 10, 5, replace=True)) == 0


def test_hub_with_a_million_neighbours():
    picks = sample_one(star(1_000_000), 1_000_001, 0, 15, 11)
    assert len(set(picks)) == 15 and picks.min() >= 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), hops=st.integers(1, 3))
def test_full_fanout_is_the_exact_neighbourhood(seed, hops):
    edge_index, num_nodes = random_graph(seed, num_nodes=40, num_edges=70)
    store = store_of(edge_index, num_nodes)
    seeds = np.unique(np.random.default_rng(seed).integers(0, num_nodes, 4))
    subgraph = sample(store, seeds, (-1,) * hops, edges=True)
    reached, edges = neighbourhood(edge_index, seeds, hops)
    assert set(subgraph.nodes.tolist()) == reached
    assert sorted(np.concatenate([hop.edge_id for hop in subgraph.hops]).tolist()) == sorted(edges)


def neighbourhood(edge_index, seeds, hops):
    """Nodes within ``hops`` in-edges of the seeds, and the edges on the way."""
    reached, edges, frontier = set(seeds.tolist()), set(), set(seeds.tolist())
    for _ in range(hops):
        taken = np.flatnonzero(np.isin(edge_index[1], sorted(frontier)))
        edges |= set(taken.tolist())
        frontier = set(edge_index[0][taken].tolist()) - reached
        reached |= frontier
    return reached, edges


FANOUTS = [(15, 10, 5), (3, 3), (4, 9, 2), (2, -1, 3), (-1, 2), (1,)]


@pytest.mark.parametrize(
    ("fanouts", "replace"), [(f, False) for f in FANOUTS] + [(f, True) for f in FANOUTS if -1 not in f]
)
def test_every_edge_exists_and_every_row_is_bounded(fanouts, replace):
    edge_index, num_nodes = random_graph(3, num_nodes=300, num_edges=3000)
    store = store_of(edge_index, num_nodes)
    subgraph = sample(store, np.arange(0, 60, 3), fanouts, edges=True, replace=replace)
    for hop in subgraph.hops:
        assert np.array_equal(subgraph.nodes[hop.src], edge_index[0][hop.edge_id])
        assert np.array_equal(subgraph.nodes[hop.dst], edge_index[1][hop.edge_id])
    degree = np.bincount(edge_index[1], minlength=num_nodes)
    for hop, fanout in enumerate(fanouts):
        indptr, indices, num_src = subgraph.block(hop)
        width = degree[subgraph.nodes[: len(indptr) - 1]]
        if fanout >= 0:
            width = np.where(width > 0, fanout, 0) if replace else np.minimum(width, fanout)
        assert np.array_equal(np.diff(indptr), width)
        assert len(indices) == 0 or indices.max() < num_src


@pytest.mark.parametrize("fanouts", FANOUTS)
def test_a_seed_sees_the_same_whatever_else_is_in_its_batch(fanouts):
    """The computation tree below each seed, as original ids, is equal alone, in thirds and together."""
    edge_index, num_nodes = random_graph(5, num_nodes=200, num_edges=2500)
    store = store_of(edge_index, num_nodes)
    seeds = np.arange(0, 30)
    together = trees(sample(store, seeds, fanouts))
    apart = [tree for third in np.split(seeds, 3) for tree in trees(sample(store, third, fanouts))]
    assert together == apart


def trees(subgraph: SampledSubgraph):
    """For each seed the nested neighbour lists that blocks let a model see, as global ids."""
    depth = len(subgraph.fanouts)
    levels = [(int(node),) for node in subgraph.nodes]
    for hop in reversed(range(depth)):
        indptr, indices, _ = subgraph.block(hop)
        levels = [
            (int(subgraph.nodes[row]), levels[row], *(levels[i] for i in indices[indptr[row] : indptr[row + 1]]))
            if hop < depth
            else ()
            for row in range(len(indptr) - 1)
        ]
        levels = [(tree[0], tuple(sorted(map(repr, tree[1:])))) for tree in levels]
    return levels[: subgraph.num_seeds]


def test_duplicate_seeds_keep_their_places_and_see_the_same():
    edge_index, num_nodes = random_graph(6, num_nodes=50, num_edges=400)
    subgraph = sample(store_of(edge_index, num_nodes), np.array([4, 7, 4]), (5, 3))
    assert subgraph.nodes[:3].tolist() == [4, 7, 4]
    first, _, again = trees(subgraph)
    assert first == again


def test_table_is_clean_for_the_next_batch():
    edge_index, num_nodes = random_graph(8, num_nodes=100, num_edges=900)
    table = RelabelTable(num_nodes)
    graph = LocalGraph(store_of(edge_index, num_nodes))
    once = sample_multi_hop(graph, np.arange(10), (4, 4), 1, table)
    again = sample_multi_hop(graph, np.arange(10), (4, 4), 1, table)
    assert np.array_equal(once.nodes, again.nodes) and np.all(table.positions == -1)


def test_graph_without_edges_and_no_seeds():
    store = store_of(np.empty((2, 0), np.int64), 5)
    lonely = sample(store, np.array([3]), (5, 5), edges=True)
    assert lonely.nodes.tolist() == [3] and lonely.num_sampled_nodes == (1, 0, 0)
    nobody = sample(store, np.empty(0, np.int64), (5, 5), edges=True)
    assert len(nobody.nodes) == 0 and nobody.block(0)[0].tolist() == [0]


def test_whole_rows_and_draws_do_not_mix():
    with pytest.raises(SettingsError, match="use -1 for every hop, or for none"):
        sample(store_of(star(3), 4), np.array([0]), (2, -1), replace=True)


def test_seed_that_is_no_node_is_named():
    with pytest.raises(DataError, match="seed 5 at position 1 is no node; ids go from 0 to 4"):
        sample(store_of(np.empty((2, 0), np.int64), 5), np.array([3, 5]), (5,))


def test_foreign_node_and_unknown_attribute_are_refused():
    edge_index, num_nodes = random_graph(1, num_nodes=20, num_edges=50)
    half = store_of(edge_index, num_nodes, num_parts=2, only=[0])
    with pytest.raises(PartitionError, match=r"parts \[1\]; this process holds parts \[0\]"):
        LocalGraph(half).sample_hop(HopRequest(np.array([19]), 2, 0, 0))
    with pytest.raises(PartitionError, match="no node attribute 'color'"):
        LocalGraph(half).gather(np.array([0]), ["color"])


def test_gather_brings_rows_of_any_dtype_and_rank():
    edge_index, num_nodes = random_graph(1, num_nodes=30, num_edges=200)
    attrs = {
        "x": np.arange(30 * 3, dtype=np.float16).reshape(30, 3),
        "flag": np.arange(30) % 2 == 0,
        "cube": np.arange(30 * 4, dtype=np.float64).reshape(30, 2, 2),
    }
    store = store_of(edge_index, num_nodes, num_parts=3, attrs=attrs)
    nodes = np.array([29, 0, 17, 17])
    rows = LocalGraph(store).gather(nodes, ["x", "flag", "cube", "orig_id", "in_degree"])
    orig = rows["orig_id"]
    for name, values in attrs.items():
        assert rows[name].dtype == values.dtype and np.array_equal(rows[name], values[orig])
    assert np.array_equal(rows["in_degree"], np.bincount(edge_index[1], minlength=30)[orig])


def test_kernels_release_the_gil():
    """Two threads at once in a kernel compiled with nogil: the dispatcher says so."""
    assert all(
        kernel.targetoptions["nogil"] for kernel in (kernels.pick_positions, kernels.relabel, kernels.block_rows)
    )
