"""Tests of heterogeneous datasets from folders of arrays: types by file name, and the error for every mistake."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch_geometric.data import HeteroData
from torch_geometric.transforms import ToUndirected

from data_kit import save_arrays
from graphs import DEBIAN, NO_DEBIAN
from trainer.core.errors import DataError
from trainer.sources.load import dataset_fingerprint, load_dataset

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")


def save_typed(folder, counts=None, **changes):
    """Write a graph of two authors and three papers. ``changes``: arrays to replace; None omits one."""
    arrays = {
        "author__writes__paper": np.array([[0, 0, 1], [0, 1, 2]], np.int32),
        "author__writes__paper__edge_weight": np.array([1.0, 2.0, 3.0], np.float32),
        "paper__cites__paper": np.array([[1, 2], [0, 1]]),
        "author__age": np.array([30, 40], np.int8),
        "paper__x": np.zeros((3, 4), np.float16),
        "paper__y": np.array([0, 1, 0]),
        "paper__train_idx": np.array([2, 0]),
        "paper__test_mask": np.array([False, True, False]),
    }
    source = save_arrays(folder, **(arrays | changes))
    if counts is not None:
        (folder / "num_nodes.json").write_text(json.dumps(counts))
    return source


def test_folder_of_typed_arrays(tmp_path):
    dataset = load_dataset("file", save_typed(tmp_path / "books", {"venue": 5}))
    assert dataset.hetero and dataset.name == "books" and not dataset.notes
    assert {of: data.num_nodes for of, data in dataset.nodes.items()} == {"venue": 5, "author": 2, "paper": 3}
    paper = dataset.nodes["paper"]
    assert sorted(paper.attrs) == ["x", "y"] and paper.num_classes == 2
    assert {name: ids.tolist() for name, ids in paper.splits.items()} == {"train": [2, 0], "test": [1]}
    assert dataset.nodes["author"].attrs["age"].tolist() == [30, 40]
    assert list(dataset.edges) == [WRITES, CITES]
    assert dataset.edges[WRITES].edge_index.tolist() == [[0, 0, 1], [0, 1, 2]]
    assert dataset.edges[WRITES].attrs["edge_weight"].tolist() == [1, 2, 3]


def test_several_types_have_targets_of_their_own(tmp_path):
    own = {"author__y": np.array([1, -1]), "author__train_idx": np.array([0]), "paper__y": np.array([0, 1, 2])}
    source = save_typed(tmp_path, **own)
    dataset = load_dataset("file", source)
    assert [dataset.nodes[of].num_classes for of in ("author", "paper")] == [2, 3]
    assert dataset.nodes["author"].splits["train"].tolist() == [0]
    asked = load_dataset("file", source, {"num_classes": 9, "target": "author"})
    assert [asked.nodes[of].num_classes for of in ("author", "paper")] == [9, 3]
    with pytest.raises(DataError, match="option num_classes needs option target: 2 node types have y"):
        load_dataset("file", source, {"num_classes": 9})


def test_arrays_without_a_type_belong_to_the_target(tmp_path):
    plain = {"x": np.ones((3, 2)), "y": np.array([1, 0, 0]), "val_idx": np.array([1]), "words": np.arange(7.0)}
    source = save_typed(tmp_path, paper__x=None, paper__y=None, paper__test_mask=None, **plain, counts={"paper": 3})
    for options in ({}, {"target": "paper"}):
        dataset = load_dataset("file", source, options)
        paper = dataset.nodes["paper"]
        assert sorted(paper.attrs) == ["x", "y"] and paper.num_classes == 2
        assert sorted(paper.splits) == ["train", "val"] and list(dataset.graph_attrs) == ["words"]


def test_subfolder_beside_the_homogeneous_graph(tmp_path):
    plain = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.ones((3, 2)), "y": np.array([1, 0, 0])}
    source = save_arrays(tmp_path, **plain)
    typed = dict.fromkeys(("paper__x", "paper__y", "paper__train_idx", "paper__test_mask"))
    save_typed(tmp_path / "hetero", {"author": 2, "paper": 3}, **typed)
    assert not load_dataset("file", source).hetero
    dataset = load_dataset("file", source, {"hetero": "true"})
    assert sorted(dataset.nodes["paper"].attrs) == ["x", "y"] and dataset.num_edges == 5
    assert "edge_index.npy: left out, as the graph has typed edges" in dataset.notes[0]
    before = dataset_fingerprint("file", source, {"hetero": True})
    (tmp_path / "hetero" / "num_nodes.json").write_text('{"author": 4, "paper": 3}')
    assert dataset_fingerprint("file", source, {"hetero": True}) != before
    assert load_dataset("file", source, {"hetero": True}).nodes["author"].num_nodes == 4


def test_undirected_equals_torch_geometric(tmp_path):
    data = HeteroData()
    data["author"].num_nodes, data["paper"].num_nodes = 2, 3
    data[WRITES].edge_index = torch.tensor([[0, 0, 1], [0, 1, 2]])
    data[WRITES].edge_weight = torch.tensor([1.0, 2.0, 3.0])
    data[CITES].edge_index = torch.tensor([[1, 2], [0, 1]])
    for reverse_types in (False, True):
        options = {"undirected": True, "reverse_types": reverse_types}
        found = load_dataset("file", save_typed(tmp_path), options).edges
        expected = ToUndirected(merge=not reverse_types)(data.clone())
        assert set(found) == set(expected.edge_types)
        for of in expected.edge_types:
            assert found[of].edge_index.tolist() == expected[of].edge_index.tolist()
        assert found["paper", "rev_writes", "author"].attrs["edge_weight"].tolist() == [1, 2, 3]


MISTAKES = {
    "author outside": (
        {"author__writes__paper": np.array([[0, 2, 0], [1, 1, 1]])}, {},
        r"author__writes__paper.npy: source \[0, 1\] is 2, but node ids go from 0 to 1",
    ),
    "paper outside": (
        {"author__writes__paper": np.array([[0, 1, 0], [1, 1, 3]])}, {}, r"target \[1, 2\] is 3, but .* from 0 to 2",
    ),
    "weights of other edges": (
        {"author__writes__paper__edge_weight": np.ones(4)}, {},
        "4 rows, but the graph has 3 edges of type author__writes__paper",
    ),
    "labels of other nodes": ({"paper__y": np.zeros(2, int)}, {}, "y.npy: 2 rows, but the graph has 3 nodes of type"),
    "nothing tells": ({"author__age": None}, {}, "number of nodes of type 'author' is unknown; add num_nodes.json"),
    "attributes, but no edges": (
        {"author__wrote__paper__time": np.ones(3)}, {}, "no edge_index of type author__wrote__paper; .* found time",
    ),
    "too many words": ({"a__b__c__d__e": np.ones(3)}, {}, "a__b__c__d__e has too many '__'"),
    "odd type": ({"pa per__x": np.ones((3, 1))}, {}, "'pa per' cannot name a node type or relation"),
    "unknown target": ({}, {"target": "papers"}, "option target=papers, but the node types are: author, paper"),
    "fits no type": ({"x": np.ones((9, 2))}, {}, "x fit the number of nodes of no type; give option target"),
    "fits two types": (
        {"author__age": np.ones(3), "x": np.ones((3, 1))}, {}, "x fit several node types: author, paper; give option",
    ),
    "given twice": ({"x": np.ones((3, 2))}, {"target": "paper"}, r"x.npy: x of paper is also in .*paper__x.npy"),
    "not heterogeneous": ({}, {"hetero": False}, "no edge_index; expected integers"),
    "a number of nodes": ({}, {"num_nodes": 3}, "option num_nodes is for homogeneous graphs; write num_nodes.json"),
    "reverse there": (
        {"paper__rev_writes__author": np.zeros((2, 1), int)}, {"undirected": True},
        "paper__rev_writes__author already exists; leave out option undirected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_place(tmp_path, mistake):
    changes, options, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        load_dataset("file", save_typed(tmp_path / "bad", **changes), options)


@pytest.mark.parametrize("content", ["[3]", '{"paper": -1}', '{"paper": "3"}', "{"])
def test_invalid_node_counts(tmp_path, content):
    source = save_typed(tmp_path)
    (tmp_path / "num_nodes.json").write_text(content)
    with pytest.raises(DataError, match=r"num_nodes.json(: expected \{node type: number| cannot be read as JSON)"):
        load_dataset("file", source)


def test_missing_typed_arrays(tmp_path):
    source = save_arrays(tmp_path, edge_index=np.zeros((2, 1), int), x=np.zeros((2, 1)))
    with pytest.raises(DataError, match="no edges; a heterogeneous graph has arrays named source__relation__target"):
        load_dataset("file", source, {"hetero": True})
    with pytest.raises(DataError, match="hetero: true reads those in"):
        save_typed(tmp_path / "outer" / "hetero")
        load_dataset("file", str(tmp_path / "outer"))


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
def test_debian():
    dataset = load_dataset("file", str(DEBIAN), {"hetero": True, "target": "package", "undirected": True})
    package = dataset.nodes["package"]
    assert (package.num_nodes, package.num_classes, package.attrs["x"].shape[1]) == (63666, 58, 128)
    assert {name: len(ids) for name, ids in package.splits.items()} == {"train": 31833, "val": 6366, "test": 25467}
    assert [dataset.nodes[of].num_nodes for of in ("source", "maintainer", "tag")] == [34172, 2248, 596]
    assert len(dataset.edges) == 12 and dataset.edges["tag", "rev_has", "package"].num_edges == 106273
