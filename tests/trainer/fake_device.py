"""A fake device, to test without a GPU that training steps never wait for the device: waiting is an error.

A ``DeviceTensor`` has its values in a CPU tensor but reports another device (``meta``), so the tested code runs as for
a GPU. Operations for which the host would have to wait for a GPU raise ``Synchronised``: reading a number, results
whose shape depends on values, copies to the host, and copies from pageable memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")

_aten = torch.ops.aten

#: Operations whose result has a shape that depends on values, or that read values on the host, with CUDA.
_SYNCHRONISING = {
    "_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "_unique", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "histc", "_assert_async.never", "repeat_interleave.Tensor",
}  # fmt: skip


class Synchronised(AssertionError):
    """Raised by an operation for which the host would have to wait for a real device."""


class DeviceTensor(Tensor):
    """A tensor on the fake device. ``values``: its content, on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        strided = values.layout == torch.strided  # a sparse matrix passes as a dense one
        strides = values.stride() if strided else (values.shape[1], 1)
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.shape, strides=strides, dtype=values.dtype, device=DEVICE
        )
        made.values = values
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        kwargs = dict(kwargs or {})
        _check(function, args, kwargs)
        on_host = "device" in kwargs and torch.device(kwargs["device"] or DEVICE) != DEVICE
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        result = function(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        name = function._schema.name
        if name.endswith("_") and not name.endswith("__") and isinstance(args[0], DeviceTensor):
            return args[0]  # written in place
        return result if on_host else tree_map(_outer, result)


def _inner(value: Any) -> Any:
    return value.values if isinstance(value, DeviceTensor) else value


def _outer(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) else value


def _check(function: Any, args: Any, kwargs: Any) -> None:
    name, overload = function._schema.name.removeprefix("aten::"), function._overloadname
    if name in _SYNCHRONISING or f"{name}.{overload}" in _SYNCHRONISING:
        if name != "repeat_interleave" or kwargs.get("output_size") is None:
            raise Synchronised(f"{name} reads values of the device")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        if any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1]):
            raise Synchronised(f"{name} with a boolean mask reads the number of true elements")
    if name in ("_to_copy", "to") and kwargs.get("device") is not None and torch.device(kwargs["device"]) != DEVICE:
        raise Synchronised("a copy to the host waits for the device")
    if name == "copy_" and not isinstance(args[0], DeviceTensor):
        raise Synchronised("a copy to the host waits for the device")
    if name == "copy_" and not isinstance(args[1], DeviceTensor) and args[1].dim():
        raise Synchronised("a copy from pageable memory waits for the stream")


class _Factories(TorchDispatchMode):
    """Within this mode, ``torch.zeros(..., device=DEVICE)`` and the like return a ``DeviceTensor``."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is None or torch.device(device) != DEVICE or any(isinstance(each, DeviceTensor) for each in args):
            return function(*args, **kwargs)
        return DeviceTensor(function(*args, **{**kwargs, "device": torch.device("cpu")}))


class _Copies(TorchFunctionMode):
    """Within this mode, copying values from the host to the fake device raises ``Synchronised``."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        there = _target(args, kwargs) == DEVICE or (name == "new_tensor" and isinstance(args[0], DeviceTensor))
        if there and name in ("tensor", "as_tensor", "new_tensor"):
            raise Synchronised(f"{name} copies from pageable memory, which waits for the stream")
        if there and name == "to" and not isinstance(args[0], DeviceTensor):
            raise Synchronised("a copy from pageable memory waits for the stream")
        return function(*args, **kwargs)


def _target(args: Any, kwargs: Any) -> torch.device | None:
    named = [kwargs.get("device"), *(each for each in args[1:] if isinstance(each, (torch.device, str)))]
    return next((torch.device(each) for each in named if each is not None), None)


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """Within this context, an operation that would wait for the fake device raises ``Synchronised``."""
    without_autocast = mock.patch.object(torch, "is_autocast_enabled", lambda device: False)  # unknown for ``meta``
    with _Factories(), _Copies(), without_autocast:
        yield


def on_device(value: Tensor) -> DeviceTensor:
    """Return a copy of a CPU tensor on the fake device."""
    return DeviceTensor(value.detach().clone())


def move_module(module: torch.nn.Module) -> None:
    """Move all parameters and buffers of a module to the fake device, in place."""
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(on_device(weight))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = on_device(buffer)


def read(value: Any) -> Any:
    """Replace each ``DeviceTensor`` in ``value`` by its values. Tests may do this; a training step may not."""
    return tree_map(lambda each: each.values if isinstance(each, DeviceTensor) else each, value)
