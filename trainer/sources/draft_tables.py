"""Guesses the options of dataset `tables` from the CSV and Parquet files of a folder (``partition tables``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from trainer.core.errors import DataError
from trainer.core.graph_attrs import attr_name
from trainer.data.raw_arrays import split_prefix
from trainer.sources.csv_files import guessed_encoding
from trainer.sources.table_columns import (
    as_double,
    as_text,
    is_number_type,
    list_type,
    moment_sql,
    split_sql,
    time_sql,
)
from trainer.sources.table_database import ROW_NUMBER, Database, Scan, quoted
from trainer.sources.table_files import is_parquet, table_files, tables_in
from trainer.sources.table_options import LARGEST, EdgeTable, Table

_LABELS = ("label", "labels", "y", "class", "target")

_TIMES = ("time", "timestamp", "date", "datetime", "at", "year")

#: names of columns that say in which split a row is
_SPLIT_NAMES = re.compile(
    r"(data|dataset)?_?(split|fold)s?(_?(id|index))?|k_?fold|(is_|in_)?(train|val|valid|validation|test)"
)

_SPLIT_WORDS = {"train", "val", "valid", "validation", "test", ""}

_FEW = 1000  #: most texts of a column that are looked at

_MOST_ONE_HOT = 64  #: most texts of a column that is drafted as 0/1 columns

_MOST_CATEGORIES = 10_000  #: most texts of a column of nodes that is drafted as categories

_BINARY = ({"0", "1", "0.0", "1.0", "false", "true"}, {"no", "yes"}, {"n", "y"}, {"f", "t"})  #: lower case

_FEW_LABELS = 5  #: rows of other labels than the most frequent one from which on leaks are looked for

_MOST_CLASSES = 50  #: most values of a column that is drafted as the label without being called so

_NEARLY_UNIQUE = 0.9  #: share of different values from which on a column is probably meant to be an id

_SAMPLE = 1000  #: ids of a column that are looked up in the node tables

_DENSE = 0.8  #: share of the integers between its least and its largest from which on a column's ids are numbered

_EPOCHS = (3e8, 4e9)  #: Unix seconds of dates that occur

_DATES = (-62_135_596_800, 253_402_300_799)  #: Unix seconds of the years 1 to 9999, which Python's dates have

_ID_NAME = re.compile(
    r"(^|[^a-z])(id|uid|key|code|sku|asin|isbn|source|target|src|dst|from|to|head|tail|user|item|customer|product)$"
    r"|[a-z](Id|ID)$|id$",
    re.ASCII,
)

#: numbers with commas, separators of thousands or a percent sign; dates
_OTHER_FORM = re.compile(r"[-+]?(\d{1,3}([.,' ]\d{3})+|\d+)([.,]\d+)?( ?%)?|\d\d?[./]\d\d?[./]\d{2,4}\b.*")

_INDEX = re.compile(r"column0|Unnamed: 0|index|__index_level_0__")  #: columns that pandas makes of a table's index

_NO_TYPE = re.compile(r"|s|t|u|v|source|target|src|dst|from|to|head|tail|column\d+")  #: columns that name no type

_RATINGS = ("rating", "ratings", "stars", "score")

_RELATIONS = ("relation", "rel", "predicate", "edge_type", "link_type")

#: names of columns that are predicted
_OUTCOMES = re.compile(
    r"(is_|has_|will_)?(label|labels|y|class|target|outcome|churn|churned|fraud|default|defaulted|convert|converted|"
    r"response|ltv|lifetime_value)|(label|target|y|will)_.*|.*_(label|target)"
)

_TASK_EDGES = "has"  #: relation of edges from an entity to its events, as of those to rows of a task

_NO_ID = (*_TIMES, *_LABELS, *_RATINGS, *_RELATIONS, "count", "weight", "value", "quantity", "price")

_SPLIT_FILE = re.compile(
    r"(.*?)(?:^|[_.\- ])(?:(train|training)|(val|valid|validation|dev)|(test|testing))(?=$|[_.\- ])(.*)", re.IGNORECASE
)


_Drafted: TypeAlias = tuple[dict[str, Any], list[str]]  #: options of a table, and comments on them


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
    low: float = 0.0  #: least number
    high: float = 0.0  #: largest number

    @property
    def is_split(self) -> bool:
        return bool(self.texts) and {text.lower() for text in self.texts or ()} <= _SPLIT_WORDS

    @property
    def looks_like_split(self) -> bool:
        """Whether it tells the rows of a split, but not as the reader takes them: masks, numbers, other words."""
        name = self.name.lower()
        masks = split_prefix(name) in ("train", "val", "valid", "validation", "test")
        few = self.kind in ("number", "text") and 2 <= self.distinct <= 20
        return few and not self.is_split and (masks or _SPLIT_NAMES.fullmatch(name) is not None)

    @property
    def is_numbered(self) -> bool:
        """Whether the values are nearly all integers between the least and the largest, as numbers of rows are."""
        return self.whole and self.distinct >= _DENSE * (self.high - self.low + 1)

    @property
    def is_time(self) -> bool:
        name = self.name.lower()
        likely = re.fullmatch(r"column\d+|.*(_at|_time|_date|_ts|timestamp)", name) is not None
        seconds = likely and _EPOCHS[0] <= self.low and self.high <= _EPOCHS[1]
        fits = self.whole and -(2.0**63) <= self.low and self.high < 2.0**63
        return self.kind == "time" or (fits and (name in _TIMES or seconds))

    @property
    def is_too_large(self) -> bool:
        return self.kind == "number" and not max(-self.low, self.high) <= LARGEST

    @property
    def missing(self) -> str:
        """Share of rows without a value, in words; '' if there are none."""
        share = 1 - self.present / max(self.rows, 1)
        return "" if self.present == self.rows else f"{share:.0%}" if share >= 0.01 else "less than 1%"

    @property
    def is_binary(self) -> bool:
        return self.distinct == 2 and any({text.lower() for text in self.texts or ("",)} <= words for words in _BINARY)

    @property
    def is_class(self) -> bool:
        """Whether its values can be classes: few texts, or few integers from 0."""
        few = self.texts is not None and 2 <= len(self.texts) <= _MOST_CLASSES
        return few and (self.kind == "text" or (self.whole and self.low >= 0 and self.high < _MOST_CLASSES))

    @property
    def is_written_otherwise(self) -> bool:
        """Whether all values are numbers or dates that are not read, such as ``1,5``, ``5 %`` and ``17.05.2024``."""
        return self.kind == "text" and bool(self.texts) and all(map(_OTHER_FORM.fullmatch, self.texts or ()))

    @property
    def mostly_numbers(self) -> bool:
        return self.kind == "text" and self.numbers > self.present / 2

    def why_unused(self, most_texts: int) -> str:
        """Return why the draft does not use the column, and what can be done."""
        if self.kind == "empty":
            return "it is empty"
        if self.looks_like_split:
            return "it looks like a split, which must be one column with the texts train, val and test"
        if self.kind == "twice":
            return "two columns have this name; rename one of them"
        if self.kind == "index":
            return "it numbers the rows, as the index that pandas writes"
        if self.kind == "uneven":
            return "its lists are not equally long, or some have missing values, NaN or infinity"
        if self.kind == "other":
            return f"values of type {self.type} are neither numbers, texts nor times"
        if self.kind == "time" and self.missing:
            return f"it is empty or infinite in {self.missing} of the rows, and a time must be in all"
        if self.kind == "time":
            return "another column is the time; attributes takes it as a further number if it is one"
        if self.is_too_large:
            return "it has infinite values, or larger ones than float32"
        if self.kind == "number":
            return "it looks like a key of another table; if it is a quantity, list it under features"
        if self.mostly_numbers:
            odd = [text for text in self.texts or () if not _is_number(text)]
            shown = f", such as {odd[0][:40]!r}" if odd else ""
            return (
                f"{self.present - self.numbers:,} of its {self.present:,} values are not numbers{shown}; if these mean "
                "missing values, list them under null_values, and the column under features, with fill"
            )
        if self.is_written_otherwise:
            return (
                f"its values, such as {(self.texts or ('',))[-1]!r}, are neither numbers as 1234.5 nor times as "
                "2024-05-17; write them so, or list it under one_hot or categories"
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
    return "_" not in text


@dataclass
class _Found:
    scan: Scan
    file: str  #: relative to the folder; of several, those for training
    rows: int
    columns: list[_Column] = field(default_factory=list)
    shares: dict[tuple[str, str, str], float] = field(default_factory=dict)  #: ``_contained`` computes them once
    number: int = 1  #: of the tables whose files give the same name of a type

    @property
    def keys(self) -> dict[str, Any]:
        """Keys of the drafted table that say what its files are."""
        options = self.scan.options
        more = {key: getattr(options, key, ()) for key in ("val_files", "test_files", "columns")}
        return (
            {"files": self.file}
            | {key: list(value) if key == "columns" else value[0] for key, value in more.items() if value}
            | ({"encoding": options.encoding} if options.encoding else {})
        )

    @property
    def type_name(self) -> str:
        """Name of a type, made from the file name without suffix: lower case, with letters, digits and ``_`` only."""
        stem = _stem(self.file)
        if len(self.keys.keys() - {"columns", "encoding"}) > 1 and (match := _SPLIT_FILE.fullmatch(stem)):
            stem = f"{match[1]} {match[5]}".strip() or "interacts"
        return self._numbered(re.sub(r"[^A-Za-z0-9]+", "_", stem).strip("_").lower() or "table")

    @property
    def node_type(self) -> str:
        word = replace(self, number=1).type_name
        singular = re.sub(r"(?<=ch|sh|ss)es$|(?<=x)es$|(?<!s)s$", "", word)  # branches, boxes, users
        return self._numbered(singular or word)

    def _numbered(self, word: str) -> str:
        return word if self.number == 1 else f"{word}_{self.number}"

    @property
    def id(self) -> _Column | None:
        return next((one for one in self.columns if one.unique and _may_be_id(one)), None)


def _stem(file: str) -> str:
    return re.sub(r"\.(csv|tsv|txt|parquet|pq)(\.\w+)?$", "", Path(file).name, flags=re.IGNORECASE)


def _may_be_id(column: _Column) -> bool:
    return column.kind == "text" or (column.kind == "number" and column.whole)


def draft_tables(folder: Path) -> dict[str, Any]:
    """Guess the options ``nodes`` and ``edges`` of dataset `tables` from the files in ``folder``.

    Every CSV or Parquet file and every folder of such files directly in ``folder`` is one table. A table with a column
    of unique values is a node table; a table with two columns of ids of node tables is an edge table. Tables whose
    names differ only in train, val and test, with equal columns, are one edge table with a split. If there is a task
    table, it is under ``tasks``, and tables of events are nodes; ``learn`` of ``comments`` has what learns the first
    task (task, metrics), and ``links`` an edge table for recommendations, if there can be one. If there are no edges
    between node tables, a table with two columns of repeated ids is an edge table, if need be between nodes without a
    table. With several node types, option ``undirected`` is set. ``comments`` of the result says what was guessed, and
    why columns are not used, by node and edge type; ``unused`` in it is about files, and ``rows`` has the number of
    rows of each, if they have labels that of the labelled ones.

    Raises ``DataError`` if no node or edge table is found, or if the folder of a table has files of both kinds.
    """
    with TemporaryDirectory(prefix="gnnfleet-tables-") as work:
        database = Database(Path(work), None)
        try:
            found = _found(database, folder)
            drafted = _draft(found)
            tables = (*drafted["nodes"].values(), *drafted.get("tasks", {}).values())
            labels = {table.get("files", table.get("table")): table["label"] for table in tables if "label" in table}
            drafted["comments"]["rows"] = {
                one.file: next((c.present for c in one.columns if c.name == labels.get(one.file)), 0) or one.rows
                for one in found
            }
            for of, table in drafted["nodes"].items():
                one = next((one for one in found if one.file == table.get("files")), None)
                label = next((c for c in one.columns if c.name == table.get("label")), None) if one else None
                if one is None or label is None or not label.whole or (label.low >= -1 and label.high < one.rows):
                    continue
                if len(labels) == 1:  # else the option would be that of another table, too
                    drafted["num_classes"] = 0
                    drafted["comments"]["nodes"].setdefault(of, []).append(
                        f"{label.name}: {label.low:,.0f} to {label.high:,.0f}: numbers, not classes (num_classes: 0)"
                    )
            return drafted
        finally:
            database.close()


def _found(database: Database, folder: Path) -> list[_Found]:
    """Look at all tables of a folder. Files of one table, for training, validation and test, are looked at together."""
    groups: dict[Any, dict[str, tuple[str, Scan]]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        own = [] if path.name[0] in "_." else tables_in(path)
        prose = path.name.upper().startswith(("README", "LICENSE"))
        if all(prose and file.suffix.lower() == ".txt" for file in own) or any(path.glob("*/launch.json")):
            continue  # no tables, or runs from here
        paths = table_files(Table((path.name,)), folder, path.name)
        found_in = {guessed_encoding(file) for file in paths if not is_parquet(file)} - {None}
        options = Table((path.name,), encoding=min(found_in, key=str) if found_in else None)
        scan = Scan(database, paths, path.name, options)
        if scan.without_header is not None:
            names = tuple(f"column{k + 1}" for k in range(len(scan.types)))
            scan = Scan(database, paths, path.name, replace(options, columns=names))
        match = _SPLIT_FILE.fullmatch(_stem(path.name))
        kind = next((k for k in ("files", "val_files", "test_files") if match and match[_KIND[k]]), "")
        key = (match[1], match[5], path.suffix, tuple(scan.types)) if match and kind else path.name
        if kind in groups.get(key, {}):  # train.csv and training.csv
            key, kind = path.name, ""
        groups.setdefault(key, {})[kind] = path.name, scan
    if not groups:
        raise DataError(f"{folder} has no CSV or Parquet files")
    found: list[_Found] = []
    for group in groups.values():
        if "files" in group and len(group) > 1:
            files = {kind: (group[kind][0],) for kind in ("files", "val_files", "test_files") if kind in group}
            first = group["files"][1].options
            table = EdgeTable(**files, columns=first.columns, encoding=first.encoding)  # type: ignore[arg-type]
            where = ", ".join(name for (name,) in files.values())
            whole = _look(Scan(database, table_files(table, folder, where), where, table), files["files"][0])
            if whole.id is None or len(_pair(whole, {})) == 2:
                found.append(whole)
                continue
        found += [_look(scan, file) for file, scan in group.values()]
    found.sort(key=lambda one: one.file)
    types: set[str] = set()
    for one in found:  # other types for users.csv and users.parquet, and for names without letters from a to z
        while not types.isdisjoint({one.type_name, one.node_type}):
            one.number += 1
        types |= {one.type_name, one.node_type}
    return found


_KIND = {"files": 2, "val_files": 3, "test_files": 4}  #: key of a table -> group of ``_SPLIT_FILE``


def _look(scan: Scan, file: str) -> _Found:
    (rows,) = scan.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)[0]
    twice = scan.repeated_columns
    columns = [
        _Column(name, "twice") if name in twice else _column(scan, name, of, rows) for name, of in scan.types.items()
    ]
    first, rest = columns[0], columns[1:]
    numbered = first.unique and first.whole and (first.low, first.high) == (0, rows - 1)
    named = sum(_ID_NAME.search(one.name) is not None for one in rest)
    if _INDEX.fullmatch(first.name) and numbered and (named > 1 or any(one.unique and _may_be_id(one) for one in rest)):
        columns[0] = _Column(first.name, "index")
    return _Found(scan, file, rows, columns)


def _column(scan: Scan, name: str, of: str, rows: int) -> _Column:
    if list_type(of) is not None:
        numbers, column = is_number_type(list_type(of) or ""), quoted(name)
        if numbers:
            finite = (
                f"bool_and(list_bool_and([coalesce(abs(v) <= {LARGEST}, false) FOR v IN CAST({column} AS DOUBLE[])]))"
            )
            (full,) = scan.database.rows(
                f"SELECT count({column}) = count(*) AND min(len({column})) = max(len({column})) AND {finite} "
                f"FROM {scan.sql}",
                scan.where,
            )[0]
        return _Column(name, "other" if not numbers else "list" if full else "uneven", of)
    if not is_number_type(of) and of != "VARCHAR" and of != "DATE" and not of.startswith("TIMESTAMP"):
        return _Column(name, "text" if of == "UUID" else "other", of, unique=of == "UUID")
    column = quoted(name)
    column = f"CASE WHEN NOT isnan({column}) THEN {column} END" if of in ("FLOAT", "DOUBLE") else column
    column = f"CASE WHEN lower(trim({column})) != 'nan' THEN {column} END" if of == "VARCHAR" else column
    number = as_double(name, of) if of != "DATE" and not of.startswith("TIMESTAMP") else "NULL"
    number = f"CASE WHEN NOT isnan({number}) THEN {number} END"
    moment = f"TRY_CAST({column} AS TIMESTAMP)" if not is_number_type(of) else "CAST(NULL AS TIMESTAMP)"
    moment = moment_sql(column) if of == "VARCHAR" else moment
    present, numbers, whole, moments, finite, distinct, low, high = scan.database.rows(
        f"SELECT count({column}), count({number}), count(*) FILTER (WHERE {number} = floor({number})), "
        f"count({moment}), count(CASE WHEN isfinite({moment}) THEN 1 END), count(DISTINCT {column}), "
        f"coalesce(min({number}), 0), coalesce(max({number}), 0) FROM {scan.sql}",
        scan.where,
    )[0]
    kind = "number" if numbers == present else "time" if moments == present else "text"
    present = finite if kind == "time" else present  # infinite ones are no times
    texts = None
    if distinct <= _FEW:
        sql = f"SELECT DISTINCT CAST({column} AS VARCHAR) AS gf_v FROM {scan.sql} WHERE gf_v IS NOT NULL ORDER BY gf_v"
        texts = tuple(str(row[0]) for row in scan.database.rows(sql, scan.where))
    return _Column(
        name, kind if present else "empty", of, kind == "number" and whole == present, distinct == present == rows > 0,
        texts, rows, present, distinct, numbers, float(low), float(high),
    )  # fmt: skip


def _draft(found: list[_Found]) -> dict[str, Any]:
    named = [table for table in found if table.id is not None]
    if drafted := _draft_of_tasks(found, named):
        return drafted
    ends = {}
    for table in found:
        best = sorted(_scored(table, [one for one in named if one is not table]), key=lambda one: one[:2])[:2]
        ends[table.file] = [(column, node) for _, _, column, node in sorted(best, key=lambda one: one[1])]
    referenced = {end.file for pair in ends.values() if len(pair) == 2 for _, end in pair}
    by_name = {
        node.file for table in found for unlike, _, _, node in _scored(table, named) if unlike and node is not table
    }
    edges = [table for table in found if len(ends[table.file]) == 2 and table.file not in referenced | by_name]
    nodes = [table for table in named if table not in edges]
    types = {table.file: table.node_type for table in nodes}
    edges = [table for table in edges if all(end.file in types for _, end in ends[table.file])]
    keys = {table.file: _keys(table, nodes) for table in nodes}
    if not edges and (drafted := _draft_of_pairs(found, ends, referenced)):
        return drafted
    if not edges and (not any(keys.values()) or any(map(_why_no_id, found))):
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
    node_tables = {types[table.file]: _node_table(table, _columns(keys[table.file])) for table in nodes}
    edge_tables = {}
    for table in edges:
        source, target = (types[end.file] for _, end in ends[table.file])
        columns = [column for column, _ in ends[table.file]]
        drafted, notes = _edge_table(table, columns)
        more, about = _dangling(table, ends[table.file])
        edge_tables[f"{source}__{table.type_name}__{target}"] = drafted | more, notes + about
    return _drafted(node_tables, edge_tables | _foreign_keys(nodes, keys, types, edge_tables), unused)


def _foreign_keys(
    nodes: list[_Found], keys: Mapping[str, _Keys], types: Mapping[str, str], others: Mapping[str, _Drafted]
) -> dict[str, _Drafted]:
    """Draft the edge tables from the rows of other tables, and of the same one, to the rows that name their ids."""
    edges: dict[str, _Drafted] = {}
    for table in nodes:
        own = _own_id(table, _columns(keys[table.file]))
        for column, node in keys[table.file]:
            ends = types[node.file], types[table.file]
            word = re.sub(r"[^a-z0-9]+", "_", column.name.lower()).strip("_") or "key"
            words = itertools.chain(
                [] if node is table else [_TASK_EDGES], [word], (f"{word}_{k}" for k in itertools.count(2))
            )
            names = (f"{ends[0]}__{each}__{ends[1]}" for each in words)
            name = next(each for each in names if each not in others and each not in edges)
            drafted = {**table.keys, "source": column.name, "target": own.name if own else ROW_NUMBER}
            more, notes = _dangling(table, [(column, node)])
            edges[name] = drafted | more, notes
    return edges


def _dangling(table: _Found, ends: _Keys, what: str = "edges") -> _Drafted:
    """Draft what becomes of the rows without an id, or with an id of no node: they are no ``what``."""
    notes = []
    for column, node in ends:
        assert node.id is not None
        own, ids = (_key(quoted(one.name)) for one in (column, node.id))
        (unknown,) = table.scan.database.rows(
            f"SELECT count(*) FROM {table.scan.sql} WHERE {own} NOT IN (SELECT {ids} FROM {node.scan.sql})",
            table.scan.where,
        )[0]
        missing = table.rows - column.present
        if missing or unknown:
            counted = [f"empty in {missing:,} rows"] * (missing > 0)
            counted += [f"no id of {node.file} in {unknown:,}{'' if missing else ' rows'}"] * (unknown > 0)
            notes.append(f"dangling: {column.name} is {' and '.join(counted)}: no {what}")
    return {"dangling": "drop"} if notes else {}, notes


def _drafted(nodes: dict[str, _Drafted], edges: dict[str, _Drafted], unused: dict[str, str]) -> dict[str, Any]:
    drafted = {
        "nodes": {of: table for of, (table, _) in nodes.items()},
        "edges": {of: table for of, (table, _) in edges.items()},
        "comments": {
            "nodes": {of: notes for of, (_, notes) in nodes.items() if notes},
            "edges": {of: notes for of, (_, notes) in edges.items() if notes},
            "unused": [f"{file} is not used: {why}" for file, why in unused.items()],
        },
    }
    # without reverse edges, a type without incoming edges would receive no messages
    return drafted | ({"undirected": True} if len(nodes) > 1 else {})


# --- task tables ----------------------------------------------------------------------------------------------


_Keys: TypeAlias = list[tuple[_Column, "_Found"]]  #: columns with ids of node tables


def _draft_of_tasks(found: list[_Found], named: list[_Found]) -> dict[str, Any]:
    """Draft a folder with task tables and what happened to their entities; {} if there are none.

    A task table has ids of one node table, each in several rows, a time, and a column that looks like an outcome. Other
    tables with ids of node tables become nodes, with an edge from each id, so that their time is one of nodes: rows
    without an id of their own, too, unless they have no time.
    """
    keys = {table.file: _keys(table, [one for one in named if one is not table]) for table in found}
    referenced = {node.file for some in keys.values() for _, node in some}
    targets: dict[str, _Found] = {}  # of task tables whose label is a list
    labels = {}
    for table in found:
        if table.file in referenced:
            continue
        events = [
            (node, time) for other in found for _, node in keys[other.file]
            if other is not table and (time := _time(other)) is not None
        ]  # fmt: skip
        if (listed := _listed(table, keys[table.file], named, events)) is not None:
            entity, labels[table.file], targets[table.file] = listed
            keys[table.file] = [entity]
        elif (label := _outcome(table, keys[table.file])) is not None:
            labels[table.file] = label
    rest = [table for table in found if table.file not in labels]
    edges = [
        table for table in rest
        if len(keys[table.file]) == 2 and not _own_id(table, _columns(keys[table.file])) and not _time(table)
    ]  # fmt: skip
    nodes = [
        table for table in rest
        if table not in edges and (
            _own_id(table, _columns(keys[table.file])) or (keys[table.file] and _time(table))
        )
    ]  # fmt: skip
    types = {table.file: table.node_type for table in nodes}
    keys = {file: [(column, node) for column, node in some if node.file in types] for file, some in keys.items()}
    labels = {
        file: label for file, label in labels.items()
        if keys[file] and (file not in targets or targets[file].file in types)
    }  # fmt: skip
    edges = [table for table in edges if len(keys[table.file]) == 2]
    linked = [table for table in nodes if keys[table.file]]
    if not labels or not (linked or edges):
        return {}
    first = next(table for table in found if table.file in labels)
    links = _links(linked, keys, keys[first.file][0][1], types)
    # the ends of links first, so that the tables that recommendations do without stand together
    nodes = sorted(nodes, key=lambda table: types[table.file] not in links.get("name", "").split("__"))
    edge_tables: dict[str, _Drafted] = {}
    for table in edges:
        (source, a), (target, b) = keys[table.file]
        drafted, notes = _edge_table(table, [source, target])
        more, about = _dangling(table, keys[table.file])
        edge_tables[f"{types[a.file]}__{table.type_name}__{types[b.file]}"] = drafted | more, notes + about
    edge_tables |= _foreign_keys(linked, keys, types, edge_tables)
    tasks = {
        table.type_name if table.type_name not in types.values() else f"{table.type_name}_task":
        _task_table(table, keys[table.file][0], labels[table.file], types, targets.get(table.file))
        for table in found if table.file in labels
    }  # fmt: skip
    used = {table.file for table in (*nodes, *edges)} | labels.keys()
    unused = {
        table.file: _why_no_id(table)
        or "it has neither a column with a different value in each row, nor ids of nodes and a time in each row"
        for table in found
        if table.file not in used
    }
    of_nodes = {types[one.file]: _node_table(one, _columns(keys[one.file])) for one in nodes}
    for table in found:
        if table.file in labels:
            _leave_out_late_time(table, keys[table.file][0], *of_nodes[types[keys[table.file][0][1].file]])
    drafted = _drafted(of_nodes, edge_tables, unused)
    for table in linked:
        if not _own_id(table, _columns(keys[table.file])):
            drafted["comments"]["nodes"].setdefault(types[table.file], []).append(
                "rowid: the rows have no id of their own and are numbered"
            )
    drafted["tasks"] = {name: options for name, (options, _) in tasks.items()}
    drafted["comments"]["tasks"] = {name: notes for name, (_, notes) in tasks.items()}
    label = labels[first.file]
    if first.file in targets:
        drafted["comments"]["learn"] = ["link", ["recall@10", "ndcg@10", "map@10"]]
        links = {}  # the task is a recommendation itself
    elif label.is_class:
        metrics = ["roc_auc", "accuracy"] if label.distinct == 2 else ["accuracy", "macro_f1"]
        drafted["comments"]["learn"] = ["classification", metrics]
    else:
        drafted |= {"num_classes": 0, "target": next(iter(tasks))}
        drafted["comments"]["learn"] = ["regression", ["mae", "rmse"]]
    if links and not any("label" in table for table in drafted["nodes"].values()):
        drafted["comments"]["links"] = links
    return drafted


def _columns(keys: _Keys) -> list[_Column]:
    return [column for column, _ in keys]


def _keys(table: _Found, nodes: list[_Found]) -> _Keys:
    """Return the columns with ids of node tables. Numbers, which are often equal by chance, need a name like it."""
    return [
        (column, node)
        for unlike, _, column, node in _scored(table, nodes)
        if column is not table.id and (unlike < 0 or (column.kind == "text" and node is not table))
    ]


def _own_id(table: _Found, keys: Sequence[_Column]) -> _Column | None:
    """Return the column with the table's own ids. With ids of others, another unique column may be a text or so."""
    if table.id is None or not keys or _ID_NAME.search(table.id.name):
        return table.id
    return table.id if table.columns.index(table.id) < min(map(table.columns.index, keys)) else None


