"""Tests that verification names the damaged file of a partition folder and the kind of damage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graphs import ring, skewed
from partition_kit import EDGE, NODE, by_hand, flip_byte, hubs, odd_types, written
from trainer.core.errors import PartitionError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.partition.verify import verify_partition
from trainer.partition.write import write_partition
from trainer.store.manifest import read_manifest, write_manifest
from trainer.store.part_store import open_parts


def test_a_flipped_byte_names_its_file(tmp_path):
    # Every file of a graph with several types: edge attributes, source times, id tables.
    folder = written(odd_types(), tmp_path / "parts", 2)
    entries = [entry for entry in read_manifest(folder).files if 0 not in entry.shape and entry.part_id != 0]
    assert "part1/edges/v-1.0__pre-depends__v-1.0/attrs/weight.npy" in {entry.path for entry in entries}
    for entry in entries:
        flip_byte(folder / entry.path)
        findings = verify_partition(folder, [1])
        assert findings[0].path == entry.path and "does not match its sha256" in findings[0].problem
        flip_byte(folder / entry.path)
    assert verify_partition(folder) == []


def test_a_missing_and_a_truncated_file(tmp_path):
    folder = written(skewed(100, 900), tmp_path / "parts", 2)
    (folder / "part0" / NODE / "attrs/x.npy").unlink()
    target = folder / "part1" / EDGE / "indices.npy"
    target.write_bytes(target.read_bytes()[:-8])
    assert [str(finding) for finding in verify_partition(folder, digests=False)] == [
        f"part0/{NODE}/attrs/x.npy: missing",
        f"part1/{EDGE}/indices.npy: {target.stat().st_size} bytes, the manifest says {target.stat().st_size + 8}",
    ]
    with pytest.raises(PartitionError, match=rf"part0/{NODE}/attrs/x.npy is missing"):
        open_parts(folder)


def test_one_part_can_be_verified_without_the_others(tmp_path):
    folder = written(odd_types(), tmp_path / "parts", 2)
    for path in sorted((folder / "part1").rglob("*.npy")):
        path.unlink()
    assert verify_partition(folder, part_ids=[0]) == []
    assert {finding.problem for finding in verify_partition(folder)} == {"missing"}
    with pytest.raises(PartitionError, match="no part 2; the folder has 2 parts"):
        verify_partition(folder, part_ids=[2])


def at(position, value):
    def change(array):
        array[position] = value

    return change


RANGES = {
    "seed outside": (f"shared/{NODE}/seeds/train.npy", at(3, 100), "position 3: 100 is outside 0 to 99"),
    "global id outside": (f"shared/{NODE}/global_id.npy", at(5, -7), "position 5: -7 is outside 0 to 99"),
    "no such node": (f"part0/{NODE}/orig_id.npy", at(-1, 100), "position 49: 100 is outside 0 to 99"),
    "indptr start": (f"part1/{EDGE}/indptr.npy", at(0, 1), "begins with 1, expected 0"),
    "indptr order": (f"part1/{EDGE}/indptr.npy", at(4, 0), "position 4: 0 is below the value before it"),
    "indptr end": (f"part1/{EDGE}/indptr.npy", at(-1, 10_000), "ends with 10000, but the manifest's offsets give"),
    "no such source": (f"part0/{EDGE}/indices.npy", at(7, -1), "position 7: -1 is outside 0 to 99"),
    "no such edge": (f"part0/{EDGE}/orig_id.npy", at(7, 900), "position 7: 900 is outside 0 to 899"),
}  # fmt: skip


@pytest.mark.parametrize("name", RANGES)
def test_every_range_is_checked(tmp_path, name):
    path, change, problem = RANGES[name]
    folder = tmp_path / "parts"
    write_partition(hubs(), by_hand(hubs(), [0, 1] * 50, 2), folder)
    change(np.lib.format.open_memmap(folder / path, mode="r+"))
    found = [str(finding) for finding in verify_partition(folder, digests=False)]
    assert any(problem in finding for finding in found), found


def test_sources_are_counted_within_their_own_type(tmp_path):
    # With 40 targets and 5 sources, id 5 is a valid target but not a valid source.
    folder = written(odd_types(), tmp_path / "parts", 2)
    path = "part1/edges/tag__has.not__v-1.0/indices.npy"
    at(2, 5)(np.lib.format.open_memmap(folder / path, mode="r+"))
    assert [str(finding) for finding in verify_partition(folder, digests=False)] == [
        f"{path}: position 2: 5 is outside 0 to 4"
    ]


def changed(folder, spec_of, **changes):
    manifest = read_manifest(folder)
    types = {"nodes": HOMO_NODE, "edges": HOMO_EDGE}
    specs = getattr(manifest, spec_of)
    write_manifest(folder, replace(manifest, **{spec_of: {types[spec_of]: replace(specs[types[spec_of]], **changes)}}))


def test_missing_edges_are_found(tmp_path):
    dataset = ring(10)
    write_partition(dataset, by_hand(dataset, [0, 1] * 5, 2), tmp_path / "parts")
    changed(tmp_path / "parts", "edges", num_edges=12, offsets=(0, 5, 12))
    found = [str(finding) for finding in verify_partition(tmp_path / "parts")]
    assert f"part1/{EDGE}/indptr.npy: ends with 5, but the manifest's offsets give the part 7 edges" in found


def test_an_attribute_of_another_type_or_shape(tmp_path):
    folder = written(ring(10), tmp_path / "parts", 1)
    spec = read_manifest(folder).nodes[HOMO_NODE].attrs["x"]
    changed(folder, "nodes", attrs={"x": replace(spec, dtype="bfloat16"), "y": replace(spec, shape=(10, 2))})
    assert [str(finding) for finding in verify_partition(folder)] == [
        f"part0/{NODE}/attrs/x.npy: holds float32 [10, 3], expected uint16 [10, 3]",
        f"part0/{NODE}/attrs/y.npy: holds int64 [10], expected float32 [10, 2]",
    ]


def test_a_manifest_that_omits_a_file(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, files=tuple(f for f in manifest.files if not f.path.endswith("/x.npy"))))
    assert [str(finding) for finding in verify_partition(folder)] == [
        f"part{p}/{NODE}/attrs/x.npy: not listed in the manifest" for p in (0, 1)
    ]


def test_a_manifest_that_lists_a_file_of_no_type(tmp_path):
    folder = written(ring(10), tmp_path / "parts", 1)
    y = read_manifest(folder).nodes[HOMO_NODE].attrs["y"]
    changed(folder, "nodes", attrs={"y": y})
    assert [str(finding) for finding in verify_partition(folder)] == [
        f"part0/{NODE}/attrs/x.npy: listed in the manifest, but does not belong to any node or edge type"
    ]


def test_foreign_files_in_a_partition_folder(tmp_path):
    folder = written(ring(10), tmp_path / "parts")
    for name in ("part1/nodes/paper/orig_id.npy", "shared/notes.txt", "part0/.gnnfleet-digests.json", "readme.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("?")
    assert [str(finding) for finding in verify_partition(folder)] == [
        "shared/notes.txt: is not a file of this partition; move it away",
        "part1/nodes/paper/orig_id.npy: is not a file of this partition; move it away",
    ]
