"""What is known of the tables of a folder before a draft: their columns, and the nodes that columns have ids of.

``look_at`` reads a table once. What depends on two tables (whether values are ids of the other) is asked later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from trainer.data.raw_arrays import split_prefix
from trainer.sources.table_columns import as_double, as_text, is_number_type, list_type, moment_sql
from trainer.sources.table_database import Scan, quoted
from trainer.sources.table_options import LARGEST

TIMES = ("time", "timestamp", "date", "datetime", "at", "year")

MOST_CLASSES = 50  #: most values of a column that is drafted as the label without being called so

NEARLY_UNIQUE = 0.9  #: share of different values from which on a column is probably meant to be an id

_ID_NAME = re.compile(
    r"(^|[^a-z])(id|uid|key|code|sku|asin|isbn|source|target|src|dst|from|to|head|tail|user|item|customer|product)$"
    r"|[a-z](Id|ID)$|id$",
    re.ASCII,
)

#: names of columns that say in which split a row is
_SPLIT_NAMES = re.compile(
    r"(data|dataset)?_?(split|fold)s?(_?(id|index))?|k_?fold|(is_|in_)?(train|val|valid|validation|test)"
)

#: numbers with commas, separators of thousands or a percent sign; dates
_OTHER_FORM = re.compile(r"[-+]?(\d{1,3}([.,' ]\d{3})+|\d+)([.,]\d+)?( ?%)?|\d\d?[./]\d\d?[./]\d{2,4}\b.*")


@dataclass(eq=False)
class Column:
    name: str
    kind: str  #: number, list, time, text; or why it has no use: empty, twice, index, uneven, other
    type: str = ""  #: DuckDB's
    whole: bool = False  #: integers only
    unique: bool = False  #: no value occurs twice, and none is missing
    texts: tuple[str, ...] | None = None  #: the distinct values, if there are at most 1,000
    rows: int = 0
    present: int = 0  #: rows with a value
    distinct: int = 0  #: different values
    numbers: int = 0  #: rows with a number
    low: float = 0.0  #: least number
    high: float = 0.0  #: largest number

    @property
    def has_id_name(self) -> bool:
        return _ID_NAME.search(self.name) is not None

    @property
    def may_be_id(self) -> bool:
        return self.kind == "text" or (self.kind == "number" and self.whole)

    @property
    def is_split(self) -> bool:
        words = {"train", "val", "valid", "validation", "test", ""}
        return bool(self.texts) and {text.lower() for text in self.texts or ()} <= words

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
        return self.whole and self.distinct >= 0.8 * (self.high - self.low + 1)

    @property
    def is_time(self) -> bool:
        name = self.name.lower()
        likely = re.fullmatch(r"column\d+|.*(_at|_time|_date|_ts|timestamp)", name) is not None
        seconds = likely and 3e8 <= self.low and self.high <= 4e9  # Unix seconds of dates that occur
        fits = self.whole and -(2.0**63) <= self.low and self.high < 2.0**63
        return self.kind == "time" or (fits and (name in TIMES or seconds))

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
        found = {text.lower() for text in self.texts or ("",)}
        words: tuple[set[str], ...] = ({"0", "1", "0.0", "1.0", "false", "true"}, {"no", "yes"}, {"n", "y"}, {"f", "t"})
        return self.distinct == 2 and any(found <= each for each in words)

    @property
    def is_class(self) -> bool:
        """Whether its values can be classes: few texts, or few integers from 0."""
        few = self.texts is not None and 2 <= len(self.texts) <= MOST_CLASSES
        return few and (self.kind == "text" or (self.whole and self.low >= 0 and self.high < MOST_CLASSES))

    @property
    def is_written_otherwise(self) -> bool:
        """Whether all values are numbers or dates that are not read, such as ``1,5``, ``5 %`` and ``17.05.2024``."""
        return self.kind == "text" and bool(self.texts) and all(map(_OTHER_FORM.fullmatch, self.texts or ()))

    @property
    def mostly_numbers(self) -> bool:
        return self.kind == "text" and self.numbers > self.present / 2

    @property
    def not_a_number(self) -> str | None:
        """The first text that is no number, if there is one among ``texts``."""
        for text in self.texts or ():
            try:
                float(text)
            except ValueError:
                return text
            if "_" in text:
                return text
        return None


@dataclass(eq=False)
class FoundTable:
    scan: Scan
    file: str  #: relative to the folder; of several, those for training
    stem: str  #: file name without suffix, and without the word for a split
    rows: int
    columns: list[Column]
    type_name: str = ""  #: of ``stem``: lower case, with letters, digits and ``_`` only; differs between tables
    node_type: str = ""  #: its singular
    shares: dict[tuple[str, str, str], float] = field(default_factory=dict)  #: ``is_within`` computes them once

    @cached_property
    def file_keys(self) -> dict[str, Any]:
        """Keys of the drafted table that say what its files are."""
        options = self.scan.options
        more = {key: getattr(options, key, ()) for key in ("val_files", "test_files", "columns")}
        return (
            {"files": self.file}
            | {key: list(value) if key == "columns" else value[0] for key, value in more.items() if value}
            | ({"encoding": options.encoding} if options.encoding else {})
        )

    @property
    def is_split_by_file(self) -> bool:
        return not self.file_keys.keys() <= {"files", "columns", "encoding"}

    @cached_property
    def id(self) -> Column | None:
        return next((one for one in self.columns if one.unique and one.may_be_id), None)

    @cached_property
    def time(self) -> Column | None:
        return next((one for one in self.columns if one.is_time and one is not self.id), None)

    def own_id(self, keys: Keys) -> Column | None:
        """Return the column with the table's own ids. With ids of others, another unique column may be a text or so."""
        if self.id is None or not keys or self.id.has_id_name:
            return self.id
        return self.id if self.columns.index(self.id) < min(self.columns.index(one) for one, _ in keys) else None


