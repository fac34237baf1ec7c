"""Converts node and edge tables to memory-mapped arrays, with DuckDB.

The nodes of each type are numbered from 0 in the order of the rows, and ids in edge tables are replaced by these
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.graph_attrs import CATEGORIES, KEY_COLUMNS, attr_name, encode_texts, key_attr
from trainer.core.rng import hashed
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.data.dataset import EdgeData
from trainer.data.options import MOST_CLASSES
from trainer.data.raw_arrays import SPLIT_SUFFIXES, RawArray, RawGraph, split_prefix
from trainer.data.work_arrays import kept_edges
from trainer.sources.table_arrays import ArrayColumn, TableArrays, number_array, row_ranges
from trainer.sources.table_columns import (
    NESTED,
    NumberColumn,
    as_double,
    as_text,
    categories,
    check_ids,
    check_numbers,
    class_sql,
    code_sql,
    has_decimal_texts,
    ids_are_integers,
    integer_id,
    label_sql,
    list_type,
    one_hot,
    scale_note,
    split_sql,
    standardized,
    text_id,
    time_sql,
)
from trainer.sources.table_database import Database, Scan, quoted
from trainer.sources.table_database import text as sql_text
from trainer.sources.table_files import files_of_splits, source_folder, table_files
from trainer.sources.table_options import EDGE_SPLIT, SPLITS, EdgeTable, NodeTable, Table, TablesOptions, TaskTable

_MOST_ONE_HOT = 1024  #: most texts of a column of ``one_hot``

_MOST_RELATIONS = 1000  #: edge types that a column ``relation`` may make

_RELATION = "gf_relation"  #: attribute of edges while they are read

HAS = "has"  #: relation of the edges from entities to the rows of a task table

LISTS = "lists"  #: relation of the edges from the rows of a task table to the targets in their label

_ROWS_AT_ONCE = 1 << 20

COLUMNS = "columns"  #: last word of graph attributes with the names of the columns of ``y``, uint8 [columns, bytes]


def read_tables(source: str | None, options: TablesOptions, scratch: Scratch) -> RawGraph:
    """Read node and edge tables into arrays, which are files in ``scratch.folder``. The folder must be empty.

    DuckDB uses at most ``scratch.memory`` bytes, and writes what does not fit to the same folder.

    Every node type has attribute ``id``: int64 [N] if all ids of the type are integers, else UTF-8 bytes, uint8 [N,
    bytes] (``decode_texts``). Raises ``DataError`` that names file and row of the first problem.
    """
    database = Database(scratch.folder, scratch.memory)
    try:
        return _Conversion(database, TableArrays(database, scratch.folder), source_folder(source), options).graph(
            source
        )
    finally:
        database.close()


@dataclass
class _Conversion:
    database: Database
    arrays: TableArrays
    source: Path
    options: TablesOptions
    integers: dict[NodeType, bool] = field(default_factory=dict)  #: whether the ids of a type are integers
    decimals: dict[NodeType, bool] = field(default_factory=dict)  #: whether texts like 12.0 are ids of a type
    names: dict[str, Array] = field(default_factory=dict)  #: graph attribute -> texts of codes
    notes: list[str] = field(default_factory=list)
    relations: dict[str, list[str]] = field(default_factory=dict)  #: edge table -> relations of its edge types
    enums: int = 0  #: number of types defined for categories

    def graph(self, source: str | None) -> RawGraph:
        nodes = {of: self._scan(f"nodes.{of}", table) for of, table in self.options.nodes.items() if table.files}
        edges = {of: self._scan(f"edges.{type_name(of)}", table) for of, table in self.options.edges.items()}
        for edge_type, scan in edges.items():
            check_ids(scan, self.options.edges[edge_type].source, "source")
            check_ids(scan, self.options.edges[edge_type].target, "target")
        counts, node_arrays = {}, {}
        for k, (of, table) in enumerate(self.options.nodes.items()):
            ids = [(nodes[of], table.id, "id")] if of in nodes else []
            for edge_type, scan in edges.items() if of not in nodes else ():
                edge_table = self.options.edges[edge_type]
                ids += [(scan, edge_table.source, "source")] if edge_type[0] == of else []
                ids += [(scan, edge_table.target, "target")] if edge_type[2] == of else []
            if not ids:
                raise DataError(f"nodes.{of} has no files, and no edge table has this type as source or target")
            integers = [ids_are_integers(*column) for column in ids]  # all are checked
            self.integers[of] = all(integers)
            self.decimals[of] = any(has_decimal_texts(scan, column) for scan, column, _ in ids)
            counts[of], node_arrays[of] = (
                self._nodes(of, table, nodes[of], f"nodes{k}")
                if of in nodes
                else self._nodes_of_edges(of, ids, f"nodes{k}")
            )
        number_of = {of: f"nodes{k}" for k, of in enumerate(self.options.nodes)}
        edge_arrays: dict[EdgeType, dict[str, RawArray]] = {}
        for k, (edge_type, scan) in enumerate(edges.items()):
            edge_table = self.options.edges[edge_type]
            arrays = self._edges(edge_type, edge_table, scan, number_of, f"edges{k}")
            parts = self._by_relation(edge_type, arrays, scan) if edge_table.relation else {edge_type: arrays}
            if repeated := set(parts) & set(edge_arrays):
                raise DataError(f"{scan.where}: edge type {type_name(min(repeated))} is also in another table")
            edge_arrays |= parts
        for of, task in self.options.tasks.items():
            counts[of], node_arrays[of], of_task = self._task(of, task, number_of)
            edge_arrays |= of_task
            known, times = node_arrays[task.entity].get("time"), node_arrays[of].get("time")
            if known is not None and times is not None:
                ends = of_task[task.entity, HAS, of]["edge_index"].values
                pieces = (ends[:, first : first + _ROWS_AT_ONCE] for first in range(0, ends.shape[1], _ROWS_AT_ONCE))
                if early := sum(int((known.values[whose] > times.values[rows]).sum()) for whose, rows in pieces):
                    self.notes.append(
                        f"tasks.{of}: {early:,} of {counts[of]:,} rows are earlier than their {task.entity} node, and "
                        f"with time_attr do not see it: is it known from {self.options.nodes[task.entity].time} on?"
                    )
        if not self.hetero:
            (only,) = node_arrays
            node_arrays, counts = {HOMO_NODE: node_arrays[only]}, {HOMO_NODE: counts[only]}
            edge_arrays = {HOMO_EDGE: next(iter(edge_arrays.values()))}
        plain = {name: RawArray(texts, "tables") for name, texts in self.names.items()}
        name = self.source.resolve().name if source else "tables"
        return RawGraph(name, plain, node_arrays, edge_arrays, counts, hetero=self.hetero, notes=tuple(self.notes))

    @property
    def hetero(self) -> bool:
        edges, several = self.options.edges.values(), max(len(self.options.nodes), len(self.options.edges)) > 1
        return several or bool(self.options.tasks) or any(table.relation for table in edges)

    def _scan(self, where: str, table: Table) -> Scan:
        return Scan(self.database, table_files(table, self.source, where), where, table, table.used_columns())

    def _id(self, scan: Scan, column: str, of: NodeType) -> str:
        return self._id_of(quoted(column), scan.types[column], of)

    def _id_of(self, name: str, sql_type: str, of: NodeType) -> str:
        return integer_id(name, sql_type) if self.integers[of] else text_id(name, sql_type, self.decimals[of])

    # --- nodes ------------------------------------------------------------------------------------------------

    def _nodes(self, of: NodeType, table: NodeTable, scan: Scan, name: str) -> tuple[int, dict[str, RawArray]]:
        """Return the number of nodes of a type and their attributes.

        Creates database table ``<name>_ids`` (number, id).
        """
        ((count,),) = self.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)
        if count == 0:
            raise DataError(f"{scan.where}: {scan.files[0]} has no rows")
        columns = self._columns(of, table, scan, "x")
        id_ = self._id(scan, table.id, of)
        columns.append(ArrayColumn("id", [id_], np.dtype(np.int64) if self.integers[of] else None))
        if table.label:
            columns.append(self._label(of, table.label, scan))
        self.database.run(f"CREATE TABLE {name}_ids AS SELECT rowid AS number, {id_} AS id FROM {scan.sql}", scan.where)
        sql = f"SELECT id, count(*), min(number), max(number) FROM {name}_ids GROUP BY id HAVING count(*) > 1"
        ((repeated,),) = self.database.rows(f"SELECT count(*) FROM ({sql})", scan.where)
        if repeated:
            value, _, first, again = self.database.rows(f"{sql} ORDER BY min(number) LIMIT 1", scan.where)[0]
            raise DataError(
                f"{scan.where}: {repeated:,} ids occur more than once in column {table.id!r}, first {value!r}: "
                f"{scan.place(first)}, and {scan.place(again)}; every node needs one row"
            )
        arrays = {each.name: self.arrays.export(each, scan.sql, scan.where, count) for each in columns}
        arrays |= self._splits(table, scan, count, arrays.get("y"), arrays.get("time"))
        scan.close()
        kind = "integers" if self.integers[of] else "texts"
        self.notes.append(f"{scan.where}: {count:,} nodes, ids in {table.id} ({kind}){_attrs_text(columns)}")
        sizes = [f"{len(arrays[f'{split}_idx'].values):,} {split}" for split in SPLITS if f"{split}_idx" in arrays]
        if sizes:
            self.notes.append(f"{scan.where}: splits: {', '.join(sizes)}")
        return count, arrays

    def _task(
        self, of: NodeType, table: TaskTable, number_of: Mapping[NodeType, str]
    ) -> tuple[int, dict[str, RawArray], dict[EdgeType, dict[str, RawArray]]]:  # fmt: skip
        """Return the number of rows of a task table, the attributes of its nodes, and their edges.

        These are the edges from the entities and, if the label is a list, those to the targets. The columns of the
        row's key, entity and time, become attributes ``key_<column>`` of texts.
        """
        scan = self._scan(f"tasks.{of}", table)
        ids_are_integers(scan, table.id, "entity")  # checks them
        name, entity = f"task_{of}", self._id(scan, table.id, table.entity)
        rows = (
            f"CREATE OR REPLACE TABLE {name} AS SELECT gf_row, s.number AS gf_s, gf_row AS gf_t FROM "
            f"(SELECT rowid AS gf_row, {entity} AS gf_entity FROM {scan.sql}) r "
            f"LEFT JOIN {number_of[table.entity]}_ids s ON s.id = r.gf_entity ORDER BY gf_row"
        )
        self.database.run(rows, scan.where)
        count, bad, first = self.database.rows(
            f"SELECT count(*), count(*) FILTER (WHERE gf_s IS NULL), min(gf_row) FILTER (WHERE gf_s IS NULL) "
            f"FROM {name}",
            scan.where,
        )[0]
        if bad:
            wrong = (
                f"{scan.first(table.id, f'rowid = {first}')}, which is not in column "
                f"{self.options.nodes[table.entity].id!r} of nodes.{table.entity} ({bad:,} such rows of {count:,})"
            )
            if table.dangling != "drop":
                raise DataError(f"{wrong}; correct the tables, or set `dangling: drop`")
            if bad == count:
                raise DataError(f"{wrong}: `dangling: drop` would drop all rows; write the ids of both in the same way")
            scan.keep(f"SELECT gf_row FROM {name} WHERE gf_s IS NOT NULL")
            self.database.run(rows, scan.where)
            self.notes.append(
                f"{scan.where}: {bad:,} of {count:,} rows dropped, the entity is empty or not in its node table"
                + (f"; WARNING: these are most ({wrong})" if 2 * bad > count else "")
            )
            count -= bad
        if count == 0:
            raise DataError(f"{scan.where}: {scan.files[0]} has no rows")
        columns = self._columns(of, table, scan, "x")
        if table.label and table.targets is None:
            columns.append(self._label(of, table.label, scan))
        keys = [*dict.fromkeys([table.id, *([table.time] if table.time else [])])]
        self.names[f"{of}__{KEY_COLUMNS}"] = encode_texts(keys)
        for key in keys:
            columns.append(ArrayColumn(key_attr(key), [f"coalesce(CAST({quoted(key)} AS VARCHAR), '')"], None))
        self._check_names(columns, scan)

        # The targets that the rows list, before any row is exported, since rows of one target each are united.
        edges: dict[EdgeType, dict[str, RawArray]] = {}
        listed = None
        if table.targets is not None:
            count = self._lists(table, scan, entity, name, number_of[table.targets])
            self.database.run(rows, scan.where)
            ((total,),) = self.database.rows(f"SELECT count(*) FROM {name}_lists", scan.where)
            lists = self._edge_index((of, LISTS, table.targets), f"{name}_lists", total, scan, count)
            self.database.run(f"DROP TABLE {name}_lists", scan.where)
            edges[of, LISTS, table.targets] = {"edge_index": lists}
            listed = np.zeros(count, bool)
            listed[lists.values[0]] = True
            empty = f"; {count - listed.sum():,} rows list none" if not listed.all() else ""
            self.notes.append(f"{scan.where}: {total:,} {table.targets} nodes in {table.label[0]}{empty}")
        arrays = {each.name: self.arrays.export(each, scan.sql, scan.where, count) for each in columns}
        arrays |= self._splits(table, scan, count, arrays.get("y"), arrays.get("time"), listed)
        edges[table.entity, HAS, of] = {
            "edge_index": self._edge_index((table.entity, HAS, of), name, count, scan, count)
        }
        self.database.run(f"DROP TABLE {name}", scan.where)
        scan.close()
        self.notes.append(f"{scan.where}: {count:,} rows about {table.entity} nodes{_attrs_text(columns)}")
        sizes = [f"{len(arrays[f'{split}_idx'].values):,} {split}" for split in SPLITS if f"{split}_idx" in arrays]
        if sizes:
            self.notes.append(f"{scan.where}: splits: {', '.join(sizes)}")
        return count, arrays, edges

    def _lists(self, table: TaskTable, scan: Scan, entity: str, name: str, targets: str) -> int:
        """Create database table ``<name>_lists`` (gf_s, gf_t): a task table's rows, and the targets that they list.

        Rows of a single target, without ``separator``, are united: the first row of an entity, time and split remains
        in the copy of the table. Returns the number of rows. ``entity``: SQL expression of a row's entity. ``targets``:
        number of the target type.
        """
        (column,) = table.label
        scan.check_column(column, "label")
        scan.check_file_columns([column])
        value, of = quoted(column), scan.types[column]
        element = list_type(of)
        if element is None and table.separator is not None:
            if of != "VARCHAR":
                raise DataError(f"{scan.where}: label {column!r} is {of}, and `separator` is for texts; leave it out")
            item = "trim(v, ' []''\"')"
            element, value = (
                "VARCHAR",
                f"[{scan.without_nulls(item, 'VARCHAR', is_label=True)} FOR v IN "
                f"string_split({value}, {sql_text(table.separator)})]",
            )
        united = element is None
        if element is None:
            check_ids(scan, column, "label")
            element, value = of, f"[{value}]"
        elif element.startswith(NESTED) or list_type(element) is not None:
            raise DataError(f"{scan.where}: label {column!r} is {of}, expected lists of ids of {table.targets} nodes")
        key = [entity, *([time_sql(scan, table.time)] if table.time else [])]
        key += [split_sql(scan, table.split)] if isinstance(table.split, str) else []
        first = f"min(rowid) OVER (PARTITION BY {', '.join(key)})" if united else "rowid"
        self.database.run(
            f"CREATE TABLE {name}_rows AS SELECT *, dense_rank() OVER (ORDER BY gf_first) - 1 AS gf_s "
            f"FROM (SELECT rowid AS gf_row, {first} AS gf_first FROM {scan.sql})",
            scan.where,
        )
        self.database.run(
            f"CREATE TABLE {name}_targets AS SELECT gf_row, gf_s, gf_text, t.number AS gf_t FROM (SELECT gf_row, gf_s, "
            f"{as_text('v', element)} AS gf_text, {self._id_of('v', element, table.targets or '')} AS gf_id FROM "
            f"(SELECT gf_row, gf_s, unnest({value}) AS v FROM {scan.sql} s JOIN {name}_rows r ON gf_row = s.rowid)) "
            f"LEFT JOIN {targets}_ids t ON t.id = gf_id WHERE trim(gf_text) != ''",
            scan.where,
        )
        unknown = f"FROM {name}_targets WHERE gf_t IS NULL"
        ((bad, total),) = self.database.rows(
            f"SELECT count(*) FILTER (WHERE gf_t IS NULL), count(*) FROM {name}_targets", scan.where
        )
        if bad:
            row, wrong = self.database.rows(
                f"SELECT gf_row, gf_text {unknown} ORDER BY gf_row, gf_text LIMIT 1", scan.where
            )[0]
            whose = self.options.nodes[table.targets or ""].id
            advice = (
                "if these are lists in texts, set `separator`" if united and of == "VARCHAR" else "correct the tables"
            )
            raise DataError(
                f"{scan.place(row)}: {column} has {wrong[:80]!r}, which is not in column {whose!r} of "
                f"nodes.{table.targets} ({bad:,} such targets of {total:,}); {advice}"
            )
        self.database.run(
            f"CREATE TABLE {name}_lists AS SELECT DISTINCT gf_s, gf_t FROM {name}_targets ORDER BY gf_s, gf_t",
            scan.where,
        )
        if united:
            scan.keep(f"SELECT gf_row FROM {name}_rows WHERE gf_row = gf_first")
        ((count,),) = self.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)
        for each in ("rows", "targets"):
            self.database.run(f"DROP TABLE {name}_{each}", scan.where)
        return int(count)

    def _nodes_of_edges(
        self, of: NodeType, ends: Sequence[tuple[Scan, str, str]], name: str
    ) -> tuple[int, dict[str, RawArray]]:  # fmt: skip
        """Number the different ids in columns of edge tables, in ascending order, as ``_nodes`` does those of a table.

        Integers are ordered by value, texts by their UTF-8 bytes.
        """
        where, ordered = f"nodes.{of}", f"{name}_ordered"
        columns = " UNION ALL ".join(
            f"SELECT {self._id(scan, column, of)} AS id FROM {scan.sql}" for scan, column, _ in ends
        )
        self.database.run(
            f"CREATE TABLE {ordered} AS SELECT DISTINCT id FROM ({columns}) WHERE id IS NOT NULL ORDER BY id", where
        )
        self.database.run(f"CREATE TABLE {name}_ids AS SELECT rowid AS number, id FROM {ordered}", where)
        ((count,),) = self.database.rows(f"SELECT count(*) FROM {ordered}", where)
        if count == 0:
            raise DataError(f"{where} has no files, and the edge tables have no ids of this type")
        id_ = ArrayColumn("id", ["id"], np.dtype(np.int64) if self.integers[of] else None)
        arrays = {"id": self.arrays.export(id_, ordered, where, count)}
        self.database.run(f"DROP TABLE {ordered}", where)
        kind = "integers" if self.integers[of] else "texts"
        found = ", ".join(dict.fromkeys(f"{column} of {scan.where}" for scan, column, _ in ends))
        self.notes.append(f"{where}: {count:,} nodes, the different {kind} in {found}")
        return count, arrays

    def _label(self, of: NodeType | EdgeType, names: Sequence[str], scan: Scan) -> ArrayColumn:
        """Return attribute ``y``: classes as int64 (empty: -1), or numbers as float32 (empty: NaN).

        Several columns, or one of lists, are numbers: [N, D].
        """
        column = names[0]
        for name in names:
            scan.check_column(name, "label")
        if len(names) > 1 or list_type(scan.types[column]) is not None:
            columns = [NumberColumn(name, *label_sql(scan, name), whole=False) for name in names]
            if len(names) > 1:
                self.names[f"{self._prefix(of)}y__{COLUMNS}"] = encode_texts(names)
            return number_array("y", columns, np.float32)
        num_classes, most = None, MOST_CLASSES
        if self.options.target in (None, of) and (isinstance(of, str) or self.options.num_classes == 0):
            num_classes = self.options.num_classes
        if isinstance(of, str):  # more classes than nodes are most often ids
            ((most,),) = self.database.rows(f"SELECT count(*) FROM {scan.sql}", scan.where)
        found = class_sql(scan, column, num_classes, most)
        if found is None and num_classes == 0:
            raise DataError(
                f"{scan.where}: label {column!r} has values that are no numbers, and `num_classes: 0` says that labels "
                "are numbers; leave it out to learn classes"
            )
        if found is None:
            return self._codes(of, "y", column, scan, "label")
        sql, is_class = found
        if is_class:
            number = as_double(column, scan.types[column])
            none, classes, rows = self.database.rows(
                f"SELECT count(CASE WHEN {number} = -1 THEN 1 END), count(DISTINCT nullif({sql}, -1)), count({number}) "
                f"FROM {scan.sql}",
                scan.where,
            )[0]
            if none:
                note = f"{scan.where}: {none:,} of {rows:,} labels are -1, which means no label"
                only = "; WARNING: all others are one class: if -1 is a class, too, write 0 in its place"
                self.notes.append(note + only * (classes == 1))
        return ArrayColumn("y", [sql], np.dtype(np.int64 if is_class else np.float32))

    def _prefix(self, of: NodeType | EdgeType) -> str:
        """Return what the names of graph attributes about attributes of a type begin with."""
        if isinstance(of, str):
            return f"{of}__" if self.hetero else ""
        return f"{type_name(of if self.hetero else HOMO_EDGE)}__"

    def _codes(self, of: NodeType | EdgeType, name: str, column: str, scan: Scan, role: str) -> ArrayColumn:
        texts = categories(scan, column, role)
        self.enums += 1
        sql = code_sql(scan, column, texts, f"categories{self.enums}")
        self.names[f"{self._prefix(of)}{name}__{CATEGORIES}"] = encode_texts(texts or [""])
        self.notes.append(f"{scan.where}: {column} → {name}: {_listed(texts)}")
        return ArrayColumn(name, [sql], np.dtype(np.int64))

    def _splits(
        self, table: NodeTable, scan: Scan, count: int, y: RawArray | None, times: RawArray | None,
        listed: Array | None = None,
    ) -> dict[str, RawArray]:  # fmt: skip
        """Return the nodes of each split. Raises ``DataError`` for a node without a label that is in a split.

        ``listed``: the rows of a task table that list targets, bool [count]; others are in no split.
        """
        labelled: Array = np.ones(count, bool) if listed is None else listed
        if y is not None:
            values = np.asarray(y.values).reshape(count, -1)
            labelled = np.asarray((~np.isnan(values) if values.dtype.kind == "f" else values >= 0).any(1))
        if isinstance(table.split, str):
            word = split_sql(scan, table.split)
            found = {
                split: self.database.arrays(
                    f"SELECT rowid AS gf_row FROM {scan.sql} WHERE {word} = '{split}' ORDER BY rowid", scan.where
                )["gf_row"]
                for split in SPLITS
            }
            if listed is not None:
                found = {split: ids[listed[ids]] for split, ids in found.items()}
            nodes = np.concatenate(list(found.values()))
            if len(bad := nodes[~labelled[nodes]]):
                raise DataError(
                    f"{scan.first(table.label[0], f'rowid = {bad.min()}')} ({len(bad):,} such rows), but {table.split} "
                    "has a value; only nodes with a label can be in a split"
                )
        elif table.split is not None:
            found = _drawn(table.split, np.flatnonzero(labelled), times)
            if times is not None:
                sizes = [len(found.get(split, ())) for split in SPLITS]
                self._note_empty_splits(table.split, sizes, times.values, scan)
        else:
            return {}
        return {f"{split}_idx": RawArray(ids, scan.where) for split, ids in found.items() if len(ids)}

    def _note_empty_splits(
        self, split: Mapping[str, float], sizes: Sequence[int], times: Array, scan: Scan
    ) -> None:  # fmt: skip
        """Note which splits that begin at given times got none of the rows, whose times may have another unit."""
        empty = [name for name, size in zip(SPLITS, sizes, strict=True) if not size]
        if "val_time" in split and empty and any(sizes):
            self.notes.append(
                f"{scan.where}: WARNING: no row is in {' or '.join(empty)}: val begins at {split['val_time']:.0f}, "
                f"test at {split['test_time']:.0f}, and the times are {times.min()} to {times.max()}; write val_time "
                "and test_time in the unit of the times (dates are Unix seconds)"
            )

    # --- edges ------------------------------------------------------------------------------------------------

    def _edges(
        self, of: EdgeType, table: EdgeTable, scan: Scan, number_of: Mapping[NodeType, str], name: str
    ) -> dict[str, RawArray]:
        source, target = self._id(scan, table.source, of[0]), self._id(scan, table.target, of[2])
        self.database.run(
            f"CREATE TABLE {name} AS SELECT gf_row, s.number AS gf_s, t.number AS gf_t "
            f"FROM (SELECT rowid AS gf_row, {source} AS gf_source, {target} AS gf_target FROM {scan.sql}) e "
            f"LEFT JOIN {number_of[of[0]]}_ids s ON s.id = e.gf_source "
            f"LEFT JOIN {number_of[of[2]]}_ids t ON t.id = e.gf_target ORDER BY gf_row",
            scan.where,
        )
        if self.database.rows(f"SELECT count(*) FROM {name}", scan.where) == [(0,)]:
            raise DataError(f"{scan.where}: {scan.files[0]} has no rows")
        count = self._check_dangling(of, table, scan, name, number_of)
        columns = self._columns(of, table, scan, "edge_attr")
        if table.weight is not None:
            (weight,) = check_numbers(scan, [table.weight], "weight", table.fill)
            if weight.width:
                raise DataError(f"{scan.where}: weight {table.weight!r} has lists; it must be one number for each edge")
            columns.append(number_array("edge_weight", [weight], np.float32))
        if table.label:
            columns.append(self._label(of, table.label, scan))
        if table.has_split and not isinstance(table.split, Mapping):
            columns.append(self._edge_split(of, table, scan))
        if table.relation is not None:
            # The position of each edge's relation in ``self.relations``.
            texts = categories(scan, table.relation, "relation", _MOST_RELATIONS)
            empty = f"{as_text(table.relation, scan.types[table.relation])} IS NULL"
            ((missing,),) = self.database.rows(f"SELECT count(*) FROM {scan.sql} WHERE {empty}", scan.where)
            if missing:
                raise DataError(
                    f"{scan.first(table.relation, empty)} ({missing:,} such rows); every edge needs a relation"
                )
            words = [re.sub(r"[^A-Za-z0-9.+-]+", "_", text).strip("_") for text in texts]
            for text, word in zip(texts, words, strict=True):
                if not word or words.count(word) > 1:
                    same = [other for other in texts if words[texts.index(other)] == word and other != text]
                    what = f"gives the same name as {same[0]!r}" if same else "gives no name of letters and digits"
                    raise DataError(f"{scan.where}: {table.relation} {text!r} {what}; rename it in the table")
            self.enums += 1
            self.relations[scan.where] = words
            codes = code_sql(scan, table.relation, texts, f"categories{self.enums}")
            columns.append(ArrayColumn(_RELATION, [codes], np.dtype(np.int64)))
        self._check_names(columns, scan)
        arrays = {each.name: self.arrays.export(each, scan.sql, scan.where, count) for each in columns}
        arrays["edge_index"] = self._edge_index(of, name, count, scan)
        if table.label and table.has_split and not self._holds_out(of):
            arrays[EDGE_SPLIT] = self._labelled_split(table, arrays, scan)
            whose = type_name(of if self.hetero else HOMO_EDGE)
            self.names[f"{whose}__{KEY_COLUMNS}"] = encode_texts([table.source, table.target])
        self.database.run(f"DROP TABLE {name}", scan.where)
        scan.close()
        self.notes.append(f"{scan.where}: {count:,} edges{_attrs_text(columns)}")
        return arrays

    def _by_relation(
        self, of: EdgeType, arrays: dict[str, RawArray], scan: Scan
    ) -> dict[EdgeType, dict[str, RawArray]]:  # fmt: skip
        """Divide the edges of a table by their relation, into edge types with the table's node types."""
        codes, index = arrays.pop(_RELATION).values, arrays.pop("edge_index").values
        data = EdgeData(index, {name: array.values for name, array in arrays.items()})
        found: dict[EdgeType, dict[str, RawArray]] = {}
        texts = {name: self.names.pop(name) for name in [*self.names] if name.startswith(self._prefix(of))}
        for code, word in enumerate(self.relations[scan.where]):
            own = (of[0], word, of[2])
            name = f"{len(found):04d}-{type_name(of)[:100]}"
            kept = kept_edges(
                data, lambda piece, code=code: codes[piece] == code, Scratch(self.arrays.folder, 0), name  # type: ignore[misc]
            )  # fmt: skip
            found[own] = {"edge_index": RawArray(kept.edge_index, scan.where)} | {
                attr: RawArray(values, scan.where) for attr, values in kept.attrs.items()
            }
            self.names |= {
                self._prefix(own) + name.removeprefix(self._prefix(of)): of_codes for name, of_codes in texts.items()
            }
        sizes = sorted(((arrays["edge_index"].values.shape[1], own[1]) for own, arrays in found.items()), reverse=True)
        shown = ", ".join(f"{word} {size:,}" for size, word in sizes[:5])
        self.notes.append(f"{scan.where}: {len(found)} relations ({shown}{', …' if len(sizes) > 5 else ''})")
        return found

    def _edge_split(self, of: EdgeType, table: EdgeTable, scan: Scan) -> ArrayColumn:
        """Return attribute ``edge_split``, int8: 0 train, 1 val, 2 test; -1 none, if the edges have labels.

        Raises ``DataError`` for an edge without a label to which the column gives a split.
        """
        if isinstance(table.split, str):
            none, word = 0, split_sql(scan, table.split)
            if table.label and not self._holds_out(of):
                none = -1
                empty = [f"{as_text(name, scan.types[name])} IS NULL" for name in table.label]
                bad = f"{word} IS NOT NULL AND {' AND '.join(empty)}"
                ((count,),) = self.database.rows(f"SELECT count(*) FROM {scan.sql} WHERE {bad}", scan.where)
                if count:
                    raise DataError(
                        f"{scan.first(table.label[0], bad)} ({count:,} such rows), but {table.split} has a value; only "
                        "edges with a label can be in a split"
                    )
            sql = f"CASE {word} WHEN 'val' THEN 1 WHEN 'test' THEN 2 WHEN 'train' THEN 0 ELSE {none} END"
        else:
            train, val, _ = files_of_splits(table, self.source, scan.where)
            first = sum(map(scan.row_count, train)) if scan.sql else 0
            last = first + sum(map(scan.row_count, val))
            sql = f"CASE WHEN {scan.file_row} < {first} THEN 0 WHEN {scan.file_row} < {last} THEN 1 ELSE 2 END"
        return ArrayColumn(EDGE_SPLIT, [f"CAST({sql} AS TINYINT)"], np.dtype(np.int8))

    def _holds_out(self, of: EdgeType) -> bool:
        """Return whether option ``hold_out`` takes the links of a table's split out of the edges, also with labels."""
        name = type_name(of if self.hetero else HOMO_EDGE)
        return self.options.hold_out_split is not None and self.options.hold_out == name

    def _labelled_split(self, table: EdgeTable, arrays: Mapping[str, RawArray], scan: Scan) -> RawArray:
        """Return attribute ``edge_split`` of edges with labels, with -1 for edges without a label.

        A table's shares are drawn by a hash of the edges' numbers. Otherwise the splits begin at the table's times.
        """
        y, sizes = arrays["y"].values, np.zeros(len(SPLITS), np.int64)
        out = self.arrays.empty(EDGE_SPLIT, np.dtype(np.int8), (len(y),))
        for begin, end in row_ranges(len(y), 64):
            values = np.asarray(y[begin:end]).reshape(end - begin, -1)
            labelled = (~np.isnan(values) if values.dtype.kind == "f" else values >= 0).any(1)
            if isinstance(table.split, Mapping) and "val_time" in table.split:
                begins = [table.split["val_time"], table.split["test_time"]]
                split = np.searchsorted(begins, arrays["edge_time"].values[begin:end], "right").astype(np.int8)
            elif isinstance(table.split, Mapping):
                place = (hashed(np.arange(begin, end, dtype=np.uint64)) >> np.uint64(11)) / float(1 << 53)
                limits = np.cumsum([table.split.get(name, 0.0) for name in SPLITS])
                split = np.searchsorted(limits, place, "right").astype(np.int8)
                split[split == len(SPLITS)] = -1
            else:
                split = np.asarray(arrays[EDGE_SPLIT].values[begin:end])
            out[begin:end] = np.where(labelled, split, -1)
            sizes += np.bincount(out[begin:end][out[begin:end] >= 0], minlength=len(SPLITS))
        if isinstance(table.split, Mapping) and "edge_time" in arrays:
            self._note_empty_splits(table.split, sizes.tolist(), arrays["edge_time"].values, scan)
        named = zip(sizes, SPLITS, strict=True)
        self.notes.append(f"{scan.where}: splits: {', '.join(f'{size:,} {split}' for size, split in named if size)}")
        return RawArray(out, scan.where)

    def _check_dangling(
        self, of: EdgeType, table: EdgeTable, scan: Scan, name: str, number_of: Mapping[NodeType, str]
    ) -> int:
        """Return the number of edges whose source and target are in their node tables.

        With ``dangling: drop``, other edges are removed from database table ``name`` and from the copy of the edge
        table; without it, or if no edge is left, ``DataError`` is raised.
        """
        dangling = "gf_s IS NULL OR gf_t IS NULL"
        count, bad, sources, targets, first = self.database.rows(
            f"SELECT count(*), count(*) FILTER (WHERE {dangling}), count(*) FILTER (WHERE gf_s IS NULL), "
            f"count(*) FILTER (WHERE gf_t IS NULL), min(gf_row) FILTER (WHERE {dangling}) FROM {name}",
            scan.where,
        )[0]
        if not bad:
            return int(count)
        ends, counted = [], f"{sources:,} such sources and {targets:,} such targets of {count:,} edges"
        for column, end, key, missing in (
            (table.source, of[0], "gf_s", sources),
            (table.target, of[2], "gf_t", targets),
        ):
            if missing:
                found = self.database.rows(
                    f"SELECT CAST({quoted(column)} AS VARCHAR) FROM {scan.sql} t JOIN {name} e ON t.rowid = e.gf_row "
                    f"WHERE {key} IS NULL ORDER BY gf_row LIMIT 3",
                    scan.where,
                )
                ids = self.database.rows(f"SELECT id FROM {number_of[end]}_ids ORDER BY number LIMIT 3", scan.where)
                wrong = ", ".join(dict.fromkeys("empty" if one is None else repr(one[:80]) for (one,) in found))
                right = ", ".join(repr(one) for (one,) in ids)
                ends.append(f"{column} such as {wrong}; ids in {self.options.nodes[end].id or end} such as {right}")
        examples = "; ".join(ends)
        if table.dangling == "drop":
            if bad == count:
                raise DataError(
                    f"{scan.where}: `dangling: drop` would drop all {count:,} edges ({counted}): {examples}; write the "
                    "ids of both tables in the same way"
                )
            scan.keep(f"SELECT gf_row FROM {name} WHERE NOT ({dangling})")  # DELETE may number rows again at any time
            known = f"SELECT gf_s, gf_t FROM {name} WHERE NOT ({dangling}) ORDER BY gf_row"
            self.database.run(f"CREATE OR REPLACE TABLE {name} AS {known}", scan.where)
            self.notes.append(
                f"{scan.where}: {bad:,} of {count:,} edges dropped, an end is empty or not in its node table"
                + (f"; WARNING: these are most ({examples})" if 2 * bad > count else "")
            )
            return int(count - bad)
        ((source_missing,),) = self.database.rows(f"SELECT gf_s IS NULL FROM {name} WHERE gf_row = {first}", scan.where)
        end, column = (of[0], table.source) if source_missing else (of[2], table.target)
        ((value,),) = self.database.rows(
            f"SELECT CAST({quoted(column)} AS VARCHAR) FROM {scan.sql} WHERE rowid = {first}", scan.where
        )
        wrong = (
            f"{value!r} is not in column {self.options.nodes[end].id!r} of nodes.{end}"
            if (self.options.nodes[end].files)
            else f"{value!r} is no id"
        )
        spaces = "; ids are compared with their spaces" if value and value != value.strip() else ""
        raise DataError(
            f"{scan.place(first)}: {column} {'is empty' if value is None else wrong}{spaces} ({counted}: {examples}); "
            "correct the tables, or set `dangling: drop`"
        )

    def _edge_index(self, of: EdgeType, name: str, count: int, scan: Scan, task_rows: int = 0) -> RawArray:
        """Return the ends of edges. ``task_rows``: number of nodes of the end that is no table of option ``nodes``."""
        most, named = task_rows, list(self.options.nodes)
        for each in (of[0], of[2]):
            if each in named:
                ids = f"nodes{named.index(each)}_ids"
                most = max(most, self.database.rows(f"SELECT count(*) FROM {ids}", f"nodes.{each}")[0][0])
        dtype = np.dtype(np.int32 if most < 1 << 31 else np.int64)
        out = self.arrays.empty(type_name(of), dtype, (2, count))
        for begin, end in row_ranges(count, 16):
            rows = self.arrays.rows(name, "gf_s, gf_t", begin, end, scan.where)
            out[0, begin:end], out[1, begin:end] = rows["gf_s"], rows["gf_t"]
        return RawArray(out, scan.where)

    # --- both -------------------------------------------------------------------------------------------------

    def _columns(self, of: NodeType | EdgeType, table: Table, scan: Scan, features: str) -> list[ArrayColumn]:
        found = []
        if table.features or table.one_hot:
            numbers = check_numbers(scan, table.features, "features", table.fill)
            if table.standardize:
                numbers = standardized(scan, numbers)
            elif note := scale_note(scan, numbers):
                self.notes.append(note)
            for name in table.one_hot:
                texts = categories(scan, name, "one_hot", _MOST_ONE_HOT)
                numbers += one_hot(scan, name, texts)
                self.notes.append(f"{scan.where}: {name} → {features}: {len(texts)} columns, {_listed(texts)}")
            if not numbers:
                raise DataError(f"{scan.where}: one_hot {', '.join(table.one_hot)}: empty in all rows; leave it out")
            found.append(number_array(features, numbers, np.float32))
        for name in table.attributes:
            _check_no_split(scan, name, features)
            (column,) = check_numbers(scan, [name], "attributes", table.fill)
            found.append(number_array(attr_name(name), [column], np.int64 if column.whole else np.float32))
        for name in table.categories:
            if attr_name(name) in ("x", "edge_attr"):
                raise DataError(f"{scan.where}: a column of categories cannot be called {name!r}; rename it")
            _check_no_split(scan, name, features)
            found.append(self._codes(of, attr_name(name), name, scan, "categories"))
        if table.time is not None:
            name = "time" if features == "x" else "edge_time"
            found.append(ArrayColumn(name, [time_sql(scan, table.time)], np.dtype(np.int64)))
        self._check_names(found, scan, ("id", "y", EDGE_SPLIT))
        return found

    @staticmethod
    def _check_names(columns: Sequence[ArrayColumn], scan: Scan, others: tuple[str, ...] = ()) -> None:
        names = [*others, *(each.name for each in columns)]
        if taken := {name for name in names if names.count(name) > 1}:
            raise DataError(f"{scan.where}: two attributes are called {min(taken)!r}; rename a column")


