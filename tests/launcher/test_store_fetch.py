"""Tests of ``data.store``: fetching and uploading parts. The store is a local folder, with simulated failures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.node.remote_folder import RemoteFolder, StoreError
from launcher.node.store import fetch as fetch_module
from launcher.node.store.push_parts import PUSHED, push_parts
from launcher.plan.partition import PartitionFiles
from store_kit import X0, FaultyStore, RecordedLines, fetch_into, flip_byte, parts_in, visible_files, wanted


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "CHUNK", 10_000)
    monkeypatch.setattr(fetch_module, "_PAUSES", (0.0, 0.0, 0.0))


def push(parts: PartitionFiles, store: Path, *, replace: bool = False) -> int:
    files = [[file.path, file.bytes, file.sha256] for file in parts.files]
    spec = {"url": f"file://{store}", "options": {}, "folder": parts.folder, "files": files, "made": ["--seed", "0"]}
    return push_parts({**spec, "replace": replace}, RecordedLines())


def test_a_node_gets_its_part_and_the_shared_files(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    lines = fetch_into(tmp_path / "node", FaultyStore(tmp_path / "parts"), wanted(parts, 1))
    assert visible_files(tmp_path / "node") == {file.path for file in parts.of_parts([1])}
    for path in visible_files(tmp_path / "node"):
        assert (tmp_path / "node" / path).read_bytes() == (tmp_path / "parts" / path).read_bytes(), path
    total = sum(file.bytes for file in parts.of_parts([1]))
    assert lines.lines[0] == {"kind": "start", "bytes": total, "present": 0}
    again = FaultyStore(tmp_path / "parts")
    assert fetch_into(tmp_path / "node", again, wanted(parts, 1)).lines == [
        {"kind": "start", "bytes": 0, "present": total}
    ]
    assert again.reads == []


def test_a_fetch_continues_at_the_byte_where_it_stopped(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    whole = (tmp_path / "parts" / X0).read_bytes()
    begun = tmp_path / "node" / f"{X0}.part"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(whole[:33_333])
    store = FaultyStore(tmp_path / "parts")
    fetch_into(tmp_path / "node", store, wanted(parts, 0))
    assert [(start, end) for path, start, end in store.reads if path == X0] == [(33_333, 43_333), (43_333, len(whole))]
    assert (tmp_path / "node" / X0).read_bytes() == whole and not begun.exists()


@pytest.mark.parametrize("place", [X0, f"{X0}.part", "part0/nodes"])
def test_what_stands_in_the_place_of_a_file_or_folder_is_replaced(tmp_path: Path, place: str) -> None:
    parts = parts_in(tmp_path / "parts")
    store = FaultyStore(tmp_path / "parts")
    fetch_into(tmp_path / "node", store, wanted(parts, 0))
    shutil.rmtree(tmp_path / "node/part0")
    where = tmp_path / "node" / place
    where.parent.mkdir(parents=True)
    where.touch() if place.endswith("nodes") else where.mkdir()
    fetch_into(tmp_path / "node", store, wanted(parts, 0))
    assert (tmp_path / "node" / X0).read_bytes() == (tmp_path / "parts" / X0).read_bytes()


def test_cut_connections_are_repeated_and_leave_what_has_arrived(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    fetch_into(tmp_path / "node", FaultyStore(tmp_path / "parts", cuts=3), wanted(parts, 0))
    assert (tmp_path / "node/manifest.json").exists()
    with pytest.raises(StoreError, match="cannot be read"):
        fetch_into(tmp_path / "other", FaultyStore(tmp_path / "parts", cuts=999), wanted(parts, 0))
    assert not (tmp_path / "other/manifest.json").exists()


def test_a_wrong_byte_is_refused_after_a_second_transfer(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    flip_byte(tmp_path / "parts" / X0)
    store = FaultyStore(tmp_path / "parts")
    with pytest.raises(StoreError, match=rf"parts/{X0}: digest .*, expected .*, in two transfers: .*partition push"):
        fetch_into(tmp_path / "node", store, wanted(parts, 0))
    assert sum(path == X0 and start == 0 for path, start, _ in store.reads) == 2
    left = visible_files(tmp_path / "node")
    assert X0 not in left and f"{X0}.part" not in left and "manifest.json" not in left


def test_a_short_or_missing_file_is_reported(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    os.truncate(tmp_path / "parts" / X0, 25_000)
    with pytest.raises(StoreError, match="fewer bytes than its manifest says.*push the parts again"):
        fetch_into(tmp_path / "node", FaultyStore(tmp_path / "parts"), wanted(parts, 0))
    (tmp_path / "parts" / X0).unlink()
    with pytest.raises(StoreError, match="missing in the store, but its manifest lists it"):
        fetch_into(tmp_path / "node", FaultyStore(tmp_path / "parts"), wanted(parts, 0))


def test_a_full_disk_is_reported_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_in(tmp_path / "parts")
    monkeypatch.setattr(fetch_module, "disk", lambda folder: {"free": 1000})
    store = FaultyStore(tmp_path / "parts")
    with pytest.raises(StoreError, match="disk full at .*still to be fetched, 1.0 kB free"):
        fetch_into(tmp_path / "node", store, wanted(parts, 0))
    assert store.reads == []


def test_an_upload_is_complete_with_its_manifest_and_can_be_continued(tmp_path: Path) -> None:
    parts, store = parts_in(tmp_path / "parts"), tmp_path / "store"
    assert push(parts, store) == len(parts.files)
    assert visible_files(store) == {file.path for file in parts.files}
    assert json.loads((store / PUSHED).read_text()) == {
        "manifest": parts.files[-1].sha256,
        "made": ["--seed", "0"],
    }
    (store / "manifest.json").unlink()
    os.truncate(store / X0, 5)
    assert push(parts, store) == 2, "the cut file and the manifest"
    assert (store / X0).read_bytes() == (tmp_path / "parts" / X0).read_bytes()
    flip_byte(store / X0)
    assert push(parts_in(tmp_path / "parts", 60_000), store, replace=True) == len(parts.files)


def test_replacing_parts_repairs_them_and_leaves_no_file_of_others(tmp_path: Path) -> None:
    parts, store = parts_in(tmp_path / "parts"), tmp_path / "store"
    push(parts, store, replace=True)
    (store / "part7").mkdir(parents=True)
    (store / "part7/x.npy").write_text("of other parts")
    flip_byte(store / X0)
    assert push(parts, store, replace=True) == len(parts.files)
    assert visible_files(store) == {file.path for file in parts.files}
    assert (store / X0).read_bytes() == (tmp_path / "parts" / X0).read_bytes()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_stands_in_the_place_of_a_file_in_a_store_is_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    parts, store = parts_in(tmp_path / "parts"), tmp_path / "store"
    push(parts, store)
    for name in (X0, "manifest.json"):
        (store / name).unlink()
        make(store / name)
    with pytest.raises(StoreError, match=rf"{X0} is missing in the store.*push --config FILE --force"):
        fetch_into(tmp_path / "node", RemoteFolder(f"file://{store}", {}), wanted(parts, 0))
    push(parts, store, replace=True)
    fetch_into(tmp_path / "node", RemoteFolder(f"file://{store}", {}), wanted(parts, 0))
    assert visible_files(tmp_path / "node") == {file.path for file in parts.of_parts([0])}


def test_damaged_parts_are_not_uploaded(tmp_path: Path) -> None:
    parts = parts_in(tmp_path / "parts")
    flip_byte(tmp_path / "parts" / X0)
    with pytest.raises(StoreError, match=f"{X0} differs from its manifest or is missing; nothing was uploaded"):
        push(parts, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_urls_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"foo://bucket/x cannot be opened \(ValueError: Protocol not known: foo\)"):
        RemoteFolder("foo://bucket/x", {})
    with pytest.raises(StoreError, match="does not exist in the store"):
        RemoteFolder(f"file://{tmp_path}", {}).read("manifest.json")
