"""SQL expressions (of DuckDB) that convert columns of tables to ids, numbers, lists of numbers, times or codes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.core.errors import DataError
from trainer.sources.table_database import Scan, quoted, text
from trainer.sources.table_options import LARGEST

INTEGER = "-?(0|[1-9][0-9]*)"  #: regular expression
_EXACT = {"FLOAT": 24, "DOUBLE": 53}  #: integers below two to this power are not rounded
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_FLOATS = ("FLOAT", "DOUBLE")
_LIST = re.compile(r"(.*)\[(\d*)\]")
_LARGE = 100.0  #: mean and standard deviation together of a feature that outweighs standardised ones

_LONGEST_ID = 1024  #: bytes

NESTED = ("STRUCT", "MAP", "UNION", "BLOB")


@dataclass(frozen=True)
class NumberColumn:
    """A checked column of numbers, or of lists of ``width`` numbers (0: not a list)."""

    name: str
    sql: str  #: DOUBLE, FLOAT[] or BIGINT[]
    width: int
    whole: bool  #: all values are to be stored as integers; of lists, those of attributes


def list_type(of: str) -> str | None:
    """Return the element type of a list or array type of DuckDB, or None for any other type."""
    match = _LIST.fullmatch(of)
    return match[1] if match else None


def is_number_type(of: str) -> bool:
    return of in (*_INTEGERS, *_FLOATS, "UBIGINT", "HUGEINT", "UHUGEINT", "BOOLEAN") or of.startswith("DECIMAL")


def as_double(column: str, of: str) -> str:
    """Return an SQL expression for a column as DOUBLE; NULL for values that are not numbers.

    The texts true and false, as pandas writes booleans to CSV files, are 1 and 0.
    """
    name = quoted(column)
    if of == "BOOLEAN":
        return f"CAST(CAST({name} AS TINYINT) AS DOUBLE)"
    if of == "VARCHAR":
        flag = f"CASE lower({name}) WHEN 'true' THEN 1.0 WHEN 'false' THEN 0.0 END"
        # DuckDB, as Python, takes 18_24 for 1824
        return f"CASE WHEN NOT contains({name}, '_') THEN coalesce(TRY_CAST({name} AS DOUBLE), {flag}) END"
    return f"TRY_CAST({name} AS DOUBLE)"


def _as_integer(column: str, of: str) -> str:
    """Return an SQL expression for a column of numbers as BIGINT; NULL for values that are not whole or too large."""
    number = as_double(column, of)
    # from the column and not from its DOUBLE, which has 53 bits
    exact = f"coalesce(TRY_CAST({quoted(column)} AS BIGINT), TRY_CAST({number} AS BIGINT))"
    return f"CASE WHEN {number} = floor({number}) THEN {exact} END"


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
    whole: dict[str, bool] = {}  # whether a column is to be stored as integers
    for begin in range(0, len(scalars), 200):  # columns of a query; more would make it slow to plan
        some, inner, outer = scalars[begin : begin + 200], [], []
        for k, name in enumerate(some):
            number = f"gf_number{k}"
            inner += [f"{as_double(name, scan.types[name])} AS {number}", f"{quoted(name)} AS gf_column{k}"]
            faults = _faults(f"gf_column{k}", number)
            # not with FILTER, which copies all columns of a chunk for each aggregate
            outer += [f"count(CASE WHEN {condition} THEN 1 END)" for condition, _ in faults.values()]
            outer.append("false")
            if role == "attributes":
                inner.append(f"{_as_integer(name, scan.types[name])} AS gf_integer{k}")
                outer[-1] = f"bool_and(isnan({number}) OR gf_integer{k} IS NOT NULL)"
        sql = f"SELECT {', '.join(outer)} FROM (SELECT {', '.join(inner)} FROM {scan.sql})"
        row = scan.database.rows(sql, scan.where)[0]
        for k, name in enumerate(some):
            *counts, integral = row[k * len(row) // len(some) : (k + 1) * len(row) // len(some)]
            faults = _faults(quoted(name), as_double(name, scan.types[name]))
            counted = dict(zip(faults, counts, strict=True))
            has_gaps = counted["missing"] or counted["NaN"]
            fits = fill is None or not has_gaps or (fill.is_integer() and abs(fill) < 1 << 63)
            whole[name] = bool(integral) and fits
            for kind, (condition, advice) in faults.items():
                count = counted[kind]
                if not count or (fill is not None and kind in ("missing", "NaN")):
                    continue
                if kind == "missing":
                    scan.check_file_columns([name])
                raise DataError(f"{scan.first(name, condition)} ({count:,} such rows); {role} of {scan.where} {advice}")

    found = []
    for name in names:
        if name not in whole:
            integers = role == "attributes" and list_type(scan.types[name]) in _INTEGERS
            sql = f"CAST({quoted(name)} AS {'BIGINT' if integers else 'FLOAT'}[])"
            _refuse(scan, name, f"{quoted(name)} IS NULL", "every row needs a list of numbers")
            length = _list_length(scan, name, role)
            # false for NaN
            finite = f"[coalesce(abs(v) <= {LARGEST}, false) FOR v IN CAST({quoted(name)} AS DOUBLE[])]"
            advice = "lists must not contain missing values, NaN or infinity; `fill` does not apply to lists"
            _refuse(scan, name, f"NOT list_bool_and({finite})", advice)
            found.append(NumberColumn(name, sql, length, integers))
            continue
        number = as_double(name, scan.types[name])
        sql = _as_integer(name, scan.types[name]) if whole[name] else number
        if fill is not None:
            filled = int(fill) if whole[name] else fill
            sql = f"CASE WHEN {number} IS NULL OR isnan({number}) THEN {filled!r} ELSE {sql} END"
        found.append(NumberColumn(name, sql, 0, whole[name]))
    return found


def _faults(column: str, number: str) -> dict[str, tuple[str, str]]:
    """Return for each kind of wrong values its SQL condition, and what a message says of it."""
    return {
        "wrong": (
            f"{column} IS NOT NULL AND {number} IS NULL",
            "must be numbers such as 1234.5, without units, commas or separators of thousands; a column of texts "
            "belongs in `categories` or `one_hot`, and texts for missing values in `null_values`",
        ),
        "infinite": (_is_infinite(number), "must be finite and fit into float32"),
        "missing": (f"{column} IS NULL", "need a value; `fill: 0` puts 0 in empty cells"),
        "NaN": (f"isnan({number})", "must not be NaN; `fill: 0` puts 0 in their place"),
    }


def _is_infinite(number: str) -> str:
    return f"(abs({number}) > {LARGEST} AND NOT isnan({number}))"


def _refuse(scan: Scan, name: str, condition: str, advice: str) -> None:
    """Raise ``DataError`` with the first row in which column ``name`` meets an SQL condition, if there is one."""
    ((bad,),) = scan.database.rows(f"SELECT count(*) FROM {scan.sql} WHERE {condition}", scan.where)
    if bad:
        scan.check_file_columns([name])
        raise DataError(f"{scan.first(name, condition)} ({bad:,} such rows); {advice}")


def _list_length(scan: Scan, name: str, role: str) -> int:
    """Return the length of the lists in a column. Raises ``DataError`` if it differs between rows, or is 0."""
    element, column = list_type(scan.types[name]) or "", quoted(name)
    if not is_number_type(element):
        raise DataError(f"{scan.where}: {role} {name!r} is {scan.types[name]}, expected numbers or lists of numbers")
    sql = f"SELECT min(len({column})), max(len({column})) FROM {scan.sql}"
    ((low, high),) = scan.database.rows(sql, scan.where)
    if low != high or not high:
        at = scan.first(name, f"len({column}) != {high}" if low != high else f"coalesce(len({column}), 0) = 0")
        raise DataError(f"{at}; the lists in {name} have {low or 0} to {high or 0} numbers; all must be equally long")
    return int(high)


def label_sql(scan: Scan, name: str) -> tuple[str, int]:
    """Return an SQL expression for a label, DOUBLE or FLOAT[], and the length of its lists (0: not a list).

    Empty values become NaN. Raises ``DataError`` for texts, infinity, and lists of different lengths.
    """
    column = quoted(name)
    if list_type(scan.types[name]) is None:
        number = as_double(name, scan.types[name])
        advice = f"if {scan.where} has several label columns, all labels must be numbers"
        _refuse(scan, name, f"{column} IS NOT NULL AND {number} IS NULL", advice)
        _refuse(scan, name, _is_infinite(number), f"label of {scan.where} must be finite")
        return f"coalesce({number}, 'NaN')", 0
    length = _list_length(scan, name, "label")
    values = f"[coalesce({_is_infinite('v')}, false) FOR v IN CAST({column} AS DOUBLE[])]"
    _refuse(scan, name, f"list_bool_or({values})", f"label of {scan.where} must be finite")
    known = f"[coalesce(v, 'NaN'::FLOAT) FOR v IN CAST({column} AS FLOAT[])]"
    return f"coalesce({known}, ['NaN'::FLOAT FOR v IN range({length})])", length


def class_sql(scan: Scan, name: str, num_classes: int | None, most: int) -> tuple[str, bool] | None:
    """Return an SQL expression for a column of numbers as label, and whether they are classes.

    Classes are BIGINT, -1 for missing values and NaN; others are DOUBLE, NaN for missing values. ``num_classes``: the
    number of classes; None: what the column says, at most ``most``; 0: whole numbers are no classes. Returns None if
    some values are not numbers. Raises ``DataError`` that names the row of a class out of this range.
    """
    of, column = scan.types[name], quoted(name)
    if of != "VARCHAR" and not is_number_type(of):
        return None
    number = as_double(name, of)
    numbers, whole = scan.database.rows(
        f"SELECT bool_and({number} IS NOT NULL OR {column} IS NULL), "
        f"bool_and(isnan({number}) OR {_as_integer(name, of)} IS NOT NULL) FROM {scan.sql} WHERE {column} IS NOT NULL",
        scan.where,
    )[0]
    if numbers is False:
        return None
    if whole and num_classes != 0:
        none = "set `num_classes: 0` if these are no classes"
        _refuse(scan, name, f"{number} < -1", f"classes of {scan.where} start at 0, -1 is no label; {none}")
        advice = f"option num_classes says that the last class of {scan.where} is {(num_classes or 0) - 1}"
        if num_classes is None:
            advice = f"with classes from 0, {scan.where} can have at most {most:,}; renumber them, or {none}"
        _refuse(scan, name, f"{number} >= {num_classes or most} AND NOT isnan({number})", advice)
        return f"coalesce({_as_integer(name, of)}, -1)", True
    return label_sql(scan, name)[0], False


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


def check_ids(scan: Scan, column: str, role: str) -> None:
    """Raise ``DataError`` if a column is missing, in one of the files too, or if its type cannot be that of ids."""
    scan.check_column(column, role)
    of = scan.types[column]
    if of.startswith(NESTED) or list_type(of):
        raise DataError(f"{scan.where}: {role} {column!r} is {of}; ids are numbers, texts, UUIDs or dates")
    scan.check_file_columns([column])


def ids_are_integers(scan: Scan, column: str, role: str = "id") -> bool:
    """Check a column of ids, and return whether all of them are integers without leading zeros.

    ``role``: what the column is for; only an ``id`` needs a value in each row.
    """
    check_ids(scan, column, role)
    of, name = scan.types[column], quoted(column)
    present = f"{as_text(column, of)} IS NOT NULL"
    if role == "id":
        _refuse(scan, column, f"NOT ({present})", f"id of {scan.where} must be an id in every row")
    if of in _EXACT or of.startswith("DECIMAL"):
        below = f", below 2^{_EXACT[of]}," if of in _EXACT else ""
        advice = f"an id ({role} of {scan.where}) must be a whole number{below} or a text"
        _refuse(scan, column, f"{present} AND NOT {_is_whole(name, of)}", advice)
    if of == "VARCHAR":
        advice = f"an id ({role} of {scan.where}) can have at most {_LONGEST_ID:,} bytes; shorten it"
        _refuse(scan, column, f"strlen({name}) > {_LONGEST_ID}", advice)
    (all_,) = scan.database.rows(
        f"SELECT bool_and({integer_id(name, of)} IS NOT NULL) FROM {scan.sql} WHERE {present}", scan.where
    )[0]
    return bool(all_)


def has_decimal_texts(scan: Scan, column: str) -> bool:
    """Return whether a column of ids contains texts such as ``12.0`` and others than whole numbers of any size."""
    if scan.types[column] != "VARCHAR":
        return False
    decimal, whole = (f"regexp_full_match({quoted(column)}, '{INTEGER}{of}')" for of in ("\\.0+", "(\\.0+)?"))
    (any_,) = scan.database.rows(f"SELECT bool_or({decimal}) AND NOT bool_and({whole}) FROM {scan.sql}", scan.where)[0]
    return bool(any_)


def _is_whole(name: str, of: str) -> str:
    """Return the condition that a column of floats or decimals has a whole number, which is not a rounded one."""
    return f"({name} = floor({name})" + (f" AND abs({name}) < {1 << _EXACT[of]})" if of in _EXACT else ")")


def integer_id(name: str, of: str) -> str:
    """Return an SQL expression for an id as BIGINT; NULL if it is no integer of 64 bits.

    ``12`` and ``12.0``, as pandas writes keys of which some are missing, are the same id; ``012`` is a text.

    ``name``: SQL expression of the id. ``of``: its type.
    """
    if of == "VARCHAR":
        digits = f"TRY_CAST(split_part(trim({name}), '.', 1) AS BIGINT)"
        return f"CASE WHEN regexp_full_match(trim({name}), '{INTEGER}(\\.0*)?') THEN {digits} END"
    if of in _EXACT or of.startswith("DECIMAL"):
        return f"CASE WHEN {_is_whole(name, of)} THEN TRY_CAST({name} AS BIGINT) END"
    return f"TRY_CAST({name} AS BIGINT)" if of.endswith(("INT", "INTEGER")) else "CAST(NULL AS BIGINT)"


def text_id(name: str, of: str, decimal_texts: bool) -> str:
    """Return an SQL expression for an id as VARCHAR; NULL for NaN. Whole numbers have no decimal point.

    ``name``: SQL expression of the id. ``of``: its type. ``decimal_texts``: texts such as ``12.0`` remain as they are,
    and do not become ``12``.
    """
    if of in _EXACT or of.startswith("DECIMAL"):
        other = (
            f"CASE WHEN NOT isnan({name}) THEN CAST({name} AS VARCHAR) END"
            if of in _EXACT
            else f"CAST({name} AS VARCHAR)"
        )
        return f"CASE WHEN {_is_whole(name, of)} THEN CAST(CAST({name} AS HUGEINT) AS VARCHAR) ELSE {other} END"
    if of == "VARCHAR" and not decimal_texts:
        is_whole = f"regexp_full_match({name}, '{INTEGER}\\.0+')"
        return f"CASE WHEN {is_whole} THEN split_part({name}, '.', 1) ELSE {name} END"
    return f"CAST({name} AS VARCHAR)"


# --- times and categories ----------------------------------------------------------------------------------


def time_sql(scan: Scan, column: str) -> str:
    """Check a column of times, and return an SQL expression for it as BIGINT.

    Dates and timestamps become Unix seconds; those without a zone are UTC. Raises ``DataError`` that names file, row
    and value of the first problem.
    """
    scan.check_column(column, "time")
    of, name = scan.types[column], quoted(column)
    if of == "DATE" or of.startswith("TIMESTAMP"):
        sql = f"CAST(floor(epoch({name})) AS BIGINT)"
    elif of == "VARCHAR" or (is_number_type(of) and of != "BOOLEAN"):
        sql = _as_integer(column, of)
        if of == "VARCHAR":  # without true and false
            sql = f"CASE WHEN TRY_CAST({name} AS DOUBLE) IS NOT NULL THEN {sql} END"
        moment = f"CAST(floor(epoch({moment_sql(name)})) AS BIGINT)"
        counts = f"SELECT count(({sql})), count(({moment})) FROM {scan.sql}"
        if of == "VARCHAR" and (found := scan.database.rows(counts, scan.where)[0])[1] > found[0]:
            sql = moment
    else:
        raise DataError(f"{scan.where}: time {column!r} is {of}, expected integers, dates or timestamps")
    advice = (
        f"time of {scan.where} must be in every row, all of them integers, or all dates or timestamps such as "
        "2024-05-17 12:00:00"
    )
    _refuse(scan, column, f"({sql}) IS NULL", advice)
    return sql


def moment_sql(name: str) -> str:
    """Return an SQL expression for a text as TIMESTAMPTZ; NULL if it is none. ``name``: SQL expression of the text."""
    # a blank before the offset, as in Python's and git's formats, is not read by DuckDB
    return f"TRY_CAST(regexp_replace(trim({name}), '\\s+([+-]\\d\\d|Z$)', '\\1') AS TIMESTAMPTZ)"


def split_sql(scan: Scan, column: str) -> str:
    """Check a column of splits, and return an SQL expression for it: train, val, test, or NULL."""
    scan.check_column(column, "split")
    word = f"lower(trim(CAST({quoted(column)} AS VARCHAR)))"
    advice = f"split of {scan.where} must be train, val or test, or empty"
    known = "('train', 'val', 'valid', 'validation', 'test')"
    _refuse(scan, column, f"{as_text(column, scan.types[column])} IS NOT NULL AND {word} NOT IN {known}", advice)
    return f"CASE WHEN {word} IN ('valid', 'validation') THEN 'val' ELSE {word} END"


def as_text(column: str, of: str) -> str:
    """Return an SQL expression for a column as VARCHAR; NULL for NaN."""
    cast = f"CAST({quoted(column)} AS VARCHAR)"
    return f"CASE WHEN NOT isnan({quoted(column)}) THEN {cast} END" if of in _FLOATS else cast


def categories(scan: Scan, column: str, role: str, most: int = 1 << 20) -> list[str]:
    """Return the distinct texts of a column, sorted, without missing values.

    Numbers are converted to texts. Raises ``DataError`` for more than ``most`` texts, and for a column of lists or
    another nested type.
    """
    scan.check_column(column, role)
    of = scan.types[column]
    if of.startswith(NESTED) or list_type(of):
        raise DataError(f"{scan.where}: {role} {column!r} is {of}, expected texts or numbers")
    sql = f"SELECT DISTINCT {as_text(column, of)} AS gf_text FROM {scan.sql} WHERE gf_text IS NOT NULL"
    found = [str(row[0]) for row in scan.database.rows(f"{sql} ORDER BY gf_text LIMIT {most + 1}", scan.where)]
    if len(found) > most:
        raise DataError(f"{scan.where}: {role} {column!r} has more than {most:,} different values")
    return found


def one_hot(scan: Scan, column: str, texts: Sequence[str]) -> list[NumberColumn]:
    """Return a column for each text, which is 1 in rows with this text and else 0."""
    found = as_text(column, scan.types[column])
    return [NumberColumn(column, f"CASE WHEN {found} = {text(each)} THEN 1.0 ELSE 0.0 END", 0, True) for each in texts]


def code_sql(scan: Scan, column: str, texts: list[str], enum: str) -> str:
    """Return an SQL expression for the position of a column's values in ``texts``, BIGINT; -1 for missing values.

    Creates the ENUM type ``enum`` in the database.
    """
    if not texts:
        return "CAST(-1 AS BIGINT)"
    found = as_text(column, scan.types[column])
    scan.database.run(f"CREATE TYPE {enum} AS ENUM ({', '.join(map(text, texts))})", scan.where)
    return f"coalesce(CAST(enum_code(CAST({found} AS {enum})) AS BIGINT), -1)"
