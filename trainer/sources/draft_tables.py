"""Guesses the options of dataset `tables` from the CSV and Parquet files of a folder (``partition tables``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from trainer.core.errors import DataError
from trainer.sources.table_columns import as_double, is_number_type, list_type
from trainer.sources.table_database import Database, Scan, quoted
from trainer.sources.table_files import holds_tables, table_files
from trainer.sources.table_options import Table

_LABELS = ("label", "labels", "y", "class", "target")

_TIMES = ("time", "timestamp", "date", "datetime", "at", "year")

_SPLIT_WORDS = {"train", "val", "valid", "validation", "test", ""}

_FEW = 1000  #: most texts of a column that are looked at

_MOST_ONE_HOT = 64  #: most texts of a column that is drafted as 0/1 columns

_MOST_CATEGORIES = 10_000  #: most texts of a column of nodes that is drafted as categories

_BINARY = {"0", "1", "0.0", "1.0", "false", "true"}

_MOST_CLASSES = 50  #: most values of a column that is drafted as the label without being called so

_NEARLY_UNIQUE = 0.9  #: share of different values from which on a column is probably meant to be an id

_SAMPLE = 1000  #: ids of a column that are looked up in the node tables


@dataclass
class _Column:
    name: str
    kind: str  #: number, list, time, text, empty, other
    type: str = ""  #: DuckDB's
    whole: bool = False  #: integers only
    unique: bool = False  #: no value occurs twice, and none is missing
    texts: tuple[str, ...] | None = None  #: the distinct values, if there are few
    rows: int = 0
    present: int = 0  #: rows with a value
    distinct: int = 0  #: different values
    numbers: int = 0  #: rows with a number

    @property
    def missing(self) -> str:
        """Share of rows without a value, in words; '' if there are none."""
        share = 1 - self.present / max(self.rows, 1)
        return "" if self.present == self.rows else f"{share:.0%}" if share >= 0.01 else "less than 1%"

    @property
    def is_binary(self) -> bool:
        return self.kind == "number" and self.whole and self.distinct == 2 and set(self.texts or ()) <= _BINARY

    @property
    def mostly_numbers(self) -> bool:
        return self.kind == "text" and self.numbers > self.present / 2

    def why_unused(self, most_texts: int) -> str:
        """Return why the draft does not use the column, and what can be done."""
        if self.kind == "empty":
            return "it is empty"
        if self.kind == "other":
            return f"values of type {self.type} are neither numbers, texts nor times"
        if self.kind == "time":
            return "another column is the time; attributes takes it as a further number if it is one"
        if self.kind == "number":
            return "it looks like a key of another table; if it is a quantity, list it under features"
        if self.mostly_numbers:
            odd = [text for text in self.texts or () if not _is_number(text)]
            shown = f", such as {odd[0][:40]!r}" if odd else ""
            return (
                f"{self.present - self.numbers:,} of its {self.present:,} values are not numbers{shown}; empty these "
                "cells, and list the column under features, with fill"
            )
        if self.distinct == self.present:
            return "it has another text in each row, as names have"
        return (
            f"its {self.distinct:,} different texts are more than the {most_texts:,} for which one_hot is drafted; "
            "list it under categories to get their codes"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass
class _Found:
    scan: Scan
    file: str  #: relative to the folder
    rows: int
    columns: list[_Column] = field(default_factory=list)

    @property
    def type_name(self) -> str:
        """Name of a type, made from the file name without suffix: lower case, with letters, digits and ``_`` only."""
        stem = re.sub(r"\.(csv|tsv|txt|parquet|pq)(\.\w+)?$", "", Path(self.file).name, flags=re.IGNORECASE)
        word = re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_").lower() or "table"
        return word

    @property
    def node_type(self) -> str:
        word = self.type_name
        return word[:-1] if word.endswith("s") and not word.endswith("ss") else word

    @property
    def id(self) -> _Column | None:
        return next((one for one in self.columns if one.unique and _may_be_id(one)), None)


def _may_be_id(column: _Column) -> bool:
    return column.kind == "text" or (column.kind == "number" and column.whole)


def draft_tables(folder: Path) -> dict[str, Any]:
    """Guess the options ``nodes`` and ``edges`` of dataset `tables` from the files in ``folder``.

    Every CSV or Parquet file and every folder of such files directly in ``folder`` is one table. A table with a column
    of unique values is a node table; a table with two columns of ids of node tables is an edge table. With several node
    types, option ``undirected`` is set. ``comments`` of the result says what was guessed, and why columns are not used,
    by node and edge type; ``unused`` in it is about files.

    Raises ``DataError`` if no node or edge table is found, if the folder of a table has files of both kinds, or if a
    CSV file has no line with the names of its columns.
    """
    with TemporaryDirectory(prefix="gnnfleet-tables-") as work:
        database = Database(Path(work), None)
        try:
            found = [_look(scan, file) for scan, file in _scans(database, folder)]
            return _draft(found)
        finally:
            database.close()


def _scans(database: Database, folder: Path) -> Iterator[tuple[Scan, str]]:
    none = True
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name[0] in "_." or not holds_tables(path):
            continue
        files = table_files(Table((path.name,)), folder, str(path))
        none = False
        scan = Scan(database, files, str(path))
        if (file := scan.without_header) is not None:
            raise DataError(
                f"{file}: the first line looks like a row of data, not like the names of the columns; add a line with "
                "their names"
            )
        yield scan, path.name
    if none:
        raise DataError(f"{folder} has no CSV or Parquet files")


def _look(scan: Scan, file: str) -> _Found:
    (rows,) = scan.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)[0]
    return _Found(scan, file, rows, [_column(scan, name, of, rows) for name, of in scan.types.items()])


def _column(scan: Scan, name: str, of: str, rows: int) -> _Column:
    if list_type(of) is not None:
        return _Column(name, "list" if is_number_type(list_type(of) or "") else "other", of)
    if not is_number_type(of) and of != "VARCHAR" and of != "DATE" and not of.startswith("TIMESTAMP"):
        return _Column(name, "text" if of == "UUID" else "other", of, unique=of == "UUID")
    number, column = as_double(name, of) if of != "DATE" and not of.startswith("TIMESTAMP") else "NULL", quoted(name)
    moment = f"TRY_CAST({column} AS TIMESTAMP)" if not is_number_type(of) else "NULL"
    present, numbers, whole, moments, distinct = scan.database.rows(
        f"SELECT count({column}), count({number}), count(*) FILTER (WHERE {number} = floor({number})), "
        f"count({moment}), count(DISTINCT {column}) FROM {scan.sql}",
        scan.where,
    )[0]
    kind = "number" if numbers == present else "time" if moments == present else "text"
    texts = None
    if distinct <= _FEW:
        sql = f"SELECT DISTINCT CAST({column} AS VARCHAR) AS v FROM {scan.sql} WHERE v IS NOT NULL ORDER BY v"
        texts = tuple(str(row[0]) for row in scan.database.rows(sql, scan.where))
    return _Column(
        name, kind if present else "empty", of, kind == "number" and whole == present, distinct == present == rows > 0,
        texts, rows, present, distinct, numbers,
    )  # fmt: skip


def _draft(found: list[_Found]) -> dict[str, Any]:
    named = [table for table in found if table.id is not None]
    ends = {table.file: _ends(table, [one for one in named if one is not table]) for table in found}
    referenced = {end.file for pair in ends.values() if len(pair) == 2 for _, end in pair}
    edges = [table for table in found if len(ends[table.file]) == 2 and table.file not in referenced]
    nodes = [table for table in named if table not in edges]
    types = {table.file: table.node_type for table in nodes}
    edges = [table for table in edges if all(end.file in types for _, end in ends[table.file])]
    if not nodes or not edges:
        have = ", ".join(f"{table.file} ({', '.join(one.name for one in table.columns[:8])})" for table in found)
        raise DataError(
            "; ".join(f"{table.file}: {why}" for table in found if (why := _why_no_id(table)))
            or "no node table (with a column of unique values) or no edge table (with two columns of node ids) is "
            f"recognised in: {have}; write data.options yourself (docs/data.md)"
        )
    unused = {
        table.file: _why_no_id(table)
        or "it has neither a column with a different value in each row nor two columns of ids of node tables"
        for table in found
        if table not in (*nodes, *edges)
    }
    node_tables = {types[table.file]: _node_table(table) for table in nodes}
    edge_tables = {}
    for table in edges:
        source, target = (types[end.file] for _, end in ends[table.file])
        edge_tables[f"{source}__{table.type_name}__{target}"] = _edge_table(table, ends[table.file])
    drafted = {
        "nodes": {of: table for of, (table, _) in node_tables.items()},
        "edges": {of: table for of, (table, _) in edge_tables.items()},
        "comments": {
            "nodes": {of: notes for of, (_, notes) in node_tables.items() if notes},
            "edges": {of: notes for of, (_, notes) in edge_tables.items() if notes},
            "unused": [f"{file} is not used: {why}" for file, why in unused.items()],
        },
    }
    # without reverse edges, a type without incoming edges would receive no messages
    return drafted | ({"undirected": True} if len(nodes) > 1 else {})


def _why_no_id(table: _Found) -> str:
    """If a column before the table's id is nearly one, return why it is none; else ''."""
    before = table.columns[: table.columns.index(table.id)] if table.id else table.columns
    column = next((one for one in before if _may_be_id(one) and one.distinct >= _NEARLY_UNIQUE * one.rows), None)
    if column is None:
        return ""
    name = quoted(column.name)
    if column.present < column.rows:
        place = table.scan.first(column.name, f"{name} IS NULL")
        return f"{place}; an id must be in every row: fill it in, or remove the row"
    inner = f"SELECT row_number() OVER () - 1 AS gf_row, {name} AS v FROM {table.scan.sql}"
    rows = f"SELECT CAST(v AS VARCHAR), list(gf_row ORDER BY gf_row) FROM ({inner}) GROUP BY v"
    twice = table.scan.database.rows(f"{rows} HAVING count(*) > 1 ORDER BY 2", table.scan.where)
    value, places = str(twice[0][0]), [table.scan.place(int(row)).rpartition(", ")[2] for row in twice[0][1][:4]]
    more = f" ({len(twice):,} such values)" if len(twice) > 1 else ""
    return (
        f"{column.name} {value[:80]!r} is in {' and '.join(places)}{more}; an id must be in one row: remove the others"
    )


