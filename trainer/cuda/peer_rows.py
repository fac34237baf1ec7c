"""Rows in the memory of one GPU that kernels on other GPUs of the host read, by CUDA IPC over NVLink or PCIe.

In numba's simulator, the rows are in memory that processes of the host share.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trainer.core import shared_memory
from trainer.core.shared_memory import SharedArray, map_shared
from trainer.cuda.driver import checked, driver_on
from trainer.cuda.gather_kernels import source_of, take_rows
from trainer.cuda.launch import PeerArray, simulated

Handle = shared_memory.Handle | bytes  #: of a ``SharedArray`` in the simulator, else of CUDA IPC

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE

#: bytes of the driver's blocks; a handle is of a whole block, so that two allocations must not share one
_BLOCK = 2 << 20


def export_rows(count: int, width: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Allocate rows on ``device`` that other processes of the host can read, float32 [count, width].

    Returns them, and the handle for ``open_rows``. They stay until this process ends, or ``free_rows`` frees them.
    Raises ``OSError``, or ``RuntimeError`` of the driver, such as CUDA_ERROR_OUT_OF_MEMORY.
    """
    if not count:
        return _empty(width, device), b""
    if simulated():
        shared = SharedArray.new((count, width), "float32")
        return torch.from_numpy(shared.values), shared.handle
    # Not torch's memory: blocks of its allocator may be of a kind that has no IPC handle (expandable segments).
    with driver_on(device) as driver:
        torch.cuda.empty_cache()  # the driver cannot use memory that torch keeps for later
        address = int(checked(driver.cuMemAlloc(-(-4 * count * width // _BLOCK) * _BLOCK)))
        try:
            handle = checked(driver.cuIpcGetMemHandle(address))
        except RuntimeError:
            driver.cuMemFree(address)
            raise
        rows = torch.as_tensor(_Memory(address, (count, width)), device=device)
    return rows, ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def open_rows(handle: Handle, count: int, width: int, device: torch.device) -> Tensor | PeerArray:
    """Map rows that another process has exported. Returns an argument for kernels on ``device``.

    The rows stay mapped until this process ends. Raises ``OSError``, or ``RuntimeError`` of the driver.
    """
    if not count:
        return _empty(width, device)
    if not isinstance(handle, bytes):
        return torch.from_numpy(map_shared(handle, (count, width), "float32"))
    with driver_on(device) as driver:
        found = driver.CUipcMemHandle()
        ctypes.memmove(found.getPtr(), handle, _HANDLE_BYTES)
        flag = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(checked(driver.cuIpcOpenMemHandle(found, int(flag))))
    return PeerArray(address, (count, width), torch.float32)


def ends_of(rows: Tensor | PeerArray, device: torch.device) -> bytes:
    """Copy the first and the last row to the host; none if there are none. Waits for the device.

    Rows of another GPU are copied by the driver, which returns an error for a wrong address, and then by a kernel.
    Raises ``RuntimeError``.
    """
    if not rows.shape[0]:
        return b""
    if isinstance(rows, PeerArray):
        copied = _copied_ends(rows, device)
        if copied != _gathered_ends(rows, device):
            raise RuntimeError("a kernel reads other rows than the driver copies")
        return copied
    return _gathered_ends(rows, device)


def _copied_ends(rows: PeerArray, device: torch.device) -> bytes:
    size = 4 * rows.shape[1]
    host = ctypes.create_string_buffer(2 * size)
    with driver_on(device) as driver:
        for number, row in enumerate((0, rows.shape[0] - 1)):
            target = ctypes.addressof(host) + number * size
            checked(driver.cuMemcpyDtoH(target, rows.address + row * size, size))
    return host.raw


def _gathered_ends(rows: Tensor | PeerArray, device: torch.device) -> bytes:
    sources = torch.tensor([source_of(row, 0) for row in (0, rows.shape[0] - 1)], device=device)
    out = torch.empty((2, rows.shape[1]), dtype=torch.float32, device=device)
    take_rows(sources, out[:0], out[:0, :1], [rows], out)
    return out.cpu().numpy().tobytes()


def close_rows(rows: Tensor | PeerArray, device: torch.device) -> None:
    """Unmap rows of ``open_rows``, which must not be used again. Raises ``RuntimeError``."""
    if isinstance(rows, PeerArray):
        with driver_on(device) as driver:
            checked(driver.cuIpcCloseMemHandle(rows.address))


def free_rows(rows: Tensor, device: torch.device) -> None:
    """Free rows of ``export_rows``, which no process may have mapped or use again. Raises ``RuntimeError``."""
    if rows.is_cuda and len(rows):
        with driver_on(device) as driver:
            checked(driver.cuMemFree(rows.data_ptr()))


def _empty(width: int, device: torch.device) -> Tensor:
    return torch.empty((0, width), dtype=torch.float32, device=device)


class _Memory:
    """Describes float32 rows in device memory to torch."""

    def __init__(self, address: int, shape: tuple[int, int]):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip
