"""Rounds floating-point rows to float16, or to int8 with one float32 scale per row.

The values of an int8 row are ``code * scale``. The scale is the row's largest absolute value, divided by 127. Rounding
rows that were rounded before gives the same codes and scales. All arithmetic is float32.

``Unroundable`` is raised for a row with inf or NaN (int8), or with a finite number that float16 cannot represent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.core import slabs
from trainer.core.arrays import Array, read_only
from trainer.core.compiled import njit
from trainer.core.errors import DataError
from trainer.core.remote_settings import WireRows

_ROWS_BYTES = 1 << 20  #: bytes of float32 that are converted at once

_SINGLE = np.dtype(np.float32)

_NEVER = frozenset({"y"})  #: attributes that are never rounded: labels

_NO_SIGN = np.uint32(0x7FFFFFFF)

_INF = np.uint32(0x7F800000)  # float32 bits of infinity

_HALF_INF_FROM = np.uint32(0x477FF000)  # float32 bits of 65520, which rounds to float16's infinity

_HALF_NORMAL_FROM = np.uint32(0x38800000)  # float32 bits of 2**-14, the smallest normal float16

_HALF_STEP = np.float32(2**24)  # 1 / the smallest positive float16

_REBIAS = np.uint32(0xC8000FFF)  # (15 - 127) << 23, plus just below half a unit in float16's last place


class Unroundable(DataError):
    """A row cannot be represented in int8 or float16. ``row`` is its index and ``why`` the reason."""

    def __init__(self, row: int, why: str):
        super().__init__(f"row {row} {why}")
        self.row, self.why = row, why


def rounds(name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], form: WireRows) -> bool:
    """Return whether the rows of attribute ``name`` are rounded when they are sent in ``form``.

    Only floating-point attributes with two or more dimensions are rounded, and only if this makes a row smaller. Labels
    (``y``) are never rounded.

    ``dtype`` and ``shape`` [n, …] are those of the attribute.
    """
    kind = np.dtype(dtype)
    if form == "stored" or kind.kind != "f" or kind.itemsize not in (2, 4, 8) or len(shape) < 2 or name in _NEVER:
        return False
    return _row_bytes(kind, shape, form) < _row_bytes(kind, shape, "stored")


def row_bytes(name: str, dtype: npt.DTypeLike, shape: tuple[int, ...], form: WireRows) -> int:
    """Return the number of bytes of one row of attribute ``name`` when it is sent in ``form``.

    ``dtype`` and ``shape`` [n, …] are those of the attribute.
    """
    return _row_bytes(np.dtype(dtype), shape, form if rounds(name, dtype, shape, form) else "stored")


def _row_bytes(kind: np.dtype[Any], shape: tuple[int, ...], form: WireRows) -> int:
    width = math.prod(shape[1:])
    return {"stored": width * kind.itemsize, "float16": width * 2, "int8": width + _SINGLE.itemsize}[form]


def to_int8(rows: Array) -> tuple[Array, Array]:
    """Round floating-point rows to codes, int8 [n, …], and scales, float32 [n, 1].

    Raises ``Unroundable`` for a row with inf or NaN.
    """
    codes, scales = slabs.empty(rows.shape, np.int8), np.empty((len(rows), 1), np.float32)
    flat = _flat(codes)
    for at, some in _in_single(rows):
        end = at + len(some)
        wrong = _quantize(read_only(some), read_only(some.view(np.uint32)), flat[at:end], scales[at:end, 0])
        if wrong >= 0:
            raise Unroundable(at + wrong, "holds inf or NaN, which int8 cannot represent")
    return codes, scales


def from_int8(codes: Array, scales: Array, dtype: npt.DTypeLike = np.float32) -> Array:
    """Convert the codes and scales of ``to_int8`` back to rows, ``dtype`` [n, …]."""
    out = slabs.empty(codes.shape, np.float32)
    _scale(read_only(_flat(codes)), read_only(scales), _flat(out))
    return out if np.dtype(dtype) == _SINGLE else slabs.cast(out, dtype)


def to_float16(rows: Array) -> Array:
    """Round floating-point rows to float16 [n, …], to nearest. Raises ``Unroundable`` for numbers beyond 65504."""
    out = slabs.empty(rows.shape, np.float16)
    flat = _flat(out).view(np.uint16)
    for at, some in _in_single(rows):
        wrong = _halve(read_only(some), read_only(some.view(np.uint32)), flat[at : at + len(some)])
        if wrong >= 0:
            raise Unroundable(at + wrong, "holds a number beyond 65504, float16's largest")
    return out


def from_float16(rows: Array, dtype: npt.DTypeLike) -> Array:
    return slabs.cast(rows, dtype)


def _in_single(rows: Array) -> Iterator[tuple[int, Array]]:
    """Yield the rows in chunks: (index of the chunk's first row, C-contiguous float32 [k, width])."""
    flat = _flat(rows)
    step = max(1, _ROWS_BYTES // max(1, flat.shape[1] * _SINGLE.itemsize))
    if flat.dtype == _SINGLE and flat.flags.c_contiguous:
        step = max(1, len(flat))
    with np.errstate(over="ignore"):  # an overflow becomes inf, which the kernels reject
        for at in range(0, len(flat), step):
            yield at, np.ascontiguousarray(flat[at : at + step], np.float32)


def _flat(rows: Array) -> Array:
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


@njit()
def _quantize(rows: Array, bits: Array, codes: Array, scales: Array) -> int:
    """Fill ``codes`` and ``scales`` from ``rows``. Return the index of the first row with inf or NaN, or -1.

    ``bits``: view of ``rows`` as uint32.
    """
    for row in range(rows.shape[0]):
        top = np.uint32(0)
        largest = np.float32(0)
        for column in range(rows.shape[1]):
            top = max(top, bits[row, column] & _NO_SIGN)
        if top >= _INF:
            return row
        for column in range(rows.shape[1]):
            if bits[row, column] & _NO_SIGN == top:
                largest = abs(rows[row, column])
                break
        scale = largest / np.float32(127)
        scales[row] = scale
        for column in range(rows.shape[1]):
            code = np.rint(rows[row, column] / scale) if scale > 0 else np.float32(0)
            codes[row, column] = np.int8(max(np.float32(-127), min(np.float32(127), code)))
    return -1


@njit()
def _scale(codes: Array, scales: Array, out: Array) -> None:
    for row in range(codes.shape[0]):
        scale = scales[row, 0]
        for column in range(codes.shape[1]):
            out[row, column] = np.float32(codes[row, column]) * scale


def take_scaled(codes: Array, scales: Array, rows: Array, at: Array, out: Array) -> None:
    """Set ``out[at[i]] = codes[rows[i]] * scales[rows[i]]``.

    ``codes``: int8 [N, …]. ``scales``: float32 [N, 1]. ``out``: float32.
    """
    _take_scaled(read_only(_flat(codes)), read_only(scales), read_only(rows), read_only(at), _flat(out))


@njit()
def _take_scaled(codes: Array, scales: Array, rows: Array, at: Array, out: Array) -> None:
    for i in range(rows.shape[0]):
        scale = scales[rows[i], 0]
        for column in range(codes.shape[1]):
            out[at[i], column] = np.float32(codes[rows[i], column]) * scale


@njit()
def _halve(rows: Array, bits: Array, out: Array) -> int:
    """Fill ``out``, uint16, with the bits of ``rows`` as float16 (nearest, ties to even).

    Returns the index of the first row with a number too large for float16, or -1. ``bits``: view of ``rows`` as uint32.
    """
    wrong = -1
    # Numba has no float16 on the CPU, and numpy takes twice as long.
    for row in range(rows.shape[0]):
        refused = False
        for column in range(rows.shape[1]):
            whole = bits[row, column] & _NO_SIGN
            sign = (bits[row, column] >> np.uint32(16)) & np.uint32(0x8000)
            odd = (whole >> np.uint32(13)) & np.uint32(1)
            normal = (whole + _REBIAS + odd) >> np.uint32(13)
            small = np.uint32(np.rint(min(abs(rows[row, column]), np.float32(1)) * _HALF_STEP))
            special = np.uint32(0x7C00) if whole == _INF else np.uint32(0x7E00)
            refused |= _HALF_INF_FROM <= whole < _INF
            half = small if whole < _HALF_NORMAL_FROM else normal
            out[row, column] = np.uint16(sign | (special if whole >= _INF else half))
        if refused and wrong < 0:
            wrong = row
    return wrong
