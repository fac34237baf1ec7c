"""Tests that damaged, huge and deeply nested files of others end in one clear message."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.core.errors import DataError, PartitionError, SettingsError
from trainer.core.files import read_regular
from trainer.partition.foreign.dgl import DGL
from trainer.partition.foreign.pyg import PYG
from trainer.partition.foreign.tensor_files import load_tensors
from trainer.partition.source import open_source
from trainer.service.cluster import read_cluster
from trainer.sources.load import load_dataset
from trainer.sources.pyg import read_pt
from trainer.store.manifest import read_manifest
from trainer.store.npy import map_npy

DEEP = "[" * 200_000


def npy(header: bytes, version: bytes = b"\x01\x00") -> bytes:
    size = len(header).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + header


HEADERS = {
    "empty": b"",
    "deep": npy(b"(" * 9000),
    "huge header": npy(b" " * 60_000),
    "header longer than the file": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{}",
    "no expression": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (3\xff"),
    "null bytes": npy(b"\0" * 64),
    "huge shape": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 8)}"),
    "negative shape": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3,)}"),
    "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (3,)}"),
    "unknown dtype": npy(b"{'descr': 'zz', 'fortran_order': False, 'shape': (3,)}"),
    "deep dtype": npy(
        b"{'descr': " + b"[('a', " * 200 + b"'<f4'" + b")]" * 200 + b", 'fortran_order': 0, 'shape': ()}"
    ),
    "cut": npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000,)}") + bytes(8),
}


@pytest.mark.parametrize("name", HEADERS)
def test_an_odd_npy_header_is_one_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.npy").write_bytes(HEADERS[name])
    np.save(tmp_path / "edge_index.npy", np.zeros((2, 3), np.int64))
    with pytest.raises(ValueError) as refused:
        map_npy(tmp_path / "x.npy")
    assert "\n" not in str(refused.value) and "allow_pickle" not in str(refused.value)
    with pytest.raises(DataError, match=r"x\.npy cannot be read as a numpy array.{0,400}$"):
        load_dataset("file", str(tmp_path))


def test_an_odd_npz_is_one_message(tmp_path: Path) -> None:
    path, content = tmp_path / "graph.npz", io.BytesIO()
    np.savez(content, edge_index=np.zeros((2, 3), np.int64), x=np.zeros((3, 2)))
    for damaged in (b"PK", content.getvalue()[:-40], content.getvalue().replace(b"NUMPY", b"NUMBY")):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"graph\.npz cannot be read as a numpy array"):
            load_dataset("file", str(path))


def test_an_npz_that_unpacks_to_more_than_the_memory_is_refused_unread(tmp_path: Path, monkeypatch) -> None:
    np.savez_compressed(tmp_path / "graph.npz", edge_index=np.zeros((2, 3), np.int64), x=np.zeros((1 << 18, 32)))
    assert os.path.getsize(tmp_path / "graph.npz") < 1 << 20
    monkeypatch.setattr("trainer.core.memory.available_memory", lambda: 32_000_000)
    with pytest.raises(DataError, match=r"graph\.npz: its arrays take 67 MB when unpacked, but only 32 MB.* as \.npy"):
        load_dataset("file", str(tmp_path / "graph.npz"))


def test_a_pt_file_that_was_packed_again_has_the_same_values(tmp_path: Path, monkeypatch) -> None:
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 400_000, np.uint8))  # does not get smaller
    torch.save({"noise": noise, "zeros": torch.zeros(1 << 20)}, tmp_path / "stored.pt")
    with (
        zipfile.ZipFile(tmp_path / "stored.pt") as old,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert torch.equal(load_tensors(tmp_path / "x.pt")["noise"], noise)
    monkeypatch.setattr("trainer.core.memory.available_memory", lambda: 1 << 20)
    assert torch.equal(load_tensors(tmp_path / "stored.pt")["noise"], noise), "it is mapped"
    for read in (load_tensors, read_pt):
        with pytest.raises(DataError, match=r"x\.pt: its arrays take 5 MB when unpacked, but only 1 MB"):
            read(tmp_path / "x.pt")


def test_deep_json_is_one_message(tmp_path: Path) -> None:
    for name in ("manifest.json", "META.json", "num_nodes.json"):
        (tmp_path / name).write_text(DEEP)
    (tmp_path / "part.json").write_text(DEEP)
    np.save(tmp_path / "a__to__a.npy", np.zeros((2, 3), np.int64))
    with pytest.raises(PartitionError, match=r"manifest\.json is invalid: .*nested too deeply"):
        read_manifest(tmp_path)
    with pytest.raises(DataError, match="nested too deeply"):
        PYG.count(tmp_path)
    with pytest.raises(DataError, match="nested too deeply"):
        load_dataset("file", str(tmp_path))
    with pytest.raises(SettingsError, match="is not a cluster.json"):
        read_cluster(tmp_path / "part.json")
    assert not DGL.found(tmp_path)
    with pytest.raises(DataError, match="option time_attrs must be names"):
        load_dataset("file", str(tmp_path), {"time_attrs": DEEP})


def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PartitionError, match="it has 1,099,511,627,776 bytes, more than"):
        read_manifest(tmp_path)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(ValueError, match="not a regular file"):
        map_npy(tmp_path / "x.npy")


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000])
def test_odd_characters_in_a_path_are_one_message(source: str) -> None:
    edges = {"to": {"files": "a", "source": "a", "target": "b"}}
    tables = {"nodes": {"a": {"files": "a", "id": "a"}}, "edges": edges}
    for dataset, options in (("file", {}), ("tables", tables)):
        with pytest.raises(DataError, match="does not exist|is not a folder"):
            load_dataset(dataset, source, options)
    with pytest.raises(DataError, match="does not exist"):
        open_source(source)


def test_a_folder_in_the_place_of_a_file_takes_no_descriptor(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(OSError, match="Is a directory"):
            read_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_an_nfs_server_has_delegated_to_a_client_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("{}")
    holder = os.open(path, os.O_RDWR)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel asks for the lease
    client = threading.Timer(0.2, lambda: fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    client.start()
    try:
        assert read_regular(path) == b"{}"
    finally:
        client.join()
        signal.signal(signal.SIGIO, before)
        os.close(holder)
