"""Tests of ``partition repartition`` and ``diff``, and of restoring a graph from its partition folder."""

from __future__ import annotations

import filecmp
import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from foreign_kit import assert_same_graph
from partition_kit import by_hand, flip_byte, odd_types, with_nodes, written
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE
from trainer.data.dataset import EdgeData
from trainer.data.work_arrays import WorkArrays
from trainer.partition.cli import partition
from trainer.partition.convert import repartition_spec
from trainer.partition.diff import diff_partitions
from trainer.partition.make import PartitionSpec, make_partition
from trainer.partition.restore import restore_graph
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.store.manifest import read_manifest, write_manifest

SMALL = {"num_nodes": 300, "num_features": 5, "time": True, "edge_weight": True}


def run(*words):
    return CliRunner().invoke(partition, [str(word) for word in words])


def made(folder, num_parts, dataset="synthetic-hetero", **changes):
    spec = PartitionSpec(dataset, str(folder), options=SMALL, num_parts=num_parts, **changes)
    make_partition(spec, say=lambda line: None)
    return folder


def differing(first, second):
    """Return the names of files that differ, or are in only one of the folders."""
    names = {path.relative_to(top).as_posix() for top in (first, second) for path in top.rglob("*") if path.is_file()}
    same, *others = filecmp.cmpfiles(first, second, sorted(names), shallow=False)
    assert len(same) + sum(map(len, others)) == len(names)
    return [name for each in others for name in each]


@pytest.mark.parametrize(
    "changes",
    [{}, {"rows": "int8"}, {"rows": "float16", "clusters": 2}, {"method": "hash", "seed": 5}, {"method": "frequency"}],
    ids=str,
)
def test_a_repartitioned_folder_equals_one_that_was_made_so(changes, tmp_path):
    # All files are equal, the manifest with its fingerprint included.
    before, after = (made(tmp_path / f"made-{count}", count, **changes) for count in (3, 2))
    make_partition(repartition_spec(before, tmp_path / "out", 2), say=lambda line: None)
    assert differing(after, tmp_path / "out") == []


def test_repartition_in_place_with_another_method(tmp_path):
    parts, expected = (
        made(tmp_path / "parts", 2, "synthetic"),
        made(tmp_path / "expected", 3, "synthetic", method="hash"),
    )
    assert run("repartition", parts, parts, "--num-parts", 3, "--method", "hash").exit_code == 0
    assert differing(parts, expected) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["expected", "parts"]


def test_odd_graphs_are_restored_exactly(tmp_path, monkeypatch):
    # Also if arrays are large enough to be files.
    monkeypatch.setattr("trainer.data.work_arrays._IN_MEMORY", 100)
    dataset = odd_types()
    found = restore_graph(written(dataset, tmp_path / "parts", 3), tmp_path)
    assert_same_graph(found.dataset, dataset)
    assert isinstance(WorkArrays(tmp_path).empty((50,), np.float32), np.ndarray)
    assert found.dataset.nodes["v-1.0"].bfloat16 == {"half"} and found.dataset.hetero


def test_a_folder_of_an_older_version_is_restored_too(tmp_path):
    parts, expected = made(tmp_path / "parts", 2), made(tmp_path / "expected", 3)
    write_manifest(parts, replace(read_manifest(parts), dataset_fingerprint="", time_attrs=None))
    make_partition(repartition_spec(parts, tmp_path / "out", 3), say=lambda line: None)
    assert differing(tmp_path / "out", expected) == ["manifest.json"]
    found, wanted = (read_manifest(folder) for folder in (tmp_path / "out", expected))
    same = {"fingerprint": wanted.fingerprint, "dataset_fingerprint": wanted.dataset_fingerprint}
    assert replace(found, **same) == wanted


