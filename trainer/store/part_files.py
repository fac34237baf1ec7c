"""Memory-maps the files of a partition folder, and checks their headers, ids and offsets.

Ids and offsets are checked once per copy of a part: a hidden file in the part's folder records the check.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError
from trainer.core.files import read_json, write_whole
from trainer.store.manifest import FileEntry, Manifest
from trainer.store.npy import map_npy

_NOTE = ".gnnfleet-ranges.json"

_SETTLED_NS = 2_000_000_000  #: ns after a change of a file from which on a further change surely gets another mtime

_CHUNK = 1 << 20  #: number of ids checked at a time

#: Of a damaged file. A launch sends or fetches the files again that its nodes do not have as the manifest lists them.
FIX = "launch again, which replaces it (in a folder of your own: copy or make it again; partition verify lists all)"

_DIGESTS = ".gnnfleet-digests.json"  # launcher/node/programs/files.py keeps the digests of compared files here


def map_array(path: Path) -> Array:
    """Memory-map a .npy file read-only.

    Raises ``PartitionError`` if the file is missing or damaged, its size contradicts its header, or the array is not in
    C order.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would block
            raise ValueError("it is not a regular file")
        array = map_npy(path)
    except (FileNotFoundError, NotADirectoryError):
        raise PartitionError(f"{path} is missing; {FIX}") from None
    except Exception as error:  # numpy parses headers with Python's parser, which raises many types of exception
        raise PartitionError(f"{path} cannot be read; {FIX}: {error}") from error
    if array.offset + array.nbytes != found.st_size or not array.flags.c_contiguous:
        raise PartitionError(
            f"{path} holds {found.st_size:,} bytes, but its header describes {array.offset + array.nbytes:,} bytes in "
            f"C order; {FIX}"
        )
    return array.view(np.ndarray)  # kernels are compiled for plain arrays


@contextmanager
def distrusting(folder: Path) -> Iterator[None]:
    """If the block raises ``PartitionError``, delete the records of compared digests in the partition folder.

    The next launch then compares all files, also those whose size and mtime are as before, and replaces damaged ones.
    """
    try:
        yield
    except PartitionError:
        for record in folder.rglob(_DIGESTS):
            with suppress(OSError):
                record.unlink()
        raise