Keys: TypeAlias = list[tuple[Column, FoundTable]]  #: columns with ids of nodes, and the tables of these


def look_at(scan: Scan, file: str, stem: str) -> FoundTable:
    (rows,) = scan.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)[0]
    twice = scan.repeated_columns
    columns = [
        Column(name, "twice") if name in twice else _column(scan, name, of, rows) for name, of in scan.types.items()
    ]
    first, rest = columns[0], columns[1:]
    numbered = first.unique and first.whole and (first.low, first.high) == (0, rows - 1)
    pandas = first.name in ("column0", "Unnamed: 0", "index", "__index_level_0__")  # names for a table's index
    is_other_id = any(one.unique and one.may_be_id for one in rest) or sum(one.has_id_name for one in rest) > 1
    if pandas and numbered and is_other_id:
        columns[0] = Column(first.name, "index")
    return FoundTable(scan, file, stem, rows, columns)


def _column(scan: Scan, name: str, of: str, rows: int) -> Column:
    column, is_moment = quoted(name), of == "DATE" or of.startswith("TIMESTAMP")
    if (element := list_type(of)) is not None:
        if not is_number_type(element):
            return Column(name, "other", of)
        finite = f"list_bool_and([coalesce(abs(v) <= {LARGEST}, false) FOR v IN CAST({column} AS DOUBLE[])])"
        (full,) = scan.database.rows(
            f"SELECT count({column}) = count(*) AND min(len({column})) = max(len({column})) AND bool_and({finite}) "
            f"FROM {scan.sql}",
            scan.where,
        )[0]
        return Column(name, "list" if full else "uneven", of)
    if not is_number_type(of) and of != "VARCHAR" and not is_moment:
        return Column(name, "text" if of == "UUID" else "other", of, unique=of == "UUID")
    if of in ("FLOAT", "DOUBLE"):
        column = f"CASE WHEN NOT isnan({column}) THEN {column} END"
    elif of == "VARCHAR":
        column = f"CASE WHEN lower(trim({column})) != 'nan' THEN {column} END"
    number = "NULL" if is_moment else as_double(name, of)
    number = f"CASE WHEN NOT isnan({number}) THEN {number} END"
    moment = f"TRY_CAST({column} AS TIMESTAMP)" if is_moment else "CAST(NULL AS TIMESTAMP)"
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
    if distinct <= 1000:
        sql = f"SELECT DISTINCT CAST({column} AS VARCHAR) AS gf_v FROM {scan.sql} WHERE gf_v IS NOT NULL ORDER BY gf_v"
        texts = tuple(str(row[0]) for row in scan.database.rows(sql, scan.where))
    return Column(
        name, kind if present else "empty", of, kind == "number" and whole == present, distinct == present == rows > 0,
        texts, rows, present, distinct, numbers, float(low), float(high),
    )  # fmt: skip


