"""Writes the draft of a node or an edge table: its id or ends, its label and split, then what its columns become.

Each column is used, or a comment says why it is not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from trainer.core.graph_attrs import attr_name
from trainer.data.raw_arrays import split_prefix
from trainer.sources.table_columns import as_double, as_text, split_sql
from trainer.sources.table_database import ROW_NUMBER, quoted
from trainer.sources.table_facts import MOST_CLASSES, TIMES, Column, FoundTable, Keys, key_sql, triple, why_no_id

_LABELS = ("label", "labels", "y", "class", "target")

_RATINGS = ("rating", "ratings", "stars", "score")

_RELATIONS = ("relation", "rel", "predicate", "edge_type", "link_type")

#: names of columns that are no ids
NO_ID = (*TIMES, *_LABELS, *_RATINGS, *_RELATIONS, "count", "weight", "value", "quantity", "price")

#: names of columns that are predicted
OUTCOMES = re.compile(
    r"(is_|has_|will_)?(label|labels|y|class|target|outcome|churn|churned|fraud|default|defaulted|convert|converted|"
    r"response|ltv|lifetime_value)|(label|target|y|will)_.*|.*_(label|target)"
)

Drafted: TypeAlias = tuple[dict[str, Any], list[str]]  #: options of a table, and comments on them


def draft_of(
    nodes: Mapping[str, Drafted], edges: Mapping[str, Drafted], unused: Iterable[FoundTable], why: str
) -> dict[str, Any]:  # fmt: skip
    """Return the draft of node and edge tables by type. ``why``: what the ``unused`` tables lack."""
    drafted = {
        "nodes": {of: table for of, (table, _) in nodes.items()},
        "edges": {of: table for of, (table, _) in edges.items()},
        "comments": {
            "nodes": {of: notes for of, (_, notes) in nodes.items() if notes},
            "edges": {of: notes for of, (_, notes) in edges.items() if notes},
            "unused": [f"{table.file} is not used: {why_no_id(table) or why}" for table in unused],
        },
    }
    # without reverse edges, a type without incoming edges would receive no messages
    return drafted | ({"undirected": True} if len(nodes) > 1 else {})


def node_table(table: FoundTable, keys: Keys) -> Drafted:
    """Draft a table of nodes. ``keys``: its columns with ids of other nodes."""
    own = table.own_id(keys)
    drafted: dict[str, Any] = {**table.file_keys, "id": own.name if own else ROW_NUMBER}
    notes = about_files(table)
    rest = [one for one in table.columns if one is not own and one not in (column for column, _ in keys)]
    split = next((one for one in rest if one.is_split), None)

    # the label: by its name, the only classes beside a split, the only column with two values and gaps, an outcome
    named = (one for one in rest if one.name.lower() in _LABELS)
    label = next((one for one in named if one.kind != "empty" and not one.is_too_large), None)
    if label is None and split is not None:
        few = (one for one in rest if one is not split and 2 <= len(one.texts or ()) <= MOST_CLASSES)
        classes = [one for one in few if one.may_be_id and one.name.lower() not in TIMES]
        label = classes[0] if len(classes) == 1 else None
    if label is None:
        known = [one for one in rest if one.is_binary and one.missing]
        if len(known) == 1:
            label = known[0]
            values = " or ".join((label.texts or ())[:2]) if label.kind == "text" else "0 or 1"
            notes.append(f"{label.name} is {values}, and empty in {label.missing} of the rows: taken as the label")
        elif known:
            names = " and ".join(one.name for one in known)
            notes.append(
                f"{names} have two values, and are empty in some rows: one may be the label; take it out below"
            )
    if label is None:
        label = next((one for one in rest if OUTCOMES.fullmatch(one.name.lower()) and one.is_class), None)
        if label is not None:
            notes.append(f"{label.name} is taken as the label, for its name")
    if label is not None and label.mostly_numbers:
        notes.append(
            f"{label.name}: {label.present - label.numbers:,} of its {label.present:,} values are not numbers, such as "
            f"{(label.not_a_number or '')[:40]!r}, so each text is a class; if these mean no label, list them under "
            "null_values"
        )
    if label is not None and label.whole and (label.low, label.distinct) == (-1, 2):
        notes.append(f"{label.name}: -1 means no label, and all others are one class; if it is a class, write 0 for it")

    rest = [one for one in rest if one is not label and one is not split]
    if label is not None:
        drafted["label"] = label.name
        split = checked_split(table, split, label, notes)
    if split is not None:
        drafted["split"] = split.name
    elif label is not None:
        drafted["split"] = {"train": 0.8, "val": 0.1, "test": 0.1}
    more, of_others = other_columns(table, rest, True, label)
    return drafted | more, notes + of_others


def edge_table(table: FoundTable, source: Column, target: Column) -> Drafted:
    drafted: dict[str, Any] = {**table.file_keys, "source": source.name, "target": target.name}
    rest = [one for one in table.columns if one is not source and one is not target]
    relation = next((one for one in triple(table)[1:2] if one in rest), None)
    weight = next((one for one in rest if one.name.lower() == "weight" and one.kind == "number"), None)
    if weight is not None and (weight.low < 0 or weight.missing or weight.is_too_large):
        weight = None
    split = next((one for one in rest if one.is_split and len(one.texts or ()) > 1), None)
    if table.is_split_by_file:
        split = None
    for key, column in (("weight", weight), ("split", split)):
        if column is not None:
            drafted[key] = column.name
    notes = []
    if relation is not None and (split or table.is_split_by_file):
        drafted["relation"] = relation.name
        rest.remove(relation)
        notes.append(f"{relation.name}: its {relation.distinct} texts are taken as relations, each an edge type")
    more, of_others = other_columns(table, [one for one in rest if one is not weight and one is not split], False)
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
    return drafted | more, about_files(table) + notes


def edge_tables(
    edges: Iterable[FoundTable], nodes: Iterable[FoundTable], keys: Mapping[FoundTable, Keys]
) -> dict[str, Drafted]:  # fmt: skip
    """Draft ``edges``, whose keys are source and target, and an edge table from each key of ``nodes`` to its rows."""
    found: dict[str, Drafted] = {}
    for table in edges:
        (source, a), (target, b) = keys[table]
        drafted, notes = edge_table(table, source, target)
        more, about = dangling(table, keys[table])
        found[f"{a.node_type}__{table.type_name}__{b.node_type}"] = drafted | more, notes + about
    for table in nodes:
        own = table.own_id(keys[table])
        for column, node in keys[table]:
            word = re.sub(r"[^a-z0-9]+", "_", column.name.lower()).strip("_") or "key"
            words = itertools.chain(
                [] if node is table else ["has"], [word], (f"{word}_{k}" for k in itertools.count(2))
            )
            names = (f"{node.node_type}__{each}__{table.node_type}" for each in words)
            more, about = dangling(table, [(column, node)])
            drafted = {**table.file_keys, "source": column.name, "target": own.name if own else ROW_NUMBER}
            found[next(name for name in names if name not in found)] = drafted | more, about
    return found


def dangling(table: FoundTable, keys: Keys, what: str = "edges") -> Drafted:
    """Draft what becomes of the rows without an id, or with an id of no node: they are no ``what``."""
    notes = []
    for column, node in keys:
        assert node.id is not None
        own, ids = (key_sql(quoted(one.name)) for one in (column, node.id))
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


def about_files(table: FoundTable) -> list[str]:
    """Return comments on what was guessed from the names and the first lines of a table's files."""
    files = [str(table.file_keys[key]) for key in ("files", "val_files", "test_files") if key in table.file_keys]
    found = [f"{', '.join(files)} have equal columns: taken as one table with a split"] if len(files) > 1 else []
    if table.scan.options.encoding:
        found.append(f"encoding: the file is not in UTF-8; {table.scan.options.encoding} is a guess")
    if table.scan.options.columns:
        found.append("the first line seems to be a row of data: if it has names, remove `columns` and use these")
    return found


