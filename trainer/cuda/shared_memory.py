"""Arrays in memory that processes of one host share, and in page-locked memory, which kernels read over the bus.

The memory belongs to an anonymous file (``memfd_create``), which other processes of the same user open by its path in
/proc. Unlike a file in /dev/shm, it does not outlive the processes, and has no size limit of its own in containers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.memory import size_text
from trainer.core.ranks import RankGroup
from trainer.cuda.availability import simulator_wanted

Handle = tuple[int, int, int]  #: process id, its file descriptor and the file's inode, of a ``SharedArray``

_CLOEXEC, _NOEXEC_SEAL = 1, 8  # MFD_…; some systems demand the seal (vm.memfd_noexec), Linux before 6.3 has none


@dataclass(frozen=True)
class SharedArray:
    """A new array that other processes of this host can map. Use as a context manager.

    After the ``with`` block no further process can map the array; its memory is freed when no process uses it.
    """

    values: Array  #: zeros at first
    handle: Handle  #: for ``map_shared`` in other processes

    @classmethod
    def new(cls, shape: tuple[int, ...], dtype: npt.DTypeLike) -> SharedArray:
        """Allocate a shared array of zeros. Raises ``OSError``."""
        try:
            descriptor = _memfd(_CLOEXEC | _NOEXEC_SEAL)
        except OSError:
            descriptor = _memfd(_CLOEXEC)
        try:
            os.truncate(descriptor, _num_bytes(shape, dtype))
            return cls(_map(descriptor, shape, dtype), (os.getpid(), descriptor, os.fstat(descriptor).st_ino))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def of(cls, values: Array) -> SharedArray:
        """Copy ``values`` to a new shared array. Raises ``OSError``."""
        shared = cls.new(values.shape, values.dtype)
        shared.values[...] = values
        return shared

    def __enter__(self) -> SharedArray:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle[1])


def map_shared(handle: Handle, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Map the shared array of another process of this host, given its ``SharedArray.handle``, shape and dtype.

    Raises ``OSError`` if that process has ended, or belongs to another user or container.
    """
    process, number, inode = handle
    path = f"/proc/{process}/fd/{number}"
    file = os.stat(path)  # before it is opened: in another container, the process is another one
    if (file.st_ino, file.st_size) != (inode, _num_bytes(shape, dtype)):
        raise OSError(f"{path} is not the expected shared array")
    descriptor = os.open(path, os.O_RDWR)
    try:
        return _map(descriptor, shape, dtype)
    finally:
        os.close(descriptor)


def _memfd(flags: int) -> int:
    """Return the descriptor of a new anonymous file. Raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("gnnfleet", flags)
    libc = ctypes.CDLL(None, use_errno=True)  # Pythons built with an old glibc, as conda's, lack the function
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "no memfd_create")
    descriptor = int(libc.memfd_create(b"gnnfleet", ctypes.c_uint(flags)))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_create")
    return descriptor


def _map(descriptor: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    size = _num_bytes(shape, dtype)
    return np.ndarray(shape, dtype, mmap.mmap(descriptor, size)) if size else np.empty(shape, dtype)


def _num_bytes(shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize


def mappable_ranks(group: RankGroup, key: str) -> list[list[int]]:
    """Return for each rank the other ranks whose shared arrays it can map. Collective.

    ``key``: Only ranks with the same key are tried; '' for a rank that shares nothing.
    """
    if group.size == 1:
        return [[]]
    with ExitStack() as opened:
        handle = None
        if key:
            with suppress(OSError):  # shared memory is not allowed here
                handle = opened.enter_context(SharedArray.of(np.array([group.rank]))).handle
        gathered = group.gather((key, handle))
        found = [
            rank
            for rank, (other_key, other) in enumerate(gathered)
            if handle and other and rank != group.rank and other_key == key and _maps(other, rank)
        ]
        return group.gather(found)  # the memory stays open until all have mapped it


def _maps(handle: Handle, rank: int) -> bool:
    try:
        return bool(map_shared(handle, (1,), np.int64)[0] == rank)
    except OSError:
        return False


def mutual_groups(reachable: Sequence[Iterable[int]]) -> list[tuple[int, ...]]:
    """Divide ranks into groups in each of which every rank reaches every other.

    A rank joins the first group that it fits in. ``reachable``: for each rank, the ranks that it reaches.
    """
    reached, groups = [set(ranks) for ranks in reachable], list[list[int]]()
    for rank in range(len(reached)):
        for group in groups:
            if all(one in reached[rank] and rank in reached[one] for one in group):
                group.append(rank)
                break
        else:
            groups.append([rank])
    return [tuple(group) for group in groups]


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
            if values.nbytes and not simulator_wanted():
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
