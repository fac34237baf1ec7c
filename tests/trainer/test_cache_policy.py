"""Tests of the remote rows chosen for a host's row cache, and of its predicted traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from cache_kit import hosts, loader_of, received, run_ranks
from fast_cases import fast_cases
from ports import free_port
from test_cluster_train import start, two_nodes
from train_kit import command_line, finish_all, metrics, start_script, write_parts
from trainer.core.remote_settings import CacheSize
from trainer.core.schema import HOMO_NODE
from trainer.graph import cache_policy
from trainer.graph.cache_fill import fill_cache
from trainer.graph.cache_policy import RowCounts, most_requested
from trainer.graph.open import Graph, open_graph
from trainer.graph.seed_order import RankLayout
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.train.job import batch_plan

SKEWED = {"num_nodes": 12_000, "avg_degree": 8, "skew": 2.1, "train": 0.2, "num_features": 16}
FANOUTS, BATCH = (8, 4), 200
HETERO_FANOUTS = {
    ("paper", "cites", "paper"): (4, 3),
    ("author", "writes", "paper"): (2, -1),
    ("paper", "rev_writes", "author"): (0, 3),
}


@pytest.fixture(scope="module")
def skewed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("skewed"), 2, **SKEWED)


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"num_nodes": 6000, "all_features": True, "train": 0.3}
    return write_parts(tmp_path_factory.mktemp("typed"), 2, "synthetic-hetero", **options)


def filled(folder, topology, size, tmp_path, fanouts=FANOUTS, wire_rows="stored", **options):
    """Fill the caches of two hosts with one rank each. Return lists of predictions and of loaders, by rank.

    size: size of each cache, such as "30%". options: settings of the loaders.
    """
    graphs = hosts(folder, 2, topology, wire_rows=wire_rows)
    loaders = [loader_of(graph, rank, fanouts, BATCH, **options) for rank, graph in enumerate(graphs)]

    def work(ranks):
        graph, node = graphs[ranks.rank], f"h{ranks.rank}"
        plan, limit = batch_plan(graph, loaders[ranks.rank]), CacheSize.parse(size)
        return fill_cache(graph.access, graph.store, plan, node, limit, tmp_path / node, ranks)

    return run_ranks(2, work), loaders


def visited(loader, of, epochs):
    """Return how many batches of ``epochs`` contain each node, float64 [num_nodes]."""
    counts = np.zeros(loader.graph.manifest.nodes[of].num_nodes)
    for share in (share for epoch in epochs for share in loader.shares(epoch)):
        counts[loader.sampler.subgraph(loader._seed_set(share), share.key).nodes[of].ids] += 1
    return counts


def cached_slots(loader, of):
    return loader.graph.access._cache.types[of].slots


def remote_of(loader, of):
    begin, end = loader.graph.store.books[of].range_of(loader.rank)
    return np.r_[0:begin, end : loader.graph.manifest.nodes[of].num_nodes]


@pytest.mark.parametrize("topology", fast_cases(["partitioned", "replicated"], "partitioned"))
@pytest.mark.parametrize("options", [{}, {"replace": True}], ids=["plain", "with replacement"])
def test_the_rows_chosen_are_those_that_later_batches_request(skewed, tmp_path, topology, options) -> None:
    # In epochs that were not presampled, the cached rows have over 93 % of the hits of the best choice.
    (prediction, _), loaders = filled(skewed, topology, "10%", tmp_path, **options)
    real, remote = visited(loaders[0], HOMO_NODE, range(101, 107)), remote_of(loaders[0], HOMO_NODE)
    chosen = np.flatnonzero(cached_slots(loaders[0], HOMO_NODE) >= 0)
    assert np.isin(chosen, remote).all() and len(chosen) == prediction.cache_rows == round(0.1 * len(remote))
    best = np.sort(real[remote])[::-1][: len(chosen)]
    assert real[chosen].sum() > 0.93 * best.sum()


def test_rows_of_every_type_are_counted(typed, tmp_path) -> None:
    found, loaders = filled(typed, "partitioned", "20%", tmp_path, HETERO_FANOUTS, target="paper")
    for prediction, loader in zip(found, loaders, strict=True):
        assert received(loader).remote_bytes == prediction.remote_bytes < 0.9 * prediction.remote_bytes_without_cache
    for of in ("paper", "author"):
        real, remote = visited(loaders[0], of, range(101, 103)), remote_of(loaders[0], of)
        chosen = np.flatnonzero(cached_slots(loaders[0], of) >= 0)
        assert len(chosen) and real[chosen].mean() > 1.3 * real[remote].mean(), of


@pytest.mark.parametrize("topology", ["partitioned", "replicated"])
@pytest.mark.parametrize("size", fast_cases(["0", "10%", "200KB"], "10%"))
def test_received_bytes_equal_the_prediction(skewed, tmp_path, topology, size) -> None:
    found, loaders = filled(skewed, topology, size, tmp_path)
    for prediction, loader in zip(found, loaders, strict=True):
        assert received(loader).remote_bytes == prediction.remote_bytes
        loader.graph.access.use_cache(loader.graph.access._cache)  # drops the held rows
        assert received(loader, epoch=101).remote_bytes == pytest.approx(prediction.remote_bytes, rel=0.1)
        assert prediction.presampled == prediction.steps == 12
    assert not list(tmp_path.glob("*/*")), "files are left"


def test_a_cache_saves_bytes_and_changes_no_batch(skewed, tmp_path) -> None:
    (with_cache, *_), loaders = filled(skewed, "replicated", "10%", tmp_path)
    (without, *_), plain = filled(skewed, "replicated", "0", tmp_path)
    assert with_cache.remote_bytes_without_cache == pytest.approx(without.remote_bytes)
    ours, theirs = received(loaders[0]), received(plain[0])
    assert ours.remote_bytes < 0.75 * theirs.remote_bytes
    assert ours.cached_rows == pytest.approx(with_cache.hit_rate * ours.remote_rows, rel=0.1)
    share = next(iter(loaders[0].shares(2)))
    one, other = (loader.load(share) for loader in (loaders[0], plain[0]))
    assert torch.equal(one.x, other.x) and torch.equal(one.n_id, other.n_id)


@pytest.mark.parametrize("fanouts", [(2,), (8, 4), (15, 10, 5)], ids=str)
def test_a_larger_cache_never_increases_received_bytes(tmp_path, monkeypatch, fanouts) -> None:
    # With large fanouts a batch visits most of the graph, so held rows alone save much.
    monkeypatch.setattr(cache_policy, "MOST_STEPS", 12)
    folder = write_parts(tmp_path, 2, **{**SKEWED, "num_nodes": 4000})
    brought = []
    for size in ("0", "3%", "10%", "30%", "100%"):
        (prediction, _), loaders = filled(folder, "replicated", size, tmp_path, fanouts=fanouts)
        brought.append(received(loaders[0]).remote_bytes)
        assert brought[-1] == prediction.remote_bytes  # all steps are presampled
    assert brought == sorted(brought, reverse=True) and brought[-1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["partitioned", "replicated"])
@pytest.mark.parametrize("size", ["0", "10%"])
def test_some_presampled_steps_predict_the_others(skewed, tmp_path, monkeypatch, topology, size) -> None:
    monkeypatch.setattr(cache_policy, "MOST_STEPS", 8)  # of 12 steps per epoch
    found, loaders = filled(skewed, topology, size, tmp_path)
    for prediction, loader in zip(found, loaders, strict=True):
        assert received(loader).remote_bytes == pytest.approx(prediction.remote_bytes, rel=0.07)
        assert prediction.presampled == 8


@pytest.mark.parametrize("wire_rows", ["float16", "int8"])
def test_the_prediction_counts_rounded_rows_as_sent(skewed, tmp_path, monkeypatch, wire_rows) -> None:
    monkeypatch.setattr(cache_policy, "MOST_STEPS", 12)
    for topology in ("partitioned", "replicated"):
        stored, _ = filled(skewed, topology, "10%", tmp_path)
        rounded, _ = filled(skewed, topology, "10%", tmp_path, wire_rows=wire_rows)
        assert rounded[0].cache_bytes == stored[0].cache_bytes
        assert rounded[0].hit_rate == stored[0].hit_rate
        if topology == "replicated":  # otherwise ids of edges are sent, too
            width = {"float16": 32, "int8": 20}[wire_rows]
            assert rounded[0].remote_bytes == pytest.approx(stored[0].remote_bytes * width / 64)
        assert rounded[0].remote_bytes < stored[0].remote_bytes


def counts(**given):
    return {of: RowCounts(np.array(ids), np.array(found)) for of, (ids, found) in given.items()}


def chosen_ids(found, row_bytes, budget, others=()):
    chosen = most_requested(found, row_bytes, budget, lambda of: [(id_, id_ + 1) for id_ in others])
    return {of: ids.tolist() for of, ids in chosen.items()}


def test_rows_are_chosen_by_requests_per_byte_within_the_budget() -> None:
    found = counts(a=([3, 5, 7], [5, 1, 2]), b=([0, 4], [9, 4]))
    assert chosen_ids(found, {"a": 10, "b": 40}, 60) == {"a": [3, 7], "b": [0]}
    assert chosen_ids(found, {"a": 10, "b": 40}, 9) == {"a": [], "b": []}
    assert chosen_ids(found, {"a": 10}, 25) == {"a": [3, 7]}
    assert chosen_ids({}, {"a": 10}, 25) == {}


def test_rows_that_were_not_counted_fill_the_budget_in_order() -> None:
    known = np.array([2, 3, 10, 11, 12, 40])
    found = {"a": RowCounts(known, np.ones(6, np.int64))}
    ranges = [(0, 5), (10, 14), (20, 20), (30, 60)]
    others = [id_ for begin, end in ranges for id_ in range(begin, end) if id_ not in known]
    for rows in (6, 7, 9, 10, 20, 100):
        chosen = most_requested(found, {"a": 4}, 4 * rows + 3, lambda of: ranges)
        assert chosen["a"].tolist() == sorted([*known, *others[: rows - 6]])


def test_rows_without_values_are_not_cached() -> None:  # ``x`` of a type with no column
    found = {of: RowCounts(np.array([2, 3]), np.ones(2, np.int64)) for of in "ab"}
    chosen = most_requested(found, {"a": 0, "b": 4}, 100, lambda of: [(0, 5)])
    assert {of: ids.tolist() for of, ids in chosen.items()} == {"b": [0, 1, 2, 3, 4]}


def test_of_rows_requested_equally_often_the_first_are_chosen() -> None:
    found = counts(a=([2, 6, 8], [1, 1, 1]), b=([1], [1]))
    assert chosen_ids(found, {"a": 10, "b": 10}, 20) == {"a": [2, 6], "b": []}


def test_unrequested_rows_fill_the_rest_of_the_budget() -> None:
    found = counts(a=([2, 6], [1, 1]))
    assert chosen_ids(found, {"a": 10, "b": 10}, 45, others=[1, 2, 5, 6, 9]) == {"a": [1, 2, 5, 6]}
    assert chosen_ids(found, {"a": 10, "b": 10}, 10**6, others=[1, 2, 5, 6, 9]) == {"a": [1, 2, 5, 6, 9]}


def test_one_host_has_nothing_to_cache(skewed, tmp_path) -> None:
    plan = batch_plan(hosts(skewed, 2)[0], loader_of(hosts(skewed, 2)[0], 0, FANOUTS, BATCH))
    with open_graph(skewed) as alone:
        fill = lambda ranks: fill_cache(alone.access, alone.store, plan, "h", CacheSize(0.1), tmp_path, ranks)  # noqa: E731
        assert run_ranks(1, fill) == [None]


def test_only_the_first_rank_of_each_host_presamples(skewed, tmp_path) -> None:
    # Ranks 0 and 1 are on host 0, rank 2 is on host 1, and rank 3 is a client without a part.
    first, again, other = hosts(skewed, 2)[0], hosts(skewed, 2)[0], hosts(skewed, 2)[1]
    client = Graph(dataclasses.replace(first.store, parts={}), None)
    graphs, nodes = [first, again, other, client], ["h0", "h0", "h1", "h2"]
    layout, sampled = RankLayout(4, ((0, 1), (2,))), []

    def work(ranks):
        graph, rank = graphs[ranks.rank], ranks.rank
        if graph is client:
            plan = None
        else:
            loader = BatchLoader(graph, LoaderSettings("train", FANOUTS, BATCH), rank, layout)
            plan = batch_plan(graph, loader)
            plan = dataclasses.replace(plan, requests=lambda epoch: sampled.append(rank) or loader.requests(epoch))
        return fill_cache(graph.access, graph.store, plan, nodes[rank], CacheSize(0.1), tmp_path / nodes[rank], ranks)

    found = run_ranks(4, work)
    assert found[0] == found[1] != found[2] and found[3] is None
    assert set(sampled) == {0, 2}
    rows = [graph.access._cache.num_rows for graph in (first, again)]
    assert rows == [found[0].cache_rows] * 2


OWN_SCRIPT = """
import sys
import torch.distributed as dist, trainer
dist.init_process_group("gloo")
parts, cluster, key = sys.argv[1:]
rank = dist.get_rank()
for size in ("0", "10%"):
    graph = trainer.open(parts.replace("NODE", str(rank)), part=rank, cluster=cluster, node_rank=rank, key_file=key)
    expected = graph.cache_rows([8, 4], batch_size=100, size=size)
    loader = trainer.DistNeighborLoader(graph, [8, 4], "train", batch_size=100, shuffle=True)
    for batch in loader:
        pass
    print("RESULT", size, round(expected.remote_bytes), loader.cost.remote_bytes, expected.cache_rows)
    graph.close()