def checked_split(table: FoundTable, split: Column | None, label: Column, notes: list[str]) -> Column | None:
    """Return the column ``split``, or None, with a note, if it has a value in rows without a label."""
    if split is None:
        return None
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


def other_columns(table: FoundTable, rest: Sequence[Column], of_nodes: bool, label: Column | None = None) -> Drafted:
    """Draft the use of all columns but id, label, split, ends and weight. Each is used, or named in the comments.

    Texts become 0/1 columns if there are few. If there are more, they become categories ``of_nodes``, whose embeddings
    the trainer learns, unless most of them occur only once. Columns that tell the ``label`` are left out.
    """
    drafted: dict[str, Any] = {}
    notes = []
    time = next((one for one in rest if one.is_time and not one.missing), None)
    if time is not None:
        drafted["time"] = time.name
    keys = [one for one in rest if one.whole and one.name.lower().endswith("id")]
    told = {one: why for one in rest if label is not None and (why := _tells(table, one, label))}
    usable = [one for one in rest if one not in told and not one.looks_like_split]
    numbers = [
        one for one in usable
        if one.kind in ("number", "list") and one is not time and one not in keys and not one.is_too_large
    ]  # fmt: skip
    if numbers:
        drafted["features"] = [one.name for one in numbers]
        if any(one.kind == "number" for one in numbers):
            drafted["standardize"] = True
        if gaps := [one for one in numbers if one.kind == "number" and one.missing]:
            drafted["fill"] = 0
            notes.append("fill: empty cells become 0: " + ", ".join(f"{one.name} ({one.missing})" for one in gaps))
    texts = [one for one in usable if one.kind == "text" and not (one.mostly_numbers or one.is_written_otherwise)]
    most = min(64, max(2, table.rows // 2))
    if few := [one for one in texts if one.texts and len(one.texts) <= most]:
        drafted["one_hot"] = [one.name for one in few]
    many = [one for one in texts if of_nodes and one not in few and one.distinct <= min(10_000, table.rows // 2)]
    for one in many:
        if split_prefix(attr_name(one.name)) is not None:
            told[one] = "categories of nodes cannot have the name of a split; rename the column"
    many = [one for one in many if one not in told]
    if many:
        drafted["categories"] = [one.name for one in many]
    unused = [one for one in rest if one is not time and one not in (*numbers, *few, *many)]
    return drafted, notes + [f"{one.name} is not used: {told.get(one) or _why_unused(one, most)}" for one in unused]


def _tells(table: FoundTable, column: Column, label: Column) -> str:
    """Return why a column may not be a feature because it tells the label, as what is known only afterwards does; ''.

    It does if nearly all rows with an equal value have the same label, or, of numbers, all rows beside each other, or
    if the rows in which it is not empty do.
    """
    if column.kind == label.kind == "number" and label.distinct > MOST_CLASSES:
        pair = (as_double(one.name, one.type) for one in (column, label))
        (same,) = table.scan.database.rows(
            f"SELECT abs(corr({', '.join(pair)})) > 0.999 FROM {table.scan.sql}", table.scan.where
        )[0]
        why = f"a leak? it is proportional to {label.name}; if it is known beforehand, list it under features"
        return why if same else ""
    if column.kind not in ("number", "text", "time") or not 2 <= label.distinct <= MOST_CLASSES:
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
    if others < 5:
        return ""
    leak = f"a leak? it tells {label.name}"
    if 5 * few <= labelled and labelled - right <= others / 50:
        return f"{leak} in {right:,} of {labelled:,} rows; if it is known beforehand, list it under features or one_hot"
    if column.kind == "number" and filled > labelled / 2 and turns <= max(label.distinct - 1, others / 20):
        return f"{leak}: sorted by it, the labels are, too; if it is known beforehand, list it under features"
    if same and filled < labelled and (usual / labelled) ** filled < 1e-6:
        return f"{leak}: where it is not empty, {label.name} is the same; if it is known beforehand, list it"
    return ""


def _why_unused(column: Column, most_texts: int) -> str:
    """Return why the draft does not use a column, and what can be done."""
    if column.kind == "empty":
        return "it is empty"
    if column.looks_like_split:
        return "it looks like a split, which must be one column with the texts train, val and test"
    if column.kind == "twice":
        return "two columns have this name; rename one of them"
    if column.kind == "index":
        return "it numbers the rows, as the index that pandas writes"
    if column.kind == "uneven":
        return "its lists are not equally long, or some have missing values, NaN or infinity"
    if column.kind == "other":
        return f"values of type {column.type} are neither numbers, texts nor times"
    if column.kind == "time" and column.missing:
        return f"it is empty or infinite in {column.missing} of the rows, and a time must be in all"
    if column.kind == "time":
        return "another column is the time; attributes takes it as a further number if it is one"
    if column.is_too_large:
        return "it has infinite values, or larger ones than float32"
    if column.kind == "number":
        return "it looks like a key of another table; if it is a quantity, list it under features"
    if column.mostly_numbers:
        shown = "" if column.not_a_number is None else f", such as {column.not_a_number[:40]!r}"
        return (
            f"{column.present - column.numbers:,} of its {column.present:,} values are not numbers{shown}; if these "
            "mean missing values, list them under null_values, and the column under features, with fill"
        )
    if column.is_written_otherwise:
        return (
            f"its values, such as {(column.texts or ('',))[-1]!r}, are neither numbers as 1234.5 nor times as "
            "2024-05-17; write them so, or list it under one_hot or categories"
        )
    if column.distinct == column.present:
        return "it has another text in each row, as names have"
    return (
        f"its {column.distinct:,} different texts are more than the {most_texts:,} for which one_hot is drafted; "
        "list it under categories to get their codes"
    )
