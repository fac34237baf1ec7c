"""Test kit: the library of NVML, with GPUs whose UUIDs are ``GPU-1``, ``GPU-2`` and so on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED


class FakeNvml:
    """``utilization()``: percent of each GPU, None if NVML does not know it."""

    def __init__(self, utilization: Callable[[], int | None]):
        self._utilization = utilization

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        number = uuid.removeprefix(b"GPU-")
        device._obj.value = int(number) if number.isdigit() else 0
        return 0 if number.isdigit() else NOT_SUPPORTED

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, rates: Any) -> int:
        percent = self._utilization()
        rates._obj[0] = percent or 0
        return 0 if percent is not None else NOT_SUPPORTED

    @staticmethod
    def nvmlErrorString(error: int) -> bytes:
        assert error == NOT_SUPPORTED
        return b"Not Supported"


def use_nvml(monkeypatch: pytest.MonkeyPatch, library: FakeNvml | None) -> None:
    """Let ctypes load ``library``; None: there is none."""

    def load(name: str) -> FakeNvml:
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
