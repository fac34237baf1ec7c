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


@pytest.mark.slow
def test_cuda_kernels_of_layers_in_the_simulator() -> None:
    run_checks(NUMBA_ENABLE_CUDASIM="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_kernels_of_layers_on_a_gpu() -> None:
    run_checks()