def _ends(table: _Found, nodes: list[_Found]) -> list[tuple[_Column, _Found]]:
    scored = []
    for position, column in enumerate(table.columns):
        if not _may_be_id(column):
            continue
        fits = [(_likeness(column, node), node) for node in nodes if _contained(table, column, node)]
        if fits:
            likeness, node = max(fits, key=lambda fit: fit[0])
            scored.append((-likeness, position, column, node))
    best = sorted(scored, key=lambda one: one[:2])[:2]
    return [(column, node) for _, _, column, node in sorted(best, key=lambda one: one[1])]


def _likeness(column: _Column, node: _Found) -> int:
    name, key = column.name.lower(), node.id.name.lower() if node.id else ""
    return 2 * (name == key) + (node.node_type in name) + (key in name)


def _contained(table: _Found, column: _Column, node: _Found) -> bool:
    """Return whether at least 90% of a sample of a column's values are ids of a node table."""
    assert node.id is not None
    own, ids = (f"CAST({quoted(one.name)} AS VARCHAR)" for one in (column, node.id))
    some = f"SELECT DISTINCT v FROM (SELECT {own} AS v FROM {table.scan.sql} LIMIT {_SAMPLE}) WHERE v IS NOT NULL"
    count, inside = table.scan.database.rows(
        f"SELECT count(*), count(*) FILTER (WHERE v IN (SELECT {ids} FROM {node.scan.sql})) FROM ({some})",
        table.scan.where,
    )[0]
    return bool(count) and inside >= 0.9 * count


