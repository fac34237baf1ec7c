"""Tests of multi-hop sampling: properties of every batch, extreme graphs, and refused arguments."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partitions import random_graph, store_of, typed_store
from sample_kit import CITES, HOLDS, KINDS, WRITES, orig_edges, orig_nodes, sample, sample_homo, typed_graph
from trainer.core.errors import DataError, SettingsError
from trainer.core.rng import batch_key
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.multi_hop import cut_block, sample_multi_hop
from trainer.sampler.relabel import DirectTable, RelabelTables
from trainer.sampler.settings import check_settings
from trainer.sampler.types import SampleSettings, SeedSet, TimeRule
from trainer.store.manifest import AttrSpec, EdgeSpec, NodeSpec
from trainer.store.part_store import EdgePart, NodePart, Part, PartStore

#: Digests of nodes and blocks drawn by the first version of the sampler, which supported only one node and edge type.
GOLDEN = [
    ((5, 3), False, "320b76f198230e09"),
    ((15, 10, 5), False, "b2711a34225c3a8b"),
    ((2, -1, 3), False, "467e496627df7a65"),
    ((4, 9, 2), False, "89e12ebcd830ee96"),
    ((7, 3), True, "c070dc6750d12f1f"),
    ((-1, 2), False, "31df3a96ca9d0392"),
]


@pytest.mark.parametrize(("fanouts", "replace", "digest"), GOLDEN)
def test_samples_of_homogeneous_graphs_do_not_change(fanouts, replace, digest):
    store = store_of(*random_graph(42, 500, 8000), 3)
    subgraph = sample_homo(store, np.arange(0, 100, 9), fanouts, batch_key(1, 2, 3, 4), replace=replace)
    blocks = [cut_block(subgraph, HOMO_EDGE, hop)[:2] for hop in range(len(fanouts))]
    found = hashlib.sha256()
    for array in (orig_nodes(store, subgraph), subgraph.nodes[HOMO_NODE].per_hop, *sum(blocks, ())):
        found.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    assert found.hexdigest()[:16] == digest


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), hops=st.integers(1, 3))
def test_full_fanout_is_the_exact_neighbourhood(seed, hops):
    edge_index, num_nodes = random_graph(seed, num_nodes=40, num_edges=70)
    store = store_of(edge_index, num_nodes)
    seeds = np.unique(np.random.default_rng(seed).integers(0, num_nodes, 4))
    subgraph = sample_homo(store, seeds, (-1,) * hops, edge_ids=True)
    reached, edges = neighbourhood(edge_index, seeds, hops)
    assert set(orig_nodes(store, subgraph).tolist()) == reached
    assert sorted(orig_edges(store, subgraph).tolist()) == sorted(edges)


def neighbourhood(edge_index, seeds, hops):
    reached, edges, frontier = set(seeds.tolist()), set(), set(seeds.tolist())
    for _ in range(hops):
        taken = np.flatnonzero(np.isin(edge_index[1], sorted(frontier)))
        edges |= set(taken.tolist())
        frontier = set(edge_index[0][taken].tolist()) - reached
        reached |= frontier
    return reached, edges


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from([kind for kind in KINDS if "time" in kind]))
def test_no_edge_is_later_than_its_seed(seed, kind):
    rng = np.random.default_rng(seed)
    graph = typed_graph(seed)
    store, rule = graph.store(2), KINDS[kind]["time"]
    nodes, times = rng.integers(0, 15, 5), rng.integers(-4, 8, 5)
    chosen = SampleSettings(dict.fromkeys(graph.edges, (3, 2)), edge_ids=True, ask_again=False, **KINDS[kind])
    subgraph = sample(store, SeedSet({"p": nodes}, times={"p": times}), chosen, seed)
    for e in (WRITES, CITES, HOLDS):
        edges = orig_edges(store, subgraph, e)
        until = times[subgraph.nodes[e[2]].tree[subgraph.edges[e].dst()]]
        if rule.on == "edge":
            assert np.all(graph.edge_attrs[e]["t"][edges] <= until)
        elif e[0] == "p":
            assert np.all(graph.node_attrs["p"]["time"][graph.edges[e][0][edges]] <= until)


FANOUTS = [(15, 10, 5), (3, 3), (4, 9, 2), (2, -1, 3), (-1, 2), (1,), (5, 3, 4), (0, 3), (3, 0, 3), (2, -1, 0, 4)]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("fanouts", FANOUTS)
def test_every_row_of_every_block_has_its_fanout(fanouts, replace):
    edge_index, num_nodes = random_graph(3, num_nodes=300, num_edges=3000)
    store = store_of(edge_index, num_nodes)
    subgraph = sample_homo(store, np.arange(0, 60, 3), fanouts, replace=replace)
    degree, exists = np.bincount(edge_index[1], minlength=num_nodes), set(zip(*edge_index.tolist(), strict=True))
    nodes = orig_nodes(store, subgraph)
    for hop, fanout in enumerate(fanouts):
        indptr, indices, num_src = cut_block(subgraph, HOMO_EDGE, hop)
        width = degree[nodes[: len(indptr) - 1]]
        if fanout >= 0:
            width = np.where(width > 0, fanout, 0) if replace else np.minimum(width, fanout)
        assert np.array_equal(np.diff(indptr), width)
        assert len(indices) == 0 or indices.max() < num_src
        targets = nodes[np.repeat(np.arange(len(width)), width)]
        assert exists.issuperset(zip(nodes[indices].tolist(), targets.tolist(), strict=True))


@pytest.mark.parametrize("more", [{}, {"replace": True}, {"disjoint": True}])
@pytest.mark.parametrize("fanouts", FANOUTS)
def test_the_sample_of_a_seed_does_not_depend_on_its_batch(fanouts, more):
    # The computation tree of each seed (original ids) is equal alone, in thirds and in the whole batch.
    store = store_of(*random_graph(5, num_nodes=200, num_edges=2500))
    chosen = SampleSettings({HOMO_EDGE: fanouts}, **more)

    def seen(seeds):
        return trees(sample(store, SeedSet({HOMO_NODE: seeds}, trees={HOMO_NODE: seeds}), chosen))

    together, thirds = seen(np.arange(30)), np.split(np.arange(30), 3)
    assert together == [tree for third in thirds for tree in seen(third)]


def trees(subgraph):
    nodes = subgraph.nodes[HOMO_NODE]
    levels = [str(node) for node in nodes.ids]
    for hop in reversed(range(subgraph.num_hops)):
        indptr, indices, _ = cut_block(subgraph, HOMO_EDGE, hop)
        below = [sorted(levels[i] for i in indices[a:b]) for a, b in zip(indptr, indptr[1:], strict=False)]
        levels = [
            hashlib.sha256(repr((int(nodes.ids[row]), levels[row], found)).encode()).hexdigest()
            for row, found in enumerate(below)
        ]
    return levels[: nodes.per_hop[0]]


@pytest.mark.parametrize("ask_again", [True, False])
def test_duplicate_seeds_keep_their_positions_and_samples(ask_again):
    store = store_of(*random_graph(6, num_nodes=50, num_edges=400))
    subgraph = sample_homo(store, [4, 7, 4], (5, 3), ask_again=ask_again)
    assert subgraph.nodes[HOMO_NODE].ids[:3].tolist() == [4, 7, 4]
    first, _, again = trees(subgraph)
    assert first == again


def test_disjoint_trees_share_no_node_and_draw_independently():
    store = store_of(*random_graph(6, num_nodes=50, num_edges=1500))
    subgraph = sample_homo(store, [4, 4, 9], (5, 3), disjoint=True, ask_again=False)
    nodes, edges = subgraph.nodes[HOMO_NODE], subgraph.edges[HOMO_EDGE]
    assert nodes.tree[:3].tolist() == [0, 1, 2]
    assert len(set(zip(nodes.tree.tolist(), nodes.ids.tolist(), strict=True))) == len(nodes.ids)
    assert np.array_equal(nodes.tree[edges.src], nodes.tree[edges.dst()])
    first, second = (set(nodes.ids[edges.src[edges.dst() == seed]].tolist()) for seed in (0, 1))
    assert first != second, "the same node must have another draw in each tree"


@pytest.mark.parametrize("most_direct", [100, 99])
def test_tables_are_clean_for_the_next_batch_even_after_an_error(most_direct):
    store = store_of(*random_graph(8, num_nodes=100, num_edges=900), edge_attrs={"w": -np.ones(900)})
    tables = RelabelTables(store.manifest, most_direct)
    once = sample_homo(store, np.arange(10), (4, 4), 1, tables)
    with pytest.raises(DataError, match="weights must be finite"):
        sample_homo(store, np.arange(10), (4, 4), 1, tables, weight="w")
    again = sample_homo(store, np.arange(10), (4, 4), 1, tables)
    assert np.array_equal(once.nodes[HOMO_NODE].ids, again.nodes[HOMO_NODE].ids)
    table = tables.table(HOMO_NODE)
    assert not (table._table if isinstance(table, DirectTable) else table._slots).any()


@pytest.mark.parametrize("more", [{}, {"disjoint": True}, {"induced": True}, {"replace": True}, {"ask_again": False}])
def test_graph_without_edges_and_no_seeds(more):
    store = store_of(np.empty((2, 0), np.int64), 5)
    lonely = sample_homo(store, [3], (5, 5), edge_ids=True, **more)
    assert lonely.nodes[HOMO_NODE].ids.tolist() == [3] and lonely.nodes[HOMO_NODE].per_hop == (1, 0, 0)
    assert len(lonely.edges[HOMO_EDGE].src) == len(lonely.edges[HOMO_EDGE].edge) == 0
    nobody = sample_homo(store, [], (5, 5), edge_ids=True, **more)
    assert len(nobody.nodes[HOMO_NODE].ids) == 0 and cut_block(nobody, HOMO_EDGE, 0)[0].tolist() == [0]


@pytest.mark.parametrize("more", [{}, {"disjoint": True}, {"induced": True}, {"replace": True}])
def test_self_loops_and_multi_edges(more):
    edge_index = np.array([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    subgraph = sample_homo(store_of(edge_index, 3, 2), [0], (-1, -1), edge_ids=True, ask_again=False, **more)
    assert subgraph.nodes[HOMO_NODE].per_hop == (1, 1, 0)
    assert sorted(subgraph.edges[HOMO_EDGE].edge.tolist()) == [0, 1, 2, 3, 4]


def test_types_without_a_fanout_or_an_edge_are_empty():
    graph = typed_graph(1)
    subgraph = sample(graph.store(), SeedSet({"p": np.array([1])}), SampleSettings({WRITES: (3,)}, edge_ids=True))
    assert list(subgraph.edges) == list(graph.edges) and list(subgraph.nodes) == list(graph.num_nodes)
    assert len(subgraph.nodes["c"].ids) == 0 and len(subgraph.edges[CITES].src) == 0
    assert subgraph.edges[CITES].fanouts == (0,) and cut_block(subgraph, CITES, 0)[0].tolist() == [0, 0]


def test_ids_beyond_32_bits():
    # A graph of more than two billion nodes, of which this process stores the last ten.
    count, start = 2**31 + 20, 2**31 + 10
    spec = store_of(np.zeros((2, 1), np.int64), 2, 2).manifest
    manifest = dataclasses.replace(
        spec,
        nodes={HOMO_NODE: NodeSpec(count, (0, start, count), {}, {}, 0)},
        edges={HOMO_EDGE: EdgeSpec(count, (0, start, count), {"w": AttrSpec("float64", (count,))}, (), 0.0)},
    )
    ring = EdgePart(
        start, np.arange(11), start + (np.arange(10) + 1) % 10, start + np.arange(10), {"w": np.ones(10)}, {}
    )
    part = Part(1, {HOMO_NODE: NodePart(start, start + np.arange(10), {})}, {HOMO_EDGE: ring})
    graph = LocalGraph(PartStore("in memory", manifest, {1: part}, {}, {}))
    for more in ({}, {"disjoint": True}, {"induced": True}, {"weight": "w"}):
        chosen = SampleSettings({HOMO_EDGE: (2, 2)}, edge_ids=True, **more)
        seeds = SeedSet({HOMO_NODE: np.array([start + 8])})
        subgraph = sample_multi_hop(graph, manifest, seeds, chosen, 1, RelabelTables(manifest))
        assert subgraph.nodes[HOMO_NODE].ids.tolist() == [start + 8, start + 9, start]
        assert sorted(subgraph.edges[HOMO_EDGE].edge.tolist()) == [start + 8, start + 9]


def test_an_induced_subgraph_without_hops_has_only_the_seeds():
    store = store_of(np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    subgraph = sample_homo(store, np.array([1, 2, 0]), (), edge_ids=True, induced=True)
    assert orig_nodes(store, subgraph).tolist() == [1, 2, 0]
    assert sorted(orig_edges(store, subgraph).tolist()) == [0, 1]


def test_a_hub_in_every_tree():
    # Twenty seeds around one node with 100,000 neighbours, temporal: each seed has its own draw.
    size = 100_000
    edges = np.concatenate(
        [np.stack([np.arange(size), np.full(size, size)]), np.stack([np.full(20, size), np.arange(20)])], 1
    )
    store = store_of(edges, size + 1, edge_attrs={"t": np.arange(size + 20) % 50})
    seeds = SeedSet({HOMO_NODE: np.arange(20)}, times={HOMO_NODE: np.arange(20) + 20})
    chosen = SampleSettings({HOMO_EDGE: (5, 5)}, time=TimeRule("t", "edge"), edge_ids=True, ask_again=False)
    edges_of = sample(store, seeds, chosen).edges[HOMO_EDGE]
    hubs = edges_of.edge[edges_of.edge >= 0]
    assert edges_of.per_hop[1] == 5 * edges_of.per_hop[0] > 0 and len(set(hubs.tolist())) > 20


def test_an_invalid_seed_is_named():
    store = store_of(np.empty((2, 0), np.int64), 5)
    with pytest.raises(DataError, match="seed 5 at position 1 is not a node; ids go from 0 to 4"):
        sample_homo(store, [3, 5], (5,))
    with pytest.raises(DataError, match="seeds: the graph has no node type 'paper'"):
        sample(store, SeedSet({"paper": np.array([0])}), SampleSettings({HOMO_EDGE: (5,)}))


TIME = TimeRule("time", "node")
REFUSED = [
    ({"weight": "w", "time": TIME}, "weights 'w' and times 'time' cannot be used together"),
    ({"induced": True, "disjoint": True}, "induced subgraphs cannot be disjoint"),
    ({"induced": True, "time": TIME}, "induced subgraphs cannot be temporal"),
    ({"replace": True, "time": TimeRule("time", "node", last=True)}, "leave replace off"),
    ({"top": True}, "neighbors: top takes the heaviest or latest neighbours; give weight_attr or time_attr"),
    ({"top": True, "weight": "w", "time": TimeRule("time", "node", last=True)}, "temporal_strategy: last the latest"),
    ({"top": True, "weight": "w", "replace": True}, "the heaviest neighbours are not drawn"),
    ({"weight": "nothing"}, r"no edge type has the weight attribute 'nothing'; attributes are \['t', 'w'\]"),
    ({"time": TimeRule("w", "edge")}, r"times 'w' of a__writes__p are float32 \[60\]"),
    ({"time": TimeRule("when", "node")}, r"no node type has the time attribute 'when'; attributes are \['time'\]"),
    ({"fanouts": {WRITES: (2, 2), CITES: (1,)}}, "another edge type has 2 hops"),
    ({"fanouts": {WRITES: (-2,)}}, "fanout -2; it must be below"),
    ({"fanouts": {("x", "y", "z"): (1,)}}, r"the graph has no edge type \('x', 'y', 'z'\)"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_invalid_settings_are_refused(more, message):
    manifest = typed_graph(0).store().manifest
    with pytest.raises(SettingsError, match=message):
        check_settings(manifest, SampleSettings(**{"fanouts": {WRITES: (2,)}, **more}))


def test_temporal_sampling_needs_seed_times_and_source_times():
    graph = typed_graph(0)
    chosen = SampleSettings({WRITES: (2,)}, time=TIME)
    with pytest.raises(SettingsError, match="needs a time for each seed of 'p'"):
        sample(graph.store(), SeedSet({"p": np.array([0])}), chosen)
    forgotten = typed_store(graph.num_nodes, graph.edges, node_attrs=graph.node_attrs, time_attrs=())
    with pytest.raises(SettingsError, match="does not store 'time' of p with the edges .*--option time_attrs=time "):
        check_settings(forgotten.manifest, chosen)
