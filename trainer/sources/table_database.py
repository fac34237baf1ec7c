"""Reads CSV and Parquet files with DuckDB, and finds the file and row that an error message must name."""

from __future__ import annotations

import contextlib
import contextvars
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trainer.core.errors import DataError
from trainer.core.memory import size_text
from trainer.core.progress import progress
from trainer.sources.csv_files import check_magic, check_zst, copy_as_utf8, has_header, split_rows
from trainer.sources.table_files import is_parquet
from trainer.sources.table_options import CATEGORY_ROLES, KEY_ROLES, Table

_WATCH_INTERVAL = 5.0  #: seconds


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _file(path: Path) -> str:
    """Return the SQL text of a path, in which DuckDB's wildcards ``*``, ``?`` and ``[`` stand for themselves."""
    return text(re.sub(r"[*?[]", r"[\g<0>]", str(path)))


class Database:
    """A DuckDB database in ``folder``, where it also stores temporary data that exceeds ``memory`` bytes."""

    def __init__(self, folder: Path, memory: int | None) -> None:
        try:
            import duckdb
        except ImportError:
            raise DataError(
                "dataset tables needs the package duckdb on the machine that makes the parts: pip install duckdb"
            ) from None
        if [*map(int, duckdb.__version__.split(".")[:2])] < [1, 3]:  # skips empty lines above a header, and then rows
            raise DataError(
                f"dataset tables needs duckdb 1.3 or newer, found {duckdb.__version__}: pip install --upgrade duckdb"
            )
        self._module, self._memory, self.folder = duckdb, memory, folder
        self._file = folder / "tables.duckdb"
        self._connection = self._module.connect(str(self._file))
        self.run(f"SET temp_directory = {text(str(folder / 'spill'))}", "dataset tables")
        self.run("SET TimeZone = 'UTC'", "dataset tables")  # of times without a zone, and of times as texts
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
            lines = [line.strip() for line in str(error).partition("\nLINE ")[0].splitlines() if line.strip()]
            raise DataError(f"{where}: {' '.join(lines[:6])[:600]}") from None
        finally:
            over.set()

    def _watch(self, where: str, over: threading.Event) -> None:
        progress(f"read {where}", 0, 100)
        while not over.wait(_WATCH_INTERVAL):
            progress(f"read {where}", int(self._connection.query_progress()), 100)


#: Error types of DuckDB's CSV reader -> what is wrong with the line
_CSV_FAULTS = {
    "MISSING COLUMNS": "has fewer values than the header",
    "TOO MANY COLUMNS": "has more values than the header",
    "UNQUOTED VALUE": "has a quote that is not closed, or text behind it; a quote in a value is written twice",
    "LINE SIZE OVER MAXIMUM": "is longer than 2 MB; is a quote left open?",
}

#: types of Parquet files for which DuckDB has no functions -> type of the copy
_READ_AS = {"TIMESTAMPTZ_NS": "TIMESTAMP WITH TIME ZONE", '"NULL"': "VARCHAR"}

_NAN = ("nan", "NaN", "NAN")  #: texts that are no labels

_NO_PARTITION = "__HIVE_DEFAULT_PARTITION__"  #: a missing value in the name of a folder; DuckDB 1 reads it as a text

_NUMBER_TYPE = re.compile(r"(U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL\(.*)$")

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)

_PLAIN = r"[+-]?(0|[1-9][0-9]*)?(\.[0-9]*)?([eE][+-]?[0-9]+)?"  #: of a number without leading zeros

_NO_TEXTS = ("BOOLEAN", "STRUCT", "MAP", "UNION", "BLOB")  #: types without values that ``null_values`` can name

ROW_NUMBER = "rowid"  #: name of a column that is in no file: the number of the row, from 0

_FILE = "\0"  #: in SQL, the file that is read: a CSV file or its copy in UTF-8


@dataclass(frozen=True)
class _Header:
    delimiter: str
    columns: Sequence[str]
    is_missing: bool  #: the first row contains values
    skipped: int = 0  #: empty lines before it
    repeated: frozenset[str] = frozenset()  #: columns whose name another one has, too


