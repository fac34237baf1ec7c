"""Arrays in page-locked memory of the host, which kernels read over the bus. The processes of a host share one copy."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from trainer.core.arrays import Array
from trainer.core.shared_memory import Place, SharedArray, map_shared
from trainer.cuda.driver import checked, driver_on
from trainer.cuda.launch import simulated

_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP


class PinnedArrays:
    """Makes arrays in page-locked memory, or maps those that another process of the host has made.

    Use as a context manager. After the ``with`` block, no further process can map the arrays.
    """

    def __init__(self, device: torch.device, places: Mapping[str, Place] | None = None):
        """``places``: ``places`` of the process that made the arrays. None: this process makes them."""
        self.places = dict(places or {})  #: of each array, by its name
        self._device, self._makes = device, places is None
        self._made: list[SharedArray] = []

    def __enter__(self) -> PinnedArrays:
        return self

    def __exit__(self, *_: object) -> None:
        for shared in self._made:
            shared.__exit__()
        self._made.clear()

    def array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """Return the array ``name``. ``fill`` sets its elements, if this process makes it.

        Raises ``OSError``, or ``RuntimeError`` of the driver if memory cannot be page-locked.
        """
        stored = torch.empty(0, dtype=dtype).numpy().dtype
        if self._makes:
            shared = SharedArray.new(shape, stored)
            self._made.append(shared)
            self.places[name], values = shared.place, shared.values
            fill(torch.from_numpy(values))
        else:
            values = map_shared(self.places[name], shape, stored)
        if values.nbytes and not simulated():
            _page_lock(values, self._device)
        return torch.from_numpy(values)


def _page_lock(values: Array, device: torch.device) -> None:
    """Page-lock the memory of ``values``, until no tensor uses it, and let all GPUs read it at its address."""
    address = values.ctypes.data
    with driver_on(device) as driver:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not checked(driver.cuDeviceGetAttribute(attribute, checked(driver.cuCtxGetDevice()))):
            raise RuntimeError("the GPU cannot read page-locked memory at the address that the CPU uses")
        checked(driver.cuMemHostRegister(address, values.nbytes, _PORTABLE | _MAPPED))
    # when the process ends, the driver has gone first
    weakref.finalize(values, _unlock, address, device).atexit = False


def _unlock(address: int, device: torch.device) -> None:
    with suppress(RuntimeError), driver_on(device) as driver:  # an earlier error of the device is not ours to report
        checked(driver.cuMemHostUnregister(address))
