"""Tests of partitioning on disk: method `streaming`, memory limits, and continuing after an interruption."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from partition_kit import assert_sound
from trainer.core.errors import PartitionError
from trainer.core.row_sort import Scratch
from trainer.data.dataset import Dataset, EdgeData, NodeData
from trainer.data.stored_dataset import read_stored_dataset, store_dataset
from trainer.data.undirected import both_ways
from trainer.graph.open import open_graph
from trainer.partition import make
from trainer.partition.make import PartitionSpec, make_partition
from trainer.partition.methods.assign import assign_parts, choose_method
from trainer.sampler.types import RowRequest
from trainer.sources.load import load_dataset
from trainer.store.manifest import manifest_digest, read_manifest
from waiting import DEADLINE

REPOSITORY = Path(__file__).resolve().parents[2]

DATASETS = {
    "planted": ("synthetic", {"num_nodes": 8_000, "avg_degree": 10}),
    "several types": ("synthetic-hetero", {"num_nodes": 8_000}),
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("num_parts", [2, 5])
def test_streaming_cuts_little_more_than_metis(tmp_path: Path, name: str, num_parts: int) -> None:
    dataset = load_dataset(DATASETS[name][0], None, DATASETS[name][1])
    metis = assign_parts(dataset, num_parts, "metis")
    streaming = assign_parts(dataset, num_parts, "streaming", scratch=Scratch(tmp_path, 1 << 20))
    assert streaming.edge_cut < 1.5 * metis.edge_cut
    assert streaming.balance < 1.031
    for of, part in streaming.parts.items():
        assert np.bincount(part, minlength=num_parts).max() <= np.ceil(1.03 * len(part) / num_parts)
        seeds = dataset.nodes[of].splits.get("train", np.empty(0, int))
        assert np.bincount(part[seeds], minlength=num_parts).max() <= np.ceil(1.03 * len(seeds) / num_parts)


def test_streaming_depends_on_seed_and_graph_only(tmp_path: Path) -> None:
    dataset = load_dataset("synthetic", None, {"num_nodes": 3000})
    scratch = [Scratch(tmp_path / str(k), 1 << 20) for k in range(3)]
    for each in scratch:
        each.folder.mkdir()
    one, same, other = (
        assign_parts(dataset, 3, "streaming", seed, each).parts["node"]
        for seed, each in zip((4, 4, 5), scratch, strict=True)
    )
    assert (one == same).all() and (one != other).any()


def graph_of(edge_index: list[list[int]], num_nodes: int) -> Dataset:
    return Dataset.homogeneous("tiny", NodeData(num_nodes), EdgeData(np.array(edge_index, np.int64)), "x")


@pytest.mark.parametrize(
    ("edges", "num_nodes", "num_parts"),
    [
        ([[], []], 7, 3),
        ([[0], [0]], 5, 5),
        ([[0, 1], [1, 0]], 2, 2),
        ([[0] * 50, list(range(1, 51))], 60, 4),
    ],
    ids=["no edges", "a self loop", "two nodes", "a star"],
)
def test_streaming_of_tiny_graphs(tmp_path: Path, edges: list[list[int]], num_nodes: int, num_parts: int) -> None:
    found = assign_parts(graph_of(edges, num_nodes), num_parts, "streaming", scratch=Scratch(tmp_path, 1000))
    sizes = np.bincount(found.parts["node"], minlength=num_parts)
    assert sizes.sum() == num_nodes and sizes.min() >= 1


def test_auto_takes_metis_if_it_fits() -> None:
    dataset = load_dataset("synthetic", None, {"num_nodes": 3000})
    assert choose_method(dataset, 10**9)[0] == "metis"
    method, reason = choose_method(dataset, 10**6)
    assert method == "streaming" and "METIS needs about" in reason and "more than the 1 MB" in reason


@pytest.mark.parametrize("attrs", [False, True])
def test_undirected_edges_by_way_of_files_are_those_in_memory(tmp_path: Path, attrs: bool) -> None:
    rng = np.random.default_rng(0)
    one = {"edge_weight": rng.random(500), "edge_attr": rng.random((500, 3))} if attrs else {}
    edges = {
        ("a", "to", "a"): EdgeData(rng.integers(0, 30, (2, 500)), one),
        ("a", "in", "b"): EdgeData(rng.integers(0, 9, (2, 80)).astype(np.int32)),
    }
    in_memory = both_ways(edges, {"a": 30, "b": 9}, False, "x")
    on_disk = both_ways(edges, {"a": 30, "b": 9}, False, "x", Scratch(tmp_path, 2000))
    assert list(in_memory) == list(on_disk)
    for of, data in in_memory.items():
        assert on_disk[of].edge_index.dtype == data.edge_index.dtype
        assert (on_disk[of].edge_index == data.edge_index).all()
        assert {name: values.tolist() for name, values in on_disk[of].attrs.items()} == {
            name: values.tolist() for name, values in data.attrs.items()
        }


def test_a_stored_dataset_is_read_back(tmp_path: Path) -> None:
    dataset = load_dataset("synthetic-hetero", None, {"num_nodes": 300})
    mapped = np.lib.format.open_memmap(tmp_path / "own.npy", "w+", np.int64, (300,))
    store_dataset(dataset, tmp_path)
    count = len(list(tmp_path.iterdir()))
    again = read_stored_dataset(tmp_path)
    store_dataset(again, tmp_path)
    assert len(list(tmp_path.iterdir())) == count and len(mapped) == 300
    assert again.notes == dataset.notes and again.fingerprint == dataset.fingerprint and again.hetero
    for of, nodes in dataset.nodes.items():
        assert again.nodes[of].num_classes == nodes.num_classes
        for name, values in {**nodes.attrs, **nodes.splits}.items():
            found = {**again.nodes[of].attrs, **again.nodes[of].splits}[name]
            assert found.dtype == values.dtype and (found == values).all()
    for of, edges in dataset.edges.items():
        assert (again.edges[of].edge_index == edges.edge_index).all()


# --- make -------------------------------------------------------------------------------------------------------

OPTIONS = {"num_nodes": 5000, "edge_weight": True}


def spec(folder: Path, **more: object) -> PartitionSpec:
    return PartitionSpec("synthetic", str(folder), options=OPTIONS, num_parts=3, **more)  # type: ignore[arg-type]


def test_too_little_memory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PartitionError, match=r"5,000 nodes need at least 22. MB of memory, but only 10 MB may be"):
        make_partition(spec(tmp_path / "parts", memory="10MB"))
    assert os.listdir(tmp_path) == []


def test_a_limit_of_memory_does_not_change_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_partition(spec(tmp_path / "one", method="random"), say=str)
    monkeypatch.setattr(make, "_memory_of_steps", lambda *_: 1 << 16)
    make_partition(spec(tmp_path / "two", method="random", memory="1GB"), say=str)
    assert manifest_digest(tmp_path / "one") == manifest_digest(tmp_path / "two")


@pytest.mark.parametrize("how", [{"method": "metis"}, {"method": "frequency"}, {"method": "random", "clusters": 4}])
def test_metis_is_not_called_with_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    monkeypatch.setattr(make, "_memory_of_steps", lambda *_: 1 << 20)
    with pytest.raises(
        PartitionError, match=r"needs about \d+ MB.*but data\.partition\.memory \(--memory\) leaves 1 MB"
    ):
        make_partition(spec(tmp_path / "parts", memory="1GB", **how), say=str)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
from trainer.core import files
from trainer.partition import work_folder
from trainer.partition.make import PartitionSpec, make_partition
left = int(sys.argv[2])
def write_then_die(path, *words, real=work_folder.write_whole, **more):
    global left
    if path.suffix == ".done":
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    real(path, *words, **more)
work_folder.write_whole = write_then_die
options = {"num_nodes": 5000, "edge_weight": True}
make_partition(PartitionSpec("synthetic", sys.argv[1], options=options, num_parts=3, memory="1GB"))
"""


