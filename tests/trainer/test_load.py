"""Tests of ``BatchLoader``: seeds, ranks, prefetching, and equal batches wherever the parts are."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from load_kit import CITES, REV, WRITES, hetero_data, homo_data, parts_of
from partitions import random_graph, store_of
from service_kit import place_of
from trainer import DistNeighborLoader
from trainer.core.errors import PartitionError, ServiceError, SettingsError, Wait
from trainer.core.schema import HOMO_NODE
from trainer.graph.open import Graph
from trainer.graph.prefetch import ordered_ahead
from trainer.graph.seed_order import RankLayout, SeedOrder, quotas, split_step
from trainer.loader.block_loader import BatchLoader, LoaderSettings
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo
from trainer.service.server import GraphServer
from waiting import stretched

NUM_NODES, NUM_EDGES, NUM_SEEDS = 400, 6000, 103


def graph_store(num_parts, only=None):
    edge_index, num_nodes = random_graph(11, NUM_NODES, NUM_EDGES)
    rng = np.random.default_rng(12)
    attrs = {
        "x": rng.standard_normal((num_nodes, 6)).astype(np.float16),
        "y": rng.integers(0, 5, num_nodes).astype(np.int16),
    }
    owner = rng.integers(0, num_parts, num_nodes)
    seeds = np.random.default_rng(0).permutation(NUM_NODES)[:NUM_SEEDS]
    return store_of(
        edge_index, num_nodes, num_parts, attrs=attrs, only=only, assignment=owner, splits={(HOMO_NODE, "train"): seeds}
    )


@contextmanager
def opened(num_parts, here):
    """Yield a graph. This process opens the parts ``here``; a graph server answers for each other part."""
    with ExitStack() as stack:
        store = graph_store(num_parts, only=here)
        clients = {}
        for part in sorted(set(range(num_parts)) - set(here)):
            served = LocalGraph(graph_store(num_parts, only=[part]))
            server = GraphServer(served, "tcp://127.0.0.1:0", HelloInfo(part, "test", (part,), "digest"), threads=2)
            server.start()
            stack.callback(server.stop)
            clients[part] = HostClient(place_of(server.endpoint, part, "test", (part,)), deadline=20)
            stack.callback(clients[part].close)
        yield Graph(store, DistGraph(LocalGraph(store), clients), clients)


#: Where parts are -> number of parts, and those opened in this process.
PLACEMENTS = {
    "one part": (1, [0]),
    "two parts here": (2, [0, 1]),
    "two parts, one over the wire": (2, [0]),
    "four parts, two over the wire": (4, [1, 3]),
    "four parts, all over the wire": (4, []),
}


def batches(graph, threads=1, rank=0, layout=None, **more):
    settings_ = LoaderSettings("train", (6, 4, 3), 25, seed=3, threads=threads, want_degree=True, **more)
    layout = layout or RankLayout.single(graph.manifest.num_parts)
    return list(BatchLoader(graph, settings_, rank, layout).epoch(1))


def assert_same_batch(ours, theirs):
    assert (ours.step, ours.key, ours.num_seeds, ours.global_seeds) == (
        theirs.step, theirs.key, theirs.num_seeds, theirs.global_seeds,
    )  # fmt: skip
    for name in ("n_id", "x", "y", "input_id", "degree"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for mine, other in zip(ours.blocks, theirs.blocks, strict=True):
        assert torch.equal(mine.indptr, other.indptr) and torch.equal(mine.indices, other.indices)
        assert mine.num_src == other.num_src


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_batches_are_identical_for_every_placement(placement, threads):
    with opened(1, [0]) as graph:
        expected = batches(graph)
    with opened(*PLACEMENTS[placement]) as graph:
        got = batches(graph, threads=threads)
        crossed = sum(batch.cost.remote_bytes for batch in got)
    assert len(got) == len(expected) == 5
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_batch(ours, theirs)
    assert (crossed > 0) == ("wire" in placement)


def test_ranks_share_every_global_batch():
    # Three ranks on two nodes together get the seeds of each batch of one process.
    with opened(1, [0]) as graph:
        whole = batches(graph)
    layout = RankLayout(3, ((0, 1), (2,)))
    with opened(2, [0, 1]) as graph:
        shares = [batches(graph, rank=rank, layout=layout) for rank in range(3)]
    for step, batch in enumerate(whole):
        mine = [share[step] for share in shares]
        assert sorted(torch.cat([part.input_id for part in mine]).tolist()) == sorted(batch.input_id.tolist())
        assert max(part.num_seeds for part in mine) - min(part.num_seeds for part in mine) <= 1
        assert {part.global_seeds for part in mine} == {batch.num_seeds}


def test_epochs_differ_and_each_covers_every_seed_once():
    with opened(1, [0]) as graph:
        loader = BatchLoader(graph, LoaderSettings("train", (2,), 25), 0, RankLayout.single(1))
        first, second = (torch.cat([batch.input_id for batch in loader.epoch(epoch)]) for epoch in (0, 1))
        resumed = [batch.input_id.tolist() for batch in loader.epoch(0, first_step=3)]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(NUM_SEEDS))
    assert not torch.equal(first, second)
    assert [i for ids in resumed for i in ids] == first[75:].tolist()


def test_more_ranks_than_seeds_gives_empty_batches_but_equal_steps():
    layout = RankLayout(40, (tuple(range(40)),))
    with opened(1, [0]) as graph:
        shares = [batches(graph, rank=rank, layout=layout) for rank in (0, 39)]
    assert [len(share) for share in shares] == [5, 5]
    assert shares[1][0].num_seeds == 0 and shares[1][0].x.shape == (0, 6)


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 7),
    num_parts=st.integers(1, 5),
    seeds=st.integers(0, 60),
    salt=st.integers(0, 1000),
)
def test_split_is_complete_balanced_and_local_first(world, num_parts, seeds, salt):
    rng = np.random.default_rng(salt)
    owner_node = np.sort(rng.integers(0, num_parts, world))
    ranks_of_part = tuple(tuple(np.flatnonzero(owner_node == part).tolist()) for part in range(num_parts))
    parts = rng.integers(0, num_parts, seeds)
    ranks = split_step(parts, RankLayout(world, ranks_of_part))
    counts = np.bincount(ranks, minlength=world)
    assert counts.sum() == seeds and counts.max() - counts.min() <= 1
    for part in range(num_parts):
        elsewhere = [rank for rank in ranks[parts == part] if rank not in ranks_of_part[part]]
        own = counts[list(ranks_of_part[part])]
        taken = [np.sum((ranks == rank) & (parts == part)) for rank in ranks_of_part[part]]
        assert not elsewhere or list(own) == taken, "a seed left its host although a rank there took seeds of others"


def test_layout_follows_the_cluster_file(tmp_path):
    from trainer.service.cluster import read_cluster

    nodes = [
        '{"node_rank": 0, "host": "a", "endpoint": null, "parts": [0, 1], "ranks": [0]}',
        '{"node_rank": 1, "host": "b", "endpoint": null, "parts": [2], "ranks": [1, 2]}',
    ]
    (tmp_path / "cluster.json").write_text(f'{{"run_id": "r", "num_parts": 3, "nodes": [{", ".join(nodes)}]}}')
    layout = RankLayout.from_cluster(read_cluster(tmp_path / "cluster.json"))
    assert layout == RankLayout(3, ((0,), (0,), (1, 2)))


def test_seed_order_counts_the_short_last_step():
    order = SeedOrder(num_seeds=10, global_batch=4, seed=0)
    assert order.num_steps == 3
    assert [len(order.step(order.epoch(0), step)) for step in range(3)] == [4, 4, 2]
    assert order.key(0, 0) != order.key(0, 1) != order.key(1, 1)
    assert SeedOrder(10, 4, 0, drop_last=True).num_steps == 2
    joined = SeedOrder(10, 4, 0, least=3)
    assert [len(joined.step(joined.epoch(0), step)) for step in range(joined.num_steps)] == [4, 6]
    with pytest.raises(SettingsError, match="at least 1"):
        SeedOrder(10, 0, 0)


def test_work_ahead_keeps_order_and_runs_concurrently():
    barrier = threading.Barrier(3)

    def work(job):
        barrier.wait(60)
        return job

    assert list(ordered_ahead(work, range(9), threads=3, ahead=3, deadline=60)) == list(range(9))


def test_a_deadline_may_be_infinite():
    ahead = ordered_ahead(lambda job: time.sleep(0.2) or job, range(1), threads=1, ahead=1, deadline=math.inf)
    assert list(ahead) == [0]


def sampler_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sampler")]


@pytest.mark.parametrize("placement", ["two parts here", "two parts, one over the wire"])
def test_an_epoch_closed_early_ends_its_threads_and_the_next_is_complete(placement):
    with opened(*PLACEMENTS[placement]) as graph:
        loader = BatchLoader(graph, LoaderSettings("train", (6, 4), 10, threads=3), 0, RankLayout.single(2))
        expected = [batch.input_id.tolist() for batch in loader.epoch(1)]
        begun = loader.epoch(1)
        next(begun)
        assert sampler_threads(), "no sampler threads were running"
        begun.close()
        until = time.monotonic() + 60
        while sampler_threads():
            assert time.monotonic() < until, "sampler threads still run after the iterator was closed"
            time.sleep(0.01)
        for _ in DistNeighborLoader(graph, [4, 3], "train", batch_size=16):
            break
        assert [batch.input_id.tolist() for batch in loader.epoch(1)] == expected


def test_settings_that_cannot_be_sampled_are_refused_before_the_first_batch():
    graph, layout = hetero_graph(), RankLayout.single(1)

    def loader(split="train", fanouts=(2,), target="paper"):
        BatchLoader(graph, LoaderSettings(split, fanouts, 10, target=target), 0, layout)

    with pytest.raises(SettingsError, match="fanout 2147483648; it must be below 2147483648"):
        loader(fanouts=(5, 2**31))
    with pytest.raises(SettingsError, match="fanouts: the graph has no edge type .*'sees'"):
        loader(fanouts={("paper", "sees", "paper"): (2,)})
    with pytest.raises(SettingsError, match="no node type 'book'; the graph has"):
        loader(target="book")
    with pytest.raises(PartitionError, match=r"no split 'test' of 'paper'; there are \['train'\]"):
        loader(split="test")


def hetero_graph(num_parts=1):
    return parts_of(hetero_data(), num_parts)


def test_a_typed_batch_holds_rows_of_the_types_that_have_them_and_exact_blocks():
    data = hetero_data()
    fanouts = {WRITES: (3, -1), CITES: (2, 4), REV: (1, 1)}
    loader = BatchLoader(hetero_graph(2), LoaderSettings("train", fanouts, 16, target="paper"), 0, RankLayout.single(2))
    for batch in loader.epoch(0):
        assert set(batch.x) == {"paper", "venue"} and batch.x["paper"].dtype == torch.float32
        assert set(batch.n_id) == {"author", "paper", "venue"}
        assert torch.equal(batch.x["paper"], data["paper"].x[batch.n_id["paper"]])
        assert torch.equal(batch.y, data["paper"].y[batch.n_id["paper"][: batch.num_seeds]])
        for layer, blocks in enumerate(batch.blocks):
            hop = 1 - layer
            for of, block in blocks.items():
                assert (block.num_src, block.num_dst) == (batch.num_nodes[of[0]][hop + 1], batch.num_nodes[of[2]][hop])
                degree = torch.bincount(data[of].edge_index[1], minlength=70)[batch.n_id[of[2]][: block.num_dst]]
                fanout = fanouts[of][hop]
                assert torch.equal(block.indptr.diff().long(), degree if fanout < 0 else degree.clamp(max=fanout))


def test_a_part_without_a_server_is_an_error_and_closes_all_connections(tmp_path, monkeypatch):
    from trainer.graph import open as opening

    store, closed = graph_store(3, only=[0]), []
    client = HostClient(place_of("tcp://127.0.0.1:9", 1, "b", (1,)), deadline=1)
    monkeypatch.setattr(opening, "open_parts", lambda *_: store)
    monkeypatch.setattr("trainer.service.cluster.connect_cluster", lambda *_, **__: {1: client})
    monkeypatch.setattr(opening, "manifest_digest", lambda _: "d")
    monkeypatch.setattr(client, "close", lambda: closed.append(client))
    with pytest.raises(PartitionError, match=r"parts \[2\] of .* are neither opened here nor served by another node"):
        opening.open_graph(tmp_path, [0], cluster_file=tmp_path / "cluster.json")
    assert closed == [client]


def test_an_error_in_a_thread_is_raised_after_earlier_results():
    def work(job):
        if job == 2:
            raise ServiceError("node1 is gone")
        return job

    ahead = ordered_ahead(work, range(5), threads=2, ahead=4, deadline=10)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ServiceError, match="node1 is gone"):
        next(ahead)


def test_no_job_starts_after_a_failure():
    begun = []

    def work(job):
        begun.append(job)
        if job == 1:
            raise ServiceError("node1 is gone")
        return job

    ahead = ordered_ahead(work, range(9), threads=1, ahead=5, deadline=10)
    assert next(ahead) == 0
    time.sleep(0.2)
    with pytest.raises(ServiceError):
        next(ahead)
    assert begun == [0, 1]


def test_a_stuck_thread_is_an_error_at_the_deadline():
    release = threading.Event()
    begun = time.monotonic()
    with pytest.raises(ServiceError, match=r"made no batch within 0\.3 s") as caught:
        next(ordered_ahead(lambda job: release.wait(20), [1], threads=1, ahead=1, deadline=0.3))
    release.set()
    assert caught.value.wait == Wait("threads", 0.3)
    assert time.monotonic() - begun < stretched(15)


def test_a_lost_server_fails_the_epoch_with_its_name():
    store = graph_store(2, only=[0])
    with opened(2, [0]) as graph:
        host = graph.clients[1]
        gone = HostClient(place_of("tcp://127.0.0.1:9", 1, "dead.example", (1,)), deadline=0.5)
        broken = Graph(store, DistGraph(LocalGraph(store), {1: gone}), {1: gone})
        assert host.part_ids == gone.part_ids
        with broken, pytest.raises(ServiceError, match=r"node1 \(dead.example"):
            batches(broken, deadline=0.5)


@pytest.mark.parametrize(
    ("n", "shares", "expected"),
    [
        (10, (), [4, 3, 3]),
        (10, (1.0, 1.0, 2.0), [3, 2, 5]),
        (7, (1.0, 0.1, 1.0), [4, 0, 3]),
        (0, (2.0, 1.0, 1.0), [0] * 3),
    ],
)
def test_seeds_are_divided_by_batch_shares(n: int, shares: tuple[float, ...], expected: list[int]) -> None:
    layout = RankLayout(3, ((0, 1), (2,)), shares)
    assert quotas(n, layout).tolist() == expected
    ranks = split_step(np.arange(n) % 2, layout)
    assert np.bincount(ranks, minlength=3).tolist() == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((2, ((0,), (2, 1))), "part 1 has rank 2 of 2 ranks"),
        ((2, ((-1,),)), "part 0 has rank -1 of 2 ranks"),
        ((2, ((0,), (1,)), (1.0,)), "expected 2 numbers"),
        ((2, ((0,), (1,)), (0.0, 0.0)), "not all 0"),
        ((2, ((0,), (1,)), (1.0, -1.0)), "from 0 on"),
        ((2, ((0,), (1,)), (1.0, float("nan"))), "from 0 on"),
    ],
)
def test_layouts_that_would_lose_seeds_are_refused(args, message):
    with pytest.raises(SettingsError, match=message):
        RankLayout(*args)


def test_block_loaders_check_rank_and_parts_of_the_layout():
    graph, settings = parts_of(homo_data(), 2), LoaderSettings("train", (2,), 8)
    for rank, layout, message in ((1, RankLayout.single(2), "rank 1 is not one"), (0, RankLayout.single(1), "1 parts")):
        with pytest.raises(SettingsError, match=message):
            BatchLoader(graph, settings, rank, layout)
