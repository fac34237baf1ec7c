"""Guesses the options of dataset `tables` from the CSV and Parquet files of a folder (``partition tables``).

In this order:

1. what each table is: its files, and of each column its kind and values (``table_facts``);
2. which tables are tasks, and then which of the others edges and nodes (``draft_tasks``); without tasks, which are
   edges, with two columns of ids of nodes, and nodes; without these, which have two columns of repeated ids (here);
3. what is written of a table: id or ends, label, split, time, features, and comments (``draft_columns``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.core.errors import DataError
from trainer.sources.csv_files import guessed_encoding
from trainer.sources.draft_columns import NO_ID, Drafted, draft_of, edge_table, edge_tables, node_table
from trainer.sources.draft_tasks import draft_with_tasks
from trainer.sources.table_database import Database, Scan
from trainer.sources.table_facts import (
    NEARLY_UNIQUE,
    Column,
    FoundTable,
    Keys,
    found_keys,
    is_within,
    look_at,
    sure_keys,
    triple,
    why_no_id,
)
from trainer.sources.table_files import is_parquet, table_files, tables_in
from trainer.sources.table_options import EdgeTable, Table

_NO_TYPE = re.compile(r"|s|t|u|v|source|target|src|dst|from|to|head|tail|column\d+")  #: columns that name no type

_SPLIT_FILE = re.compile(
    r"(.*?)(?:^|[_.\- ])(?:(train|training)|(val|valid|validation|dev)|(test|testing))(?=$|[_.\- ])(.*)", re.IGNORECASE
)


def draft_tables(folder: Path) -> dict[str, Any]:
    """Guess the options ``nodes`` and ``edges`` of dataset `tables` from the files in ``folder``.

    Every CSV or Parquet file and every folder of such files directly in ``folder`` is one table. A table with a column
    of unique values is a node table; a table with two columns of ids of node tables is an edge table. Tables whose
    names differ only in train, val and test, with equal columns, are one edge table with a split. If there is a task
    table, it is under ``tasks``, and tables of events are nodes. If there are no edges between node tables, a table
    with two columns of repeated ids is an edge table, if need be between nodes without a table. With several node
    types, option ``undirected`` is set. ``comments`` of the result says what was guessed, and why columns are not used,
    by node and edge type; ``unused`` in it is about files, and ``rows`` has the number of rows of each, if they have
    labels that of the labelled ones.

    Raises ``DataError`` if no node or edge table is found, or if the folder of a table has files of both kinds.
    """
    with TemporaryDirectory(prefix="gnnfleet-tables-") as work, closing(Database(Path(work), None)) as database:
        found = _found(database, folder)
        named = [table for table in found if table.id is not None]
        drafted = draft_with_tasks(found, named) or _draft_of_keys(found, named)

    labels: dict[str, Column] = {}  # by file
    for table in (*drafted["nodes"].values(), *drafted.get("tasks", {}).values()):
        if "label" in table:
            one = next(one for one in found if one.file == table.get("files", table.get("table")))
            labels[one.file] = next(column for column in one.columns if column.name == table["label"])
    comments = drafted["comments"]
    comments["rows"] = {one.file: (one.file in labels and labels[one.file].present) or one.rows for one in found}
    for of, table in drafted["nodes"].items():
        label = labels.get(table.get("files", ""))
        if label is None or len(labels) > 1:  # the option would be that of another table, too
            continue
        if label.whole and not (label.low >= -1 and label.high < label.rows):
            drafted["num_classes"] = 0
            comments["nodes"].setdefault(of, []).append(
                f"{label.name}: {label.low:,.0f} to {label.high:,.0f}: numbers, not classes (num_classes: 0)"
            )
    return drafted


def _found(database: Database, folder: Path) -> list[FoundTable]:
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
        key: Any = path.name
        kind = ""
        if match := _SPLIT_FILE.fullmatch(_stem(path.name)):
            before, *words, behind = match.groups()
            kind = next(k for k, word in zip(("files", "val_files", "test_files"), words, strict=True) if word)
            key = (before, behind, path.suffix, tuple(scan.types))
        if kind in groups.get(key, {}):  # train.csv and training.csv
            key, kind = path.name, ""
        groups.setdefault(key, {})[kind] = path.name, scan
    if not groups:
        raise DataError(f"{folder} has no CSV or Parquet files")

    found: list[FoundTable] = []
    for key, group in groups.items():
        if "files" in group and len(group) > 1:
            files = {kind: (group[kind][0],) for kind in ("files", "val_files", "test_files") if kind in group}
            first = group["files"][1].options
            table = EdgeTable(**files, columns=first.columns, encoding=first.encoding)  # type: ignore[arg-type]
            where = ", ".join(name for (name,) in files.values())
            scan = Scan(database, table_files(table, folder, where), where, table)
            whole = look_at(scan, files["files"][0], f"{key[0]} {key[1]}".strip() or "interacts")
            if whole.id is None or len(_pair(whole, {})) == 2:
                found.append(whole)
                continue
        found += [look_at(scan, file, _stem(file)) for file, scan in group.values()]
    found.sort(key=lambda one: one.file)
    types: set[str] = set()
    for one in found:  # other types for users.csv and users.parquet, and for names without letters from a to z
        word = re.sub(r"[^A-Za-z0-9]+", "_", one.stem).strip("_").lower() or "table"
        singular = re.sub(r"(?<=ch|sh|ss)es$|(?<=x)es$|(?<!s)s$", "", word)  # branches, boxes, users
        one.type_name, one.node_type, number = word, singular or word, 1
        while not types.isdisjoint({one.type_name, one.node_type}):
            number += 1
            one.type_name, one.node_type = f"{word}_{number}", f"{singular or word}_{number}"
        types |= {one.type_name, one.node_type}
    return found


def _stem(file: str) -> str:
    return re.sub(r"\.(csv|tsv|txt|parquet|pq)(\.\w+)?$", "", file, flags=re.IGNORECASE)


def _draft_of_keys(found: Sequence[FoundTable], named: Sequence[FoundTable]) -> dict[str, Any]:
    """Draft the tables with ids (``named``) as nodes, those with two columns of such ids as edges.

    Raises ``DataError`` if there are neither edges nor ids of other nodes.
    """
    ends: dict[FoundTable, Keys] = {}  # at most two, those most likely by name, in the order of the table
    for table in found:
        keys_of = _without_chance(table, found_keys(table, [one for one in named if one is not table]))
        best = sorted(keys_of, key=lambda one: one[0], reverse=True)[:2]
        ends[table] = [(column, node) for likely, column, node in keys_of if (likely, column, node) in best]
    referenced = {node for pair in ends.values() if len(pair) == 2 for _, node in pair}
    by_name = {node for table in found for likely, _, node in found_keys(table, named) if likely and node is not table}
    edges = [table for table in found if len(ends[table]) == 2 and table not in referenced | by_name]
    nodes = [table for table in named if table not in edges]
    edges = [table for table in edges if all(node in nodes for _, node in ends[table])]
    keys = {table: sure_keys(table, nodes) for table in nodes}
    if not edges and (drafted := _draft_of_pairs(found, ends, referenced)):
        return drafted
    if not edges and (not any(keys.values()) or any(map(why_no_id, found))):
        have = ", ".join(f"{table.file} ({', '.join(one.name for one in table.columns[:8])})" for table in found)
        raise DataError(
            "; ".join(f"{table.file}: {why}" for table in found if (why := why_no_id(table)))
            or "no node table (with a column of unique values) or no edge table (with two columns of node ids) is "
            f"recognised in: {have}; write data.options yourself (docs/data.md)"
        )
    of_nodes = {table.node_type: node_table(table, keys[table]) for table in nodes}
    why = "it has neither a column with a different value in each row nor two columns of ids of node tables"
    unused = [table for table in found if table not in (*nodes, *edges)]
    return draft_of(of_nodes, edge_tables(edges, nodes, ends | keys), unused, why)


@dataclass(eq=False)
class _Type:
    """A node type: the ids of a node table, or those in a column of an edge table."""

    name: str
    table: FoundTable
    column: Column
    has_table: bool


def _draft_of_pairs(
    found: Sequence[FoundTable], ends: Mapping[FoundTable, Keys], referenced: set[FoundTable]
) -> dict[str, Any]:
    """Draft the tables with two columns of repeated ids as edges; {} if there are none.

    Columns of equal ids belong to one node type.
    """
    types: list[_Type] = []
    pairs: list[tuple[FoundTable, list[tuple[Column, _Type]]]] = []  # tables of edges, with their source and target
    for table in sorted(found, key=lambda one: (len(one.file_keys) == 1, -one.rows)):
        known = dict(ends[table])
        own: list[tuple[Column, _Type]] = []
        for column in [] if table in referenced else _pair(table, known):
            if (node := known.get(column)) is not None and node.id is not None:
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

    nodes: dict[str, Drafted] = {}
    edges: dict[str, Drafted] = {}
    for table, own in pairs:
        (source, of_source), (target, of_target) = own
        for column, of in own:
            if of.has_table:
                nodes.setdefault(of.name, node_table(of.table, []))
            else:
                nodes.setdefault(of.name, ({}, []))[1].append(f"{column.name} of {table.file}")
        edges[f"{of_source.name}__{table.type_name}__{of_target.name}"] = edge_table(table, source, target)
    for drafted, notes in nodes.values():
        if not drafted:
            notes[:] = ["no table: its nodes are the different values of " + ", ".join(notes) + "; a guess"]
    used = {table for table, _ in pairs} | {of.table for _, own in pairs for _, of in own}
    return draft_of(nodes, edges, [one for one in found if one not in used], "it has no two columns of ids")


def _pair(table: FoundTable, known: Mapping[Column, FoundTable]) -> list[Column]:
    """Return the columns of sources and targets, or []. ``known``: columns with ids of node tables."""
    if columns := triple(table):
        return [columns[0], columns[2]]
    scored, names = [], {column.name.lower() for column in table.columns}
    for position, column in enumerate(table.columns):
        name = column.name.lower()
        nearly_unique = column.distinct >= NEARLY_UNIQUE * table.rows
        if nearly_unique and not column.unique and position == 0:
            return []  # meant to be the id of a node table
        if nearly_unique or not column.may_be_id or column.present < column.rows or column.distinct < 2:
            continue
        if column.is_binary or column.is_split or column.is_time:
            continue
        if name in NO_ID and not (name == "target" and "source" in names):
            continue
        if column in known or column.has_id_name or (table.id is None and position < 2):
            scored.append((0 if column in known else 1 if column.has_id_name else 2, position, column))
    best = sorted(sorted(scored, key=lambda one: one[:2])[:2], key=lambda one: one[1])
    repeated = any(table.rows >= 2 * column.distinct for *_, column in best)
    return [column for *_, column in best] if len(best) == 2 and repeated else []


def _is_same(one: _Type, other: _Type) -> bool:
    """Return whether two columns seem to have ids of the same nodes."""
    a, b = one.column, other.column
    if one.has_table or other.has_table:
        return one.table is other.table and one.has_table == other.has_table
    if (one.name and one.name == other.name) or a.kind != b.kind:
        return a.kind == b.kind
    if a.is_numbered or b.is_numbered:  # then the same numbers say nothing
        return _is_same_range(a, b)
    return is_within(one.table, a, other.table, b, 0.5) or is_within(other.table, b, one.table, a, 0.5)


def _is_same_range(a: Column, b: Column) -> bool:
    near = 1 + 0.02 * max(a.high, b.high)
    return abs(a.low - b.low) <= near and abs(a.high - b.high) <= near


def _without_chance(
    table: FoundTable, keys: Sequence[tuple[int, Column, FoundTable]]
) -> list[tuple[int, Column, FoundTable]]:  # fmt: skip
    """Return the ``found_keys`` of a table without numbers that are among the ids of a node table by chance.

    If another column is called as these ids, they are quantities, or numbers of other things: a ``userId`` from 1 to
    610 beside ``movieId``, but not a ``friend_id`` beside ``user_id``, which go from 1 to the same number.
    """
    like = {node for likely, _, node in keys if likely}
    rest = [one for one in table.columns if one not in [column for _, column, _ in keys]]
    is_other_id = any(one.may_be_id and one.has_id_name for one in rest)

    def by_chance(likely: int, column: Column, node: FoundTable) -> bool:
        fits = (one for one in like if one.id and is_within(table, column, one, one.id))
        if likely or column.kind != "number" or node.id is None or not any(fits):
            return False
        if not column.has_id_name:
            return is_other_id or column.name.lower() in NO_ID
        return column.is_numbered and not _is_same_range(column, node.id)

    return [key for key in keys if not by_chance(*key)]