def test_a_damaged_folder_is_not_restored(tmp_path):
    parts = made(tmp_path / "parts", 2)
    flip_byte(parts / "part1/nodes/paper/attrs/x.npy")
    with pytest.raises(PartitionError, match="part1/nodes/paper/attrs/x.npy"):
        make_partition(repartition_spec(parts, tmp_path / "out", 3), say=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts"]


def test_diff_of_two_partitions_of_one_graph(tmp_path):
    # Parts 0, 1 and 2 of the second are 2, 0 and 1 of the first, but for five nodes.
    dataset = load_dataset("synthetic", options={"num_nodes": 60, "avg_degree": 6, "num_features": 2})
    part = np.arange(60) % 3
    other = (part + 1) % 3
    other[:5] = part[:5]
    for name, assigned in (("a", part), ("b", other)):
        write_partition(dataset, by_hand(dataset, assigned, 3), tmp_path / name)
    found = diff_partitions(tmp_path / "a", tmp_path / "b")
    assert found.same_graph and found.same_edge_order
    assert found.moved == pytest.approx(5 / 60)
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 0 and "8.33% of the nodes are in another part" in result.output
    assert json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").output)["same_graph"] is True


def renumbered(dataset, order):
    edges = dataset.edges[HOMO_EDGE]
    attrs = {name: values[order] for name, values in edges.attrs.items()}
    return replace(dataset, edges={HOMO_EDGE: EdgeData(edges.edge_index[:, order], attrs)})


def changed(values, at, value):
    values = values.copy()
    values[at] = value
    return values


def test_diff_names_the_first_difference(tmp_path):
    dataset = load_dataset(
        "synthetic", options={"num_nodes": 60, "avg_degree": 6, "num_features": 2, "edge_weight": True}
    )
    nodes, edges = dataset.nodes["node"], dataset.edges[HOMO_EDGE]

    def with_edges(**changes):
        return replace(dataset, edges={HOMO_EDGE: replace(edges, **changes)})

    def with_attr(name, values):
        return with_nodes(dataset, "node", attrs={**nodes.attrs, name: values})

    moved = edges.edge_index.copy()
    moved[0, 7] = (moved[0, 7] + 1) % 60
    cases = {
        "attribute x of node of type node 4: [": with_attr("x", changed(nodes.attrs["x"], 4, 9.0)),
        "attribute x of each node of type node: float32 [60, 2] and float64": with_attr(
            "x", nodes.attrs["x"].astype(np.float64)
        ),
        "attributes of each node of type node: none only in the first, more only": with_attr("more", np.arange(60)),
        "split train has other nodes": with_nodes(
            dataset, "node", splits={**nodes.splits, "train": nodes.splits["train"][1:]}
        ),
        "split train has another order": with_nodes(
            dataset, "node", splits={**nodes.splits, "train": nodes.splits["train"][::-1]}
        ),
        "attribute edge_weight of edge of type node__to__node 3: ": with_edges(
            attrs={"edge_weight": changed(edges.attrs["edge_weight"], 3, 50)}
        ),
        f"edges of type node__to__node: {edges.num_edges:,} and ": renumbered(dataset, np.arange(edges.num_edges - 1)),
        " is only, or more often, in the ": with_edges(edge_index=moved),
        "graph attributes: none only in the first, links only in the second": replace(
            dataset, graph_attrs={"links": np.arange(3)}
        ),
    }
    first = written(dataset, tmp_path / "first")
    for number, (message, other) in enumerate(cases.items()):
        second = written(replace(other, fingerprint=f"{number}"), tmp_path / f"{number}", 3)
        found = diff_partitions(first, second)
        assert message in found.difference
        assert run("diff", first, second).exit_code == 1


def test_edges_in_another_order_are_the_same_graph(tmp_path):
    # Equal edges with different attributes are matched by their attributes.
    dataset = load_dataset("synthetic", options={"num_nodes": 30, "avg_degree": 7, "edge_weight": True})
    edges, weights = dataset.edges[HOMO_EDGE].edge_index, np.arange(2 * dataset.num_edges) / 2
    twice = EdgeData(np.concatenate([edges, edges], axis=1), {"edge_weight": weights})
    dataset = replace(dataset, edges={HOMO_EDGE: twice})
    order = np.random.default_rng(0).permutation(dataset.num_edges)
    for name, each in (("a", dataset), ("b", renumbered(dataset, order))):
        written(replace(each, fingerprint=name), tmp_path / name)
    found = diff_partitions(tmp_path / "a", tmp_path / "b")
    assert found.same_graph and not found.same_edge_order
    assert "edges are numbered differently" in run("diff", tmp_path / "a", tmp_path / "b").output
