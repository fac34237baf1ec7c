"""Tests the CUDA kernels of layers in numba's simulator, in a process with NUMBA_ENABLE_CUDASIM=1, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def run_checks(**env: str) -> None:
    """Run ``cuda_step_checks`` with additional environment variables."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cuda_step_checks.py")]
    ended = subprocess.run(
        words, cwd=HERE.parents[1], env={**os.environ, **env}, capture_output=True, text=True, timeout=900, check=False
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout


def test_cuda_kernels_of_layers_in_the_simulator() -> None:
    run_checks(NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_kernels_of_layers_on_a_gpu() -> None:
    run_checks()


def test_a_cpu_run_does_not_import_numba_cuda() -> None:
    script = (
        "import sys, torch\n"
        "from trainer.nn.kernels import spmm\n"
        "from trainer.core.batch import Block\n"
        "block = Block(torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 1)\n"
        "spmm.aggregate(block, torch.ones(1, 2, requires_grad=True), 'mean').sum().backward()\n"
        "loaded = [name for name in sys.modules if name.startswith(('numba_cuda', 'numba.cuda'))]\n"
        "print(loaded)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    env.pop("NUMBA_ENABLE_CUDASIM", None)
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout.strip() == "[]"
