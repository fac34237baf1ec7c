"""Task tables: rows to predict, each about a node at a time, and never anything later than it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train_kit import curve, job, metrics, run_ranks
from trainer.core.errors import DataError
from trainer.core.row_sort import Scratch
from trainer.graph.open import open_graph
from trainer.infer.infer import infer
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sources.load import load_dataset
from trainer.train.job import train
from trainer.train.settings import InferJob

CUSTOMERS, ORDERS, DAY = 40, 600, 86_400
RNG = np.random.default_rng(3)
BUYER = RNG.integers(0, CUSTOMERS, ORDERS)
BOUGHT = np.sort(RNG.integers(0, 300 * DAY, ORDERS))
AMOUNT = RNG.integers(1, 9, ORDERS)
#: Rows of the task: the same customer on several days, in no order.
ABOUT = RNG.integers(0, CUSTOMERS, 240)
AT = RNG.integers(60, 300, 240) * DAY
SPENT = np.array(
    [AMOUNT[(c == BUYER) & (at - 30 * DAY <= BOUGHT) & (at >= BOUGHT)].sum() for c, at in zip(ABOUT, AT, strict=True)]
)
SMALL: dict[str, Any] = {
    "model": "rsage", "target": "spent", "fanouts": (1, 12), "hidden": 16, "batch_size": 32, "epochs": 2,
    "time_attr": "time", "temporal_strategy": "last", "lr": 0.02,
}  # fmt: skip


def write(path: Path, names: Sequence[str], *columns: Any) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *zip(*columns, strict=True)])


def shop(folder: Path, amounts: np.ndarray = AMOUNT, num_parts: int = 2, **task: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.array([f"c{k}" for k in range(CUSTOMERS)])
    write(folder / "customers.csv", ["id", "age"], ids, 20 + np.arange(CUSTOMERS))
    write(folder / "orders.csv", ["id", "buyer", "at", "amount"], np.arange(ORDERS), ids[BUYER], BOUGHT, amounts)
    y = [f"{each}" for each in SPENT]
    y[7] = ""
    split = ["train", "val", "test"]
    given = [split[min(2, max(0, (at // DAY - 180) // 60 + 1))] if y[k] else "" for k, at in enumerate(AT)]
    write(folder / "spent.csv", ["who_idx", "at", "spent", "fold"], ids[ABOUT], AT, y, given)
    options: dict[str, Any] = {
        "nodes": {
            "customer": {"files": "customers.csv", "id": "id", "features": ["age"], "standardize": True},
            "order": {"files": "orders.csv", "id": "id", "features": ["amount"], "time": "at"},
        },
        "edges": {"customer__places__order": {"files": "orders.csv", "source": "buyer", "target": "id"}},
        "tasks": {
            "spent": {
                "table": "spent.csv", "entity": "customer", "id": "who_idx", "time": "at", "label": "spent",
                "split": "fold",
                **task,
            }
        },
        "undirected": True,
        "num_classes": 0,
        "target": "spent",
    }  # fmt: skip
    spec = PartitionSpec("tables", str(folder / f"parts{num_parts}"), str(folder), options, num_parts, "hash")
    make_partition(spec, say=lambda line: None)
    return folder / f"parts{num_parts}"


def attrs(graph: Any, of: str, *names: str) -> Mapping[str, np.ndarray]:
    from trainer.sampler.types import RowRequest

    ids = graph.store.to_global(of, np.arange(graph.manifest.nodes[of].num_nodes))
    return graph.access.gather([RowRequest(of, ids, names)])[0]


@pytest.mark.parametrize("strategy", ["last", "uniform"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_batches_have_what_was_known_at_the_time_of_each_row(tmp_path: Path, strategy: str, num_parts: int) -> None:
    with open_graph(shop(tmp_path / "shop", num_parts=num_parts)) as graph:
        settings = LoaderSettings(
            "train", (1, 4), 32, target="spent", time_attr="time", last=strategy == "last", ages=("order", "spent")
        )
        loader, rows = BatchLoader(graph, settings, 0, graph.layout), 0
        for batch in loader.epoch(1):
            (orders,) = [block for of, block in batch.blocks[0].items() if of == ("order", "rev_places", "customer")]
            (about,) = [block for of, block in batch.blocks[1].items() if of[2] == "spent" and of[0] == "customer"]
            for seed, row in enumerate(batch.n_id["spent"][: batch.num_seeds].tolist()):
                (customer,) = about.indices[about.indptr[seed] : about.indptr[seed + 1]].tolist()
                assert int(batch.n_id["customer"][customer]) == ABOUT[row]
                places = orders.indices[orders.indptr[customer] : orders.indptr[customer + 1]].long()
                found = batch.n_id["order"][places].tolist()
                known = np.flatnonzero((BUYER == ABOUT[row]) & (BOUGHT <= AT[row]))
                assert set(found) <= set(known.tolist()) and len(found) == min(4, len(known))
                if strategy == "last":
                    assert sorted(BOUGHT[found]) == sorted(BOUGHT[known])[-4:]
                assert batch.age["order"][places].tolist() == (AT[row] - BOUGHT[found]).astype(np.float32).tolist()
                rows += 1
            assert not any("spent" in (of[0],) for of in batch.blocks[0])  # a row is no neighbour of anything
        assert rows == int((AT < 180 * DAY).sum()) - (AT[7] < 180 * DAY)


def test_the_curve_is_that_of_one_rank_and_rows_come_back_under_their_keys(tmp_path: Path) -> None:
    parts = shop(tmp_path / "shop", num_parts=3)
    for ranks in (1, 3):
        for each in run_ranks(ranks, job(parts, tmp_path / f"run{ranks}", **SMALL)):
            assert each.returncode == 0, each.output
    assert curve(tmp_path / "run3") == pytest.approx(curve(tmp_path / "run1"), rel=1e-5)
    result = infer(InferJob(tmp_path / "run1" / "checkpoints" / "last.pt", parts, tmp_path / "out"))
    (line,) = metrics(tmp_path / "run1", "result")
    assert result.metrics["test"]["mae"] == pytest.approx(line["test_mae"], rel=1e-5)
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["row"]))
    assert [(row["who_idx"], int(row["at"])) for row in rows] == [
        (f"c{c}", at) for c, at in zip(ABOUT, AT, strict=True)
    ]
    assert len({row["prediction"] for row in rows}) > 20


def test_predictions_do_not_depend_on_what_is_later(tmp_path: Path) -> None:
    """Changed orders after day 200 change the predictions of later rows only."""
    later = np.where(BOUGHT > 200 * DAY, 100, AMOUNT)
    predicted = []
    before = shop(tmp_path / "before" / "shop")
    result = train(job(before, tmp_path / "run", **SMALL))
    for number, parts in enumerate((before, shop(tmp_path / "after" / "shop", later))):
        out = tmp_path / f"out{number}"
        infer(InferJob(result.checkpoint, parts, out))
        with (out / "predictions.csv").open() as file:
            predicted.append({int(row["row"]): float(row["prediction"]) for row in csv.DictReader(file)})
    changed = np.array([predicted[0][k] != predicted[1][k] for k in range(len(AT))])
    assert not changed[AT <= 200 * DAY].any()
    assert changed[AT > 260 * DAY].mean() > 0.5


def test_splits_begin_at_given_times(tmp_path: Path) -> None:
    split = {"val_time": "1970-06-30", "test_time": "1970-08-29 00:00:00"}  # days 180 and 240
    with open_graph(shop(tmp_path / "shop", split=split)) as graph:
        orig = attrs(graph, "spent", "orig_id")["orig_id"]
        labelled, day = np.arange(len(AT)) != 7, AT // DAY
        wanted = {
            "train": labelled & (day < 180),
            "val": labelled & (day >= 180) & (day < 240),
            "test": labelled & (day >= 240),
        }
        assert list(orig) == list(range(len(AT)))
        books = graph.store.to_global("spent", np.arange(len(AT)))
        for name, rows in wanted.items():
            assert sorted(graph.store.seeds("spent", name)) == sorted(books[rows])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"entity": "customr"}, "tasks.spent.entity: option nodes has no table 'customr'; did you mean 'customer'"),
        (
            {"entity": "order"},
            r"spent.csv, row 1: who_idx is .c28., which is not in column 'id' of nodes.order \(240 such",
        ),
        ({"split": {"val_time": 5, "test_time": 5}}, "val_time must be before test_time"),
        ({"split": {"val_time": "soon", "test_time": 5}}, "val_time must be a date or timestamp"),
        ({"time": None, "split": {"val_time": 1, "test_time": 5}}, "val_time and test_time need the key time"),
        ({"at": "at"}, "tasks.spent: unknown key 'at'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, task: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        shop(tmp_path / "shop", **task)


TASK = {"table": "spent.csv", "entity": "customer", "id": "who", "time": "at", "label": "spent"}


@pytest.mark.parametrize("listed", [False, True])
def test_rows_without_a_known_entity_are_dropped_where_the_table_says_so(tmp_path: Path, listed: bool) -> None:
    write(tmp_path / "customers.csv", ["id"], ["a", "b", "c"])
    write(tmp_path / "knows.csv", ["s", "t"], ["a"], ["b"])
    write(tmp_path / "spent.csv", ["who", "at", "spent"], ["", "a", "x", "c", "c"], [1, 2, 3, 4, 4], list("abcbc"))
    task: dict[str, Any] = TASK | ({"targets": "customer"} if listed else {})
    edges = {"customer__knows__customer": {"files": "knows.csv", "source": "s", "target": "t"}}
    options = {
        "nodes": {"customer": {"files": "customers.csv", "id": "id"}}, "edges": edges, "tasks": {"spent": task},
    }  # fmt: skip

    def load() -> Any:
        (folder := tmp_path / "work").mkdir(exist_ok=True)
        return load_dataset("tables", str(tmp_path), {**options, "undirected": False}, Scratch(folder, 1 << 28))

    with pytest.raises(
        DataError, match=r"row 1: who is empty, which is not .* \(2 such rows of 5\); .* `dangling: drop"
    ):
        load()
    task["dangling"] = "drop"
    graph = load()
    (has,) = [edges for of, edges in graph.edges.items() if of[1] == "has"]
    kept = [2, 4] if listed else [2, 4, 4]  # rows of one entity and time are one row that lists all
    assert graph.nodes["spent"].num_nodes == len(kept)
    assert np.array(has.edge_index[0]).tolist() == [0, 2, 2][: len(kept)]
    assert np.array(has.edge_index[1]).tolist() == list(range(len(kept)))
    assert np.array(graph.nodes["spent"].attrs["time"]).tolist() == kept
    assert any("2 of 5 rows dropped" in note for note in graph.notes)
    write(tmp_path / "spent.csv", ["who", "at", "spent"], ["", "a", "x", "c"], [1, 2, 3, "soon"], list("abcb"))
    with pytest.raises(DataError, match=r"spent.csv, row 4: at is 'soon'"):  # the row of the file
        load()
    write(tmp_path / "spent.csv", ["who", "at", "spent"], ["", "x"], [1, 2], list("ab"))
    with pytest.raises(DataError, match="would drop all rows"):
        load()
