"""Tests of odd values in tables: read as they are meant, in CSV and Parquet alike, or refused with file and row."""

from __future__ import annotations

import contextlib
import gzip
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fast_cases import fast_cases
from test_tables import load, sql, write
from trainer.core.errors import DataError
from trainer.core.graph_attrs import decode_texts
from trainer.data.dataset import Dataset
from trainer.sources import table_columns as columns
from trainer.sources.table_arrays import ArrayColumn, TableArrays, number_array
from trainer.sources.table_columns import NumberColumn
from trainer.sources.table_database import Database, Scan, quoted

NAN_PARQUET = Path(__file__).with_name("nan_without_statistics.parquet")
"""As pyarrow writes it, whose statistics of columns leave NaN out: id 7, 8, 9; v 1, NaN, 3; f 0.5, NaN, 1.5; k 7, NaN,
9; l [1, 2], [NaN, 1], [0, 0]."""


TYPES_PARQUET = Path(__file__).with_name("types_of_pyarrow.parquet")
"""id 7, 8, 9; v of type null; at 2024-05-17 08:21:23 in UTC, of nanoseconds with a zone, as pandas 2 writes times."""


def graph_of(folder: Path, nodes: Mapping[str, Any], edges: Mapping[str, Any] | None = None, **rest: Any) -> Dataset:
    """Read a graph with one node table, whose ids are 7, 8 and 9, and one edge table."""
    write(folder, e__csv="s,t\n7,8\n8,9\n")
    options = {
        "nodes": {"n": {"files": "n.*", "id": "id", **nodes}},
        "edges": {"e": {"files": "e.*", "source": "s", "target": "t", **(edges or {})}},
        **rest,
    }
    return load(folder, options, folder / "work")


# --- NaN that the statistics of Parquet files leave out ------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "n.parquet").write_bytes(NAN_PARQUET.read_bytes())
    return tmp_path


def test_nan_in_parquet_is_filled(folder: Path) -> None:
    nodes = graph_of(folder, {"attributes": ["v"], "features": ["f", "k"], "fill": 0}).nodes["node"]
    assert nodes.attrs["v"].tolist() == [1, 0, 3] and nodes.attrs["v"].dtype == np.int64
    assert nodes.attrs["x"].tolist() == [[0.5, 7], [0, 0], [1.5, 9]]


def test_nan_in_parquet_is_filled_before_features_are_standardized(folder: Path) -> None:
    x = graph_of(folder, {"features": ["v"], "fill": 2, "standardize": True}).nodes["node"].attrs["x"]
    np.testing.assert_allclose(x[:, 0], [-math.sqrt(1.5), 0, math.sqrt(1.5)], rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"features": ["f"]}, r"n\.parquet, row 2: f is 'nan' \(1 such rows\); features of nodes\.n must not be NaN"),
        ({"attributes": ["v"]}, r"row 2: v is 'nan' .*attributes"),
        ({"features": ["l"], "fill": 0}, r"row 2: l is '\[nan, 1\.0\]' .*must not contain .*NaN"),
        ({"id": "k"}, r"row 2: k is 'nan' .*id of nodes\.n must be an id in every row"),
        ({"time": "v"}, r"row 2: v is 'nan' .*time of nodes\.n must be"),
        ({"split": "v"}, r"row 1: v is '1\.0' \(2 such rows\); split"),
        ({"label": "v", "split": "id"}, r"split of nodes\.n must be"),
    ],
)
def test_nan_in_parquet_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        graph_of(folder, keys, num_classes=4)


def test_nan_in_parquet_is_no_label_and_no_category(folder: Path) -> None:
    graph = graph_of(folder, {"label": "v", "categories": ["f"], "one_hot": ["k"]}, num_classes=4)
    assert graph.nodes["node"].attrs["y"].tolist() == [1, -1, 3]
    assert graph.nodes["node"].attrs["f"].tolist() == [0, -1, 1]
    assert graph.nodes["node"].attrs["x"].tolist() == [[1, 0], [0, 0], [0, 1]]  # although a column is called v


def test_a_nan_label_in_a_split_is_refused(folder: Path) -> None:
    sql(f"COPY (SELECT *, 'train' AS fold FROM '{NAN_PARQUET}') TO '{folder}/n.parquet'")
    with pytest.raises(DataError, match=r"row 2: v is 'nan' \(1 such rows\), but fold has a value"):
        graph_of(folder, {"label": "v", "split": "fold"}, num_classes=4)


def test_nan_weights_and_ends_of_edges(folder: Path) -> None:
    write(folder, nodes__csv="id\n7\n8\n9\n")
    (folder / "n.parquet").rename(folder / "rated.parquet")
    nodes, edges = {"files": "nodes.csv"}, {"files": "rated.parquet", "source": "k", "target": "id"}
    with pytest.raises(DataError, match=r"row 2: f is 'nan' .*weight of edges\.n__e__n must not be NaN"):
        graph_of(folder, nodes, edges | {"source": "id", "weight": "f", "dangling": "drop"})
    (folder / "work").rename(folder / "work2")
    graph = graph_of(folder, nodes, edges | {"time": "id", "dangling": "drop"})
    assert graph.edges["node", "to", "node"].edge_index.tolist() == [[0, 2], [0, 2]]
    assert graph.edges["node", "to", "node"].attrs["edge_time"].tolist() == [7, 9]


