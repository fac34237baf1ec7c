"""Tests of dataset `tables`: CSV and Parquet files with ids of any type become a partition."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from partition_kit import assert_sound
from trainer.core.errors import DataError
from trainer.core.graph_attrs import decode_texts
from trainer.core.row_sort import Scratch
from trainer.data.dataset import Dataset
from trainer.partition.cli import partition
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sources.draft_tables import draft_tables
from trainer.sources.load import dataset_fingerprint, load_dataset
from trainer.store.part_store import open_parts

USERS = """user_id,age,height,segment,fold,joined,country
u1,30,1.8,b,train,2024-01-01,at
u2,20,1.7,a,train,2024-01-02,de
u3,25,1.6,a,VALID,1970-01-01 00:01:40,
u4,41,1.5,b,test,2023-01-03,at
u5,33,1.9,,,2023-01-03,ch
"""
ITEMS = "sku,price\n7,1.5\n8,2\n9,3\n"
RATINGS = "who,what,stars,at\nu1,7,5,100\nu2,7,4,101\nu3,9,1,102\nu4,8,3,103\nu1,9,2.5,104\n"
SHOP: dict[str, Any] = {
    "nodes": {
        "user": {
            "files": "users.csv", "id": "user_id", "label": "segment", "split": "fold", "time": "joined",
            "features": ["age", "height"], "categories": ["country"],
        },
        "item": {"files": ["items.csv"], "id": "sku", "attributes": ["price"]},
    },
    "edges": {
        "user__rates__item": {
            "files": "ratings.csv", "source": "who", "target": "what", "weight": "stars", "time": "at",
        }
    },
}  # fmt: skip
RATES = ("user", "rates", "item")


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        data = content.encode() if isinstance(content, str) else content
        (folder / name.replace("__", ".")).write_bytes(data)
    return folder


def shop(folder: Path, **files: str | bytes) -> Path:
    return write(folder, **{"users__csv": USERS, "items__csv": ITEMS, "ratings__csv": RATINGS, **files})


def load(folder: Path, options: Mapping[str, Any], work: Path) -> Dataset:
    work.mkdir()
    return load_dataset("tables", str(folder), options, Scratch(work, 300 << 20))


def with_keys(**tables: Mapping[str, Any]) -> dict[str, Any]:
    user, item, rates = (dict(table) for table in (*SHOP["nodes"].values(), *SHOP["edges"].values()))
    user |= tables.get("user", {})
    item |= tables.get("item", {})
    rates |= tables.get("rates", {})
    return {"nodes": {"user": user, "item": item}, "edges": {"user__rates__item": rates}}


def sql(statement: str) -> None:
    with duckdb.connect() as database:
        database.execute(statement)


def test_tables_become_a_heterogeneous_graph(tmp_path: Path) -> None:
    graph = load(shop(tmp_path), SHOP, tmp_path / "work")
    user, item, rates = graph.nodes["user"], graph.nodes["item"], graph.edges[RATES]
    assert graph.hetero and list(graph.edges) == [RATES]
    assert decode_texts(user.attrs["id"]) == ["u1", "u2", "u3", "u4", "u5"]
    assert item.attrs["id"].tolist() == [7, 8, 9]
    assert user.attrs["x"].dtype == np.float32
    assert user.attrs["x"].tolist() == np.float32([[30, 1.8], [20, 1.7], [25, 1.6], [41, 1.5], [33, 1.9]]).tolist()
    assert user.attrs["y"].tolist() == [1, 0, 0, 1, -1] and user.num_classes == 2
    assert user.attrs["time"].tolist() == [1704067200, 1704153600, 100, 1672704000, 1672704000]
    assert user.attrs["country"].tolist() == [0, 2, -1, 0, 1]
    assert decode_texts(graph.graph_attrs["user__country__categories"]) == ["at", "ch", "de"]
    assert decode_texts(graph.graph_attrs["user__y__categories"]) == ["a", "b"]
    assert {name: ids.tolist() for name, ids in user.splits.items()} == {"train": [0, 1], "val": [2], "test": [3]}
    assert item.attrs["price"].tolist() == [1.5, 2, 3]
    assert rates.edge_index.tolist() == [[0, 1, 2, 3, 0], [0, 0, 2, 1, 2]]
    assert rates.attrs["edge_weight"].tolist() == [5, 4, 1, 3, 2.5]
    assert rates.attrs["edge_time"].tolist() == [100, 101, 102, 103, 104]
    assert any("5 nodes, ids in user_id (texts); x = 2 numbers" in note for note in graph.notes)


def test_one_node_table_and_one_edge_table_are_a_homogeneous_graph(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        papers__csv="paper,f0,f1,field\n10,1,2,0\n20,3,4,1\n30,5,6,1\n",
        cites__csv="citing,cited,times\n30,10,2\n20,10,1\n30,20,7\n",
    )
    options = {
        "nodes": {"paper": {"files": "papers.csv", "id": "paper", "features": ["f1", "f0"], "label": "field"}},
        "edges": {"cites": {"files": "cites.csv", "source": "citing", "target": "cited", "features": "times"}},
        "undirected": True,
    }
    graph = load(folder, options, tmp_path / "work")
    assert not graph.hetero
    assert graph.nodes["node"].attrs["x"].tolist() == [[2, 1], [4, 3], [6, 5]]
    assert graph.nodes["node"].attrs["id"].tolist() == [10, 20, 30]
    edges = graph.edges["node", "to", "node"]  # as many edges as nodes: attributes are not confused
    assert edges.edge_index.tolist() == [[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]]
    assert edges.attrs["edge_attr"].tolist() == [[1], [2], [1], [7], [2], [7]]


def test_parquet_as_spark_writes_it(tmp_path: Path) -> None:
    for k, day in enumerate(("a", "b")):
        folder = tmp_path / f"items/day={day}"
        folder.mkdir(parents=True)
        (folder / "_SUCCESS").write_text("")
        sql(
            f"COPY (SELECT 'i' || (i + {100 * k}) AS sku, [i, i + 0.5]::FLOAT[] AS v, i::DOUBLE AS price "
            f"FROM range(100) r(i)) TO '{folder}/part-0.parquet'"
        )
    sql(f"COPY (SELECT 'i' || i AS a, 'i' || ((i * 7) % 200) AS b FROM range(200) r(i)) TO '{tmp_path}/e.parquet'")
    options = {
        "nodes": {"item": {"files": "items", "id": "sku", "features": ["v", "price"], "categories": "day"}},
        "edges": {"also": {"files": "*.parquet", "source": "a", "target": "b"}},
    }
    graph = load(tmp_path, options, tmp_path / "work")
    nodes = graph.nodes["node"]
    assert decode_texts(nodes.attrs["id"]) == [f"i{i}" for i in range(200)]
    assert nodes.attrs["x"][[0, 3, 150]].tolist() == [[0, 0.5, 0], [3, 3.5, 3], [50, 50.5, 50]]
    assert nodes.attrs["day"].tolist() == [0] * 100 + [1] * 100
    assert (graph.edges["node", "to", "node"].edge_index[1] == np.arange(200) * 7 % 200).all()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_folder_of_missing_values_has_no_category(tmp_path: Path, kind: str) -> None:
    for k, country in enumerate(("at", "__HIVE_DEFAULT_PARTITION__")):
        folder = shop(tmp_path) / f"users/country={country}"
        folder.mkdir(parents=True)
        sql(f"COPY (SELECT 'u' || (range + {3 * k + 1}) AS user_id FROM range({3 - k})) TO '{folder}/part.{kind}'")
    options = with_keys()
    options["nodes"]["user"] = {"files": "users", "id": "user_id", "categories": ["country"]}
    graph = load(tmp_path, options, tmp_path / "work")
    assert graph.nodes["user"].attrs["country"].tolist() == [-1, -1, 0, 0, 0]
    assert decode_texts(graph.graph_attrs["user__country__categories"]) == ["at"]


@pytest.mark.slow
def test_rows_keep_their_order_in_large_files(tmp_path: Path) -> None:
    sql(
        "COPY (SELECT 'n' || ((i * 7919) % 300000) AS id, i::FLOAT AS f FROM range(300000) r(i)) "
        f"TO '{tmp_path}/n.parquet' (ROW_GROUP_SIZE 20000)"
    )
    sql(
        "COPY (SELECT 'n' || ((i * 31) % 300000) AS s, 'n' || (i % 300000) AS t, i AS k FROM range(600000) r(i)) "
        f"TO '{tmp_path}/e.parquet' (ROW_GROUP_SIZE 20000)"
    )
    options = {
        "nodes": {"n": {"files": "n.parquet", "id": "id", "features": "f"}},
        "edges": {"e": {"files": "e.parquet", "source": "s", "target": "t", "attributes": "k"}},
    }
    graph = load(tmp_path, options, tmp_path / "work")
    number = np.empty(300000, int)
    number[np.arange(300000) * 7919 % 300000] = np.arange(300000)
    assert (graph.nodes["node"].attrs["x"][:, 0] == np.arange(300000)).all()
    edges, k = graph.edges["node", "to", "node"], np.arange(600000)
    assert (edges.attrs["k"] == k).all()
    assert (edges.edge_index == [number[k * 31 % 300000], number[k % 300000]]).all()


def test_shares_draw_the_same_splits_among_nodes_with_a_label(tmp_path: Path) -> None:
    options = with_keys(user={"split": {"train": 0.5, "test": 0.25}})
    graphs = [load(shop(tmp_path), options, tmp_path / f"work{k}") for k in range(2)]
    splits = [{name: ids.tolist() for name, ids in graph.nodes["user"].splits.items()} for graph in graphs]
    assert splits[0] == splits[1]
    assert {name: len(ids) for name, ids in splits[0].items()} == {"train": 2, "test": 1}
    assert 4 not in splits[0]["train"] + splits[0]["test"]


def test_edges_without_a_node_are_dropped_if_asked(tmp_path: Path) -> None:
    folder = shop(tmp_path, ratings__csv=RATINGS + "u9,7,1,1\nu1,70,1,2\nu2,8,1,3\n")
    graph = load(folder, with_keys(rates={"dangling": "drop"}), tmp_path / "work")
    assert graph.edges[RATES].attrs["edge_time"].tolist() == [100, 101, 102, 103, 104, 3]
    assert any("2 of 8 edges dropped" in note for note in graph.notes)


def test_fill_replaces_missing_numbers(tmp_path: Path) -> None:
    users = USERS.replace("u2,20,1.7", "u2,,NaN")
    graph = load(shop(tmp_path, users__csv=users), with_keys(user={"fill": -1}), tmp_path / "work")
    assert graph.nodes["user"].attrs["x"][1].tolist() == [-1, -1]


def test_the_fingerprint_depends_on_files_and_columns(tmp_path: Path) -> None:
    shop(tmp_path)
    first = dataset_fingerprint("tables", str(tmp_path), SHOP)
    assert first != dataset_fingerprint("tables", str(tmp_path), with_keys(user={"features": ["age"]}))
    (tmp_path / "ratings.csv").write_text(RATINGS + "u5,7,1,1\n")
    assert first != dataset_fingerprint("tables", str(tmp_path), SHOP)


def test_a_partition_has_the_ids_and_leaves_no_work_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    spec = PartitionSpec("tables", str(tmp_path / "parts"), str(shop(source)), SHOP, 2, "random")
    make_partition(spec, say=lambda line: None)
    assert_sound(tmp_path / "parts")
    store = open_parts(tmp_path / "parts")
    found = {}
    for part in store.parts.values():
        nodes = part.nodes["user"]
        found |= dict(zip(np.asarray(nodes.orig_id).tolist(), decode_texts(nodes.attrs["id"]), strict=True))
    assert found == {0: "u1", 1: "u2", 2: "u3", 3: "u4", 4: "u5"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "source"]
    with pytest.raises(DataError):
        make_partition(PartitionSpec("tables", str(tmp_path / "p2"), str(source), with_keys(user={"id": "age2"}), 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts", "source"]


#: Other content of the shop's files -> the message, or None if the graph is read all the same.
ODD_FILES: dict[str, tuple[dict[str, str | bytes], str | None]] = {
    "byte order mark": ({"users__csv": b"\xef\xbb\xbf" + USERS.encode()}, None),
    "CRLF": ({"users__csv": USERS.replace("\n", "\r\n"), "ratings__csv": RATINGS.replace("\n", "\r\n")}, None),
    "quoted separators and line breaks": (
        {"users__csv": USERS.replace(",at\n", ',"at, or\nnear"\n')}, None
    ),
    "semicolons": ({"users__csv": USERS.replace(",", ";")}, None),
    "emoji and long ids": (
        {
            "users__csv": USERS.replace("u1,", "🙂" * 100 + ","),
            "ratings__csv": RATINGS.replace("u1,", "🙂" * 100 + ","),
        },
        None,
    ),
    "empty file": ({"items__csv": ""}, r"items\.csv"),
    "header only": ({"items__csv": "sku,price\n"}, r"nodes\.item: .*items\.csv has no rows"),
    "id twice": (
        {"users__csv": USERS + "u1,3,1,a,train,2024-01-01,at\n"},
        r"nodes\.user: 1 ids occur more than once in column 'user_id', first 'u1': .*users\.csv, row 1, and .*, row 6",
    ),
    "id missing": ({"users__csv": USERS.replace("u3,", ",")}, r"users\.csv, row 3: user_id is empty .*id of nodes"),
    "dangling source": (
        {"ratings__csv": RATINGS + "u9,7,1,1\n"},
        r"ratings\.csv, row 6: who 'u9' is not in column 'user_id' of nodes\.user.*1 such sources and 0 such targets",
    ),
    "ids that differ by a space": (
        {"ratings__csv": RATINGS + "u1 ,7,1,1\n"}, r"who 'u1 ' is not in .*compared with their spaces"
    ),
    "2^63": ({"items__csv": ITEMS.replace("7,", "9223372036854775808,"),
              "ratings__csv": RATINGS.replace(",7,", ",9223372036854775808,")}, None),
    "a text among numbers": (
        {"users__csv": USERS.replace("u4,41", "u4,old")},
        r"users\.csv, row 4: age is 'old' \(1 such rows\); features of nodes\.user must be numbers",
    ),
    "a missing number": ({"users__csv": USERS.replace("u4,41", "u4,")}, r"row 4: age is empty .* `fill: 0`"),
    "NaN": ({"users__csv": USERS.replace("u4,41", "u4,nan")}, r"row 4: age is 'nan' .* must not be NaN; `fill: 0`"),
    "infinity": ({"users__csv": USERS.replace("u4,41", "u4,-inf")}, r"row 4: age is '-inf' .* must be finite"),
    "an unknown split": (
        {"users__csv": USERS.replace(",train,2024-01-02", ",training,2024-01-02")},
        r"row 2: fold is 'training' .*split of nodes\.user must be train, val or test",
    ),
    "a wrong time": (
        {"users__csv": USERS.replace("2024-01-02", "yesterday")},
        r"row 2: joined is 'yesterday' .*time of nodes\.user must be",
    ),
    "a split without a label": (
        {"users__csv": USERS.replace("1.5,b,test", "1.5,,test")}, r"row 4: segment is empty .*but fold has a value"
    ),
    "too few columns in a row": ({"ratings__csv": RATINGS + "u1,7\n"}, r"edges\.user__rates__item: .*ratings\.csv"),
    "not UTF-8": ({"users__csv": USERS.replace("u3", "\xfc3").encode("latin-1")}, r"nodes\.user: .*users\.csv"),
    "a number with an underscore": (  # which DuckDB takes for 41
        {"users__csv": USERS.replace("u4,41", "u4,4_1")}, r"row 4: age is '4_1' .* must be numbers"
    ),
    "a column is missing": (
        {"users__csv": USERS.replace("age", "years")},
        r"nodes\.user: features 'age' is not a column: users\.csv has the columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_FILES)
def test_odd_files(tmp_path: Path, name: str) -> None:
    files, message = ODD_FILES[name]
    folder = shop(tmp_path, **files)
    if message is None:
        graph = load(folder, SHOP, tmp_path / "work")
        assert graph.edges[RATES].edge_index.tolist() == [[0, 1, 2, 3, 0], [0, 0, 2, 1, 2]]
        assert graph.nodes["user"].num_nodes == 5
    else:
        with pytest.raises(DataError) as error:
            load(folder, SHOP, tmp_path / "work")
        assert re.search(message, str(error.value)), error.value
        assert "\n" not in str(error.value)


def test_compressed_files_and_many_columns(tmp_path: Path) -> None:
    wide = [f"c{k}" for k in range(300)]
    users = "user_id," + ",".join(wide) + "\n" + "".join(f"u{i}," + ",".join(["1"] * 300) + "\n" for i in range(1, 6))
    shop(tmp_path)
    (tmp_path / "users.csv").unlink()
    (tmp_path / "users.csv.gz").write_bytes(gzip.compress(users.encode()))
    options = with_keys()
    options["nodes"]["user"] = {"files": "users.csv.gz", "id": "user_id", "features": wide}
    assert load(tmp_path, options, tmp_path / "work").nodes["user"].attrs["x"].shape == (5, 300)


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_damaged_compressed_files_are_named_and_no_row_is_lost(tmp_path: Path, packed: str) -> None:
    options, csv = with_keys(user={"files": f"users.csv.{packed}"}), tmp_path / f"users.csv.{packed}"
    shop(tmp_path, users__csv=USERS + "".join(f"v{k},{k},1.5,a,,2024-01-01,at\n" for k in range(20_000)))
    sql(
        f"COPY (FROM read_csv('{tmp_path}/users.csv', all_varchar = true)) TO '{csv}' (FORMAT csv, COMPRESSION "
        f"{'gzip' if packed == 'gz' else 'zstd'})"
    )
    whole = csv.read_bytes()
    assert load(tmp_path, options, tmp_path / "work").nodes["user"].num_nodes == 20_005
    half = len(whole) // 2
    for number, content in enumerate((whole[:half], whole[: half + 7], whole[:-1], b"user_id\nu1\n", whole[:9])):
        csv.write_bytes(content)
        with pytest.raises(DataError, match=rf"users\.csv\.{packed}: is (cut off|no \.?\w+ file)"):
            load(tmp_path, options, tmp_path / f"work{number}")


def test_a_column_that_one_file_of_a_glob_lacks_is_named_with_the_file(tmp_path: Path) -> None:
    shop(tmp_path)
    (tmp_path / "users2.csv").write_text("user_id,height,segment,fold,joined,country\nu8,1,a,train,5,at\n")
    with pytest.raises(DataError, match=r"users2\.csv: has no column 'age', which other files of nodes\.user have"):
        load(tmp_path, with_keys(user={"files": "users*.csv"}), tmp_path / "work")


def test_wildcards_in_names_of_files_and_folders_stand_for_themselves(tmp_path: Path) -> None:
    folder = tmp_path / "set[1]"
    folder.mkdir()
    write(shop(folder), **{"u?__csv": USERS, "u1__csv": "user_id\nother\n", "u2__csv": USERS.replace("\nu", "\nv")})
    for name, rows in (("i[1]", 3), ("i1", 9)):
        sql(f"COPY (SELECT 7 + range AS sku, 1.5 AS price FROM range({rows})) TO '{folder}/x.parquet'")
        (folder / "x.parquet").rename(folder / f"{name}.parquet")
    graph = load(folder, with_keys(user={"files": "u?.csv"}, item={"files": "i[1].parquet"}), tmp_path / "work")
    assert (graph.nodes["user"].num_nodes, graph.nodes["item"].num_nodes) == (5, 3)
    graph = load(folder, with_keys(user={"files": ["users*.csv", "u[2-9].csv"]}), tmp_path / "work2")  # in `set[1]`
    assert graph.nodes["user"].num_nodes == 10


def test_linked_folders_are_read_and_what_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    folder, other = tmp_path / "shop", tmp_path / "other"
    for path in (folder / "users", other):
        path.mkdir(parents=True)
    write(shop(folder)).joinpath("users.csv").rename(folder / "users/a.csv")
    write(other, b__csv=USERS.replace("\nu", "\nv"))
    (folder / "users/more").symlink_to(other)
    (other / "again").symlink_to(folder / "users")
    options = with_keys(user={"files": "users"})
    assert load(folder, options, tmp_path / "work").nodes["user"].num_nodes == 10

    def unreadable(path: Any, scandir: Any = os.scandir) -> Any:
        if str(path).endswith("more"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patched, pytest.raises(DataError, match="users/more cannot be read: Permission deni"):
        patched.setattr(os, "scandir", unreadable)
        load(folder, options, tmp_path / "work2")
    (folder / "users/c.csv").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"nodes\.user: .*users/c\.csv is a link to a file that does not exist"):
        load(folder, options, tmp_path / "work3")
    (folder / "users/c.csv").unlink()
    os.mkfifo(folder / "users/c.csv")
    with pytest.raises(DataError, match=r"users/c\.csv is no file"):
        load(folder, options, tmp_path / "work4")


#: Other options -> the message.
WRONG_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no edges": ({"nodes": SHOP["nodes"]}, "data.options.edges is missing: describe the edge tables"),
    "unknown key": (with_keys(user={"feature": ["age"]}), "nodes.user: unknown key 'feature'; did you mean 'features'"),
    "no id": (with_keys(user={"id": None}), "nodes.user: id is required"),
    "unknown type": (
        {**SHOP, "edges": {"users__rates__item": SHOP["edges"]["user__rates__item"]}},
        "option nodes has no table 'users'; did you mean 'user'",
    ),
    "no such file": (with_keys(user={"files": "u/*.csv"}), "does not exist or has no CSV or Parquet file"),
    "wrong share": (with_keys(user={"split": {"train": 0.9, "test": 0.2}}), "add up to at most 1"),
    "one word": (
        {**SHOP, "edges": {"rates": SHOP["edges"]["user__rates__item"]}}, "write source__relation__target"
    ),
    "option of another dataset": ({**SHOP, "num_nodes": 3}, "leave out option 'num_nodes'; its value follows"),
    "split given twice": (with_keys(rates={"split": "at", "test_files": "a.csv"}), "give either split, a column, or"),
    "file in two splits": (with_keys(rates={"test_files": "r*.csv"}), "ratings.csv is in two of files, val_files and"),
    "two options of splits": ({**with_keys(rates={"split": "at"}), "hold_out_split": "x"}, "edge tables have the key"),
    "no split": (with_keys(rates={"split": "at"}), "ratings.csv, row 1: at is '100' (5 such rows); split of edges."),
    "shares of links": (with_keys(rates={"split": {"val": 0.1}}), "shares are for edges with a label; options"),
    "label of edges": (with_keys(rates={"label": "stars"}), "'stars' is the label and also in weight"),
    "one name twice": (with_keys(item={"attributes": ["price"], "categories": ["price"]}), "two attributes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options(tmp_path: Path, name: str) -> None:
    options, message = WRONG_OPTIONS[name]
    with pytest.raises(DataError, match=re.escape(message)):
        load(shop(tmp_path), options, tmp_path / "work")


def test_old_duckdb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb, "__version__", "1.2.2")  # it loses the first rows below empty lines
    with pytest.raises(DataError, match=r"needs duckdb 1\.3 or newer, found 1\.2\.2: pip install --upgrade duckdb"):
        load(shop(tmp_path), SHOP, tmp_path / "work")


def test_missing_duckdb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "duckdb", None)
    with pytest.raises(DataError, match="pip install duckdb"):
        load(shop(tmp_path), SHOP, tmp_path / "work")


def test_standardized_features_have_mean_0_and_deviation_1(tmp_path: Path) -> None:
    graph = load(shop(tmp_path), with_keys(user={"standardize": True}), tmp_path / "work")
    x = graph.nodes["user"].attrs["x"]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x.std(0), 1, rtol=1e-6)
    assert not any("large beside other features" in note for note in graph.notes)


def test_a_feature_of_large_values_is_noted(tmp_path: Path) -> None:
    users = re.sub(r"(u\d),(\d\d)", r"\1,20\2", USERS)
    graph = load(shop(tmp_path, users__csv=users), SHOP, tmp_path / "work")
    assert any("nodes.user: values of age are large beside other features" in note for note in graph.notes)


@pytest.mark.parametrize("as_files", [False, True])
def test_links_of_a_table_with_a_split_are_held_out(tmp_path: Path, as_files: bool) -> None:
    head, *rows = RATINGS.strip().splitlines()
    if as_files:
        parts = {"a": [rows[0], rows[2]], "b": [rows[3]], "c": [rows[1], rows[4]]}
        files = {f"{name}__csv": "\n".join([head, *own, ""]) for name, own in parts.items()}
        keys: dict[str, Any] = {"files": "a.csv", "val_files": "b.csv", "test_files": ["c.csv"]}
    else:
        words = ["split", "train", "test", "", "Valid", "test"]
        lines = [f"{line},{word}" for line, word in zip([head, *rows], words, strict=True)]
        files, keys = {"ratings__csv": "\n".join([*lines, ""])}, {"split": "split"}
    graph = load(shop(tmp_path, **files), with_keys(rates=keys) | {"undirected": True}, tmp_path / "work")
    attrs = graph.graph_attrs
    assert attrs["val_links"].tolist() == [[3], [1]] and attrs["val_link_times"].tolist() == [103]
    assert attrs["test_links"].tolist() == [[1, 0], [0, 2]] and attrs["test_link_times"].tolist() == [101, 104]
    assert graph.edges[RATES].edge_index.tolist() == [[0, 2], [0, 2]]
    assert sorted(graph.edges[RATES].attrs) == ["edge_time", "edge_weight"]
    assert graph.edges["item", "rev_rates", "user"].num_edges == 2
    (tmp_path / "more.csv").write_text("who,what,stars,at,split\nu9,7,5,1,test\nu1,8,5,1,test\n")
    more = {"test_files": ["more.csv", "c.csv"]} if as_files else {"files": ["more.csv", "ratings.csv"]}
    untimed = with_keys(rates={**keys, "time": None, "dangling": "drop", **more})
    attrs = load(tmp_path, untimed, tmp_path / "untimed").graph_attrs
    assert "test_link_times" not in attrs and attrs["test_links"].tolist() == [[0, 0, 1], [1, 2, 0]]


def test_labels_of_edges_and_their_splits_are_attributes_of_the_edges(tmp_path: Path) -> None:
    ratings = "who,what,kind,stars,fold\nu1,7,buy,1,train\nu2,7,,2,\nu3,9,view,3.5,TEST\nu4,8,buy,4,valid\nu1,9,buy,,\n"
    folder = shop(tmp_path, ratings__csv=ratings)
    keys: dict[str, Any] = {"weight": None, "time": None, "label": "kind", "split": "fold"}
    graph = load(folder, with_keys(rates=keys) | {"undirected": True}, tmp_path / "work")
    attrs = graph.edges[RATES].attrs
    assert attrs["y"].tolist() == [0, -1, 1, 0, 0] and attrs["edge_split"].tolist() == [0, -1, 2, 1, -1]
    assert attrs["y"].dtype == np.int64 and attrs["edge_split"].dtype == np.int8
    assert decode_texts(graph.graph_attrs["user__rates__item__y__categories"]) == ["buy", "view"]
    assert graph.graph_attrs["user__rates__item__y__classes"].tolist() == [2]
    assert "test_links" not in graph.graph_attrs and graph.edges[RATES].num_edges == 5
    assert graph.edges["item", "rev_rates", "user"].attrs["edge_split"].tolist() == [0, -1, 2, 1, -1]
    assert "edges.user__rates__item: splits: 1 train, 1 val, 1 test" in graph.notes
    held = load(folder, with_keys(rates=keys) | {"hold_out": "user__rates__item"}, tmp_path / "held")
    assert held.graph_attrs["test_links"].tolist() == [[2], [2]] and held.edges[RATES].num_edges == 3
    assert held.edges[RATES].attrs.keys() == {"y"}
    numbers = load(folder, with_keys(rates={**keys, "label": "stars", "split": None}), tmp_path / "numbers")
    y = numbers.edges[RATES].attrs["y"]
    assert y.dtype == np.float32 and np.array_equal(y, np.float32([1, 2, 3.5, 4, np.nan]), equal_nan=True)
    assert "edge_split" not in numbers.edges[RATES].attrs and "user__rates__item__y__classes" not in numbers.graph_attrs
    (folder / "ratings.csv").write_text("who,what,kind,fold\nu1,7,buy,\nu2,7,,val\n")
    with pytest.raises(DataError, match=r"ratings\.csv, row 2: kind is empty \(1 such rows\), but fold has a value"):
        load(folder, with_keys(rates=keys), tmp_path / "refused")


def facts_of(folder: Path, rows: str, **keys: Any) -> dict[str, Any]:
    write(folder, things__csv="id\na\nb\nc\n", facts__csv="h,rel,t,how,split\n" + rows)
    table = {"files": "facts.csv", "source": "h", "target": "t", "relation": "rel", "categories": ["how"], **keys}
    return {"nodes": {"thing": {"files": "things.csv", "id": "id"}}, "edges": {"facts": table}}


def test_names_of_types_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"edge type thing__rrr.*rrr__thing has 189 characters, more than 180"):
        load(tmp_path, facts_of(tmp_path, f"a,{'r' * 175},b,x,train\n"), tmp_path / "work")
    options = {**SHOP, "edges": {f"user__{'r' * 300}__item": SHOP["edges"]["user__rates__item"]}}
    with pytest.raises(DataError, match="rrr… has 300 characters; types can have at most 180"):
        load(shop(tmp_path), options, tmp_path / "work2")
    nested = {"nodes": SHOP["nodes"], "edges": "[" * 100_000}
    with pytest.raises(DataError, match=r"data\.options\.edges must map types to tables"):
        load(tmp_path, nested, tmp_path / "work3")


def test_a_column_of_relations_makes_an_edge_type_of_each(tmp_path: Path) -> None:
    rows = "a,part of,b,x,\nb,is-a,c,y,test\nc,part of,a,,val\na,is-a,c,x,\nz,is-a,c,x,\nb,part of,a,y,test\n"
    graph = load(tmp_path, facts_of(tmp_path, rows, split="split", dangling="drop"), tmp_path / "work")
    part, is_a = (graph.edges["thing", word, "thing"] for word in ("part_of", "is-a"))
    assert graph.hetero and len(graph.edges) == 2
    assert part.edge_index.tolist() == [[0], [1]] and is_a.edge_index.tolist() == [[0], [2]]
    assert part.attrs["how"].tolist() == [0] == is_a.attrs["how"].tolist() and part.attrs.keys() == {"how"}
    attrs = graph.graph_attrs
    assert decode_texts(attrs["thing__part_of__thing__how__categories"]) == ["x", "y"]
    assert decode_texts(attrs["thing__is-a__thing__how__categories"]) == ["x", "y"]
    assert decode_texts(attrs["held_out_type"]) == ["thing__is-a__thing", "thing__part_of__thing"]
    assert attrs["test_links"].tolist() == [[1, 1], [2, 0]] and attrs["test_link_types"].tolist() == [0, 1]
    assert attrs["val_links"].tolist() == [[2], [0]] and attrs["val_link_types"].tolist() == [1]
    assert "edges.thing__facts__thing: 2 relations (part_of 3, is-a 2)" in graph.notes
    for rows, message in (
        ("a,,b,x,\n", r"facts\.csv, row 1: rel is empty \(1 such rows\); every edge needs a relation"),
        ("a,is a,b,x,\na,is/a,b,x,\n", "rel 'is a' gives the same name as 'is/a'; rename it in the table"),
        ("a,??,b,x,\n", r"rel '\?\?' gives no name of letters and digits"),
    ):
        with pytest.raises(DataError, match=message):
            load(tmp_path, facts_of(tmp_path, rows), tmp_path / str(len(rows)))


def test_shares_of_edges_with_a_label_are_drawn_alike(tmp_path: Path) -> None:
    sql(
        "COPY (SELECT 'u' || (1 + i % 5) AS who, 7 + i % 3 AS what, CASE WHEN i % 4 > 0 THEN i % 2 + 0.5 END AS stars "
        f"FROM range(6000) r(i)) TO '{tmp_path}/ratings.parquet'"
    )
    keys = {
        "files": "ratings.parquet", "weight": None, "time": None, "label": "stars",
        "split": {"train": 0.5, "val": 0.1, "test": 0.3},
    }  # fmt: skip
    found = [load(shop(tmp_path), with_keys(rates=keys), tmp_path / name).edges[RATES].attrs for name in ("a", "b")]
    y, split = found[0]["y"], found[0]["edge_split"]
    assert np.array_equal(split, found[1]["edge_split"]) and (split[np.isnan(y)] == -1).all()
    shares = np.bincount(split[~np.isnan(y)] + 1) / 4500
    assert shares == pytest.approx([0.1, 0.5, 0.1, 0.3], abs=0.02)


def pairs_of(folder: Path, **rates: Any) -> dict[str, Any]:
    """Write pairs without column names to train.tsv and test.tsv, and return options without node tables."""
    (folder / "train.tsv").write_text("u10\t12\nu9\t7\nu9\t012\nu10\t7\n")
    (folder / "test.tsv").write_text("\u00e9\t7.0\nu9\t100\n")
    table = {
        "files": "train.tsv", "test_files": "test.tsv", "columns": ["who", "what"], "source": "who", "target": "what"
    }  # fmt: skip
    return {"nodes": {"user": {}, "item": None}, "edges": {"user__buys__item": table | rates}}


def test_nodes_without_a_table_are_the_different_ids_of_edge_tables(tmp_path: Path) -> None:
    graph = load(tmp_path, pairs_of(tmp_path), tmp_path / "work")
    assert decode_texts(graph.nodes["user"].attrs["id"]) == ["u10", "u9", "\u00e9"]
    assert decode_texts(graph.nodes["item"].attrs["id"]) == ["012", "100", "12", "7", "7.0"]  # 012 is no number
    assert graph.edges["user", "buys", "item"].edge_index.tolist() == [[0, 1, 1, 0], [2, 3, 0, 3]]
    assert graph.graph_attrs["test_links"].tolist() == [[1, 2], [1, 4]]
    assert "nodes.user: 3 nodes, the different texts in who of edges.user__buys__item" in graph.notes
    write(tmp_path, items__csv="sku,price\n7,1\n12,2\n100,3\n", more__csv="a,b\n12,9.0\n,7\n007,7\n")
    (tmp_path / "train.tsv").write_text("u10\t12\nu9\t7\n")
    options = pairs_of(tmp_path, dangling="drop")
    (tmp_path / "train.tsv").write_text("3\t12\n20\t7\n-1\t7\n3.0\t100\n")
    options["nodes"]["item"] = {"files": "items.csv", "id": "sku"}
    del options["edges"]["user__buys__item"]["test_files"]
    graph = load(tmp_path, options, tmp_path / "mixed")
    assert graph.nodes["user"].attrs["id"].tolist() == [-1, 3, 20]
    assert graph.edges["user", "buys", "item"].edge_index.tolist() == [[1, 2, 0, 1], [1, 0, 0, 2]]


def test_one_type_of_nodes_without_a_table_has_the_ids_of_both_columns(tmp_path: Path) -> None:
    sql(
        "COPY (SELECT * FROM (VALUES (5.0, 'b'), (1.0, 'a'), (NULL, 'a'), ('nan'::DOUBLE, 'c'), (5.0, '1')) t(s, t)) "
        f"TO '{tmp_path}/e.parquet'"
    )
    edges = {"likes": {"files": "e.parquet", "source": "s", "target": "t"}}
    with pytest.raises(DataError, match=r"e\.parquet, row 3: s is empty \(2 such sources"):
        load(tmp_path, {"nodes": {"n": {}}, "edges": edges}, tmp_path / "refused")
    edges["likes"]["dangling"] = "drop"
    graph = load(tmp_path, {"nodes": {"n": {}}, "edges": edges}, tmp_path / "work")
    assert decode_texts(graph.nodes["node"].attrs["id"]) == ["1", "5", "a", "b", "c"]
    assert graph.edges["node", "to", "node"].edge_index.tolist() == [[1, 0, 1], [3, 2, 0]]


def test_mistakes_in_tables_without_names_of_columns(tmp_path: Path) -> None:
    for k, (keys, message) in enumerate((
        ({"columns": ["who"]}, r"train\.tsv: 2 values in a row, but 1 names in `columns`"),
        ({"columns": ["U10", "12"], "source": "U10", "target": "12"}, "the first line has the names of the columns;"),
        ({"columns": ["who", "Who"]}, r"edges\.user__buys__item\.columns names 'who' twice"),
        ({"columns": None}, "seems to contain values: name its columns in `columns`"),
        ({"source": "whom"}, "source 'whom' is not a column: train.tsv has the columns who, what"),
    )):  # fmt: skip
        with pytest.raises(DataError, match=message):
            load(tmp_path, pairs_of(tmp_path, **keys), tmp_path / str(k))
    options = pairs_of(tmp_path)
    options["nodes"]["item"] = {"id": "what"}
    with pytest.raises(DataError, match="nodes.item: files is required; {} alone makes nodes of the ids in edge tab"):
        load(tmp_path, options, tmp_path / "id")
    options["nodes"] = {"user": {}, "item": {}, "shop": {}}
    with pytest.raises(DataError, match="nodes.shop has no files, and no edge table has this type as source or target"):
        load(tmp_path, options, tmp_path / "shop")
    sql(f"COPY (SELECT 1 AS a, 2 AS b) TO '{tmp_path}/e.parquet'")
    keys = {"files": "e.parquet", "test_files": None}
    with pytest.raises(DataError, match="`columns` is for CSV files; .*e.parquet has names of its own"):
        load(tmp_path, pairs_of(tmp_path, **keys), tmp_path / "parquet")


@pytest.mark.slow
def test_ids_of_nodes_without_a_table_are_sorted_on_disk(tmp_path: Path) -> None:
    count = 400_000
    sql(
        f"COPY (SELECT 'user-' || (i * 7919 % {count}) AS who, i % 1000 AS what FROM range({count}) r(i)) "
        f"TO '{tmp_path}/pairs.parquet'"
    )
    edges = {"user__buys__item": {"files": "pairs.parquet", "source": "who", "target": "what"}}
    (tmp_path / "work").mkdir()
    scratch = Scratch(tmp_path / "work", 60 << 20)
    graph = load_dataset("tables", str(tmp_path), {"nodes": {"user": {}, "item": {}}, "edges": edges}, scratch)
    ids = graph.nodes["user"].attrs["id"]
    assert len(ids) == count and isinstance(ids, np.memmap)
    some = decode_texts(ids[:: count // 100])
    assert some == sorted(some) and decode_texts(ids[:2]) == ["user-0", "user-1"]
    source, target = graph.edges["user", "buys", "item"].edge_index[:, :500]
    assert decode_texts(ids[source]) == [f"user-{i * 7919 % count}" for i in range(500)]
    assert target.tolist() == [i % 1000 for i in range(500)]


def test_drafted_options_are_read(tmp_path: Path) -> None:
    folder = shop(tmp_path)
    write(folder, README__md="Shop\nsold\nbought\n", schema__json='{"users": {}}\n', Makefile="all:\n")  # no tables
    drafted = draft_tables(folder)
    ((country,),) = drafted.pop("comments")["nodes"].values()
    assert country.startswith(
        "country is not used: its 3 different texts are more than the 2 for which one_hot is draft"
    )
    assert drafted == {
        "nodes": {
            "item": {"files": "items.csv", "id": "sku", "features": ["price"], "standardize": True},
            "user": {
                "files": "users.csv", "id": "user_id", "split": "fold", "time": "joined",
                "features": ["age", "height"], "standardize": True, "one_hot": ["segment"],
            },
        },
        "edges": {
            "user__ratings__item": {
                "files": "ratings.csv", "source": "who", "target": "what", "time": "at",
                "features": ["stars"], "standardize": True,
            }
        },
        "undirected": True,
    }  # fmt: skip
    graph = load(tmp_path, drafted, tmp_path / "work")
    assert graph.edges["user", "ratings", "item"].num_edges == 5
    assert graph.edges["item", "rev_ratings", "user"].num_edges == 5


def test_a_draft_of_integer_ids_takes_the_two_columns_of_the_same_type(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k % 3},{k / 7:.2f}\n" for k in range(50))
    cites = "".join(f"{k % 5},{k % 50},{k * 7 % 50}\n" for k in range(80))
    write(tmp_path, papers__csv="paper,label,f0\n" + rows, cites__csv="times,citing_paper,cited_paper\n" + cites)
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["paper"] == {
        "files": "papers.csv", "id": "paper", "label": "label", "split": {"train": 0.8, "val": 0.1, "test": 0.1},
        "features": ["f0"], "standardize": True,
    }  # fmt: skip
    edges = drafted["edges"]["paper__cites__paper"]
    assert (edges["source"], edges["target"], edges["features"]) == ("citing_paper", "cited_paper", ["times"])


def customers(tmp_path: Path, more: str = "", rows: int = 40) -> Path:
    """Write customers.csv with columns of many kinds, and an edge table. ``more``: further lines of customers.csv."""
    lines = [
        f"c{k},{20 + k % 7 if k % 8 else 'unknown'},person {k},{'' if k % 3 == 0 else k % 2},{k % 5},,"
        f"2024-01-{1 + k % 9:02},2025-01-{1 + k % 9:02},{'' if k % 4 == 0 else k / 4},note {k // 2}\n"
        for k in range(rows)
    ]
    head = "customer,age,name,churned,shop_id,empty,joined,left,income,note\n"
    edges = "who,friend\n" + "".join(f"c{k},c{(k + 1) % rows}\n" for k in range(rows))
    write(tmp_path, customers__csv=head + "".join(lines) + more, friends__csv=edges)
    return tmp_path


def test_every_column_is_in_the_draft(tmp_path: Path) -> None:
    drafted = draft_tables(customers(tmp_path))
    table, notes = drafted["nodes"]["customer"], " | ".join(drafted["comments"]["nodes"]["customer"])
    assert table == {
        "files": "customers.csv", "id": "customer", "label": "churned",
        "split": {"train": 0.8, "val": 0.1, "test": 0.1}, "time": "joined", "features": ["income"],
        "standardize": True, "fill": 0, "one_hot": ["note"],
    }  # fmt: skip
    for text in (
        "churned is 0 or 1, and empty in 35% of the rows: taken as the label",
        "empty cells become 0: income (25%)",
        "age is not used: 5 of its 40 values are not numbers, such as 'unknown'; if these mean missing values, list",
        "name is not used: it has another text in each row",
        "shop_id is not used: it looks like a key of another table",
        "empty is not used: it is empty",
        "left is not used: another column is the time",
    ):
        assert text in notes
    graph = load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")
    assert sum(map(len, graph.nodes["node"].splits.values())) == 26


def test_categories_with_the_name_of_a_split_are_left_out_of_the_draft(tmp_path: Path) -> None:
    cells = "".join(f"m{k},merchant of {k % 80}{'abc'[k % 3]}\n" for k in range(80))
    cells += cells.replace("m", "n", 1).replace("\nm", "\nn")
    write(customers(tmp_path), members__csv="id,merchant_idx\n" + cells)
    drafted = draft_tables(tmp_path)
    assert "categories" not in drafted["nodes"]["member"]
    notes = " | ".join(drafted["comments"]["nodes"]["member"])
    assert "merchant_idx is not used: categories of nodes cannot have the name of a split; rename the column" in notes


def test_lists_and_weights_that_cannot_be_read_are_not_drafted(tmp_path: Path) -> None:
    lists = "[1.0, 2.0] AS even, CASE WHEN range = 3 THEN [1.0] ELSE [1, 2] END AS odd, [1, NULL] AS gaps"
    lists += ", ['nan'::FLOAT] AS nans, CASE WHEN range != 3 THEN [1] END AS none"
    sql(f"COPY (SELECT range AS id, {lists} FROM range(40)) TO '{tmp_path}/members.parquet'")
    for name, weight in (("empty", ""), ("endless", "inf"), ("below", "-1"), ("right", "0")):
        cells = [f"{k},{k * k % 40},{weight if k == 7 else k},{k % 2}\n" for k in range(40)] * 2
        (tmp_path / f"{name}.csv").write_text("s,t,weight,label\n" + "".join(cells))
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["member"]["features"] == ["even"]
    notes = " | ".join(drafted["comments"]["nodes"]["member"])
    assert all(
        f"{name} is not used: its lists are not equally long" in notes for name in ("odd", "gaps", "nans", "none")
    )
    edges = {of.split("__")[1]: table for of, table in drafted["edges"].items()}
    assert [name for name, table in sorted(edges.items()) if "weight" in table] == ["right"]
    assert edges["below"]["features"] == ["weight", "label"] and edges["empty"]["fill"] == 0
    assert "with `label: label` and a split" in str(drafted["comments"]["edges"])
    load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")


def test_splits_of_another_form_are_no_features_of_the_draft(tmp_path: Path) -> None:
    lines = ["id,y,train_mask,is_test,fold,data_split,age,gap,none\n"]
    for k in range(40):
        split = ["training", "holdout"][k % 3 == 0]
        lines.append(f"m{k},{k % 2},{k % 3 == 1},{k % 3 == 2},{k % 5},{split},{k * k},{'nan' if k % 3 else k},NaN\n")
    write(customers(tmp_path), members__csv="".join(lines))
    drafted = draft_tables(tmp_path)
    table, notes = drafted["nodes"]["member"], " | ".join(drafted["comments"]["nodes"]["member"])
    assert table["features"] == ["age", "gap"] and table["fill"] == 0 and "one_hot" not in table
    for name in ("train_mask", "is_test", "fold", "data_split"):
        assert f"{name} is not used: it looks like a split" in notes
    assert "none is not used: it is empty" in notes


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (("1", "-1"), "label: -1 means no label, and all others are one class"),
        (("1", "0", "n/a"), "label: 13 of its 40 values are not numbers, such as 'n/a', so each text is a class"),
        (("1.5", "inf"), "label is not used: it has infinite values"),
    ],
)
def test_labels_that_are_not_meant_so_are_noted_in_the_draft(
    tmp_path: Path, values: tuple[str, ...], note: str
) -> None:  # fmt: skip
    lines = [f"m{k},{values[k % len(values)]},{k * k % 7}\n" for k in range(40)]
    write(customers(tmp_path), members__csv="id,label,age\n" + "".join(lines))
    drafted = draft_tables(tmp_path)
    assert any(text.startswith(note) for text in drafted["comments"]["nodes"]["member"])
    assert ("label" in drafted["nodes"]["member"]) == ("inf" not in values)


@pytest.mark.parametrize("values", [("1.0", "0.0"), ("True", "False"), ("yes", "no")])
def test_two_values_and_empty_cells_are_the_label(tmp_path: Path, values: tuple[str, str]) -> None:
    cells = [("", *values)[k % 3] for k in range(30)]
    write(customers(tmp_path), members__csv="id,paid\n" + "".join(f"m{k},{cell}\n" for k, cell in enumerate(cells)))
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["member"]["label"] == "paid"
    assert "and empty in 33% of the rows: taken as the label" in drafted["comments"]["nodes"]["member"][0]


def test_columns_that_tell_the_label_are_left_out_of_the_draft(tmp_path: Path) -> None:
    lines = ["id,label,word,score,late,age,city,y,v\n"]
    for k in range(60):
        left = k % 2
        word, late, score = "left" if left else "here", k if left else "", left * 100 + k
        lines.append(f"m{k},{left},{word},{score},{late},{20 + k * 7 % 31},{'abc'[k % 3]},,\n")
    write(customers(tmp_path), members__csv="".join(lines))
    drafted = draft_tables(tmp_path)
    member, notes = drafted["nodes"]["member"], " | ".join(drafted["comments"]["nodes"]["member"])
    assert (member["features"], member["one_hot"]) == (["age"], ["city"])
    assert "word is not used: a leak? it tells label in 60 of 60 rows; if it is known beforehand" in notes
    assert "score is not used: a leak? it tells label: sorted by it, the labels are, too" in notes
    assert "late is not used: a leak? it tells label: where it is not empty, label is the same" in notes


def test_columns_that_a_drafted_table_could_not_be_read_with_are_left_out(tmp_path: Path) -> None:
    lines = [
        f'{k},m{k},{k},{k},{"" if k % 9 else "2024-01-01"},{"inf" if k == 3 else k},"{k % 3},5"\n' for k in range(20)
    ]
    write(customers(tmp_path), members__csv=",id,v,V,at,size,price\n" + "".join(lines))
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["member"] == {"files": "members.csv", "id": "id"}
    notes = " | ".join(drafted["comments"]["nodes"]["member"])
    for text in (
        "column0 is not used: it numbers the rows, as the index that pandas writes",
        "v is not used: two columns have this name",
        "v_1 is not used: two columns have this name",
        "at is not used: it is empty or infinite in 85% of the rows, and a time must be in all",
        "size is not used: it has infinite values",
        "price is not used: its values, such as '2,5', are neither numbers as 1234.5 nor times as 2024-05-17",
    ):
        assert text in notes
    load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")


def test_keys_with_a_point_are_keys_in_the_draft(tmp_path: Path) -> None:
    owned = "".join(f"{100 + k},{'' if k % 9 == 0 else f'{k % 20 + 1}.0'}\n" for k in range(40))
    write(tmp_path, users__csv="uid,age\n" + "".join(f"{k},{k * 3}\n" for k in range(1, 21)))
    write(tmp_path, carts__csv="cart_id,uid\n" + owned)
    drafted = draft_tables(tmp_path)
    assert drafted["edges"] == {
        "user__has__cart": {"files": "carts.csv", "source": "uid", "target": "cart_id", "dangling": "drop"}
    }
    assert drafted["comments"]["edges"]["user__has__cart"] == ["dangling: uid is empty in 5 rows: no edges"]


def test_uuids_of_edges_are_left_out_of_the_draft(tmp_path: Path) -> None:
    sql(f"COPY (SELECT 'u' || range AS who, range % 7 AS age FROM range(40)) TO '{tmp_path}/users.parquet'")
    pairs = "'u' || range % 40 AS who, 'u' || range * 7 % 40 AS whom, uuid() AS token"
    sql(f"COPY (SELECT {pairs} FROM range(200)) TO '{tmp_path}/follows.parquet'")
    drafted = draft_tables(tmp_path)
    ((note,),) = drafted["comments"]["edges"].values()
    assert note.startswith("token is not used")
    load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16"])
def test_an_encoding_is_guessed_in_the_draft_and_nothing_is_left_in_the_folder(tmp_path: Path, encoding: str) -> None:
    text = "id,town\n" + "".join(
        f"m{k},{('Köln', 'Łódź' if encoding == 'utf-16' else 'Wien')[k % 2]}\n" for k in range(9)
    )
    write(customers(tmp_path), members__csv=text.encode(encoding))
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["member"]["encoding"] == encoding
    assert f"encoding: the file is not in UTF-8; {encoding} is a guess" in drafted["comments"]["nodes"]["member"]
    load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")
    write(tmp_path, members__csv="id,town\nm1,a,b\n")
    with pytest.raises(DataError, match=r"^members\.csv: .*members\.csv, line 2: has more values than the header"):
        draft_tables(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"customers.csv", "friends.csv", "members.csv", "work"}


def test_a_repeated_or_missing_id_is_named_with_its_rows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"customers\.csv: customer 'c3' is in row 4 and row 41; an id must be in one"):
        draft_tables(customers(tmp_path, "c3,1,x,0,0,,2024-01-01,2024-01-01,1,y\n"))
    with pytest.raises(DataError, match=r"customers\.csv, row 41: customer is empty; an id must be in every row"):
        draft_tables(customers(tmp_path, ",1,x,0,0,,2024-01-01,2024-01-01,1,y\n"))


def test_files_whose_names_make_the_same_type_are_drafted_apart(tmp_path: Path) -> None:
    users, items = ("".join(f"{letter}{k},{k % 7}\n" for k in range(20)) for letter in "ui")
    buys = "user,item\n" + "".join(f"u{k % 20},i{k * 7 % 20}\n" for k in range(90))
    tables = {"用户__csv": "id,age\n" + users, "商品__csv": "id,price\n" + items, "a-1__csv": buys, "a_1__csv": buys}
    drafted = draft_tables(write(tmp_path, **tables))
    ids = {name: drafted["nodes"][name]["files"] for name in drafted["nodes"]}
    assert ids == {"table": "商品.csv", "table_2": "用户.csv"}
    assert set(drafted["edges"]) == {"table_2__a_1__table", "table_2__a_1_2__table"}
    load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")
    (tmp_path / "train.csv").write_text(buys)
    (tmp_path / "training.csv").write_text(buys)
    files = [table["files"] for table in draft_tables(tmp_path)["edges"].values()]
    assert sorted(files) == ["a-1.csv", "a_1.csv", "train.csv", "training.csv"]


@pytest.mark.parametrize(
    ("head", "values", "drafted", "option"),
    [
        ("at", ["2024-01-01 10:00 PM", "2024-01-02"], {"one_hot": ["at"]}, {}),  # a TIMESTAMP of DuckDB, but no time
        ("time", [10**30, 10**30 + 1], {"features": ["time"], "standardize": True}, {}),
        ("target", [0, 250_000], {"label": "target"}, {"num_classes": 0}),
        ("target", [-7, 3], {"label": "target"}, {"num_classes": 0}),
    ],
)
def test_drafted_times_and_labels_can_be_read(
    tmp_path: Path, head: str, values: list[Any], drafted: dict[str, Any], option: dict[str, int]
) -> None:
    rows = "".join(f"m{k},{values[k % 2]}\n" for k in range(20))
    people = "".join(f"p{k},m{k % 20}\n" for k in range(20))
    likes = "who,whom\n" + "".join(f"p{k % 20},m{k * 3 % 20}\n" for k in range(60))
    found = draft_tables(
        write(tmp_path, members__csv=f"id,{head}\n{rows}", people__csv="id,m\n" + people, likes__csv=likes)
    )
    table = found["nodes"]["member"]
    assert {key: table[key] for key in drafted} == drafted and "time" not in table
    options = {key: of for key, of in found.items() if key != "comments"}
    assert {key: of for key, of in options.items() if key == "num_classes"} == option
    load(tmp_path, options, tmp_path / "work")


def test_a_printed_draft_is_yaml_whatever_folder_and_columns_are_called(tmp_path: Path) -> None:
    (tmp_path / "shop #2").mkdir()
    folder = customers(tmp_path / "shop #2")
    write(folder, members__csv='id,"two\nnames: x"\n' + "".join(f"m{k},\n" for k in range(20)))
    printed = CliRunner().invoke(partition, ["tables", str(folder)])
    assert yaml.safe_load(printed.output)["data"]["source"] == str(folder), printed.output


def test_tables_of_licenses_are_drafted_and_texts_about_them_are_not(tmp_path: Path) -> None:
    rows = "".join(f"l{k},{k}\n" for k in range(20))
    write(customers(tmp_path), licenses__csv="license,year_of\n" + rows, LICENSE__txt="as is\n", README__txt="a,b\n")
    assert {"customer", "license"} == set(draft_tables(tmp_path)["nodes"])


def test_columns_whose_names_differ_but_for_case_are_named(tmp_path: Path) -> None:
    (tmp_path / "users").mkdir()
    write(customers(tmp_path) / "users", a__csv="id,Age\n1,5\n", b__csv="id,age\n2,5\n")
    with pytest.raises(DataError, match="users: the columns 'Age' and 'age' have the same name but for case; rename"):
        draft_tables(tmp_path)


def test_texts_that_databases_take_for_numbers_and_times(tmp_path: Path) -> None:
    rows = "".join(f"m{k},{('18_24', '25_34')[k % 2]},{'infinity' if k % 4 else '2024-01-01'}\n" for k in range(20))
    write(customers(tmp_path), members__csv="id,band,valid_to\n" + rows)
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"]["member"] == {"files": "members.csv", "id": "id", "one_hot": ["band"]}
    (note,) = drafted["comments"]["nodes"]["member"]
    assert note.startswith("valid_to is not used: it is empty or infinite in 75% of the rows")


def test_a_table_that_is_not_used_is_named(tmp_path: Path) -> None:
    write(customers(tmp_path), visits__csv="page,seconds\n" + "home,3\n" * 9)
    (line,) = draft_tables(tmp_path)["comments"]["unused"]
    assert line.startswith("visits.csv is not used: it has neither a column with a different value in each row")


@pytest.mark.parametrize(
    "text",
    ["u1,34\nu2,41\nu3,28\n", "anna,red\nbob,red\ncarl,blue\n", "0,1\n1,2\n2,0\n"],
)
def test_a_file_without_names_of_columns_gets_names(tmp_path: Path, text: str) -> None:
    write(customers(tmp_path), users__csv=text)
    drafted = draft_tables(tmp_path)
    user = drafted["nodes"]["user"]
    assert (user["columns"], user["id"]) == (["column1", "column2"], "column1")
    assert drafted["comments"]["nodes"]["user"][0].startswith("the first line seems to be a row of data")
    graph = load(tmp_path, {name: drafted[name] for name in ("nodes", "edges")}, tmp_path / "work")
    assert graph.nodes["user"].num_nodes == 3


def interactions(rows: int, users: int, items: int) -> list[tuple[int, int]]:
    return [(1 + k % users, 1 + k * 7 % items) for k in range(rows)]


def test_pairs_in_files_for_train_and_test_are_drafted_without_node_tables(tmp_path: Path) -> None:
    pairs = interactions(400, 30, 90)
    lines = {"train.tsv": pairs, "test.tsv": [(u, i % 90 + 1) for u, i in pairs[:30]]}  # each user once
    lines["trust.tsv"] = [(1 + k % 30, 1 + (k * k + k // 7) % 30) for k in range(90)] + [(30, 1)]
    for name, rows in lines.items():
        (tmp_path / name).write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    drafted = draft_tables(tmp_path)
    comments = drafted.pop("comments")
    table = {"columns": ["column1", "column2"], "source": "column1", "target": "column2"}
    assert drafted == {
        "nodes": {"user": {}, "item": {}},
        "edges": {
            "user__interacts__item": {"files": "train.tsv", "test_files": "test.tsv", **table},
            "user__trust__user": {"files": "trust.tsv", **table},
        },
        "undirected": True,
    }  # fmt: skip
    assert comments["nodes"]["item"] == [
        "no table: its nodes are the different values of column2 of train.tsv; a guess"
    ]
    assert comments["edges"]["user__interacts__item"][0].startswith("train.tsv, test.tsv have equal columns")
    graph = load(tmp_path, drafted, tmp_path / "work")
    assert graph.graph_attrs["test_links"].shape == (2, 30) and graph.nodes["item"].num_nodes == 90


def test_ratings_with_one_of_the_node_tables_are_drafted(tmp_path: Path) -> None:
    rows = [f"{u},{i * 37},{k % 5 + 1},{964982703 + k * 100}\n" for k, (u, i) in enumerate(interactions(300, 20, 40))]
    movies = "".join(f"{i * 37},Movie {i % 39},Drama|Crime\n" for i in range(1, 41))
    links = "".join(f"{i * 37},{i * 1000 + 17}\n" for i in range(1, 41))
    write(
        tmp_path, ratings__csv="userId,movieId,rating,timestamp\n" + "".join(rows),
        movies__csv="movieId,title,genres\n" + movies, links__csv="imdbId,movieKey\n" + links,
    )  # fmt: skip
    drafted = draft_tables(tmp_path)
    assert list(drafted["nodes"]) == ["user", "movie"] and drafted["nodes"]["user"] == {}
    assert drafted["nodes"]["movie"]["id"] == "movieId"
    assert drafted["edges"] == {
        "user__ratings__movie": {
            "files": "ratings.csv", "source": "userId", "target": "movieId", "time": "timestamp",
            "features": ["rating"], "standardize": True,
        }
    }  # fmt: skip
    assert drafted["comments"]["edges"]["user__ratings__movie"][0].startswith("with `label: rating` and a split,")
    assert drafted["comments"]["unused"] == ["links.csv is not used: it has no two columns of ids"]


@pytest.mark.parametrize(
    ("head", "row", "edge", "ends"),
    [
        ("userId,movieId,rating", "{a},{b},{c}", "user__log__movie", ["userId", "movieId"]),
        ("movieId,userId,rating", "{b},{a},{c}", "movie__log__user", ["movieId", "userId"]),
        ("shopper_id,movieId,qty", "{d},{b},{c}", "shopper__log__movie", ["shopper_id", "movieId"]),
        ("movieId,sequel_id,stars", "{b},{e},{c}", "movie__log__movie", ["movieId", "sequel_id"]),
        ("a,b,n", "{b},{a},{c}", "movie__log__movie", ["a", "b"]),
    ],
)
def test_numbers_of_others_are_no_ids_of_a_node_table_that_has_them(
    tmp_path: Path, head: str, row: str, edge: str, ends: list[str]
) -> None:  # fmt: skip
    movies = "".join(f"{k},{k / 4}\n" for k in range(1, 101))
    lines = (row.format(a=k % 60 + 1, b=k % 99 + 1, c=k % 5 + 1, d=k % 700, e=k * 7 % 100 + 1) for k in range(1400))
    write(tmp_path, movies__csv="movieId,price\n" + movies, log__csv="\n".join([head, *lines, ""]))
    if "userId" in head:  # as in MovieLens, whose links.csv has the same ids
        write(tmp_path, links__csv="movieId,imdb\n" + "".join(f"{k},{k * 9 + 1000}\n" for k in range(1, 101)))
    drafted = draft_tables(tmp_path)
    assert [*drafted["edges"]] == [edge] and [drafted["edges"][edge][end] for end in ("source", "target")] == ends
    assert drafted["nodes"]["movie"]["files"] == "movies.csv" and "dangling" not in drafted["edges"][edge]


def test_texts_in_both_columns_are_ids_of_one_type_if_they_are_the_same(tmp_path: Path) -> None:
    rows = [(f"p{k % 40}", f"p{k * k % 40}", f"t{k % 7}") for k in range(200)]
    write(tmp_path, follows__csv="follower,followed,topic\n" + "".join(",".join(row) + "\n" for row in rows))
    assert draft_tables(tmp_path)["edges"].keys() == {"follower__follows__follower"}
    write(tmp_path, follows__csv="source,target,split\n" + "".join(
        f"{a},{b},{('train', 'val', 'test', 'train')[k % 4]}\n" for k, (a, b, _) in enumerate(rows)
    ))  # fmt: skip
    drafted = draft_tables(tmp_path)
    assert drafted["nodes"] == {"node": {}}
    assert drafted["edges"]["node__follows__node"]["split"] == "split" and "undirected" not in drafted


def test_files_of_node_tables_for_train_and_test_stay_tables(tmp_path: Path) -> None:
    for name, first in (("train", 0), ("test", 40)):
        rows = "".join(f"p{first + k},{k % 3}\n" for k in range(40))
        write(tmp_path, **{f"papers_{name}__csv": "paper,field\n" + rows})
    write(tmp_path, cites__csv="a,b\n" + "".join(f"p{k % 40},p{k * 3 % 40}\n" for k in range(99)))
    assert draft_tables(tmp_path)["nodes"].keys() == {"papers_test", "papers_train"}


@pytest.mark.parametrize("key", ["features", "one_hot", "categories", "attributes", "time", "split"])
def test_a_label_that_the_model_would_read_is_refused(tmp_path: Path, key: str) -> None:
    value = "age" if key in ("time", "split") else ["height", "age"]
    with pytest.raises(DataError, match=f"nodes.user: 'age' is the label and also in {key}, so the model would read"):
        load(shop(tmp_path), with_keys(user={"features": "height", "label": "age", key: value}), tmp_path / "work")


def test_a_folder_without_edges_is_refused_with_its_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no CSV or Parquet files"):
        draft_tables(tmp_path)
    write(tmp_path, users__csv=USERS)
    with pytest.raises(DataError, match=r"recognised in: users\.csv \(user_id, age, .*write data\.options yourself"):
        draft_tables(tmp_path)


def test_a_table_of_both_csv_and_parquet_files_is_not_left_out_of_a_draft(tmp_path: Path) -> None:
    shop(tmp_path)
    (tmp_path / "visits").mkdir()
    for name in ("2024.parquet", "2025.csv"):
        (tmp_path / "visits" / name).touch()
    with pytest.raises(DataError, match=r"visits: files of a table must be .*2024\.parquet and 2025\.csv"):
        draft_tables(tmp_path)


def test_texts_become_columns_of_zeros_and_ones_after_the_features(tmp_path: Path) -> None:
    graph = load(shop(tmp_path), with_keys(user={"one_hot": "segment", "label": None}), tmp_path / "work")
    plain = load(shop(tmp_path), SHOP, tmp_path / "plain").nodes["user"].attrs["x"]
    x = graph.nodes["user"].attrs["x"]
    rows = [line.split(",") for line in USERS.strip().splitlines()]
    column = rows[0].index("segment")
    texts = sorted({row[column] for row in rows[1:]} - {""})
    assert x.shape == (len(plain), plain.shape[1] + len(texts)) and (x[:, : plain.shape[1]] == plain).all()
    assert x[:, plain.shape[1] :].tolist() == [[float(row[column] == each) for each in texts] for row in rows[1:]]
    assert any("segment → x:" in note for note in graph.notes)


def test_too_many_texts_for_columns_are_refused(tmp_path: Path) -> None:
    sql(f"COPY (SELECT 'n' || i AS id, 't' || i AS word FROM range(1500) r(i)) TO '{tmp_path}/n.csv'")
    write(tmp_path, e__csv="s,t\nn0,n1\n")
    options = {
        "nodes": {"n": {"files": "n.csv", "id": "id", "one_hot": ["word"]}},
        "edges": {"e": {"files": "e.csv", "source": "s", "target": "t"}},
    }
    with pytest.raises(DataError, match="one_hot 'word' has more than 1,024 different values"):
        load(tmp_path, options, tmp_path / "work")
