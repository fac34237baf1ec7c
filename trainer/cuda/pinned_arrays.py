"""Arrays in page-locked memory of the host, which kernels read over the bus. Processes of a host can share them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.memory import size_text
from trainer.cuda.launch import simulated
from trainer.cuda.shared_memory import Handle, SharedArray, map_shared

_CHUNK_BYTES = 64 << 20  #: bytes of a file that are copied at once

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP


@dataclass(frozen=True)
class JoinedArray:
    """The arrays of all parts on this host, to be copied one after the other into one array."""

    name: str
    pieces: Sequence[Array]  #: of each part
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: For each piece, a number to add to its elements. A last number is the value of elements after the last piece.
    shift: Sequence[int] = field(default=())

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def copy_to(self, out: Tensor, share: int = 0, num_shares: int = 1) -> None:
        """Fill ``out``, a chunk at a time. Fills only every ``num_shares``-th chunk, from chunk ``share`` on."""
        at = chunks = 0
        for number, piece in enumerate(self.pieces):
            step = max(1, _CHUNK_BYTES // max(1, piece[:1].nbytes))
            for begin in range(0, len(piece), step):
                end = min(begin + step, len(piece))
                if chunks % num_shares == share:
                    chunk = torch.from_numpy(np.array(piece[begin:end])).to(out.dtype)
                    shifted = self.shift and self.shift[number]
                    out[at : at + len(chunk)] = chunk + self.shift[number] if shifted else chunk
                at, chunks = at + end - begin, chunks + 1
        if share == 0 and at < len(out):
            out[at:] = self.shift[-1] if self.shift else 0


class HostArrays:
    """Memory of the host for some arrays, which processes can share. They fill it, and then page-lock it."""

    def __init__(self, arrays: Iterable[JoinedArray], memory: Mapping[str, Array], handles: Mapping[str, Handle]):
        """``memory``: of each array, by name. ``handles``: by name, for other processes; {} if it is not shared."""
        self._arrays = tuple(arrays)
        self._memory, self.handles = dict(memory), dict(handles)

    @classmethod
    def alone(cls, arrays: Sequence[JoinedArray]) -> HostArrays:
        """Allocate arrays that only this process uses."""
        return cls(arrays, {each.name: np.empty(each.shape, _stored(each)) for each in arrays}, {})

    @classmethod
    def shared(cls, arrays: Sequence[JoinedArray], opened: ExitStack) -> HostArrays:
        """Allocate arrays that other processes can map until ``opened`` is closed. Raises ``OSError``."""
        made = {each.name: opened.enter_context(SharedArray.new(each.shape, _stored(each))) for each in arrays}
        memory = {name: one.values for name, one in made.items()}
        return cls(arrays, memory, {name: one.handle for name, one in made.items()})

    @classmethod
    def mapped(cls, arrays: Sequence[JoinedArray], handles: Mapping[str, Handle]) -> HostArrays:
        """Map the arrays that another process has allocated, given its ``handles``. Raises ``OSError``."""
        memory = {each.name: map_shared(handles[each.name], each.shape, _stored(each)) for each in arrays}
        return cls(arrays, memory, handles)

    def fill(self, share: int = 0, num_shares: int = 1) -> None:
        """Copy this process's share of the chunks of all arrays."""
        for each in self._arrays:
            each.copy_to(torch.from_numpy(self._memory[each.name]), share, num_shares)

    def lock(self, device: torch.device) -> dict[str, Tensor]:
        """Page-lock the arrays until no tensor uses them. Returns them by name.

        Raises ``RuntimeError`` if shared memory cannot be page-locked. Memory that is not shared is then copied to
        memory that CUDA allocates.
        """
        tensors = {}
        while self._memory:
            name, values = self._memory.popitem()
            tensors[name] = torch.from_numpy(values)
            if values.nbytes and not simulated():
                try:
                    _page_lock(values, device)
                except RuntimeError as error:
                    if self.handles:
                        raise
                    try:
                        tensors[name] = tensors[name].pin_memory()
                    except RuntimeError:
                        raise error from None
            del values  # may have been copied
        return tensors


def _stored(array: JoinedArray) -> np.dtype[Any]:
    return torch.empty(0, dtype=array.dtype).numpy().dtype


def _page_lock(values: Array, device: torch.device) -> None:
    """Page-lock the memory of ``values`` until it is freed, and let all GPUs read it at its address."""
    address = values.ctypes.data
    with _driver_on(device) as driver:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not _checked(driver.cuDeviceGetAttribute(attribute, _checked(driver.cuCtxGetDevice()))):
            raise RuntimeError("the GPU cannot read page-locked memory at the address that the CPU uses")
        (error,) = driver.cuMemHostRegister(address, values.nbytes, _PORTABLE | _MAPPED)
    if int(error):  # without "out of memory" in its name, which would be taken for the GPU's memory
        why = error.name.removeprefix("CUDA_ERROR_").replace("OUT_OF_MEMORY", "not enough memory").lower()
        raise RuntimeError(f"{size_text(values.nbytes)} of host memory cannot be page-locked: {why}")
    # when the process ends, the driver has gone first
    weakref.finalize(values, _unlock, address, device).atexit = False


def _unlock(address: int, device: torch.device) -> None:
    with suppress(RuntimeError), _driver_on(device) as driver:  # an earlier error of the device is not ours to report
        _checked(driver.cuMemHostUnregister(address))


@contextmanager
def _driver_on(device: torch.device) -> Iterator[Any]:
    """Return the module ``cuda.bindings.driver`` for calls on ``device``. Waits until the device has done all work.

    It has calls that neither torch nor numba-cuda offers. numba-cuda depends on cuda-bindings. Unlike errors of CUDA's
    runtime, those of the driver are not reported a second time by torch.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)  # also makes the device's primary context current
        yield import_module("cuda.bindings.driver")


def _checked(result: tuple[Any, ...]) -> Any:
    """Return the value of a call. Raises ``RuntimeError`` with the name of the driver's error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA driver: {error.name}")
    return values[0] if values else None