class FileNote:
    """A small file that records which other files passed a check.

    A record is valid until the checked file changes, as seen by its size, mtime, ctime and inode.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        with suppress(OSError, ValueError):
            known = {} if path is None else read_json(path)
            self._known = known if isinstance(known, dict) else {}

    def has(self, path: Path, name: str, detail: str = "") -> bool:
        """Return whether the file ``path`` passed the check with the same ``detail``, and has not changed since.

        ``name``: key of the file's record. ``detail``: parameters of the check. If the result is False, ``save`` will
        record the file, unless it changed in the last two seconds. Raises ``PartitionError`` when the file cannot be
        read.
        """
        try:
            now = os.stat(path)
        except OSError as error:
            raise PartitionError(f"{path} cannot be read: {error.strerror}; {FIX}") from error
        stamp = f"{now.st_size} {now.st_mtime_ns} {now.st_ctime_ns} {now.st_ino} {detail}"
        if self._known.get(name) == stamp:
            return True
        if time.time_ns() - now.st_ctime_ns > _SETTLED_NS:
            self._new[name] = stamp
        return False

    def save(self) -> None:
        """Write the records of the files for which ``has`` returned False. Errors of writing are ignored."""
        if self._path is not None and self._new:
            with suppress(OSError):
                write_whole(self._path, json.dumps({**self._known, **self._new}))


@dataclass(frozen=True)
class _Bounds:
    path: str  #: relative to the partition folder
    values: Array  #: int [n]
    limit: int  #: ids: 0 <= id < limit; offsets: ascending from 0 to limit
    offsets: bool  #: whether the values are offsets, otherwise ids

    def problem(self) -> str | None:
        if not self.offsets:
            for start in range(0, len(self.values), _CHUNK):
                chunk = self.values[start : start + _CHUNK]
                if chunk.min() < 0 or chunk.max() >= self.limit:
                    at = int(np.flatnonzero((chunk < 0) | (chunk >= self.limit))[0])
                    return f"position {start + at}: {chunk[at]} is outside 0 to {self.limit - 1}"
            return None
        if self.values[0] != 0 or self.values[-1] != self.limit:
            return f"goes from {self.values[0]} to {self.values[-1]}, expected 0 to {self.limit}"
        for start in range(0, len(self.values) - 1, _CHUNK):
            chunk = self.values[start : start + _CHUNK + 1]
            descents = np.flatnonzero(chunk[1:] < chunk[:-1])
            if len(descents):
                at = int(descents[0]) + 1
                return f"position {start + at}: {chunk[at]} is below the value before it"
        return None


class PartFiles:
    """Opens files of one partition folder. All methods raise ``PartitionError``."""

    def __init__(self, root: Path, manifest: Manifest):
        self.root = root
        self.opened: list[str] = []  #: opened files, relative to ``root``
        self.num_bytes = 0  #: size of the opened files
        self._entries: Mapping[str, FileEntry] = {entry.path: entry for entry in manifest.files}
        self._bounds: list[_Bounds] = []

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Map the array in ``<path>.npy``, which must have this dtype and shape."""
        array = self._mapped(path)
        self._check_kind(path, array, array.dtype == dtype and array.shape == shape, f"{dtype.name} {list(shape)}")
        return array

    def ids(self, path: str, count: int, limit: int, dtype: np.dtype[Any] | None = None) -> Array:
        """Memory-map the ids in ``<path>.npy``: ``count`` ids of ``dtype`` (None: int32 or int64).

        ``check_ranges`` will check that ``0 <= id < limit``.
        """
        return self.id_rows(path, (count,), [limit], dtype)

    def id_rows(
        self, path: str, shape: tuple[int, ...], limits: Sequence[int], dtype: np.dtype[Any] | None = None
    ) -> Array:  # fmt: skip
        """As ``ids``, with a limit for each column. ``check_ranges`` will only check that all are below the largest."""
        array = self._mapped(path)
        kind = array.dtype in (np.int32, np.int64) if dtype is None else array.dtype == dtype
        expected = f"{'int32 or int64' if dtype is None else dtype.name} {list(shape)}"
        self._check_kind(path, array, kind and array.shape == shape, expected)
        self._bounds.append(_Bounds(f"{path}.npy", array.reshape(-1), max(limits), offsets=False))
        return array

    def offsets(self, path: str, rows: int, total: int) -> Array:
        """Memory-map the row offsets in ``<path>.npy``, int64 [rows + 1].

        ``check_ranges`` will check that the offsets ascend from 0 to ``total``.
        """
        array = self.array(path, np.dtype(np.int64), (rows + 1,))
        self._bounds.append(_Bounds(f"{path}.npy", array, total, offsets=True))
        return array

    def check_ranges(self) -> None:
        """Check the ranges of ids and offsets in all opened files that have changed since their last check."""
        tops: dict[str, list[_Bounds]] = {}
        for bounds in self._bounds:
            tops.setdefault(bounds.path.partition("/")[0], []).append(bounds)
        for top, of_top in tops.items():
            note = FileNote(self.root / top / _NOTE)
            left = [each for each in of_top if not note.has(self.root / each.path, each.path, str(each.limit))]
            if not left:
                continue
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                for bounds, problem in zip(left, pool.map(_Bounds.problem, left), strict=True):
                    if problem is not None:
                        raise PartitionError(f"{self.root / bounds.path}: {problem}; {FIX}")
            note.save()

    def _mapped(self, path: str) -> Array:
        name = f"{path}.npy"
        array = map_array(self.root / name)
        entry = self._entries.get(name)
        if entry is not None and (array.dtype.name, array.shape) != (entry.dtype, entry.shape):
            self._check_kind(path, array, False, f"{entry.dtype} {list(entry.shape)}")
        self.opened.append(name)
        self.num_bytes += array.nbytes
        return array

    def _check_kind(self, path: str, array: Array, right: bool, expected: str) -> None:
        if not right:
            raise PartitionError(
                f"{self.root / path}.npy holds {array.dtype.name} {list(array.shape)}, expected {expected} "
                f"according to the manifest; {FIX}"
            )
