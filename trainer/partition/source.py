"""Reads a partition folder, in gnnfleet's format or that of another program, to make a new partition from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.core.errors import DataError, PartitionError, TrainerError
from trainer.core.files import parse_json
from trainer.core.row_sort import Scratch
from trainer.data.build import build_dataset
from trainer.data.hold_out import hold_out_links
from trainer.data.options import SourceOptions, parse_options
from trainer.data.work_arrays import WorkArrays
from trainer.partition.foreign.dgl import DGL
from trainer.partition.foreign.dgl_chunks import DGL_CHUNKED
from trainer.partition.foreign.extra_arrays import ExtraFile, extra_files, with_extra_arrays
from trainer.partition.foreign.glt import GLT
from trainer.partition.foreign.pyg import PYG
from trainer.partition.foreign.types import ForeignFormat
from trainer.partition.restore import PartitionedGraph, restore_graph
from trainer.sources.pyg import first_line
from trainer.store.manifest import MANIFEST, Manifest, read_manifest

DATASET = "partition"  #: name of the dataset whose source is a partition folder

_NODES = "nodes"  #: dataset option: name of an array of nodes -> file

_FORMATS = (PYG, GLT, DGL, DGL_CHUNKED)

_GENERATION = 1  #: part of the fingerprint; increase it if changed code reads another graph from the same files

_EXPECTED = (
    "expected META.json (torch_geometric.distributed), META (GraphLearn-for-PyTorch), <graph>.json with the parts' id "
    "ranges (DGL), metadata.json (DGL's chunked graph format) or manifest.json (gnnfleet)"
)


@dataclass(frozen=True)
class PartitionSource:
    """A partition folder, of any format that gnnfleet reads."""

    folder: Path
    format: ForeignFormat | None  #: None: gnnfleet's own
    options: SourceOptions = field(default_factory=SourceOptions)
    nodes: Mapping[str, str] = field(default_factory=dict)  #: name of an array of nodes -> file

    @property
    def title(self) -> str:
        return "gnnfleet" if self.format is None else self.format.title

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of a folder in gnnfleet's format, else None."""
        return read_manifest(self.folder) if self.format is None else None

    @cached_property
    def num_parts(self) -> int:
        """Number of parts; 0 if the nodes are not assigned to parts. Raises ``DataError`` or ``PartitionError``."""
        return self.manifest.num_parts if self.manifest is not None else self._foreign.count(self.folder)

    @property
    def _foreign(self) -> ForeignFormat:
        assert self.format is not None
        return self.format

    @property
    def time_attrs(self) -> tuple[str, ...]:
        return self.options.times if self.manifest is None else self.manifest.time_attrs

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the graph: the manifest's or, without a manifest, a sha256 of options, sizes and mtimes."""
        if self.manifest is not None:
            return self.manifest.dataset_fingerprint
        found = {path for path in self.folder.rglob("*") if path.is_file()}
        files = sorted(found.union(*(file.files for file in self._extra)))
        states = []
        for path in files:
            place, stat = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path, path.stat()
            states.append((place.as_posix(), stat.st_size, stat.st_mtime_ns))
        record = [_GENERATION, DATASET, self._foreign.key, asdict(self.options), dict(self.nodes), states]
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    @cached_property
    def _extra(self) -> list[ExtraFile]:
        return extra_files(self.folder, self.nodes)

    def read(self, work: Path | None = None, memory: int | None = None) -> PartitionedGraph:
        """Read the graph and the part of every node.

        ``work``: an empty folder for large arrays; None: they are kept in memory. ``memory``: bytes for making edges by
        dataset options, which are then files in ``work``; None: such edges are made in memory. Raises ``DataError`` or
        ``PartitionError`` for files that are incomplete or damaged, or contradict each other.
        """
        if self.format is None:
            return restore_graph(self.folder, work)
        try:
            found = self.format.read(self.folder, WorkArrays(work))
        except (TrainerError, OSError):
            raise
        except Exception as error:  # files that contradict each other or have other content, in any way
            raise DataError(
                f"{self.folder} cannot be read as a partition of {self.title} ({type(error).__name__}: "
                f"{first_line(error)}): its files are damaged, or not of one partition; copy them or make them again"
            ) from error
        raw = with_extra_arrays(found.raw, self._extra)
        scratch = None if work is None or memory is None else Scratch(work, memory)
        dataset = hold_out_links(build_dataset(raw, self.options, self.fingerprint, scratch), self.options, scratch)
        return PartitionedGraph(dataset, found.parts, found.num_parts)


def open_source(source: str | Path | None, options: Mapping[str, Any] | None = None) -> PartitionSource:
    """Recognise the format of a partition folder, and return a source that can read it.

    Args:
        source: the folder, the file in it that describes the partition (META.json, DGL's part config, …), or a folder
            that contains one folder `NAME-partitions`.
        options: fields of ``SourceOptions``, and `nodes`: a mapping of names of node attributes to files (.npy or .pt)
            or folders (with partition0.pt, …). Must be empty for a partition in gnnfleet's format.

    Raises:
        DataError: when the folder does not exist or has no known format, or an option is unknown.
        PartitionError: when options are given for a partition in gnnfleet's format.
    """
    if not source:
        raise DataError("dataset partition: no source; give the partition folder to read")
    path = Path(os.path.expanduser(source))
    if not os.path.exists(path):  # False for every path that cannot exist
        raise DataError(f"{path} does not exist; expected a partition folder")
    folder = path.parent if path.is_file() else path
    found: list[tuple[Path, ForeignFormat | None]] = []
    for place in (folder, *sorted(below for below in folder.glob("*-partitions") if below.is_dir())):
        if (place / MANIFEST).is_file():
            found.append((place, None))
        elif forms := [form for form in _FORMATS if form.found(place)]:
            found.append((place, forms[0]))
    if not found:
        raise DataError(f"{folder} is not a partition folder: {_EXPECTED}")
    if len(found) > 1 and found[0][0] != folder:
        raise DataError(f"{folder} holds several partitions: {', '.join(place.name for place, _ in found)}; choose one")

    (folder, form), given = found[0], dict(options or {})
    if form is None:
        if given:
            raise PartitionError(f"{folder} is a partition of gnnfleet, which takes no option {min(given)!r}")
        return PartitionSource(folder, None)
    nodes = given.pop(_NODES, {})
    if isinstance(nodes, str):
        try:
            nodes = parse_json(nodes)
        except ValueError:
            nodes = None
    if not isinstance(nodes, Mapping) or not all(isinstance(file, str) for file in nodes.values()):
        raise DataError("dataset partition: option nodes must be a mapping of array names to files, as {y: label.pt}")
    return PartitionSource(folder, form, parse_options(SourceOptions, given, DATASET), dict(nodes))
