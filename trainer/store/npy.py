"""Memory-maps .npy files; writes them in chunks, computes their sha256 and syncs them to disk."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.files import sync_path
from trainer.store.manifest import FileEntry

_CHUNK_BYTES = 8 << 20

_one_header = threading.Lock()  # Python 3.11's parser may raise SystemError if threads parse at once (cpython 106905)


def map_npy(path: Path) -> np.memmap[Any, Any]:
    """Memory-map a .npy file read-only. Several threads may call this at once.

    Raises ``OSError`` if the file cannot be read, and ``ValueError`` if it has no array.
    """
    if not path.is_file() and path.exists():  # opening a pipe would block
        raise ValueError("it is not a regular file")
    try:
        with _one_header:
            # not np.load, which would also open archives
            return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except ValueError as error:  # numpy's message on a long header goes on to advise allow_pickle=True
        raise ValueError(str(error).partition("\n")[0]) from error
    except Exception as error:  # numpy parses headers with Python's parser, which raises many types of exceptions
        raise ValueError(f"its header is damaged ({type(error).__name__}: {str(error)[:100]})") from error


class NpyWriter:
    """Writes one .npy file (little-endian) in pieces. All methods raise ``OSError``."""

    def __init__(self, root: Path, path: str, dtype: Any, shape: tuple[int, ...]) -> None:
        """Write the header of ``root/path``. ``shape`` is that of the whole array."""
        self.path, self.shape, self.dtype = path, shape, np.dtype(dtype).newbyteorder("<")
        self._target, self._digest, self._size = root / path, hashlib.sha256(), 0
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._target.unlink(missing_ok=True)
        header = io.BytesIO()
        described = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, described)
        self._write(header.getvalue())
        self._whole = self._size + self.dtype.itemsize * int(np.prod(shape, dtype=np.int64))

    def append(self, rows: Array) -> None:
        self._write(np.ascontiguousarray(rows, dtype=self.dtype).reshape(-1).view(np.uint8))

    def finish(self) -> FileEntry:
        """Sync the file and return its entry for the manifest. Raises ``ValueError`` if rows are missing."""
        if self._size != self._whole:
            raise ValueError(f"{self.path}: {self._size} bytes written, {self._whole} expected")
        sync_path(self._target)
        return FileEntry(self.path, self._size, self._digest.hexdigest(), self.dtype.name, self.shape)

    def _write(self, block: Any) -> None:
        with open(self._target, "ab") as file:
            file.write(block)
        self._digest.update(block)
        self._size += len(block)


def write_npy(root: Path, path: str, dtype: Any, shape: tuple[int, ...], chunks: Iterable[Array]) -> FileEntry:
    """Write ``root/path`` (little-endian) from consecutive chunks of rows, and return its entry for the manifest.

    Raises ``OSError``.
    """
    writer = NpyWriter(root, path, dtype, shape)
    for chunk in chunks:
        writer.append(chunk)
    return writer.finish()


def rows_per_chunk(rows: Array) -> int:
    """Return how many rows of the array ``rows`` fit into ``_CHUNK_BYTES`` bytes, at least 1."""
    row_bytes = rows.dtype.itemsize * int(np.prod(rows.shape[1:], dtype=np.int64))
    return max(1, _CHUNK_BYTES // max(row_bytes, 1))
