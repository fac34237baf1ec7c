"""Tests of option ``subset``: a part of the nodes, and all edges between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainer.core.errors import DataError
from trainer.core.graph_attrs import encode_texts
from trainer.core.row_sort import Scratch
from trainer.core.schema import type_name
from trainer.data import work_arrays
from trainer.data.dataset import Dataset
from trainer.data.subset import subset_of
from trainer.sources.load import dataset_fingerprint, load_dataset


@cache
def homogeneous() -> Dataset:
    return load_dataset("synthetic", None, {"num_nodes": 3000, "avg_degree": 8, "edge_weight": True})


@cache
def hetero() -> Dataset:
    return load_dataset("synthetic-hetero", None, {"num_nodes": 1000})


def with_own_ids(whole: Dataset) -> Dataset:
    """Return a copy of the graph with a new attribute ``id``: the number of each node or edge in ``whole``."""
    nodes = {
        of: replace(data, attrs={**data.attrs, "id": np.arange(data.num_nodes)}) for of, data in whole.nodes.items()
    }
    edges = {
        of: replace(data, attrs={**data.attrs, "id": np.arange(data.num_edges)}) for of, data in whole.edges.items()
    }
    return replace(whole, nodes=nodes, edges=edges)


@pytest.mark.parametrize("dataset", [homogeneous, hetero], ids=["homogeneous", "hetero"])
def test_a_subset_has_all_edges_rows_and_splits_of_its_nodes(dataset: Callable[[], Dataset]) -> None:
    whole = with_own_ids(dataset())
    part = subset_of(whole, 400)
    assert part.num_nodes == 400
    for of, data in part.nodes.items():
        before, ids = whole.nodes[of], data.attrs["id"]
        assert (np.diff(ids) > 0).all()
        for name, values in data.attrs.items():
            np.testing.assert_array_equal(values, before.attrs[name][ids])
        for name, split in data.splits.items():
            np.testing.assert_array_equal(ids[split], [i for i in before.splits[name] if i in set(ids)])
            assert len(split)
    for edge_type, edges in part.edges.items():
        before_edges = whole.edges[edge_type]
        sources, targets = (part.nodes[edge_type[end]].attrs["id"] for end in (0, 2))
        inside = np.isin(before_edges.edge_index[0], sources) & np.isin(before_edges.edge_index[1], targets)
        np.testing.assert_array_equal(edges.attrs["id"], np.flatnonzero(inside))
        found = np.stack([sources[edges.edge_index[0]], targets[edges.edge_index[1]]])
        np.testing.assert_array_equal(found, before_edges.edge_index[:, inside])
        assert edges.edge_index.dtype == before_edges.edge_index.dtype


def test_nodes_of_a_subset_keep_more_neighbours_than_an_independent_draw() -> None:
    part = subset_of(homogeneous(), 300)
    assert part.num_edges > 2 * homogeneous().num_edges * (300 / 3000) ** 2


def test_a_subset_is_the_same_each_time_and_never_larger_than_the_graph() -> None:
    one, two = subset_of(with_own_ids(hetero()), 200), subset_of(with_own_ids(hetero()), 200)
    assert all(
        (one.nodes[of].attrs["x"] == two.nodes[of].attrs["x"]).all() for of in one.nodes if "x" in one.nodes[of].attrs
    )
    assert [data.num_nodes for data in one.nodes.values()] == [data.num_nodes for data in two.nodes.values()]
    assert subset_of(hetero(), None) is hetero() and subset_of(hetero(), hetero().num_nodes) is hetero()


def test_mistakes_are_refused() -> None:
    with pytest.raises(DataError, match="option subset must be at least 1, not 0"):
        subset_of(hetero(), 0)
    links = replace(hetero(), graph_attrs={"val_links": np.zeros((2, 1), np.int64)})
    with pytest.raises(DataError, match="option subset cannot be used with val_links"):
        subset_of(links, 10)


def test_held_out_links_of_kept_nodes_stay_in_a_subset() -> None:
    names = {of: type_name(of) for of in hetero().edges}
    of = next(of for of in hetero().edges if of[0] != of[2])
    same = next(of for of in hetero().edges if of[0] == of[2])
    whole = with_own_ids(hetero())
    links = np.concatenate([hetero().edges[of].edge_index[:, :500], hetero().edges[same].edge_index[:, :300]], axis=1)
    attrs = {
        "test_links": links, "test_link_types": np.repeat([0, 1], [500, 300]), "test_link_times": np.arange(800),
        "held_out_type": encode_texts([names[of], names[same]]),
    }  # fmt: skip
    part = subset_of(replace(whole, graph_attrs=attrs), 300)
    found, times = part.graph_attrs["test_links"], part.graph_attrs["test_link_times"]
    assert 0 < len(times) < 800 and found.shape == (2, len(times))
    for row, (source, _, target) in enumerate((of, same)):
        own = part.graph_attrs["test_link_types"] == row
        ends = part.nodes[source].attrs["id"][found[0, own]], part.nodes[target].attrs["id"][found[1, own]]
        assert np.array_equal(np.stack(ends), links[:, times[own]])


def test_option_subset_reads_files(tmp_path) -> None:
    np.savez(
        tmp_path / "ring.npz",
        x=np.arange(100, dtype=np.float32)[:, None],
        y=np.arange(100) % 3,
        edge_index=np.stack([np.arange(100), (np.arange(100) + 1) % 100]),
        train_mask=np.arange(100) < 50,
    )
    file = str(tmp_path / "ring.npz")
    part = load_dataset("file", file, {"subset": "30"})
    assert part.num_nodes == 30 and "a subset of 30 of 100 nodes" in part.notes[-1]
    assert dataset_fingerprint("file", file) == dataset_fingerprint("file", file, {"subset": None})
    assert dataset_fingerprint("file", file) != dataset_fingerprint("file", file, {"subset": 30})


@pytest.mark.parametrize("dataset", [homogeneous, hetero], ids=["one type", "several types"])
def test_a_subset_by_way_of_files_is_the_same(
    dataset: Callable[[], Dataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_arrays, "_ROWS_AT_ONCE", 100)
    one, two = subset_of(dataset(), 300), subset_of(dataset(), 300, Scratch(tmp_path, 1 << 20))
    for of, nodes in one.nodes.items():
        for name, values in {**nodes.attrs, **nodes.splits}.items():
            assert np.array_equal({**two.nodes[of].attrs, **two.nodes[of].splits}[name], values)
    for of, edges in one.edges.items():
        found = two.edges[of]
        assert np.array_equal(found.edge_index, edges.edge_index) and found.edge_index.dtype == edges.edge_index.dtype
        assert all(np.array_equal(found.attrs[name], values) for name, values in edges.attrs.items())