def _time(table: _Found) -> _Column | None:
    return next((one for one in table.columns if one.is_time and one is not table.id), None)


def _outcome(table: _Found, keys: _Keys) -> _Column | None:
    """Return the column that a task table predicts, or None if it is no task table.

    The column is called as an outcome or as the file; or it is the only one beside entity and time, if few different
    times stand in many rows, as nothing that happens by itself does.
    """
    time = _time(table)
    if len(keys) != 1 or time is None or table.rows < 2 * keys[0][0].distinct or time.missing:
        return None
    rest = [
        one for one in table.columns
        if one not in (keys[0][0], time, table.id) and one.kind in ("number", "text") and one.distinct > 1
        and not one.is_split and (one.kind == "number" or one.is_class)
    ]  # fmt: skip
    stem = table.type_name
    for one in rest:
        name = one.name.lower()
        if _OUTCOMES.fullmatch(name) or (min(len(name), len(stem)) > 2 and (name in stem or stem in name)):
            return one
    return rest[0] if len(rest) == 1 and 20 * time.distinct <= table.rows else None


def _listed(
    table: _Found, keys: _Keys, nodes: Sequence[_Found], events: Sequence[tuple[_Found, _Column]]
) -> tuple[tuple[_Column, _Found], _Column, _Found] | None:  # fmt: skip
    """Return entity, label and targets of a task table whose rows list nodes, or None if it is no such table.

    The label is a column of lists of ids, or of one id in each of many rows of few times, if the entity is named by
    events of many more times. ``events``: the nodes that other tables name, and the times of these tables.
    """
    time, split = _time(table), next((one for one in table.columns if one.is_split), None)
    if time is None or time.missing or table.id is not None:
        return None
    rest = [one for one in table.columns if one not in (time, split)]
    if len(keys) == 1 and table.rows >= 2 * keys[0][0].distinct:
        for column in rest:
            element = list_type(column.type)
            plain = element is not None and list_type(element) is None and (element == "VARCHAR" or "INT" in element)
            fits = [node for node in nodes if plain and node.id and _contained(table, column, node, node.id)]
            if fits:
                return keys[0], column, max(fits, key=lambda node: _likeness(column, node))
    ordered = sorted(keys, key=lambda key: table.columns.index(key[0]))
    if len(ordered) == 2 and len(rest) == 2 and 20 * time.distinct <= table.rows:
        more = [of.distinct for node, of in events if node is ordered[0][1]]
        return (ordered[0], *ordered[1]) if max(more, default=0) >= 5 * time.distinct else None
    return None


