"""Asks NVML, a library of NVIDIA's driver, about GPUs.

It is called by ctypes: few versions of cuda-bindings contain it, and they name its constants differently.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


class Nvml:
    """NVML. Raises ``RuntimeError`` if the driver does not have it; so do its methods, for what it does not know."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise RuntimeError(f"NVML cannot be loaded: {error}") from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")

    def utilization(self, uuid: str) -> float:
        """Return the share of the last second or less in which a kernel ran on a GPU, 0 to 1."""
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        rates = (ctypes.c_uint * 2)()  # of the processors and of the memory, in percent
        self._call("nvmlDeviceGetUtilizationRates", device, ctypes.byref(rates))
        return rates[0] / 100

    def _call(self, name: str, *arguments: Any) -> None:
        if not hasattr(self._library, name):
            raise RuntimeError(f"NVML of this driver has no {name}")
        if error := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} of NVML failed: {self._library.nvmlErrorString(error).decode()}")


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a CUDA device as NVML knows it; '' if torch does not know it."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return f"GPU-{uuid}" if uuid else ""
