"""Checks the digest, dtype, shape and range of every array of a partition folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import PartitionError
from trainer.data.edges import first_outside
from trainer.partition.folder import files_below, is_note
from trainer.store.digest_check import sha256_of
from trainer.store.manifest import FileEntry, Manifest, read_manifest
from trainer.store.part_files import PartFiles, map_array
from trainer.store.part_store import PartOpener


@dataclass(frozen=True)
class Finding:
    path: str  #: relative to the folder, as in the manifest
    problem: str  #: message for the user

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class _Expected:
    """An array that a partition folder must have, by its manifest alone."""

    path: str  #: relative to the folder
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None  #: None: any signed integers
    limits: tuple[int, ...] = ()  #: of ids, for each column: 0 <= id < limit
    total: int | None = None  #: of offsets: they ascend from 0 to it
    scales: bool = False  #: of rows stored as int8


class _Expectations(PartFiles):
    """Records which arrays ``PartOpener`` opens, in place of opening them."""

    def __init__(self, root: Path, manifest: Manifest):
        super().__init__(root, manifest)
        self.found: list[_Expected] = []

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return self._noted(_Expected(f"{path}.npy", shape, dtype, scales="/scales/" in path))

    def id_rows(
        self, path: str, shape: tuple[int, ...], limits: Sequence[int], dtype: np.dtype[Any] | None = None
    ) -> Array:  # fmt: skip
        return self._noted(_Expected(f"{path}.npy", shape, dtype, tuple(limits)))

    def offsets(self, path: str, rows: int, total: int) -> Array:
        return self._noted(_Expected(f"{path}.npy", (rows + 1,), np.dtype(np.int64), total=total))

    def _noted(self, expected: _Expected) -> Array:
        self.found.append(expected)
        return np.empty(0, np.int64)


def _problems(root: Path, expected: _Expected) -> Iterator[str]:
    """Yield what is wrong with an array: its dtype or shape, or a value out of range."""
    values, dtype, shape = map_array(root / expected.path), expected.dtype, expected.shape
    if values.shape != shape or (values.dtype.kind != "i" if dtype is None else values.dtype != dtype):
        kind = "integers" if dtype is None else dtype.name
        yield f"holds {values.dtype.name} {list(values.shape)}, expected {kind} {list(shape)}"
        return
    if expected.total is not None:
        if values[0] != 0:
            yield f"begins with {values[0]}, expected 0"
        elif len(descents := np.flatnonzero(np.diff(values) < 0)):
            at = int(descents[0]) + 1
            yield f"position {at}: {values[at]} is below the value before it"
        elif values[-1] != expected.total:
            yield f"ends with {values[-1]}, but the manifest's offsets give the part {expected.total} edges"
    columns = values.T if len(expected.limits) > 1 else [values]
    for column, limit in zip(columns, expected.limits, strict=False):
        if (at := int(first_outside(column, limit))) >= 0:
            yield f"position {at}: {column[at]} is outside 0 to {limit - 1}"
    if expected.scales and len(wrong := np.flatnonzero(~(values[:, 0] >= 0) | np.isinf(values[:, 0]))):
        yield f"position {wrong[0]}: {values[wrong[0], 0]} is not a valid scale of a row"


_READERS = 2


def verify_partition(folder: str | Path, part_ids: Sequence[int] | None = None, digests: bool = True) -> list[Finding]:
    """Return all problems of a partition folder: of digests, dtypes, shapes and ranges. Empty if it is sound.

    Args:
        folder: partition folder.
        part_ids: parts to check; None: all. Shared files are always checked.
        digests: whether to read every file and compare its sha256 with the manifest.

    Raises:
        PartitionError: when the manifest cannot be read, or a part does not exist.
    """
    root, manifest = Path(folder), read_manifest(folder)
    wanted = sorted(set(range(manifest.num_parts) if part_ids is None else part_ids))
    for part_id in wanted:
        if not 0 <= part_id < manifest.num_parts:
            raise PartitionError(f"{root}: no part {part_id}; the folder has {manifest.num_parts} parts")
    arrays: list[_Expected] = []
    entries: list[FileEntry] = []
    findings: list[Finding] = []
    for top in (None, *wanted):
        files = _Expectations(root, manifest)
        opener = PartOpener(files, manifest)
        if top is not None:
            opener.part(top, light=False)
        else:
            opener.graph_attrs()
            opener.splits()
            if manifest.num_parts > 1:
                opener.global_ids()
        arrays += files.found
        entries += manifest.files_of(top)

        # The files that the folder should have, those in the manifest, and those on disk.
        needed = [each.path for each in files.found]
        listed = {entry.path for entry in manifest.files_of(top)}
        findings += [Finding(path, "not listed in the manifest") for path in needed if path not in listed]
        for path in sorted(listed - set(needed)):
            findings.append(Finding(path, "listed in the manifest, but does not belong to any node or edge type"))
        below = files_below(root, root / ("shared" if top is None else f"part{top}"))
        for path in sorted({path for path in below if not is_note(path)} - listed - set(needed)):
            findings.append(Finding(path, "is not a file of this partition; move it away"))
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda entry: _file_problem(root, entry, digests), entries)
        findings += [Finding(entry.path, problem) for entry, problem in zip(entries, problems, strict=True) if problem]
    broken = {finding.path for finding in findings}
    sound = [each for each in arrays if each.path not in broken]
    return findings + [Finding(each.path, problem) for each in sound for problem in _problems(root, each)]


def _file_problem(root: Path, entry: FileEntry, digests: bool) -> str | None:
    path = root / entry.path
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            return f"{size} bytes, the manifest says {entry.bytes}"
        if digests and sha256_of(path) != entry.sha256:
            return f"content does not match its sha256 {entry.sha256[:12]}…: damaged or changed"
        array = map_array(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    except PartitionError as error:
        return str(error).removeprefix(f"{path} ")
    if (array.dtype.name, array.shape) != (entry.dtype, entry.shape):
        return f"holds {array.dtype.name} {list(array.shape)}, the manifest says {entry.dtype} {list(entry.shape)}"
    return None
