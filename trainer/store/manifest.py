"""The manifest of a partition folder, ``manifest.json``: dataclasses, strict reading and atomic writing."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from trainer.core.errors import DataError, PartitionError
from trainer.core.files import parse_json, read_regular, write_whole
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType, EdgeType, NodeType, type_name, type_of
from trainer.core.typed import convert

FORMAT = "gnnfleet-partition"

VERSION = 3

MANIFEST = "manifest.json"

MOST_BYTES = 1 << 30  #: of a manifest; that of a thousand parts has about 20 MB

NAME_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")  #: attribute and split names, which become file names

LOOPLESS_DEGREE = "in_degree_without_loops"

#: Names of columns that can be gathered like attributes.
RESERVED_ATTRS = frozenset({"orig_id", "in_degree", LOOPLESS_DEGREE})


@dataclass(frozen=True)
class FileEntry:
    path: str  #: relative to the folder, with ``/``; begins with ``shared/`` or ``part<p>/``
    bytes: int  #: size of the file
    sha256: str  #: hex
    dtype: str  #: numpy's name, such as ``int32``
    shape: tuple[int, ...]

    @property
    def part_id(self) -> int | None:
        """The part that the file belongs to, or None for a shared file."""
        top = PurePosixPath(self.path).parts[0]
        return None if top == "shared" else int(top.removeprefix("part"))


@dataclass(frozen=True)
class AttrSpec:
    """One attribute of a node type, an edge type or the graph, over all parts."""

    dtype: str  #: torch's name, such as ``float32``; ``bfloat16`` is stored as uint16 with the same bits
    shape: tuple[int, ...]  #: shape over all parts, [num_nodes, …] or [num_edges, …]
    kept: str = ""  #: ``int8``: rows are stored as int8 codes and, in other files, scales; '': stored unchanged

    @property
    def stored(self) -> np.dtype[Any]:
        """Numpy dtype of the rows in memory. The dtype in the files is ``in_files``."""
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def in_files(self) -> np.dtype[Any]:
        return np.dtype(self.kept) if self.kept else self.stored

    def travels_as(self, requested: WireRows) -> WireRows:
        """Return the type in which rows are sent if a request asks for the type ``requested``.

        Rows stored as int8 are always sent as int8.
        """
        return "int8" if self.kept else requested


@dataclass(frozen=True)
class NodeSpec:
    """The nodes of one type: number, parts, attributes and splits."""

    num_nodes: int
    offsets: tuple[int, ...]  #: [num_parts + 1]; part p owns offsets[p] <= gid < offsets[p+1]
    attrs: Mapping[str, AttrSpec]
    splits: Mapping[str, int]  #: name -> number of seeds
    num_classes: int  #: number of classes of ``y``; 0 without class labels


@dataclass(frozen=True)
class EdgeSpec:
    """The edges of one type: number, parts and attributes. An edge belongs to the part of its target."""

    num_edges: int
    offsets: tuple[int, ...]  #: [num_parts + 1]; part p owns the edges offsets[p] <= id < offsets[p+1]
    attrs: Mapping[str, AttrSpec]
    src_times: tuple[str, ...]  #: time attributes of the source type that are stored per edge as well
    edge_cut: float  #: share of these edges whose ends are in different parts, 0 to 1


def endpoint_offsets(num_edges: int, num_parts: int) -> tuple[int, ...]:
    """Divide the original edge ids among the endpoints files of all parts. Returns offsets [num_parts + 1].

    The file of part p stores source and target of the edges ``offsets[p] <= original id < offsets[p + 1]``, even if
    another part owns the edges.
    """
    return tuple(num_edges * part // num_parts for part in range(num_parts + 1))


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``: types, attributes and files of a partition. See docs/ARCHITECTURE.md.

    Args:
        dataset: Name of the dataset.
        fingerprint: Sha256 of the dataset, its options and source files, and all partition options.
        num_parts: Number of parts.
        algorithm: Partition method.
        seed: Seed of the partition method.
        hetero: Whether the graph is heterogeneous.
        nodes: Node types.
        edges: Edge types.
        edge_cut: Share of all edges whose ends are in different parts, 0 to 1.
        balance: Nodes of the largest part / mean nodes of a part, over all types.
        graph_attrs: Attributes of the graph as a whole. Their ``shape`` is that of the whole array, not of one row.
        files: All files of the folder.
        options: Further options of the partition method.
        dataset_fingerprint: Sha256 of the dataset alone.
        time_attrs: Node attributes with times.
    """

    dataset: str
    fingerprint: str
    num_parts: int
    algorithm: str
    seed: int
    hetero: bool
    nodes: Mapping[NodeType, NodeSpec]
    edges: Mapping[EdgeType, EdgeSpec]
    edge_cut: float
    balance: float
    graph_attrs: Mapping[str, AttrSpec]
    files: tuple[FileEntry, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    dataset_fingerprint: str = ""
    time_attrs: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all types."""
        return sum(spec.num_nodes for spec in self.nodes.values())

    @property
    def num_edges(self) -> int:
        """Number of edges of all types."""
        return sum(spec.num_edges for spec in self.edges.values())

    def attrs_of(self, of: AnyType) -> Mapping[str, AttrSpec]:
        return self.nodes[of].attrs if isinstance(of, str) else self.edges[of].attrs

    def files_of(self, part_id: int | None) -> tuple[FileEntry, ...]:
        """Return the files of one part, or of ``shared/`` when ``part_id`` is None."""
        return tuple(entry for entry in self.files if entry.part_id == part_id)


def read_manifest(folder: str | Path) -> Manifest:
    """Read and check the manifest of a partition folder.

    Args:
        folder: Partition folder, as ``python -m trainer partition make`` writes it.

    Returns:
        The manifest: node and edge types with their attributes and splits, parts and files.

    Raises:
        PartitionError: ``manifest.json`` is missing, invalid, or of another format or version.

    Example:
        ```python
        import gnnfleet as gf

        manifest = gf.read_manifest("parts")
        print(manifest.num_parts, manifest.num_nodes)
        print(manifest.attrs_of("node")["x"].shape)
        ```
    """
    path = Path(folder) / MANIFEST
    return parse_manifest(_read_bytes(path), path)


def parse_manifest(text: bytes, path: str | Path) -> Manifest:
    """Parse the content of a ``manifest.json``. Error messages show ``path``. Raises ``PartitionError``."""
    try:
        raw = parse_json(text.decode("utf-8"))
    except ValueError as error:
        raise PartitionError(f"{path} is invalid: {error}; make the partition again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise PartitionError(f"{path} is not a {FORMAT} manifest; point to a folder that `partition make` wrote")
    if raw.get("version") != VERSION:
        raise PartitionError(
            f"{path} has format version {raw.get('version')!r}, this program reads {VERSION}; "
            "make the partition again with this version"
        )
    try:
        nodes: dict[NodeType, NodeSpec] = {}
        for name, value in raw["nodes"].items():
            if not isinstance(of := type_of(name), str):
                raise ValueError(f"{name!r} is not a node type")
            nodes[of] = convert(value, NodeSpec)
        edges: dict[EdgeType, EdgeSpec] = {}
        for name, value in raw["edges"].items():
            of = type_of(name)
            if isinstance(of, str) or not {of[0], of[2]} <= nodes.keys():
                raise ValueError(f"{name!r} is not an edge type between the node types")
            edges[of] = convert(value, EdgeSpec)
        plain = convert({**raw, "nodes": {}, "edges": {}}, Manifest)

        # Numbers of rows must fit together, and names are those of files.
        _check_attrs(plain.graph_attrs)
        every: list[NodeSpec | EdgeSpec] = [*nodes.values(), *edges.values()]
        for spec in every:
            count = spec.num_nodes if isinstance(spec, NodeSpec) else spec.num_edges
            _check_attrs(spec.attrs, count)
            ends = spec.offsets[:1] + spec.offsets[-1:]
            if len(spec.offsets) != plain.num_parts + 1 or ends != (0, count):
                raise ValueError(f"offsets must be num_parts + 1 numbers from 0 to {count}")
            if any(low > high for low, high in pairwise(spec.offsets)):
                raise ValueError("offsets must not decrease")
        _check_names([*plain.time_attrs, *(name for spec in nodes.values() for name in spec.splits),
                      *(name for spec in edges.values() for name in spec.src_times)])  # fmt: skip
        for entry in plain.files:
            if not re.fullmatch(r"(shared|part\d+)(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+", entry.path):
                raise ValueError(f"path {entry.path!r} does not begin with shared/ or part<p>/")
            if entry.part_id is not None and entry.part_id >= plain.num_parts:
                raise ValueError(
                    f"path {entry.path!r} belongs to a part that does not exist; num_parts is {plain.num_parts}"
                )
        return replace(plain, nodes=nodes, edges=edges)
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        reason = f"key {error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise PartitionError(f"{path} is invalid: {reason}; make the partition again") from error


def write_manifest(folder: str | Path, manifest: Manifest) -> Path:
    """Write ``manifest.json`` atomically, sync it to disk, and return its path."""
    path = Path(folder) / MANIFEST
    named = replace(manifest, nodes={}, edges={})  # JSON keys cannot be tuples
    plain = {
        **asdict(named, dict_factory=_as_dict),
        "nodes": {type_name(of): asdict(spec, dict_factory=_as_dict) for of, spec in manifest.nodes.items()},
        "edges": {type_name(of): asdict(spec, dict_factory=_as_dict) for of, spec in manifest.edges.items()},
    }
    text = _layout({"format": FORMAT, "version": VERSION, **plain}) + "\n"
    write_whole(path, text, sync=True)
    return path


def manifest_digest(folder: str | Path) -> str:
    """Return the sha256, hex, of ``manifest.json``. Equal digests mean equal partitions.

    Raises ``PartitionError`` when the file cannot be read.
    """
    return hashlib.sha256(_read_bytes(Path(folder) / MANIFEST)).hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        return read_regular(path, MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        where = "the folder does not exist" if not path.parent.is_dir() else "the folder holds no partition"
        raise PartitionError(
            f"{path} is missing: {where}; make one with `partition make`, or convert a partition of another "
            "program with `partition convert`"
        ) from None
    except OSError as error:
        raise PartitionError(f"{path} cannot be read: {error.strerror}") from error


def _as_dict(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in fields if (name, value) != ("kept", "")}


def _layout(value: Any, depth: int = 0) -> str:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(item, dict) for item in inner):
        return json.dumps(value)
    indent = "\n" + " " * depth
    if isinstance(value, dict):
        lines = [f"{indent} {json.dumps(key)}: {_layout(item, depth + 1)}" for key, item in value.items()]
        return "{" + ",".join(lines) + indent + "}"
    return "[" + ",".join(f"{indent} {_layout(item, depth + 1)}" for item in value) + indent + "]"


def _check_attrs(specs: Mapping[str, AttrSpec], rows: int | None = None) -> None:
    _check_names(specs)
    for name, spec in specs.items():
        _ = spec.stored  # raises TypeError for a dtype numpy does not know
        if spec.kept and (spec.kept, spec.dtype, len(spec.shape) > 1) != ("int8", "float32", True):
            raise ValueError(f"attribute {name!r}, {spec.dtype} {list(spec.shape)}, cannot be stored as {spec.kept!r}")
        if rows is not None and spec.shape[:1] != (rows,):
            raise ValueError(f"attribute {name!r} has shape {list(spec.shape)}, expected {rows} rows")


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not NAME_PATTERN.fullmatch(name):
            raise ValueError(f"name {name!r} cannot be a file name")
