"""Tests of page-locked arrays that processes of a host share, with a fake of the CUDA driver."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.cuda import pinned_arrays
from trainer.cuda.pinned_arrays import PinnedArrays

GPU = torch.device("cuda", 0)


class FakeDriver:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.real: Any = importlib.import_module("cuda.bindings.driver")
        self.locked: dict[int, int] = {}  #: bytes by address
        self.same_address, self.memory = 1, 10**6
        monkeypatch.setattr(pinned_arrays, "driver_on", self._on)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[Any]:
        assert device == GPU
        yield SimpleNamespace(
            CUdevice_attribute=self.real.CUdevice_attribute,
            cuMemHostRegister=self._lock, cuMemHostUnregister=self._free,
            cuCtxGetDevice=lambda: (self.real.CUresult.CUDA_SUCCESS, 0),
            cuDeviceGetAttribute=lambda *_: (self.real.CUresult.CUDA_SUCCESS, self.same_address),
        )  # fmt: skip

    def _lock(self, address: int, size: int, flags: int) -> tuple[Any]:
        if size > self.memory:
            return (self.real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        assert flags == 3
        self.locked[address] = size
        return (self.real.CUresult.CUDA_SUCCESS,)

    def _free(self, address: int) -> tuple[Any]:
        del self.locked[address]
        return (self.real.CUresult.CUDA_SUCCESS,)


def numbers(out: Tensor) -> None:
    out.copy_(torch.arange(out.numel()).reshape(out.shape))


def never(out: Tensor) -> None:
    raise AssertionError("another process makes the array")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


def test_processes_share_one_page_locked_copy(driver: FakeDriver) -> None:
    with PinnedArrays(GPU) as made:
        own = made.array("rows", (3, 4), torch.float16, numbers)
        with PinnedArrays(GPU, made.places) as mapped:
            other = mapped.array("rows", (3, 4), torch.float16, never)
        assert made.array("none", (0, 4), torch.int8, numbers).shape == (0, 4)
    assert driver.locked == {own.data_ptr(): 24, other.data_ptr(): 24} and own.data_ptr() != other.data_ptr()
    own[2, 3] = 50
    assert other.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 50]]
    with pytest.raises(OSError):
        PinnedArrays(GPU, made.places).array("rows", (3, 4), torch.float16, never)


def test_memory_is_unlocked_before_it_is_freed(driver: FakeDriver) -> None:
    with PinnedArrays(GPU) as made:
        view = made.array("rows", (300, 4), torch.float32, numbers)[1:]
    gc.collect()
    assert len(driver.locked) == 1, "a view still uses the memory"
    del view
    gc.collect()
    assert driver.locked == {}


def test_memory_that_a_gpu_cannot_read_is_refused(driver: FakeDriver) -> None:
    driver.memory = 10
    with PinnedArrays(GPU) as made, pytest.raises(RuntimeError, match="CUDA driver: CUDA_ERROR_OUT_OF_MEMORY"):
        made.array("rows", (3, 4), torch.float32, numbers)
    driver.same_address = 0
    with PinnedArrays(GPU) as made, pytest.raises(RuntimeError, match="at the address that the CPU uses"):
        made.array("rows", (3, 4), torch.float32, numbers)
    assert driver.locked == {}
