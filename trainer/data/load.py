"""Loads datasets by name: `synthetic`, `synthetic-hetero`, `file`, `ogbn-*` or one of ``torch_geometric.datasets``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from trainer.data.build import build_dataset
from trainer.data.dataset import Dataset
from trainer.data.file import read_files, source_files
from trainer.data.hold_out import hold_out_links
from trainer.data.options import SourceOptions, SyntheticHeteroOptions, SyntheticOptions, parse_options
from trainer.data.raw_arrays import RawGraph
from trainer.data.synthetic import make_synthetic, make_synthetic_hetero

Options: TypeAlias = SyntheticOptions | SyntheticHeteroOptions | SourceOptions

_GENERATION = 2  #: part of the fingerprint; increase it when a change gives another graph for the same name and options

_KINDS = {"synthetic": SyntheticOptions, "synthetic-hetero": SyntheticHeteroOptions}


def load_dataset(name: str, source: str | None = None, options: Mapping[str, Any] | None = None) -> Dataset:
    """Load or generate a graph.

    Args:
        name: name of the dataset.
        source: folder, .npz or .pt file (dataset `file`), or the download folder (`ogbn-*`, `Planetoid:Cora`).
        options: dataset options, as text or values.

    Raises:
        DataError: when the dataset cannot be read, or an option is unknown or invalid.
    """
    fingerprint = dataset_fingerprint(name, source, options)
    parsed = _options(name, options)
    return hold_out_links(_whole(name, source, parsed, fingerprint), parsed)


def _whole(name: str, source: str | None, options: Options, fingerprint: str) -> Dataset:
    """Load or generate the graph, before links are held out."""
    if isinstance(options, SyntheticOptions):
        return make_synthetic(options, fingerprint)
    if isinstance(options, SyntheticHeteroOptions):
        return make_synthetic_hetero(options, fingerprint)
    return build_dataset(_read(name, source, options), options, fingerprint)


def dataset_fingerprint(name: str, source: str | None = None, options: Mapping[str, Any] | None = None) -> str:
    """Return the sha256 of a dataset's name, its options with defaults, and the sizes and mtimes of its source files.

    The content of the files is not read. Raises ``DataError`` for unknown or invalid options and for missing files.
    """
    parsed = _options(name, options)
    paths = source_files(source, parsed) if name == "file" and isinstance(parsed, SourceOptions) else []
    files = [(_place(path, source), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    text = json.dumps([_GENERATION, name, asdict(parsed), files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _options(name: str, options: Mapping[str, Any] | None) -> Options:
    kind: type[Options] = _KINDS.get(name, SourceOptions)
    return parse_options(kind, options or {}, name)


def _place(path: Path, source: str | None) -> str:
    """Return the path of a file relative to the source folder, or the file's name when the source is a file."""
    folder = Path(str(source)).expanduser()
    return path.relative_to(folder).as_posix() if folder.is_dir() else path.name


def _read(name: str, source: str | None, options: SourceOptions) -> RawGraph:
    if name == "file":
        return read_files(source, options)
    # imported here because they import torch, which takes seconds
    if name.startswith("ogbn-"):
        from trainer.data.ogb import read_ogb

        return read_ogb(name, source)
    from trainer.data.pyg import read_pyg

    return read_pyg(name, source)
