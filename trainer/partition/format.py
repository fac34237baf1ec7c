"""The partition manifest: what ``manifest.json`` holds, read strictly and written atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any

from trainer.errors import PartitionError

FORMAT = "gnnfleet-partition"
VERSION = 1
MANIFEST = "manifest.json"
NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")  #: attribute and split names: they become file names
RESERVED_ATTRS = frozenset({"orig_id"})  #: names under ``part<p>/nodes/`` that are not attributes


@dataclass(frozen=True)
class FileEntry:
    """One file of a partition folder."""

    path: str  #: relative, ``/``-separated, begins with ``shared/`` or ``part<p>/``
    bytes: int
    sha256: str
    dtype: str  #: numpy name, e.g. ``int32``
    shape: tuple[int, ...]

    @property
    def part_id(self) -> int | None:
        """The part the file belongs to; None for a shared file."""
        top = PurePosixPath(self.path).parts[0]
        return None if top == "shared" else int(top.removeprefix("part"))


@dataclass(frozen=True)
class AttrSpec:
    """One node attribute over all parts."""

    dtype: str  #: numpy name, e.g. ``float32``
    shape: tuple[int, ...]  #: of the whole array, [num_nodes, …]


@dataclass(frozen=True)
class Manifest:
    """What one partition folder holds; see docs/ARCHITECTURE.md."""

    dataset: str
    fingerprint: str  #: of dataset, options, source files, num_parts, method and seed
    num_parts: int
    algorithm: str
    seed: int
    num_nodes: int
    num_edges: int
    num_classes: int
    offsets: tuple[int, ...]  #: [num_parts + 1]; part p owns offsets[p] <= gid < offsets[p+1]
    edge_cut: float  #: fraction of edges whose ends lie in different parts
    balance: float  #: most nodes of a part / mean nodes of a part
    attrs: Mapping[str, AttrSpec]
    splits: Mapping[str, int]  #: name -> number of seeds
    files: tuple[FileEntry, ...]

    def files_of(self, part_id: int | None) -> tuple[FileEntry, ...]:
        """Files of one part; of ``shared/`` when None."""
        return tuple(entry for entry in self.files if entry.part_id == part_id)


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check ``manifest.json``.

    Raises ``PartitionError`` when it is missing, invalid, or of another format or version.
    """
    path = Path(folder) / MANIFEST
    raw = _read_json(path)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise PartitionError(f"{path} is not a {FORMAT} manifest; point to a folder that `partition make` wrote")
    if raw.get("version") != VERSION:
        raise PartitionError(
            f"{path} has format version {raw.get('version')!r}, this program reads version {VERSION}; "
            "make the partition again with this version"
        )
    try:
        manifest = _from_json(raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise PartitionError(f"{path} is invalid: {_reason(error)}; make the partition again") from error
    return manifest


def write_manifest(folder: str | Path, manifest: Manifest) -> Path:
    """Write ``manifest.json`` (written beside, synced, renamed); returns its path."""
    path = Path(folder) / MANIFEST
    temporary = path.with_name(f".{MANIFEST}.{os.getpid()}")
    text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(manifest)}, indent=1) + "\n"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return path


def manifest_digest(folder: str | Path) -> str:
    """sha256 of ``manifest.json``, hex: equal digests mean equal partitions.

    Raises ``PartitionError`` when it is missing.
    """
    return hashlib.sha256(_read_bytes(Path(folder) / MANIFEST)).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        where = "the folder does not exist" if not path.parent.is_dir() else "the folder holds no partition"
        raise PartitionError(f"{path} is missing: {where}; make one with `partition make`") from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}") from error


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_bytes(path).decode("utf-8"))
    except ValueError as error:
        raise PartitionError(f"{path} is invalid: {error}; make the partition again") from error


def _from_json(raw: dict[str, Any]) -> Manifest:
    values = {field.name: raw[field.name] for field in fields(Manifest)}
    values["offsets"] = tuple(_integer(value) for value in values["offsets"])
    values["attrs"] = {_name(name): AttrSpec(str(a["dtype"]), _shape(a["shape"])) for name, a in raw["attrs"].items()}
    values["splits"] = {_name(name): _integer(count) for name, count in raw["splits"].items()}
    values["files"] = tuple(_file_entry(entry) for entry in raw["files"])
    for name in ("num_parts", "seed", "num_nodes", "num_edges", "num_classes"):
        values[name] = _integer(values[name])
    manifest = Manifest(**values)
    _check_offsets(manifest)
    return manifest


def _file_entry(raw: dict[str, Any]) -> FileEntry:
    path = str(raw["path"])
    if not re.fullmatch(r"(shared|part\d+)(/[A-Za-z0-9_][A-Za-z0-9_.-]*)+", path):
        raise ValueError(f"path {path!r} does not begin with shared/ or part<p>/")
    return FileEntry(path, _integer(raw["bytes"]), str(raw["sha256"]), str(raw["dtype"]), _shape(raw["shape"]))


def _check_offsets(manifest: Manifest) -> None:
    offsets = manifest.offsets
    if len(offsets) != manifest.num_parts + 1 or offsets[0] != 0 or offsets[-1] != manifest.num_nodes:
        raise ValueError(f"offsets must be num_parts + 1 numbers from 0 to {manifest.num_nodes}")
    if any(low > high for low, high in zip(offsets, offsets[1:], strict=False)):
        raise ValueError("offsets must not decrease")


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(_integer(size) for size in value)


def _name(value: str) -> str:
    if not NAME_PATTERN.fullmatch(value):
        raise ValueError(f"name {value!r} cannot be a file name")
    return value


def _reason(error: Exception) -> str:
    return f"key {error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
