"""Rows in the memory of one GPU that kernels on other GPUs of the host read, by CUDA IPC over NVLink or PCIe.

In numba's simulator, the rows are in memory that processes of the host share.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from trainer.core.shared_memory import SharedArray, map_shared
from trainer.cuda.driver import checked, driver_on
from trainer.cuda.launch import PeerArray, simulated

Handle = tuple[int, int] | bytes  #: place of a ``SharedArray``, or a CUDA IPC handle

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE


def export_rows(count: int, width: int, device: torch.device) -> tuple[Tensor, Handle]:
    """Allocate rows on ``device`` that other processes of the host can read, float32 [count, width].

    Returns them, and the handle for ``open_rows``. They are never freed. Raises ``RuntimeError`` of the driver, such as
    CUDA_ERROR_OUT_OF_MEMORY.
    """
    if simulated():
        shared = SharedArray.new((count, width), "float32")
        return torch.from_numpy(shared.values), shared.place
    # Not torch's memory: blocks of its allocator may be of a kind that has no IPC handle (expandable segments).
    with driver_on(device) as driver:
        address = int(checked(driver.cuMemAlloc(max(1, 4 * count * width))))
        handle = checked(driver.cuIpcGetMemHandle(address))
        rows = torch.as_tensor(_Memory(address, (count, width)), device=device) if count else _empty(width, device)
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
        return PeerArray(int(checked(driver.cuIpcOpenMemHandle(found, int(flag)))), (count, width), torch.float32)


def ends_of(rows: Tensor | PeerArray, device: torch.device) -> bytes:
    """Copy the first and the last row to the host. Raises ``RuntimeError`` of the driver if the address is wrong."""
    if isinstance(rows, Tensor):
        return rows[:1].cpu().numpy().tobytes() + rows[-1:].cpu().numpy().tobytes()
    size = 4 * rows.shape[1]
    host = ctypes.create_string_buffer(2 * size)
    with driver_on(device) as driver:
        for place, row in enumerate((0, rows.shape[0] - 1)):
            target = ctypes.addressof(host) + place * size
            checked(driver.cuMemcpyDtoH(target, rows.address + row * size, size))
    return host.raw


def _empty(width: int, device: torch.device) -> Tensor:
    return torch.empty((0, width), dtype=torch.float32, device=device)


class _Memory:
    """Describes float32 rows in device memory to torch."""

    def __init__(self, address: int, shape: tuple[int, int]):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip
