"""Copies chosen edges, in pieces, so that edges in files need not fit into memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array
from trainer.core.row_sort import Scratch
from trainer.data.dataset import EdgeData
from trainer.data.work_arrays import kept_rows, mapped_file, slices


def kept_edges(data: EdgeData, keep: Callable[[slice], Array], scratch: Scratch | None, name: str) -> EdgeData:
    """Return the edges for which ``keep`` is true, in their order.

    ``keep`` is called for consecutive slices of the edges, several times for each, and returns bool [edges of the
    slice]. With ``scratch``, the new arrays are memory-mapped files in its folder, with names that begin with ``name``.
    """

    def path(of: str) -> Path | None:
        return None if scratch is None else scratch.folder / f"{name}-{of}.npy"

    count = sum(int(np.count_nonzero(keep(piece))) for piece in slices(data.num_edges))
    index, shape = data.edge_index, (2, count)
    place = path("edge_index")
    edge_index = np.empty(shape, index.dtype) if place is None else mapped_file(place, shape, index.dtype)
    at = 0
    for piece in slices(data.num_edges):
        part = index[:, piece][:, keep(piece)]
        edge_index[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    attrs = {of: kept_rows(values, keep, count, path(of)) for of, values in data.attrs.items()}
    return EdgeData(edge_index, attrs, data.bfloat16)
