"""Tests of page-locked arrays that processes of a host share, with a fake of the CUDA driver."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.cuda import shared_memory
from trainer.cuda.shared_memory import HostArrays, JoinedArray

GPU = torch.device("cuda", 0)


class FakeDriver:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.real: Any = importlib.import_module("cuda.bindings.driver")
        self.locked: dict[int, int] = {}  #: bytes by address
        self.same_address, self.memory = 1, 10**6
        monkeypatch.setattr(shared_memory, "_driver_on", self._on)

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


def array(name: str = "rows", shape: tuple[int, ...] = (3, 4), dtype: torch.dtype = torch.float16) -> JoinedArray:
    """Return an array of two parts, with the numbers from 0 on."""
    numbers = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return JoinedArray(name, [numbers[:1], numbers[1:]], shape, dtype)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return FakeDriver(monkeypatch)


def test_processes_fill_and_share_one_page_locked_copy(driver: FakeDriver) -> None:
    arrays = [array(), array("none", (0, 4), torch.int8)]
    with ExitStack() as opened:
        made = HostArrays.shared(arrays, opened)
        mapped = HostArrays.mapped(arrays, made.handles)
        made.fill(0, 2)
        mapped.fill(1, 2)
    own, other = (each.lock(GPU)["rows"] for each in (made, mapped))
    assert driver.locked == {own.data_ptr(): 24, other.data_ptr(): 24} and own.data_ptr() != other.data_ptr()
    own[2, 3] = 50
    assert other.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 50]]
    with pytest.raises(OSError):
        HostArrays.mapped(arrays, made.handles)


def test_chunks_are_divided_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_CHUNK_BYTES", 8)
    offsets = JoinedArray("indptr", [np.array([0, 2, 3]), np.array([0, 5])], (6,), torch.int64, (0, 3, 9))
    out = torch.full((6,), -1)
    for share in range(3):
        offsets.copy_to(out, share, 3)
    assert out.tolist() == [0, 2, 3, 3, 8, 9]
    some = torch.full((6,), -1)
    offsets.copy_to(some, 1, 3)
    assert some.tolist() == [-1, 2, -1, -1, 8, -1]


def test_memory_is_unlocked_before_it_is_freed(driver: FakeDriver) -> None:
    arrays = HostArrays.alone([array(shape=(300, 4))])
    arrays.fill()
    view = arrays.lock(GPU)["rows"][1:]
    gc.collect()
    assert len(driver.locked) == 1 and view[0].tolist() == [4, 5, 6, 7], "a view still uses the memory"
    del view
    gc.collect()
    assert driver.locked == {}


def test_memory_that_cannot_be_locked_is_refused_if_it_is_shared(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.memory = 10
    with (
        ExitStack() as opened,
        pytest.raises(RuntimeError, match="host memory cannot be page-locked: not enough memory"),
    ):
        HostArrays.shared([array()], opened).lock(GPU)
    driver.same_address = 0
    with ExitStack() as opened, pytest.raises(RuntimeError, match="at the address that the CPU uses"):
        HostArrays.shared([array()], opened).lock(GPU)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self.clone())
    alone = HostArrays.alone([array()])
    alone.fill()
    assert alone.lock(GPU)["rows"][2].tolist() == [8, 9, 10, 11], "copied to memory that CUDA allocates"
    assert driver.locked == {}
