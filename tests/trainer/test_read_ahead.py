"""Tests of parts that are larger than the memory: equal batches, and only the needed pages of files are read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from gateway_kit import written
from load_kit import assert_same, homo_data
from trainer import DistGraphSAINTEdgeSampler, DistLinkNeighborLoader, DistNeighborLoader
from trainer.core import memory
from trainer.graph.open import open_graph
from trainer.sampler import local_graph
from trainer.store import read_ahead
from trainer.store.part_files import map_array

LOADERS = {
    "plain": lambda g: DistNeighborLoader(g, [4, 3], "train", batch_size=20),
    "weighted": lambda g: DistNeighborLoader(g, [4, 3], "train", weight_attr="edge_weight", batch_size=20),
    "times of nodes": lambda g: DistNeighborLoader(g, [4, 3], "train", time_attr="time", batch_size=20),
    "times of edges": lambda g: DistNeighborLoader(
        g, [4], "train", time_attr="edge_time", input_time=np.full(len(g.store.seeds("node", "train")), 40)
    ),
    "links": lambda g: DistLinkNeighborLoader(g, [4, 3], batch_size=40, neg_sampling="binary"),
    "saint": lambda g: DistGraphSAINTEdgeSampler(g, 12, 4, log=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("parts"), homo_data())


def little_memory(monkeypatch, nbytes=1000):
    monkeypatch.setattr(read_ahead, "available_memory", lambda: nbytes)


@pytest.mark.parametrize("loader", LOADERS)
def test_batches_of_parts_larger_than_memory_are_equal(folder, loader, monkeypatch):
    with open_graph(folder) as graph:
        assert not graph.store.larger_than_memory
        expected = list(LOADERS[loader](graph))
    little_memory(monkeypatch)
    touched = []
    monkeypatch.setattr(
        local_graph, "touch_rows", lambda wanted: (touched.extend(wanted), read_ahead.touch_rows(wanted))
    )
    with open_graph(folder) as graph:
        assert graph.store.larger_than_memory and LOADERS[loader](graph).threads == 2
        for mine, other in zip(LOADERS[loader](graph), expected, strict=True):
            assert_same(mine, other)
        images = [part.nodes["node"].attrs["image"] for part in graph.store.parts.values()]
    assert any(array is image for array, _ in touched for image in images)


def advised(folder: Path) -> dict[str, bool]:
    """Return for each memory-mapped file of a folder whether ``MADV_RANDOM`` is set on its mapping."""
    found, name = {}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else ""
        elif line.startswith("VmFlags:") and name.startswith(str(folder)):
            found[name.removeprefix(f"{folder}/")] = "rr" in line.split()
    return found


def test_maps_are_read_at_random_only_if_they_do_not_fit(folder, monkeypatch):
    with open_graph(folder):
        assert not any(advised(folder).values()) and len(advised(folder)) > 20
    little_memory(monkeypatch)
    with open_graph(folder):
        of_files = advised(folder)
    assert {name for name, random in of_files.items() if not random} == {
        name for name in of_files if name.startswith("shared/")
    }


def mapped(path: Path, values):
    """Save an array, drop it from the page cache, and return it mapped."""
    np.save(path, values)
    array = map_array(path)
    with open(path, "rb") as file:
        os.fdatasync(file.fileno())  # tests/conftest.py replaces fsync
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return array


def test_only_the_pages_of_the_rows_are_read(tmp_path):
    path = tmp_path / "x.npy"
    x = mapped(path, np.arange(1 << 20).reshape(-1, 1024))  # 8 MB, a row takes parts of three pages
    indptr = mapped(tmp_path / "indptr.npy", np.arange(1025) * 1024)
    read_ahead.read_at_random([x, indptr, np.zeros(3)])
    rows = np.array([5, 900, 17], np.int32)
    read_ahead.touch_rows([(x[:0], rows[:0]), (np.zeros((1024, 2)), rows)])
    read_ahead.touch_rows([(x, rows)])
    if resident(path) > 3 * 3 + 2:
        pytest.skip("the file system keeps the file in memory, so that all pages near a row are mapped")
    assert resident(path) >= 3 * 2
    read_ahead.touch_neighbours(indptr, [x.reshape(-1)], np.arange(200, 300))
    before = resident(path)
    assert 3 * 2 + 100 * 2 <= before <= 3 * 3 + 2 + 101 * 3
    wide = mapped(tmp_path / "wide.npy", np.array([0, 1 << 20]))
    read_ahead.touch_neighbours(wide, [x.reshape(-1)], np.array([0]))
    assert resident(path) == before  # a few draws do not need all pages of a long list


def resident(path: Path) -> int:
    pages, name = 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line.split()[-1]
        elif line.startswith("Rss:") and name == str(path):
            pages += int(line.split()[1]) // 4
    return pages


def test_memory_left_is_that_of_the_smallest_group(tmp_path, monkeypatch):
    def lines(path, *text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n")
        return path

    monkeypatch.setattr(memory, "_MEMINFO", lines(tmp_path / "meminfo", "MemTotal: 9 kB", "MemAvailable: 5000 kB"))
    monkeypatch.setattr(memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "fs")
    assert memory.available_memory() == 5_120_000
    lines(tmp_path / "cgroup", "0::/jobs/7")
    lines(tmp_path / "fs/jobs/memory.max", "3000000")
    lines(tmp_path / "fs/jobs/memory.stat", "anon 900000", "file 700000", "shmem 100000")
    lines(tmp_path / "fs/jobs/7/memory.max", "max")
    assert memory.available_memory() == 2_000_000
    lines(tmp_path / "cgroup", "4:cpu,memory:/a/b", "0::/")
    lines(tmp_path / "fs/memory/a/b/memory.limit_in_bytes", "900")
    lines(tmp_path / "fs/memory/a/b/memory.stat", "cache 80", "total_rss 300", "total_shmem 100")
    lines(tmp_path / "fs/memory/memory.limit_in_bytes", "9223372036854771712")
    lines(tmp_path / "fs/memory/memory.stat", "total_rss 5")
    assert memory.available_memory() == 500
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert memory.available_memory() is None
    assert read_ahead.fits_in_memory(10**18) == (read_ahead.available_memory() is None)
