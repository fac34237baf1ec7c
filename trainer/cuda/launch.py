"""Compiles CUDA kernels with numba-cuda and launches them on torch tensors, without copies.

A kernel is a function with a grid-stride loop, decorated with ``kernel``. It is compiled on its first launch, for the
dtypes of its arguments, and runs on torch's current stream. In numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) the same
function runs in Python on CPU tensors.

A kernel computes the same floating-point operations as the CPU's code, but either compiler may round ``a * b + c`` once
instead of twice. Code whose results must be equal on CPU and GPU therefore avoids this expression.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, cached_property
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np
import torch
from numba.core import types
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from trainer.core import rng
from trainer.cuda.kernel_cache import keep_compiled

_config: Any = import_module("numba.cuda.core.config")

if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:
    _config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # the last kernels of a hop or a small batch have few blocks

cuda: Any = import_module("numba.cuda")  #: kernels import this name, which the simulator replaces while they run

_THREADS = 128  #: threads of a block, unless a kernel asks for others

_MOST_BLOCKS = 1 << 20  #: blocks of a launch; each thread loops over the rest

_SIMULATED_BLOCKS = _SIMULATED_THREADS = 2  #: the simulator starts a Python thread per CUDA thread

#: Element types by dtype, as in ``__array_interface__``. bfloat16 is passed as its bits.
_TYPESTR = {
    torch.float64: "<f8", torch.float32: "<f4", torch.float16: "<f2", torch.bfloat16: "<u2", torch.int64: "<i8",
    torch.int32: "<i4", torch.int16: "<i2", torch.int8: "|i1", torch.uint64: "<u8", torch.uint32: "<u4",
    torch.uint16: "<u2", torch.uint8: "|u1", torch.bool: "|b1",
}  # fmt: skip

_one_launch = threading.Lock()  #: the simulator runs one kernel at a time


def simulated() -> bool:
    """Return whether kernels run in numba's simulator, on CPU tensors."""
    return bool(_config.ENABLE_CUDASIM)


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorate a CUDA kernel: a function that stores its results in its arguments and returns nothing.

    The function loops over items as ``for i in range(cuda.grid(1), n, cuda.gridsize(1))``, with ``n`` among its
    arguments, and refers to ``numba.cuda`` by the global name ``cuda``.
    """
    return Kernel(function)


class Kernel:
    """A CUDA kernel, compiled for the dtypes of its arguments when it is first launched, or loaded if it was before."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __call__(self, items: int, *args: Any, threads: int = _THREADS) -> None:
        """Launch the kernel over ``items`` items on torch's current stream, without waiting. Does nothing for 0 items.

        ``args``: numbers, tensors of one device with any strides and ``Mapped``. int is passed as int64,
        float as float64, a numpy scalar with its own type, and a bfloat16 tensor as uint16 bits.
        """
        if items <= 0:
            return
        if simulated():
            self.launch(min(_SIMULATED_BLOCKS, items), min(_SIMULATED_THREADS, items), *args)
        else:
            self.launch(min(_MOST_BLOCKS, -(-items // threads)), threads, *args)

    def launch(self, blocks: int, threads: int, *args: Any) -> None:
        """Launch exactly ``blocks`` blocks of ``threads`` threads, as kernels with shared memory need."""
        if simulated():
            with _one_launch:
                self._compiled[blocks, threads](*(_simulated_argument(arg) for arg in args))
            return
        device = next(arg.device for arg in args if isinstance(arg, Tensor))
        with torch.cuda.device(device):
            stream = _stream(device, torch.cuda.current_stream(device).cuda_stream)
            self._compiled[blocks, threads, stream](*(_device_argument(arg) for arg in args))

    @cached_property
    def _compiled(self) -> Any:
        dispatcher = cuda.jit(self.function)
        return dispatcher if simulated() else keep_compiled(dispatcher, self.function)


def device_function(function: Any) -> Any:
    """Return a function that kernels can call, compiled from the source of ``function``.

    A function that is compiled for the CPU (``numba.njit``) is compiled again for the device, as are the functions that
    it calls. Any other function may use ``numba.cuda`` if it is in the same file as the kernels that call it. The
    simulator runs all functions as Python, except those of ``core.rng``, for which it uses the CPU's compiled code.
    """
    if isinstance(function, Dispatcher):
        return _converted(function)
    return function if simulated() else cuda.jit(device=True)(function)


@cache
def _converted(function: Dispatcher) -> Any:
    source = function.py_func
    if simulated() and source.__module__ == rng.__name__:
        return _boxed(function)
    known = dict(source.__globals__)
    for name in source.__code__.co_names:
        if isinstance(known.get(name), Dispatcher):
            known[name] = _converted(known[name])
    copy = FunctionType(source.__code__, known, source.__name__, source.__defaults__, source.__closure__)
    copy.__module__, copy.__qualname__ = source.__module__, source.__qualname__
    return copy if simulated() else cuda.jit(device=True)(copy)


def _boxed(function: Dispatcher) -> Callable[..., Any]:
    """Wrap ``function`` so that a uint64 result is a ``numpy.uint64``; Numba itself returns a Python int."""

    def call(*args: Any) -> Any:
        result = function(*args)
        unsigned = function.nopython_signatures[0].return_type == types.uint64
        return np.uint64(result) if unsigned else result

    return call


class Mapped:
    """A pinned CPU tensor that kernels read or write over the bus, at its host address.

    The caller must keep the tensor until the kernels that use it have run.
    """

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _DeviceView:
    """Passes device memory to a numba kernel, without waiting for streams and without conversion.

    Has its type for numba itself. numba-cuda 0.30 takes a tensor whose elements are 8 apart for a contiguous one, and
    needs longer.
    """

    __slots__ = ("__cuda_array_interface__", "_numba_type_", "owner")

    def __init__(
        self, owner: object, address: int, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None
    ):  # fmt: skip
        """``owner``: keeps the memory. ``strides``: in bytes, None for a contiguous array."""
        typestr = _TYPESTR[dtype]
        self._numba_type_ = _array_type(typestr, len(shape), "A" if strides else "C")
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "strides": strides,
            "stream": None,
            "version": 3,
        }

    @classmethod
    def of(cls, tensor: Tensor) -> _DeviceView:
        size = tensor.element_size()
        owner = tensor if tensor.numel() else _anchor(tensor.device)  # numba asks whose memory a pointer is
        strides = None if tensor.is_contiguous() else tuple(step * size for step in tensor.stride())
        return cls(owner, owner.data_ptr(), tuple(tensor.shape), tensor.dtype, strides)


@cache
def _array_type(typestr: str, ndim: int, layout: str) -> Any:
    """Return numba's type of an array. ``layout``: "C" if it is contiguous, else "A"."""
    from_dtype = import_module("numba.cuda.np.numpy_support").from_dtype
    return import_module("numba.cuda.types").Array(from_dtype(np.dtype(typestr)), ndim, layout)


@cache
def _anchor(device: torch.device) -> Tensor:
    """Return memory that stands for the memory of empty tensors: on a device, or pinned on the host."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(1, dtype=torch.int64, device=device, pin_memory=pinned)


def _device_argument(arg: Any) -> Any:
    if isinstance(arg, Mapped):
        return _DeviceView.of(arg.tensor)
    return _DeviceView.of(arg.detach()) if isinstance(arg, Tensor) else arg


def _simulated_argument(arg: Any) -> Any:
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    tensor = arg.tensor if isinstance(arg, Mapped) else arg
    if not isinstance(tensor, Tensor):
        return tensor
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return FakeCUDAArray(tensor.numpy())


@cache
def _stream(device: torch.device, handle: int) -> Any:
    """Return a stream of torch as numba's object. It is cached, as torch never destroys streams."""
    return cuda.external_stream(handle) if handle else 0


def works(device: torch.device) -> bool:
    """Compile and run a kernel on a device. Returns whether its result is right; raises errors of several types."""
    numbers = torch.arange(300, device=device)
    _double(len(numbers), numbers)
    return bool(numbers.sum() == 300 * 299)


@kernel
def _double(numbers: Any) -> None:
    for i in range(cuda.grid(1), len(numbers), cuda.gridsize(1)):
        numbers[i] = 2 * numbers[i]
