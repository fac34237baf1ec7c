"""Finds the files of a table: CSV or Parquet, given as files, folders or globs."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from trainer.core.errors import DataError
from trainer.sources.table_options import Table, TablesOptions

_PARQUET = (".parquet", ".pq")

CSV = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz", ".csv.zst", ".tsv.zst")


def table_files(table: Table, folder: Path, where: str) -> list[Path]:
    """Return all files of a table: of ``files``, then of ``val_files`` and ``test_files``."""
    return [path for files in files_of_splits(table, folder, where) for path in files]


def files_of_splits(table: Table, folder: Path, where: str) -> tuple[list[Path], list[Path], list[Path]]:
    """Return a table's files for training, validation and test, each in the order of its patterns.

    Files of one folder or glob are sorted. In folders, files and subfolders whose names begin with ``_`` or ``.`` are
    skipped. Raises ``DataError`` if a pattern matches no file, if there are both CSV and Parquet files, or if a file is
    in two splits.
    """
    splits: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
    for own, key in zip(splits, ("files", "val_files", "test_files"), strict=True):
        for pattern in getattr(table, key, ()):
            paths = _expand(folder / Path(os.path.expanduser(pattern)))
            if not paths:
                raise DataError(f"{where}: {folder / pattern} does not exist or has no CSV or Parquet file")
            own += [path for path in paths if path not in own]
    found = [path for own in splits for path in own]
    if repeated := {str(path) for path in found if found.count(path) > 1}:
        raise DataError(f"{where}: {min(repeated)} is in two of files, val_files and test_files; leave it in one")
    other = next((path for path in found if is_parquet(path) != is_parquet(found[0])), None)
    if other is not None:
        raise DataError(f"{where}: files of a table must be all CSV or all Parquet, found {found[0]} and {other.name}")
    return splits


def holds_tables(path: Path) -> bool:
    """Return whether a path is a CSV or Parquet file, by its name, or a folder with such files."""
    return bool(_below(path)) if path.is_dir() else _is_table(path.name)


def _expand(pattern: Path) -> list[Path]:
    if pattern.is_dir():
        return _below(pattern)
    if pattern.exists():
        return [pattern]
    matches = sorted(map(Path, glob.glob(str(pattern), recursive=True)))
    return [path for match in matches for path in (_below(match) if match.is_dir() else [match])]


def _below(folder: Path) -> list[Path]:
    found = []
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "_.")
        found += [Path(top, name) for name in sorted(names) if name[0] not in "_." and _is_table(name)]
    return found


def _is_table(name: str) -> bool:
    return name.lower().endswith(_PARQUET + CSV)


def is_parquet(path: Path) -> bool:
    return path.name.lower().endswith(_PARQUET)


def source_folder(source: str | None) -> Path:
    """Return the folder that paths of tables are relative to: ``source``, or the current folder if it is None."""
    folder = Path(os.path.expanduser(source or "."))
    if not os.path.isdir(folder):  # False for every path that cannot exist
        raise DataError(f"dataset tables: source {folder} is not a folder; give the folder of the tables")
    return folder


def all_files(options: TablesOptions, source: str | None) -> list[Path]:
    folder = source_folder(source)
    named = [(f"nodes.{of}", table) for of, table in options.nodes.items()]
    named += [(f"tasks.{of}", table) for of, table in options.tasks.items()]
    named += [(f"edges.{'__'.join(of)}", table) for of, table in options.edges.items()]  # type: ignore[misc]
    return [path for where, table in named for path in table_files(table, folder, where)]
