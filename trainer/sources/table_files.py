"""Finds the files of a table: CSV or Parquet, given as files, folders or globs."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
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
    in two splits, cannot be read, or is no file, such as a link to one that does not exist.
    """
    splits: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
    for own, key in zip(splits, ("files", "val_files", "test_files"), strict=True):
        for pattern in getattr(table, key, ()):
            paths = _expand(folder, os.path.expanduser(pattern))
            if not paths:
                raise DataError(f"{where}: {folder / pattern} does not exist or has no CSV or Parquet file")
            own += [path for path in paths if path not in own]
    found = [path for own in splits for path in own]
    if repeated := {str(path) for path in found if found.count(path) > 1}:
        raise DataError(f"{where}: {min(repeated)} is in two of files, val_files and test_files; leave it in one")
    for path in found:
        if not os.path.isfile(path):
            what = "is a link to a file that does not exist" if path.is_symlink() else "is no file"
            raise DataError(f"{where}: {path} {what}; put the file there, or remove it")
        if not os.access(path, os.R_OK):
            raise DataError(f"{where}: {path} cannot be read: permission denied")
    other = next((path for path in found if is_parquet(path) != is_parquet(found[0])), None)
    if other is not None:
        raise DataError(f"{where}: files of a table must be all CSV or all Parquet, found {found[0]} and {other.name}")
    return splits


def tables_in(path: Path) -> list[Path]:
    """Return the CSV and Parquet files, by their names, in a folder as far as it can be read, or the path itself."""
    return _below(path, lambda error: None) if path.is_dir() else [path] if _is_table(path.name) else []


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None


def _expand(folder: Path, pattern: str) -> list[Path]:
    path = folder / pattern
    if os.path.isdir(path):
        return _below(path, _refuse)
    if os.path.exists(path):  # False for every path that cannot exist
        return [path]
    matches = [folder / each for each in sorted(map(Path, glob.glob(pattern, root_dir=folder, recursive=True)))]
    return [path for match in matches for path in (_below(match, _refuse) if match.is_dir() else [match])]


def _below(folder: Path, unreadable: Callable[[OSError], None]) -> list[Path]:
    """Return the tables in a folder and its subfolders, also linked ones.

    ``unreadable``: is called for a folder that cannot be read.
    """
    found, above = [], {str(folder): {os.path.realpath(folder)}}  # folder -> those that it is in, and itself
    for top, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if name[0] not in "_." and name != "lost+found")
        for name in [*folders]:
            path = os.path.join(top, name)
            real = os.path.realpath(path)
            if real in above[top]:  # a link to a folder that it is in
                folders.remove(name)
            above[path] = above[top] | {real}
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
