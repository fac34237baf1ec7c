"""Tests that opening a part reads a constant number of bytes, and that training imports only modules that it uses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forked import REPOSITORY
from partitions import random_graph, store_of, write_store
from trainer.store.part_store import open_parts

linux = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes read as Linux tells them")


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@linux
@pytest.mark.parametrize("topology", ["partitioned", "replicated"])
def test_opening_reads_as_few_bytes_of_a_larger_part(tmp_path, topology):
    read = {}
    for nodes in (5_000, 50_000):  # all files are larger than the buffer into which a header is read
        folder = tmp_path / f"of{nodes}"
        attrs = {"x": np.ones((nodes, 16), np.float32)}
        write_store(folder, store_of(*random_graph(0, nodes, 10 * nodes), 2, attrs=attrs))
        open_parts(folder, (0,), topology)
        before = bytes_read()
        open_parts(folder, (0,), topology)
        read[nodes] = bytes_read() - before
    assert read[50_000] <= read[5_000] + 4096  # numbers in headers and manifest have more digits
    large = sum(path.stat().st_size for path in (tmp_path / "of50000").rglob("*.npy"))
    assert read[50_000] < large / 10


IMPORTS = """
import sys
for module, unwanted in (
    ("trainer", "torch"), ("trainer.cli", "torch"), ("trainer.service.serve", "torch"),
    ("trainer.train.job", "torch_geometric"),
):
    __import__(module)
    assert unwanted not in sys.modules, f"{module} imports {unwanted}"
"""


def test_processes_of_a_run_import_no_more_than_they_need():
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