def _task_table(
    table: _Found, key: tuple[_Column, _Found], label: _Column, types: Mapping[str, str], targets: _Found | None
) -> _Drafted:  # fmt: skip
    """``targets``: the table of the nodes that the label lists; None: it is no list."""
    (column, node), time = key, _time(table)
    assert time is not None
    entity = types[node.file]
    files = table.keys
    drafted: dict[str, Any] = {
        "table": files.pop("files"), **files, "entity": entity, "id": column.name, "time": time.name,
        "label": label.name,
    }  # fmt: skip
    what = f"{label.name} is predicted"
    if targets is not None:
        drafted["targets"] = types[targets.file]
        what = f"the {types[targets.file]} nodes in {label.name} are predicted"
    rest = [one for one in table.columns if one not in (column, time, label, table.id)]
    named, dropped = next((one for one in rest if one.is_split), None), list[str]()
    split = named if targets else _split_of_labelled(table, named, label, dropped)
    drafted["split"] = split.name if split else _split_at(table, time, label)
    more, notes = _others(table, [one for one in rest if one is not named], True, None if targets else label)
    about = f"{table.file}: rows about {entity} nodes at a time, {what}: a task table; remove it if not"
    if isinstance(drafted["split"], dict) and "val_time" in drafted["split"]:
        notes.append("split: val begins after 70% of the labelled rows, test after 85%")
    if any(key in more for key in ("features", "one_hot", "categories")):
        notes.append("columns that are known only after the row's time must not be features")
    dangling, unknown = _dangling(table, [key], "rows of the task")
    return drafted | more | dangling, [about, *_about_files(table), *notes, *dropped, *unknown]