Drafted: TypeAlias = tuple[dict[str, Any], list[str]]  #: options of a table, and comments on them


def _node_table(table: _Found) -> Drafted:
    assert table.id is not None
    drafted: dict[str, Any] = {"files": table.file, "id": table.id.name}
    rest, notes = [column for column in table.columns if column is not table.id], []
    label = next((one for one in rest if one.name.lower() in _LABELS and one.kind != "empty"), None)
    split = next((one for one in rest if one.texts and {text.lower() for text in one.texts} <= _SPLIT_WORDS), None)
    if label is None:
        classes = [one for one in rest if one is not split and _may_be_class(one)]
        label = classes[0] if len(classes) == 1 and split is not None else None
    if label is None:
        known = [one for one in rest if one.is_binary and one.missing]
        label = known[0] if len(known) == 1 else None
        if label is not None:
            notes.append(f"{label.name} is 0 or 1, and empty in {label.missing} of the rows: taken as the label")
    for key, column in (("label", label), ("split", split)):
        if column is not None:
            drafted[key] = column.name
    if label is not None and split is None:
        drafted["split"] = {"train": 0.8, "val": 0.1, "test": 0.1}
    more, of_others = _others(table, [one for one in rest if one is not label and one is not split], True)
    return drafted | more, notes + of_others


