"""Tests of odd values in tables: each is read as it is meant, in CSV and Parquet alike, or refused with file and row."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from test_tables import load, sql, write
from trainer.core.errors import DataError
from trainer.core.texts import decode_texts
from trainer.data.dataset import Dataset
from trainer.sources import table_columns as columns
from trainer.sources.table_arrays import ArrayColumn, TableArrays, number_array
from trainer.sources.table_columns import NumberColumn
from trainer.sources.table_database import Database, Scan

NAN_PARQUET = Path(__file__).with_name("nan_without_statistics.parquet")
"""As pyarrow writes it, whose statistics of columns leave NaN out: id 7, 8, 9; v 1, NaN, 3; f 0.5, NaN, 1.5; k 7, NaN,
9; l [1, 2], [NaN, 1], [0, 0]."""


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
        ({"label": "v", "categories": ["v"], "split": "id"}, r"split of nodes\.n must be"),
    ],
)
def test_nan_in_parquet_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        graph_of(folder, keys)


def test_nan_in_parquet_is_no_label_and_no_category(folder: Path) -> None:
    graph = graph_of(folder, {"label": "v", "categories": ["f"], "one_hot": ["k"]}, num_classes=4)
    assert graph.nodes["node"].attrs["y"].tolist() == [1, -1, 3]
    assert graph.nodes["node"].attrs["f"].tolist() == [0, -1, 1]
    assert graph.nodes["node"].attrs["x"].tolist() == [[1, 0], [0, 0], [0, 1]]


def test_a_nan_label_in_a_split_is_refused(folder: Path) -> None:
    sql(f"COPY (SELECT *, 'train' AS fold FROM '{NAN_PARQUET}') TO '{folder}/n.parquet'")
    with pytest.raises(DataError, match=r"row 2: v is 'nan' \(1 such rows\), but fold has a value"):
        graph_of(folder, {"label": "v", "split": "fold"})


def test_nan_weights_and_ends_of_edges(folder: Path) -> None:
    write(folder, nodes__csv="id\n7\n8\n9\n")
    (folder / "n.parquet").rename(folder / "rated.parquet")
    nodes, edges = {"files": "nodes.csv"}, {"files": "rated.parquet", "source": "k", "target": "id"}
    with pytest.raises(DataError, match=r"row 2: f is 'nan' .*weight of edges\.e must not be NaN"):
        graph_of(folder, nodes, edges | {"weight": "f", "dangling": "drop"})
    (folder / "work").rename(folder / "work2")
    graph = graph_of(folder, nodes, edges | {"attributes": ["id"], "dangling": "drop"})
    assert graph.edges["node", "to", "node"].edge_index.tolist() == [[0, 2], [0, 2]]
    assert graph.edges["node", "to", "node"].attrs["id"].tolist() == [7, 9]


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
        found = columns.class_sql(scan, column, as_numbers)
        if found is None:
            return codes(scan, column)
        return ArrayColumn("v", [found[0]], np.dtype(np.int64 if found[1] else np.float32))

    return read


def codes(scan: Scan, column: str) -> ArrayColumn:
    return ArrayColumn("v", [columns.code_sql(scan, column, columns.categories(scan, column, "categories"), ENUMS.pop())],
                       np.dtype(np.int64))  # fmt: skip


def node_id(scan: Scan, column: str) -> ArrayColumn:
    if columns.ids_are_integers(scan, column):
        return ArrayColumn("v", [columns.integer_id(scan, column)], np.dtype(np.int64))
    return ArrayColumn("v", [columns.text_id(scan, column, True)], None)


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


def expected(role: str, of: str, values: list[str]) -> Any:
    """Return what plain Python makes of texts, a list, or None for values that must be refused."""
    if "features" in role or "attributes" in role or "several" in role:
        return _expected_numbers(role, of, values)
    if role == "time":
        found = [columns_time(value) for value in values]
        return None if None in found else found
    return ...  # compared between the files only


def columns_time(value: str) -> int | None:
    from datetime import UTC, datetime

    if re.fullmatch(r"-?\d+(\.0+)?|\d+e\d+", value.strip()):
        return int(float(value)) if len(value) < 10 else int(value)
    try:
        moment = datetime.fromisoformat(value[:26] + (value[29:] if len(value) > 28 else ""))
    except ValueError:
        return None
    return math.floor((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def _expected_numbers(role: str, of: str, values: list[str]) -> Any:
    if of in ("DATE", "TIME", "UUID") or of.startswith("TIMESTAMP"):
        return None
    fill = 0.0 if role.startswith("filled") else 0.5 if role.startswith("half") else None
    found: list[float | int] = []
    for value in values:
        word = value.strip().lower()
        try:
            number = {"true": 1, "false": 0}.get(word) if word else math.nan
            number = (int(word) if re.fullmatch(r"-?\d+", word) else float(word)) if number is None else number
        except ValueError:
            return None
        if math.isnan(number) and "several" not in role:
            if fill is None:
                return None
            number = fill
        if abs(number) > 3.4028234663852886e38:
            return None
        found.append(number)
    if "attributes" in role and all(n == math.floor(n) and -(2**63) <= n < 2**63 for n in found):
        return [int(n) for n in found]
    return [[np.float32(n)] * 2 if "several" in role else np.float32(n) for n in found]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(tmp_path_factory.mktemp("database"), 300 << 20)
    yield database
    database.close()


@pytest.mark.parametrize("of", VALUES)
def test_a_column_is_read_alike_from_csv_and_parquet_or_refused(of: str, tmp_path: Path, database: Database) -> None:
    ordinary, *odd = VALUES[of]
    rows = [ordinary, *([ordinary] if not odd else [])]
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
                    values = arrays.export(read(scan, name), scan, 2, 2).values
                    found.append(decode_texts(values) if values.dtype == np.uint8 else values.tolist())
                except DataError as error:
                    if "Error" in str(error) or not re.search(rf"{file}, row \d: {name} is|expected", str(error)):
                        wrong.append((name, pair, role, file, str(error)))
                    found.append(None)
            right = expected(role, of, [value for _, value in pair])
            same = [str(each) for each in found]
            if right is not ... and str(np.array(right).tolist() if right else None) != same[1]:
                wrong.append((name, pair, role, "expected", right, found))
            if same[0] != same[1] and (of, role) not in TYPED:
                wrong.append((name, pair, role, found))
    assert not wrong, "\n".join(map(str, wrong))


SCANS: dict[Path, Scan] = {}

#: A CSV file does not tell these types from texts or floats, so that more is accepted, or another form of a text.
TYPED = {
    *((of, "id") for of in ("DOUBLE", "FLOAT", "DECIMAL(10,2)", "BOOLEAN", "TIMESTAMPTZ")),
}
