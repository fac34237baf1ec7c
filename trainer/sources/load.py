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
    if isinstance(parsed, SyntheticOptions):
        dataset = make_synthetic(parsed, fingerprint)
    elif isinstance(parsed, SyntheticHeteroOptions):
        dataset = make_synthetic_hetero(parsed, fingerprint)
    else:
        if isinstance(parsed, TablesOptions):
            from trainer.sources.read_tables import read_tables  # needs duckdb

            if scratch is None:
                raise ValueError("dataset tables needs a scratch folder")
            raw = read_tables(source, parsed, scratch)
        elif name == "file":
            raw = read_files(source, parsed)
        elif name.startswith("ogbn-"):
            from trainer.sources.ogb import read_ogb  # imports torch, which takes seconds

            raw = read_ogb(name, source)
        else:
            from trainer.sources.pyg import read_pyg  # imports torch, too

            raw = read_pyg(name, source)
        dataset = build_dataset(raw, parsed, fingerprint, scratch)
        del raw  # may take as much memory as the dataset
        dataset = subset_of(dataset, parsed.subset, scratch)
    return hold_out_links(dataset, parsed, scratch)


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
    is_folder, files = os.path.isdir(folder), []  # False for every path that cannot exist
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
