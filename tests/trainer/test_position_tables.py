"""Tests of position tables, which number the nodes of a batch: both kinds give the same batches."""

import numpy as np
import pytest

from partitions import random_graph, store_of
from sample_kit import KINDS, random_seeds, random_settings, sample, sample_homo, typed_graph
from trainer.sampler.relabel import MOST_DIRECT, MOST_HASHED, DirectTable, HashTable, RelabelTables, make_table
from trainer.sampler.row_index import IdIndex, SourceCodes, locate


def played(table, batches):
    """Number the nodes of each batch with ``table``.

    Returns two arrays for each hop: the position of each source in the batch, and the ids that are new in the batch.
    batches: pairs (seeds, sources of each hop).
    """
    seen = []
    for seeds, hops in batches:
        table.enter(seeds)
        count, chunks = len(seeds), [seeds]
        for src in hops:
            local, new = np.full(len(src), -1, np.int32), np.full(len(src), -1, np.int64)
            found = table.relabel(src, count, local, new)
            seen += [local, new[:found].copy()]
            chunks.append(new[:found])
            count += found
        table.clean(chunks)
        assert not (table._table if isinstance(table, DirectTable) else table._slots).any()
    return seen


def random_batches(seed, num_nodes, dtype):
    rng = np.random.default_rng(seed)

    def ids(most):
        return rng.integers(0, num_nodes, rng.integers(0, most))

    return [(ids(most), [ids(3 * most).astype(dtype) for _ in range(3)]) for most in (40, 5000, 7, 20_000, 300)]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_nodes", [1, 90, 5_000, 300_000])
def test_both_tables_give_the_same_positions(num_nodes, dtype):
    for seed in range(2):
        batches = random_batches(seed, num_nodes, dtype)
        direct, hashed = played(DirectTable(num_nodes), batches), played(HashTable(), batches)
        assert all(np.array_equal(a, b) for a, b in zip(direct, hashed, strict=True))


def test_positions_are_those_of_first_appearance_up_to_the_largest_id():
    last = MOST_HASHED - 1
    seeds, src = np.array([last, 0, last]), np.array([7, last, 2**31, 7, 0, 2**31 - 1])
    local, new = played(HashTable(), [(seeds, [src])])
    assert local.tolist() == [3, 0, 4, 3, 1, 5]
    assert new.tolist() == [7, 2**31, 2**31 - 1]


def test_a_table_is_reused_for_small_batches_and_grows_for_large_ones():
    table, rng = HashTable(), np.random.default_rng(0)
    small, large = rng.permutation(10**6)[:500], rng.permutation(10**6)[:100_000]
    sizes = []
    for ids in (small, large, small):
        played(table, [(ids[:10], [ids])])
        sizes.append(len(table._slots))
    assert sizes == [4096, 1 << 18, 1 << 18]


@pytest.mark.parametrize("num_nodes, kind", [(MOST_DIRECT, DirectTable), (MOST_DIRECT + 1, HashTable)])
def test_the_kind_of_table_depends_on_the_number_of_nodes(num_nodes, kind):
    assert type(make_table(num_nodes)) is kind


def test_too_many_nodes_for_a_hash_entry_use_the_direct_table():
    assert type(make_table(100, most_direct=99)) is HashTable
    assert type(make_table(MOST_HASHED, most_direct=99)) is HashTable


def assert_equal(one, other):
    assert one.nodes.keys() == other.nodes.keys() and one.edges.keys() == other.edges.keys()
    for of, nodes in one.nodes.items():
        assert nodes.per_hop == other.nodes[of].per_hop and np.array_equal(nodes.ids, other.nodes[of].ids)
    for of, edges in one.edges.items():
        again = other.edges[of]
        assert np.array_equal(edges.src, again.src) and np.array_equal(edges.edge, again.edge)
        assert np.array_equal(edges.row_begin, again.row_begin) and np.array_equal(edges.row_count, again.row_count)


@pytest.mark.parametrize("kind", KINDS)
def test_typed_graphs_are_sampled_alike_with_either_table(kind):
    for case in range(4):
        rng = np.random.default_rng(case)
        graph = typed_graph(case, num_nodes=(40, 60, 3), num_edges=400)
        store, seeds = graph.store(1 + case % 3), random_seeds(rng, graph, exclude=case % 3 > 0)
        induced = {"induced": True} if kind == "uniform" and case % 2 else {}
        settings = random_settings(rng, graph.edges, **KINDS[kind], **induced)
        tables = [
            RelabelTables(store.manifest, most_direct=most) for most in (MOST_DIRECT, 0, 50)
        ]  # 50: a mixture of both kinds
        for key in range(3):
            direct, *others = [sample(store, seeds, settings, key, each) for each in tables]
            for other in others:
                assert_equal(direct, other)


def test_large_batches_are_sampled_alike_with_either_table():
    store = store_of(*random_graph(1, num_nodes=50_000, num_edges=400_000))
    tables = [RelabelTables(store.manifest, most_direct=most) for most in (MOST_DIRECT, 0)]
    for seeds, fanouts in ((range(3000), (5, 5)), (range(9), (2,)), (range(100), (8, 8, 8))):
        direct, hashed = [sample_homo(store, seeds, fanouts, 7, each, edge_ids=True) for each in tables]
        assert_equal(direct, hashed)


@pytest.mark.parametrize("base", [0, MOST_HASHED - 500])
def test_an_id_index_finds_the_last_place_of_an_id(base) -> None:
    # Ids of 2**32 and more are not found: their rows are requested again.
    rng, codes, num_ids = np.random.default_rng(0), SourceCodes(2, 3), 1000
    arrays = [base + rng.integers(0, num_ids, 200) for _ in range(3)]
    index = IdIndex.of(arrays[:2]).with_more([arrays[2]]) or IdIndex.of(arrays)
    expected = {
        int(number): (codes.held(which), row)
        for which, ids in enumerate(arrays) for row, number in enumerate(ids) if number < MOST_HASHED
    }  # fmt: skip
    ids = base + np.arange(num_ids)
    of_part = codes.of_parts(np.array([-1, 0, 1, -1]), 0)
    wrong, found = locate(ids, np.array([0, base, base + num_ids]), of_part, codes, None, index)
    placed = {
        int(ids[at]): (source, int(row))
        for source, rows in found.items() if source < codes.first_host
        for row, at in zip(rows.rows, rows.at, strict=True)
    }  # fmt: skip
    assert wrong == -1 and placed == expected
