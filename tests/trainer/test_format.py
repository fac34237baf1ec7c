"""manifest.json: what is written is read back; what cannot be trusted is refused with a reason."""

from __future__ import annotations

import hashlib
import json

import pytest

from trainer.errors import PartitionError
from trainer.partition.format import (
    AttrSpec,
    FileEntry,
    Manifest,
    manifest_digest,
    read_manifest,
    write_manifest,
)


def a_manifest() -> Manifest:
    return Manifest(
        dataset="demo",
        fingerprint="f00d",
        num_parts=2,
        algorithm="metis",
        seed=3,
        num_nodes=5,
        num_edges=7,
        num_classes=4,
        offsets=(0, 3, 5),
        edge_cut=0.25,
        balance=1.2,
        attrs={"x": AttrSpec("float32", (5, 8))},
        splits={"train": 2},
        files=(
            FileEntry("part0/nodes/x.npy", 224, "aa", "float32", (3, 8)),
            FileEntry("part1/nodes/x.npy", 192, "bb", "float32", (2, 8)),
            FileEntry("shared/seeds/train.npy", 144, "cc", "int64", (2,)),
        ),
    )


def edited(folder, **changes):
    path = write_manifest(folder, a_manifest())
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            del raw[key]
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))
    return folder


def test_what_is_written_is_read_back(tmp_path):
    write_manifest(tmp_path, a_manifest())
    assert read_manifest(tmp_path) == a_manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_schema_on_disk(tmp_path):
    raw = json.loads(write_manifest(tmp_path, a_manifest()).read_text())
    assert (raw["format"], raw["version"]) == ("gnnfleet-partition", 1)
    assert raw["offsets"] == [0, 3, 5]
    assert raw["attrs"] == {"x": {"dtype": "float32", "shape": [5, 8]}}
    assert raw["files"][2] == {
        "path": "shared/seeds/train.npy", "bytes": 144, "sha256": "cc", "dtype": "int64", "shape": [2],
    }  # fmt: skip


def test_files_by_part():
    manifest = a_manifest()
    assert [entry.path for entry in manifest.files_of(1)] == ["part1/nodes/x.npy"]
    assert [entry.path for entry in manifest.files_of(None)] == ["shared/seeds/train.npy"]


def test_digest_is_that_of_the_file(tmp_path):
    path = write_manifest(tmp_path, a_manifest())
    assert manifest_digest(tmp_path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "not a gnnfleet-partition manifest"),
        ({"version": 2}, "format version 2, this program reads version 1"),
        ({"offsets": None}, "key 'offsets' is missing"),
        ({"offsets": [0, 5]}, "offsets must be num_parts \\+ 1 numbers from 0 to 5"),
        ({"offsets": [0, 6, 5]}, "offsets must not decrease"),
        ({"num_nodes": "5"}, "'5' is not a whole number"),
        ({"attrs": {"../x": {"dtype": "int8", "shape": [5]}}}, "cannot be a file name"),
        ({"files": [{"path": "../../etc/passwd", "bytes": 1, "sha256": "", "dtype": "", "shape": []}]}, "begin with"),
        ({"files": [{"path": "part0/../x", "bytes": 1, "sha256": "", "dtype": "", "shape": []}]}, "begin with"),
        ({"files": [{"path": "part0/x"}]}, "key 'bytes' is missing"),
    ],
)
def test_what_cannot_be_trusted_is_refused(tmp_path, changes, reason):
    with pytest.raises(PartitionError, match=reason) as caught:
        read_manifest(edited(tmp_path, **changes))
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_missing_folder_and_manifest_are_told_apart(tmp_path):
    with pytest.raises(PartitionError, match="the folder does not exist; make one"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(PartitionError, match="the folder holds no partition"):
        manifest_digest(tmp_path)


def test_truncated_json(tmp_path):
    path = write_manifest(tmp_path, a_manifest())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PartitionError, match="is invalid"):
        read_manifest(tmp_path)
