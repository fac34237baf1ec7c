"""Tests of homogeneous datasets from folders of arrays: the resulting arrays, and the error for every mistake."""

from __future__ import annotations

import re

import numpy as np
import pytest

from data_kit import save_arrays
from graphs import DEBIAN, NO_DEBIAN
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE
from trainer.data.edges import symmetric_adjacency, undirected
from trainer.data.options import SourceOptions, parse_options
from trainer.sources.load import dataset_fingerprint, load_dataset


def save_graph(folder, **changes):
    """Write a graph of six nodes as a folder. ``changes``: arrays to replace, by name; None omits one."""
    arrays = {
        "edge_index": np.array([[0, 1, 2, 4, 4], [1, 2, 0, 3, 3]], np.int32),
        "x": np.arange(12, dtype=np.float16).reshape(6, 2),
        "y": np.array([0, 1, 2, 0, 1, -1], np.int16),
        "train_idx": np.array([4, 0]),
        "val_mask": np.array([0, 0, 1, 1, 0, 0], bool),
    }
    return save_arrays(folder, **(arrays | changes))


def nodes_of(dataset):
    return dataset.nodes["node"]


def test_folder_of_arrays(tmp_path):
    dataset = load_dataset("file", save_graph(tmp_path / "six", year=np.arange(6), title=np.array("six")))
    nodes = nodes_of(dataset)
    assert (dataset.name, dataset.num_nodes, dataset.num_edges, nodes.num_classes) == ("six", 6, 5, 3)
    assert sorted(nodes.attrs) == ["x", "y", "year"] and nodes.attrs["x"].dtype == np.float16
    assert {name: ids.tolist() for name, ids in nodes.splits.items()} == {"train": [4, 0], "val": [2, 3]}
    assert not dataset.hetero and dataset.graph_attrs == {}
    assert (
        len(dataset.notes) == 1
        and "title.npy: left out, <U3 [] belongs neither to nodes nor to edges" in dataset.notes[0]
    )


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_features_are_normalized_when_asked(dtype, tmp_path):
    x = np.array([[0, 0], [1, 3], [-1, 1], [2, 0], [0, 5], [8, 8]], dtype)
    dataset = load_dataset("file", save_graph(tmp_path, x=x), {"normalize_features": True})
    found = nodes_of(dataset).attrs["x"]
    assert found.dtype == (dtype if dtype == np.float16 else np.float32)
    assert found.tolist() == [[0, 0], [0.25, 0.75], [-0.5, 0.5], [1, 0], [0, 1], [0.5, 0.5]]


def test_attributes_go_to_nodes_edges_or_the_graph_by_their_rows(tmp_path):
    arrays = {
        "edge_attr": np.ones((5, 2, 3), np.complex64), "kind": np.arange(5, dtype=np.uint8),
        "picture": np.zeros((6, 2, 2), np.float16), "seen": np.ones(6, bool), "centre": np.arange(3.0),
        "edge_label_index": np.zeros((2, 4), int), "scale": np.array(2.5),
    }  # fmt: skip
    dataset = load_dataset("file", save_graph(tmp_path, **arrays))
    assert {name: values.shape for name, values in dataset.edges[HOMO_EDGE].attrs.items()} == {
        "edge_attr": (5, 2, 3), "kind": (5,),
    }  # fmt: skip
    assert sorted(nodes_of(dataset).attrs) == ["picture", "seen", "x", "y"]
    assert sorted(dataset.graph_attrs) == ["centre", "edge_label_index", "scale"] and not dataset.notes
    assert dataset.edges[HOMO_EDGE].attrs["edge_attr"].dtype == np.complex64


def test_names_decide_when_nodes_and_edges_are_equally_many(tmp_path):
    ring = np.stack((np.arange(6), np.roll(np.arange(6), 1)))
    arrays = {"edge_index": ring, "edge_kind": np.arange(6), "age": np.arange(6)}
    dataset = load_dataset("file", save_graph(tmp_path, **arrays))
    assert list(dataset.edges[HOMO_EDGE].attrs) == ["edge_kind"] and "age" in nodes_of(dataset).attrs


