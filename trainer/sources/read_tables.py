"""Converts node and edge tables to memory-mapped arrays, with DuckDB.

The nodes of each type are numbered from 0 in the order of the rows, and ids in edge tables are replaced by these
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from trainer.core.arrays import Array
from trainer.core.errors import DataError
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_EDGE, HOMO_NODE, EdgeType, NodeType, type_name
from trainer.core.texts import encode_texts
from trainer.data.raw_arrays import RawArray, RawGraph
from trainer.sources.table_arrays import ArrayColumn, TableArrays, number_array, row_ranges, select_list
from trainer.sources.table_columns import (
    NumberColumn,
    categories,
    check_numbers,
    code_sql,
    id_sql,
    ids_are_integers,
    label_sql,
    list_type,
    one_hot,
    scale_note,
    standardized,
    time_sql,
)
from trainer.sources.table_database import Database, Scan, quoted
from trainer.sources.table_files import source_folder, table_files
from trainer.sources.table_options import SPLITS, EdgeTable, NodeTable, Table, TablesOptions

_MOST_ONE_HOT = 1024  #: most texts of a column of ``one_hot``

COLUMNS = "columns"  #: last word of graph attributes with the names of the columns of ``y``, uint8 [columns, bytes]

CATEGORIES = "categories"  #: last word of graph attributes with the texts of codes, uint8 [number of codes, bytes]


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
    names: dict[str, Array] = field(default_factory=dict)  #: graph attribute -> texts of codes
    notes: list[str] = field(default_factory=list)
    enums: int = 0  #: number of types defined for categories

    def graph(self, source: str | None) -> RawGraph:
        nodes = {of: self._scan(f"nodes.{of}", table) for of, table in self.options.nodes.items()}
        edges = {of: self._scan(f"edges.{type_name(of)}", table) for of, table in self.options.edges.items()}
        self._decide_id_types(nodes, edges)
        counts, node_arrays = {}, {}
        for k, of in enumerate(nodes):
            counts[of], node_arrays[of] = self._nodes(of, self.options.nodes[of], nodes[of], f"nodes{k}")
        number_of = {of: f"nodes{k}" for k, of in enumerate(nodes)}
        edge_arrays = {
            of: self._edges(of, self.options.edges[of], edges[of], number_of, f"edges{k}") for k, of in enumerate(edges)
        }
        if not self.hetero:
            (only,) = nodes
            node_arrays, counts = {HOMO_NODE: node_arrays[only]}, {HOMO_NODE: counts[only]}
            edge_arrays = {HOMO_EDGE: next(iter(edge_arrays.values()))}
        plain = {name: RawArray(texts, "tables") for name, texts in self.names.items()}
        name = self.source.resolve().name if source else "tables"
        return RawGraph(name, plain, node_arrays, edge_arrays, counts, hetero=self.hetero, notes=tuple(self.notes))

    @property
    def hetero(self) -> bool:
        return len(self.options.nodes) > 1 or len(self.options.edges) > 1

    def _scan(self, where: str, table: Table) -> Scan:
        return Scan(self.database, table_files(table, self.source, where), where, table.delimiter)

    def _decide_id_types(self, nodes: Mapping[NodeType, Scan], edges: Mapping[EdgeType, Scan]) -> None:
        integers = {of: ids_are_integers(scan, self.options.nodes[of].id, "id") for of, scan in nodes.items()}
        for of, scan in edges.items():
            table = self.options.edges[of]
            for end, column, role in ((of[0], table.source, "source"), (of[2], table.target, "target")):
                integers[end] = ids_are_integers(scan, column, role) and integers[end]
        self.integers = integers

    # --- nodes ------------------------------------------------------------------------------------------------

    def _nodes(self, of: NodeType, table: NodeTable, scan: Scan, name: str) -> tuple[int, dict[str, RawArray]]:
        """Return the number of nodes of a type and their attributes.

        Creates database table ``<name>_ids`` (number, id).
        """
        columns = self._columns(of, table, scan, "x")
        id_dtype = np.dtype(np.int64) if self.integers[of] else None
        columns.append(ArrayColumn("id", [("id", id_sql(scan, table.id, self.integers[of]))], id_dtype))
        if table.label:
            columns.append(self._label(of, table.label, scan))
        selected = ["row_number() OVER () - 1 AS number", *select_list(columns)]
        if isinstance(table.split, str):
            self._check_labelled(table, scan)
            selected.append(f"{self._split_sql(scan, table.split)} AS gf_split")
        self.database.run(f"CREATE TABLE {name} AS SELECT {', '.join(selected)} FROM {scan.sql}", scan.where)
        ((count,),) = self.database.rows(f"SELECT count(*) FROM {name}", scan.where)
        if count == 0:
            raise DataError(f"{scan.where}: {scan.files[0]} has no rows")
        self._check_unique(scan, table.id, name)
        arrays = {each.name: self.arrays.export(each, name, count, scan) for each in columns}
        arrays |= self._splits(table, scan, name, arrays.get("y"))
        self.database.run(f"CREATE TABLE {name}_ids AS SELECT number, id FROM {name}", scan.where)
        self.database.run(f"DROP TABLE {name}", scan.where)
        scan.close()
        self._note_table(scan, count, table.id, self.integers[of], columns)
        sizes = [f"{len(arrays[f'{split}_idx'].values):,} {split}" for split in SPLITS if f"{split}_idx" in arrays]
        if sizes:
            self.notes.append(f"{scan.where}: splits: {', '.join(sizes)}")
        return count, arrays

    def _check_unique(self, scan: Scan, column: str, name: str) -> None:
        sql = f"SELECT id, count(*), min(number), max(number) FROM {name} GROUP BY id HAVING count(*) > 1"
        ((repeated,),) = self.database.rows(f"SELECT count(*) FROM ({sql})", scan.where)
        if repeated:
            value, _, first, again = self.database.rows(f"{sql} ORDER BY min(number) LIMIT 1", scan.where)[0]
            raise DataError(
                f"{scan.where}: {repeated:,} ids occur more than once in column {column!r}, first {value!r}: "
                f"{scan.place(first)}, and {scan.place(again)}; every node needs one row"
            )

    def _label(self, of: NodeType, names: Sequence[str], scan: Scan) -> ArrayColumn:
        """Return attribute ``y``: classes as int64 (empty: -1), or numbers as float32 (empty: NaN)."""
        column = names[0]
        for name in names:
            scan.check_column(name, "label")
        if len(names) > 1 or list_type(scan.types[column]) is not None:
            return self._label_matrix(of, names, scan)
        number = f"TRY_CAST({quoted(column)} AS DOUBLE)"
        if scan.types[column] == "BOOLEAN":
            number = f"CAST(CAST({quoted(column)} AS TINYINT) AS DOUBLE)"
        numbers, whole = self.database.rows(
            f"SELECT bool_and({number} IS NOT NULL OR {quoted(column)} IS NULL), "
            f"bool_and({number} = floor({number}) AND {number} >= -1) FROM {scan.sql}",
            scan.where,
        )[0]
        plain = self.options.num_classes == 0 and self.options.target in (None, of)  # numbers, not classes
        if numbers and whole and not plain:
            return ArrayColumn("y", [("y", f"coalesce(CAST({number} AS BIGINT), -1)")], np.dtype(np.int64))
        if numbers:
            return ArrayColumn("y", [("y", f"coalesce({number}, 'NaN')")], np.dtype(np.float32))
        return self._codes(of, "y", column, scan, "label")

    def _label_matrix(self, of: NodeType, names: Sequence[str], scan: Scan) -> ArrayColumn:
        """Return attribute ``y`` from several columns or a column of lists: float32 [N, D], NaN for empty values."""
        columns = [NumberColumn(name, *label_sql(scan, name), whole=False) for name in names]
        if len(names) > 1:
            prefix = f"{of}__" if self.hetero else ""
            self.names[f"{prefix}y__{COLUMNS}"] = encode_texts(names)
        return number_array("y", columns, np.float32)

    def _codes(self, of: NodeType | EdgeType, name: str, column: str, scan: Scan, role: str) -> ArrayColumn:
        texts = categories(scan, column, role)
        self.enums += 1
        sql = code_sql(scan, column, texts, f"categories{self.enums}")
        prefix = f"{type_name(of)}__" if self.hetero else ""
        self.names[f"{prefix}{name}__{CATEGORIES}"] = encode_texts(texts or [""])
        self.notes.append(f"{scan.where}: {column} → {name}: {_listed(texts)}")
        return ArrayColumn(name, [(name, sql)], np.dtype(np.int64))

    @staticmethod
    def _check_labelled(table: NodeTable, scan: Scan) -> None:
        if not table.label or not isinstance(table.split, str):
            return
        scan.check_column(table.split, "split")
        empty = " AND ".join(f"{quoted(name)} IS NULL" for name in table.label)
        bad = f"{empty} AND {quoted(table.split)} IS NOT NULL"
        ((count,),) = scan.database.rows(f"SELECT count(*) FILTER (WHERE {bad}) FROM {scan.sql}", scan.where)
        if count:
            at = scan.first([*table.label, table.split], bad)
            raise DataError(
                f"{at} ({count:,} such rows), but {table.split} has a value; only nodes with a label can be in a split"
            )

    @staticmethod
    def _split_sql(scan: Scan, column: str) -> str:
        scan.check_column(column, "split")
        known = "('train', 'val', 'valid', 'validation', 'test')"
        lower = f"lower(trim(CAST({quoted(column)} AS VARCHAR)))"
        wrong = f"{quoted(column)} IS NOT NULL AND {lower} NOT IN {known}"
        ((bad,),) = scan.database.rows(f"SELECT count(*) FILTER (WHERE {wrong}) FROM {scan.sql}", scan.where)
        if bad:
            raise DataError(
                f"{scan.first([column], wrong)} ({bad:,} such rows); split of {scan.where} must be train, val or test, "
                "or empty"
            )
        return f"CASE WHEN {lower} IN ('valid', 'validation') THEN 'val' ELSE {lower} END"

    def _splits(self, table: NodeTable, scan: Scan, name: str, y: RawArray | None) -> dict[str, RawArray]:
        if isinstance(table.split, str):
            found = {
                split: self.database.arrays(
                    f"SELECT number FROM {name} WHERE gf_split = '{split}' ORDER BY number", scan.where
                )["number"]
                for split in SPLITS
            }
        elif table.split is not None:
            found = _drawn(table.split, y, self.database.rows(f"SELECT count(*) FROM {name}", scan.where)[0][0])
        else:
            return {}
        return {f"{split}_idx": RawArray(ids, scan.where) for split, ids in found.items() if len(ids)}

    # --- edges ------------------------------------------------------------------------------------------------

    def _edges(
        self, of: EdgeType, table: EdgeTable, scan: Scan, number_of: Mapping[NodeType, str], name: str
    ) -> dict[str, RawArray]:
        columns = self._columns(of, table, scan, "edge_attr")
        if table.weight is not None:
            columns.append(
                number_array("edge_weight", check_numbers(scan, [table.weight], "weight", table.fill), np.float32)
            )
        ids = [
            f"{id_sql(scan, column, self.integers[end])} AS {alias}"
            for end, column, alias in ((of[0], table.source, "gf_source"), (of[2], table.target, "gf_target"))
        ]
        inner = ", ".join(["row_number() OVER () - 1 AS gf_row", *ids, *select_list(columns)])
        kept = ", ".join(f"e.{quoted(column)}" for each in columns for column, _ in each.columns)
        self.database.run(
            f"CREATE TABLE {name} AS SELECT gf_row, s.number AS gf_s, t.number AS gf_t{', ' + kept if kept else ''} "
            f"FROM (SELECT {inner} FROM {scan.sql}) e LEFT JOIN {number_of[of[0]]}_ids s ON s.id = e.gf_source "
            f"LEFT JOIN {number_of[of[2]]}_ids t ON t.id = e.gf_target ORDER BY gf_row",
            scan.where,
        )
        count = self._check_dangling(of, table, scan, name)
        arrays = {each.name: self.arrays.export(each, name, count, scan) for each in columns}
        arrays["edge_index"] = self._edge_index(of, name, count, scan)
        self.database.run(f"DROP TABLE {name}", scan.where)
        scan.close()
        self.notes.append(f"{scan.where}: {count:,} edges{_attrs_text(columns)}")
        return arrays

    def _check_dangling(self, of: EdgeType, table: EdgeTable, scan: Scan, name: str) -> int:
        """Return the number of edges whose source and target are in their node tables.

        With ``dangling: drop``, other edges are removed from database table ``name``; else ``DataError`` is raised.
        """
        count, sources, targets = self.database.rows(
            f"SELECT count(*), count(*) FILTER (WHERE gf_s IS NULL), count(*) FILTER (WHERE gf_t IS NULL) FROM {name}",
            scan.where,
        )[0]
        if not sources and not targets:
            return int(count)
        dangling = "gf_s IS NULL OR gf_t IS NULL"
        if table.dangling == "drop":
            self.database.run(
                f"CREATE OR REPLACE TABLE {name} AS SELECT * FROM {name} WHERE NOT ({dangling}) ORDER BY gf_row",
                scan.where,
            )
            ((left,),) = self.database.rows(f"SELECT count(*) FROM {name}", scan.where)
            self.notes.append(
                f"{scan.where}: {count - left:,} of {count:,} edges dropped, an end is not in its node table"
            )
            return int(left)
        ((row, source_missing),) = self.database.rows(
            f"SELECT gf_row, gf_s IS NULL FROM {name} WHERE {dangling} ORDER BY gf_row LIMIT 1", scan.where
        )
        end, column = (of[0], table.source) if source_missing else (of[2], table.target)
        ((value,),) = self.database.rows(
            f"SELECT CAST({quoted(column)} AS VARCHAR) FROM {scan.sql} LIMIT 1 OFFSET {row}", scan.where
        )
        spaces = "; ids are compared with their spaces" if value != value.strip() else ""
        raise DataError(
            f"{scan.place(row)}: {column} {value!r} is not in column {self.options.nodes[end].id!r} of nodes.{end}"
            f"{spaces} ({sources:,} such sources and {targets:,} such targets of {count:,} edges); correct the tables, "
            "or set `dangling: drop`"
        )

    def _edge_index(self, of: EdgeType, name: str, count: int, scan: Scan) -> RawArray:
        most = max(self._num_nodes(end) for end in (of[0], of[2]))
        dtype = np.dtype(np.int32 if most < 1 << 31 else np.int64)
        out = self.arrays.empty(type_name(of), dtype, (2, count))
        for begin, end in row_ranges(count, 16):
            rows = self.arrays.rows(name, "gf_s, gf_t", begin, end, scan)
            out[0, begin:end], out[1, begin:end] = rows["gf_s"], rows["gf_t"]
        return RawArray(out, scan.where)

    def _num_nodes(self, of: NodeType) -> int:
        k = list(self.options.nodes).index(of)
        ((count,),) = self.database.rows(f"SELECT count(*) FROM nodes{k}_ids", f"nodes.{of}")
        return int(count)

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
                numbers += one_hot(name, texts)
                self.notes.append(f"{scan.where}: {name} → {features}: {len(texts)} columns, {_listed(texts)}")
            found.append(number_array(features, numbers, np.float32))
        for name in table.attributes:
            (column,) = check_numbers(scan, [name], "attributes", table.fill)
            found.append(number_array(name, [column], np.int64 if column.whole else np.float32))
        for name in table.categories:
            found.append(self._codes(of, name, name, scan, "categories"))
        if table.time is not None:
            name = "time" if features == "x" else "edge_time"
            found.append(ArrayColumn(name, [(name, time_sql(scan, table.time))], np.dtype(np.int64)))
        names = [each.name for each in found]
        taken = {name for name in names if names.count(name) > 1} | ({"id", "y"} & set(names))
        if taken:
            raise DataError(f"{scan.where}: two attributes are called {sorted(taken)[0]!r}; rename a column")
        return found

    def _note_table(
        self, scan: Scan, count: int, id_column: str, integers: bool, columns: Sequence[ArrayColumn]
    ) -> None:
        kind = "integers" if integers else "texts"
        self.notes.append(f"{scan.where}: {count:,} nodes, ids in {id_column} ({kind}){_attrs_text(columns)}")


def _drawn(shares: Mapping[str, float], y: RawArray | None, count: int) -> dict[str, Array]:
    """Draw the nodes of each split at random, with a fixed seed, among the nodes with a label.

    ``shares``: for each split, its share of these nodes. ``y``: labels; if it is None, all ``count`` nodes are used.
    """
    nodes = np.arange(count)
    if y is not None:
        values = np.asarray(y.values).reshape(count, -1)
        nodes = nodes[(~np.isnan(values) if values.dtype.kind == "f" else values >= 0).any(1)]
    order, found, begin = np.random.default_rng(0).permutation(nodes), {}, 0
    for name, share in shares.items():
        size = round(share * len(nodes))
        found[name] = np.sort(order[begin : begin + size])
        begin += size
    return found


def _listed(texts: Sequence[str]) -> str:
    shown = ", ".join(f"{code} {text}" for code, text in enumerate(texts[:5]))
    return f"{len(texts)} categories ({shown}{', …' if len(texts) > 5 else ''})"


def _attrs_text(columns: Sequence[ArrayColumn]) -> str:
    shown = []
    for each in columns:
        if each.name == "id":
            continue
        width = sum(max(1, one) for one in each.widths)
        shown.append(f"{each.name} = {width} numbers" if each.is_matrix else each.name)
    return f"; {', '.join(shown)}" if shown else ""
