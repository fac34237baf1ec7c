"""Writes .npy files in chunks, computes their sha256 and syncs them to disk."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.store.manifest import FileEntry

_CHUNK_BYTES = 8 << 20


def write_npy(root: Path, path: str, dtype: Any, shape: tuple[int, ...], chunks: Iterable[Array]) -> FileEntry:
    """Write ``root/path`` (little-endian) from consecutive chunks of rows, and return its entry for the manifest.

    Raises ``OSError``.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with open(target, "wb") as file:
        for block in chain([_header(dtype, shape)], (_raw(chunk, dtype) for chunk in chunks)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
    return FileEntry(path, size, digest.hexdigest(), dtype.name, shape)


def rows_in_chunks(rows: Array) -> Iterator[Array]:
    """Yield consecutive slices of rows, of a few megabytes each."""
    step = rows_per_chunk(rows)
    return (rows[start : start + step] for start in range(0, len(rows), step))


def rows_per_chunk(rows: Array) -> int:
    """Return how many rows of this dtype and shape make a chunk of ``_CHUNK_BYTES``, at least 1."""
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
    return max(1, _CHUNK_BYTES // max(row_bytes, 1))


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, description)
    return buffer.getvalue()


def _raw(chunk: Array, dtype: np.dtype[Any]) -> Any:
    """Convert a chunk to ``dtype`` and return it as a flat buffer of bytes, without a copy if possible."""
    return np.ascontiguousarray(chunk, dtype=dtype).reshape(-1).view(np.uint8)
