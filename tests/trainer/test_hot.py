"""Which rows a host keeps of the others', and whether it then receives what it said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hot_kit import hosts, loader_of, received, together
from test_cluster_train import start, two_nodes
from train_kit import command_line, finish, free_port, metrics, start_script, write_parts
from trainer.load import rehearsal
from trainer.load.expected import Bounds, asked_rows
from trainer.load.hot import hottest, places_of, visits_of_host
from trainer.load.keep import keep_hot_rows
from trainer.reach import CacheSize
from trainer.schema import HOMO_NODE
from trainer.train.setup import batch_plan

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


def visits_of(folder, topology, fanouts, **options):
    """Every rank's chances, and its loader."""
    graphs = hosts(folder, 2, topology)
    loaders = [loader_of(graph, rank, fanouts, BATCH, **options) for rank, graph in enumerate(graphs)]

    def work(team):
        graph, loader = graphs[team.rank], loaders[team.rank]
        places = places_of(graph.store, f"h{team.rank}", team)
        return visits_of_host(batch_plan(graph, loader), graph.store, graph.layout, places, team)

    return together(2, work), loaders


def kept(folder, topology, size, tmp_path, fanouts=FANOUTS, wire_rows="stored", **options):
    """Every rank's prediction, and its loader on a graph that keeps rows."""
    graphs = hosts(folder, 2, topology, wire_rows=wire_rows)
    loaders = [loader_of(graph, rank, fanouts, BATCH, **options) for rank, graph in enumerate(graphs)]

    def work(team):
        graph = graphs[team.rank]
        plan = batch_plan(graph, loaders[team.rank])
        node = f"h{team.rank}"
        return keep_hot_rows(
            graph.access, graph.store, plan, graph.layout, node, CacheSize.parse(size), tmp_path / node, team
        )

    return [found.prediction for found in together(2, work)], loaders


def visited(loader, of, epochs):
    """How often each node was in a batch."""
    counts = np.zeros(loader.graph.manifest.nodes[of].num_nodes)
    batches = 0
    for epoch in range(1, epochs + 1):
        for share in loader.shares(epoch):
            counts[loader.sample(share).subgraph.nodes[of].ids] += 1
            batches += 1
    return counts / batches


def remote_of(loader, of):
    begin, end = loader.graph.store.books[of].range_of(loader.rank)
    return np.r_[0:begin, end : loader.graph.manifest.nodes[of].num_nodes]


@pytest.mark.parametrize("options", [{}, {"replace": True}], ids=["plain", "with replacement"])
def test_the_ranking_is_that_of_real_batches(skewed, options) -> None:
    found, loaders = visits_of(skewed, "partitioned", FANOUTS, **options)
    for visits, loader in zip(found, loaders, strict=True):
        real, chances = visited(loader, HOMO_NODE, 6), visits.chances[HOMO_NODE]
        remote = remote_of(loader, HOMO_NODE)
        assert chances[remote].sum() == pytest.approx(real[remote].sum(), rel=0.06)
        top = hottest({HOMO_NODE: chances[remote]}, {HOMO_NODE: 1}, 600)[HOMO_NODE]
        best = np.argsort(-real[remote])[:600]
        assert real[remote][top].sum() > 0.93 * real[remote][best].sum()
        assert len(np.intersect1d(top[np.argsort(-chances[remote][top])][:100], best[:200])) > 85


def test_the_ranking_by_type_is_that_of_real_batches(typed) -> None:
    options = {"target": "paper"}
    found, loaders = visits_of(typed, "partitioned", HETERO_FANOUTS, **options)
    for of in ("paper", "author"):
        real, remote = visited(loaders[0], of, 3), remote_of(loaders[0], of)
        assert found[0].chances[of][remote].sum() == pytest.approx(real[remote].sum(), rel=0.06), of


