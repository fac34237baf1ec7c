"""Tests the CUDA kernels of layers in numba's simulator, in a process with NUMBA_ENABLE_CUDASIM=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_cuda_kernels_of_layers_in_the_simulator() -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "simulated_cuda_step.py")]
    ended = subprocess.run(
        words, cwd=HERE.parents[1], env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
    assert " passed" in ended.stdout and "skipped" not in ended.stdout


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
