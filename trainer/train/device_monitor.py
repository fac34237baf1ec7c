"""Reports how a rank uses its GPU: memory, utilisation and device time of a step, as field ``device`` of metrics lines.

Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from trainer.train.step_timing import StepTimes

_ReadShare = Callable[[], float]  #: returns the share of the last second or less in which a kernel ran, 0 to 1


class DeviceMonitor:
    """Makes field ``device`` of the ``step`` and ``epoch`` lines of one epoch. On a CPU, lines have no such field.

    The keys of the field:

    - ``allocated_bytes``, ``peak_bytes``: memory of this process by torch's allocator, now and at most so far
    - ``used_bytes``, ``total_bytes``: memory of all processes on the device, in an ``epoch`` line the most of all
      ``step`` lines; memory of the device
    - ``step_s``: seconds that the device takes for a step, from the batch's copy to the update of the weights
      (``StepTimes.device_s``); without a step that has ended on the device, there is no such key
    - ``utilization``: share of time in which a kernel ran, by NVML; in an ``epoch`` line the mean of all ``step``
      lines; without NVML, there is no such key
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._read_share = utilization_reader(device) if device.type == "cuda" else None
        self._used, self._shares = 0, list[float]()

    def step_fields(self, times: StepTimes) -> dict[str, Any]:
        """Return ``{"device": …}`` for a ``step`` line. ``times``: of the steps since the last line."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        share = None
        try:
            if self._read_share is not None:
                share = self._read_share()
        except RuntimeError:  # the monitor must not end a run
            self._read_share = None
        self._used = max(self._used, total - free)
        self._shares += [] if share is None else [share]
        return {"device": self._fields(times, total - free, total, share)}

    def epoch_fields(self, times: StepTimes) -> dict[str, Any]:
        """Return ``{"device": …}`` for an ``epoch`` line. ``times``: of all steps of the epoch."""
        if self._device.type != "cuda":
            return {}
        free, total = torch.cuda.mem_get_info(self._device)
        share = sum(self._shares) / len(self._shares) if self._shares else None
        return {"device": self._fields(times, max(self._used, total - free), total, share)}

    def _fields(self, times: StepTimes, used: int, total: int, share: float | None) -> dict[str, Any]:
        return {
            "allocated_bytes": torch.cuda.memory_allocated(self._device),
            "peak_bytes": torch.cuda.max_memory_allocated(self._device),
            "used_bytes": used,
            "total_bytes": total,
            **({"step_s": round(times.device_s / times.device_steps, 6)} if times.device_steps else {}),
            **({} if share is None else {"utilization": round(share, 3)}),
        }


def utilization_reader(device: torch.device) -> _ReadShare | None:
    """Return a function that reads the utilisation of a GPU by NVML; None without NVML, and for a MIG instance."""
    try:
        nvml, uuid = _Nvml(), f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"
        nvml.utilization(uuid)
    except RuntimeError:  # no NVIDIA driver, or the device is a MIG instance
        return None
    return lambda: nvml.utilization(uuid)


class _Nvml:
    """NVML, a library of NVIDIA's driver, which knows how busy a GPU is.

    It is called by ctypes: few versions of cuda-bindings contain it, and they name its constants differently. Raises
    ``RuntimeError`` if the driver does not have it; so do its methods, for what it does not know.
    """

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
