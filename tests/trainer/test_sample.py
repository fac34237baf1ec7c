"""Tests of one-hop sampling: distributions of draws, different fanouts, and conditions on edges."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import scipy

from partitions import random_graph, store_of
from plain_sampler import Rule, pick
from sample_kit import CITES, HOLDS, KINDS, LIKES, WRITES, random_seeds, random_settings, to_global, typed_graph
from trainer.core.errors import DataError, PartitionError
from trainer.core.rng import batch_key, mix, shuffled
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, edge_salt
from trainer.sampler import neighbor_kernels, relabel, weighted_temporal
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import sample_multi_hop
from trainer.sampler.relabel import RelabelTables
from trainer.sampler.types import HopRequest, RowRequest, TimeBound


def star(degree):
    """Return a graph in which node 0 has ``degree`` in-edges from nodes 1…degree."""
    return np.stack([np.arange(1, degree + 1), np.zeros(degree, np.int64)])


def star_graph(degree, weights=None, times=None):
    attrs = {"w": weights, "t": times}
    given = {name: np.asarray(values) for name, values in attrs.items() if values is not None}
    return LocalGraph(store_of(star(degree), degree + 1, edge_attrs=given))


def picked(graph, fanout, key, *, node=0, shuffle=0, **more):
    request = HopRequest(HOMO_EDGE, np.array([node]), fanout, shuffle, key, **more)
    return graph.sample_hops([request])[0].src


def counts_of(graph, degree, fanout, draws, **more):
    """Count how often each neighbour was picked at each position: [fanout, degree]."""
    seen = np.zeros((fanout, degree))
    for step in range(draws):
        seen[np.arange(fanout), picked(graph, fanout, batch_key(0, 0, 0, step), **more) - 1] += 1
    return seen


def test_mixer_is_splitmix64():
    # Compare with the first outputs of the reference SplitMix64 generator seeded with 0.
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
@pytest.mark.parametrize("kind", ["uniform", "filtered", "weighted", "last"])
def test_smaller_fanout_is_a_prefix_of_a_larger_one(degree, fanout, kind):
    # Holds for every implementation: whole row, list of swapped positions, scratch row, heap.
    rng = np.random.default_rng(degree)
    graph = star_graph(degree, weights=rng.random(degree) + 0.1, times=rng.integers(0, 9, degree))
    bound = TimeBound(np.array([9]), "t", "edge", last=kind == "last")
    more = {"weight": "w"} if kind == "weighted" else {} if kind == "uniform" else {"bound": bound}
    picks = picked(graph, fanout, 99, **more)
    whole = picked(graph, -1, 99, shuffle=fanout, **more)
    assert len(set(picks)) == fanout
    assert np.array_equal(whole[:fanout], picks)
    assert np.array_equal(picked(graph, fanout + 1, 99, **more)[:fanout], picks)
    assert np.array_equal(np.sort(whole), np.arange(1, degree + 1))


@pytest.mark.parametrize("fanout", [1, 40, -1])
def test_top_takes_the_heaviest_edges_and_of_equal_weights_the_first(fanout):
    weights = np.random.default_rng(1).integers(0, 5, 300)  # 0: no candidate
    order = [*np.lexsort((np.arange(300), -weights))][: fanout if fanout > 0 else np.count_nonzero(weights)]
    picks = picked(star_graph(300, weights=weights), fanout, 7, shuffle=1, weight="w", top=True)
    assert np.array_equal(picks, np.array(order) + 1)


def test_conditions_that_every_edge_meets_change_no_draw():
    graph = star_graph(300, times=np.zeros(300, np.int64))
    for fanout, replace in ((5, False), (200, False), (-1, False), (7, True)):
        plain = picked(graph, fanout, 4, replace=replace, shuffle=3)
        bound = TimeBound(np.array([0]), "t", "edge")
        for condition in (
            {"bound": bound},
            {"sources": np.arange(301)},
            {"exclude": (np.zeros(1, int), np.zeros(1, int))},
        ):
            assert np.array_equal(picked(graph, fanout, 4, replace=replace, shuffle=3, **condition), plain)


def test_whole_row_keeps_edge_order_when_no_prefix_is_needed():
    graph = star_graph(9, weights=np.arange(1, 10))
    for more in ({}, {"weight": "w"}):
        assert np.array_equal(picked(graph, -1, 3, **more), np.arange(1, 10))


@pytest.mark.parametrize("last", [False, True])
def test_whole_temporal_row_is_sorted_by_time_when_no_prefix_is_needed(last):
    times = np.random.default_rng(3).integers(0, 40, 200)
    bound = TimeBound(np.array([30]), "t", "edge", last=last)
    in_time = np.flatnonzero(times <= 30)
    expected = 1 + in_time[np.argsort(times[in_time], kind="stable")]
    assert np.array_equal(picked(star_graph(200, times=times), -1, 3, bound=bound), expected)


@pytest.mark.parametrize(("degree", "kind"), [(80, "plain"), (12, "filtered")])
def test_picks_are_uniform_at_every_position(degree, kind):
    # Chi-square test of every (position, neighbour) count, against uniform and against numpy's sampler.
    fanout, draws = 4, 3000
    graph = star_graph(degree, times=np.zeros(degree, np.int64))
    bound = TimeBound(np.array([0]), "t", "edge") if kind == "filtered" else None
    ours, theirs, rng = counts_of(graph, degree, fanout, draws, bound=bound), np.zeros(degree), np.random.default_rng(0)
    for _ in range(draws):
        theirs[rng.choice(degree, fanout, replace=False)] += 1
    assert scipy.stats.chisquare(ours.ravel()).pvalue > 1e-4
    assert scipy.stats.chi2_contingency(np.stack([ours.sum(axis=0), theirs])).pvalue > 1e-4


def test_pairs_of_picks_are_uniform():
    # All ordered pairs of five neighbours are equally frequent.
    seen = pair_counts(star_graph(5), 5)
    assert np.all(np.diag(seen) == 0)
    assert scipy.stats.chisquare(seen[~np.eye(5, dtype=bool)]).pvalue > 1e-4


def test_replacement_draws_independently():
    assert scipy.stats.chisquare(pair_counts(star_graph(6), 6, replace=True).ravel()).pvalue > 1e-4


WEIGHTS = np.array([0.0, 1.0, 2.0, 0.5, 4.0, 0.0, 0.25])


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_weighted_replacement_draws_by_weight(dtype):
    weights = (WEIGHTS * 4).astype(dtype)
    seen = pair_counts(star_graph(7, weights=weights), 7, replace=True, weight="w")
    share = weights[weights > 0].astype(np.float64) / weights.sum()
    assert seen[weights == 0].sum() == seen[:, weights == 0].sum() == 0
    both = seen[np.ix_(weights > 0, weights > 0)]
    assert scipy.stats.chisquare(both.ravel(), np.outer(share, share).ravel() * both.sum()).pvalue > 1e-4


def test_weighted_draws_without_replacement_follow_the_urn_model():
    # P(a, then b) = w_a / W * w_b / (W - w_a); each neighbour as often as in numpy's sampler.
    seen = pair_counts(star_graph(7, weights=WEIGHTS), 7, weight="w")
    total = WEIGHTS.sum()
    expected = np.outer(WEIGHTS / total, WEIGHTS) / (total - WEIGHTS)[:, None]
    np.fill_diagonal(expected, 0)
    assert np.all(seen[expected == 0] == 0)
    assert scipy.stats.chisquare(seen[expected > 0], expected[expected > 0] * seen.sum()).pvalue > 1e-4
    rng, theirs = np.random.default_rng(0), np.zeros(7)
    for _ in range(4000):
        theirs[rng.choice(7, 2, replace=False, p=WEIGHTS / total)] += 1
    used = WEIGHTS > 0
    both = np.stack([seen.sum(axis=0) + seen.sum(axis=1), theirs])[:, used]
    assert scipy.stats.chi2_contingency(both).pvalue > 1e-4


def pair_counts(graph, degree, draws=4000, **more):
    seen = np.zeros((degree, degree))
    for step in range(draws):
        a, b = picked(graph, 2, batch_key(2, 0, 0, step), **more) - 1
        seen[a, b] += 1
    return seen


def test_replacement_fills_the_fanout_from_few_neighbours():
    graph = star_graph(2, weights=[0.0, 1.0])
    assert len(picked(graph, 10, 5, replace=True)) == 10
    assert picked(graph, 10, 5, replace=True, weight="w").tolist() == [2] * 10
    assert len(picked(graph, 10, 5, node=1, replace=True)) == 0
    assert picked(graph, -1, 5, replace=True).tolist() == [1, 2], "fanout -1 takes the whole row"


def test_excluded_edges_are_replaced_by_others():
    graph = star_graph(20)
    exclude = np.zeros(17, np.int64), np.arange(1, 18)
    for key in range(50):
        assert sorted(picked(graph, 3, key, exclude=exclude)) == [18, 19, 20]
        assert set(picked(graph, 5, key, replace=True, exclude=exclude)) <= {18, 19, 20}


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_an_invalid_weight_is_named_with_its_edge(wrong):
    weights = np.ones(6)
    weights[4] = wrong
    with pytest.raises(DataError, match=rf"edge 4 of .* has the weight {wrong} in 'w'"):
        picked(star_graph(6, weights=weights), 2, 0, weight="w")


@pytest.mark.parametrize("case", range(40))
def test_one_hop_equals_the_plain_sampler(case):
    # Edge ids in order, for random requests that combine conditions.
    rng = np.random.default_rng(case)
    graph = typed_graph(case, num_edges=80)
    e = (WRITES, CITES, HOLDS, LIKES)[case % 4]
    kind = KINDS[list(KINDS)[case % len(KINDS)]]
    rule = kind.get("time")
    if rule is not None and rule.attr not in (
        graph.node_attrs.get(e[0], {}) if rule.on == "node" else graph.edge_attrs.get(e, {})
    ):
        rule = None
    weight = kind.get("weight") if e in graph.edge_attrs else None
    sources = np.unique(rng.integers(0, graph.num_nodes[e[0]], 12)) if case % 3 == 0 else None
    barred = rng.permutation(80)[:20] if case % 2 else np.empty(0, np.int64)
    top = weight is not None and kind.get("top", False)
    fanout, shuffle, replace = int(rng.choice([-1, 1, 2, 4, 9])), int(rng.integers(0, 4)), kind.get("replace", False)
    nodes = rng.integers(0, graph.num_nodes[e[2]], 20)
    trees, times = rng.integers(0, 99, 20), rng.integers(-3, 8, 20)
    request = HopRequest(
        e, nodes, fanout, shuffle, case ^ edge_salt(e), replace, True, trees,
        TimeBound(times, rule.attr, rule.on, rule.last) if rule else None, weight, top,
        (graph.edges[e][1][barred], graph.edges[e][0][barred]), sources,
    )  # fmt: skip
    sample = LocalGraph(graph.store()).sample_hops([request])[0]
    rows = np.split(graph.store().parts[0].edges[e].orig_id[sample.edge], np.cumsum(sample.counts)[:-1])
    for i, row in enumerate(rows):
        not_these = frozenset(graph.edges[e][0][edge] for edge in barred if graph.edges[e][1][edge] == nodes[i])
        allowed = None if sources is None else frozenset(sources.tolist())
        how = Rule(fanout, shuffle, replace, weight, top, rule, int(times[i]), not_these, allowed)
        assert row.tolist() == pick(graph, e, int(nodes[i]), how, case, int(trees[i]))[0]


HUB = 100_000  # number of neighbours


@cache
def hub():
    return star_graph(HUB, weights=np.ones(HUB, np.float32), times=np.arange(HUB) % 100)


@pytest.mark.parametrize(
    "more",
    [
        {}, {"weight": "w"}, {"weight": "w", "replace": True}, {"bound": TimeBound(np.array([50]), "t", "edge")},
        {"bound": TimeBound(np.array([50]), "t", "edge", True)}, {"sources": np.arange(50_000)},
        {"exclude": (np.zeros(1000, np.int64), np.arange(1000))},
    ],
)  # fmt: skip
def test_hub(more):
    picks = picked(hub(), 15, 11, **more)
    assert len(picks) == 15 and picks.min() >= 1 and len(set(picks)) == 15
    if "bound" in more:
        assert ((picks - 1) % 100).max() <= 50
    if "sources" in more:
        assert picks.max() < 50_000
    if "exclude" in more:
        assert picks.min() >= 1000


@pytest.mark.parametrize("num_parts", [1, 3])
def test_original_ids_of_edges_are_those_of_their_global_ids(num_parts):
    graph, rng = typed_graph(4), np.random.default_rng(num_parts)
    store, types = graph.store(num_parts), tuple(graph.edges)
    access, tables = LocalGraph(store), RelabelTables(store.manifest)
    for kind in (*KINDS.values(), {"induced": True}):
        settings = random_settings(rng, types, **kind)
        seeds = to_global(store, random_seeds(rng, graph, exclude=True))
        for_ids, original = (
            sample_multi_hop(access, store.manifest, seeds, settings, 7, tables, asked) for asked in ((), types)
        )
        for of in types:
            (rows,) = access.gather([RowRequest(of, for_ids.edges[of].edge, ("orig_id",))])
            assert np.array_equal(original.edges[of].edge, rows["orig_id"])
            assert np.array_equal(original.edges[of].src, for_ids.edges[of].src)


def test_unknown_types_and_foreign_nodes_are_refused():
    edge_index, num_nodes = random_graph(1, num_nodes=20, num_edges=50)
    half = LocalGraph(store_of(edge_index, num_nodes, num_parts=2, only=[0], edge_attrs={"x": np.ones((50, 2))}))
    first, last = np.array([0]), np.array([19])

    def hop(nodes, edge_type=HOMO_EDGE, **more):
        return half.sample_hops([HopRequest(edge_type, nodes, 2, 0, 0, **more)])

    with pytest.raises(PartitionError, match=r"ids of parts \[1\] of 'node'; this process holds parts \[0\]"):
        hop(last)
    with pytest.raises(PartitionError, match=r"ids outside 0\.\.19"):
        hop(np.array([20]))
    with pytest.raises(PartitionError, match=r"no edge type \('a', 'b', 'c'\)"):
        hop(first, ("a", "b", "c"))
    with pytest.raises(PartitionError, match="no attribute 'w'"):
        hop(first, weight="w")
    with pytest.raises(PartitionError, match=r"'x' of .* is float64 \[\d+, 2\], not weights"):
        hop(first, weight="x")
    with pytest.raises(PartitionError, match="no time attribute 'when' of the nodes"):
        hop(first, bound=TimeBound(first, "when", "node"))
    with pytest.raises(PartitionError, match="ids of type 'node' outside 0 to 19"):
        hop(first, sources=np.array([3, 20]))
    with pytest.raises(PartitionError, match="no attribute 'color' of 'node'"):
        half.gather([RowRequest(HOMO_NODE, first, ("color",))])
    with pytest.raises(PartitionError, match="no node type 'paper'"):
        half.gather([RowRequest("paper", first, ("x",))])


def test_gather_returns_rows_of_any_dtype_and_rank():
    edge_index, num_nodes = random_graph(1, num_nodes=30, num_edges=200)
    attrs = {
        "x": np.arange(30 * 3, dtype=np.float16).reshape(30, 3),
        "flag": np.arange(30) % 2 == 0,
        "cube": np.arange(30 * 4, dtype=np.float64).reshape(30, 2, 2),
        "nothing": np.empty((30, 0, 4), np.float32),
    }
    edge_attrs = {"w": np.arange(200, dtype=np.uint8), "e": np.arange(600.0).reshape(200, 3)}
    store = store_of(edge_index, num_nodes, num_parts=3, attrs=attrs, edge_attrs=edge_attrs)
    graph, ids = LocalGraph(store), np.array([29, 0, 17, 17])
    nodes, edges = graph.gather(
        [
            RowRequest(HOMO_NODE, ids, (*attrs, "orig_id", "in_degree")),
            RowRequest(HOMO_EDGE, ids * 5, (*edge_attrs, "orig_id")),
        ]
    )
    for found, given in ((nodes, attrs), (edges, edge_attrs)):
        for name, values in given.items():
            assert found[name].dtype == values.dtype and np.array_equal(found[name], values[found["orig_id"]])
    assert np.array_equal(nodes["in_degree"], np.bincount(edge_index[1], minlength=30)[nodes["orig_id"]])
    assert nodes["orig_id"].dtype == edges["orig_id"].dtype == np.int64


def test_in_degree_counts_every_edge_type_that_ends_there():
    graph = typed_graph(4)
    store = graph.store()
    names = ("in_degree", "in_degree_without_loops")
    rows = LocalGraph(store).gather([RowRequest(of, np.arange(n), names) for of, n in graph.num_nodes.items()])
    for of, found in zip(graph.num_nodes, rows, strict=True):
        ends = np.concatenate([np.empty(0, int), *(index[1] for e, index in graph.edges.items() if e[2] == of)])
        assert np.array_equal(found["in_degree"], np.bincount(ends, minlength=graph.num_nodes[of]))


@pytest.mark.parametrize("num_parts", [1, 3])
def test_degrees_without_loops_leave_out_each_edge_of_a_node_to_itself(num_parts):
    edge_index = np.random.default_rng(2).integers(0, 9, (2, 120))  # about 13 loops, some of them twice
    graph = LocalGraph(store_of(edge_index, 12, num_parts=num_parts))
    (rows,) = graph.gather([RowRequest(HOMO_NODE, np.arange(12), ("orig_id", "in_degree_without_loops"))])
    kept = edge_index[1, edge_index[0] != edge_index[1]]
    assert np.array_equal(rows["in_degree_without_loops"], np.bincount(kept, minlength=12)[rows["orig_id"]])


@pytest.mark.parametrize("num_parts", [1, 3])
def test_edges_are_found(num_parts):
    edge_index, num_nodes = random_graph(2, num_nodes=40, num_edges=300)
    store = store_of(edge_index, num_nodes, num_parts)
    graph = LocalGraph(store)
    gid = store.to_global(HOMO_NODE, np.arange(num_nodes))
    assert np.array_equal(np.stack(graph.endpoints(HOMO_EDGE, np.arange(300))), edge_index)
    src, dst = np.repeat(np.arange(40), 40), np.tile(np.arange(40), 40)
    exists = np.zeros((40, 40), bool)
    exists[edge_index[0], edge_index[1]] = True
    assert np.array_equal(graph.has_edges(HOMO_EDGE, gid[src], gid[dst]), exists[src, dst])
    assert len(graph.has_edges(HOMO_EDGE, src[:0], dst[:0])) == 0


def test_kernels_release_the_gil():
    # Two threads run a compiled nogil kernel at once; the dispatcher's options confirm nogil.
    used = (
        neighbor_kernels.draw_edges,
        neighbor_kernels.relabel,
        neighbor_kernels.block_rows,
        weighted_temporal.pick_candidates,
        relabel._relabel_pairs, neighbor_kernels.find_edges, neighbor_kernels.take_rows,
    )  # fmt: skip
    assert all(kernel.targetoptions["nogil"] for kernel in used)
