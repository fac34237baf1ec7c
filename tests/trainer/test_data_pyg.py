"""Tests of datasets of torch_geometric: saved as .pt, or by name from torch_geometric and ogb."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import torch_geometric.datasets
import torch_geometric.transforms as T
from torch_geometric.data import Data, HeteroData, InMemoryDataset

import trainer
from launcher.config import consistency
from trainer import DistLinkNeighborLoader
from trainer.core.errors import DataError
from trainer.core.schema import HOMO_EDGE
from trainer.data.options import OWN_DATASETS
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sources.load import load_dataset


def pyg_graph() -> Data:
    return Data(
        x=torch.arange(8.0).reshape(4, 2),
        y=torch.tensor([0, 1, 1, 0]),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        train_mask=torch.tensor([True, False, False, True]),
        age=torch.tensor([5, 6, 7, 8], dtype=torch.int16),
        length=torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.bfloat16),
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
    nodes, edges = dataset.nodes["node"], dataset.edges[HOMO_EDGE]
    assert (nodes.num_nodes, edges.num_edges, nodes.num_classes) == (4, 3, 2)
    assert sorted(nodes.attrs) == ["age", "x", "y"] and np.array_equal(nodes.attrs["x"], pyg_graph().x.numpy())
    assert nodes.splits["train"].tolist() == [0, 3]
    assert edges.bfloat16 == {"length"} and edges.attrs["length"].dtype == np.uint16
    kept = torch.from_numpy(edges.attrs["length"].copy()).view(torch.bfloat16)
    assert torch.equal(kept, pyg_graph().length)


def typed_graph() -> HeteroData:
    data = HeteroData(title="not an array", scale=torch.tensor([1.0, 2.0]))
    data["paper"].x = torch.ones(3, 2, dtype=torch.bfloat16)
    data["paper"].y = torch.tensor([0, 1, 0])
    data["paper"].test_mask = torch.tensor([False, True, True])
    data["author"].num_nodes = 2
    data["author"].y = torch.tensor([[0.5], [1.5]])
    data["author"].odd = torch.zeros(5)
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 0, 1], [0, 1, 2]])
    data["author", "writes", "paper"].edge_attr = torch.arange(6.0).reshape(3, 2)
    return data


@pytest.mark.parametrize("content", [lambda data: data, lambda data: data.to_dict()])
def test_heterodata_saved_as_pt(tmp_path, content):
    torch.save(content(typed_graph()), tmp_path / "graph.pt")
    dataset = load_dataset("file", str(tmp_path / "graph.pt"))
    paper, author, writes = dataset.nodes["paper"], dataset.nodes["author"], dataset.edges["author", "writes", "paper"]
    assert dataset.hetero and len(dataset.nodes) == 2 and len(dataset.edges) == 1
    assert (paper.num_nodes, paper.num_classes, paper.bfloat16) == (3, 2, {"x"})
    assert paper.attrs["x"].tolist() == [[0x3F80] * 2] * 3 and paper.splits["test"].tolist() == [1, 2]
    assert (author.num_nodes, author.num_classes) == (2, 0) and author.attrs["y"].tolist() == [[0.5], [1.5]]
    assert writes.attrs["edge_attr"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert dataset.graph_attrs["scale"].tolist() == [1, 2]
    assert any("[author] [odd]: left out, float32 [5]" in note for note in dataset.notes)


def split_by_torch_geometric(data, **options):
    return T.RandomLinkSplit(**options)(data)[0]


@pytest.mark.parametrize("num_val", [0.0, 0.5])
def test_links_split_by_torch_geometric_become_graph_attributes(tmp_path, num_val):
    # With num_val=0 the number of links equals the number of edges.
    options = {"num_val": num_val, "num_test": 0.0, "neg_sampling_ratio": 0.0, "add_negative_train_samples": False}
    plain = split_by_torch_geometric(pyg_graph(), **options)
    typed = split_by_torch_geometric(typed_graph(), edge_types=[("author", "writes", "paper")], **options)
    for name, data, prefix in [("plain", plain, ""), ("typed", typed, "author__writes__paper__")]:
        torch.save(data, tmp_path / f"{name}.pt")
        dataset = load_dataset("file", str(tmp_path / f"{name}.pt"))
        store = data if prefix == "" else data["author", "writes", "paper"]
        links, labels = (dataset.graph_attrs[f"{prefix}edge_label{end}"] for end in ("_index", ""))
        assert np.array_equal(links, store.edge_label_index) and np.array_equal(labels, store.edge_label)
        assert all("edge_label" not in edges.attrs for edges in dataset.edges.values())
        assert not any("edge_label" in note for note in dataset.notes)


def test_links_of_a_partition_can_be_given_to_the_link_loader(tmp_path):
    data = typed_graph()
    of = ("author", "writes", "paper")
    data[of].edge_label_index, data[of].edge_label = torch.tensor([[1, 0], [0, 2]]), torch.tensor([0.0, 1.0])
    torch.save(data, tmp_path / "graph.pt")
    source = PartitionSpec("file", str(tmp_path / "parts"), str(tmp_path / "graph.pt"), num_parts=2, method="random")
    make_partition(source, say=lambda line: None)
    with trainer.open(tmp_path / "parts") as graph:
        links, labels = (graph.store.graph_attrs[f"author__writes__paper__edge_label{end}"] for end in ("_index", ""))
        loader = DistLinkNeighborLoader(graph, [-1], edge_label_index=(of, links), edge_label=labels, batch_size=2)
        (batch,) = loader
    ends = batch[of].edge_label_index
    authors, papers = batch["author"].n_id[ends[0]], batch["paper"].n_id[ends[1]]
    assert authors.tolist() == [1, 0] and papers.tolist() == [0, 2] and batch[of].edge_label.tolist() == [0, 1]


def test_files_with_attribute_caches_of_torch_geometric_are_loaded(tmp_path):
    data = pyg_graph()
    known = set(torch.serialization.get_safe_globals())
    assert data.is_node_attr("x") and data.is_edge_attr("length")
    torch.save(data, tmp_path / "graph.pt")
    assert load_dataset("file", str(tmp_path / "graph.pt")).num_nodes == 4
    assert set(torch.serialization.get_safe_globals()) == known


def test_bfloat16_times_are_refused(tmp_path):
    torch.save(
        Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [1]]), time=torch.ones(2).bfloat16()), tmp_path / "g.pt"
    )
    with pytest.raises(DataError, match=r"\[time\]: bfloat16 \[2\], but times must be one integer"):
        load_dataset("file", str(tmp_path / "g.pt"), {"time_attrs": "time"})
    parts = PartitionSpec("file", str(tmp_path / "parts"), str(tmp_path / "g.pt"), method="random")
    manifest = make_partition(parts, say=lambda line: None)
    assert manifest.nodes["node"].attrs["time"].dtype == "bfloat16" and manifest.edges[HOMO_EDGE].src_times == ()


def test_type_names_that_cannot_be_folders(tmp_path):
    data = HeteroData()
    data["a"].x, data["a", "is/in", "a"].edge_index = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.long)
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(DataError, match="graph: 'is/in' cannot name a node type or relation; use letters"):
        load_dataset("file", str(tmp_path / "graph.pt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_nodes": [1, 2]}, r"g.pt: num_nodes is '\[1, 2\]', expected the number of nodes"),
        ({"num_nodes": torch.tensor([1, 2])}, "num_nodes is"),
        ({"num_nodes": 2.5}, "num_nodes is '2.5'"),
        ({"num_nodes": 10**30}, "num_nodes is '1000"),
        ({1: torch.ones(2), "num_nodes": 2}, r"\[1\]: the name of an array must be a text"),
        ({("a", "b"): {}, "a": {"x": torch.ones(2, 2)}}, r"\('a', 'b'\) is neither a node type, a text, nor an edge"),
        ({("a", 1, "a"): {}, "a": {"x": torch.ones(2, 2)}}, r"\('a', 1, 'a'\) is neither"),
        ({("a", "b", "a"): {}, 5: {"x": torch.ones(2, 2)}}, "5 is neither"),
        ({("a", "b", "a"): {}, "a": {"num_nodes": [1]}}, r"\[a\]: num_nodes is"),
        ({"edge_index": torch.ones(2, 1, device="meta"), "num_nodes": 2}, "no edge_index"),
    ],
)
def test_pt_of_other_content_than_a_graph(tmp_path, content, message):
    edges = {"edge_index": torch.tensor([[0], [1]])}
    typed = any(isinstance(key, tuple) for key in content)
    torch.save({key: edges | of if isinstance(key, tuple) else of for key, of in content.items()} if typed
               else edges | content, tmp_path / "g.pt")  # fmt: skip
    with pytest.raises(DataError, match=message):
        load_dataset("file", str(tmp_path / "g.pt"))


def test_damaged_pt_of_the_old_format_is_refused(tmp_path):
    torch.save(pyg_graph().to_dict(), tmp_path / "g.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "g.pt").read_bytes()
    for at in range(0, len(whole), 7):  # torch raises KeyError, IndexError, AssertionError, struct.error, …
        (tmp_path / "g.pt").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        with contextlib.suppress(DataError):
            load_dataset("file", str(tmp_path / "g.pt"))


def test_pt_that_would_run_code_is_refused(tmp_path):
    data = pyg_graph()
    data.run = subprocess.Popen
    torch.save(data, tmp_path / "graph.pt")
    with pytest.raises(DataError, match=r"re-save plain tensors: .*to_dict\(\), path\) \(it holds \S+\.Popen,"):
        load_dataset("file", str(tmp_path / "graph.pt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: torch.zeros(3), "holds a Tensor; expected a torch_geometric Data"),
        (lambda: HeteroData(a={"x": torch.zeros(3, 1)}), "no edges; a heterogeneous graph has arrays named"),
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
    assert (dataset.num_nodes, dataset.num_edges, dataset.nodes["node"].num_classes) == (34, 156, 4)
    assert len(dataset.nodes["node"].splits["train"]) == 4


def test_a_heterogeneous_dataset_of_torch_geometric():
    dataset = load_dataset("FakeHeteroDataset")
    labelled = [data for data in dataset.nodes.values() if data.num_classes]
    assert dataset.hetero and len(dataset.nodes) == 3 and len(labelled) == 1 and labelled[0].num_classes == 10
    assert {end for source, _, target in dataset.edges for end in (source, target)} <= {*dataset.nodes}


def test_public_datasets_that_cannot_be_loaded(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="unknown dataset 'Planetiod:Cora'; did you mean 'Planetoid'"):
        load_dataset("Planetiod:Cora")
    with pytest.raises(DataError, match="choose one as Planetoid:<name>"):
        load_dataset("Planetoid")
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with pytest.raises(DataError, match="cannot be downloaded or read .*check the network"):
        load_dataset("Planetoid:Cora", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DataError, match=r"needs the package ogb; install it: pip install ogb"):
        load_dataset("ogbn-arxiv")


class FakeOgb:
    """Stands in for ``NodePropPredDataset``, with a cache file as ogb writes it."""

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
        loaded = torch.load(self.cache)  # as ogb does; by default torch refuses the pickled arrays
        return loaded["graph"], loaded["labels"]

    def get_idx_split(self):
        return {"train": np.array([2]), "valid": np.array([0]), "test": np.array([1])}


class FakeMag:
    """Stands in for ogbn-mag, which gives its arrays in dictionaries by type."""

    def __init__(self, name, root):
        pass

    def __getitem__(self, index):
        writes, cites = ("author", "writes", "paper"), ("paper", "cites", "paper")
        graph = {
            "edge_index_dict": {writes: np.array([[0, 1], [0, 2]]), cites: np.array([[2], [0]])},
            "edge_feat_dict": {},
            "node_feat_dict": {"paper": np.ones((3, 2), np.float32)},
            "num_nodes_dict": {"author": 2, "paper": 3},
            "node_year": {"paper": np.array([[2001], [2002], [2003]])},
            "edge_reltype": {writes: np.zeros((2, 1), int), cites: np.ones((1, 1), int)},
        }
        return graph, {"paper": np.array([[0], [1], [0]])}

    def get_idx_split(self):
        return {"train": {"paper": np.array([2])}, "valid": {"paper": np.array([0])}, "test": {"paper": np.array([1])}}


def with_ogb(monkeypatch, kind):
    module = types.ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = kind
    monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)


def test_ogb_graphs(tmp_path, monkeypatch):
    with_ogb(monkeypatch, FakeOgb)
    dataset = load_dataset("ogbn-arxiv", str(tmp_path))
    nodes = dataset.nodes["node"]
    assert (nodes.num_nodes, dataset.num_edges, nodes.num_classes) == (3, 2, 2)
    assert nodes.attrs["y"].tolist() == [0, 1, 0] and nodes.attrs["year"].shape == (3, 1)
    assert {name: ids.tolist() for name, ids in nodes.splits.items()} == {"train": [2], "val": [0], "test": [1]}


def test_questions_of_ogb_are_shown(tmp_path, monkeypatch, capsys):
    class Asking(FakeOgb):
        def __init__(self, name, root):
            if input("This will download 1.38GB. Will you proceed? (y/N)\n").lower() != "y":
                sys.exit(-1)
            super().__init__(name, root)

    with_ogb(monkeypatch, Asking)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert load_dataset("ogbn-products", str(tmp_path)).num_nodes == 3
    assert "Will you proceed? (y/N)" in capsys.readouterr().err
    with pytest.raises(DataError, match="ogb asks: 'This will download 1.38GB.*download it once in a terminal"):
        load_dataset("ogbn-products", str(tmp_path))


def test_ogbn_mag(tmp_path, monkeypatch):
    with_ogb(monkeypatch, FakeMag)
    dataset = load_dataset("ogbn-mag", str(tmp_path), {"undirected": True, "time_attrs": "year"})
    paper = dataset.nodes["paper"]
    assert (dataset.nodes["author"].num_nodes, paper.num_nodes, paper.num_classes) == (2, 3, 2)
    assert paper.attrs["year"].tolist() == [2001, 2002, 2003] and paper.splits["val"].tolist() == [0]
    back = dataset.edges["paper", "rev_writes", "author"]
    assert back.edge_index.tolist() == [[0, 2], [0, 1]] and back.attrs["edge_reltype"].shape == (2, 1)
    assert dataset.edges["paper", "cites", "paper"].edge_index.tolist() == [[0, 2], [2, 0]]


def test_ogb_cache_that_would_run_code_is_refused(tmp_path, monkeypatch):
    class Tampered(FakeOgb):
        def __init__(self, name, root):
            super().__init__(name, root)
            torch.save({"graph": subprocess.Popen}, self.cache, pickle_protocol=4)

    with_ogb(monkeypatch, Tampered)
    with pytest.raises(DataError, match=r"a file in .* is refused, as reading it could run code .*subprocess.Popen"):
        load_dataset("ogbn-arxiv", str(tmp_path))


def test_the_launcher_knows_the_names_of_all_datasets() -> None:
    names = {name for name in torch_geometric.datasets.__all__ if name[0].isupper()}
    assert tuple(OWN_DATASETS) == consistency.OWN_DATASETS and names <= set(consistency.PYG_DATASETS)
