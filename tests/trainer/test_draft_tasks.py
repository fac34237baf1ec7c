"""Drafts of folders with a task table: which table is one, and what becomes of the tables of events."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from train_kit import job
from trainer.core.graph_attrs import decode_texts
from trainer.core.row_sort import Scratch
from trainer.graph.open import open_graph
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sources.draft_tables import draft_tables
from trainer.sources.load import load_dataset
from trainer.train.job import train
from trainer.train.model import embedded_nodes
from trainer.train.settings import TrainSettings

STAMPS = [f"2024-{1 + k % 12:02}-{1 + k % 28:02} {k % 24:02}:00:00" for k in range(400)]
ORDERS = [f"{k},c{k % 30},p{k * 7 % 20},{STAMPS[k]},{1 + k % 3}" for k in range(200)]
CLICKS = [f"c{k % 30},p{k * 3 % 20},{STAMPS[k]}" for k in range(400)]
MONTHS = [f"c{k % 30},2024-{1 + k // 30:02}-01" for k in range(240)]


def shop(folder: Path, **more: list[str]) -> Path:
    """Write the tables of a shop; ``more``: further ones, or others in their place, as lines."""
    tables = {
        "customers": ["customer_id,age", *(f"c{k},{20 + k}" for k in range(30))],
        "products": ["sku,price", *(f"p{k},{k / 4}" for k in range(20))],
        "orders": ["order_id,customer_id,sku,bought_at,amount", *ORDERS],
        "clicks": ["customer_id,sku,clicked_at", *CLICKS],
        "churn": [
            "customer_id,at,churned",
            *(f"{row},{'' if k % 9 == 0 else k % 2}" for k, row in enumerate(MONTHS)),
        ],
        **more,
    }
    for name, lines in tables.items():
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_types_are_called_by_the_singular_of_their_file(tmp_path: Path) -> None:
    for name in ("branches", "movies", "boxes", "glass"):
        (tmp_path / f"{name}.csv").write_text(f"{name}_id,size\n" + "".join(f"{name}{k},{k}\n" for k in range(9)))
    links = "".join(f"branches{k},movies{k},boxes{k},glass{k}\n" for k in range(9))
    (tmp_path / "links.csv").write_text("branches_id,movies_id,boxes_id,glass_id\n" + links)
    assert set(draft_tables(tmp_path)["nodes"]) >= {"branch", "movie", "box", "glass"}


def test_rows_about_one_entity_at_a_time_are_a_task_and_events_are_nodes(tmp_path: Path) -> None:
    drafted = draft_tables(shop(tmp_path))
    comments = drafted.pop("comments")
    assert drafted == {
        "nodes": {
            "customer": {"files": "customers.csv", "id": "customer_id", "features": ["age"], "standardize": True},
            "product": {"files": "products.csv", "id": "sku", "features": ["price"], "standardize": True},
            "click": {"files": "clicks.csv", "id": "rowid", "time": "clicked_at"},
            "order": {
                "files": "orders.csv", "id": "order_id", "time": "bought_at", "features": ["amount"],
                "standardize": True,
            },
        },
        "edges": {
            "customer__has__click": {"files": "clicks.csv", "source": "customer_id", "target": "rowid"},
            "product__has__click": {"files": "clicks.csv", "source": "sku", "target": "rowid"},
            "customer__has__order": {"files": "orders.csv", "source": "customer_id", "target": "order_id"},
            "product__has__order": {"files": "orders.csv", "source": "sku", "target": "order_id"},
        },
        "tasks": {
            "churn": {
                "table": "churn.csv", "entity": "customer", "id": "customer_id", "time": "at", "label": "churned",
                "split": {"val_time": "2024-06-01", "test_time": "2024-07-01"},
            }
        },
        "undirected": True,
    }  # fmt: skip
    assert comments["tasks"]["churn"][0] == (
        "churn.csv: rows about customer nodes at a time, churned is predicted: a task table; remove it if not"
    )
    assert comments["learn"] == ["classification", ["roc_auc", "accuracy"]]
    assert comments["links"] == {
        "name": "customer__clicks__product",
        "table": {"files": "clicks.csv", "source": "customer_id", "target": "sku", "time": "clicked_at"},
    }


@pytest.mark.parametrize(
    ("head", "values", "label"),
    [
        ("customer_id,at,target", [f"{k / 7:.2f}" for k in range(240)], "target"),  # by its name
        ("customer_id,at,plan", ["abc"[k % 3] for k in range(240)], "plan"),  # the only column, at few times
        ("customer_id,at,total,spent_next", [f"{k % 5},{k % 99}" for k in range(240)], "spent_next"),  # as the file
    ],
)
def test_the_column_that_is_predicted(tmp_path: Path, head: str, values: list[str], label: str) -> None:
    lines = [head, *(f"{row},{value}" for row, value in zip(MONTHS, values, strict=True))]
    shop(tmp_path, spent=lines)
    (tmp_path / "churn.csv").unlink()
    drafted = draft_tables(tmp_path)
    assert drafted["tasks"]["spent"]["label"] == label
    numbers = label != "plan"
    assert drafted["comments"]["learn"][0] == ("regression" if numbers else "classification")
    assert (drafted.get("num_classes"), drafted.get("target")) == ((0, "spent") if numbers else (None, None))


@pytest.mark.parametrize(
    "lines",
    [
        ["payment_id,customer_id,paid_at,amount", *(f"{k},c{k % 30},{STAMPS[k]},{k % 9}" for k in range(300))],
        ["customer_id,paid_at,amount", *(f"c{k % 30},{STAMPS[k]},{k % 9}" for k in range(300))],  # as they happen
        ["customer_id,sku,at,label", *(f"c{k % 30},p{k % 20},{STAMPS[k]},{k % 2}" for k in range(300))],
    ],
)
def test_what_happens_to_customers_is_no_task(tmp_path: Path, lines: list[str]) -> None:
    drafted = draft_tables(shop(tmp_path, payments=lines))
    assert list(drafted["tasks"]) == ["churn"]
    assert "payment" in drafted["nodes"] and "customer__has__payment" in drafted["edges"]
    (tmp_path / "churn.csv").unlink()
    assert "tasks" not in draft_tables(tmp_path)


@pytest.mark.parametrize("lists", [True, False])
def test_rows_that_list_nodes_are_a_task(tmp_path: Path, lists: bool) -> None:
    """A column of lists, or a row for each target; those of the months in which customers buy."""
    shop(tmp_path)
    (tmp_path / "churn.csv").unlink()
    bought = [(*row.split(","), [f"p{(k * 7 + j) % 20}" for j in range(1 + k % 4)]) for k, row in enumerate(MONTHS)]
    if lists:
        values = ", ".join(f"('{c}', DATE '{at}', {of}::VARCHAR[])" for c, at, of in bought)
        duckdb.sql(f"COPY (SELECT * FROM (VALUES {values}) t(customer_id, month, skus)) TO '{tmp_path}/next.parquet'")
    else:
        lines = ["customer_id,month,sku", *(f"{c},{at},{sku}" for c, at, of in bought for sku in of)]
        (tmp_path / "next.csv").write_text("\n".join(lines) + "\n")
    drafted = draft_tables(tmp_path)
    label, file = ("skus", "next.parquet") if lists else ("sku", "next.csv")
    assert drafted["tasks"] == {
        "next": {
            "table": file, "entity": "customer", "id": "customer_id", "time": "month", "label": label,
            "targets": "product", "split": {"val_time": "2024-06-01", "test_time": "2024-07-01"},
        }
    }  # fmt: skip
    assert drafted["comments"]["learn"] == ["link", ["recall@10", "ndcg@10", "map@10"]]
    assert drafted["comments"]["rows"][file] == (len(MONTHS) if lists else sum(len(of) for *_, of in bought))
    assert "links" not in drafted["comments"] and {"order", "click"} < drafted["nodes"].keys()
    del drafted["comments"]
    (tmp_path / "work").mkdir()
    graph = load_dataset("tables", str(tmp_path), drafted, Scratch(tmp_path / "work", 300 << 20))
    assert graph.nodes["next"].num_nodes == len(MONTHS)
    assert graph.edges["next", "lists", "product"].num_edges == sum(len(of) for *_, of in bought)


def test_a_time_after_the_rows_is_not_that_of_their_nodes(tmp_path: Path) -> None:
    """When a customer was last seen would hide it from most rows; when it joined does not."""
    for name, day in (("last_seen", "2024-12-31"), ("joined", "2023-12-31")):
        customers = [f"customer_id,age,{name}", *(f"c{k},{20 + k},{day}" for k in range(30))]
        drafted = draft_tables(shop(tmp_path, customers=customers))
        comments, used = drafted["comments"]["nodes"].get("customer", []), name == "joined"
        assert drafted["nodes"]["customer"].get("time") == (name if used else None)
        assert any("240 of the 240 rows of churn.csv are earlier" in each for each in comments) != used
        said: list[str] = []
        drafted["nodes"]["customer"]["time"] = name
        del drafted["comments"]
        spec = PartitionSpec("tables", str(tmp_path / name), str(tmp_path), drafted, 1, "hash")
        make_partition(spec, say=said.append)
        assert any("240 of 240 rows are earlier than their customer node" in line for line in said) != used


def test_labels_of_nodes_are_trained_instead(tmp_path: Path) -> None:
    lines = ["customer_id,age,label", *(f"c{k},{20 + k},{k % 2}" for k in range(30))]
    drafted = draft_tables(shop(tmp_path, customers=lines))
    assert drafted["nodes"]["customer"]["label"] == "label" and "churn" in drafted["tasks"]
    assert "links" not in drafted["comments"]


@pytest.mark.slow
def test_few_times_are_divided_between_the_splits(tmp_path: Path) -> None:
    def split(times: list[str]) -> Any:
        rows = [f"c{k % 30},{times[k * len(times) // 240]},{k % 2}" for k in range(240)]
        return draft_tables(shop(tmp_path, churn=["customer_id,at,churned", *rows]))["tasks"]["churn"]["split"]

    assert split(["2024-01-01", "2024-02-01", "2024-03-01"]) == {"val_time": "2024-02-01", "test_time": "2024-03-01"}
    assert split(["2024-01-01", "2024-02-01"]) == {"train": 0.7, "val": 0.15, "test": 0.15}
    assert split([str(1_700_000_000 + k) for k in range(100)]) == {"val_time": 1700000069, "test_time": 1700000084}
    hours = split([f"2024-01-01 {hour:02}:00:00" for hour in range(20)])
    assert hours == {"val_time": "2024-01-01 13:00:00", "test_time": "2024-01-01 16:00:00"}


def test_times_beyond_the_dates_of_python_are_divided_between_the_splits(tmp_path: Path) -> None:
    day = 86_400_000  # milliseconds
    churn = [f"c{k % 30},{1_700_000_000_000 + k // 30 * 30 * day},{k % 2}" for k in range(240)]
    orders = [f"{k},c{k % 30},p{k * 7 % 20},{1_700_000_000_000 + k // 3 * day}" for k in range(200)]
    shop(
        tmp_path, churn=["customer_id,timestamp,churned", *churn],
        orders=["order_id,customer_id,sku,timestamp", *orders],
    )  # fmt: skip
    split = draft_tables(tmp_path)["tasks"]["churn"]["split"]
    assert split == {"val_time": 1_700_000_000_000 + 150 * day, "test_time": 1_700_000_000_000 + 180 * day}


def test_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    drafted = draft_tables(shop(tmp_path))
    del drafted["comments"]
    (tmp_path / "work").mkdir()
    graph = load_dataset("tables", str(tmp_path), drafted, Scratch(tmp_path / "work", 300 << 20))
    names = decode_texts(graph.nodes["customer"].attrs["id"])
    source, target = graph.edges["customer", "has", "click"].edge_index
    assert [f"{names[c]}" for c in source[np.argsort(target)]] == [row.split(",")[0] for row in CLICKS]
    assert list(graph.nodes["click"].attrs["id"]) == list(range(len(CLICKS)))
    assert graph.nodes["click"].attrs["time"][13] == 1_707_915_600  # 2024-02-14 13:00


def test_a_draft_with_a_task_trains(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    drafted = draft_tables(shop(tmp_path / "shop"))
    del drafted["comments"]
    spec = PartitionSpec("tables", str(tmp_path / "parts"), str(tmp_path / "shop"), drafted, 2, "hash")
    make_partition(spec, say=lambda line: None)
    result = train(
        job(
            tmp_path / "parts", tmp_path / "run", model="rsage", target="churn", fanouts=(1, 4, 3), hidden=8,
            batch_size=64, epochs=1, time_attr="time", temporal_strategy="last", metrics=("roc_auc",),
        )
    )  # fmt: skip
    assert result.checkpoint.exists()
    with open_graph(tmp_path / "parts") as graph:  # clicks have no features, and later ones than those of training
        settings = TrainSettings(model="rsage", target="churn", fanouts=(1, 4, 3))
        assert embedded_nodes(settings, graph.manifest, "churn", 2)[0] == {"click": 400}
        assert embedded_nodes(replace(settings, time_attr="time"), graph.manifest, "churn", 2)[0] == {}


def test_foreign_keys_of_node_tables_are_edges(tmp_path: Path) -> None:
    tables = {
        "customers": ["customer_id,referred_by_customer_id,churned", *(f"c{k},c{k // 2},{k % 2}" for k in range(40))],
        "orders": [
            "id,customer_id,width,at",
            *(f"{k},{f'c{k % 42}' if k % 20 else ''},{k % 90},{STAMPS[k]}" for k in range(100)),
        ],
        "lines": ["line,order_id,amount", *(f"{k},{k % 100},{k / 4}" for k in range(150))],
    }  # fmt: skip
    for name, lines in tables.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    drafted = draft_tables(tmp_path)
    assert {name: (table["source"], table["target"]) for name, table in drafted["edges"].items()} == {
        "customer__referred_by_customer_id__customer": ("referred_by_customer_id", "customer_id"),
        "customer__has__order": ("customer_id", "id"),
        "order__has__line": ("order_id", "line"),
    }
    assert drafted["nodes"]["customer"]["label"] == "churned" and drafted["nodes"]["order"]["features"] == ["width"]
    (note,) = drafted["comments"]["edges"]["customer__has__order"]
    assert note == "dangling: customer_id is empty in 5 rows and no id of customers.csv in 3: no edges"
    (tmp_path / "work").mkdir()
    options = {name: drafted[name] for name in ("nodes", "edges")}
    dataset = load_dataset("tables", str(tmp_path), options, Scratch(tmp_path / "work", 1 << 28))
    assert [edges.num_edges for of, edges in dataset.edges.items() if of[2] == "order"] == [92]


def test_keys_without_letters_from_a_to_z_make_edge_types(tmp_path: Path) -> None:
    lines = [
        "order_id,customer_id,покупатель_id,получатель_id",
        *(f"{k},c{k % 30},c{k % 29},c{k % 28}" for k in range(90)),
    ]
    edges = draft_tables(shop(tmp_path, orders=lines))["edges"]
    found = {name for name, table in edges.items() if table["files"] == "orders.csv"}
    assert found == {"customer__has__order", "customer__id__order", "customer__id_2__order"}


def test_facts_in_files_without_names_are_links_of_several_types(tmp_path: Path) -> None:
    facts = [f"e{k}\tr{j}\te{(k + j + 1) % 60}\n" for k in range(60) for j in range(3)]
    for name, lines in {"train": facts[:160], "valid": facts[160:170], "test": facts[170:]}.items():
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    (tmp_path / "README.txt").write_text("entity, relation, entity\n")
    drafted = draft_tables(tmp_path)
    (table,) = drafted["edges"].values()
    assert drafted["nodes"] == {"node": {}} and not drafted["comments"]["unused"]
    assert [table[key] for key in ("source", "relation", "target", "test_files")] == [
        "column1", "column2", "column3", "test.txt",
    ]  # fmt: skip


def test_rows_of_a_task_without_a_customer_are_drafted_as_dropped(tmp_path: Path) -> None:
    rows = [f"{'' if k % 25 == 3 else row.partition(',')[0]},{row.partition(',')[2]}" for k, row in enumerate(MONTHS)]
    shop(tmp_path, spent=["customer_id,month,spent", *(f"{row},{k % 2}" for k, row in enumerate(rows))])
    (tmp_path / "churn.csv").unlink()
    drafted = draft_tables(tmp_path)
    empty = sum(row.startswith(",") for row in rows)
    assert drafted["tasks"]["spent"]["dangling"] == "drop" and empty > 2
    notes = drafted.pop("comments")["tasks"]["spent"]
    assert f"dangling: customer_id is empty in {empty} rows: no rows of the task" in notes
    (tmp_path / "work").mkdir()
    graph = load_dataset("tables", str(tmp_path), drafted, Scratch(tmp_path / "work", 300 << 20))
    assert graph.nodes["spent"].num_nodes == len(MONTHS) - empty


@pytest.mark.parametrize("task", [False, True])
def test_a_split_of_rows_without_a_label_is_left_out_of_the_draft(tmp_path: Path, task: bool) -> None:
    """As in competitions, whose rows for test come without labels; `partition` would refuse it."""
    fold = [("train", "test")[k % 5 == 0] for k in range(len(MONTHS))]
    if task:
        rows = [
            f"{row},{'' if of == 'test' else k % 2},{of}" for k, (row, of) in enumerate(zip(MONTHS, fold, strict=True))
        ]
        shop(tmp_path, churn=["customer_id,at,churned,fold", *rows])
    else:
        rows = [f"c{k},{20 + k},{'' if fold[k] == 'test' else k % 2},{fold[k]}" for k in range(30)]
        shop(tmp_path, customers=["customer_id,age,label,fold", *rows])
        (tmp_path / "churn.csv").unlink()
    drafted = draft_tables(tmp_path)
    comments = drafted.pop("comments")
    of, kind = ("churn", "tasks") if task else ("customer", "nodes")
    table, empty = drafted[kind][of], sum(",," in row for row in rows)
    assert isinstance(table["split"], dict) and "fold" not in str({**table, "table": ""})
    label = table["label"]
    assert f"fold is not used as the split: {empty} rows that it names have no {label}" in comments[kind][of]
    (tmp_path / "work").mkdir()
    graph = load_dataset("tables", str(tmp_path), drafted, Scratch(tmp_path / "work", 300 << 20))
    assert graph.nodes[of].splits.keys() == {"train", "val", "test"}
