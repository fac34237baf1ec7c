"""Rows that travel in less precision, and come out in the dtype they had.

An array of rows goes with a *mark* of one byte: how it was rounded, and from which dtype. float16 rows are one array,
int8 rows two: codes [n, …] and scales float32 [n, 1] (``trainer.core.rounding``). Mark 0: the array as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainer.core import rounding
from trainer.core.arrays import Array
from trainer.core.errors import DataError, WireError
from trainer.core.remote_access import WireRows
from trainer.service.frames import MAX_ARRAY, Flag

_F2, _F4, _F8 = map(np.dtype, ("<f2", "<f4", "<f8"))

_AS_IT_IS: tuple[WireRows, np.dtype] = ("stored", _F4)

_MARKS = (_AS_IT_IS, ("float16", _F4), ("float16", _F8), ("int8", _F2), ("int8", _F4), ("int8", _F8))

_MARK_OF = {what: mark for mark, what in enumerate(_MARKS)}

_FLAGS: dict[WireRows, Flag] = {"stored": Flag.NONE, "float16": Flag.FLOAT16, "int8": Flag.INT8}


def flag_of(form: WireRows) -> Flag:
    """How a request asks for rows in ``form``."""
    return _FLAGS[form]


def form_of(flags: Flag) -> WireRows:
    """The form that a request asks for; int8 where it names both."""
    return "int8" if flags & Flag.INT8 else "float16" if flags & Flag.FLOAT16 else "stored"


def rounded(name: str, rows: Array, form: WireRows) -> tuple[int, list[Array]]:
    """Mark and arrays of an attribute's rows. Raises ``DataError`` for rows that ``form`` cannot hold."""
    if not rounding.rounds(name, rows.dtype, rows.shape, form):
        return 0, [rows]
    try:
        arrays = [rounding.to_float16(rows)] if form == "float16" else list(rounding.to_int8(rows))
    except DataError as error:
        raise DataError(f"rows of {name} cannot travel as {form}: {error}; use --wire-rows stored") from None
    return _MARK_OF[form, rows.dtype], arrays


def restored(mark: int, arrays: Iterator[Array]) -> Array:
    """The rows, from the arrays that are next. Raises ``WireError`` for what ``rounded`` cannot have made."""
    if not 0 <= mark < len(_MARKS):
        raise WireError(f"rows of mark {mark}; marks go to {len(_MARKS) - 1}")
    form, dtype = _MARKS[mark]
    sent = _next(arrays)
    if mark == 0:
        return sent
    if sent.ndim < 2 or sent.dtype != form or sent.size * dtype.itemsize > MAX_ARRAY:
        raise WireError(f"{sent.dtype} {sent.shape} in place of {form} rows of at most {MAX_ARRAY} bytes of {dtype}")
    if form == "float16":
        return rounding.from_float16(sent, dtype)
    scales = _next(arrays)
    if scales.dtype != _F4 or scales.shape != (len(sent), 1) or not np.isfinite(scales).all():
        raise WireError(f"{scales.dtype} {scales.shape} in place of a finite scale for each of {len(sent)} rows")
    return rounding.from_int8(sent, scales, dtype)


def _next(arrays: Iterator[Array]) -> Array:
    found = next(arrays, None)
    if found is None:
        raise WireError("fewer arrays than rows were marked")
    return found
