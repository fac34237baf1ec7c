"""Tests of ``trainer partition make``, ``verify`` and ``inspect``, and of clusters within parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from graphs import DEBIAN, NO_DEBIAN, bipartite, blocks, ring
from partition_kit import NODE, OPTIONS, assert_sound, by_hand, flip_byte, spec, with_nodes, written
from trainer.core.errors import DataError, PartitionError
from trainer.core.schema import HOMO_EDGE
from trainer.partition.cli import partition
from trainer.partition.clusters import with_clusters
from trainer.partition.inspect import describe, render
from trainer.partition.make import make_partition
from trainer.partition.methods.assign import assign_parts
from trainer.partition.write import write_partition
from trainer.sources.load import load_dataset
from trainer.store.manifest import read_manifest
from trainer.store.part_store import open_parts


def run(*arguments):
    return CliRunner().invoke(partition, [str(argument) for argument in arguments])


def test_statistics_of_a_ring_in_two_parts(tmp_path):
    dataset = ring(10)
    write_partition(dataset, by_hand(dataset, [0] * 4 + [1] * 6, 2), tmp_path / "parts")
    first, second = describe(tmp_path / "parts").parts
    assert (first.nodes, first.edges, first.cut_edges, first.halo) == (4, 4, 1, 1)
    assert (second.nodes, second.edges, second.cut_edges, second.halo) == (6, 6, 1, 1)
    assert first.seeds == {"train": 2, "val": 1} and second.seeds == {"train": 3, "val": 0}
    on_disk = sum(path.stat().st_size for path in (tmp_path / "parts" / "part0").rglob("*.npy"))
    assert first.bytes == on_disk


def test_statistics_per_type(tmp_path):
    # All authors are in part 1; author 3 needs paper 5 twice, which counts once in the halo.
    dataset = bipartite()
    assignment = by_hand(dataset, {"author": [1] * 4, "paper": [0, 0, 0, 1, 1, 0], "venue": [0, 0]}, 2)
    write_partition(dataset, assignment, tmp_path / "parts")
    description = describe(tmp_path / "parts")
    first, second = description.parts
    assert first.nodes_of == {"author": 0, "paper": 4, "venue": 2}
    assert second.edges_of == {"author__writes__paper": 2, "paper__cites__paper": 1, "paper__written_by__author": 0}
    assert (first.cut_edges, first.halo) == (6, 4)  # writes: 5 edges of authors 0, 1, 3; cites: one of paper 4
    assert (second.cut_edges, second.halo) == (1, 1)  # paper 4 is cited by paper 5
    assert first.seeds["paper/train"] + second.seeds["paper/train"] == 3
    assert description.nodes["author"].balance == 2.0
    assert description.edges["paper__cites__paper"].attrs == {"edge_attr": "float32 [5, 2]"}
    table = render(description)
    for word in ("author__writes__paper", "venue", "edge_attr float32 [5, 2]", "paper/train"):
        assert word in table


def test_make_verify_and_inspect_on_the_command_line(tmp_path):
    folder = tmp_path / "parts"
    options = [f"--option={name}={value}" for name, value in OPTIONS.items()]
    made = run("make", "--dataset", "synthetic", *options, "--num-parts", 3, "--out", folder)
    assert made.exit_code == 0, made.output
    assert [line.split()[0] for line in made.output.splitlines()] == ["load", "assign", "write"]
    again = run("make", "--dataset", "synthetic", *options, "--num-parts", 3, "--out", folder)
    assert "is up to date" in again.output
    assert run("verify", folder).output == f"{folder}: sound\n"
    figures = json.loads(run("inspect", folder, "--json").output)
    assert sum(part["nodes"] for part in figures["parts"]) == 500
    table = run("inspect", folder).output
    assert "3 parts by metis (seed 0, balance types+seeds, chosen_by auto)" in table and "halo nodes" in table


def test_method_options_on_the_command_line(tmp_path):
    folder = tmp_path / "parts"
    start = ("make", "--dataset", "synthetic", "--option=num_nodes=300", "--num-parts", 2, "--out", folder)
    made = run(*start, "--method", "frequency", "--fanouts", "4,-1", "--balance", "nodes")
    assert made.exit_code == 0, made.output
    assert read_manifest(folder).options == {"balance": "nodes", "fanouts": [4, -1]}
    assert "is up to date" in run(*start, "--method", "frequency", "--fanouts", "4,-1", "--balance", "nodes").output
    assert "replacing 2 parts of synthetic" in run(*start, "--method", "frequency", "--fanouts", "4,3").output
    bad = run(*start, "--fanouts", "4;3")
    assert bad.exit_code == 2 and "'4;3' is not a list of numbers like 15,10,5" in bad.output
    assert run(*start, "--clusters", "0").exit_code == 2


def test_exit_statuses_of_the_command_line(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    flip_byte(folder / "part1" / NODE / "attrs/x.npy")
    failed = run("verify", folder)
    assert failed.exit_code == 1 and f"{folder}/part1/{NODE}/attrs/x.npy: content does not match" in failed.output
    assert run("verify", folder, "--part", 0).exit_code == 0
    assert run("make", "--dataset", "synthetic", "--option", "seed", "--out", folder).exit_code == 2
    wrong = run("make", "--dataset", "synthetic", "--option", "nodes=5", "--out", tmp_path / "new")
    assert isinstance(wrong.exception, DataError) and "did you mean 'num_nodes'" in str(wrong.exception)


# Clusters


def test_clusters_are_found_inside_parts(tmp_path):
    # Four dense blocks in two parts: the clusters of each part are its blocks.
    dataset = blocks(4, 12)
    parts = assign_parts(dataset, 2, balance="nodes")
    clustered = with_clusters(dataset, parts, 2)
    cluster = clustered.nodes["node"].attrs["cluster"]
    assert cluster.dtype == np.int32
    assert np.bincount(cluster).tolist() == [12] * 4
    assert np.array_equal(cluster // 2, parts.parts["node"])
    sources, targets = dataset.edges[HOMO_EDGE].edge_index
    assert (cluster[sources] != cluster[targets]).sum() == 4  # the ring that joins the blocks


def test_clusters_of_all_types_are_numbered_over_the_whole_graph(tmp_path):
    dataset = bipartite()
    given = {"author": [1] * 4, "paper": [0, 0, 0, 1, 1, 0], "venue": [0, 3]}
    clustered = with_clusters(dataset, by_hand(dataset, given, 4), 3)
    for of, parts in given.items():
        assert (clustered.nodes[of].attrs["cluster"] // 3).tolist() == parts
    everything = np.concatenate([nodes.attrs["cluster"] for nodes in clustered.nodes.values()])
    assert set(everything) == {0, 1, 2, 3, 4, 5, 9}  # part 2 is empty, part 3 has one node


def test_clusters_are_stored_as_an_attribute(tmp_path):
    made = make_partition(spec(tmp_path / "parts", clusters=5), say=lambda line: None)
    assert made.options == {"clusters": 5}
    assert_sound(tmp_path / "parts")
    parts = open_parts(tmp_path / "parts").parts
    assert [sorted(set(part.nodes["node"].attrs["cluster"].tolist())) for part in parts.values()] == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9],
    ]  # fmt: skip
    said = []
    assert make_partition(spec(tmp_path / "parts", clusters=5), say=said.append) == made and "up to date" in said[0]
    make_partition(spec(tmp_path / "parts", clusters=6), say=said.append)
    assert said[2].startswith("replacing")


def test_an_attribute_called_cluster_is_not_overwritten():
    dataset = with_nodes(ring(6), "node", attrs={"cluster": np.zeros(6)})
    with pytest.raises(PartitionError, match="'node' has an attribute 'cluster' already; rename it"):
        with_clusters(dataset, by_hand(dataset, [0] * 6, 1), 2)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason=NO_DEBIAN)
@pytest.mark.parametrize("kind", ["homogeneous", "heterogeneous"])
def test_statistics_of_real_data_match_its_edges(tmp_path, kind):
    dataset = load_dataset("file", str(DEBIAN), {"hetero": str(kind == "heterogeneous")})
    assignment = assign_parts(dataset, 4)
    assert assignment.edge_cut < 0.25 * assign_parts(dataset, 4, "random").edge_cut
    assert assignment.balance < 1.05
    write_partition(dataset, assignment, tmp_path / "parts")
    assert_sound(tmp_path / "parts")
    description = describe(tmp_path / "parts")
    assert sum(part.cut_edges for part in description.parts) == round(assignment.edge_cut * dataset.num_edges)
    split = "package/train" if dataset.hetero else "train"
    assert sum(part.seeds[split] for part in description.parts) == 31833