def _may_be_class(column: _Column) -> bool:
    few = column.texts is not None and 2 <= len(column.texts) <= _MOST_CLASSES
    return few and _may_be_id(column) and column.name.lower() not in _TIMES


def _edge_table(table: _Found, ends: list[tuple[_Column, _Found]]) -> Drafted:
    (source, _), (target, _) = ends
    drafted: dict[str, Any] = {"files": table.file, "source": source.name, "target": target.name}
    rest = [one for one in table.columns if one is not source and one is not target]
    weight = next((one for one in rest if one.name.lower() == "weight" and one.kind == "number"), None)
    if weight is not None:
        drafted["weight"] = weight.name
    more, notes = _others(table, [one for one in rest if one is not weight], False)
    return drafted | more, notes


def _others(table: _Found, rest: list[_Column], of_nodes: bool) -> Drafted:
    """Draft the use of all columns but id, label, split, ends and weight. Each is used, or named in the comments.

    Texts become 0/1 columns if there are few. If there are more, they become categories ``of_nodes``, whose embeddings
    the trainer learns, unless most of them occur only once.
    """
    drafted: dict[str, Any] = {}
    time = next((one for one in rest if one.kind == "time" or (one.whole and one.name.lower() in _TIMES)), None)
    if time is not None:
        drafted["time"] = time.name
    keys = [one for one in rest if one.whole and one.name.lower().endswith("id")]
    numbers = [one for one in rest if one.kind in ("number", "list") and one is not time and one not in keys]
    notes = []
    if numbers:
        drafted["features"] = [one.name for one in numbers]
        if any(one.kind == "number" for one in numbers):
            drafted["standardize"] = True
        if gaps := [one for one in numbers if one.kind == "number" and one.missing]:
            drafted["fill"] = 0
            notes.append("fill: empty cells become 0: " + ", ".join(f"{one.name} ({one.missing})" for one in gaps))
    most = min(_MOST_ONE_HOT, max(2, table.rows // 2))
    texts = [one for one in rest if one.kind == "text" and not one.mostly_numbers]
    few = [one for one in texts if one.texts and len(one.texts) <= most]
    if few:
        drafted["one_hot"] = [one.name for one in few]
    limit = min(_MOST_CATEGORIES, table.rows // 2) if of_nodes else 0
    many = [one for one in texts if one not in few and one.distinct <= limit]
    if many:
        drafted["categories"] = [one.name for one in many]
    unused = [one for one in rest if one is not time and one not in (*numbers, *few, *many)]
    return drafted, notes + [f"{one.name} is not used: {one.why_unused(most)}" for one in unused]