def _leave_out_late_time(
    table: _Found, key: tuple[_Column, _Found], of_node: dict[str, Any], notes: list[str]
) -> None:  # fmt: skip
    """Remove a time of the entities that more than a tenth of the rows are earlier than: these would not see them.

    It is not when an entity is first known, but when it was last seen or changed.
    """
    column, node = key
    if (name := of_node.get("time")) is None:
        return
    time = _time(table)
    assert node.id is not None and time is not None
    rows = f"SELECT {_key(quoted(column.name))} AS id, {time_sql(table.scan, time.name)} AS t FROM {table.scan.sql}"
    nodes = f"SELECT {_key(quoted(node.id.name))} AS id, {time_sql(node.scan, name)} AS t FROM {node.scan.sql}"
    (early,) = table.scan.database.rows(
        f"SELECT count(*) FROM ({rows}) r JOIN ({nodes}) n ON r.id = n.id WHERE n.t > r.t", table.scan.where
    )[0]
    if 10 * early > table.rows:
        del of_node["time"]
        notes.append(
            f"{name} is not used: {early:,} of the {table.rows:,} rows of {table.file} are earlier, and would not see "
            "their node; as a time it must be when a node is first known"
        )


def _split_at(table: _Found, time: _Column, label: _Column) -> dict[str, Any]:
    """Return the times, if possible dates, at which val and test begin; shares of the rows if there are few times."""
    moment = time_sql(table.scan, time.name)
    low, by_rows, last = table.scan.database.rows(
        f"SELECT min(t), quantile_disc(t, [0.7, 0.85]), list_sort(list(DISTINCT t))[-2:] FROM "
        f"(SELECT {moment} AS t FROM {table.scan.sql} WHERE {quoted(label.name)} IS NOT NULL)",
        table.scan.where,
    )[0]
    for step in (86_400, 1) if time.kind == "time" else (1,):
        for found in (by_rows, last):
            val, test = (int(each) // step * step for each in (*found, *found)[:2])
            if low < val < test:
                shown: list[Any] = [val, test]
                if time.kind == "time" and _DATES[0] <= val and test <= _DATES[1]:
                    texts = [datetime.fromtimestamp(each, timezone.utc).replace(tzinfo=None) for each in shown]
                    shown = [str(each.date() if step > 1 else each) for each in texts]
                return dict(zip(("val_time", "test_time"), shown, strict=True))
    return {"train": 0.7, "val": 0.15, "test": 0.15}


def _links(
    linked: list[_Found], keys: Mapping[str, _Keys], entity: _Found, types: Mapping[str, str]
) -> dict[str, Any]:  # fmt: skip
    """Return the draft of an edge table for recommendations between the two node types that most rows name; or {}."""
    rows: dict[tuple[str, str], int] = {}
    of: dict[tuple[str, str], list[tuple[_Found, _Column, _Column]]] = {}
    for table in linked:
        by_node = {node.file: column for column, node in reversed(keys[table.file])}
        files = sorted(by_node, key=lambda file: (file != entity.file, table.columns.index(by_node[file])))
        if len(files) >= 2:
            pair = files[0], files[1]
            rows[pair] = rows.get(pair, 0) + table.rows
            of.setdefault(pair, []).append((table, by_node[pair[0]], by_node[pair[1]]))
    if not rows:
        return {}
    pair = max(rows, key=lambda each: rows[each])
    table, source, target = max(of[pair], key=lambda one: one[0].rows)
    options = {**table.keys, "source": source.name, "target": target.name}
    if (time := _time(table)) is not None:
        options["time"] = time.name
    return {"name": f"{types[pair[0]]}__{table.type_name}__{types[pair[1]]}", "table": options}


# --- edges between nodes without a table ----------------------------------------------------------------------


@dataclass
class _Type:
    """A node type: the ids of a node table, or those in a column of an edge table."""

    name: str
    table: _Found
    column: _Column
    has_table: bool


def _draft_of_pairs(
    found: list[_Found], ends: Mapping[str, list[tuple[_Column, _Found]]], referenced: set[str]
) -> dict[str, Any]:
    """Draft the tables with two columns of repeated ids as edges; {} if there are none.

    Columns of equal ids belong to one node type.
    """
    types: list[_Type] = []
    pairs: list[tuple[_Found, list[tuple[_Column, _Type]]]] = []  # tables of edges, with their source and target
    for table in sorted(found, key=lambda one: (len(one.keys) == 1, -one.rows)):
        known = {column.name: node for column, node in ends[table.file]}
        own: list[tuple[_Column, _Type]] = []
        for column in [] if table.file in referenced else _pair(table, known):
            node = known.get(column.name)
            if node is not None and node.id is not None:
                wanted = _Type(node.node_type, node, node.id, True)
            else:
                word = re.sub(r"[^A-Za-z0-9]*(id|ID|Id|key|code)$", "", column.name).lower()
                word = re.sub(r"[^a-z0-9]+", "_", word).strip("_")
                wanted = _Type("" if _NO_TYPE.fullmatch(word) else word, table, column, False)
            same = next((one for one in [*types, *(one for _, one in own)] if _is_same(one, wanted)), None)
            own.append((column, same or wanted))
        for (_, of), name in zip(own, ("user" if own and own[0][1] is not own[1][1] else "node", "item"), strict=False):
            of.name = of.name or name
            while any(one.name == of.name and one is not of for one in types):
                of.name += "2"
            types += [] if of in types else [of]
        if own:
            pairs.append((table, own))
    if not pairs:
        return {}

    nodes: dict[str, _Drafted] = {}
    edges: dict[str, _Drafted] = {}
    for table, own in pairs:
        (source, of_source), (target, of_target) = own
        for column, of in own:
            if of.has_table:
                nodes.setdefault(of.name, _node_table(of.table))
            else:
                nodes.setdefault(of.name, ({}, []))[1].append(f"{column.name} of {table.file}")
        edges[f"{of_source.name}__{table.type_name}__{of_target.name}"] = _edge_table(table, [source, target])
    for drafted, notes in nodes.values():
        if not drafted:
            notes[:] = ["no table: its nodes are the different values of " + ", ".join(notes) + "; a guess"]
    used = {table.file for table, _ in pairs} | {of.table.file for _, own in pairs for _, of in own}
    unused = {one.file: _why_no_id(one) or "it has no two columns of ids" for one in found if one.file not in used}
    return _drafted(nodes, edges, unused)


def _pair(table: _Found, known: Mapping[str, _Found]) -> list[_Column]:
    """Return the columns of sources and targets, or []. ``known``: columns with ids of node tables."""
    if triple := _triple(table):
        return [triple[0], triple[2]]
    scored, names = [], {column.name.lower() for column in table.columns}
    for position, column in enumerate(table.columns):
        name = column.name.lower()
        if column.distinct >= _NEARLY_UNIQUE * table.rows and not column.unique and position == 0:
            return []  # meant to be the id of a node table
        if (
            column.distinct >= _NEARLY_UNIQUE * table.rows
            or not _may_be_id(column)
            or column.present < column.rows
            or column.distinct < 2
        ):
            continue
        if column.is_binary or column.is_split or column.is_time:
            continue
        if name in _NO_ID and not (name == "target" and "source" in names):
            continue
        if column.name in known or _ID_NAME.search(column.name) or (table.id is None and position < 2):
            named = 0 if column.name in known else 1 if _ID_NAME.search(column.name) else 2
            scored.append((named, position, column))
    best = sorted(sorted(scored, key=lambda one: one[:2])[:2], key=lambda one: one[1])
    repeated = any(table.rows >= 2 * column.distinct for *_, column in best)
    return [column for *_, column in best] if len(best) == 2 and repeated else []


def _triple(table: _Found) -> list[_Column]:
    """Return head, relation and tail if a table has no other columns but these; else []."""
    if len(table.columns) != 3 or not all(one.kind == "text" and one.present == table.rows for one in table.columns):
        return []
    head, relation, tail = table.columns
    few = relation.texts is not None and 4 * relation.distinct <= min(head.distinct, tail.distinct)
    same = _contained(table, head, table, tail, 0.5) or _contained(table, tail, table, head, 0.5)
    return table.columns if few and same else []


def _is_same(one: _Type, other: _Type) -> bool:
    """Return whether two columns seem to have ids of the same nodes."""
    a, b = one.column, other.column
    if one.has_table or other.has_table:
        return one.table is other.table and one.has_table == other.has_table
    if (one.name and one.name == other.name) or a.kind != b.kind:
        return a.kind == b.kind
    if a.is_numbered or b.is_numbered:  # then the same numbers say nothing
        near = 1 + 0.02 * max(a.high, b.high)
        return abs(a.low - b.low) <= near and abs(a.high - b.high) <= near
    return _contained(one.table, a, other.table, b, 0.5) or _contained(other.table, b, one.table, a, 0.5)


def _why_no_id(table: _Found) -> str:
    """If a column before the table's id is nearly one, return why it is none; else ''."""
    named = next((one.name for one in table.columns if one.kind == "twice"), None)
    if named and table.id is None:
        return f"two columns are called {named!r}; rename one of them"
    before = table.columns[: table.columns.index(table.id)] if table.id else table.columns
    column = next((one for one in before if _may_be_id(one) and one.distinct >= _NEARLY_UNIQUE * one.rows), None)
    if column is None:
        return ""
    name = quoted(column.name)
    if column.present < column.rows:
        place = table.scan.first(column.name, f"{as_text(column.name, column.type)} IS NULL")
        return f"{place}; an id must be in every row: fill it in, or remove the row"
    inner = f"SELECT row_number() OVER () - 1 AS gf_row, {name} AS v FROM {table.scan.sql}"
    rows = f"SELECT CAST(v AS VARCHAR), list(gf_row ORDER BY gf_row) FROM ({inner}) GROUP BY v"
    twice = table.scan.database.rows(f"{rows} HAVING count(*) > 1 ORDER BY 2", table.scan.where)
    value, places = str(twice[0][0]), [table.scan.place(int(row)).rpartition(", ")[2] for row in twice[0][1][:4]]
    more = f" ({len(twice):,} such values)" if len(twice) > 1 else ""
    return (
        f"{column.name} {value[:80]!r} is in {' and '.join(places)}{more}; an id must be in one row: remove the others"
    )


def _scored(table: _Found, nodes: list[_Found]) -> list[tuple[int, int, _Column, _Found]]:
    """Return the columns with ids of node tables: how unlikely it is by its name, its position, and the node table."""
    scored = []
    for position, column in enumerate(table.columns):
        if not _may_be_id(column) or column.is_binary:
            continue
        fits = [
            (_likeness(column, node), node) for node in nodes if node.id and _contained(table, column, node, node.id)
        ]
        if fits:
            likeness, node = max(fits, key=lambda fit: fit[0])
            scored.append((-likeness, position, column, node))
    return scored


def _likeness(column: _Column, node: _Found) -> int:
    name, key = column.name.lower(), node.id.name.lower() if node.id else ""
    ends = re.search(rf"(^|[^a-z]){re.escape(key)}$", name) or column.name.endswith(key.capitalize())  # not `width`
    return 2 * (name == key) + (node.node_type in name) + bool(ends)


def _key(value: str) -> str:
    """Return the SQL expression of an id as VARCHAR: ``12`` for 12.0, as pandas writes keys of which some are empty.

    NULL for NaN.
    """
    return f"regexp_replace(nullif(CAST({value} AS VARCHAR), 'nan'), '^(-?[0-9]+)\\.0+$', '\\1')"


def _contained(table: _Found, column: _Column, other: _Found, ids: _Column, share: float = 0.9) -> bool:
    """Return whether at least a share of a sample of a column's values are in a column of another table."""
    pair = (column.name, other.file, ids.name)
    if pair not in table.shares:
        values = (f"unnest({quoted(one.name)})" if list_type(one.type) else quoted(one.name) for one in (column, ids))
        own, others = map(_key, values)
        some = f"SELECT DISTINCT v FROM (SELECT {own} AS v FROM {table.scan.sql} LIMIT {_SAMPLE}) WHERE v IS NOT NULL"
        count, inside = table.scan.database.rows(
            f"SELECT count(*), count(*) FILTER (WHERE v IN (SELECT {others} FROM {other.scan.sql})) FROM ({some})",
            table.scan.where,
        )[0]
        table.shares[pair] = inside / count if count else 0.0
    return table.shares[pair] >= share


def _node_table(table: _Found, keys: Sequence[_Column] = ()) -> _Drafted:
    """Draft a table of nodes. ``keys``: its columns with ids of other nodes."""
    own = _own_id(table, keys)
    drafted: dict[str, Any] = {**table.keys, "id": own.name if own else ROW_NUMBER}
    rest, notes = [one for one in table.columns if one is not own and one not in keys], _about_files(table)
    named = (one for one in rest if one.name.lower() in _LABELS)
    label = next((one for one in named if one.kind != "empty" and not one.is_too_large), None)
    split = next((one for one in rest if one.is_split), None)
    if label is None:
        few = (one for one in rest if one is not split and 2 <= len(one.texts or ()) <= _MOST_CLASSES)
        classes = [one for one in few if _may_be_id(one) and one.name.lower() not in _TIMES]
        label = classes[0] if len(classes) == 1 and split is not None else None
    if label is None:
        known = [one for one in rest if one.is_binary and one.missing]
        label = known[0] if len(known) == 1 else None
        if label is not None:
            values = " or ".join((label.texts or ())[:2]) if label.kind == "text" else "0 or 1"
            notes.append(f"{label.name} is {values}, and empty in {label.missing} of the rows: taken as the label")
        elif known:
            names = " and ".join(one.name for one in known)
            notes.append(
                f"{names} have two values, and are empty in some rows: one may be the label; take it out below"
            )
    if label is None:
        label = next((one for one in rest if _OUTCOMES.fullmatch(one.name.lower()) and one.is_class), None)
        if label is not None:
            notes.append(f"{label.name} is taken as the label, for its name")
    if label is not None and label.mostly_numbers:
        odd = next((text for text in label.texts or () if not _is_number(text)), "")
        notes.append(
            f"{label.name}: {label.present - label.numbers:,} of its {label.present:,} values are not numbers, such as "
            f"{odd[:40]!r}, so each text is a class; if these mean no label, list them under null_values"
        )
    if label is not None and label.whole and (label.low, label.distinct) == (-1, 2):
        notes.append(f"{label.name}: -1 means no label, and all others are one class; if it is a class, write 0 for it")
    rest = [one for one in rest if one is not label and one is not split]
    split = _split_of_labelled(table, split, label, notes)
    for key, column in (("label", label), ("split", split)):
        if column is not None:
            drafted[key] = column.name
    if label is not None and split is None:
        drafted["split"] = {"train": 0.8, "val": 0.1, "test": 0.1}
    more, of_others = _others(table, rest, True, label)
    return drafted | more, notes + of_others


def _split_of_labelled(
    table: _Found, split: _Column | None, label: _Column | None, notes: list[str]
) -> _Column | None:  # fmt: skip
    """Return the column ``split``, or None, with a note, if it has a value in rows without a label."""
    if split is None or label is None:
        return split
    none = f"{as_text(label.name, label.type)} IS NULL"
    if label.is_class and label.low == -1:
        none += f" OR TRY_CAST({quoted(label.name)} AS DOUBLE) = -1"
    ((count,),) = table.scan.database.rows(
        f"SELECT count(*) FROM {table.scan.sql} WHERE {split_sql(table.scan, split.name)} IS NOT NULL AND ({none})",
        table.scan.where,
    )
    if not count:
        return split
    notes.append(f"{split.name} is not used as the split: {count:,} rows that it names have no {label.name}")
    return None


def _edge_table(table: _Found, ends: Sequence[_Column]) -> _Drafted:
    source, target = ends
    drafted: dict[str, Any] = {**table.keys, "source": source.name, "target": target.name}
    rest = [one for one in table.columns if one is not source and one is not target]
    relation = next(iter(_triple(table)[1:2]), None)
    weight = next((one for one in rest if one.name.lower() == "weight" and one.kind == "number"), None)
    weight = weight if weight is not None and weight.low >= 0 and not (weight.missing or weight.is_too_large) else None
    split = next((one for one in rest if one.is_split and len(one.texts or ()) > 1), None)
    if len(table.keys.keys() - {"columns", "encoding"}) > 1:
        split = None
    for key, column in (("weight", weight), ("split", split)):
        if column is not None:
            drafted[key] = column.name
    notes = []
    if relation is not None and (split or len(table.keys.keys() - {"columns", "encoding"}) > 1):
        drafted["relation"] = relation.name
        rest.remove(relation)
        notes.append(f"{relation.name}: its {relation.distinct} texts are taken as relations, each an edge type")
    more, of_others = _others(table, [one for one in rest if one is not weight and one is not split], False)
    notes += of_others
    for column in rest:
        if (column is relation or column.name.lower() in _RELATIONS) and column.kind == "text" and column.texts:
            notes.append(
                f"with `relation: {column.name}`, not under one_hot, its {len(column.texts)} texts are edge types"
            )
        if (column.name.lower() in _RATINGS and column.kind == "number") or (
            column.name.lower() in _LABELS and column.kind in ("number", "text")
        ):
            key = "features" if column.kind == "number" else "one_hot"
            notes.append(f"with `label: {column.name}` and a split, not under {key}, it is learned (docs/data.md)")
    return drafted | more, _about_files(table) + notes


def _about_files(table: _Found) -> list[str]:
    """Return comments on what was guessed from the names and the first lines of a table's files."""
    files = [str(table.keys[key]) for key in ("files", "val_files", "test_files") if key in table.keys]
    found = [f"{', '.join(files)} have equal columns: taken as one table with a split"] if len(files) > 1 else []
    if table.scan.options.encoding:
        found.append(f"encoding: the file is not in UTF-8; {table.scan.options.encoding} is a guess")
    if table.scan.options.columns:
        found.append("the first line seems to be a row of data: if it has names, remove `columns` and use these")
    return found


def _others(table: _Found, rest: list[_Column], of_nodes: bool, label: _Column | None = None) -> _Drafted:
    """Draft the use of all columns but id, label, split, ends and weight. Each is used, or named in the comments.

    Texts become 0/1 columns if there are few. If there are more, they become categories ``of_nodes``, whose embeddings
    the trainer learns, unless most of them occur only once. Columns that tell the ``label`` are left out.
    """
    drafted: dict[str, Any] = {}
    time = next((one for one in rest if one.is_time and not one.missing), None)
    if time is not None:
        drafted["time"] = time.name
    keys = [one for one in rest if one.whole and one.name.lower().endswith("id")]
    told = {one.name: why for one in rest if label is not None and (why := _tells(table, one, label))}
    numbers = [
        one for one in rest
        if one.kind in ("number", "list") and one is not time and one not in keys and one.name not in told
        and not one.is_too_large and not one.looks_like_split
    ]  # fmt: skip
    notes = []
    if numbers:
        drafted["features"] = [one.name for one in numbers]
        if any(one.kind == "number" for one in numbers):
            drafted["standardize"] = True
        if gaps := [one for one in numbers if one.kind == "number" and one.missing]:
            drafted["fill"] = 0
            notes.append("fill: empty cells become 0: " + ", ".join(f"{one.name} ({one.missing})" for one in gaps))
    most = min(_MOST_ONE_HOT, max(2, table.rows // 2))
    texts = [
        one
        for one in rest
        if one.kind == "text"
        and not (one.mostly_numbers or one.is_written_otherwise or one.looks_like_split or one.name in told)
    ]
    few = [one for one in texts if one.texts and len(one.texts) <= most]
    if few:
        drafted["one_hot"] = [one.name for one in few]
    limit = min(_MOST_CATEGORIES, table.rows // 2) if of_nodes else 0
    many = [one for one in texts if one not in few and one.distinct <= limit]
    for one in many:
        if split_prefix(attr_name(one.name)) is not None:
            told[one.name] = "categories of nodes cannot have the name of a split; rename the column"
    many = [one for one in many if one.name not in told]
    if many:
        drafted["categories"] = [one.name for one in many]
    unused = [one for one in rest if one is not time and one not in (*numbers, *few, *many)]
    return drafted, notes + [f"{one.name} is not used: {told.get(one.name) or one.why_unused(most)}" for one in unused]


def _tells(table: _Found, column: _Column, label: _Column) -> str:
    """Return why a column may not be a feature because it tells the label, as what is known only afterwards does; ''.

    It does if nearly all rows with an equal value have the same label, or, of numbers, all rows beside each other, or
    if the rows in which it is not empty do.
    """
    if column.kind == label.kind == "number" and label.distinct > _MOST_CLASSES:
        pair = (as_double(one.name, one.type) for one in (column, label))
        (same,) = table.scan.database.rows(
            f"SELECT abs(corr({', '.join(pair)})) > 0.999 FROM {table.scan.sql}", table.scan.where
        )[0]
        return f"a leak? it is proportional to {label.name}; if it is known beforehand, list it under features" * bool(
            same
        )
    if column.kind not in ("number", "text", "time") or not 2 <= label.distinct <= _MOST_CLASSES:
        return ""
    value, known = (
        f"CAST({quoted(one.name)} AS VARCHAR)" if one.kind != "number" else as_double(one.name, one.type)
        for one in (column, label)
    )
    rows = f"SELECT v, y FROM (SELECT {value} AS v, {known} AS y FROM {table.scan.sql}) WHERE y IS NOT NULL"
    counts = f"SELECT v, y, count(*) AS n FROM ({rows}) GROUP BY v, y"
    (labelled, most, right, few, filled, same, usual) = table.scan.database.rows(
        f"WITH rows AS ({rows}), counts AS ({counts}) SELECT (SELECT count(*) FROM rows), "
        "(SELECT max(n) FROM (SELECT count(*) AS n FROM rows GROUP BY y)), "
        "(SELECT sum(n) FROM (SELECT max(n) AS n FROM counts GROUP BY v)), "
        "(SELECT count(DISTINCT v) FROM rows), (SELECT count(v) FROM rows), "
        "(SELECT count(DISTINCT y) = 1 FROM rows WHERE v IS NOT NULL), "
        "(SELECT count(*) FROM rows WHERE y = (SELECT min(y) FROM rows WHERE v IS NOT NULL))",
        table.scan.where,
    )[0]
    (turns,) = table.scan.database.rows(
        f"SELECT count(*) FILTER (WHERE y != last) FROM (SELECT y, lag(y) OVER (ORDER BY v, y) AS last FROM ({rows}) "
        "WHERE v IS NOT NULL)",
        table.scan.where,
    )[0]
    others = labelled - most  # rows of other labels than the most frequent one
    if others < _FEW_LABELS:
        return ""
    leak = f"a leak? it tells {label.name}"
    if 5 * few <= labelled and labelled - right <= others / 50:
        return f"{leak} in {right:,} of {labelled:,} rows; if it is known beforehand, list it under features or one_hot"
    if column.kind == "number" and filled > labelled / 2 and turns <= max(label.distinct - 1, others / 20):
        return f"{leak}: sorted by it, the labels are, too; if it is known beforehand, list it under features"
    if same and filled < labelled and (usual / labelled) ** filled < 1e-6:
        return f"{leak}: where it is not empty, {label.name} is the same; if it is known beforehand, list it"
    return ""