def test_null_values_that_are_numbers(tmp_path: Path) -> None:
    read = []
    for folder in (tmp_path / "csv", tmp_path / "parquet"):
        folder.mkdir()
        file = f"{folder}/n.{folder.name}"
        sql(f"COPY (SELECT id, v::DOUBLE AS v, v AS w FROM (VALUES (7, 5), (8, -9), (9, 1)) t(id, v)) TO '{file}'")
        graph = graph_of(folder, {"attributes": ["v", "w"], "fill": 0, "null_values": [-9, "NA"]})
        read.append([graph.nodes["node"].attrs[name].tolist() for name in ("v", "w")])
    assert read == [[[5, 0, 1]] * 2] * 2


def test_null_values_are_found_in_every_form_and_type(tmp_path: Path) -> None:
    rows = "(7, 5, '2024-05-17'::DATE, [1, 2]), (8, -9, '1900-01-01'::DATE, [-9, 2]), (9, 1, '1900-01-01'::DATE, NULL)"
    sql(f"COPY (SELECT * FROM (VALUES {rows}) t(id, v, day, y)) TO '{tmp_path}/n.parquet'")
    keys = {"attributes": ["v"], "fill": 0, "categories": ["day"], "label": "y", "null_values": [-9.0, "1900-01-01"]}
    attrs = graph_of(tmp_path, keys).nodes["node"].attrs
    assert attrs["v"].tolist() == [5, 0, 1] and attrs["day"].tolist() == [0, -1, -1]
    np.testing.assert_array_equal(attrs["y"], [[1, 2], [np.nan, 2], [np.nan, np.nan]])
    folder = tmp_path / "csv"
    folder.mkdir()
    write(folder, n__csv="id,v,c\n7,-9,007\n8,-9.00,7.0\n9,-0.9e1,.\n")
    keys = {"attributes": ["v"], "fill": 0, "categories": ["c"], "null_values": ["-9", 7]}
    with pytest.raises(DataError, match=r"row 1: id is empty"):  # for 7 is an id, too
        graph_of(folder, keys)
    (folder / "work").rename(folder / "work2")
    attrs = graph_of(folder, keys | {"null_values": -9.0}, {"null_values": 3}).nodes["node"].attrs
    assert attrs["v"].tolist() == [0, 0, 0] and attrs["c"].tolist() == [1, 2, 0]


def test_the_text_nan_among_numbers_is_missing(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,c,d\n7,1.0,nan\n8,NaN,a\n9,2.0,nan\n")
    write(tmp_path, e__csv="s,t\n7.0,8\nnan,9\n")
    nodes = {"files": "n.csv", "id": "id", "categories": ["c", "d"]}
    edges = {"e": {"files": "e.csv", "source": "s", "target": "t", "dangling": "drop"}}
    graph = load(tmp_path, {"nodes": {"n": nodes}, "edges": edges}, tmp_path / "work")
    assert graph.nodes["node"].attrs["c"].tolist() == [0, -1, 1]
    assert graph.nodes["node"].attrs["d"].tolist() == [1, 0, 1]  # a text among texts
    graph = load(tmp_path, {"nodes": {"n": {}}, "edges": edges}, tmp_path / "work2")
    assert graph.nodes["node"].attrs["id"].tolist() == [7, 8, 9]
    assert graph.edges["node", "to", "node"].edge_index.tolist() == [[0], [1]]


def test_a_whole_number_is_the_same_category_with_a_decimal_point(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id\n7\n8\n9\n", a__csv="s,t,c,v\n7,8,1,1\n8,9,2,1.0\n")
    write(tmp_path, b__csv="s,t,c,v\n9,7,1.0,1.x\n9,8,,1\n")  # as pandas writes integers of which some are missing
    keys = {"files": ["a.csv", "b.csv"], "categories": ["c", "v"], "one_hot": ["c"]}
    attrs = graph_of(tmp_path, {}, keys).edges["node", "to", "node"].attrs
    assert attrs["c"].tolist() == [0, 1, 0, -1] and attrs["v"].tolist() == [0, 1, 2, 0]  # of v, texts
    assert attrs["edge_attr"].tolist() == [[1, 0], [0, 1], [1, 0], [0, 0]]


def test_integers_of_lists_and_of_fill_are_exact(tmp_path: Path) -> None:
    large = (1 << 53) + 1
    rows = f"(7, [{large}, 2], NULL), (8, [3, 4], 1)"
    sql(f"COPY (SELECT * FROM (VALUES {rows}) t(id, l, v)) TO '{tmp_path}/n.parquet'")
    keys = {"files": "n.parquet", "attributes": ["l", "v"], "fill": 1e30}
    write(tmp_path, e__csv="s,t\n7,8\n")
    options = {"nodes": {"n": {"id": "id", **keys}}, "edges": {"e": {"files": "e.csv", "source": "s", "target": "t"}}}
    attrs = load(tmp_path, options, tmp_path / "work").nodes["node"].attrs
    assert attrs["l"].tolist() == [[large, 2], [3, 4]] and attrs["v"].tolist() == [np.float32(1e30), 1]


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        ("(7, [8.0, 'nan'::DOUBLE]), (8, ['nan'::DOUBLE]), (9, [9.0, NULL])", {}),
        ("(7, 8.0), (8, 'nan'::DOUBLE), (9, 9.0)", {}),
        ("(7, ['8', ' ']), (8, ['nan']), (9, ['', '9.0'])", {}),
        ("(7, [8, -1]), (8, [-1, -1]), (9, [9, -1])", {"null_values": -1}),
        ("(7, '[8, nan]'), (8, '[-1]'), (9, '[9.0, -1.0]')", {"null_values": -1, "separator": ","}),
    ],
)
def test_missing_values_are_no_targets(tmp_path: Path, rows: str, keys: dict[str, Any]) -> None:
    write(tmp_path, n__csv="id\n7\n8\n9\n", e__csv="s,t\n7,8\n")
    sql(f"COPY (SELECT * FROM (VALUES {rows}) t(who, next)) TO '{tmp_path}/task.parquet'")
    task = {"table": "task.parquet", "entity": "n", "targets": "n", "id": "who", "label": "next", **keys}
    nodes, edges = {"files": "n.csv", "id": "id"}, {"files": "e.csv", "source": "s", "target": "t"}
    graph = load(tmp_path, {"nodes": {"n": nodes}, "edges": {"e": edges}, "tasks": {"k": task}}, tmp_path / "work")
    assert graph.edges["k", "lists", "n"].edge_index.tolist() == [[0, 2], [1, 2]]


