"""Test that the bundled GAT has its published accuracy on Cora, by benchmarks/bench_gat.py."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_gat_reaches_its_published_accuracy_on_cora(shared_data: Path, tmp_path: Path) -> None:
    if not (shared_data / "cora").is_dir():
        pytest.skip(f"no Cora: {shared_data}/cora is not there; it would hold Planetoid/Cora/raw/ind.cora.*")
    shutil.copytree(shared_data / "cora", tmp_path / "cora")  # torch_geometric writes into it
    words = ["--source", str(tmp_path / "cora"), "--seeds", "3", "--epochs", "200", "--only", "gat"]
    command = [sys.executable, "benchmarks/bench_gat.py", *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=2900)
    found = re.search(r"^gat +([\d.]+) ±", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    # Published: 0.830, runs differ by 0.007; without dropout of features and attention it is about 0.80.
    assert float(found[1]) > 0.818
