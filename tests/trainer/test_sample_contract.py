"""Tests that multi-hop sampling equals the plain Python sampler, and gives the same samples for any number of parts."""

from __future__ import annotations

import numpy as np
import pytest

from plain_sampler import plain_sample
from sample_kit import (
    KINDS,
    names,
    orig_edges,
    orig_nodes,
    random_seeds,
    random_settings,
    sample,
    some_key,
    typed_graph,
)
from trainer.sampler.multi_hop import cut_block

CASES = [(kind, case) for kind in KINDS for case in range(6)]


def situation(kind, case):
    rng = np.random.default_rng(case)
    graph = typed_graph(case)
    settings = random_settings(rng, graph.edges, ask_again=case % 2 == 0, **KINDS[kind])
    return graph, random_seeds(rng, graph, exclude=case % 3 > 0), settings, some_key(case)


def per_level(subgraph, store, of):
    bounds = np.cumsum([0, *subgraph.nodes[of].per_hop])
    all_names = names(store, subgraph, of)
    return [all_names[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_same_nodes_and_edges_as_the_plain_sampler(kind, case):
    graph, seeds, settings, key = situation(kind, case)
    store = graph.store()
    subgraph = sample(store, seeds, settings, key)
    plain = plain_sample(graph, seeds, settings, key)
    for of in graph.num_nodes:
        levels = per_level(subgraph, store, of)
        assert levels[0] == plain.levels[of][0]
        assert [sorted(level) for level in levels[1:]] == plain.levels[of][1:]
    check = check_blocks if settings.ask_again else check_expansion
    for e in graph.edges:
        check(graph, store, subgraph, plain, e)


def check_blocks(graph, store, subgraph, plain, e):
    src_names, dst_names = names(store, subgraph, e[0]), names(store, subgraph, e[2])
    for hop in range(subgraph.num_hops):
        indptr, indices, num_src = cut_block(subgraph, e, hop)
        assert len(indptr) - 1 == len(plain.names_until(e[2], hop))
        assert num_src == len(plain.names_until(e[0], hop + 1))
        assert len(indices) == 0 or indices.max() < num_src
        for target in range(len(indptr) - 1):
            edges, whole = plain.rows[e, hop].get(dst_names[target], ([], True))
            wanted = [(dst_names[target][0], int(graph.edges[e][0][edge])) for edge in edges]
            found = [src_names[i] for i in indices[indptr[target] : indptr[target + 1]]]
            assert (sorted(found) == sorted(wanted)) if whole else (found == wanted)


def check_expansion(graph, store, subgraph, plain, e):
    """Assert that the edges of type ``e`` are those of ``plain``, in the same order."""
    # assumes that every node is expanded once, in the hop after the one that found it
    edges = subgraph.edges[e]
    targets, found = names(store, subgraph, e[2]), orig_edges(store, subgraph, e).tolist()
    wanted, per_hop = [], []
    for hop in range(subgraph.num_hops):
        first = sum(subgraph.nodes[e[2]].per_hop[:hop])
        rows = plain.rows[e, hop]
        asked = targets[first : first + subgraph.nodes[e[2]].per_hop[hop]]
        hop_edges = [(edge, first + i) for i, name in enumerate(asked) for edge in rows.get(name, ([], True))[0]]
        wanted += hop_edges
        per_hop.append(len(hop_edges))
    assert list(zip(found, edges.dst().tolist(), strict=True)) == wanted
    assert edges.per_hop == tuple(per_hop)
    assert np.array_equal(orig_nodes(store, subgraph, e[0])[edges.src], graph.edges[e][0][found])


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_several_parts_give_the_same_batch_as_one(kind, case):
    graph, seeds, settings, key = situation(kind, case)
    whole, cut = graph.store(), graph.store(3)
    empty_part = graph.store(4, {of: np.arange(n) % 3 for of, n in graph.num_nodes.items()})
    assert_same(graph, whole, sample(whole, seeds, settings, key), cut, sample(cut, seeds, settings, key))
    assert_same(graph, whole, sample(whole, seeds, settings, key), empty_part, sample(empty_part, seeds, settings, key))


def assert_same(graph, store, subgraph, other_store, other):
    for of in graph.num_nodes:
        assert np.array_equal(orig_nodes(store, subgraph, of), orig_nodes(other_store, other, of))
        assert subgraph.nodes[of].per_hop == other.nodes[of].per_hop
        assert np.array_equal(subgraph.nodes[of].tree, other.nodes[of].tree)
    for e in graph.edges:
        mine, theirs = subgraph.edges[e], other.edges[e]
        assert np.array_equal(orig_edges(store, subgraph, e), orig_edges(other_store, other, e))
        assert np.array_equal(mine.src, theirs.src) and np.array_equal(mine.row_count, theirs.row_count)
        assert np.array_equal(mine.row_begin, theirs.row_begin) and mine.per_hop == theirs.per_hop


@pytest.mark.parametrize("case", range(8))
@pytest.mark.parametrize("num_parts", [1, 3])
def test_induced_subgraph_holds_all_edges_between_its_nodes(case, num_parts):
    rng = np.random.default_rng(case)
    graph = typed_graph(case)
    store = graph.store(num_parts)
    seeds = random_seeds(rng, graph, exclude=case % 2 > 0)
    settings = random_settings(rng, graph.edges, induced=True, weight="w" if case % 3 == 0 else None)
    seeds.nodes["p"][:] = np.arange(4)  # without repeats: an edge between copies would be counted for each copy
    seeds.nodes["a"][:] = [5, 7]
    subgraph = sample(store, seeds, settings, case)
    drawn = plain_sample(graph, seeds, settings, case)
    for of in graph.num_nodes:
        assert sorted(names(store, subgraph, of)) == sorted(name for level in drawn.levels[of] for name in level)
    for e, (src, dst) in graph.edges.items():
        inside = np.isin(src, orig_nodes(store, subgraph, e[0])) & np.isin(dst, orig_nodes(store, subgraph, e[2]))
        barred = set(zip(*(ids.tolist() for ids in seeds.exclude.get(e, (src[:0], src[:0]))), strict=True))
        wanted = [edge for edge in np.flatnonzero(inside) if (dst[edge], src[edge]) not in barred]
        edges = subgraph.edges[e]
        assert sorted(orig_edges(store, subgraph, e).tolist()) == wanted and edges.per_hop == ()
        assert np.array_equal(orig_nodes(store, subgraph, e[2])[edges.dst()], dst[orig_edges(store, subgraph, e)])
        indptr, indices, num_src = cut_block(subgraph, e, 0)
        assert np.array_equal(indices, edges.src) and num_src == len(subgraph.nodes[e[0]].ids)
        assert indptr[-1] == len(wanted) and len(indptr) == len(subgraph.nodes[e[2]].ids) + 1


@pytest.mark.parametrize("kind", ["uniform", "replace", "weighted"])
def test_nodes_are_numbered_by_first_appearance(kind):
    # Numbering goes edge type by edge type, in the manifest's order, within each hop.
    graph, seeds, settings, key = situation(kind, 3)
    store = graph.store()
    subgraph = sample(store, seeds, settings, key)
    seen = {of: subgraph.nodes[of].per_hop[0] for of in graph.num_nodes}
    begins = dict.fromkeys(graph.edges, 0)
    for hop in range(subgraph.num_hops):
        for e in store.manifest.edges:
            edges = subgraph.edges[e]
            for position in edges.src[begins[e] : begins[e] + edges.per_hop[hop]].tolist():
                assert position <= seen[e[0]]
                seen[e[0]] = max(seen[e[0]], position + 1)
            begins[e] += edges.per_hop[hop]
        assert seen == {of: sum(nodes.per_hop[: hop + 2]) for of, nodes in subgraph.nodes.items()}