def test_dropped_edges_leave_no_trace(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id\n7\n8\n9\n")
    (tmp_path / "edges.csv").write_text("s,t,f,c,w\n7,8,1,a,1\n5,8,1000,b,\n8,9,3,c,2\n,9,x,,-1\n")
    keys = {"files": "edges.csv", "features": ["f"], "standardize": True, "one_hot": ["c"], "weight": "w"}
    edges = graph_of(tmp_path, {}, keys | {"dangling": "drop"}).edges["node", "to", "node"]
    assert edges.attrs["edge_attr"].tolist() == [[-1, 1, 0], [1, 0, 1]]
    assert edges.attrs["edge_weight"].tolist() == [1, 2]


def test_links_of_a_file_stay_its_links_after_many_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    train = "SELECT CASE WHEN i = 7 THEN 7 ELSE 5 END AS s, 8 AS t, i AS w FROM range(300000) r(i)"
    for name, rows in {"n": "FROM range(7, 10) n(id)", "train": train, "test": "SELECT 9 AS s, 7 AS t, 3 AS w"}.items():
        sql(f"COPY ({rows}) TO '{tmp_path}/{name}.parquet'")
    run = Database.run

    def checkpoint(database: Database, statement: str, where: str) -> None:
        """DuckDB does it after each 16 MB of changes: gaps that DELETE left are removed, and rows numbered again."""
        run(database, statement, where)
        run(database, "CHECKPOINT", where)

    monkeypatch.setattr(Database, "run", checkpoint)
    keys = {"files": "train.parquet", "test_files": "test.parquet", "dangling": "drop", "weight": "w"}
    graph = graph_of(tmp_path, {}, keys)
    assert graph.graph_attrs["test_links"].tolist() == [[2], [0]]
    edges = graph.edges["node", "to", "node"]
    assert edges.edge_index.tolist() == [[0], [1]] and edges.attrs["edge_weight"].tolist() == [7]


def test_shares_that_add_up_to_1_leave_no_node_out(tmp_path: Path) -> None:
    nodes = {"split": {"train": 0.8, "val": 0.1, "test": 0.1}}
    for count in (1, 2, 3, 5, 15, 25):
        folder = tmp_path / str(count)
        folder.mkdir()
        write(folder, n__csv="id\n" + "".join(f"{7 + k}\n" for k in range(count)))
        (folder / "loop.csv").write_text("s,t\n7,7\n")
        splits = graph_of(folder, nodes, {"files": "loop.csv"}).nodes["node"].splits
        found = np.concatenate([np.asarray(ids) for ids in splits.values()])
        assert sorted(found.tolist()) == list(range(count))


@pytest.mark.parametrize("unit", [1000, 10**9])
def test_times_in_another_unit_than_the_splits_are_noted(tmp_path: Path, unit: int) -> None:
    days = [19850, 19860, 19870]
    write(tmp_path, n__csv="id,y,at\n" + "".join(f"{7 + k},0,{day * 86400 * unit}\n" for k, day in enumerate(days)))
    split = {"val_time": "2024-05-12", "test_time": "2024-05-22"}
    notes = graph_of(tmp_path, {"label": "y", "time": "at", "split": split}).notes
    assert any("no row is in train or val" in note and str(days[0] * 86400 * unit) in note for note in notes)


def test_the_row_with_a_wrong_time_is_named(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,at\n7,5\n8,6\n9,2024-05-17\n")
    with pytest.raises(DataError, match=r"n\.csv, row 3: at is '2024-05-17' \(1 such rows\); time"):
        graph_of(tmp_path, {"time": "at"})


def test_labels_of_minus_1_are_noted(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,y\n7,-1\n8,1\n9,-1.0\n")
    graph = graph_of(tmp_path, {"label": "y"})
    assert graph.nodes["node"].attrs["y"].tolist() == [-1, 1, -1]
    assert any("2 of 3 labels are -1, which means no label; WARNING: all others" in note for note in graph.notes)


def test_labels_of_texts_and_weights_of_lists_are_no_numbers(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,y\n7,high\n8,low\n9,\n")
    with pytest.raises(DataError, match=r"nodes\.n: label 'y' has values that are no numbers, and `num_classes: 0`"):
        graph_of(tmp_path, {"label": "y"}, num_classes=0)
    (tmp_path / "work").rename(tmp_path / "work2")
    sql(f"COPY (SELECT 7 AS s, 8 AS t, [1.0, 2.0] AS w) TO '{tmp_path}/pairs.parquet'")
    with pytest.raises(DataError, match=r"weight 'w' has lists; it must be one number for each edge"):
        graph_of(tmp_path, {}, {"files": "pairs.parquet", "weight": "w"})


def test_the_text_nan_is_no_label(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,y\n7,nan\n8,cat\n9,dog\n")
    assert graph_of(tmp_path, {"label": "y"}).nodes["node"].attrs["y"].tolist() == [-1, 0, 1]


def test_types_that_only_pyarrow_writes(tmp_path: Path) -> None:
    (tmp_path / "n.parquet").write_bytes(TYPES_PARQUET.read_bytes())
    nodes = graph_of(tmp_path, {"features": ["v"], "fill": 2, "categories": ["v"], "time": "at"}).nodes["node"]
    assert nodes.attrs["x"].tolist() == [[2], [2], [2]] and nodes.attrs["v"].tolist() == [-1, -1, -1]
    assert nodes.attrs["time"].tolist() == [1715934083] * 3


def test_texts_of_an_empty_column_are_refused(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,town\n7,\n8,\n9,\n")
    with pytest.raises(DataError, match=r"nodes\.n: one_hot town: empty in all rows; leave it out"):
        graph_of(tmp_path, {"one_hot": ["town"]})


def test_classes_below_0_are_named_with_their_row(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id,y\n7,1\n8,-2\n9,0\n")
    with pytest.raises(DataError, match=r"n\.csv, row 2: y is '-2' .*start at 0, -1 is no label; set `num_classes: 0`"):
        graph_of(tmp_path, {"label": "y"})


def test_types_of_files_that_do_not_agree_are_named(tmp_path: Path) -> None:
    for name, value in (("a", "1"), ("b", "TIMESTAMPTZ '2024-01-01 00:00:00+00'")):
        sql(f"COPY (SELECT '{name}' AS id, {value} AS \"at\") TO '{tmp_path}/n{name}.parquet'")
    with pytest.raises(
        DataError, match=r"nodes\.n: at is INTEGER in .*na\.parquet, but TIMESTAMP .* in .*nb\.parquet;"
    ):
        graph_of(tmp_path, {"files": "n*.parquet", "time": "at"})
    (tmp_path / "nb.parquet").write_bytes(b"id,at\n7,8\n")
    with pytest.raises(DataError, match=r"nb\.parquet is no Parquet file, or a damaged one; copy or write it again"):
        load(tmp_path, {"nodes": {"n": {"files": "n*.parquet", "id": "id"}}, "edges": {"e": {"files": "e.csv",
             "source": "s", "target": "t"}}}, tmp_path / "work2")  # fmt: skip


def test_columns_with_any_name_become_attributes(tmp_path: Path) -> None:
    write(tmp_path, n__csv=f'id,my town,größe,a/../b,"9 ""q""",{"z" * 300}\n7,x,1,2,3,4\n8,y,1,2,3,5\n9,x,1,2,3,6\n')
    keys = {"categories": ["my town"], "attributes": ["größe", "a/../b", '9 "q"', "z" * 300]}
    graph = graph_of(tmp_path, keys)
    names = {"id", "my_town", "gr_e", "a_.._b", "_9_q_", "z" * 100}
    assert set(graph.nodes["node"].attrs) == names and "my_town__categories" in graph.graph_attrs
    (tmp_path / "work").rename(tmp_path / "work2")
    with pytest.raises(DataError, match="a column of categories cannot be called 'x'; rename it"):
        write(tmp_path, n__csv="id,x\n7,a\n8,b\n9,c\n")
        graph_of(tmp_path, {"categories": ["x"]})


def test_edges_of_no_rows_are_refused(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id\n7\n", f__csv="s,t\n")
    with pytest.raises(DataError, match=r"edges\.n__e__n: .*f\.csv has no rows"):
        graph_of(tmp_path, {}, {"files": "f.csv"})


# --- every kind of column in every role ----------------------------------------------------------------------------

#: DuckDB's type -> values as SQL and as CSV; the first one is an ordinary value.
VALUES: dict[str, list[tuple[str, str]]] = {
    "DOUBLE": [(v, v) for v in ("2.0", "nan", "inf", "", "12.5", "1e300", "-0.0", "1e-320")],
    "FLOAT": [(v, v) for v in ("2.0", "nan", "-inf", "", "0.5", "16777216.0")],
    "BIGINT": [(v, v) for v in ("2", "", "-1", "9007199254740993", "-9223372036854775808")],
    "UBIGINT": [(v, v) for v in ("2", "18446744073709551615")],
    "DECIMAL(10,2)": [(v, v) for v in ("2.00", "", "12.50", "-3.00")],
    "BOOLEAN": [("true", "True"), ("false", "False"), ("", "")],
    "VARCHAR": [(v, v) for v in ("2", "", "nan", "007", "x", "1e5", " 7", "it's", "1e400", "2024-05-17", "é🙂")],
    "DATE": [(v, v) for v in ("2024-05-17", "", "1969-12-31")],
    "TIMESTAMP": [(v, v) for v in ("2024-05-17 05:21:23", "2024-05-17 05:21:23.5", "1969-12-31 23:59:59.5")],
    "TIMESTAMP_NS": [("2024-05-17 05:21:23.123456789",) * 2],
    "TIMESTAMPTZ": [(v, v) for v in ("2024-05-17 05:21:23+00", "2024-05-17T05:21:23-03:00", "2024-05-17 05:21:23Z")],
    "TIME": [("05:21:23",) * 2],
    "UUID": [("123e4567-e89b-12d3-a456-426614174000",) * 2],
}


def numbers(role: str, fill: float | None = None) -> Callable[[Scan, str], ArrayColumn]:
    def read(scan: Scan, column: str) -> ArrayColumn:
        (found,) = columns.check_numbers(scan, [column], role, fill)
        return number_array("v", [found], np.int64 if found.whole else np.float32)

    return read


def label(as_numbers: bool) -> Callable[[Scan, str], ArrayColumn]:
    def read(scan: Scan, column: str) -> ArrayColumn:
        found = columns.class_sql(scan, column, 0 if as_numbers else None, 1 << 20)
        if found is None:
            return codes(scan, column)
        return ArrayColumn("v", [found[0]], np.dtype(np.int64 if found[1] else np.float32))

    return read


def codes(scan: Scan, column: str) -> ArrayColumn:
    texts = columns.categories(scan, column, "categories")
    return ArrayColumn("v", [columns.code_sql(scan, column, texts, ENUMS.pop())], np.dtype(np.int64))


def node_id(scan: Scan, column: str) -> ArrayColumn:
    if columns.ids_are_integers(scan, column):
        return ArrayColumn("v", [columns.integer_id(quoted(column), scan.types[column])], np.dtype(np.int64))
    return ArrayColumn("v", [columns.text_id(quoted(column), scan.types[column], True)], None)


ENUMS = [f"enum{k}" for k in range(2000)]

ROLES: dict[str, Callable[[Scan, str], ArrayColumn]] = {
    "features": numbers("features"),
    "filled features": numbers("features", 0.0),
    "attributes": numbers("attributes"),
    "filled attributes": numbers("attributes", 0.0),
    "half filled attributes": numbers("attributes", 0.5),
    "label": label(False),
    "label of numbers": label(True),
    "several labels": lambda scan, column: number_array(
        "y", [NumberColumn(column, *columns.label_sql(scan, column), whole=False)] * 2, np.float32
    ),
    "categories": codes,
    "id": node_id,
    "time": lambda scan, column: ArrayColumn("v", [columns.time_sql(scan, column)], np.dtype(np.int64)),
}


def expected(role: str, of: str, texts: list[str]) -> Any:
    """Return the array that plain Python makes of a column, None if it must be refused, or ... if only compared."""
    if role == "time":
        integers = [_integer(text) for text in texts] if of != "BOOLEAN" else [None]
        found = integers if None not in integers else [_seconds(text) for text in texts]
        return None if None in found else found
    if not any(word in role for word in ("features", "attributes", "several")):
        return ...
    numbers = [_number(text) for text in texts]
    if None in numbers or any(abs(number) > np.finfo(np.float32).max for number in numbers):
        return None
    if role == "several labels":
        return np.float32([numbers, numbers]).T.tolist()
    fill = {"filled": 0, "half": 0.5}.get(role.split()[0])
    if fill is None and any(map(math.isnan, numbers)):
        return None
    numbers = [fill if math.isnan(number) else number for number in numbers]
    whole = "attributes" in role and all(number == int(number) and -(2**63) <= number < 2**63 for number in numbers)
    return [int(number) for number in numbers] if whole else np.float32(numbers).tolist()


def _number(text: str) -> float | int | None:
    with contextlib.suppress(ValueError):
        return {"": math.nan, "true": 1, "false": 0}.get(text.lower()) if text.lower() in FLAGS else int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _integer(text: str) -> int | None:
    number = _number(text)
    whole = number is not None and math.isfinite(number) and number == int(number) and -(2**63) <= number < 2**63
    return int(number) if whole else None


def _seconds(text: str) -> int | None:
    with contextlib.suppress(ValueError):
        moment = datetime.fromisoformat(text.replace(".123456789", ".123456"))
        return math.floor((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())
    return None


FLAGS = ("", "true", "false")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(tmp_path_factory.mktemp("database"), 300 << 20)
    yield database
    database.close()


@pytest.mark.parametrize("of", fast_cases(VALUES, *(of for of in VALUES if of not in ("FLOAT", "UBIGINT", "BOOLEAN"))))
def test_a_column_is_read_alike_from_csv_and_parquet_or_refused(of: str, tmp_path: Path, database: Database) -> None:
    ordinary, *odd = VALUES[of]
    cells = [[ordinary, ordinary]] + [[ordinary, each] for each in odd]
    names = [f"c{k}" for k in range(len(cells))]
    listed = [
        ", ".join(
            f"{'NULL' if pair[row][0] == '' else columns.text(pair[row][0])}::{of} AS {name}"
            for name, pair in zip(names, cells, strict=True)
        )
        for row in range(2)
    ]
    database.run(f"COPY (SELECT {listed[0]} UNION ALL SELECT {listed[1]}) TO '{tmp_path}/t.parquet'", "the test")
    lines = [",".join(names)] + [",".join(f'"{pair[row][1]}"' for pair in cells) for row in range(2)]
    write(tmp_path, t__csv="\n".join(lines) + "\n")
    arrays, wrong = TableArrays(database, tmp_path), []
    for name, pair in zip(names, cells, strict=True):
        for role, read in ROLES.items():
            found = []
            for file in ("t.csv", "t.parquet"):
                scan = SCANS.setdefault(tmp_path / file, Scan(database, [tmp_path / file], f"{of} {file}"))
                try:
                    values = arrays.export(read(scan, name), scan.sql, scan.where, 2).values
                    found.append(decode_texts(values) if values.dtype == np.uint8 else values.tolist())
                except DataError as error:
                    if "Error" in str(error) or not re.search(rf"{file}, row \d: {name} is|expected", str(error)):
                        wrong.append((name, pair, role, file, str(error)))
                    found.append(None)
            right = expected(role, of, [value for _, value in pair])
            same = [str(each) for each in found]
            if right is not ... and str(right) != same[1]:
                wrong.append((name, pair, role, "expected", right, found))
            if same[0] != same[1] and (of, role) not in TYPED:
                wrong.append((name, pair, role, found))
    assert not wrong, "\n".join(map(str, wrong))


SCANS: dict[Path, Scan] = {}

#: A CSV file does not tell these types from texts or floats, so that more is accepted, or another form of a text.
TYPED = {
    *((of, "id") for of in ("DOUBLE", "FLOAT", "DECIMAL(10,2)", "BOOLEAN", "TIMESTAMPTZ")),
    *((of, "categories") for of in ("DOUBLE", "FLOAT", "BOOLEAN", "TIMESTAMPTZ")),
    *(("TIMESTAMPTZ", role) for role in ("label", "label of numbers")),
}


# --- keys and times ------------------------------------------------------------------------------------------------

#: ids of nodes, sources of edges (as SQL, or lines of a CSV file) -> position of each source in the ids, or the message
KEYS: dict[str, tuple[str | list[str], str | list[str], list[int] | str]] = {
    "floats of pandas": (["7", "8", "12"], ["12.0", "7.0"], [2, 0]),
    "floats of pandas beside texts": (["a", "12"], ["12.0"], [1]),
    "versions are texts": (["1.0", "1.10", "a"], ["1.10", "1.0"], [1, 0]),
    "numbers with blanks": (["7", "8"], [" 8", "7 "], [1, 0]),
    "leading zeros": (["007", "7"], ["007"], [0]),
    "leading zeros on one side": (["7", "8"], ["007"], r"s '007' is not in .*s such as '007'; ids in id such as 7, 8"),
    "decimals": ("(7::DECIMAL(20,2)), (8)", ["7", "8.00"], [0, 1]),
    "unsigned integers": ("(7::UBIGINT), (18446744073709551615)", ["18446744073709551615", "7"], [1, 0]),
    "integers of several types": ("(7::UBIGINT), (8)", "(8::TINYINT), (7)", [1, 0]),
    "floats": ("(7::BIGINT), (8)", "(8::FLOAT), (7)", [1, 0]),
    "floats and texts": ("('a'), ('8')", "(8::DOUBLE)", [1]),
    "2^63": (["9223372036854775808", "7"], "(7::UBIGINT), (9223372036854775808)", [1, 0]),
    "2^63 with a point": (["9223372036854775808.0", "7.0"], "(7::UBIGINT), (9223372036854775808)", [1, 0]),
    "inexact": ("(9007199254740993::BIGINT)", "(9007199254740993::DOUBLE)", r"s '9007199254740992\.0' is not in"),
    "negative": (["-7", "8"], "(-7::INTEGER)", [0]),
    "dates": (["2024-05-17"], "(DATE '2024-05-17')", [0]),
    "UUIDs": (["123e4567-e89b-12d3-a456-426614174000"], "('123e4567-e89b-12d3-a456-426614174000'::UUID)", [0]),
    "an empty key": (["7", "8"], ["8", '""', "7"], r"row 2: s is empty \(1 such sources"),
    "only blanks": (["7", "8"], ["8", "  "], r"row 2: s is empty"),
    "too long": (["7", "é" * 513], ["7"], r"id\.csv, row 2: id is 'éé.*at most 1,024 bytes; shorten it"),
    "all dropped": (["a", "b"], ["c", '""'], r"drop all 2 edges .*s such as 'c', empty; ids in id such as 'a', 'b'"),
    "most dropped": (["a", "b"], ["c", "b", "d", '""'], [1]),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_equal_keys_are_the_same_id(tmp_path: Path, name: str) -> None:
    ids, sources, right = KEYS[name]
    options: dict[str, Any] = {"nodes": {"n": {"id": "id"}}, "edges": {"e": {"source": "s", "target": "t"}}}
    for values, column, table in ((ids, "id", options["nodes"]["n"]), (sources, "s", options["edges"]["e"])):
        table["files"] = f"{column}.csv"
        if isinstance(values, list):
            write(
                tmp_path, **{f"{column}__csv": "\n".join([f"{column},t", *(f"{value},1" for value in values)]) + "\n"}
            )
        else:
            table["files"] = f"{column}.parquet"
            sql(f"COPY (SELECT {column}, 1 AS t FROM (VALUES {values}) v({column})) TO '{tmp_path}/{column}.parquet'")
    options["edges"]["e"]["target"] = "s"
    if "dropped" in name:
        options["edges"]["e"]["dangling"] = "drop"
    if isinstance(right, str):
        with pytest.raises(DataError, match=right):
            load(tmp_path, options, tmp_path / "work")
    else:
        graph = load(tmp_path, options, tmp_path / "work")
        assert graph.edges["node", "to", "node"].edge_index.tolist() == [right, right]
        warned = any("3 of 4 edges dropped" in note and "WARNING" in note for note in graph.notes)
        assert warned == (name == "most dropped")


def test_an_instant_is_the_same_number_in_every_file_and_zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/Sao_Paulo")
    time.tzset()
    texts = ["2024-05-17 05:21:23-03:00", "2024-05-17T08:21:23Z", "2024-05-17 08:21:23", "2024-05-17 13:51:23 +0530",
                 "2024-05-17T08:21:23.999999999", "2024-05-17 10:21:23+02", "2024-05-17 08:21:23 Z"]  # fmt: skip
    write(tmp_path, n__csv="id,at\n" + "".join(f"{k},{text}\n" for k, text in enumerate(texts)), e__csv="s,t\n0,1\n")
    zoned = ", ".join(
        f"({k}, '{text.replace(' +', '+').replace(' Z', 'Z')}'::TIMESTAMPTZ)" for k, text in enumerate(texts) if k != 2
    )
    sql(f"SET TimeZone = 'UTC'; COPY (SELECT * FROM (VALUES {zoned}) t(id, \"at\")) TO '{tmp_path}/z.parquet'")
    for files in ("n.csv", "z.parquet"):
        options = {
            "nodes": {"n": {"files": files, "id": "id", "time": "at", "categories": ["at"]}},
            "edges": {"e": {"files": "e.csv", "source": "s", "target": "t"}},
        }
        graph = load(tmp_path, options, tmp_path / f"work-{files}")
        assert set(graph.nodes["node"].attrs["time"].tolist()) == {1715934083}
    assert "2024-05-17 08:21:23+00" in decode_texts(graph.graph_attrs["at__categories"])


@pytest.fixture(autouse=True)
def zone() -> Iterator[None]:
    yield
    time.tzset()


# --- CSV files -----------------------------------------------------------------------------------------------------

READ = ["ann", "böb", "cid"]
NODES = "id,name,x\n7,ann,1\n8,böb,2\n9,cid,3\n"

#: Content of n.csv, keys of the node table -> texts of `name`, or the message.
CSV: dict[str, tuple[str | bytes, dict[str, Any], list[str] | str]] = {
    "ordinary": (NODES, {}, READ),
    "latin-1": (NODES.encode("latin-1"), {"encoding": "latin-1"}, READ),
    "utf-16": (NODES.encode("utf-16"), {"encoding": "utf-16"}, READ),
    "not UTF-8": (NODES.encode("latin-1"), {}, r"nodes\.n: .*n\.csv, line 3: is not utf-8; set `encoding`"),
    "not UTF-8 in the header": ("id,näme\n7,ann\n".encode("latin-1"), {}, r"n\.csv, line 1: is not utf-8"),
    "not ASCII": (NODES, {"encoding": "ascii"}, r"n\.csv, line 3: is not ascii"),
    "null values": (NODES, {"null_values": ["cid", 9.5]}, ["ann", "böb", ""]),
    "too few values": (NODES + "10,dan\n", {}, r"n\.csv, line 5: has fewer values than the header: '10,dan'"),
    "too many values": (NODES + "10,dan,4,5\n", {}, r"n\.csv, line 5: has more values than the header"),
    "an open quote": (NODES.replace("ann", '"ann'), {}, r"n\.csv, line 2: has a quote that is not closed"),
    "a quote in the middle": (NODES.replace("ann", '"a"nn'), {}, r"n\.csv, line 2: .*written twice"),
    "line ends of two kinds": (NODES.replace("ann,1\n", "ann,1\r\n"), {}, READ),
    "old line ends": (NODES.replace("\n", "\r"), {}, READ),
    "empty lines": (NODES.replace("\n", "\n\n"), {}, READ),
    "line feeds in quotes": (NODES.replace("ann", '"a\nb"').replace(",1\n", ",1\r\n"), {}, ["a\nb", "böb", "cid"]),
    "blanks in the header": (NODES.replace("id,name,x", "id, name , x"), {}, READ),
    "one name twice": (NODES.replace("x", "NAME"), {}, "called 'name' and 'NAME', which is the same name"),
    "an unused name twice": (NODES.replace(",", ",y,"), {}, READ),
    "no header": (NODES.split("\n", 1)[1], {}, r"'id' is not a column.*first line of n\.csv seems to contain values"),
    "no header, and no column": (
        NODES.split("\n", 1)[1], {"id": "rowid", "categories": None}, r"first line of .*n\.csv seems to contain values",
    ),
    "empty": ("", {}, r"n\.csv is empty, or damaged; expected a line of column names"),
    "a column called rowid": (NODES.replace("name", "rowid"), {"categories": ["rowid"]}, "cannot be called 'rowid'"),
    "bars": (NODES.replace(",", "|"), {}, READ),
    "empty lines above the header": ("\r\n\r\n" + NODES.replace("\n", "\r\n"), {}, READ),
    "line ends with two carriage returns": (NODES.replace("\n", "\r\r\n"), {}, READ),
    "null values with blanks": (NODES.replace("cid", " NA "), {"null_values": ["NA"]}, ["ann", "böb", ""]),
    "only blanks": (NODES.replace("cid", "  "), {}, ["ann", "böb", ""]),
    "utf-16 without a word": (NODES.encode("utf-16"), {}, r"n\.csv is in UTF-16; set `encoding: utf-16`"),
    "utf-16 without a mark": (b"i\0d\0\n\0007\0\n\0", {}, r"n\.csv is in UTF-16; set `encoding: utf-16-le`"),
    "a Parquet file": (b"PAR1\x15\x04", {}, r"n\.csv is a Parquet file; give it a name that ends in \.parquet"),
    "a gzip file": (gzip.compress(NODES.encode()), {}, r"n\.csv is a gzip file; give it a name that ends in \.csv\.gz"),
    "a spreadsheet": (b"PK\3\4\x14", {}, r"n\.csv is a zip archive or a spreadsheet; unpack it, or save it as CSV"),
    "another delimiter": (NODES.replace(",", "~"), {"delimiter": "~"}, READ),
    "the delimiter of Hive": (NODES.replace(",", "\1"), {"delimiter": "\1"}, READ),
}  # fmt: skip


@pytest.mark.parametrize("name", CSV)
def test_csv_files(tmp_path: Path, name: str) -> None:
    content, keys, right = CSV[name]
    write(tmp_path, n__csv=content)
    nodes = {"categories": ["name"], "files": "n.csv", **keys}
    if isinstance(right, str):
        with pytest.raises(DataError, match=right) as error:
            graph_of(tmp_path, nodes)
        assert "\n" not in str(error.value)
    else:
        graph = graph_of(tmp_path, nodes)
        texts = [*decode_texts(graph.graph_attrs["name__categories"]), ""]
        assert [texts[code] for code in graph.nodes["node"].attrs["name"]] == right


def test_formats_of_all_tables_and_wrong_ones(tmp_path: Path) -> None:
    write(tmp_path, n__csv=NODES.encode("latin-1").replace(b",", b";"))
    write(tmp_path, e__csv="s;t\n7;-\n8;9\n")
    options: dict[str, Any] = {
        "nodes": {"n": {"files": "n.csv", "id": "id"}},
        "edges": {"e": {"files": "e.csv", "source": "s", "target": "t", "dangling": "drop"}},
        "encoding": "latin-1", "null_values": "-", "delimiter": ";",
    }  # fmt: skip
    assert load(tmp_path, options, tmp_path / "work").edges["node", "to", "node"].edge_index.tolist() == [[1], [2]]
    nulls: list[Any] = [[["x"]], "a\0b", ["\ud800"]]
    formats = [{"encoding": "latin-1000"}, {"encoding": "base64"}, {"delimiter": ", "}]
    for k, wrong in enumerate([*formats, *({"null_values": each} for each in nulls)]):
        with pytest.raises(DataError, match=f"nodes.n.{next(iter(wrong))} must be"):
            load(tmp_path, options | wrong, tmp_path / f"work{k}")


# --- labels and names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rest,message", [
    ({}, r"n\.csv, row 2: y is '2000000' \(1 such rows\); with classes from 0, nodes\.n can have at most 3; renumber"),
    ({"num_classes": 2}, r"n\.csv, row 2: y is '2000000' \(1 such rows\); option num_classes says .* nodes\.n is 1"),
])  # fmt: skip
def test_a_class_beyond_the_number_of_nodes_names_its_row(tmp_path: Path, rest: dict[str, int], message: str) -> None:
    write(tmp_path, n__csv="id,y\n7,0\n8,2000000\n9,NaN\n")
    with pytest.raises(DataError, match=message):
        graph_of(tmp_path, {"label": "y"}, **rest)


def test_a_class_of_edges_that_is_too_large_names_its_row(tmp_path: Path) -> None:
    write(tmp_path, n__csv="id\n7\n8\n9\n", e2__csv="s,t,y\n7,8,0\n8,9,1048576\n")
    with pytest.raises(DataError, match=r"e2\.csv, row 2: y is '1048576' .* edges\.n__e__n can have at most 1,048,576"):
        graph_of(tmp_path, {}, {"files": "e2.csv", "label": "y"})


@pytest.mark.parametrize("name", ["qx", "QX"])
def test_two_columns_of_one_name_in_a_parquet_file(tmp_path: Path, name: str) -> None:
    sql(
        "COPY (SELECT id, {'a': 1, 'b': id} AS s, id + 1.5 AS qx, id + 2.5 AS qy FROM (VALUES (7), (8), (9)) v(id)) "
        f"TO '{tmp_path}/n.parquet'"
    )
    path = tmp_path / "n.parquet"  # as pyarrow writes it, and DuckDB does not
    path.write_bytes(path.read_bytes().replace(b"qy", name.encode()))
    with pytest.raises(DataError, match=r"n\.parquet: two columns are called 'qx'.*; rename one of them"):
        graph_of(tmp_path, {"features": ["qx"]})
    shutil.rmtree(tmp_path / "work")
    assert graph_of(tmp_path, {"features": ["id"]}).nodes["node"].attrs["x"].tolist() == [[7], [8], [9]]


@pytest.mark.parametrize("column", ["train_idx", "merchant_idx", "train_mask", "is mask"])
@pytest.mark.parametrize("key", ["categories", "attributes"])
def test_a_column_with_the_name_of_a_split_is_no_split(tmp_path: Path, column: str, key: str) -> None:
    write(tmp_path, n__csv=f"id,{column}\n7,0\n8,1\n9,0\n")
    with pytest.raises(DataError, match=rf"nodes\.n: a column of .* cannot be called '{column}': .* Rename it"):
        graph_of(tmp_path, {key: [column]})
