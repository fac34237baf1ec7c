"""Test kit: the library of NVML, with GPUs whose UUIDs are ``GPU-1``, ``GPU-2`` and so on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED


class FakeNvml:
    """``utilization()``: percent of each GPU, None if NVML does not know it. ``access``: statuses, not 0 if missing."""

    def __init__(self, utilization: Callable[[], int | None], access: dict[tuple[int, int, int], int] | None = None):
        self._utilization, self._access = utilization, access or {}

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

    def nvmlDeviceGetP2PStatus(self, one: ctypes.c_void_p, other: ctypes.c_void_p, kind: int, status: Any) -> int:
        status._obj.value = self._access.get((one.value or 0, other.value or 0, kind), 5)
        return 0

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
