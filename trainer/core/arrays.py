"""Type aliases for numpy arrays, by content; shapes are given in docstrings and comments."""

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

    Memory maps and received frames are read-only. If all inputs are, Numba compiles each kernel once.
    """
    view = array.view()
    view.flags.writeable = False
    return view