def triple(table: FoundTable) -> list[Column]:
    """Return head, relation and tail if a table has no other columns but these; else []."""
    if len(table.columns) != 3 or not all(one.kind == "text" and one.present == table.rows for one in table.columns):
        return []
    head, relation, tail = table.columns
    few = relation.texts is not None and 4 * relation.distinct <= min(head.distinct, tail.distinct)
    same = is_within(table, head, table, tail, 0.5) or is_within(table, tail, table, head, 0.5)
    return table.columns if few and same else []


def why_no_id(table: FoundTable) -> str:
    """If a column before the table's id is nearly one, return why it is none; else ''."""
    named = next((one.name for one in table.columns if one.kind == "twice"), None)
    if named and table.id is None:
        return f"two columns are called {named!r}; rename one of them"
    before = table.columns[: table.columns.index(table.id)] if table.id else table.columns
    column = next((one for one in before if one.may_be_id and one.distinct >= NEARLY_UNIQUE * one.rows), None)
    if column is None:
        return ""
    if column.present < column.rows:
        place = table.scan.first(column.name, f"{as_text(column.name, column.type)} IS NULL")
        return f"{place}; an id must be in every row: fill it in, or remove the row"
    inner = f"SELECT row_number() OVER () - 1 AS gf_row, {quoted(column.name)} AS v FROM {table.scan.sql}"
    rows = f"SELECT CAST(v AS VARCHAR), list(gf_row ORDER BY gf_row) FROM ({inner}) GROUP BY v"
    twice = table.scan.database.rows(f"{rows} HAVING count(*) > 1 ORDER BY 2", table.scan.where)
    value, places = str(twice[0][0]), [table.scan.place(int(row)).rpartition(", ")[2] for row in twice[0][1][:4]]
    more = f" ({len(twice):,} such values)" if len(twice) > 1 else ""
    return (
        f"{column.name} {value[:80]!r} is in {' and '.join(places)}{more}; an id must be in one row: remove the others"
    )


def found_keys(table: FoundTable, nodes: Iterable[FoundTable]) -> list[tuple[int, Column, FoundTable]]:
    """Return the columns with ids of ``nodes``: how likely it is by the column's name, the column, and its nodes."""
    found = []
    for column in table.columns:
        if not column.may_be_id or column.is_binary:
            continue
        fits = [node for node in nodes if node.id and is_within(table, column, node, node.id)]
        if fits:
            node = max(fits, key=lambda node: likeness(column, node))
            found.append((likeness(column, node), column, node))
    return found


def sure_keys(table: FoundTable, nodes: Iterable[FoundTable]) -> Keys:
    """Return the columns with ids of ``nodes``. Numbers, which are often equal by chance, need a name like it."""
    return [
        (column, node)
        for likely, column, node in found_keys(table, nodes)
        if column is not table.id and (likely or (column.kind == "text" and node is not table))
    ]


def likeness(column: Column, node: FoundTable) -> int:
    name, key = column.name.lower(), node.id.name.lower() if node.id else ""
    ends = re.search(rf"(^|[^a-z]){re.escape(key)}$", name) or column.name.endswith(key.capitalize())  # not `width`
    return 2 * (name == key) + (node.node_type in name) + bool(ends)


def is_within(table: FoundTable, column: Column, other: FoundTable, ids: Column, share: float = 0.9) -> bool:
    """Return whether at least a share of the first 1,000 values of a column are in a column of another table."""
    pair = (column.name, other.file, ids.name)
    if pair not in table.shares:
        values = (f"unnest({quoted(one.name)})" if list_type(one.type) else quoted(one.name) for one in (column, ids))
        own, others = map(key_sql, values)
        some = f"SELECT DISTINCT v FROM (SELECT {own} AS v FROM {table.scan.sql} LIMIT 1000) WHERE v IS NOT NULL"
        count, inside = table.scan.database.rows(
            f"SELECT count(*), count(*) FILTER (WHERE v IN (SELECT {others} FROM {other.scan.sql})) FROM ({some})",
            table.scan.where,
        )[0]
        table.shares[pair] = inside / count if count else 0.0
    return table.shares[pair] >= share


def key_sql(value: str) -> str:
    """Return the SQL expression of an id as VARCHAR: ``12`` for 12.0, as pandas writes keys of which some are empty.

    NULL for NaN.
    """
    return f"regexp_replace(nullif(CAST({value} AS VARCHAR), 'nan'), '^(-?[0-9]+)\\.0+$', '\\1')"
