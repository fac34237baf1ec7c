"""Tests that benchmarks/gpu.py runs, with tiny sizes in numba's simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from forked import fork

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/gpu.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    process = fork([str(SCRIPT)], os.environ)
    assert process.wait() == 1 and "Traceback" not in process.output
    assert process.output.startswith("Error: torch ") and "finds no CUDA device; --simulated checks" in process.output


@pytest.mark.slow
def test_all_measurements_run_in_the_simulator(tmp_path: Path) -> None:
    ended = run("--small", "--simulated", "--out", str(tmp_path))
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    found = json.loads((tmp_path / "gpu.json").read_text())["measurements"]
    assert list(found) == ["batches", "sampling", "gathering", "training step", "epoch"] and all(found.values())
    (equal,) = found["batches"]
    assert equal["value"] == equal["other"] > 1
    assert all(row["value"] > 0 or "synchronising" in row["what"] for rows in found.values() for row in rows)
    assert "### training step" in (tmp_path / "gpu.md").read_text()
