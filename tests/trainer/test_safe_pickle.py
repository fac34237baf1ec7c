"""Tests that no pickle in the files of a dataset or of another program's partition runs code."""

from __future__ import annotations

import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.core.errors import DataError
from trainer.partition.foreign.glt import GLT
from trainer.partition.foreign.tensor_files import load_pickled_tensors, load_pickled_values, load_tensors
from trainer.sources.load import load_dataset


class Hostile:
    """Creates the file ``marker`` when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def cora(root: Path) -> Path:
    """Write the raw files of a small graph in the format of Planetoid:Cora, and return their folder."""
    sparse = pytest.importorskip("scipy.sparse")
    raw = root / "Planetoid" / "Cora" / "raw"
    raw.mkdir(parents=True)
    rows = sparse.csr_matrix(np.eye(600, 3, dtype=np.float32))
    labels = np.eye(7, dtype=np.int32)[np.arange(600) % 7]
    graph = defaultdict(list, {k: [(k + 1) % 602] for k in range(602)})
    files = {
        "x": rows[:4], "tx": rows[:2], "allx": rows, "y": labels[:4], "ty": labels[:2], "ally": labels, "graph": graph,
    }  # fmt: skip
    for name, content in files.items():
        (raw / f"ind.cora.{name}").write_bytes(pickle.dumps(content, protocol=2))
    (raw / "ind.cora.test.index").write_text("600\n601\n")
    return raw


def test_a_dataset_with_pickled_raw_files_is_read(tmp_path: Path) -> None:
    cora(tmp_path)
    for _ in range(2):  # the second time from the processed file
        data = load_dataset("Planetoid:Cora", str(tmp_path))
        assert (data.num_nodes, data.num_edges, data.nodes["node"].num_classes) == (602, 602, 7)


@pytest.mark.parametrize("place", ["raw/ind.cora.graph", "raw/ind.cora.allx"])
def test_raw_files_run_no_code(tmp_path: Path, place: str) -> None:
    raw, marker = cora(tmp_path), tmp_path / "ran"
    (raw.parent / place).write_bytes(pickle.dumps(Hostile(marker), protocol=2))
    with pytest.raises(DataError, match=r"Planetoid:Cora: a file in .* is refused, as reading it could run code"):
        load_dataset("Planetoid:Cora", str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize("place", ["pre_transform.pt", "pre_filter.pt", "data.pt"])
def test_processed_files_run_no_code(tmp_path: Path, place: str) -> None:
    raw, marker = cora(tmp_path), tmp_path / "ran"
    load_dataset("Planetoid:Cora", str(tmp_path))
    torch.save(Hostile(marker), raw.parent / "processed" / place)
    with pytest.raises(DataError, match="is refused, as reading it could run code"):
        load_dataset("Planetoid:Cora", str(tmp_path))
    assert not marker.exists()


def test_torchscript_in_place_of_a_tensor_is_refused(tmp_path: Path) -> None:
    raw = cora(tmp_path)
    load_dataset("Planetoid:Cora", str(tmp_path))
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(raw.parent / "processed" / "pre_transform.pt"))  # type: ignore[no-untyped-call]
    with pytest.raises(DataError, match="is refused, as reading it could run code .*TorchScript"):
        load_dataset("Planetoid:Cora", str(tmp_path))


def test_arrays_of_objects_run_no_code(tmp_path: Path) -> None:
    marker, raw = tmp_path / "ran", tmp_path / "FacebookPagePage" / "raw"
    raw.mkdir(parents=True)
    np.savez(raw / "facebook.npz", features=np.array([Hostile(marker)]), edges=np.zeros((2, 1)), target=np.zeros(1))
    with pytest.raises(DataError, match="is refused, as reading it could run code"):
        load_dataset("FacebookPagePage", str(tmp_path))
    assert not marker.exists()


def test_unpickling_elsewhere_is_as_before(tmp_path: Path) -> None:
    cora(tmp_path)
    load_dataset("Planetoid:Cora", str(tmp_path))
    pickle.loads(pickle.dumps(Hostile(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", [load_tensors, load_pickled_values, lambda path: list(load_pickled_tensors(path))])
def test_files_of_partitions_run_no_code(tmp_path: Path, read: Any) -> None:
    marker, path = tmp_path / "ran", tmp_path / "file"
    for content in (pickle.dumps(Hostile(marker)), pickle.dumps({"a": Hostile(marker)}, protocol=2)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"file is not a file of tensors, or is damaged"):
            read(path)
    torch.save({"a": Hostile(marker)}, path)
    with pytest.raises(DataError, match=r"file is not a file of tensors, or is damaged"):
        read(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",  # a bytes object of 2**63 bytes
        b"\x80\x04N" + b"r\xff\xff\xff\x7f.",  # the memo at place 2**31
        b"\x80\x04" + b"]" * 2_000_000 + b"a" * 1_999_999 + b".",  # lists in lists
        b"\x80\x04" + b"(" * 100_000,
        b"",
    ],
)
def test_a_huge_or_damaged_meta_is_one_message(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "META").write_bytes(content)
    with pytest.raises(DataError, match="META"):
        GLT.count(tmp_path)
