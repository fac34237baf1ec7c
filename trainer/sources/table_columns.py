"""SQL expressions (of DuckDB) that convert columns of tables to ids, numbers, lists of numbers, times or codes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.core.errors import DataError
from trainer.sources.table_database import Scan, quoted, text

_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_FLOATS = ("FLOAT", "DOUBLE")
_LIST = re.compile(r"(.*)\[(\d*)\]")
_LARGE = 100.0  #: mean and standard deviation together of a feature that outweighs standardised ones

_NESTED = ("STRUCT", "MAP", "UNION", "BLOB")


@dataclass(frozen=True)
class NumberColumn:
    """A checked column of numbers, or of lists of ``width`` numbers (0: not a list)."""

    name: str
    sql: str  #: DOUBLE, or FLOAT[]
    width: int
    whole: bool  #: all values are integers; False for lists


def list_type(of: str) -> str | None:
    """Return the element type of a list or array type of DuckDB, or None for any other type."""
    match = _LIST.fullmatch(of)
    return match[1] if match else None


def is_number_type(of: str) -> bool:
    return of in (*_INTEGERS, *_FLOATS, "UBIGINT", "HUGEINT", "UHUGEINT", "BOOLEAN") or of.startswith("DECIMAL")


def as_double(column: str, of: str) -> str:
    """Return an SQL expression for a column as DOUBLE; NULL for values that are not numbers."""
    if of == "BOOLEAN":
        return f"CAST(CAST({quoted(column)} AS TINYINT) AS DOUBLE)"
    return f"TRY_CAST({quoted(column)} AS DOUBLE)"


def check_numbers(scan: Scan, columns: Iterable[str], role: str, fill: float | None) -> list[NumberColumn]:
    """Check columns of numbers or of lists of numbers. ``role``: use of the columns, for messages.

    ``fill`` replaces missing values and NaN in columns of numbers; if it is None, they are errors. Raises ``DataError``
    that names file, row and value of the first problem.
    """
    names = list(columns)
    for name in names:
        scan.check_column(name, role)
    scalars = [name for name in names if list_type(scan.types[name]) is None]
    for name in scalars:
        of = scan.types[name]
        if of != "VARCHAR" and not is_number_type(of):
            raise DataError(f"{scan.where}: {role} {name!r} is {of}, expected numbers or lists of numbers")
    whole = _check_scalars(scan, scalars, role, fill)
    found = []
    for name in names:
        if name in whole:
            found.append(NumberColumn(name, _filled(as_double(name, scan.types[name]), fill), 0, whole[name]))
        else:
            found.append(NumberColumn(name, f"CAST({quoted(name)} AS FLOAT[])", _check_lists(scan, name, role), False))
    return found


def _filled(number: str, fill: float | None) -> str:
    if fill is None:
        return number
    return f"CASE WHEN {number} IS NULL OR isnan({number}) THEN {fill!r} ELSE {number} END"


def _check_scalars(scan: Scan, names: list[str], role: str, fill: float | None) -> dict[str, bool]:
    """Check columns of numbers. Return for each column whether all its values are integers."""
    whole: dict[str, bool] = {}
    for begin in range(0, len(names), 200):  # columns of a query; more would make it slow to plan
        some = names[begin : begin + 200]
        parts = []
        for name in some:
            column, number = quoted(name), as_double(name, scan.types[name])
            parts += [
                # not with FILTER, which copies all columns of a chunk for each aggregate
                f"count(*) - count({column})",
                f"count({column}) - count({number})",
                f"count(CASE WHEN isnan({number}) THEN 1 END)",
                f"count(CASE WHEN isinf({number}) THEN 1 END)",
                f"bool_and({number} = floor({number}) AND abs({number}) < 9007199254740992)",
            ]
        row = scan.database.rows(f"SELECT {', '.join(parts)} FROM {scan.sql}", scan.where)[0]
        for k, name in enumerate(some):
            missing, wrong, nan, infinite, integral = row[5 * k : 5 * k + 5]
            _refuse(scan, name, role, fill, {"missing": missing, "wrong": wrong, "NaN": nan, "infinite": infinite})
            whole[name] = bool(integral)
    return whole


def _refuse(scan: Scan, name: str, role: str, fill: float | None, counts: dict[str, int]) -> None:
    column, number = quoted(name), as_double(name, scan.types[name])
    conditions = {
        "wrong": f"{column} IS NOT NULL AND {number} IS NULL",
        "infinite": f"isinf({number})",
        "missing": f"{column} IS NULL",
        "NaN": f"isnan({number})",
    }
    advice = {
        "wrong": "must be numbers; a column of texts belongs in `categories`",
        "infinite": "must be finite",
        "missing": "need a value; `fill: 0` puts 0 in empty cells",
        "NaN": "must not be NaN; `fill: 0` puts 0 in their place",
    }
    for kind, condition in conditions.items():
        if counts[kind] and not (fill is not None and kind in ("missing", "NaN")):
            if kind == "missing":
                scan.check_file_columns([name])
            raise DataError(
                f"{scan.first([name], condition)} ({counts[kind]:,} such rows); {role} of {scan.where} {advice[kind]}"
            )


def _check_lists(scan: Scan, name: str, role: str) -> int:
    """Check a column of lists, and return their length. Raises ``DataError`` if it differs between rows."""
    element = list_type(scan.types[name]) or ""
    if not is_number_type(element):
        raise DataError(f"{scan.where}: {role} {name!r} is {scan.types[name]}, expected lists of numbers")
    column = quoted(name)
    low, high, missing = scan.database.rows(
        f"SELECT min(len({column})), max(len({column})), count(*) FILTER (WHERE {column} IS NULL) FROM {scan.sql}",
        scan.where,
    )[0]
    if missing:
        scan.check_file_columns([name])
        raise DataError(
            f"{scan.first([name], f'{column} IS NULL')} ({missing:,} such rows); every row needs a list of numbers"
        )
    if low != high:
        at = scan.first([name], f"len({column}) != {high}")
        raise DataError(f"{at}; the lists in {name} have {low} to {high} numbers; all must be equally long")
    values = f"[v IS NULL OR isnan(v) OR isinf(v) FOR v IN CAST({column} AS DOUBLE[])]"
    (bad,) = scan.database.rows(f"SELECT count(*) FILTER (WHERE list_bool_or({values})) FROM {scan.sql}", scan.where)[0]
    if bad:
        at = scan.first([name], f"list_bool_or({values})")
        raise DataError(f"{at} ({bad:,} such rows); lists must not contain missing values, NaN or infinity")
    return int(low or 0)


def label_sql(scan: Scan, name: str) -> tuple[str, int]:
    """Return an SQL expression for a label, DOUBLE or FLOAT[], and the length of its lists (0: not a list).

    Empty values become NaN. Raises ``DataError`` for texts, and for lists of different lengths.
    """
    column, element = quoted(name), list_type(scan.types[name])
    if element is None:
        number = as_double(name, scan.types[name])
        wrong = f"{column} IS NOT NULL AND {number} IS NULL"
        ((count,),) = scan.database.rows(f"SELECT count(*) FILTER (WHERE {wrong}) FROM {scan.sql}", scan.where)
        if count:
            at = scan.first([name], wrong)
            raise DataError(
                f"{at} ({count:,} such rows); if {scan.where} has several label columns, all labels must be numbers"
            )
        return f"coalesce({number}, 'NaN')", 0
    if not is_number_type(element):
        raise DataError(
            f"{scan.where}: label {name!r} is {scan.types[name]}, expected numbers, texts or lists of numbers"
        )
    ((low, high),) = scan.database.rows(f"SELECT min(len({column})), max(len({column})) FROM {scan.sql}", scan.where)
    if low != high or not high:
        at = scan.first([name], f"len({column}) != {high}" if low != high else f"coalesce(len({column}), 0) = 0")
        raise DataError(f"{at}; the lists in {name} have {low or 0} to {high or 0} numbers; all must be equally long")
    known = f"[coalesce(v, 'NaN'::FLOAT) FOR v IN CAST({column} AS FLOAT[])]"
    return f"coalesce({known}, ['NaN'::FLOAT FOR v IN range({high})])", int(high)


def standardized(scan: Scan, columns: Sequence[NumberColumn]) -> list[NumberColumn]:
    """Scale columns to mean 0 and standard deviation 1. Constant columns become 0; columns of lists are unchanged."""
    found = dict(zip([column.name for column in columns], columns, strict=True))
    for column, mean, deviation in _moments(scan, columns):
        sql = f"({column.sql} - {mean!r}) / {deviation or 1.0!r}"
        found[column.name] = replace(column, sql=sql, whole=False)
    return list(found.values())


def scale_note(scan: Scan, columns: Sequence[NumberColumn]) -> str:
    """Return a note if some columns have such large values that a model hardly learns from the others, else ''."""
    large = [column.name for column, mean, deviation in _moments(scan, columns) if abs(mean) + deviation > _LARGE]
    if not large or len(columns) < 2:
        return ""
    return (
        f"{scan.where}: values of {', '.join(large[:5])} are large beside other features; features are stored as they "
        "are, unless `standardize: true`"
    )


def _moments(scan: Scan, columns: Sequence[NumberColumn]) -> Iterator[tuple[NumberColumn, float, float]]:
    scalars = [column for column in columns if not column.width]
    for begin in range(0, len(scalars), 200):
        some = scalars[begin : begin + 200]
        parts = [f"avg({one.sql}), stddev_pop({one.sql})" for one in some]
        row = scan.database.rows(f"SELECT {', '.join(parts)} FROM {scan.sql}", scan.where)[0] if parts else ()
        for k, one in enumerate(some):
            yield one, float(row[2 * k] or 0.0), float(row[2 * k + 1] or 0.0)


# --- ids ---------------------------------------------------------------------------------------------------


def ids_are_integers(scan: Scan, column: str, role: str) -> bool:
    """Check a column of ids, and return whether all of them are integers written without leading zeros."""
    scan.check_column(column, role)
    of, name = scan.types[column], quoted(column)
    if of.startswith(_NESTED) or list_type(of):
        raise DataError(f"{scan.where}: {role} {column!r} is {of}; ids are numbers, texts, UUIDs or dates")
    (missing,) = scan.database.rows(f"SELECT count(*) FILTER (WHERE {name} IS NULL) FROM {scan.sql}", scan.where)[0]
    if missing:
        scan.check_file_columns([column])
        at = scan.first([column], f"{name} IS NULL")
        raise DataError(f"{at} ({missing:,} such rows); {role} of {scan.where} must be an id in every row")
    if of in _INTEGERS:
        return True
    if of in _FLOATS:
        whole = f"{name} = floor({name}) AND abs({name}) < 9007199254740992"
        (bad,) = scan.database.rows(f"SELECT count(*) FILTER (WHERE NOT ({whole})) FROM {scan.sql}", scan.where)[0]
        if bad:
            at = scan.first([column], f"NOT ({whole})")
            raise DataError(
                f"{at} ({bad:,} such rows); an id ({role} of {scan.where}) must be a whole number or a text"
            )
        return True
    if of != "VARCHAR":
        return False
    canonical = f"CAST(TRY_CAST({name} AS BIGINT) AS VARCHAR) = {name}"
    (all_,) = scan.database.rows(f"SELECT bool_and(coalesce({canonical}, false)) FROM {scan.sql}", scan.where)[0]
    return bool(all_)


def id_sql(scan: Scan, column: str, integers: bool) -> str:
    """Return an SQL expression for an id: BIGINT if ``integers``, else VARCHAR."""
    name = quoted(column)
    if integers:
        return f"CAST({name} AS BIGINT)"
    return f"CAST(CAST({name} AS BIGINT) AS VARCHAR)" if scan.types[column] in _FLOATS else f"CAST({name} AS VARCHAR)"


# --- times and categories ----------------------------------------------------------------------------------


def time_sql(scan: Scan, column: str) -> str:
    """Check a column of times, and return an SQL expression for it as BIGINT.

    Dates and timestamps become Unix seconds (UTC). Raises ``DataError`` that names file, row and value of the first
    problem.
    """
    scan.check_column(column, "time")
    of, name = scan.types[column], quoted(column)
    if of in _INTEGERS:
        sql = f"CAST({name} AS BIGINT)"
    elif of == "DATE" or of.startswith("TIMESTAMP"):
        sql = f"CAST(floor(epoch({name})) AS BIGINT)"
    elif of in (*_FLOATS, "VARCHAR"):
        integer = (
            f"CASE WHEN TRY_CAST({name} AS DOUBLE) = TRY_CAST({name} AS BIGINT) THEN TRY_CAST({name} AS BIGINT) END"
        )
        moment = f"CAST(floor(epoch(TRY_CAST({name} AS TIMESTAMP))) AS BIGINT)"
        (integers,) = scan.database.rows(f"SELECT bool_and(({integer}) IS NOT NULL) FROM {scan.sql}", scan.where)[0]
        sql = integer if integers or of != "VARCHAR" else moment
    else:
        raise DataError(f"{scan.where}: time {column!r} is {of}, expected integers, dates or timestamps")
    (bad,) = scan.database.rows(f"SELECT count(*) FILTER (WHERE ({sql}) IS NULL) FROM {scan.sql}", scan.where)[0]
    if bad:
        at = scan.first([column], f"({sql}) IS NULL")
        raise DataError(
            f"{at} ({bad:,} such rows); time of {scan.where} must be integers, dates or timestamps such as "
            "2024-05-17 12:00:00"
        )
    return sql


def categories(scan: Scan, column: str, role: str, most: int = 1 << 20) -> list[str]:
    """Return the distinct texts of a column, sorted, without missing values.

    Numbers are converted to texts. Raises ``DataError`` for more than ``most`` texts, and for a column of lists or
    another nested type.
    """
    scan.check_column(column, role)
    of = scan.types[column]
    if of.startswith(_NESTED) or list_type(of):
        raise DataError(f"{scan.where}: {role} {column!r} is {of}, expected texts or numbers")
    sql = f"SELECT DISTINCT CAST({quoted(column)} AS VARCHAR) AS v FROM {scan.sql} WHERE v IS NOT NULL"
    found = [str(row[0]) for row in scan.database.rows(f"{sql} ORDER BY v LIMIT {most + 1}", scan.where)]
    if len(found) > most:
        raise DataError(f"{scan.where}: {role} {column!r} has more than {most:,} different values")
    return found


def one_hot(column: str, texts: Sequence[str]) -> list[NumberColumn]:
    """Return a column for each text, which is 1 in rows with this text and else 0."""
    found = f"CAST({quoted(column)} AS VARCHAR)"
    return [NumberColumn(column, f"CASE WHEN {found} = {text(each)} THEN 1.0 ELSE 0.0 END", 0, True) for each in texts]


def code_sql(scan: Scan, column: str, texts: list[str], enum: str) -> str:
    """Return an SQL expression for the position of a column's values in ``texts``, BIGINT; -1 for missing values.

    Creates the ENUM type ``enum`` in the database.
    """
    if not texts:
        return "CAST(-1 AS BIGINT)"
    scan.database.run(f"CREATE TYPE {enum} AS ENUM ({', '.join(map(text, texts))})", scan.where)
    return f"coalesce(CAST(enum_code(CAST(CAST({quoted(column)} AS VARCHAR) AS {enum})) AS BIGINT), -1)"
