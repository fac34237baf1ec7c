"""Type aliases of arrays by content; docstrings and comments give the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

Ids = npt.NDArray[np.int64]

Columns = Mapping[str, Array]  #: attribute -> [n, …], one row for each node or edge


def read_only(array: Array) -> Array:
    """A read-only view, as memory maps and received frames are: kernels are compiled for one kind only."""
    view = array.view()
    view.flags.writeable = False
    return view
