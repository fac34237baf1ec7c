"""Tests of parts with several holders: equal answers whichever holder is lost, and a clear error if all are lost."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from partitions import typed_store
from requests_kit import WRITES, hops_of_every_kind
from service_kit import assert_same_sample
from trainer.core.errors import ServerGone, ServiceError, Wait
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.types import RowRequest
from waiting import stretched

PARTS = 4


def store(only=None):
    rng = np.random.default_rng(5)
    nodes = {"author": 40, "paper": 60}
    edges = {WRITES: np.stack([rng.integers(0, 40, 400), rng.integers(0, 60, 400)])}
    node_attrs = {"paper": {"x": rng.normal(size=(60, 3))}, "author": {"time": rng.integers(0, 40, 40)}}
    edge_attrs = {WRITES: {"weight": rng.random(400), "time": rng.integers(0, 40, 400)}}
    return typed_store(nodes, edges, PARTS, node_attrs=node_attrs, edge_attrs=edge_attrs, only=only)


WHOLE = LocalGraph(store())


class Host:
    """Stands in for a connection to a graph server. Its requests fail while ``up`` is False."""

    def __init__(self, *part_ids):
        self.part_ids, self.name, self.up, self.asked = part_ids, f"server of {part_ids}", True, 0
        self._graph = LocalGraph(store(part_ids))

    def greet(self):
        return self._answer(lambda: None)

    def submit(self, request):
        return self._answer(lambda: request.answer(self._graph))

    def _answer(self, work):
        self.asked += 1
        return SimpleNamespace(result=lambda timeout=None: self._result(work), received=0)

    def _result(self, work):
        if not self.up:
            raise ServerGone(f"{self.name}: connection refused", wait=Wait("server", 3.0, "gather", 1))
        return work()


def graph_of(own, hosts, **options) -> DistGraph:
    return DistGraph(LocalGraph(store(own)), hosts, **options)


def assert_all_as_whole(graph: DistGraph) -> None:
    papers = np.random.default_rng(1).integers(0, 60, 50)
    authors = papers % 40
    hops = hops_of_every_kind(papers, num_sources=40)[
        ::7
    ]  # the step does not divide the number of values of any condition
    for there, here in zip(graph.sample_hops(hops), WHOLE.sample_hops(hops), strict=True):
        assert_same_sample(there, here)
    rows = [RowRequest("paper", papers, ("x", "orig_id")), RowRequest("author", authors, ("time",))]
    for there, here in zip(graph.gather(rows), WHOLE.gather(rows), strict=True):
        assert all(np.array_equal(there[name], here[name]) for name in here)
    np.testing.assert_array_equal(graph.has_edges(WRITES, authors, papers), WHOLE.has_edges(WRITES, authors, papers))
    edges = np.random.default_rng(2).integers(0, 400, 90)
    for there, here in zip(graph.endpoints(WRITES, edges), WHOLE.endpoints(WRITES, edges), strict=True):
        np.testing.assert_array_equal(there, here)


def test_a_lost_holder_is_replaced_by_the_next() -> None:
    hosts = {1: Host(1, 2), 2: Host(2, 3), 3: Host(3, 1)}
    graph = graph_of([0], hosts)
    assert_all_as_whole(graph)
    for lost in hosts.values():
        lost.up = False
        assert_all_as_whole(graph)
        lost.up = True


def test_each_kind_of_request_moves_to_the_next_holder() -> None:
    papers = np.arange(60)
    asks = [
        lambda graph: graph.sample_hops(hops_of_every_kind(papers, num_sources=40)[:1])[0].src,
        lambda graph: graph.gather([RowRequest("paper", papers, ("x",))])[0]["x"],
        lambda graph: graph.has_edges(WRITES, papers % 40, papers),
        lambda graph: np.stack(graph.endpoints(WRITES, np.arange(0, 400, 7))),
    ]
    for ask in asks:
        hosts = {1: Host(1, 2, 3), 2: Host(1, 2, 3)}
        hosts[1].up = False
        np.testing.assert_array_equal(ask(graph_of([0], hosts, server_wait=0)), ask(graph_of(range(PARTS), {})))


def test_own_parts_are_never_requested_from_others() -> None:
    other = Host(0, 1, 2, 3)
    graph = graph_of([0, 1, 2, 3], {1: other})
    assert_all_as_whole(graph)
    assert other.asked == 0


def test_holders_share_the_load() -> None:
    hosts = {1: Host(1, 2), 2: Host(1, 2), 3: Host(3)}
    papers = [int(WHOLE.books["paper"].range_of(part)[0]) for part in (1, 2)]
    asked = {}
    for turn in (0, 1):
        for part, paper in zip((1, 2), papers, strict=True):
            before = {rank: host.asked for rank, host in hosts.items()}
            graph_of([0], hosts, turn=turn).gather([RowRequest("paper", np.array([paper]), ("x",))])
            (asked[turn, part],) = [rank for rank, host in hosts.items() if host.asked > before[rank]]
    assert asked == {(0, 1): 2, (0, 2): 1, (1, 1): 1, (1, 2): 2}


def test_a_lost_host_gets_no_requests_until_it_answers_again() -> None:
    hosts = {1: Host(1, 2, 3), 2: Host(1, 2, 3)}
    graph, rows = graph_of([0], hosts, held=0), [RowRequest("paper", np.arange(60), ("x",))]
    hosts[1].up = False
    graph.gather(rows)
    asked = hosts[1].asked
    for _ in range(20):
        graph.gather(rows)
    assert hosts[1].asked <= asked + 1  # only hello requests, at most one per second
    hosts[1].up = True
    until = time.monotonic() + 60
    while hosts[1].asked < asked + 3:  # until the host answers for its parts again
        graph.gather(rows)
        assert time.monotonic() < until


def test_requests_wait_for_the_only_holder() -> None:
    host = Host(1, 2, 3)
    graph = graph_of([0], {1: host}, server_wait=20)
    host.up = False
    found: list[np.ndarray] = []
    asking = threading.Thread(target=lambda: found.append(graph.gather([RowRequest("paper", np.arange(60), ("x",))])))
    asking.start()
    time.sleep(0.3)
    assert asking.is_alive()
    host.up = True
    asking.join(60)
    np.testing.assert_array_equal(found[0][0]["x"], WHOLE.gather([RowRequest("paper", np.arange(60), ("x",))])[0]["x"])


def test_without_holders_the_wait_ends_with_their_names() -> None:
    hosts = {1: Host(1, 2), 2: Host(2, 3)}
    graph = graph_of([0], hosts, server_wait=0.5)
    for host in hosts.values():
        host.up = False
    start = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        graph.gather([RowRequest("paper", np.arange(60), ("x",))])
    assert 0.4 < time.monotonic() - start < stretched(30)
    assert caught.value.wait == Wait("server", 0.5, "gather", 1)
    first, *causes = str(caught.value).splitlines()
    assert first == "parts 1, 2, 3: no graph server that holds them came back within 0.5 s (run.server_wait)"
    assert sorted(causes) == ["server of (1, 2): connection refused", "server of (2, 3): connection refused"]
    np.testing.assert_array_equal(
        graph.gather([RowRequest("paper", np.arange(3), ("orig_id",))])[0]["orig_id"], [0, 4, 8]
    )


def test_the_wait_for_the_last_holder_starts_with_its_own_loss() -> None:
    hosts = {1: Host(1, 2, 3), 2: Host(1, 2, 3)}
    graph = graph_of([0], hosts, server_wait=1.0)
    hosts[1].up = False
    rows = [RowRequest("paper", np.arange(60), ("x",))]
    graph.gather(rows)
    time.sleep(1.2)  # longer than ``server_wait``, but the part has another holder
    hosts[2].up = False
    threading.Timer(0.4, lambda: setattr(hosts[2], "up", True)).start()
    np.testing.assert_array_equal(graph.gather(rows)[0]["x"], WHOLE.gather(rows)[0]["x"])


def test_a_waiting_call_continues_with_a_moved_server() -> None:
    lost, moved = Host(1, 2, 3), Host(1, 2, 3)
    graph = graph_of([0], {1: lost}, server_wait=20)
    lost.up = False
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            assert_all_as_whole(graph)
        except BaseException as error:
            failed.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.3)
    graph.set_remotes({1: moved})
    asking.join(60)
    assert not asking.is_alive() and not failed and moved.asked


def test_the_holders_may_change_at_any_moment_of_a_wait() -> None:
    lost, joined = Host(1, 2, 3), Host(1, 2, 3)
    graph = graph_of([0], {1: lost}, server_wait=20)

    class Replaced(list):
        def __getitem__(self, part):
            graph.set_remotes({2: joined})  # as another thread does when cluster.json changes
            return super().__getitem__(part)

    graph._holders._of_part = Replaced(graph._holders._of_part)
    lost.up = False
    rows = [RowRequest("paper", np.arange(60), ("x",))]
    np.testing.assert_array_equal(graph.gather(rows)[0]["x"], WHOLE.gather(rows)[0]["x"])
    assert joined.asked


def test_joined_peers_get_requests_and_removed_peers_get_none() -> None:
    old, new = Host(1, 2, 3), Host(1, 2, 3)
    graph = graph_of([0], {1: old})
    graph.set_remotes({1: old, 2: new})
    assert_all_as_whole(graph)
    assert new.asked and old.asked
    asked = old.asked
    graph.set_remotes({2: new})
    assert_all_as_whole(graph)
    assert old.asked == asked
