"""Reads CSV and Parquet files with DuckDB, and finds the file and row that an error message must name."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.core.errors import DataError
from trainer.core.memory import size_text
from trainer.core.progress import progress
from trainer.sources.table_files import is_parquet

_WATCH_INTERVAL = 5.0  #: seconds

_FEW = 3  #: rows or values that a message shows


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _duckdb() -> ModuleType:
    try:
        import duckdb
    except ImportError:
        raise DataError(
            "dataset tables needs the package duckdb on the machine that makes the parts: pip install duckdb"
        ) from None
    return duckdb


class Database:
    """A DuckDB database in ``folder``, where it also stores temporary data that exceeds ``memory`` bytes."""

    def __init__(self, folder: Path, memory: int | None) -> None:
        self._module, self._memory = _duckdb(), memory
        self._file = folder / "tables.duckdb"
        self._connection = self._module.connect(str(self._file))
        self.run(f"SET temp_directory = {text(str(folder / 'spill'))}", "dataset tables")
        self.run("SET enable_progress_bar = true", "dataset tables")  # else there is no query_progress
        self.run("SET enable_progress_bar_print = false", "dataset tables")
        if memory is not None:
            self.run(f"SET memory_limit = '{memory}B'", "dataset tables")

    def close(self) -> None:
        """Close the database and delete its file."""
        self._connection.close()
        self._file.unlink(missing_ok=True)

    def run(self, sql: str, where: str) -> None:
        """Execute a statement. Raises ``DataError``, whose message begins with ``where``."""
        with self._explained(where):
            self._connection.execute(sql)

    def rows(self, sql: str, where: str) -> list[tuple[Any, ...]]:
        with self._explained(where):
            return list(self._connection.execute(sql).fetchall())

    def arrays(self, sql: str, where: str) -> dict[str, Any]:
        with self._explained(where):
            return dict(self._connection.execute(sql).fetchnumpy())

    @contextlib.contextmanager
    def _explained(self, where: str) -> Iterator[None]:
        over = threading.Event()
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(self._watch, where, over), daemon=True).start()
        try:
            yield
        except self._module.Error as error:
            if isinstance(error, self._module.OutOfMemoryException):
                raise DataError(
                    f"{where}: {size_text(self._memory or 0)} of memory is too little for reading tables; raise data"
                    ".partition.memory (--memory), or store thousands of columns as one list column of Parquet"
                ) from None
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise DataError(f"{where}: {' '.join(lines[:6])[:600]}") from None
        finally:
            over.set()

    def _watch(self, where: str, over: threading.Event) -> None:
        progress(f"read {where}", 0, 100)
        while not over.wait(_WATCH_INTERVAL):
            progress(f"read {where}", int(self._connection.query_progress()), 100)


@dataclass(frozen=True)
class Scan:
    """The files of a table, and the SQL that reads them."""

    database: Database
    files: Sequence[Path]
    where: str  #: name of the table in messages, such as ``nodes.user``
    delimiter: str | None = None

    @cached_property
    def sql(self) -> str:
        reading = self._reading(self.files)
        if is_parquet(self.files[0]):
            return reading
        # CSV files are copied into the database, since each query would otherwise parse them again.
        self.database.run(f"CREATE TABLE {self._copy} AS SELECT * FROM {reading}", self.where)
        return self._copy

    @property
    def _copy(self) -> str:
        return quoted(f"rows of {self.where}")

    def close(self) -> None:
        self.database.run(f"DROP TABLE IF EXISTS {self._copy}", self.where)

    def _reading(self, files: Sequence[Path]) -> str:
        names = "[" + ", ".join(text(str(path)) for path in files) + "]"
        if is_parquet(files[0]):
            return f"read_parquet({names}, union_by_name = true)"
        delimiter = f", delim = {text(self.delimiter)}" if self.delimiter else ""
        return f"read_csv({names}, all_varchar = true, header = true, union_by_name = true{delimiter})"

    @cached_property
    def types(self) -> dict[str, str]:
        """DuckDB's type of each column, by name. All columns of CSV files are VARCHAR."""
        found = self.database.rows(f"DESCRIBE SELECT * FROM {self.sql}", self.where)
        return {str(row[0]): str(row[1]) for row in found}

    def check_column(self, column: str, role: str) -> None:
        """Raise ``DataError`` if no file has the column. ``role``: what the column is for, such as ``id``."""
        if column not in self.types:
            raise DataError(f"{self.where}: {role} {column!r} is not a column: {self._have(self.types)}")

    def _have(self, columns: Sequence[str] | dict[str, str]) -> str:
        names = list(columns)
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        return f"{self.files[0].name} has the columns {shown}"

    def check_file_columns(self, columns: Sequence[str]) -> None:
        """Raise ``DataError`` if one of ``columns`` is missing in a file. The message names the file."""
        for path in self.files:
            found = self.database.rows(f"DESCRIBE SELECT * FROM {self._reading([path])}", f"{self.where}: {path}")
            if missing := [column for column in columns if column not in {str(row[0]) for row in found}]:
                raise DataError(f"{path}: has no column {missing[0]!r}, which other files of {self.where} have")

    def first(self, columns: Sequence[str], condition: str) -> str:
        """Describe the first row that meets the SQL ``condition``, such as ``users.csv, row 4: age is 'old'``.

        ``columns``: the columns that occur in the condition; the value of the first of them is shown.
        """
        listed = ", ".join(dict.fromkeys(map(quoted, columns)))
        inner = f"SELECT row_number() OVER () - 1 AS gf_row, {listed} FROM {self.sql}"
        shown = f"CAST({quoted(columns[0])} AS VARCHAR)"
        sql = f"SELECT gf_row, {shown} FROM ({inner}) WHERE {condition} ORDER BY gf_row LIMIT 1"
        row, value = self.database.rows(sql, self.where)[0]
        return f"{self.place(int(row))}: {columns[0]} is {'empty' if value is None else repr(str(value)[:80])}"

    def place(self, row: int) -> str:
        """Return the file and the row number in it, from 1, such as ``users.csv, row 4``.

        ``row`` counts the rows of all files, from 0.
        """
        for path in self.files:
            (count,) = self.database.rows(f"SELECT count(*) FROM {self._reading([path])}", self.where)[0]
            if row < count:
                return f"{path}, row {row + 1}"
            row -= count
        return f"{self.files[-1]}, after the last row"
