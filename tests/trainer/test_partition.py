"""Tests of writing partitions: the parts together hold the whole graph, for all graphs and methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fast_cases import fast_grid
from graphs import bipartite, empty, graph, odd, ring, skewed, star
from partition_kit import assert_sound, assert_whole, by_hand, odd_types, with_nodes, written
from trainer.core.errors import PartitionError
from trainer.partition.cut import relabel
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.store.manifest import manifest_digest, read_manifest
from trainer.store.part_store import open_parts

GRAPHS = {
    "ring": lambda: ring(23),
    "star": lambda: star(40),
    "skewed": lambda: skewed(200, 3000),
    "empty": lambda: empty(9),
    "odd": odd,
    "one node": lambda: graph([(0, 0)], 1),
    "bipartite": bipartite,
    "odd types": odd_types,
}


@pytest.mark.parametrize(("name", "num_parts", "method"), fast_grid(GRAPHS, [1, 2, 5], ["metis", "hash"], share=2))
def test_the_parts_together_hold_the_whole_graph(tmp_path, name, num_parts, method):
    dataset = GRAPHS[name]()
    if num_parts > dataset.num_nodes:
        with pytest.raises(PartitionError, match=f"1 nodes cannot be divided into {num_parts} non-empty parts"):
            written(dataset, tmp_path / "parts", num_parts, method)
        return
    assignment = assign_parts(dataset, num_parts, method)
    made = write_partition(dataset, assignment, tmp_path / "parts")
    assert_whole(tmp_path / "parts", dataset, assignment)
    assert_sound(tmp_path / "parts")
    assert made == read_manifest(tmp_path / "parts") and made.hetero == dataset.hetero


def test_an_empty_part_can_be_written_and_opened(tmp_path):
    dataset = odd()
    assignment = by_hand(dataset, [0, 2, 2, 0, 0, 2, 2, 2, 0, 0], 4)
    write_partition(dataset, assignment, tmp_path / "parts")
    assert_whole(tmp_path / "parts", dataset, assignment)
    assert_sound(tmp_path / "parts")
    nodes = [part.nodes["node"].num_nodes for part in open_parts(tmp_path / "parts").parts.values()]
    assert nodes == [5, 0, 5, 0]


def test_a_part_may_be_empty_for_one_type_only(tmp_path):
    dataset = bipartite()
    assignment = by_hand(dataset, {"author": [1] * 4, "paper": [0, 0, 1, 2, 2, 0], "venue": [2, 2]}, 3)
    write_partition(dataset, assignment, tmp_path / "parts")
    assert_whole(tmp_path / "parts", dataset, assignment)
    assert_sound(tmp_path / "parts")
    parts = open_parts(tmp_path / "parts").parts
    assert [parts[p].nodes["author"].num_nodes for p in range(3)] == [0, 4, 0]
    assert [parts[p].edges["author", "writes", "paper"].num_edges for p in range(3)] == [5, 0, 2]


def test_files_and_arrays_of_one_type(tmp_path):
    # Row v of an edge attribute belongs to edge v; source times are stored with the edges.
    dataset = bipartite()
    dataset = with_nodes(dataset, "paper", attrs={"time": np.arange(6) * 10})
    assignment = by_hand(dataset, {"author": [0] * 4, "paper": [0, 0, 0, 1, 1, 1], "venue": [0, 0]}, 2)
    write_partition(dataset, assignment, tmp_path / "parts")
    cites = open_parts(tmp_path / "parts").parts[1].edges["paper", "cites", "paper"]
    assert cites.orig_id.tolist() == [3, 4] and cites.start == 3
    assert cites.attrs["edge_attr"].tolist() == [[6, 7], [8, 9]]
    assert cites.src_times["time"].tolist() == [50, 40]
    written_by = read_manifest(tmp_path / "parts").edges
    assert {of[1]: spec.src_times for of, spec in written_by.items()} == {
        "writes": (), "cites": ("time",), "written_by": ("time",),
    }  # fmt: skip


def test_bfloat16_is_named_in_the_manifest_and_kept_as_bits(tmp_path):
    dataset = odd_types()
    folder = written(dataset, tmp_path / "parts")
    attrs = read_manifest(folder).nodes["v-1.0"].attrs
    assert attrs["half"].dtype == "bfloat16" and attrs["half"].stored == np.uint16 and attrs["half"].shape == (40, 3)
    entries = {entry.path: entry for entry in read_manifest(folder).files}
    assert entries["part0/nodes/v-1.0/attrs/half.npy"].dtype == "uint16"


def test_graph_attributes_of_any_rank(tmp_path):
    attrs = {"scale": np.array(2.5), "names": np.arange(6, dtype=np.uint8).reshape(2, 3), "none": np.zeros((0, 4))}
    dataset = replace(ring(8), graph_attrs=attrs)
    folder = written(dataset, tmp_path / "parts")
    assert_sound(folder)
    found = open_parts(folder).graph_attrs
    assert {name: values.tolist() for name, values in found.items()} == {
        "scale": 2.5, "names": [[0, 1, 2], [3, 4, 5]], "none": [],
    }  # fmt: skip


def test_only_integer_vectors_are_times(tmp_path):
    # A float or a matrix named `time` is an ordinary attribute.
    for values in (np.linspace(0, 1, 8), np.ones((8, 2), np.int64)):
        dataset = with_nodes(ring(8), "node", attrs={"time": values})
        folder = written(dataset, tmp_path / f"parts{values.ndim}")
        (edges,) = read_manifest(folder).edges.values()
        assert edges.src_times == ()
    assert_sound(folder)


def test_one_part_needs_no_table_of_ids(tmp_path):
    folder = written(odd_types(), tmp_path / "parts", 1)
    store = open_parts(folder)
    assert list(folder.rglob("global_id.npy")) == [] and store.global_ids == {}
    assert store.to_global("v-1.0", np.array([7, 3])).tolist() == [7, 3]
    assert np.array_equal(store.seeds("v-1.0", "train"), odd_types().nodes["v-1.0"].splits["train"])


def test_original_ids_map_to_global_ids(tmp_path):
    dataset = ring(6)
    write_partition(dataset, by_hand(dataset, [1, 0, 1, 0, 1, 0], 2), tmp_path / "parts")
    assert open_parts(tmp_path / "parts").to_global("node", np.arange(6)).tolist() == [3, 0, 4, 1, 5, 2]


def test_some_parts_can_be_opened_without_the_others(tmp_path):
    folder = written(skewed(100, 900), tmp_path / "parts", 3)
    for path in sorted((folder / "part1").rglob("*.npy")):
        path.unlink()
    assert list(open_parts(folder, [2, 0]).parts) == [2, 0]
    with pytest.raises(PartitionError, match=r"part1/nodes/node/orig_id.npy is missing"):
        open_parts(folder)
    with pytest.raises(PartitionError, match="no part 3; the folder has 3 parts"):
        open_parts(folder, [3])


@pytest.mark.parametrize("make", [lambda: skewed(100, 2000), odd_types])
def test_edges_sorted_by_way_of_files_are_the_same(tmp_path, make):
    dataset = make()
    assignment = assign_parts(dataset, 5)
    write_partition(dataset, assignment, tmp_path / "one")
    write_partition(dataset, assignment, tmp_path / "several", memory=200)
    assert manifest_digest(tmp_path / "one") == manifest_digest(tmp_path / "several")
    assert_sound(tmp_path / "several")


def test_attributes_gathered_in_several_chunks_are_the_same(tmp_path, monkeypatch):
    dataset = odd_types()
    one = written(dataset, tmp_path / "one", 2)
    monkeypatch.setattr("trainer.store.npy._CHUNK_BYTES", 40)
    several = written(dataset, tmp_path / "several", 2)
    assert manifest_digest(one) == manifest_digest(several)


def test_ids_are_stored_in_the_smallest_dtype(tmp_path):
    part = open_parts(written(ring(8), tmp_path / "parts")).parts[0]
    nodes, edges = part.nodes["node"], part.edges["node", "to", "node"]
    small = (nodes.orig_id, edges.indices, edges.orig_id)
    assert [a.dtype.name for a in (*small, edges.indptr)] == ["int32"] * 3 + ["int64"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_relabelling_is_a_permutation_in_original_order(data):
    num_parts = data.draw(st.integers(1, 6))
    part = np.array(data.draw(st.lists(st.integers(0, num_parts - 1), min_size=1, max_size=60)), np.int32)
    labels = relabel(part, num_parts)
    assert np.array_equal(labels.orig_id[labels.global_id], np.arange(len(part)))
    for part_id in range(num_parts):
        assert labels.owned(part_id).tolist() == np.flatnonzero(part == part_id).tolist()


@pytest.mark.parametrize("method", ["metis", "random", "hash"])
def test_equal_arguments_give_equal_bytes(tmp_path, method):
    folders = [written(skewed(300, 9000), tmp_path / f"{method}{turn}", 3, method, seed=5) for turn in range(2)]
    assert manifest_digest(folders[0]) == manifest_digest(folders[1])


def test_method_options_and_time_attributes_change_the_partition(tmp_path):
    dataset = ring(10)
    parts = [0, 1] * 5
    made = [
        write_partition(data, by_hand(data, parts, 2, **options), tmp_path / f"parts{turn}").fingerprint
        for turn, (data, options) in enumerate(
            [(dataset, {}), (dataset, {"balance": "types"}), (dataset, {"clusters": 2}),
             (replace(dataset, time_attrs=("age",)), {}), (replace(dataset, fingerprint="other"), {})]
        )
    ]  # fmt: skip
    assert len(set(made)) == 5
    assert read_manifest(tmp_path / "parts1").options == {"balance": "types"}