dist.barrier()
"""


@pytest.mark.slow
def test_a_users_script_on_two_hosts(tmp_path) -> None:
    options = {**SKEWED, "num_nodes": 6000}
    with two_nodes(tmp_path, **options) as nodes:
        port = free_port()
        words = ["-c", OWN_SCRIPT, str(tmp_path / "nodeNODE"), str(nodes[0].cluster), str(nodes[0].key_file)]
        processes = [start_script(words, rank, 2, port) for rank in (0, 1)]
        for ended in finish_all(processes):
            assert ended.returncode == 0, ended.output
            lines = [line.split()[1:] for line in ended.output.splitlines() if line.startswith("RESULT")]
            (_, expected0, received0, rows0), (_, expected10, received10, rows10) = lines
            assert int(rows0) == 0 and int(rows10) > 100
            assert int(received10) < 0.9 * int(received0)  # most of the traffic are ids of edges
            assert int(received0) == pytest.approx(int(expected0), rel=0.1)
            assert int(received10) == pytest.approx(int(expected10), rel=0.1)


@pytest.mark.slow
def test_training_reports_predicted_and_received_bytes(tmp_path) -> None:
    with two_nodes(tmp_path, **SKEWED) as nodes:
        run_dir = tmp_path / "run"
        jobs = lambda node: [command_line(node.job(run_dir, fanouts=FANOUTS, batch_size=BATCH, epochs=2))]  # noqa: E731
        first, _ = ended = finish_all(start(nodes, jobs))
        assert [one.returncode for one in ended] == [0, 0], ended
    assert "rows of other hosts cached" in first.output and "from other hosts to rank 0: " in first.output
    for rank in (0, 1):
        (predict,) = metrics(run_dir, "predict", rank)
        assert predict["cache_rows"] > 0 and predict["steps"] == 12
        assert predict["remote_bytes"] < 0.8 * predict["remote_bytes_without_cache"]
        assert metrics(run_dir, "epoch", rank)[0]["remote_bytes"] == pytest.approx(predict["remote_bytes"], rel=0.1)
    assert not list((run_dir / "cache").iterdir())
