"""Device functions for kernels with one thread per element of rows: position of an element, and bfloat16."""

from __future__ import annotations

import numpy as np

from trainer.cuda.launch import device_function

_S16, _HALF, _ONE = np.uint32(16), np.uint32(0x7FFF), np.uint32(1)


@device_function
def split(item, width):  # type: ignore[no-untyped-def]  # Numba infers the types
    """Return row and column of element ``item`` in rows of ``width`` elements, by one division."""
    row = item // width
    return row, item - row * width


@device_function
def same(value):  # type: ignore[no-untyped-def]
    return value


@device_function
def from_bits(value):  # type: ignore[no-untyped-def]
    """Return the float32 value of a bfloat16 number, given by its bits (uint16)."""
    return np.uint32(np.uint32(value) << _S16).view(np.float32)


@device_function
def to_bits(value):  # type: ignore[no-untyped-def]
    """Round a float32 number to bfloat16 (ties to even). Returns the bits, uint16."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16(np.uint32(bits + _HALF + np.uint32((bits >> _S16) & _ONE)) >> _S16)