@pytest.mark.parametrize("fanouts", [(8, 4), (2, 6), (-1, 2)])
def test_hosts_together_find_what_each_finds_with_all_edges(skewed, fanouts) -> None:
    shared, alone = (visits_of(skewed, topology, fanouts)[0] for topology in ("partitioned", "replicated"))
    for one, other in zip(shared, alone, strict=True):
        np.testing.assert_allclose(one.chances[HOMO_NODE], other.chances[HOMO_NODE], rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("topology", ["partitioned", "replicated"])
@pytest.mark.parametrize("size", ["0", "10%", "200KB"])
def test_what_was_foretold_is_received(skewed, tmp_path, topology, size) -> None:
    found, loaders = kept(skewed, topology, size, tmp_path)
    for prediction, loader in zip(found, loaders, strict=True):
        assert received(loader).remote_bytes == pytest.approx(prediction.remote_bytes, rel=0.1)
        assert prediction.line()["by"] == {"partitioned": "chances", "replicated": "sampled"}[topology]
    assert not list(tmp_path.glob("*/*")), "files are left"


def test_a_cache_saves_bytes_and_changes_no_batch(skewed, tmp_path) -> None:
    (with_cache, *_), loaders = kept(skewed, "replicated", "10%", tmp_path)
    (without, *_), plain = kept(skewed, "replicated", "0", tmp_path)
    assert with_cache.remote_bytes_without_cache == pytest.approx(without.remote_bytes)
    ours, theirs = received(loaders[0]), received(plain[0])
    assert ours.remote_bytes < 0.75 * theirs.remote_bytes
    assert ours.cached_rows == pytest.approx(with_cache.hit_rate * ours.remote_rows, rel=0.1)
    share = next(iter(loaders[0].shares(2)))
    one, other = (loader.sample(share).rows[HOMO_NODE] for loader in (loaders[0], plain[0]))
    assert all(np.array_equal(one[name], other[name]) for name in ("x", "orig_id"))


@pytest.mark.parametrize("fanouts", [(2,), (8, 4), (15, 10, 5)], ids=str)
def test_a_larger_cache_never_brings_more_bytes(tmp_path, fanouts) -> None:
    """Also where a batch visits most of the graph, so that held rows alone save much."""
    folder = write_parts(tmp_path, 2, **{**SKEWED, "num_nodes": 4000})
    brought = []
    for size in ("0", "3%", "10%", "30%", "100%"):
        (prediction, _), loaders = kept(folder, "replicated", size, tmp_path, fanouts=fanouts)
        brought.append(received(loaders[0]).remote_bytes)
        assert brought[-1] == prediction.remote_bytes  # all steps are rehearsed
    assert brought == sorted(brought, reverse=True) and brought[-1] == 0


@pytest.mark.parametrize("size", ["0", "10%"])
def test_some_steps_tell_of_the_others(skewed, tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(rehearsal, "MOST_STEPS", 8)  # of 12
    found, loaders = kept(skewed, "replicated", size, tmp_path)
    for prediction, loader in zip(found, loaders, strict=True):
        assert received(loader).remote_bytes == pytest.approx(prediction.remote_bytes, rel=0.07)


@pytest.mark.parametrize("wire_rows", ["float16", "int8"])
def test_rounded_rows_are_foretold_as_they_travel(skewed, tmp_path, wire_rows) -> None:
    for topology in ("partitioned", "replicated"):
        stored, _ = kept(skewed, topology, "10%", tmp_path)
        rounded, _ = kept(skewed, topology, "10%", tmp_path, wire_rows=wire_rows)
        assert rounded[0].cache_bytes == stored[0].cache_bytes
        assert rounded[0].hit_rate == stored[0].hit_rate
        if topology == "replicated":  # else ids travel, too
            width = {"float16": 32, "int8": 20}[wire_rows]
            assert rounded[0].remote_bytes == pytest.approx(stored[0].remote_bytes * width / 64)
        assert rounded[0].remote_bytes < stored[0].remote_bytes


def test_rows_are_chosen_by_chance_per_byte_within_the_budget() -> None:
    chances = {"a": np.array([0.5, 0, 0.2]), "b": np.array([0.9, 0.4])}
    chosen = hottest(chances, {"a": 10, "b": 40}, 60)
    assert {of: ids.tolist() for of, ids in chosen.items()} == {"a": [0, 2], "b": [0]}
    assert hottest(chances, {"a": 10, "b": 40}, 0)["a"].tolist() == []
    assert hottest(chances, {"a": 10, "b": 40}, 10**6)["a"].tolist() == [0, 2]  # what is never asked for is not kept


def test_nothing_is_held_of_one_batch_for_itself() -> None:
    assert asked_rows(np.array([1.0, 0.5]), np.ones(1), Bounds(4)).sum() == pytest.approx(1.5, rel=1e-3)
    assert asked_rows(np.array([1.0]), np.ones(10), Bounds(4, batches=0)).sum() == pytest.approx(10, rel=1e-3)
    assert asked_rows(np.zeros(3), np.ones(10), Bounds(4)).sum() == 0


def test_one_host_has_nothing_to_keep(skewed, tmp_path) -> None:
    graph = hosts(skewed, 2)[0]
    whole = loader_of(graph, 0, FANOUTS, BATCH)
    from trainer.load.open import open_graph

    alone = open_graph(skewed)
    plan = batch_plan(graph, whole)
    found = together(
        1,
        lambda team: keep_hot_rows(
            alone.access, alone.store, plan, alone.layout, "h", CacheSize(share=0.1), tmp_path, team
        ),
    )
    assert found == [None]


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
def test_a_script_of_ones_own_on_two_hosts(tmp_path) -> None:
    options = {**SKEWED, "num_nodes": 6000}
    with two_nodes(tmp_path, **options) as nodes:
        port = free_port()
        words = ["-c", OWN_SCRIPT, str(tmp_path / "nodeNODE"), str(nodes[0].cluster), str(nodes[0].key_file)]
        processes = [start_script(words, rank, 2, port) for rank in (0, 1)]
        for ended in [finish(process) for process in processes]:
            assert ended.returncode == 0, ended.output
            lines = [line.split()[1:] for line in ended.output.splitlines() if line.startswith("RESULT")]
            (_, expected0, received0, rows0), (_, expected10, received10, rows10) = lines
            assert int(rows0) == 0 and int(rows10) > 100
            assert int(received10) < 0.9 * int(received0)  # ids of edges are most of it
            assert int(received0) == pytest.approx(int(expected0), rel=0.1)
            assert int(received10) == pytest.approx(int(expected10), rel=0.1)


@pytest.mark.slow
def test_training_tells_what_it_expects_and_what_it_received(tmp_path) -> None:
    with two_nodes(tmp_path, **SKEWED) as nodes:
        run_dir = tmp_path / "run"
        jobs = lambda node: [command_line(node.job(run_dir, fanouts=FANOUTS, batch_size=BATCH, epochs=2))]  # noqa: E731
        first, _ = ended = [finish(process) for process in start(nodes, jobs)]
        assert [one.returncode for one in ended] == [0, 0], ended
    assert "rows of other hosts are kept here" in first.output and "(expected " in first.output
    for rank in (0, 1):
        (predict,) = metrics(run_dir, "predict", rank)
        assert predict["cache_rows"] > 0 and predict["steps"] == 12
        assert predict["remote_bytes"] < 0.8 * predict["remote_bytes_without_cache"]
        assert metrics(run_dir, "epoch", rank)[0]["remote_bytes"] == pytest.approx(predict["remote_bytes"], rel=0.1)
    assert not list((run_dir / "cache").iterdir())