def test_a_large_array_of_the_graph_is_left_out(tmp_path):
    dataset = load_dataset("file", save_graph(tmp_path, table=np.zeros((3, 1_000_000))))
    assert dataset.graph_attrs == {} and "table.npy: left out, float64 [3, 1000000] has no row" in dataset.notes[0]


def test_undirected_keeps_the_attributes_of_each_direction(tmp_path):
    edges = {"edge_index": np.array([[0, 1, 0, 2, 0], [1, 0, 2, 2, 1]]), "edge_weight": np.array([1, 2, 3, 4, 5])}
    data = load_dataset("file", save_graph(tmp_path, **edges), {"undirected": True}).edges[HOMO_EDGE]
    weights = dict(zip(map(tuple, data.edge_index.T.tolist()), data.attrs["edge_weight"].tolist(), strict=True))
    assert weights == {(0, 1): 1, (1, 0): 2, (0, 2): 3, (2, 0): 3, (2, 2): 4}


TARGETS = {
    "regression": (np.array([0, 1, 0.5, 0, 0, 0]), "0.5 at position 2 is not a whole number"),
    "infinite": (np.array([0, np.inf, 1, 0, 0, 0]), "inf at position 1 is not a whole number"),
    "beyond int64": (np.array([0, 1e19, 1, 0, 0, 0]), "1e.19 at position 1 is not a whole number, or too large"),
    "rounded": (
        np.array([20_000_000.5, 0, 1, 0, 0, 0], np.float32),
        "20000000.0 at position 0 is not a whole number, or too large for one in float32",
    ),
    "multi-label": (np.eye(6, dtype=np.float32), r"its shape is \[6, 6\]"),
    "complex": (np.zeros(6, complex), "its dtype is complex128"),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_other_targets_than_classes_are_kept_with_a_note(tmp_path, kind):
    y, reason = TARGETS[kind]
    dataset = load_dataset("file", save_graph(tmp_path, y=y, train_idx=np.array([0, 5])))
    assert nodes_of(dataset).num_classes == 0 and np.array_equal(nodes_of(dataset).attrs["y"], y)
    assert re.search(rf"y\.npy: kept, but not as class labels: {reason}", dataset.notes[0])


def test_whole_numbers_stay_a_plain_target_when_asked(tmp_path):
    y = np.array([-7, 1990, 2001, 3, 5, -1])
    nodes = nodes_of(load_dataset("file", save_graph(tmp_path, y=y), {"num_classes": 0}))
    assert nodes.num_classes == 0 and nodes.attrs["y"].tolist() == y.tolist()


def test_times_are_integers_one_per_node(tmp_path):
    source = save_graph(tmp_path, year=np.arange(6, dtype=np.int32).reshape(6, 1))
    dataset = load_dataset("file", source, {"time_attrs": "year, time"})
    assert dataset.time_attrs == ("year", "time") and nodes_of(dataset).attrs["year"].shape == (6,)
    assert load_dataset("file", source).time_attrs == ("time",)
    assert load_dataset("file", source, {"time_attrs": "none"}).time_attrs == ()


def test_an_unrequested_time_attribute_may_have_any_dtype(tmp_path):
    source = save_graph(tmp_path, time=np.linspace(0, 1, 6))
    dataset = load_dataset("file", source)
    assert np.array_equal(nodes_of(dataset).attrs["time"], np.linspace(0, 1, 6))
    assert [note for note in dataset.notes if "time.npy" in note] == [
        f"{source}/time.npy: kept as a plain attribute: times are one integer per node, not float64 [6]"
    ]
    assert not any("time.npy" in note for note in load_dataset("file", source, {"time_attrs": "none"}).notes)


def test_npz_in_a_folder_and_alone(tmp_path):
    edge_index = np.array([[0, 1], [1, 0]])
    np.savez(tmp_path / "graph.npz", edge_index=edge_index, x=np.ones((3, 2), np.float32))
    for source in (tmp_path, tmp_path / "graph.npz"):
        dataset = load_dataset("file", str(source))
        assert dataset.num_nodes == 3 and np.array_equal(dataset.edges[HOMO_EDGE].edge_index, edge_index)


def test_number_of_nodes_is_never_guessed_from_edges(tmp_path):
    source = save_graph(tmp_path, x=None, y=None, val_mask=None)
    with pytest.raises(DataError, match="the number of nodes is unknown without x and y; give option num_nodes"):
        load_dataset("file", source)
    assert load_dataset("file", source, {"num_nodes": "9"}).num_nodes == 9


def test_undirected_adds_the_other_direction_once(tmp_path):
    dataset = load_dataset("file", save_graph(tmp_path), {"undirected": "true"})
    assert dataset.edges[HOMO_EDGE].edge_index.T.tolist() == [
        [0, 1],
        [0, 2],
        [1, 0],
        [1, 2],
        [2, 0],
        [2, 1],
        [3, 4],
        [4, 3],
    ]


def test_undirected_keeps_self_loops_once():
    edges = np.array([[2, 0, 2, 1], [2, 1, 2, 0]])
    assert undirected(edges, 3).T.tolist() == [[0, 1], [1, 0], [2, 2]]


def test_symmetric_adjacency_against_scipy():
    sparse = pytest.importorskip("scipy.sparse")
    rng = np.random.default_rng(1)
    edges = rng.integers(50, size=(2, 400))
    indptr, neighbours = symmetric_adjacency(edges, 50)
    matrix = sparse.coo_matrix((np.ones(400), edges), shape=(50, 50)).tolil()
    matrix.setdiag(0)
    expected = (matrix + matrix.T).tocsr() > 0
    for node in range(50):
        assert sorted(neighbours[indptr[node] : indptr[node + 1]]) == sorted(expected[node].indices)


def test_other_byte_orders_are_read_right(tmp_path):
    changes = {"edge_index": np.array([[0, 4], [3, 5]], ">i4"), "train_idx": np.array([4, 0], ">i8")}
    dataset = load_dataset("file", save_graph(tmp_path, **changes), {"undirected": True})
    assert dataset.edges[HOMO_EDGE].edge_index.T.tolist() == [[0, 3], [3, 0], [4, 5], [5, 4]]
    assert nodes_of(dataset).splits["train"].tolist() == [4, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64"])
def test_edge_dtypes_smaller_than_the_number_of_nodes(dtype, tmp_path):
    edges, rows = np.array([[0, 4], [3, 5]], dtype), {"x": np.zeros((400, 2)), "y": np.zeros(400, int)}
    dataset = load_dataset("file", save_graph(tmp_path, edge_index=edges, val_mask=None, **rows), {"undirected": True})
    assert dataset.num_nodes == 400 and dataset.edges[HOMO_EDGE].edge_index.T.tolist() == [
        [0, 3],
        [3, 0],
        [4, 5],
        [5, 4],
    ]


LABELS = np.array([0, 1, 2, 0, 1, 2])

MISTAKES = {
    "no edges": ({"edge_index": None}, {}, "no edge_index; expected integers"),
    "transposed": ({"edge_index": np.zeros((5, 2), int)}, {}, r"\[5, 2\], expected \[2, number of edges\]; transpose"),
    "float edges": ({"edge_index": np.zeros((2, 5))}, {}, "float64, expected integers"),
    "target outside": (
        {"edge_index": np.array([[0, 1, 2], [1, 6, 7]])}, {}, r"target \[1, 1\] is 6, but node ids go from 0 to 5",
    ),
    "negative source": ({"edge_index": np.array([[0, -1], [1, 0]])}, {}, r"source \[0, 1\] is -1"),
    "x and y disagree": ({"y": np.zeros(5, int)}, {}, r"y\.npy: 5 rows, but the graph has 6 nodes"),
    "flat x": ({"x": np.zeros(6)}, {}, r"x\.npy: shape is \[6\], expected \[number of nodes, number of features\]"),
    "several NaN in x": (
        {"x": np.where(np.arange(12).reshape(6, 2) > 6, np.nan, 0.0)},
        {},
        r"nan at \[3, 1\] \(the first of 5 such values\)",
    ),
    "NaN in x": ({"x": np.where(np.arange(12).reshape(6, 2) == 7, np.nan, 0.0)}, {}, r"nan at \[3, 1\]"),
    "text": ({"x": np.full((6, 2), "a")}, {}, r"x\.npy: dtype is <U1, expected numbers"),
    "no classes, but a number of them": (
        {"y": np.zeros((6, 2), int)}, {"num_classes": 3}, r"not class labels: its shape is \[6, 2\]; leave out option",
    ),
    "label below -1": (
        {"y": np.array([0, 1, -2, 0, 0, 0])}, {}, "label -2 at position 2; .* num_classes=0 keeps y as numbers",
    ),
    "seed without label": ({"train_idx": np.array([0, 5])}, {}, r"split 'train' holds node 5 \(position 1\)"),
    "too few classes": ({}, {"num_classes": 2}, "label 2 at position 2 does not fit option num_classes=2"),
    "more classes than nodes": (
        {"y": np.array([0, 1, 10**12, 0, 1, 2])}, {},
        r"y\.npy: label 1000000000000 at position 2, but the graph has only 6 nodes; renumber the classes from 0",
    ),
    "more classes than can be trained": ({}, {"num_classes": 10**12}, "option num_classes must be from 0 to 1048576"),
    "fewer classes than none": ({}, {"num_classes": -1}, "option num_classes must be from 0 to 1048576"),
    "more nodes than numbers": ({}, {"num_nodes": 10**30}, "option num_nodes is 1000"),
    "edges and weights disagree": ({"edge_weight": np.ones(6)}, {}, r"6 rows, but the graph has 5 edges"),
    "times of no integers": (
        {"time": np.zeros(6)}, {"time_attrs": "time"}, r"time\.npy: float64 \[6\], but times must be one integer",
    ),
    "two times a node": (
        {"year": np.zeros((6, 2), int)}, {"time_attrs": "year"}, r"int64 \[6, 2\], but times must be one integer",
    ),
    "no such time": ({}, {"time_attrs": ["year"]}, "option time_attrs names 'year', but no node type has"),
    "a target type": ({}, {"target": "paper"}, "option target=paper, but the node types are: none, the graph is homo"),
    "reverse types": ({}, {"undirected": 1, "reverse_types": 1}, "option reverse_types needs a heterogeneous graph"),
    "seed outside": ({"train_idx": np.array([0, 6])}, {}, r"train_idx\.npy: 6 at position 1"),
    "seed twice": ({"train_idx": np.array([3, 0, 3])}, {}, "node 3 appears twice, at positions 0 and 2"),
    "mask of numbers": ({"val_mask": np.ones(6, np.uint8)}, {}, "val_mask.npy: a mask of uint8, expected booleans"),
    "wide floats": ({"x": np.zeros((6, 2), np.longdouble)}, {}, "expected numbers or booleans of at most 64 bits"),
    "short mask": ({"val_mask": np.zeros(5, bool)}, {}, r"mask has shape \[5\], expected \[6\]"),
    "float seeds": ({"train_idx": np.array([0.0, 1.0])}, {}, "holds float64"),
    "ids and mask": ({"train_mask": np.zeros(6, bool)}, {}, "split 'train' is given twice"),
    "mask columns": ({"val_mask": np.zeros((6, 3), bool)}, {}, "the mask has 3 columns; choose one with option split"),
    "a name that no file can have": ({"a" * 240: LABELS}, {}, "an attribute cannot be called 'aaa"),
    "reserved name": ({"orig_id": LABELS}, {}, "an attribute cannot be called 'orig_id'"),
    "unknown option": ({}, {"undirectd": True}, "unknown option 'undirectd'; did you mean 'undirected'"),
    "bad option": ({}, {"num_classes": "many"}, "option num_classes must be a whole number, not 'many'"),
    "bad boolean": ({}, {"undirected": "maybe"}, "option undirected must be true or false, not 'maybe'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_place(tmp_path, mistake):
    changes, options, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        load_dataset("file", save_graph(tmp_path / "bad", **changes), options)


def test_more_classes_than_nodes_if_asked_for(tmp_path):
    source = save_graph(tmp_path, y=np.array([0, 1, 900, 0, 1, 2]))
    assert load_dataset("file", source, {"num_classes": 1000}).nodes["node"].num_classes == 1000


def test_whole_numbered_floats_are_classes_and_nan_is_no_label(tmp_path):
    y = np.array([[0.0], [1.0], [2.0], [0.0], [1.0], [np.nan]])
    dataset = load_dataset("file", save_graph(tmp_path, y=y))
    assert nodes_of(dataset).attrs["y"].tolist() == [0, 1, 2, 0, 1, -1] and nodes_of(dataset).num_classes == 3


def test_splits_may_overlap_and_masks_may_have_columns(tmp_path):
    masks = np.zeros((6, 2), bool)
    masks[[0, 4], 1] = True
    dataset = load_dataset("file", save_graph(tmp_path, val_mask=masks), {"split": 1})
    assert nodes_of(dataset).splits["val"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no source; give the folder"),
        (lambda folder: str(folder / "nowhere"), "nowhere does not exist; expected a folder of .npy"),
        (lambda folder: str(folder), "no .npy or .npz file; expected at least edge_index.npy"),
    ],
)
def test_a_missing_source(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        load_dataset("file", make(tmp_path))


def test_other_kinds_of_file(tmp_path):
    (tmp_path / "graph.csv").write_text("0,1\n")
    with pytest.raises(DataError, match="graph.csv: unknown kind of file"):
        load_dataset("file", str(tmp_path / "graph.csv"))
    source = save_graph(tmp_path / "g")
    np.save(tmp_path / "g" / "names.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="names.npy cannot be read as a numpy array; it holds Python objects"):
        load_dataset("file", source)


# Fingerprints


def test_what_is_no_file_among_arrays_is_named(tmp_path):
    source = save_graph(tmp_path)
    (tmp_path / "edge_weight.npy").symlink_to("nowhere.npy")  # as of git-annex, before its content is fetched
    with pytest.raises(DataError, match=r"edge_weight\.npy is a link to a file that does not exist"):
        load_dataset("file", source)


def test_fingerprint_follows_options_and_files(tmp_path):
    assert dataset_fingerprint("synthetic") == dataset_fingerprint("synthetic", None, {"num_nodes": "20000"})
    assert dataset_fingerprint("synthetic") != dataset_fingerprint("synthetic", None, {"num_nodes": 30000})
    assert dataset_fingerprint("Planetoid:Cora") != dataset_fingerprint("Planetoid:CiteSeer")
    source = save_graph(tmp_path)
    before = dataset_fingerprint("file", source)
    assert before == dataset_fingerprint("file", source) == load_dataset("file", source).fingerprint
    np.save(tmp_path / "x.npy", np.zeros((6, 3), np.float16))
    assert dataset_fingerprint("file", source) != before


def test_a_download_folder_that_cannot_exist_is_reported_when_it_is_read(tmp_path):
    source = str(tmp_path / ("a" * 300))  # too long a name for a file
    assert dataset_fingerprint("KarateClub", source) == dataset_fingerprint("KarateClub")


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_debian():
    dataset = load_dataset("file", str(DEBIAN))
    assert (dataset.name, dataset.num_nodes, dataset.num_edges, nodes_of(dataset).num_classes) == (
        "debian",
        63666,
        597074,
        58,
    )
    assert {name: len(ids) for name, ids in nodes_of(dataset).splits.items()} == {
        "train": 31833,
        "val": 6366,
        "test": 25467,
    }


@pytest.mark.parametrize("text", ["year,time", '["year", "time"]', ["year", "time"], ("year", "time")])
def test_names_as_an_option_are_text_or_a_list(text):
    assert parse_options(SourceOptions, {"time_attrs": text}, "file").time_attrs == ("year", "time")
    with pytest.raises(DataError, match="option time_attrs must be names with commas, a list of names, or none, not 3"):
        parse_options(SourceOptions, {"time_attrs": 3}, "file")
