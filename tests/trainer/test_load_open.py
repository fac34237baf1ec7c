"""Tests of opened graphs: the same properties as torch_geometric's data objects, and mistakes in opening graphs."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.nn import GraphSAGE, to_hetero

import gnnfleet as gf
import trainer
from load_kit import hetero_data, homo_data, opened, parts_of, plain_graph
from partition_kit import spec
from partitions import typed_store
from trainer import DistGraphSAINTNodeSampler, DistNeighborLoader, DistShaDowKHopSampler
from trainer.core.errors import SettingsError
from trainer.graph.in_memory import as_graph
from trainer.partition.make import make_partition

ASKED = ("num_nodes", "num_edges", "num_features", "num_node_features")


@pytest.mark.parametrize("make", [homo_data, hetero_data])
@pytest.mark.parametrize("open_", [as_graph, parts_of, lambda data: parts_of(data, 2)])
def test_a_graph_has_the_properties_of_its_data(make, open_):
    data = make()
    graph = open_(data)
    assert {name: getattr(graph, name) for name in ASKED} == {name: getattr(data, name) for name in ASKED}
    assert graph.num_classes == int((data["paper"] if graph.manifest.hetero else data).y.max()) + 1
    if graph.manifest.hetero:
        assert [sorted(types) for types in graph.metadata()] == [sorted(types) for types in data.metadata()]
        assert (graph.node_types, graph.edge_types) == graph.metadata()
    else:
        assert graph.metadata() == (["node"], [("node", "to", "node")])


def test_num_features_of_a_column_and_of_a_graph_without_features():
    data = homo_data()
    data.x = data.x[:, 0]
    assert parts_of(data).num_features == data.num_features == 1
    assert plain_graph().num_features == 0


def test_a_model_is_made_from_the_graph_alone():
    graph = parts_of(homo_data(), 2)
    batch = next(iter(DistNeighborLoader(graph, [3, 2], "train", batch_size=8)))
    model = GraphSAGE(graph.num_features, 8, 2, graph.num_classes)
    assert model(batch.x, batch.edge_index)[: batch.batch_size].shape == (8, 5)


def test_a_model_is_made_for_the_types_of_the_graph():
    data = hetero_data()
    del data["venue"]  # to_hetero refuses node types without in-edges
    graph = parts_of(data, 2)
    model = to_hetero(GraphSAGE((-1, -1), 8, 2, graph.num_classes), graph.metadata())
    batch = next(iter(DistNeighborLoader(graph, [3, 2], ("paper", "train"), batch_size=8)))
    x = {of: torch.ones(len(batch[of].n_id), 3) for of in graph.node_types}
    assert model(x, batch.edge_index_dict)["paper"][: batch["paper"].batch_size].shape == (8, 3)


def test_num_classes_is_an_error_without_labels_or_with_several():
    with pytest.raises(SettingsError, match="no node type has class labels"):
        _ = plain_graph().num_classes
    labels = {"a": {"y": np.arange(3)}, "b": {"y": np.arange(4)}}
    several = typed_store({"a": 3, "b": 4}, {("a", "to", "b"): np.zeros((2, 1), np.int64)}, node_attrs=labels)
    with pytest.raises(SettingsError, match=r"several node types have labels, \{'a': 3, 'b': 4\}"):
        _ = opened(several).num_classes


@pytest.mark.parametrize(
    ("make", "given", "hint"),
    [
        (homo_data, "train_mask", "did you mean 'train'"),
        (homo_data, "trian", "did you mean 'train'"),
        (hetero_data, ("paper", "train_mask"), "did you mean 'train'"),
        (hetero_data, "train", r"did you mean \('paper', 'train'\)"),
        (hetero_data, "train_mask", r"did you mean \('paper', 'train'\)"),
    ],
)
def test_a_misspelt_mask_or_split_gets_a_hint(make, given, hint):
    with pytest.raises(SettingsError, match=hint):
        DistNeighborLoader(parts_of(make()), [3], given)


def test_an_unknown_name_gets_no_hint():
    with pytest.raises(SettingsError, match=r"they have \['train'\]$"):
        DistNeighborLoader(parts_of(homo_data()), [3], "everything")


@pytest.mark.parametrize("make", [homo_data, hetero_data])
def test_data_in_memory_needs_no_opening(make):
    with pytest.raises(SettingsError, match="not (Hetero)?Data; pass Data, .* directly to the loader"):
        trainer.open(make())


def test_opening_a_file_of_data_advises_to_partition_it(tmp_path):
    path = tmp_path / "graph.pt"
    torch.save(homo_data(), path)
    with pytest.raises(SettingsError, match=f"{path} is a file, .* partition make --dataset file --source {path} "):
        trainer.open(str(path))


@pytest.mark.parametrize(
    "loader", [lambda g: DistShaDowKHopSampler(g, 2, 3), lambda g: DistGraphSAINTNodeSampler(g, 3)]
)
def test_homogeneous_samplers_refuse_typed_graphs_with_advice(loader):
    with pytest.raises(SettingsError, match="pass a partition of its to_homogeneous"):
        loader(parts_of(hetero_data()))
    with pytest.raises(SettingsError, match=r"pass HeteroData.to_homogeneous\(\)"):
        loader(hetero_data())


def test_public_names_are_listed_and_similar_ones_suggested():
    assert set(trainer.__all__) <= set(dir(trainer))
    with pytest.raises(AttributeError, match="did you mean 'DistNeighborLoader'"):
        _ = trainer.DistNeighbourLoader
    with pytest.raises(AttributeError, match="did you mean 'DistLinkNeighborLoader'"):
        _ = trainer.LinkNeighborLoader
    assert not hasattr(trainer, "quite_another_thing")


def test_a_graph_that_is_dropped_closes_its_files_at_once(tmp_path: Path) -> None:
    # Also without garbage collection: a script that opens many graphs must not run out of file descriptors.
    make_partition(spec(tmp_path / "parts"), say=lambda _: None)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        graph = gf.open(tmp_path / "parts")
        assert len(os.listdir("/proc/self/fd")) > before
        graph.close()
        del graph
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_numbers_of_parts_are_integers_of_any_library(tmp_path: Path) -> None:
    one = tmp_path / "parts"
    make_partition(spec(one, num_parts=1), say=lambda _: None)
    for part in (np.int64(0), torch.tensor(0), torch.tensor([0]), (np.int32(0),)):
        with gf.open(one, part) as graph:
            assert list(graph.store.parts) == [0]
    for part in ("0", 0.0, ["0"]):
        with pytest.raises(SettingsError, match="part: .*; expected the number of a part"):
            gf.open(one, part)