def _check_no_split(scan: Scan, column: str, features: str) -> None:
    """Raise ``DataError`` if the attribute of nodes that a column becomes would be read as the nodes of a split."""
    if features == "x" and split_prefix(attr_name(column)) is not None:
        raise DataError(
            f"{scan.where}: a column of attributes or categories of nodes cannot be called {column!r}: names that end "
            f"in {' or '.join(SPLIT_SUFFIXES)} are those of splits. Rename it; the column of a node's split is `split`"
        )


def _drawn(shares: Mapping[str, float], nodes: Array, times: RawArray | None) -> dict[str, Array]:
    """Divide ``nodes`` into splits: at random, with a fixed seed, or by ``times``, those of all nodes.

    ``shares``: for each split, its share of ``nodes``; or ``val_time`` and ``test_time``, where these splits begin.
    """
    if "val_time" in shares and times is not None:
        place = np.searchsorted([shares["val_time"], shares["test_time"]], times.values[nodes], side="right")
        return {split: nodes[place == k] for k, split in enumerate(SPLITS)}
    order = np.random.default_rng(0).permutation(nodes)
    # rounded together, so that no node is left out if the shares add up to 1
    ends = [round(sum([*shares.values()][: k + 1]) * len(nodes)) for k in range(len(shares))]
    return {name: np.sort(order[begin:end]) for name, begin, end in zip(shares, [0, *ends], ends, strict=False)}


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(f"{code} {text}" for code, text in enumerate(texts[:5]))
    return f"{len(texts)} categories ({shown}{', …' if len(texts) > 5 else ''})"


def _attrs_text(columns: Sequence[ArrayColumn]) -> str:
    shown = []
    for each in columns:
        if each.name in ("id", _RELATION):
            continue
        width = sum(max(1, one) for one in each.widths)
        shown.append(f"{each.name} = {width} numbers" if each.is_matrix else each.name)
    return f"; {', '.join(shown)}" if shown else ""
