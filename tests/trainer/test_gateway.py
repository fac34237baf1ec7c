"""Tests of ``Gateway``, a client's connection to graph servers: failover, return to the home server, and errors."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from gateway_kit import HALVES, client_graph, serving_parts, written
from load_kit import homo_data
from oracle import assert_identical
from service_kit import free_endpoint
from trainer import DistNeighborLoader
from trainer.core.batch_cost import Cost
from trainer.core.errors import PartitionError, ServerGone, ServiceError, SettingsError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.graph.open import open_graph
from trainer.sampler.subgraph_sampler import BatchWork
from trainer.sampler.types import RowRequest, SampleSettings, SeedSet
from trainer.service import remote_graph as gateway_module
from trainer.service.batch_scheduler import MAX_QUEUED
from trainer.service.client import HostClient
from trainer.service.messages import ServerAddress
from trainer.service.remote_graph import Gateway, _ServerChoice
from waiting import stretched

TWICE = ((0, 1, 2, 3), (0, 1, 2, 3))  #: every part on both servers


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(gateway_module, "GONE_AFTER", 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("parts"), homo_data())


@pytest.fixture
def servers(folder):
    with serving_parts(folder, TWICE) as servers:
        yield servers


@pytest.fixture(scope="module")
def expected(folder):
    with open_graph(folder) as local:
        yield list(loader(local))


def loader(graph):
    return DistNeighborLoader(graph, [4, 3], "train", batch_size=2, shuffle=True, seed=1, prefetch=2)


def served(servers, number) -> int:
    return sum(client.batches for client in servers.servers[number]._scheduler.status().clients)


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"the condition did not hold within {seconds} s"
        time.sleep(0.02)


def test_batches_are_requested_from_the_home_server(servers, expected):
    with client_graph(servers, home=1) as graph:
        assert_identical(list(loader(graph)), expected)
        assert (served(servers, 0), served(servers, 1)) == (0, len(expected))
        until(lambda: servers.servers[1]._scheduler.status().buffer_bytes == 0)


@pytest.mark.slow
def test_more_batches_ahead_than_a_server_queues_for_one_client(servers, folder):
    seeds = torch.arange(60).repeat(5)

    def far_ahead(graph):
        return DistNeighborLoader(graph, [4, 3], seeds, batch_size=1, prefetch=2 * MAX_QUEUED)

    with client_graph(servers) as graph, open_graph(folder) as local:
        assert_identical(list(far_ahead(graph)), list(far_ahead(local)))


def test_a_lost_home_server_is_replaced_and_used_again_once_back(servers, expected):
    with client_graph(servers) as graph:
        batches = iter(loader(graph))
        got = [next(batches) for _ in range(5)]
        servers.stop(0)
        start = time.monotonic()
        got += [next(batches) for _ in range(5)]
        assert time.monotonic() - start < stretched(25)
        assert served(servers, 1) >= 3
        servers.start(0)
        servers.join()
        until(lambda: not graph.gateway._choice.gone)
        before = served(servers, 1)
        got += list(batches)
        assert_identical(got, expected)
        assert served(servers, 1) <= before + 2, "only batches requested before the home server was back"
        assert served(servers, 0) >= 5


def test_without_another_server_the_client_waits_for_the_restart(folder, expected):
    with serving_parts(folder, TWICE[:1]) as servers, client_graph(servers) as graph:
        batches = iter(loader(graph))
        got = [next(batches) for _ in range(3)]
        servers.stop(0)
        timer = threading.Timer(1.5, lambda: (servers.start(0), servers.join()))
        timer.start()
        assert_identical(got + list(batches), expected)
        timer.join()


def test_the_error_names_all_servers_when_none_comes_back(servers):
    with client_graph(servers, server_wait=2.0) as graph:
        batches = iter(loader(graph))
        next(batches)
        for number in (0, 1):
            servers.stop(number)
        start = time.monotonic()
        with pytest.raises(ServiceError) as caught:
            list(batches)
        assert 1 < time.monotonic() - start < stretched(40)
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    for number, line in enumerate(sorted(lines)):
        assert line.startswith(
            f"graph server of node{number} (s{number}) at {servers.places[number].endpoint}, parts 0,1,2,3"
        )
        assert (
            re.search(r"\((connection lost|no connection)\).*it was not back within 2 s", line)
            and f"logs/server.log of node{number}" in line
        )


def test_opening_skips_an_unreachable_server(servers, expected):
    absent = ServerAddress("node9 (far)", 9, "far", free_endpoint(), (0,))
    servers.places = {9: absent, **servers.places}
    with client_graph(servers, home=9) as graph:
        assert_identical(list(loader(graph)), expected)


def test_opening_fails_within_its_timeout_and_names_the_server():
    place = ServerAddress("node9 (far) of products", 9, "far", free_endpoint(), (0, 2), "products")
    start = time.monotonic()
    with contextlib.closing(Gateway([place], 30.0)) as gateway, pytest.raises(ServiceError) as caught:
        gateway.open(1.0)
    assert time.monotonic() - start < stretched(25)
    assert str(caught.value).startswith(f"graph server of node9 (far) of products at {place.endpoint}, parts 0,2: ")
    assert (caught.value.wait.node_rank, caught.value.wait.server) == (None, place.name)


def test_the_wait_for_a_server_may_be_infinite():
    client = HostClient(ServerAddress("node0 (a)", 0, "a", free_endpoint(), (0,)), 1.0)
    choice = _ServerChoice(client)
    choice.mark_gone(client, ServerGone("gone"))
    threading.Timer(0.2, choice.mark_back, [client]).start()
    assert choice.pick(math.inf) is client


def test_a_server_that_joins_is_discovered_and_used(folder, expected, monkeypatch):
    monkeypatch.setattr(gateway_module, "_LEARN_EVERY", 0.3)
    with serving_parts(folder, TWICE) as servers:
        servers.listed = (0,)
        only = replace_places(servers, [0])
        with client_graph(only) as graph:
            assert [place.node_rank for place in graph.gateway.servers] == [0]
            servers.version, servers.listed = 2, (0, 1)
            until(lambda: len(graph.gateway.servers) == 2)
            servers.stop(0)
            assert_identical(list(loader(graph)), expected)
            assert served(servers, 1) == len(expected)


def replace_places(servers, numbers):
    # an object like ``servers`` that has only the servers ``numbers``
    class View:
        places = {number: servers.places[number] for number in numbers}
        keys = servers.keys

    return View


def test_a_server_of_another_partition_is_refused(folder, tmp_path):
    other = written(tmp_path, homo_data(seed=6))
    with serving_parts(folder) as ours, serving_parts(other) as theirs:
        mixed = replace_places(ours, [0])
        mixed.places = {0: ours.places[0], 1: theirs.places[1]}
        with client_graph(mixed) as graph:
            ours.stop(0)
            with pytest.raises(ServiceError, match=r"node1 \(s1\).*holds another partition than node0 \(s0\)"):
                list(loader(graph))


def test_many_threads_survive_the_loss_of_a_server(servers, expected, folder):
    with client_graph(servers) as graph, open_graph(folder) as local:
        how = {"batch_size": 4, "shuffle": True}
        loaders = [DistNeighborLoader(graph, [4, 3], "train", seed=k, prefetch=3, **how) for k in range(4)]
        got: dict[int, list] = {}
        threads = [threading.Thread(target=lambda k=k: got.update({k: list(loaders[k])})) for k in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        servers.stop(0)
        for thread in threads:
            thread.join(60)
        for k in range(4):
            mine = DistNeighborLoader(local, [4, 3], "train", seed=k, **how)
            assert_identical(got[k], list(mine))


def test_close_wakes_threads_that_wait_for_a_server(servers):
    with client_graph(servers, server_wait=60.0) as graph:
        for number in (0, 1):
            servers.stop(number)
        raised: list[Exception] = []

        def ask():
            try:
                list(loader(graph))
            except ServiceError as error:
                raised.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: len(graph.gateway._choice.gone) == 2)
        assert thread.is_alive()
        start = time.monotonic()
        graph.close()
        thread.join(30)
        assert time.monotonic() - start < stretched(30) and "the client was closed" in str(raised[0])


def test_a_graph_that_is_dropped_leaves_no_thread(servers):
    graph = client_graph(servers)
    assert "server-probe" in [thread.name for thread in threading.enumerate()]
    del graph
    gc.collect()
    until(lambda: "server-probe" not in [thread.name for thread in threading.enumerate()])


def test_an_error_of_a_probe_does_not_end_the_probes(servers, monkeypatch, capfd):
    monkeypatch.setattr(gateway_module, "_BACK_EVERY", 0.02)
    probes = []

    def fails(self, learn):
        probes.append(learn)
        raise RuntimeError("a bug")

    monkeypatch.setattr(gateway_module.Gateway, "probe_servers", fails)
    with client_graph(servers):
        until(lambda: len(probes) > 3)
    assert "RuntimeError: a bug" in capfd.readouterr().err


def test_all_lost_servers_are_asked_at_once(servers, monkeypatch):
    monkeypatch.setattr(gateway_module, "_BACK_EVERY", 600.0)  # this test alone asks
    events = []

    class Silent:
        def __init__(self, name):
            self.name = name

        def greet(self):
            events.append(self.name)
            return self

        def result(self, timeout):
            events.append(timeout)
            if self.name == "a":  # stuck, uses up the time of all
                time.sleep(timeout)
            raise ServiceError("no answer")

    monkeypatch.setattr(gateway_module, "_PROBE_TIMEOUT", 0.5)
    with client_graph(servers) as graph:
        monkeypatch.setattr(graph.gateway._choice, "_gone", {Silent(name): None for name in "abc"})
        graph.gateway.probe_servers(learn=False)
        monkeypatch.undo()
    least = gateway_module._PROBE_LEAST  # no connection is made while nobody waits for a reply
    assert events[:3] == ["a", "b", "c"] and least < events[3] <= 0.5 and events[4:] == [least, least]


def test_large_requests_are_split(servers, folder, monkeypatch):
    monkeypatch.setattr(gateway_module, "_AT_ONCE", 7)
    monkeypatch.setattr(gateway_module, "_BYTES_AT_ONCE", 300)
    with client_graph(servers) as graph, open_graph(folder) as local:
        nodes, edges = np.arange(60)[::-1], np.arange(0, 260, 3)
        asked = [RowRequest(HOMO_NODE, nodes, ("x", "image", "orig_id")), RowRequest(HOMO_EDGE, edges, ("edge_attr",)),
                 RowRequest(HOMO_NODE, nodes[:0], ("half",))]  # fmt: skip
        for ours, theirs in zip(graph.access.gather(asked), local.access.gather(asked), strict=True):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                assert ours[name].dtype == values.dtype
                np.testing.assert_array_equal(ours[name], values)
        np.testing.assert_array_equal(graph.store.seeds(HOMO_NODE, "train"), local.store.seeds(HOMO_NODE, "train"))
        ends = [each.access.endpoints(HOMO_EDGE, np.arange(260)) for each in (graph, local)]
        np.testing.assert_array_equal(*ends)
        cost = graph.access.take_cost()
        assert (cost.rows, cost.remote_rows) == (60 + len(edges), 60 + len(edges)) and cost.remote_bytes > 0
        assert graph.access.take_cost() == Cost()


def test_the_whole_id_table_is_requested_after_a_quarter_of_it(servers):
    with client_graph(servers) as graph:
        asked = []
        to_global = graph.access.to_global
        graph.access.to_global = lambda of, ids: asked.append(len(ids)) or to_global(of, ids)
        for _ in range(9):
            graph.store.to_global(HOMO_NODE, np.arange(4))
        assert asked == [4, 4, 4, 60], "after a quarter of the nodes, all ids are requested once"


def test_a_failed_request_is_an_error_and_not_a_lost_server(servers):
    settings = SampleSettings({HOMO_EDGE: (2,)}, weight="price")
    work = BatchWork(settings, SeedSet({HOMO_NODE: np.arange(3)}), 5, {})
    with client_graph(servers) as graph:
        with pytest.raises(ServiceError, match=r"node0 \(s0\).*batch failed: .*price"):
            graph.access.sample_batch(work)
        with pytest.raises(SettingsError, match="a batch of 1048577 seeds"):
            graph.access.sample_batch(replace(work, seeds=SeedSet({HOMO_NODE: np.zeros((1 << 20) + 1, np.int64)})))
        with pytest.raises(PartitionError, match="no edge type"):
            graph.access.endpoints(("a", "b", "c"), np.arange(3))
        assert not graph.gateway._choice.gone


def test_parts_of_both_servers_are_in_a_batch(folder):
    with serving_parts(folder, HALVES) as servers, client_graph(servers, home=1) as graph:
        batch = next(iter(loader(graph)))
        parts = graph.store.books[HOMO_NODE].part_of(graph.store.to_global(HOMO_NODE, batch.n_id.numpy()))
        assert {0, 1} & set(parts.tolist()) and {2, 3} & set(parts.tolist())


@pytest.mark.parametrize("form", ["float16", "int8"])
def test_batches_come_with_rounded_rows_of_the_same_nodes(servers, expected, form):
    with client_graph(servers, wire_rows=form) as graph:
        for batch, right in zip(loader(graph), expected, strict=True):
            assert batch.n_id.equal(right.n_id) and batch.y.equal(right.y) and batch.x.dtype == right.x.dtype
            assert (batch.x - right.x).abs().max() <= right.x.abs().max() / 200
        ids = np.arange(12)
        (rows,) = graph.access.gather([RowRequest(HOMO_NODE, ids, ("x", "orig_id"))])
        with open_graph(servers.folder) as whole:
            (right,) = whole.access.gather([RowRequest(HOMO_NODE, ids, ("x", "orig_id"))])
        assert rows["x"].dtype == right["x"].dtype and abs(rows["x"] - right["x"]).max() <= abs(right["x"]).max() / 200
        assert rows["orig_id"].tolist() == right["orig_id"].tolist()
