"""Tests of manifest.json: it is read as written, and invalid content is refused with a reason."""

from __future__ import annotations

import hashlib
import json

import pytest

from trainer.core.errors import PartitionError
from trainer.store.manifest import (
    AttrSpec,
    EdgeSpec,
    FileEntry,
    Manifest,
    NodeSpec,
    manifest_digest,
    read_manifest,
    write_manifest,
)

CITES = ("paper", "cites", "paper")


def a_manifest() -> Manifest:
    return Manifest(
        dataset="demo",
        fingerprint="f00d",
        num_parts=2,
        algorithm="metis",
        seed=3,
        options={"balance": "types", "fanouts": [15, 10]},
        hetero=True,
        nodes={
            "paper": NodeSpec(5, (0, 3, 5), {"x": AttrSpec("bfloat16", (5, 8))}, {"train": 2}, 4),
            "v-1.0": NodeSpec(0, (0, 0, 0), {}, {}, 0),
        },
        edges={CITES: EdgeSpec(7, (0, 7, 7), {"weight": AttrSpec("float32", (7,))}, ("time",), 0.25)},
        edge_cut=0.25,
        balance=1.2,
        graph_attrs={"scale": AttrSpec("float64", ())},
        files=(
            FileEntry("part0/nodes/paper/attrs/x.npy", 176, "aa", "uint16", (3, 8)),
            FileEntry("part1/nodes/paper/attrs/x.npy", 160, "bb", "uint16", (2, 8)),
            FileEntry("shared/nodes/paper/seeds/train.npy", 144, "cc", "int64", (2,)),
        ),
    )


def edited(folder, change):
    """Write a manifest, apply ``change`` to its JSON, and return its folder."""
    path = write_manifest(folder, a_manifest())
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return folder


def put(*keys):
    """Return a function that sets one value in the JSON of a manifest, for ``edited``.

    keys: the path of keys to the value, outermost key first; the last argument is the new value.
    """

    def change(raw):
        *path, key, value = keys
        for step in path:
            raw = raw[step]
        raw[key] = value

    return change


def without(*keys):
    def change(raw):
        for step in keys[:-1]:
            raw = raw[step]
        del raw[keys[-1]]

    return change


def test_a_manifest_is_read_as_written(tmp_path):
    write_manifest(tmp_path, a_manifest())
    assert read_manifest(tmp_path) == a_manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_schema_on_disk(tmp_path):
    raw = json.loads(write_manifest(tmp_path, a_manifest()).read_text())
    assert (raw["format"], raw["version"]) == ("gnnfleet-partition", 3)
    assert list(raw["nodes"]) == ["paper", "v-1.0"] and list(raw["edges"]) == ["paper__cites__paper"]
    assert raw["nodes"]["paper"] == {
        "num_nodes": 5, "offsets": [0, 3, 5], "attrs": {"x": {"dtype": "bfloat16", "shape": [5, 8]}},
        "splits": {"train": 2}, "num_classes": 4,
    }  # fmt: skip
    assert raw["edges"]["paper__cites__paper"]["src_times"] == ["time"]
    assert raw["graph_attrs"] == {"scale": {"dtype": "float64", "shape": []}}
    assert raw["files"][2] == {
        "path": "shared/nodes/paper/seeds/train.npy", "bytes": 144, "sha256": "cc", "dtype": "int64", "shape": [2],
    }  # fmt: skip


def test_a_manifest_is_laid_out_in_readable_lines(tmp_path):
    # Each file, each attribute and the offsets of a type take one line.
    lines = write_manifest(tmp_path, a_manifest()).read_text().splitlines()
    assert '   "offsets": [0, 3, 5],' in lines
    assert '    "x": {"dtype": "bfloat16", "shape": [5, 8]}' in lines
    assert sum('"path"' in line for line in lines) == 3 and len(lines) <= 52


def test_bfloat16_is_stored_as_uint16():
    assert AttrSpec("bfloat16", (1,)).stored == "uint16" and AttrSpec("bool", (1,)).stored == "bool"


def test_files_by_part():
    manifest = a_manifest()
    assert [entry.path for entry in manifest.files_of(1)] == ["part1/nodes/paper/attrs/x.npy"]
    assert [entry.path for entry in manifest.files_of(None)] == ["shared/nodes/paper/seeds/train.npy"]


def test_digest_is_that_of_the_file(tmp_path):
    path = write_manifest(tmp_path, a_manifest())
    assert manifest_digest(tmp_path) == hashlib.sha256(path.read_bytes()).hexdigest()


def a_file(path):
    return {"path": path, "bytes": 1, "sha256": "", "dtype": "int8", "shape": []}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("format", "other"), "not a gnnfleet-partition manifest"),
        (put("version", 1), "format version 1, this program reads 3; make the partition again"),
        (without("nodes", "paper", "offsets"), "missing required field `offsets`"),
        (put("nodes", "paper", "offsets", [0, 5]), "offsets must be num_parts \\+ 1 numbers from 0 to 5"),
        (put("nodes", "paper", "offsets", [0, 6, 5]), "offsets must not decrease"),
        (put("edges", "paper__cites__paper", "offsets", [0, 1, 2]), "offsets must be num_parts .* from 0 to 7"),
        (put("nodes", "paper", "num_nodes", "5"), r"Expected `int`, got `str` - at `\$.num_nodes`"),
        (put("nodes", "paper", "attrs", "../x", {"dtype": "int8", "shape": [5]}), "cannot be a file name"),
        (put("nodes", "paper", "attrs", "x", {"dtype": "int8", "shape": [4]}), "'x' has shape .4., expected 5 rows"),
        (put("nodes", "paper", "attrs", "x", {"dtype": "int9", "shape": [5]}), "data type 'int9' not understood"),
        (put("nodes", "../paper", {}), "cannot name a node type or relation"),
        (put("nodes", "a__b__c", {}), "'a__b__c' is not a node type"),
        (put("edges", "paper__by__author", {}), "'paper__by__author' is not an edge type between the node types"),
        (put("files", [a_file("../../etc/passwd")]), "begin with"),
        (put("files", [a_file("part0/../x")]), "begin with"),
        (
            put("files", [a_file("part2/nodes/paper/orig_id.npy")]),
            "belongs to a part that does not exist; num_parts is 2",
        ),
        (put("files", [{"path": "part0/x"}]), "missing required field `bytes`"),
    ],
)
def test_invalid_manifests_are_refused(tmp_path, change, reason):
    with pytest.raises(PartitionError, match=reason) as caught:
        read_manifest(edited(tmp_path, change))
    assert str(tmp_path / "manifest.json") in str(caught.value)


def test_a_missing_folder_and_a_missing_manifest_have_different_messages(tmp_path):
    with pytest.raises(PartitionError, match="the folder does not exist; make one"):
        read_manifest(tmp_path / "nowhere")
    with pytest.raises(PartitionError, match="the folder holds no partition"):
        manifest_digest(tmp_path)


def test_truncated_json(tmp_path):
    path = write_manifest(tmp_path, a_manifest())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PartitionError, match="is invalid"):
        read_manifest(tmp_path)
