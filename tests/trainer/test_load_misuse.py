"""Tests of loader arguments of unusual types: accepted, or refused with a clear message."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from load_kit import hetero_data, homo_data, opened, parts_of
from partitions import random_graph, store_of
from trainer import DistLinkNeighborLoader, DistNeighborLoader
from trainer.core.errors import DataError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.in_memory import as_graph


def first_nodes(**options):
    loader = DistNeighborLoader(parts_of(homo_data()), [3], batch_size=options.pop("batch_size", 9), **options)
    return next(iter(loader)).n_id.tolist()


def test_numpy_numbers_are_accepted():
    assert first_nodes(seed=np.int64(3), batch_size=np.int32(9)) == first_nodes(seed=3)
    loaders = [DistNeighborLoader(parts_of(homo_data()), [3], batch_size=9, shuffle=True) for _ in range(2)]
    loaders[0].set_epoch(np.int64(2))
    loaders[1].set_epoch(2)
    assert next(iter(loaders[0])).n_id.tolist() == next(iter(loaders[1])).n_id.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1.5}, "seed"),
        ({"num_workers": "2"}, "num_workers"),
        ({"num_workers": -1}, "num_workers"),
        ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor"),
        ({"threads": 0}, "threads"),
        ({"deadline": 0}, "deadline"),
        ({"timeout": -1}, "timeout"),
        ({"deadline": "5"}, "deadline"),
        ({"attrs": "x"}, r"pass a list of names, as \['x'\]"),
        ({"input_nodes": torch.arange(5).bfloat16()}, "input_nodes"),
        ({"input_nodes": [[1, 2], [3]]}, "regular shape"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(options, message):
    with pytest.raises(SettingsError, match=message):
        DistNeighborLoader(parts_of(homo_data()), [3], **options)


@pytest.mark.parametrize("fanouts", [[2.7], "15", [True, 2.0], 10])
def test_fanouts_are_not_rounded(fanouts):
    with pytest.raises(SettingsError, match="num_neighbors"):
        DistNeighborLoader(homo_data(), fanouts)


def test_names_of_attributes_may_come_from_an_iterator():
    batch = next(iter(DistNeighborLoader(parts_of(homo_data()), [3], attrs=(name for name in ("x", "y")))))
    assert "x" in batch and "y" in batch and "image" not in batch


def test_seeds_may_be_any_mapping_over_types():
    batch = next(iter(DistNeighborLoader(hetero_data(), [3], MappingProxyType({"paper": [1], "author": [2]}))))
    assert batch["paper"].batch_size + batch["author"].batch_size == 1


def test_a_transform_that_returns_nothing_is_reported():
    loader = DistNeighborLoader(homo_data(), [3], transform_sampler_output=lambda out: None)
    with pytest.raises(SettingsError, match="must return a SamplerOutput or HeteroSamplerOutput, not NoneType"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("attrs", "edge_attrs"), [({"w": np.zeros(40)}, {"w": np.zeros(200)}), ({"edge_index": np.zeros(40)}, {})]
)
def test_an_ambiguous_attribute_name_is_refused_until_one_is_chosen(attrs, edge_attrs):
    edge_index, num_nodes = random_graph(1, 40, 200)
    graph = opened(store_of(edge_index, num_nodes, 2, attrs=attrs, edge_attrs=edge_attrs))
    with pytest.raises(SettingsError, match="is the name of two attributes"):
        DistNeighborLoader(graph, [3])
    chosen = {HOMO_EDGE: list(edge_attrs)}
    batch = next(iter(DistNeighborLoader(graph, [3], batch_size=4, attrs=chosen)))
    assert batch.edge_index.shape == (2, len(batch.e_id)) and all(len(batch[a]) == len(batch.e_id) for a in edge_attrs)


def test_complex_weights_are_refused_at_once():
    edge_index, num_nodes = random_graph(1, 40, 200)
    graph = opened(store_of(edge_index, num_nodes, 1, edge_attrs={"w": np.ones(200, np.complex64)}))
    with pytest.raises(SettingsError, match="one real number per edge"):
        DistNeighborLoader(graph, [3], weight_attr="w")


@pytest.mark.parametrize("edge_index", [torch.rand(2, 5), torch.zeros(3, 5).long(), torch.zeros(5).long()])
def test_invalid_edges_are_refused(edge_index):
    with pytest.raises(DataError, match="edge_index"):
        DistNeighborLoader(Data(num_nodes=4, edge_index=edge_index), [3])


def test_times_in_a_column_are_not_copied_for_every_batch():
    data = homo_data()
    data.time = torch.stack([data.time, data.time], 1)[:, 0]
    graph = as_graph(data, time_attr="time")
    assert graph.store.parts[0].nodes[HOMO_NODE].attrs["time"].flags.c_contiguous
    assert graph.store.parts[0].nodes[HOMO_NODE].attrs["x"].ctypes.data == data.x.data_ptr()


@pytest.mark.parametrize("links", [[], [[0, 1], [1]], (torch.tensor([0, 1]), torch.tensor([1])), [[[0], [1]]]])
def test_links_of_another_shape_are_refused(links):
    with pytest.raises(SettingsError):
        DistLinkNeighborLoader(homo_data(), [3], links)


@pytest.mark.parametrize("links", [[[0, 4], [1, 2]], (np.array([0, 4]), torch.tensor([1, 2]))])
def test_links_as_two_lists(links):
    batch = next(iter(DistLinkNeighborLoader(homo_data(), [3], links, batch_size=2)))
    assert batch.n_id[batch.edge_label_index].tolist() == [[0, 4], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.int8])
def test_labels_of_any_dtype(dtype):
    labels = torch.tensor([3, 2]).to(dtype)
    loader = DistLinkNeighborLoader(
        homo_data(), [3], [[0, 4], [1, 2]], edge_label=labels, neg_sampling="binary", batch_size=2
    )
    assert torch.equal(next(iter(loader)).edge_label, torch.tensor([3, 2, 0, 0]).to(dtype))


def test_labels_that_are_no_numbers_are_refused():
    with pytest.raises(SettingsError, match="edge_label"):
        DistLinkNeighborLoader(homo_data(), [3], [[0], [1]], edge_label=["a"])
