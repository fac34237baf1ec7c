"""Rows of attributes in messages. Rows that are rounded carry a *mark*, which states how and from which dtype."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from trainer.core import rounding
from trainer.core.arrays import Array
from trainer.core.errors import DataError, WireError
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType
from trainer.wire.frames import MAX_ARRAY, Flag

_F2, _F4, _F8 = map(np.dtype, ("<f2", "<f4", "<f8"))

_NOT_ROUNDED: tuple[WireRows, np.dtype] = ("stored", _F4)

_MARKS = (_NOT_ROUNDED, ("float16", _F4), ("float16", _F8), ("int8", _F2), ("int8", _F4), ("int8", _F8))

_MARK_OF = {rounding_of: mark for mark, rounding_of in enumerate(_MARKS)}

#: Flag with which a request allows rows to be rounded to a form.
FLAG_OF: dict[WireRows, Flag] = {"stored": Flag.NONE, "float16": Flag.FLOAT16, "int8": Flag.INT8}


def form_of(flags: Flag) -> WireRows:
    """Return the dtype (stored, float16 or int8) of rows in the reply to a request with ``flags``."""
    return "int8" if flags & Flag.INT8 else "float16" if flags & Flag.FLOAT16 else "stored"


class Column(msgspec.Struct, frozen=True, array_like=True):
    """An attribute's rows as they are sent."""

    mark: int  #: index into ``_MARKS``: the original dtype, and whether and how the rows were rounded
    array: Array  #: [n, …]
    scales: Array | None = None  #: float32 [n, 1] of rows rounded to int8


def rounded(name: str, rows: Array, form: WireRows) -> Column:
    """Round an attribute's rows to ``form``. Raises ``DataError`` for rows that ``form`` cannot represent."""
    if not rounding.rounds(name, rows.dtype, rows.shape, form):
        return Column(0, rows)
    try:
        arrays = [rounding.to_float16(rows)] if form == "float16" else list(rounding.to_int8(rows))
    except DataError as error:
        raise DataError(f"rows of {name} cannot be sent as {form}: {error}; use --wire-rows stored") from None
    return Column(_MARK_OF[form, rows.dtype], *arrays)


def restored(column: Column, used: set[int]) -> Array:
    """Return an attribute's rows, as they were before ``rounded``.

    ``used``: ids of the arrays of this message that were restored; each may be restored once, or a small message could
    take much memory. Raises ``WireError`` for invalid marks or arrays.
    """
    if not 0 <= column.mark < len(_MARKS):
        raise WireError(f"rows have the unknown mark {column.mark}; marks go from 0 to {len(_MARKS) - 1}")
    (form, dtype), sent = _MARKS[column.mark], column.array
    if column.mark == 0:
        return sent
    if id(sent) in used:
        raise WireError("two attributes refer to the same array of rounded rows")
    used.add(id(sent))
    if sent.ndim < 2 or sent.dtype != form or sent.size * dtype.itemsize > MAX_ARRAY:
        raise WireError(
            f"the reply has rows of dtype {sent.dtype} and shape {sent.shape}, expected {form} rows with at least 2 "
            f"dimensions and at most {MAX_ARRAY} bytes in their original dtype {dtype}"
        )
    if form == "float16":
        return rounding.from_float16(sent, dtype)
    scales = column.scales
    if scales is None or scales.dtype != _F4 or scales.shape != (len(sent), 1) or not np.isfinite(scales).all():
        raise WireError(f"int8 rows have no finite float32 scale for each of {len(sent)} rows")
    return rounding.from_int8(sent, scales, dtype)


FormOf = Callable[[AnyType, str], WireRows]  #: the form in which rows of an attribute are sent
