"""Type aliases for numpy arrays, named by what the arrays contain, and helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Ids = npt.NDArray[np.int64]

Columns = Mapping[str, Array]  #: attribute name -> [n, …], one row per node or edge


def read_only(array: Array) -> Array:
    # Numba compiles a kernel once per combination of read-only and writable arguments; memory maps are read-only.
    view = array.view()
    view.flags.writeable = False
    return view


def id_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Return int32 if it can hold ``count`` ids, else int64."""
    return np.int32 if count <= 2**31 - 1 else np.int64
