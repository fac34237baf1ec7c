"""Guesses the options of dataset `tables` from the CSV and Parquet files of a folder (``partition tables``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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

_MOST_CLASSES = 50  #: most values of a column that is drafted as the label without being called so

_SAMPLE = 1000  #: ids of a column that are looked up in the node tables


@dataclass
class _Column:
    name: str
    kind: str  #: number, list, time, text
    whole: bool = False  #: integers only
    unique: bool = False  #: no value occurs twice, and none is missing
    texts: tuple[str, ...] | None = None  #: the distinct values, if there are few


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
    types, option ``undirected`` is set.

    Raises ``DataError`` if no node or edge table is found, or if the folder of a table has files of both kinds.
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
        yield Scan(database, files, str(path)), path.name
    if none:
        raise DataError(f"{folder} has no CSV or Parquet files")


def _look(scan: Scan, file: str) -> _Found:
    (rows,) = scan.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)[0]
    return _Found(scan, file, rows, [_column(scan, name, of, rows) for name, of in scan.types.items()])


def _column(scan: Scan, name: str, of: str, rows: int) -> _Column:
    if list_type(of) is not None:
        return _Column(name, "list" if is_number_type(list_type(of) or "") else "other")
    if not is_number_type(of) and of != "VARCHAR" and of != "DATE" and not of.startswith("TIMESTAMP"):
        return _Column(name, "text" if of == "UUID" else "other", unique=of == "UUID")
    number, column = as_double(name, of) if of != "DATE" and not of.startswith("TIMESTAMP") else "NULL", quoted(name)
    moment = f"TRY_CAST({column} AS TIMESTAMP)" if not is_number_type(of) else "NULL"
    present, numbers, whole, moments, distinct = scan.database.rows(
        f"SELECT count({column}), count({number}), count(*) FILTER (WHERE {number} = floor({number})), "
        f"count({moment}), count(DISTINCT {column}) FROM {scan.sql}",
        scan.where,
    )[0]
    kind = "number" if present and numbers == present else "time" if present and moments == present else "text"
    texts = None
    if distinct <= _FEW:
        sql = f"SELECT DISTINCT CAST({column} AS VARCHAR) AS v FROM {scan.sql} WHERE v IS NOT NULL ORDER BY v"
        texts = tuple(str(row[0]) for row in scan.database.rows(sql, scan.where))
    return _Column(name, kind, kind == "number" and whole == present, distinct == present == rows > 0, texts)


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
            "no node table (with a column of unique values) or no edge table (with two columns of node ids) is "
            f"recognised in: {have}; write data.options yourself (docs/data.md)"
        )
    drafted = {
        "nodes": {types[table.file]: _node_table(table) for table in nodes},
        "edges": {_edge_name(table, ends[table.file], types): _edge_table(table, ends[table.file]) for table in edges},
    }
    # without reverse edges, a type without incoming edges would receive no messages
    return drafted | ({"undirected": True} if len(nodes) > 1 else {})


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


def _edge_name(table: _Found, ends: list[tuple[_Column, _Found]], types: Mapping[str, str]) -> str:
    (_, source), (_, target) = ends
    return f"{types[source.file]}__{table.type_name}__{types[target.file]}"


def _node_table(table: _Found) -> dict[str, Any]:
    assert table.id is not None
    drafted: dict[str, Any] = {"files": table.file, "id": table.id.name}
    rest = [column for column in table.columns if column is not table.id]
    label = next((one for one in rest if one.name.lower() in _LABELS), None)
    split = next((one for one in rest if one.texts and {text.lower() for text in one.texts} <= _SPLIT_WORDS), None)
    if label is None:
        classes = [one for one in rest if one is not split and _may_be_class(one)]
        label = classes[0] if len(classes) == 1 and split is not None else None
    for key, column in (("label", label), ("split", split)):
        if column is not None:
            drafted[key] = column.name
    return drafted | _others(table, [one for one in rest if one is not label and one is not split])


def _may_be_class(column: _Column) -> bool:
    few = column.texts is not None and 2 <= len(column.texts) <= _MOST_CLASSES
    return few and _may_be_id(column) and column.name.lower() not in _TIMES


def _edge_table(table: _Found, ends: list[tuple[_Column, _Found]]) -> dict[str, Any]:
    (source, _), (target, _) = ends
    drafted: dict[str, Any] = {"files": table.file, "source": source.name, "target": target.name}
    rest = [one for one in table.columns if one is not source and one is not target]
    weight = next((one for one in rest if one.name.lower() == "weight" and one.kind == "number"), None)
    if weight is not None:
        drafted["weight"] = weight.name
    return drafted | _others(table, [one for one in rest if one is not weight])


def _others(table: _Found, rest: list[_Column]) -> dict[str, Any]:
    drafted: dict[str, Any] = {}
    time = next((one for one in rest if one.kind == "time" or (one.whole and one.name.lower() in _TIMES)), None)
    if time is not None:
        drafted["time"] = time.name
    numbers = [one for one in rest if one.kind in ("number", "list") and one is not time and not _is_key(one)]
    if numbers:
        drafted["features"] = [one.name for one in numbers]
        if any(one.kind == "number" for one in numbers):
            drafted["standardize"] = True
    most = min(_MOST_ONE_HOT, max(2, table.rows // 2))
    few = [one for one in rest if one.kind == "text" and one.texts and len(one.texts) <= most]
    if few:
        drafted["one_hot"] = [one.name for one in few]
    return drafted


def _is_key(column: _Column) -> bool:
    return column.whole and column.name.lower().endswith("id")