@pytest.mark.slow
def test_a_run_goes_on_after_each_kill(tmp_path: Path) -> None:
    make_partition(spec(tmp_path / "whole"), say=str)
    kills = 0
    while True:
        # every run finishes two more stages (assign, and each group of files) before it is killed
        command = [sys.executable, "-c", KILLED, str(tmp_path / "parts"), "2"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (tmp_path / "parts").exists()
        kills += 1
        assert kills < 20
    assert kills >= 2
    assert "going on with what an interrupted run left" in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["parts", "whole"]
    assert_sound(tmp_path / "parts")
    assert manifest_digest(tmp_path / "parts") == manifest_digest(tmp_path / "whole")


def test_another_partition_does_not_go_on_with_the_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "parts"), "2"]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, timeout=DEADLINE, check=False)
    assert (tmp_path / ".parts.work" / "assign.done").exists()
    said: list[str] = []
    make_partition(PartitionSpec("synthetic", str(tmp_path / "parts"), options={"num_nodes": 400}), said.append)
    assert not any("going on" in line for line in said)
    assert os.listdir(tmp_path) == ["parts"]
    assert read_manifest(tmp_path / "parts").nodes["node"].num_nodes == 400


def test_two_processes_do_not_make_the_same_parts(tmp_path: Path) -> None:
    # The second one waits, says for whom, and finds the parts.
    folder, waits, said = tmp_path / "parts", threading.Event(), []

    def say(line: str) -> None:
        said.append(line)
        waits.set()

    second = threading.Thread(target=make_partition, args=(spec(folder), say))
    with make.locked(folder, str):
        second.start()
        assert waits.wait(60) and not folder.exists()
        make._make_locked(spec(folder), folder, str)
    second.join(60)
    assert said[0].endswith(f", pid {os.getpid()} makes or sends the parts in {folder}; waiting for it")
    assert f"{folder} is up to date" in said[1] and os.listdir(tmp_path) == ["parts"]


def test_more_attributes_than_files_may_be_open(tmp_path: Path) -> None:
    source = tmp_path / "graph"
    source.mkdir()
    np.save(source / "edge_index.npy", np.stack([np.arange(100), (np.arange(100) * 7 + 1) % 100]))
    for k in range(80):
        np.save(source / f"a{k}.npy", np.arange(100) * k + 1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, most[1]))
        options = {"num_nodes": 100, "subset": 50}
        spec = PartitionSpec("file", str(tmp_path / "parts"), str(source), options, 2, memory="1GB")
        make_partition(spec, say=lambda line: None)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, most[1]))
        with open_graph(tmp_path / "parts") as graph:
            (rows,) = graph.access.gather([RowRequest("node", np.arange(50), ("a79",))])
        assert (np.asarray(rows["a79"]) % 79 == 1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
