"""From a folder of six tables to predictions and to recommendations on three hosts, without a line of Python."""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from netns import NetCluster
from operator_kit import Operator
from ssh_nodes import WORKDIR

BEGIN, DAYS, CUSTOMERS, PRODUCTS = datetime(2024, 1, 1), 360, 200, 120


def write(path: Path, names: str, rows: list[tuple[Any, ...]]) -> None:
    """Write a CSV or a Parquet file."""
    plain = path.with_suffix(".csv")
    with plain.open("w", newline="") as file:
        csv.writer(file).writerows([names.split(), *rows])
    if path.suffix == ".parquet":
        with duckdb.connect() as database:
            database.execute(f"COPY (SELECT * FROM read_csv('{plain}')) TO '{path}'")
        plain.unlink()


def shop(folder: Path) -> None:
    """Write a shop whose customers buy about every ten days, products of one kind, until they leave.

    churn.csv: whether a customer buys nothing in the 30 days after a day; empty for the last day, which is today.
    In the folder ``lists`` beside it, next.parquet lists what the customer buys in these days, if anything.
    """
    rng = np.random.default_rng(5)
    folder.mkdir()
    names = [f"cust-{k:03}" for k in range(CUSTOMERS)]
    leaves = rng.uniform(60, 2 * DAYS, CUSTOMERS)
    who = rng.integers(0, CUSTOMERS, CUSTOMERS * DAYS // 10)
    day = np.sort(rng.uniform(0, DAYS, len(who)))
    who, day = who[day < leaves[who]], day[day < leaves[who]]
    what = (who % 4) * 30 + rng.integers(0, 30, len(who))
    when = [str((BEGIN + timedelta(days=at)).replace(microsecond=0)) for at in day.tolist()]
    bought = [(names[c], f"sku-{p:03}", at) for c, p, at in zip(who, what, when, strict=True)]
    write(folder / "customers.csv", "customer_id age", [(name, 20 + k % 50) for k, name in enumerate(names)])
    write(folder / "products.parquet", "sku price", [(f"sku-{k:03}", 5 + k % 7) for k in range(PRODUCTS)])
    write(folder / "orders.csv", "order_id customer_id sku bought_at amount",
          [(f"o{k}", *row, 1 + k % 3) for k, row in enumerate(bought)])  # fmt: skip
    write(folder / "reviews.parquet", "review_id customer_id sku at stars",
          [(f"r{k}", *row, 1 + k % 5) for k, row in enumerate(bought[::5])])  # fmt: skip
    write(folder / "clicks.csv", "customer_id sku clicked_at", sorted(bought + bought[::3], key=lambda row: row[2]))
    rows, lists = [], []
    for first in range(60, DAYS + 1, 30):
        for c, name in enumerate(names):
            later = what[(who == c) & (day >= first) & (day < first + 30)].tolist()
            at = (BEGIN + timedelta(days=first)).date()
            rows.append((name, at, "" if first == DAYS else int(not later)))
            lists.append((name, at, " ".join(f"sku-{p:03}" for p in dict.fromkeys(later))))
    write(folder / "churn.csv", "customer_id at churned", rows)
    beside = folder.with_name("lists")
    beside.mkdir()
    for name in ("customers.csv", "products.parquet", "orders.csv"):
        shutil.copy(folder / name, beside)
    write(beside / "next.parquet", "customer_id at buys", lists)
    with duckdb.connect() as database:
        lists_of = f"SELECT * REPLACE (string_split(buys, ' ') AS buys) FROM '{beside}/next.parquet'"
        database.execute(f"COPY (SELECT * FROM ({lists_of})) TO '{beside}/split.parquet'")
    (beside / "split.parquet").replace(beside / "next.parquet")


def area(label: np.ndarray, score: np.ndarray) -> float:
    """Return the area under the ROC curve."""
    above = score[label == 1][:, None] - score[label == 0][None, :]
    return float((above > 0).mean() + (above == 0).mean() / 2)


def without_comment_marks(text: str) -> str:
    """Delete what is from BEGIN to END, and remove the marks of the comments after END, as the file says."""
    block = re.compile(r"^ *# BEGIN\n.*?^ *# END\n((?: *# [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
    return block.sub(lambda found: re.sub(r"^( *)# ", r"\1", found[1], flags=re.MULTILINE), text)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_tables_to_churn_and_to_recommendations(make_cluster: Any, tmp_path: Path) -> None:
    cluster: NetCluster = make_cluster(3)
    operator = Operator(cluster, tmp_path / "home")
    shop(operator.cwd / "shop")

    def gnnfleet(*words: str) -> str:
        done = operator.gnnfleet(*words)
        assert done.status == 0, done.output
        return done.output

    addresses = [host.address for host in cluster.hosts]
    env = {"GNNFLEET_KERNELS": os.environ["GNNFLEET_KERNELS"], "OMP_NUM_THREADS": "1"}

    def draft(dataset: str, path: Path) -> str:
        """Only what is particular to the hosts of this test is edited: disks, and kernels that are compiled already."""
        hosts = (*addresses, "--user", "root", "--python", sys.executable)
        gnnfleet("init", *hosts, "--dataset", dataset, "--yes", "--no-check", "-o", str(path))
        path.write_text(re.sub(r"workdir: .*", f"workdir: {WORKDIR}\n  env: {env}", path.read_text()))
        return path.read_text()

    path = operator.cwd / "cluster.yml"
    text = draft("shop", path)
    assert "test ROC-AUC" in gnnfleet("--config", "cluster.yml", "--run-id", "churn", "--epochs", "8", "--plain")
    gnnfleet("infer", "churn")
    with (operator.cwd / "shop/churn.csv").open() as file:
        given = list(csv.DictReader(file))
    with (operator.cwd / "runs/churn/predictions/predictions.csv").open() as file:
        predicted = sorted(csv.DictReader(file), key=lambda row: int(row["row"]))
    assert [row["customer_id"] for row in predicted] == [row["customer_id"] for row in given]
    assert [row["at"][:10] for row in predicted] == [row["at"] for row in given]
    (split,) = re.findall(r"test_time: '([\d-]+)'", text)
    test = [k for k, row in enumerate(given) if row["at"] >= split and row["churned"]]
    label = np.array([int(given[k]["churned"]) for k in test])
    sure = np.array([float(predicted[k]["probability"]) for k in test])
    score = np.where([predicted[k]["prediction"] == "1" for k in test], sure, 1 - sure)
    assert len(test) > 100 and area(label, score) > 0.65

    path.write_text(without_comment_marks(text))
    assert "test recall@20" in gnnfleet("--config", "cluster.yml", "--run-id", "recommends", "--epochs", "5", "--plain")
    gnnfleet("infer", "recommends", "--top-k", "5")
    with (operator.cwd / "runs/recommends/predictions/source/predictions.csv").open() as file:
        best = list(csv.DictReader(file))
    products = {f"sku-{k:03}" for k in range(PRODUCTS)}
    assert len(best) == CUSTOMERS * 5
    assert {row["source"] for row in best} == {f"cust-{k:03}" for k in range(CUSTOMERS)}
    assert {row["target"] for row in best} <= products

    draft("lists", operator.cwd / "lists.yml")
    ended = gnnfleet("--config", "lists.yml", "--run-id", "lists", "--epochs", "20", "--plain")
    assert "test recall@10" in ended
    printed = gnnfleet("infer", "lists", "--top-k", "3")
    with duckdb.connect() as database:
        listed = database.execute(f"SELECT * FROM '{operator.cwd}/lists/next.parquet'").fetchall()
    assert f"{len(listed):,} rows of next, weights of epoch" in printed
    with (operator.cwd / "runs/lists/predictions/predictions.csv").open() as file:
        best = sorted(csv.DictReader(file), key=lambda row: int(row["row"]))
    assert [row["customer_id"] for row in best] == [name for name, _, _ in listed for _ in range(3)]
    assert [row["at"][:10] for row in best] == [str(at) for _, at, _ in listed for _ in range(3)]
    assert {row["prediction"] for row in best} <= products
    # Customers buy products of one kind of four, and the model has learnt which.
    kinds = [(int(row["prediction"][4:]) // 30) == int(row["customer_id"][5:]) % 4 for row in best]
    assert np.mean(kinds) > 0.5
