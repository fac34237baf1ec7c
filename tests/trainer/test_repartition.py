"""Tests of ``partition repartition``, and of restoring a graph from its partition folder."""

from __future__ import annotations

import filecmp

import numpy as np
import pytest
from click.testing import CliRunner

from fast_cases import fast_cases
from foreign_kit import assert_same_graph
from partition_kit import flip_byte, odd_types, written
from trainer.core.errors import PartitionError
from trainer.data.work_arrays import WorkArrays
from trainer.partition.cli import partition
from trainer.partition.make import PartitionSpec, make_partition, repartition_spec
from trainer.partition.restore import restore_graph

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


CHANGES = [
    {}, {"rows": "int8"}, {"rows": "float16", "clusters": 2}, {"method": "hash", "seed": 5}, {"method": "frequency"},
]  # fmt: skip


@pytest.mark.parametrize("changes", fast_cases(CHANGES, CHANGES[2], CHANGES[3]), ids=str)
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


def test_a_damaged_folder_is_not_restored(tmp_path):
    parts = made(tmp_path / "parts", 2)
    flip_byte(parts / "part1/nodes/paper/attrs/x.npy")
    with pytest.raises(PartitionError, match="part1/nodes/paper/attrs/x.npy"):
        make_partition(repartition_spec(parts, tmp_path / "out", 3), say=lambda line: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts"]
