"""Tells whether kernels of numba-cuda can run. Does not import numba-cuda for runs on the CPU."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

_INSTALL = "pip install 'numba-cuda[cu12]' or, for CUDA 13, 'numba-cuda[cu13]'"


def simulator_wanted() -> bool:
    """Return whether NUMBA_ENABLE_CUDASIM=1 asks to run kernels in numba's simulator on CPU tensors, for tests."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


@cache
def why_no_kernels(device: torch.device) -> str:
    """Return why kernels cannot run on tensors of ``device``, or '' if they can."""
    if find_spec("numba_cuda") is None:
        return f"numba-cuda is not installed ({_INSTALL})"
    if simulator_wanted():
        return "" if device.type == "cpu" else "NUMBA_ENABLE_CUDASIM=1 is set: kernels run on the CPU only"
    if device.type != "cuda":
        return f"the device is {device.type}"

    # Compile and run a small kernel on the device.
    cuda = import_module("numba.cuda")
    if not cuda.is_available():
        return f"numba-cuda finds no usable CUDA driver: {_line(cuda.cuda_error())}"
    launch = import_module("trainer.cuda.launch")
    try:
        works = launch.works(device)
    except Exception as error:  # many types: no compiler, one that is too new for the driver, a device that is too old
        return f"numba-cuda cannot compile or run a kernel ({_INSTALL}): {_line(error)}"
    return "" if works else "a kernel of numba-cuda gives a wrong result"


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
