"""Tests of held-out links: disjoint, removed from the edges in both directions, and known to every host."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

import trainer
from data_kit import save_arrays
from trainer.core.errors import DataError
from trainer.core.graph_attrs import held_out_links, held_out_names
from trainer.core.row_sort import Scratch
from trainer.core.schema import HOMO_EDGE
from trainer.data import work_arrays
from trainer.data.dataset import EdgeData
from trainer.data.hold_out import hold_out_links
from trainer.data.options import SourceOptions
from trainer.data.time_split import split_times
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sources.load import dataset_fingerprint, load_dataset

SMALL = {"num_nodes": 2000}
CITES, BACK = ("paper", "cites", "paper"), ("paper", "rev_cites", "paper")
WRITES, WRITTEN = ("author", "writes", "paper"), ("paper", "rev_writes", "author")


def pairs(edge_index: np.ndarray) -> set[tuple[int, int]]:
    return set(zip(*edge_index.tolist(), strict=True))


def turned(links: set[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(b, a) for a, b in links}


def held_out(name: str, **options):
    """Return val links, test links, the dataset, and all edges of each type before links were held out."""
    whole = load_dataset(name, None, {**SMALL, **{k: v for k, v in options.items() if not k.startswith("hold_out")}})
    dataset = load_dataset(name, None, {**SMALL, **options})
    val, test = (pairs(dataset.graph_attrs[f"{split}_links"]) for split in ("val", "test"))
    return val, test, dataset, {of: pairs(data.edge_index) for of, data in whole.edges.items()}


def test_links_of_a_homogeneous_graph_are_held_out_in_both_directions():
    val, test, dataset, before = held_out("synthetic", hold_out="node__to__node")
    edges = pairs(dataset.edges[HOMO_EDGE].edge_index)
    assert not val & test and val and test
    assert val == turned(val) and test == turned(test)
    assert not (val | test) & edges and edges | val | test == before[HOMO_EDGE]
    assert len(val) / len(before[HOMO_EDGE]) == pytest.approx(0.05, abs=0.01)
    assert len(test) / len(before[HOMO_EDGE]) == pytest.approx(0.1, abs=0.01)


def test_a_relation_within_one_type_and_its_reverse_type_lose_both_directions():
    val, test, dataset, before = held_out("synthetic-hetero", hold_out="paper__cites__paper")
    for links in (val, test):
        assert links <= before[CITES]
        for of in (CITES, BACK):
            assert not (links | turned(links)) & pairs(dataset.edges[of].edge_index)
    assert pairs(dataset.edges[CITES].edge_index) | val | test == before[CITES]
    assert pairs(dataset.edges[BACK].edge_index) == turned(pairs(dataset.edges[CITES].edge_index))
    assert pairs(dataset.edges[WRITES].edge_index) == before[WRITES]


@pytest.mark.parametrize("of,back", [(WRITES, WRITTEN), (WRITTEN, WRITES)])
def test_a_relation_between_two_types_and_its_reverse(of, back):
    options = {"hold_out": "__".join(of), "hold_out_val": 0, "hold_out_test": 0.3, "edge_weight": True, "time": True}
    val, test, dataset, before = held_out("synthetic-hetero", **options)
    assert not val and len(test) / len(before[of]) == pytest.approx(0.3, abs=0.03)
    assert pairs(dataset.edges[of].edge_index) == before[of] - test
    assert pairs(dataset.edges[back].edge_index) == before[back] - turned(test)
    assert {len(rows) for rows in dataset.edges[of].attrs.values()} == {dataset.edges[of].num_edges}


def test_multi_edges_are_held_out_together_and_self_loops_are_kept(tmp_path):
    rng = np.random.default_rng(0)
    edge_index = rng.integers(30, size=(2, 4000))
    weight = np.arange(4000.0)
    source = save_arrays(tmp_path / "g", edge_index=edge_index, edge_weight=weight, x=np.ones((30, 2), np.float32))
    dataset = load_dataset("file", source, {"hold_out": "node__to__node", "hold_out_test": 0.4})
    edges = dataset.edges[HOMO_EDGE]
    links = pairs(dataset.graph_attrs["test_links"]) | pairs(dataset.graph_attrs["val_links"])
    assert links and not (links | turned(links)) & pairs(edges.edge_index)
    assert all(a != b for a, b in links)
    loops = edge_index[:, edge_index[0] == edge_index[1]]
    assert pairs(loops) <= pairs(edges.edge_index)
    kept = edges.attrs["edge_weight"].astype(int)
    assert np.array_equal(edge_index[:, kept], edges.edge_index), "attributes stay with their edges"


def test_the_choice_does_not_depend_on_the_other_edges():
    few = held_out("synthetic-hetero", hold_out="author__writes__paper", undirected=False)
    many = held_out("synthetic-hetero", hold_out="author__writes__paper")
    assert few[:2] == many[:2]


def test_the_fingerprint_depends_on_the_held_out_links():
    wanted = [{}, {"hold_out": "node__to__node"}, {"hold_out": "node__to__node", "hold_out_test": 0.2}]
    assert len({dataset_fingerprint("synthetic", None, options) for options in wanted}) == 3


def test_partitions_contain_the_held_out_links(tmp_path):
    options = {**SMALL, "hold_out": "paper__cites__paper"}
    dataset = load_dataset("synthetic-hetero", None, options)
    spec = PartitionSpec("synthetic-hetero", str(tmp_path / "parts"), options=options, num_parts=2)
    make_partition(spec, say=lambda line: None)
    with trainer.open(tmp_path / "parts") as graph:
        for name in ("val_links", "test_links"):
            assert np.array_equal(graph.store.graph_attrs[name], dataset.graph_attrs[name])
            src, dst = (graph.store.to_global("paper", end) for end in graph.store.graph_attrs[name])
            assert not graph.access.has_edges(CITES, src, dst).any()
            assert not graph.access.has_edges(BACK, dst, src).any()


@pytest.mark.parametrize(
    "options,message",
    [
        ({"hold_out": "paper__likes__paper"}, "edge types are: author__writes__paper"),
        ({"hold_out": "paper__cites__paper", "hold_out_test": 1.0}, "shares"),
        ({"hold_out": "paper__cites__paper", "hold_out_val": -0.1}, "shares"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        load_dataset("synthetic-hetero", None, {**SMALL, **options})


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_held_out_links_do_not_remain_in_a_reverse_type_of_another_name(share):
    data = load_dataset("synthetic-hetero", None, SMALL)
    forward = data.edges[WRITES].edge_index
    kept = forward[:, : int(share * forward.shape[1])]
    edges = {WRITES: data.edges[WRITES], ("paper", "by", "author"): EdgeData(np.ascontiguousarray(kept[::-1]))}
    done = hold_out_links(replace(data, edges=edges), SourceOptions(hold_out="author__writes__paper"))
    links = pairs(done.graph_attrs["test_links"]) | pairs(done.graph_attrs["val_links"])
    left = turned(pairs(done.edges[("paper", "by", "author")].edge_index)) & links
    (note,) = [note for note in done.notes if "paper__by__author" in note] or [""]
    if share == 1.0:
        assert not left and note.endswith("are also removed from their reverse, paper__by__author")
    elif share:
        assert left and f"{len(left):,} of the {len(links):,} held-out links" in note
    else:
        assert not note


# --- by time -------------------------------------------------------------------------------------------------


def timed(name: str = "synthetic-hetero", **options):
    """Return a dataset whose latest links are held out, and the same without ``hold_out``."""
    options = {**SMALL, "time": True, **options}
    whole = load_dataset(name, None, {k: v for k, v in options.items() if not k.startswith("hold_out")})
    return load_dataset(name, None, {**options, "hold_out_time": "edge_time"}), whole


def events(edge_index: np.ndarray, times: np.ndarray) -> set[tuple[int, ...]]:
    return set(zip(times.tolist(), *edge_index.tolist(), strict=True))


@pytest.mark.parametrize("of", [WRITES, CITES])
def test_the_latest_links_are_held_out(of):
    dataset, whole = timed(hold_out="__".join(of))
    attrs, edges, before = dataset.graph_attrs, dataset.edges[of], whole.edges[of]
    val, test = (events(attrs[f"{split}_links"], attrs[f"{split}_link_times"]) for split in ("val", "test"))
    left = events(edges.edge_index, edges.attrs["edge_time"])
    assert left | val | test == events(before.edge_index, before.attrs["edge_time"])
    assert max(left)[0] < min(val)[0] and max(val)[0] < min(test)[0]
    assert len(val) / before.num_edges == pytest.approx(0.05, abs=0.005)
    assert len(test) / before.num_edges == pytest.approx(0.1, abs=0.005)
    back = dataset.edges[of[2], f"rev_{of[1]}", of[0]]
    assert events(back.edge_index[::-1], back.attrs["edge_time"]) == left
    assert attrs["held_out_time"].tobytes() == b"edge_time" and sorted(test) == list(
        zip(attrs["test_link_times"].tolist(), *attrs["test_links"].tolist(), strict=True)
    )
    assert any(f"{edges.num_edges:,} earlier ones are for training" in note for note in dataset.notes)


@pytest.mark.parametrize(
    ("times", "shares", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], (0.1, 0.2), (8, 9)),
        ([10, 3, 7, 1, 9, 2, 8, 5, 4, 6], (0.1, 0.2), (8, 9)),  # the order of the edges does not matter
        ([1, 1, 1, 1, 1, 1, 2, 3, 3, 3], (0.1, 0.2), (2, 3)),  # edges of equal time stay together
        ([1, 1, 2, 2, 2, 2, 3, 3, 3, 3], (0.1, 0.1), (2, 3)),  # every split has a time
        ([1, 1, 1, 1, 1, 1, 1, 1, 1, 2], (0.0, 0.5), (None, 2)),
        ([5, 6, 6, 6, 7, 8, 9, 9, 9, 9], (0.4, 0.0), (9, None)),
    ],
)
def test_splits_begin_at_the_time_nearest_to_their_share(times, shares, expected):
    split = split_times(*np.unique(times, return_counts=True), *shares, "edges")
    assert (split.val, split.test) == expected
    val, test = split.of(np.array(times))
    assert (val.any(), test.any()) == (shares[0] > 0, shares[1] > 0) and not (val & test).any()


@pytest.mark.parametrize(
    "attrs,options,message",
    [
        ({}, {"hold_out_time": "when"}, "the attributes of the edges node__to__node are: edge_time"),
        ({}, {"hold_out": None}, "hold_out_time=edge_time needs option hold_out"),
        ({"edge_time": np.arange(60) / 2}, {}, r"float64 \[60\]; times must be one integer"),
        ({"edge_time": np.zeros((60, 2), np.int64)}, {}, r"int64 \[60, 2\]; times must be one integer"),
        ({"edge_time": np.full(60, 7)}, {}, r"edges node__to__node: all equal \(7\), so these edges cannot be split"),
        ({"edge_time": np.arange(60) % 2}, {}, "only 2 different ones, so these edges cannot be split into 3"),
    ],
)
def test_times_that_cannot_split_are_refused(attrs, options, message, tmp_path):
    edge_index = np.stack([np.arange(60) % 20, np.arange(60) * 7 % 20])
    source = save_arrays(
        tmp_path / "g", x=np.ones((20, 2), np.float32), edge_index=edge_index, **{"edge_time": np.arange(60), **attrs}
    )
    with pytest.raises(DataError, match=message):
        load_dataset("file", source, {"hold_out": "node__to__node", "hold_out_time": "edge_time", **options})


def test_a_reverse_type_without_times_is_refused():
    data = load_dataset("synthetic-hetero", None, {**SMALL, "time": True})
    edges = {WRITES: data.edges[WRITES], WRITTEN: EdgeData(data.edges[WRITTEN].edge_index)}
    options = SourceOptions(hold_out="author__writes__paper", hold_out_time="edge_time")
    with pytest.raises(DataError, match="the attributes of the edges paper__rev_writes__author are: none"):
        hold_out_links(replace(data, edges=edges), options)


@pytest.mark.parametrize("hold_out_time", [None, "edge_time"])
def test_links_of_edges_in_files_are_held_out_in_pieces(tmp_path, hold_out_time, monkeypatch):
    monkeypatch.setattr(work_arrays, "_ROWS_AT_ONCE", 1000)  # 50 pieces
    rng, count = np.random.default_rng(0), 50_000
    files = tmp_path / "files"
    files.mkdir()
    arrays = {
        "user__buys__item": rng.integers(0, 2000, (2, count)),
        "user__buys__item__edge_time": np.arange(count) // 100,
        "user__buys__item__edge_attr": rng.random((count, 40)),
    }
    arrays["item__sold__user"] = arrays["user__buys__item"][::-1]
    for name, values in arrays.items():
        np.save(files / f"{name}.npy", values)
    (files / "num_nodes.json").write_text('{"user": 2000, "item": 2000}')
    options = {"hold_out": "user__buys__item", "hold_out_test": 0.01, "hold_out_val": 0.01}
    options |= {"hold_out_time": hold_out_time} if hold_out_time else {}
    whole = load_dataset("file", str(files), options)
    scratch = Scratch(tmp_path / "work", 1 << 20)
    scratch.folder.mkdir()
    tracemalloc.start()
    data = load_dataset("file", str(files), options, scratch)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 20 < sum(values.nbytes for values in arrays.values())
    assert data.notes == whole.notes and {*data.graph_attrs} == {*whole.graph_attrs}
    assert all(np.array_equal(data.graph_attrs[name], values) for name, values in whole.graph_attrs.items())
    for of, edges in whole.edges.items():
        assert np.array_equal(data.edges[of].edge_index, edges.edge_index) and edges.num_edges < count
        assert all(np.array_equal(data.edges[of].attrs[name], values) for name, values in edges.attrs.items())
        assert isinstance(data.edges[of].edge_index, np.memmap)


def test_held_out_links_that_do_not_fit_into_memory_are_refused(tmp_path):
    source = save_arrays(
        tmp_path / "g", x=np.ones((500, 1)), edge_index=np.random.default_rng(0).integers(0, 500, (2, 9000))
    )
    for options, message in (
        ({}, "held-out links of node__to__node take more than"),
        ({"hold_out_time": "edge_time"}, "so many different times"),
    ):
        with pytest.raises(DataError, match=message):
            load_dataset("file", source, {"hold_out": "node__to__node", **options}, Scratch(tmp_path, 1 << 14))
        np.save(f"{source}/edge_time.npy", np.arange(9000))


# --- a given split ---------------------------------------------------------------------------------------------


def given(folder, arrays, scratch=None, **options):
    """Return the dataset of typed files, with the links that attribute ``fold`` gives to val (1) and test (2)."""
    folder.mkdir(exist_ok=True)
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    (folder / "num_nodes.json").write_text('{"user": 4, "item": 5}')
    return load_dataset("file", str(folder), {"hold_out_split": "fold", **options}, scratch)


BUYS = np.array([[0, 0, 1, 2, 3, 3, 0, 2], [0, 1, 1, 2, 3, 3, 1, 4]])
FOLD = np.array([0, 2, 1, 0, 2, 2, 0, 1], np.int8)  # user 3 buys item 3 twice; user 0 buys item 1 in train and test


def test_links_of_a_given_split_are_held_out_as_given(tmp_path):
    arrays = {"user__buys__item": BUYS, "user__buys__item__fold": FOLD, "user__buys__item__price": np.arange(8.0)}
    data = given(tmp_path, arrays, undirected=True)
    assert data.graph_attrs["val_links"].tolist() == [[1, 2], [1, 4]]
    assert data.graph_attrs["test_links"].tolist() == [[0, 3], [1, 3]]
    assert data.graph_attrs["held_out_type"].tobytes() == b"user__buys__item"
    buys, back = data.edges["user", "buys", "item"], data.edges["item", "rev_buys", "user"]
    assert buys.edge_index.tolist() == [[0, 2, 0], [0, 2, 1]] == back.edge_index[::-1].tolist()
    assert list(buys.attrs) == ["price"] and buys.attrs["price"].tolist() == [0, 3, 6] == back.attrs["price"].tolist()
    assert "2 links are for validation and 3 for test, as given; the 3 others" in data.notes[-2]
    assert data.notes[-1] == "1 of the 4 held-out links of user__buys__item are also edges for training"


def test_the_reverse_of_a_given_link_is_no_edge(tmp_path):
    ring = np.array([[0, 1, 2, 3, 3], [1, 2, 3, 0, 2]])  # 2 - 3 in both directions, one of them for test
    arrays = {"user__knows__user": ring, "user__knows__user__fold": np.array([0, 1, 2, 0, 0])}
    data = given(tmp_path / "one", arrays, undirected=True)
    assert data.graph_attrs["test_links"].tolist() == [[2], [3]] and data.graph_attrs["val_links"].tolist() == [
        [1],
        [2],
    ]
    assert pairs(data.edges["user", "knows", "user"].edge_index) == {(0, 1), (1, 0), (3, 0), (0, 3), (2, 3), (3, 2)}
    assert (
        "1 of the 2 held-out links of user__knows__user are also edges for training, in one direction" in data.notes[-1]
    )
    own = {
        **arrays,
        "user__rev_knows__user": ring[::-1],
        "item__sold__user": BUYS[::-1][:, :4],
        "user__buys__item": BUYS,
    }
    data = given(tmp_path / "own", {**own, "user__buys__item__fold": FOLD}, hold_out="user__knows__user")
    assert pairs(data.edges["user", "rev_knows", "user"].edge_index) == turned({(0, 1), (3, 0), (3, 2)})
    assert "fold" in data.edges["user", "buys", "item"].attrs and data.edges["item", "sold", "user"].num_edges == 4


def test_links_of_several_types_are_held_out_with_their_times(tmp_path):
    arrays = {"user__buys__item": BUYS, "user__buys__item__fold": FOLD, "user__buys__item__at": np.arange(8)[::-1]}
    knows = {
        "user__knows__user": BUYS[:, :4],
        "user__knows__user__fold": FOLD[:4],
        "user__knows__user__at": FOLD[:4] + 3,
    }
    data = given(tmp_path, arrays | knows, undirected=True, hold_out_time="at")
    attrs = data.graph_attrs
    assert held_out_names(attrs) == ["user__buys__item", "user__knows__user"]
    assert attrs["test_links"].tolist() == [[3, 3, 0, 0], [3, 3, 1, 1]] and attrs["test_link_types"].tolist() == [
        0,
        0,
        0,
        1,
    ]
    assert attrs["test_link_times"].tolist() == [2, 3, 6, 5] and attrs["held_out_time"].tobytes() == b"at"
    links, times = held_out_links(attrs, ("user", "knows", "user"), "test")
    assert links.tolist() == [[0], [1]] and times.tolist() == [5]
    links, times = held_out_links(attrs, ("user", "buys", "item"), "val")
    assert links.tolist() == [[2, 1], [4, 1]] and times.tolist() == [0, 5]
    assert held_out_links(attrs, ("item", "rev_buys", "user"), "val")[0].shape == (2, 0)


@pytest.mark.parametrize(
    ("fold", "options", "message"),
    [
        (FOLD, {"hold_out_split": "folds"}, "hold_out_split=folds, but no edge type has this attribute"),
        (FOLD, {"hold_out": "user__sees__item"}, "but the edge types are: user__buys__item"),
        (FOLD, {"hold_out_time": "at"}, "the attributes of the edges user__buys__item are: fold"),
        (FOLD * 2, {}, "edge 1 has 4; 0 is for training, 1 for validation, 2 for test"),
        (FOLD / 2, {}, r"expected one integer per edge, not float64 \[8\]"),
        (FOLD * 0, {}, "no edge of user__buys__item is for validation or test"),
    ],
)  # fmt: skip
def test_a_wrong_given_split_is_refused(tmp_path, fold, options, message):
    with pytest.raises(DataError, match=message):
        given(tmp_path, {"user__buys__item": BUYS, "user__buys__item__fold": fold}, **options)


def test_a_given_split_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(work_arrays, "_ROWS_AT_ONCE", 1000)
    rng = np.random.default_rng(0)
    arrays = {"user__buys__item": rng.integers(0, 4, (2, 60_000)), "user__buys__item__fold": rng.random(60_000) > 0.98}
    arrays["user__buys__item__fold"] = arrays["user__buys__item__fold"].astype(np.int64)
    arrays["user__buys__item__edge_attr"] = rng.random((60_000, 40))
    whole = given(tmp_path / "files", arrays)
    scratch = Scratch(tmp_path / "work", 1 << 20)
    scratch.folder.mkdir()
    tracemalloc.start()
    data = given(tmp_path / "files", {}, scratch)
    assert tracemalloc.get_traced_memory()[1] < 3 << 20
    tracemalloc.stop()
    of = ("user", "buys", "item")
    assert isinstance(data.edges[of].edge_index, np.memmap)
    assert np.array_equal(data.edges[of].edge_index, whole.edges[of].edge_index)
    assert np.array_equal(data.graph_attrs["val_links"], whole.graph_attrs["val_links"])
