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
import pathlib, sys
for module, unwanted in (
    ("trainer", "torch"), ("trainer.cli", "torch"), ("trainer.service.serve", "torch"),
    ("trainer.train.job", "torch_geometric"), ("trainer.train.steplog", "torch_geometric"),
):
    __import__(module)
    assert unwanted not in sys.modules, f"{module} imports {unwanted}"

import torch
from trainer.core.batch import Block
from trainer.nn.kernels import spmm
from trainer.train.metrics import MetricsLog
block = Block(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 1)
spmm.aggregate(block, torch.ones(1, 2, requires_grad=True), "mean").sum().backward()
with MetricsLog(pathlib.Path(sys.argv[1]), 0) as log:
    log.write("step", epoch=1, step=0, steps=1, loss=1.0)
packages = ("numba_cuda", "numba.cuda", "tensorboard", "wandb", "mlflow")
unwanted = [name for name in sys.modules if name.startswith(packages)]
assert not unwanted, f"a step on the CPU that writes a metrics line imports {unwanted}"
"""


def test_processes_of_a_run_import_no_more_than_they_need(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    subprocess.run([sys.executable, "-c", IMPORTS, str(tmp_path)], env=environment, check=True)
    assert (tmp_path / "metrics-rank0.jsonl").exists() and not (tmp_path / "track").exists()
