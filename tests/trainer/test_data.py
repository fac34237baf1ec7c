"""Datasets: what is read is what was saved, and every mistake gets one clear answer."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData, InMemoryDataset

from graphs import DEBIAN, NO_DEBIAN
from trainer.data import dataset_fingerprint, load_dataset
from trainer.data.edges import symmetric_adjacency, undirected
from trainer.errors import DataError


def save_graph(folder, **changes):
    """A folder of six nodes; ``changes`` replace arrays, None leaves one out."""
    arrays = {
        "edge_index": np.array([[0, 1, 2, 4, 4], [1, 2, 0, 3, 3]], np.int32),
        "x": np.arange(12, dtype=np.float16).reshape(6, 2),
        "y": np.array([0, 1, 2, 0, 1, -1], np.int16),
        "train_idx": np.array([4, 0]),
        "val_mask": np.array([0, 0, 1, 1, 0, 0], bool),
    }
    folder.mkdir(exist_ok=True)
    for name, values in {**arrays, **changes}.items():
        if values is not None:
            np.save(folder / f"{name}.npy", values)
    return str(folder)


def test_folder_of_arrays(tmp_path):
    source = save_graph(tmp_path / "six", year=np.arange(6), edge_attr=np.zeros((5, 3)))
    dataset = load_dataset("file", source)
    assert (dataset.name, dataset.num_nodes, dataset.num_edges, dataset.num_classes) == ("six", 6, 5, 3)
    assert sorted(dataset.attrs) == ["x", "y", "year"]
    assert dataset.attrs["x"].dtype == np.float16
    assert {name: ids.tolist() for name, ids in dataset.splits.items()} == {"train": [4, 0], "val": [2, 3]}
    assert len(dataset.notes) == 1 and "edge_attr.npy: left out" in dataset.notes[0]


def test_npz_in_a_folder_and_alone(tmp_path):
    edge_index = np.array([[0, 1], [1, 0]])
    np.savez(tmp_path / "graph.npz", edge_index=edge_index, x=np.ones((3, 2), np.float32))
    for source in (tmp_path, tmp_path / "graph.npz"):
        dataset = load_dataset("file", str(source))
        assert dataset.num_nodes == 3 and np.array_equal(dataset.edge_index, edge_index)


def test_number_of_nodes_is_never_guessed_from_edges(tmp_path):
    source = save_graph(tmp_path, x=None, y=None, val_mask=None)
    with pytest.raises(DataError, match="neither x nor y tells the number of nodes; give option num_nodes"):
        load_dataset("file", source)
    assert load_dataset("file", source, {"num_nodes": "9"}).num_nodes == 9


def test_undirected_adds_the_other_direction_once(tmp_path):
    dataset = load_dataset("file", save_graph(tmp_path), {"undirected": "true"})
    assert dataset.edge_index.T.tolist() == [[0, 1], [0, 2], [1, 0], [1, 2], [2, 0], [2, 1], [3, 4], [4, 3]]


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
    assert dataset.edge_index.T.tolist() == [[0, 3], [3, 0], [4, 5], [5, 4]]
    assert dataset.splits["train"].tolist() == [4, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint64"])
def test_edges_of_any_integer_type_and_more_nodes_than_it_counts(dtype, tmp_path):
    edges, rows = np.array([[0, 4], [3, 5]], dtype), {"x": np.zeros((400, 2)), "y": np.zeros(400, int)}
    dataset = load_dataset("file", save_graph(tmp_path, edge_index=edges, val_mask=None, **rows), {"undirected": True})
    assert dataset.num_nodes == 400 and dataset.edge_index.T.tolist() == [[0, 3], [3, 0], [4, 5], [5, 4]]


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
    "NaN in x": ({"x": np.where(np.arange(12).reshape(6, 2) == 7, np.nan, 0.0)}, {}, r"nan at \[3, 1\]"),
    "text": ({"x": np.full((6, 2), "a")}, {}, r"x\.npy: dtype is <U1, expected numbers"),
    "two classes a node": ({"y": np.zeros((6, 2), int)}, {}, "expected one class per node"),
    "regression": ({"y": np.array([0, 1, 0.5, 0, 0, 0])}, {}, "0.5 at position 2 is not a class number"),
    "label below -1": ({"y": np.array([0, 1, -2, 0, 0, 0])}, {}, "label -2 at position 2"),
    "seed without label": ({"train_idx": np.array([0, 5])}, {}, r"split 'train' holds node 5 \(position 1\)"),
    "too few classes": ({}, {"num_classes": 2}, "label 2 at position 2 does not fit option num_classes=2"),
    "more classes than nodes": (
        {"y": np.array([0, 1, 10**12, 0, 1, 2])}, {},
        r"y\.npy: label 1000000000000 at position 2, but there are only 6 nodes; classes count from 0",
    ),
    "more classes than can be trained": ({}, {"num_classes": 10**12}, "option num_classes must be from 1 to 1048576"),
    "no class": ({}, {"num_classes": 0}, "option num_classes must be from 1 to 1048576"),
    "seed outside": ({"train_idx": np.array([0, 6])}, {}, r"train_idx\.npy: 6 at position 1"),
    "seed twice": ({"train_idx": np.array([3, 0, 3])}, {}, "node 3 appears twice, at positions 0 and 2"),
    "mask of numbers": ({"val_mask": np.ones(6, np.uint8)}, {}, "val_mask.npy: a mask of uint8, expected booleans"),
    "wide floats": ({"x": np.zeros((6, 2), np.longdouble)}, {}, "expected numbers or booleans of at most 64 bits"),
    "short mask": ({"val_mask": np.zeros(5, bool)}, {}, r"mask has shape \[5\], expected \[6\]"),
    "float seeds": ({"train_idx": np.array([0.0, 1.0])}, {}, "holds float64"),
    "ids and mask": ({"train_mask": np.zeros(6, bool)}, {}, "split 'train' is given twice"),
    "mask columns": ({"val_mask": np.zeros((6, 3), bool)}, {}, "the mask has 3 columns; choose one with option split"),
    "reserved name": ({"orig_id": LABELS}, {}, "an attribute cannot be called 'orig_id'"),
    "unknown option": ({}, {"undirectd": True}, "unknown option 'undirectd'; did you mean 'undirected'"),
    "bad option": ({}, {"num_classes": "many"}, "option num_classes must be a whole number, not 'many'"),
    "bad boolean": ({}, {"undirected": "maybe"}, "option undirected must be true or false, not 'maybe'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_its_place(tmp_path, mistake):
    changes, options, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        load_dataset("file", save_graph(tmp_path / "bad", **changes), options)


def test_more_classes_than_nodes_if_asked_for(tmp_path):
    source = save_graph(tmp_path, y=np.array([0, 1, 900, 0, 1, 2]))
    assert load_dataset("file", source, {"num_classes": 1000}).num_classes == 1000


def test_whole_numbered_floats_are_classes_and_nan_is_no_label(tmp_path):
    y = np.array([[0.0], [1.0], [2.0], [0.0], [1.0], [np.nan]])
    dataset = load_dataset("file", save_graph(tmp_path, y=y))
    assert dataset.attrs["y"].tolist() == [0, 1, 2, 0, 1, -1] and dataset.num_classes == 3


def test_splits_may_overlap_and_masks_may_have_columns(tmp_path):
    masks = np.zeros((6, 2), bool)
    masks[[0, 4], 1] = True
    dataset = load_dataset("file", save_graph(tmp_path, val_mask=masks), {"split": 1})
    assert dataset.splits["val"].tolist() == [0, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no source; give the folder"),
        (lambda folder: str(folder / "nowhere"), "nowhere does not exist; expected a folder of .npy"),
        (lambda folder: str(folder), "no .npy or .npz file; expected at least edge_index.npy"),
    ],
)
def test_a_source_that_is_not_there(tmp_path, make, message):
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


# PyG's Data


def pyg_graph() -> Data:
    return Data(
        x=torch.arange(8.0).reshape(4, 2),
        y=torch.tensor([0, 1, 1, 0]),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        train_mask=torch.tensor([True, False, False, True]),
        age=torch.tensor([5, 6, 7, 8], dtype=torch.int16),
        title="not an array",
    )


def one_graph_file(path):
    data, slices = InMemoryDataset.collate([pyg_graph()])
    torch.save((data.to_dict(), slices, Data), path)


@pytest.mark.parametrize(
    "save",
    [
        lambda path: torch.save(pyg_graph(), path),
        lambda path: torch.save(pyg_graph().to_dict(), path),
        one_graph_file,
    ],
)
def test_pyg_data_saved_as_pt(tmp_path, save):
    save(tmp_path / "graph.pt")
    dataset = load_dataset("file", str(tmp_path / "graph.pt"))
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (4, 3, 2)
    assert sorted(dataset.attrs) == ["age", "x", "y"]
    assert dataset.splits["train"].tolist() == [0, 3]
    assert np.array_equal(dataset.attrs["x"], pyg_graph().x.numpy())


def test_pt_that_would_run_code_is_refused(tmp_path):
    data = pyg_graph()
    data.run = subprocess.Popen
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(DataError, match="cannot be loaded safely .*re-save plain tensors"):
        load_dataset("file", str(tmp_path / "graph.pt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: torch.zeros(3), "holds a Tensor; expected a torch_geometric Data"),
        (lambda: HeteroData(a={"x": torch.zeros(3, 1)}), "expected a torch_geometric Data|cannot be loaded safely"),
        (lambda: ({"x": torch.zeros(2)}, {"x": torch.tensor([0, 1, 2])}), "holds a collection of graphs"),
        (lambda: {"x": torch.zeros(2, 2), "adj_t": torch.eye(2)}, "stored as adj_t; re-save it with edge_index"),
    ],
)
def test_pt_that_is_not_one_graph(tmp_path, content, message):
    torch.save(content(), tmp_path / "graph.pt")
    with pytest.raises(DataError, match=message):
        load_dataset("file", str(tmp_path / "graph.pt"))


def test_damaged_pt(tmp_path):
    (tmp_path / "graph.pt").write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match="cannot be loaded safely"):
        load_dataset("file", str(tmp_path / "graph.pt"))


# Public datasets


def test_a_dataset_of_torch_geometric():
    dataset = load_dataset("KarateClub")
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (34, 156, 4)
    assert len(dataset.splits["train"]) == 4


def test_public_datasets_that_cannot_be_had(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="unknown dataset 'Planetiod:Cora'; did you mean 'Planetoid'"):
        load_dataset("Planetiod:Cora")
    with pytest.raises(DataError, match="write Planetoid:<name>"):
        load_dataset("Planetoid")
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be downloaded or read .*check the network"):
        load_dataset("Planetoid:Cora", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DataError, match=r"needs the package ogb; install it: pip install ogb"):
        load_dataset("ogbn-arxiv")


class FakeOgb:
    """What ``NodePropPredDataset`` gives, with a cache file as ogb writes it."""

    def __init__(self, name, root):
        self.cache = f"{root}/data_processed"
        graph = {
            "edge_index": np.array([[0, 1], [1, 2]]),
            "edge_feat": None,
            "node_feat": np.ones((3, 2), np.float32),
            "node_year": np.array([[2001], [2002], [2003]]),
            "num_nodes": 3,
        }
        torch.save({"graph": graph, "labels": np.array([[0], [1], [0]])}, self.cache, pickle_protocol=4)

    def __getitem__(self, index):
        loaded = torch.load(self.cache)  # as ogb writes it; torch refuses pickled arrays by itself
        return loaded["graph"], loaded["labels"]

    def get_idx_split(self):
        return {"train": np.array([2]), "valid": np.array([0]), "test": np.array([1])}


def test_ogb_graphs(tmp_path, monkeypatch):
    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = FakeOgb
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    dataset = load_dataset("ogbn-arxiv", str(tmp_path))
    assert (dataset.num_nodes, dataset.num_edges, dataset.num_classes) == (3, 2, 2)
    assert dataset.attrs["y"].tolist() == [0, 1, 0] and dataset.attrs["year"].shape == (3, 1)
    assert {name: ids.tolist() for name, ids in dataset.splits.items()} == {"train": [2], "val": [0], "test": [1]}


def test_ogb_cache_that_would_run_code_is_refused(tmp_path, monkeypatch):
    class Tampered(FakeOgb):
        def __init__(self, name, root):
            super().__init__(name, root)
            torch.save({"graph": subprocess.Popen}, self.cache, pickle_protocol=4)

    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = Tampered
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    with pytest.raises(DataError, match="Unsupported: subprocess.Popen"):
        load_dataset("ogbn-arxiv", str(tmp_path))


# Synthetic graphs

SMALL = {"num_nodes": 3000, "avg_degree": 12, "num_classes": 5, "num_features": 8, "homophily": 0.6}


def test_synthetic_is_simple_undirected_and_as_asked():
    dataset = load_dataset("synthetic", None, SMALL)
    source, target = dataset.edge_index
    pairs = source.astype(np.int64) * 3000 + target
    assert len(np.unique(pairs)) == len(pairs) and not np.any(source == target)
    assert np.array_equal(np.sort(pairs), np.sort(target.astype(np.int64) * 3000 + source))
    assert dataset.num_edges == pytest.approx(3000 * 12, rel=0.1)
    y = dataset.attrs["y"]
    assert np.mean(y[source] == y[target]) == pytest.approx(0.6 + 0.4 / 5, abs=0.03)
    assert sorted(np.unique(y)) == [0, 1, 2, 3, 4]
    assert dataset.attrs["x"].shape == (3000, 8)


def test_synthetic_degrees_are_skewed_by_the_option():
    def share_of_top_percent(skew):
        degrees = np.bincount(load_dataset("synthetic", None, {**SMALL, "skew": skew}).edge_index[1], minlength=3000)
        return np.sort(degrees)[-30:].sum() / degrees.sum()

    assert share_of_top_percent(2.2) > 2 * share_of_top_percent(6.0)


def test_synthetic_neighbours_tell_more_than_features_and_neither_tells_all():
    dataset = load_dataset("synthetic", None, {"num_nodes": 5000})
    x, y, train, test = dataset.attrs["x"], dataset.attrs["y"], dataset.splits["train"], dataset.splits["test"]
    source, target = dataset.edge_index
    around = np.zeros_like(x)
    np.add.at(around, target, x[source])
    around /= np.maximum(np.bincount(target, minlength=5000), 1)[:, None]

    def accuracy(features):
        centres = np.stack([features[train[y[train] == label]].mean(axis=0) for label in range(dataset.num_classes)])
        distances = ((features[test][:, None] - centres[None]) ** 2).sum(axis=2)
        return np.mean(distances.argmin(axis=1) == y[test])

    alone, together = accuracy(x), accuracy(np.hstack((x, around * 3)))
    assert 0.3 < alone < 0.7 and alone + 0.15 < together < 0.98


def test_synthetic_is_the_same_for_a_seed_and_another_for_another():
    one, same, other = (load_dataset("synthetic", None, {**SMALL, "seed": seed}) for seed in (1, 1, 2))
    assert np.array_equal(one.edge_index, same.edge_index) and np.array_equal(one.attrs["x"], same.attrs["x"])
    assert all(np.array_equal(one.splits[name], same.splits[name]) for name in one.splits)
    assert one.edge_index.shape != other.edge_index.shape or not np.array_equal(one.edge_index, other.edge_index)


def test_synthetic_splits_take_fractions_and_numbers_and_do_not_overlap():
    dataset = load_dataset("synthetic", None, {**SMALL, "train": "240", "val": 0.1, "test": 0.5})
    assert {name: len(ids) for name, ids in dataset.splits.items()} == {"train": 240, "val": 300, "test": 1500}
    together = np.concatenate(list(dataset.splits.values()))
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


# Fingerprints


def test_fingerprint_follows_options_and_files(tmp_path):
    assert dataset_fingerprint("synthetic") == dataset_fingerprint("synthetic", None, {"num_nodes": "20000"})
    assert dataset_fingerprint("synthetic") != dataset_fingerprint("synthetic", None, {"num_nodes": 30000})
    source = save_graph(tmp_path)
    before = dataset_fingerprint("file", source)
    assert before == dataset_fingerprint("file", source) == load_dataset("file", source).fingerprint
    np.save(tmp_path / "x.npy", np.zeros((6, 3), np.float16))
    assert dataset_fingerprint("file", source) != before


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_debian():
    dataset = load_dataset("file", str(DEBIAN))
    assert (dataset.name, dataset.num_nodes, dataset.num_edges, dataset.num_classes) == ("debian", 63666, 597074, 58)
    assert {name: len(ids) for name, ids in dataset.splits.items()} == {"train": 31833, "val": 6366, "test": 25467}
