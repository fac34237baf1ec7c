"""Loads datasets by name: `synthetic`, `synthetic-hetero`, `file`, `tables`, `ogbn-*` or a PyG dataset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from trainer.core.row_sort import Scratch
from trainer.core.schema import type_name
from trainer.data.build import build_dataset
from trainer.data.dataset import Dataset
from trainer.data.hold_out import hold_out_links
from trainer.data.options import SourceOptions, SyntheticHeteroOptions, SyntheticOptions, parse_options
from trainer.data.raw_arrays import RawGraph
from trainer.data.subset import subset_of
from trainer.sources.file import read_files, source_files
from trainer.sources.synthetic import make_synthetic, make_synthetic_hetero
from trainer.sources.table_files import all_files
from trainer.sources.table_options import TablesOptions, parse_tables_options

Options: TypeAlias = SyntheticOptions | SyntheticHeteroOptions | SourceOptions

_GENERATION = 2  #: part of the fingerprint; increase it if changed code makes another graph from the same options

_KINDS = {"synthetic": SyntheticOptions, "synthetic-hetero": SyntheticHeteroOptions}


def load_dataset(
    name: str, source: str | None = None, options: Mapping[str, Any] | None = None, scratch: Scratch | None = None
) -> Dataset:
    """Load or generate a graph.

    Args:
        name: name of the dataset.
        source: for dataset `file`, a folder or an .npz or .pt file; for `tables`, the folder of the tables; for
            downloaded datasets (`ogbn-*`, `Planetoid:Cora`), the download folder.
        options: dataset options. A value may be given as text.
        scratch: An empty folder for arrays that are made from those in the source, and the memory for making them;
            required for dataset `tables`. Default: they are made in memory.

    Raises:
        DataError: when the dataset cannot be read, or an option is unknown or invalid.
    """
    fingerprint = dataset_fingerprint(name, source, options)
    parsed = _options(name, options)
    return hold_out_links(_whole(name, source, parsed, fingerprint, scratch), parsed, scratch)


def _whole(name: str, source: str | None, options: Options, fingerprint: str, scratch: Scratch | None) -> Dataset:
    if isinstance(options, TablesOptions):
        from trainer.sources.read_tables import read_tables  # needs duckdb

        if scratch is None:
            raise ValueError("dataset tables needs a scratch folder")
        tables = build_dataset(read_tables(source, options, scratch), options, fingerprint, scratch)
        return subset_of(tables, options.subset, scratch)
    if isinstance(options, SyntheticOptions):
        return make_synthetic(options, fingerprint)
    if isinstance(options, SyntheticHeteroOptions):
        return make_synthetic_hetero(options, fingerprint)
    dataset = build_dataset(_read(name, source, options), options, fingerprint, scratch)
    return subset_of(dataset, options.subset, scratch)


def dataset_fingerprint(name: str, source: str | None = None, options: Mapping[str, Any] | None = None) -> str:
    """Return the sha256 of a dataset's name, its options with defaults, and the sizes and mtimes of its source files.

    Raises ``DataError`` for unknown or invalid options and for missing files.
    """
    parsed = _options(name, options)
    found: list[Path] = []
    if isinstance(parsed, TablesOptions):
        found = all_files(parsed, source)
    elif name == "file" and isinstance(parsed, SourceOptions):
        found = source_files(source, parsed)
    folder = Path(os.path.expanduser(str(source)))
    is_folder, files = folder.is_dir(), []
    for path in found:  # by its place in the folder ``source``; by its name if ``source`` is a file
        inside = is_folder and path.is_relative_to(folder)
        place = path.relative_to(folder).as_posix() if inside else path.as_posix() if is_folder else path.name
        files.append((place, path.stat().st_size, path.stat().st_mtime_ns))
    record = asdict(parsed)
    if record.get("subset") is None:  # parts made before this option existed stay valid
        record.pop("subset", None)
    for option in ("normalize_features", "hold_out_split"):
        if not record.get(option):
            record.pop(option, None)
    if isinstance(parsed, TablesOptions):
        edges = {type_name(of): asdict(table) for of, table in parsed.edges.items()}
        for table in (*edges.values(), *record["nodes"].values()):
            for key in ("relation", "label", "split", "val_files", "test_files", "columns"):
                if not table.get(key, True) and (
                    key not in ("label", "split") or "source" in table
                ):  # parts made before this key existed stay valid
                    table.pop(key)
        record |= {"edges": edges}
    text = json.dumps([_GENERATION, name, record, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _options(name: str, options: Mapping[str, Any] | None) -> Options:
    if name == "tables":
        return parse_tables_options(options or {})
    kind: type[Options] = _KINDS.get(name, SourceOptions)
    return parse_options(kind, options or {}, name)


def _read(name: str, source: str | None, options: SourceOptions) -> RawGraph:
    if name == "file":
        return read_files(source, options)
    # imported here because they import torch, which takes seconds
    if name.startswith("ogbn-"):
        from trainer.sources.ogb import read_ogb

        return read_ogb(name, source)
    from trainer.sources.pyg import read_pyg

    return read_pyg(name, source)
