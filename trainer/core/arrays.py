"""Type aliases for numpy arrays, which name only what an array contains (docstrings state shapes), and helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Ids = npt.NDArray[np.int64]

Columns = Mapping[str, Array]  #: attribute name -> [n, …], one row per node or edge


def read_only(array: Array) -> Array:
    """Return a read-only view of ``array``.

    Numba compiles a kernel separately for each combination of read-only and writable arguments. Memory maps and
    received messages are read-only. A kernel that gets all its inputs as read-only views is compiled only once.
    """
    view = array.view()
    view.flags.writeable = False
    return view


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Return int32 if it can hold ``count`` ids, else int64."""
    return np.int32 if count <= 2**31 - 1 else np.int64