@dataclass(eq=False)
class Scan:
    """A table: its files, and a copy of its columns in the database, whose ``rowid`` is the number of the row.

    Conditions are evaluated on the copy only: a query of CSV files would parse them again, and DuckDB decides
    conditions on Parquet files by their statistics, which leave NaN out.
    """

    database: Database
    files: Sequence[Path]
    where: str  #: name of the table in messages, such as ``nodes.user``
    options: Table = Table(())
    used: Collection[str] | None = None  #: the columns that are copied; None: all
    _headers: dict[Path, _Header] = field(default_factory=dict)
    _in_utf8: dict[Path, Path] = field(default_factory=dict)  #: CSV file -> its copy in UTF-8
    _rows: dict[Path, int] = field(default_factory=dict)  #: number of rows of each file, as far as known
    _renumbered: bool = False  #: the copy lacks rows, and has column ``gf_file_row``

    @cached_property
    def sql(self) -> str:
        """Copy the table into the database, and return the copy's name.

        NULL are texts that are empty but for blanks, ``null_values``, and the text NaN in columns of labels.
        """
        name = quoted(f"rows of {self.where}")
        wanted = {column: of for column, of in self._columns.items() if self.used is None or column in self.used}
        if not wanted and self.without_header is not None:  # or the row would be lost, as no name is missed
            raise DataError(
                f"{self.where}: the first line of {self.without_header} seems to contain values: name its columns in "
                "`columns`"
            )
        wanted = wanted or dict([*self._columns.items()][:1])
        if name_of_rows := next((column for column in wanted if column.lower() == ROW_NUMBER), None):
            raise DataError(f"{self.where}: a column cannot be called {name_of_rows!r}; rename it")
        created = ", ".join(f"{quoted(column)} {of}" for column, of in wanted.items())
        spelled: dict[str, str] = {}  # as DuckDB compares names
        for column in wanted:
            if (same := spelled.setdefault(column.lower(), column)) != column:
                raise DataError(
                    f"{self.where}: the columns {same!r} and {column!r} have the same name but for case; rename one of "
                    "them, also in other files of the table"
                )
        self.database.run(f"CREATE TABLE {name} ({created})", self.where)

        def insert(columns: Iterable[str], reading: str) -> str:
            listed = [f"{self._without_nulls(one, wanted[one])} AS {quoted(one)}" for one in columns]
            return f"INSERT INTO {name} BY NAME SELECT {', '.join(listed)} FROM {reading}"

        if is_parquet(self.files[0]):
            try:
                self.database.run(insert(wanted, self._parquet(self.files)), self.where)
            except DataError:
                self._check_types(wanted)
                raise
            self._unite_numbers(name, wanted)
            return name
        for path in self.files:
            found = self._file_columns(path)
            columns = [column for column in wanted if column in found]
            if not columns:
                raise DataError(f"{path}: has no column {next(iter(wanted))!r}, which other files of {self.where} have")
            (row,) = self._query_csv(path, insert(columns, self._csv(path)))
            self._rows[path] = int(row[0])
        self._unite_numbers(name, wanted)
        return name

    def _unite_numbers(self, table: str, wanted: Mapping[str, str]) -> None:
        """Read texts as numbers in columns of the copy that are not checked as numbers later, if all of them are.

        ``nan`` becomes NULL. In categories ``12.0`` becomes ``12`` if whole numbers are also written without a decimal
        point, as in another file; of ids it is decided for a node type.
        """
        for column in self.options.columns_of(KEY_ROLES + CATEGORY_ROLES) & wanted.keys():
            if wanted[column] != "VARCHAR":
                continue
            name, nan = quoted(column), f"lower(trim({quoted(column)})) = 'nan'"
            whole = f"regexp_full_match(trim({name}), '-?[0-9]+\\.0+')"
            both = f"bool_or({whole}) AND bool_or(regexp_full_match(trim({name}), '-?[0-9]+'))"
            missing, decimal = self.database.rows(f"SELECT bool_or({nan}), {both} FROM {table}", self.where)[0]
            decimal = decimal and column in self.options.columns_of(CATEGORY_ROLES)
            numbers = f"SELECT bool_and(TRY_CAST({name} AS DOUBLE) IS NOT NULL) FROM {table} WHERE {name} IS NOT NULL"
            if not (missing or decimal) or not self.database.rows(numbers, self.where)[0][0]:
                continue
            if missing:
                self.database.run(f"UPDATE {table} SET {name} = NULL WHERE {nan}", self.where)
            if decimal:
                plain = f"split_part(trim({name}), '.', 1)"
                self.database.run(f"UPDATE {table} SET {name} = {plain} WHERE {whole}", self.where)

    def _without_nulls(self, column: str, of: str) -> str:
        """Return the SQL expression of a column in which missing values are NULL, also within lists."""
        is_label, element = column in getattr(self.options, "label", ()), of.rpartition("[")[0]
        if not element or "[" in element or not (self.options.null_values or is_label):
            return self.without_nulls(quoted(column), of, is_label)
        return f"CAST([{self.without_nulls('v', element, is_label)} FOR v IN {quoted(column)}] AS {of})"

    def without_nulls(self, name: str, of: str, is_label: bool) -> str:
        """Return the SQL expression of a value that is not a list, in which missing values are NULL.

        ``name``: SQL expression of the value. ``of``: its type.
        """
        nulls = self.options.null_values
        numbers = ", ".join(f"{text(each)}::DOUBLE" for each in nulls if _NUMBER.fullmatch(each))
        if of == "VARCHAR":
            texts = ", ".join(map(text, ("", _NO_PARTITION, *nulls, *(_NAN if is_label else ()))))
            missing = f"trim({name}) IN ({texts})"
            if numbers:  # in any form, but 007 is not 7
                same = f"coalesce(TRY_CAST({name} AS DOUBLE) IN ({numbers}), false)"
                missing += f" OR (regexp_full_match(trim({name}), '{_PLAIN}') AND {same})"
        elif _NUMBER_TYPE.match(of):
            missing = f"CAST({name} AS DOUBLE) IN ({numbers})" if numbers else ""
        else:
            is_flat = nulls and not of.startswith(_NO_TEXTS)
            same = ", ".join(f"TRY_CAST({text(each)} AS {of})" for each in nulls)
            missing = f"coalesce({name} IN ({same}), false)" if is_flat else ""
        return f"CASE WHEN NOT ({missing}) THEN {name} END" if missing else name

    def _check_types(self, wanted: Collection[str]) -> None:
        """Raise ``DataError`` if a column has types in two Parquet files that are not converted to each other."""
        seen: dict[str, tuple[Path, str]] = {}
        for path in self.files:
            for column, of in self._described([path]).items():
                first, type_ = seen.setdefault(column, (path, of))
                if column in wanted and type_ != of:
                    raise DataError(
                        f"{self.where}: {column} is {type_} in {first}, but {of} in {path}; write it in the same type"
                    )

    def keep(self, rows: str) -> None:
        """Remove all rows from the copy but those whose numbers the SQL query ``rows`` returns, as ``gf_row``.

        What remains is numbered again, in the same order.
        """
        number = "" if self._renumbered else ", s.rowid AS gf_file_row"
        self.database.run(
            f"CREATE TABLE gf_kept AS SELECT s.*{number} FROM {self.sql} s JOIN ({rows}) ON gf_row = s.rowid "
            "ORDER BY gf_row",
            self.where,
        )
        self.database.run(f"DROP TABLE {self.sql}", self.where)
        self.database.run(f"ALTER TABLE gf_kept RENAME TO {self.sql}", self.where)
        self._renumbered = True

    @property
    def file_row(self) -> str:
        """SQL expression of a row's number in all files, from 0."""
        return "gf_file_row" if self._renumbered else "rowid"

    def close(self) -> None:
        self.database.run(f"DROP TABLE IF EXISTS {quoted(f'rows of {self.where}')}", self.where)
        for path in self._in_utf8.values():
            path.unlink(missing_ok=True)

    # --- files ------------------------------------------------------------------------------------------------

    @staticmethod
    def _parquet(files: Sequence[Path]) -> str:
        return f"read_parquet([{', '.join(map(_file, files))}], union_by_name = true)"

    def _csv(self, path: Path) -> str:
        """Return the SQL that reads a CSV file, called ``_FILE``, with its Hive columns."""
        header = self._header(path)
        columns = ", ".join(f"{text(column)}: 'VARCHAR'" for column in header.columns)
        hive = "".join(f", {text(value)} AS {quoted(key)}" for key, value in self._hive(path).items())
        return (
            f"(SELECT *{hive} FROM read_csv({_FILE}, auto_detect = false, header = {not self.options.columns}, "
            f"columns = {{{columns}}}, delim = {text(header.delimiter)}, quote = '\"', escape = '\"', "
            f"hive_partitioning = false, store_rejects = true, rejects_limit = 100, skip = {header.skipped}))"
        )

    def _hive(self, path: Path) -> dict[str, str]:
        """Return the columns in the names of a CSV file's folders, such as ``day=2024-05-17``."""
        pairs = [part.split("=", 1) for part in path.parent.parts if part.find("=") > 0]
        return {key: unquote(value) for key, value in pairs if key not in self._header(path).columns}

    def _header(self, path: Path) -> _Header:
        if path not in self._headers:
            if path.suffix.lower() == ".zst":
                check_zst(path)
            elif not self.options.encoding:
                check_magic(path)
            other = "\2" if self.options.delimiter == "\1" else "\1"
            lines = self._query_csv(
                path,
                f"SELECT line FROM read_csv({_FILE}, auto_detect = false, header = false, delim = '{other}', "
                "quote = '', escape = '', columns = {'line': 'VARCHAR'}, strict_mode = false, "
                "hive_partitioning = false, store_rejects = true, rejects_limit = 100) LIMIT 1000",
            )
            if path not in self._in_utf8 and any(line and line[0] == "\n" for (line,) in lines):
                self._copy(
                    path, self.options.encoding or "utf-8"
                )  # lines end with CR CR LF, which DuckDB takes for two
                return self._header(path)
            delimiter, rows = split_rows((f"{line}\n" for (line,) in lines if line), self.options.delimiter)
            skipped = next((k for k, (line,) in enumerate(lines) if line), 0)
            if not rows:
                raise DataError(
                    f"{self.where}: {path} is empty, or damaged; expected a line of column names, and lines of values"
                )
            if names := self.options.columns:
                if len(rows[0]) != len(names):
                    raise DataError(
                        f"{self.where}: {path}: {len(rows[0])} values in a row, but {len(names)} names in `columns`"
                    )
                if [cell.removeprefix("\ufeff").strip().lower() for cell in rows[0]] == [of.lower() for of in names]:
                    raise DataError(
                        f"{self.where}: {path}: the first line has the names of the columns; leave out `columns`"
                    )
                self._headers[path] = _Header(delimiter, names, False, skipped)
                return self._headers[path]
            repeated: set[str] = set()
            columns: dict[str, str] = {}  # name in lower case, as DuckDB compares names -> name
            for k, cell in enumerate(rows[0]):
                column = cell.removeprefix("\ufeff").strip() or f"column{k}"
                same = columns.get(column.lower())
                if same:
                    self._check_repeated(path, same, column)
                repeated |= {same, column} if same else set()
                number = 1
                while same and column.lower() in columns:
                    column, number = f"{same}_{number}", number + 1
                repeated |= {column} if same else set()
                columns[column.lower()] = column
            self._headers[path] = _Header(
                delimiter, list(columns.values()), not has_header(rows), skipped, frozenset(repeated)
            )
        return self._headers[path]

    def _check_repeated(self, path: Path, column: str, same: str) -> None:
        """Raise ``DataError`` if one of two columns of a file with the same name, but for case, is used."""
        if not {same, column}.isdisjoint(self.used or ()):
            raise DataError(
                f"{self.where}: {path}: two columns are called {column!r}"
                f"{'' if same == column else f' and {same!r}, which is the same name'}; rename one of them"
            )

    def _query_csv(self, path: Path, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query on a CSV file, which is called ``_FILE`` in ``sql``.

        The query is repeated on a copy with line feeds as line ends if DuckDB cannot read the file, such as one in
        which they vary. Raises ``DataError`` that names the line.
        """
        file, faults = self._in_utf8.get(path, path), []
        if file is path and self.options.encoding:
            file = self._copy(path, self.options.encoding)
        query = sql.replace(_FILE, _file(file))
        self.database.run("BEGIN", self.where)
        try:
            found = self.database.rows(query, self.where)
            faults = self.database.rows(
                "SELECT line, error_type, csv_line FROM reject_errors ORDER BY line", self.where
            )
        except DataError as error:
            if path.suffix.lower() == ".zst":
                raise DataError(f"{error} (in {path})") from None
            if file is not path:
                raise
            faults = [(0, "", "")]
        finally:
            self.database.run("ROLLBACK" if faults else "COMMIT", self.where)
        if not faults:
            return found
        if file is path and path.suffix.lower() != ".zst":
            self._copy(path, "utf-8")
            return self._query_csv(path, sql)
        line, kind, content = faults[0]
        fault = _CSV_FAULTS.get(kind, "is not UTF-8, or no line of a CSV file")
        raise DataError(f"{self.where}: {path}, line {line}: {fault}: {content[:80]!r}")

    def _copy(self, path: Path, encoding: str) -> Path:
        self._in_utf8[path] = self.database.folder / f"{self.where} {len(self._in_utf8)}.csv"
        try:
            copy_as_utf8(path, encoding, self._in_utf8[path])
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from None
        return self._in_utf8[path]

    @property
    def repeated_columns(self) -> frozenset[str]:
        """The columns, as they are read, whose name another column of a file has, too."""
        of_file = self._repeated_of_parquet if is_parquet(self.files[0]) else lambda path: self._header(path).repeated
        return frozenset().union(*map(of_file, self.files))

    @property
    def without_header(self) -> Path | None:
        """The first CSV file whose first row seems to contain values instead of names of columns, or None."""
        if is_parquet(self.files[0]):
            return None
        return next((path for path in self.files if self._header(path).is_missing), None)

    # --- columns ----------------------------------------------------------------------------------------------

    @cached_property
    def types(self) -> dict[str, str]:
        """DuckDB's type of each column, by name. All columns of CSV files are VARCHAR."""
        return self._columns | ({ROW_NUMBER: "BIGINT"} if ROW_NUMBER in (self.used or ()) else {})

    @cached_property
    def _columns(self) -> dict[str, str]:
        if is_parquet(self.files[0]):
            if self.options.columns:
                raise DataError(f"{self.where}: `columns` is for CSV files; {self.files[0]} has names of its own")
            described = self._described(self.files)
            for path in self.files:
                self._repeated_of_parquet(path)
            return described
        return {column: "VARCHAR" for path in self.files for column in self._file_columns(path)}

    def _described(self, files: Sequence[Path]) -> dict[str, str]:
        try:
            found = self.database.rows(f"DESCRIBE SELECT * FROM {self._parquet(files)}", self.where)
        except DataError:
            for path in files if len(files) > 1 else ():
                self._described([path])
            if len(files) > 1:
                self._check_types([*self._described(files[:1])])
                raise
            raise DataError(
                f"{self.where}: {files[0]} is no Parquet file, or a damaged one; copy or write it again"
            ) from None
        return {str(row[0]): _READ_AS.get(str(row[1]), str(row[1])) for row in found}

    def _repeated_of_parquet(self, path: Path) -> frozenset[str]:
        """Return the columns whose name another one has, too. Raises ``DataError`` if one of them is used.

        DuckDB reads the first under its name and the others under names of its own.
        """
        below, found = 0, dict[str, list[tuple[str, str]]]()
        read_as = iter(self._described([path]))
        schema = f"SELECT name, coalesce(num_children, 0) FROM parquet_schema({_file(path)})"
        for name, children in self.database.rows(schema, self.where)[1:]:  # depth first, below the root
            if not below:
                found.setdefault(name.lower(), []).append((name, next(read_as)))
            below = max(0, below - 1) + children
        repeated = [columns for columns in found.values() if len(columns) > 1]
        for (first, _), (second, _), *_ in repeated:
            self._check_repeated(path, first, second)
        return frozenset(name for columns in repeated for _, name in columns)

    def _file_columns(self, path: Path) -> Collection[str]:
        return self._described([path]) if is_parquet(path) else [*self._header(path).columns, *self._hive(path)]

    def check_column(self, column: str, role: str) -> None:
        """Raise ``DataError`` if no file has the column. ``role``: what the column is for, such as ``id``."""
        if column not in self.types:
            names = list(self.types)
            shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            values = (
                f"; the first line of {self.without_header.name} seems to contain values: name its columns in `columns`"
                if self.without_header
                else ""
            )
            raise DataError(
                f"{self.where}: {role} {column!r} is not a column: {self.files[0].name} has the columns {shown}{values}"
            )

    def check_file_columns(self, columns: Sequence[str]) -> None:
        """Raise ``DataError`` if one of ``columns`` is missing in a file. The message names the file."""
        for path in self.files:
            found = self._file_columns(path)
            if missing := [column for column in columns if column not in (*found, ROW_NUMBER)]:
                raise DataError(f"{path}: has no column {missing[0]!r}, which other files of {self.where} have")

    # --- rows -------------------------------------------------------------------------------------------------

    def first(self, column: str, condition: str) -> str:
        """Describe the first row that meets the SQL ``condition``, such as ``users.csv, row 4: age is 'old'``."""
        sql = (
            f"SELECT rowid, CAST({quoted(column)} AS VARCHAR) FROM {self.sql} WHERE {condition} ORDER BY rowid LIMIT 1"
        )
        row, value = self.database.rows(sql, self.where)[0]
        return f"{self.place(int(row))}: {column} is {'empty' if value is None else repr(str(value)[:80])}"

    def place(self, row: int) -> str:
        """Return the file and the row number in it, from 1, such as ``users.csv, row 4``.

        ``row`` counts the rows of all files, from 0.
        """
        if self._renumbered:
            ((row,),) = self.database.rows(f"SELECT gf_file_row FROM {self.sql} WHERE rowid = {row}", self.where)
        for path in self.files:
            count = self.row_count(path)
            if row < count:
                return f"{path}, row {row + 1}"
            row -= count
        return f"{self.files[-1]}, after the last row"

    def row_count(self, path: Path) -> int:
        """Return the number of rows of one of the files. The table must have been copied (``sql``)."""
        if path not in self._rows:
            ((count,),) = self.database.rows(f"SELECT count(*) FROM {self._parquet([path])}", self.where)
            self._rows[path] = int(count)
        return self._rows[path]
