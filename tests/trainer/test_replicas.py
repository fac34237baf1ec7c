"""Tests of sampling while graph servers are killed: replicas, restarted servers and lost servers."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import numpy as np
import pytest

from partitions import random_graph, store_of, write_store
from service_kit import assert_same_sample, free_endpoint, new_keys, serve_process, wait_for, write_key_file
from trainer.core.errors import ServiceError
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.replicas import PartHolders
from trainer.sampler.subgraph_sampler import BatchWork, SubgraphSampler
from trainer.sampler.types import HopRequest, SampleSettings, SeedSet
from trainer.service.client import HostClient
from trainer.service.cluster import connect_cluster
from trainer.service.messages import BatchRequest, ClientName, ServerAddress
from trainer.service.server_peers import Peers
from trainer.store.manifest import manifest_digest
from trainer.store.part_store import open_parts
from waiting import stretched

NODES = 400
SETTINGS = SampleSettings({HOMO_EDGE: (5, 3)}, edge_ids=True)
PLACES = {1: (1, 2), 2: (2, 3, 1)}  #: parts of each server; the asking process has part 0


class Site:
    def __init__(self, folder, places):
        self.folder, self.places, self.keys = folder, places, new_keys()
        self.parts, self.cluster, self.key_file = folder / "parts", folder / "cluster.json", folder / "service.key"
        edge_index, _ = random_graph(3, NODES, 4000)
        write_store(self.parts, store_of(edge_index, NODES, 4))
        write_key_file(self.key_file, self.keys)
        self.endpoints = {rank: free_endpoint() for rank in places}
        self.write_cluster(1)
        self.whole = LocalGraph(open_parts(self.parts))

    def write_cluster(self, version: int) -> None:
        nodes = [{"node_rank": 0, "host": "h0", "role": "worker", "endpoint": None, "parts": [0], "ranks": [0]}]
        nodes += [
            {"node_rank": rank, "host": f"h{rank}", "role": "server", "endpoint": self.endpoints[rank],
             "parts": list(parts), "ranks": []}
            for rank, parts in self.places.items()
        ]  # fmt: skip
        temporary = self.cluster.with_suffix(".new")
        temporary.write_text(json.dumps({"run_id": "r", "num_parts": 4, "version": version, "nodes": nodes}))
        temporary.replace(self.cluster)

    @contextlib.contextmanager
    def server(self, rank):
        with serve_process(
            self.folder, self.parts, self.places[rank], self.endpoints[rank], self.cluster, self.key_file,
            node_rank=rank, threads=1,
        ) as (process, ready):  # fmt: skip
            wait_for(ready, process)
            yield process
            ready.unlink(missing_ok=True)

    def graph(self, **options) -> DistGraph:
        clients = connect_cluster(self.cluster, 0, manifest_digest(self.parts), 30, self.keys)
        return DistGraph(LocalGraph(open_parts(self.parts, [0])), clients, **options)


@pytest.fixture
def site(tmp_path):
    return lambda places=PLACES: Site(tmp_path, places)


def request_of(key: int) -> HopRequest:
    nodes = np.random.default_rng(key).integers(0, NODES, 200)
    return HopRequest(HOMO_EDGE, nodes, 5, 5, key, with_edge=True)


class Sampling:
    """Samples from ``graph`` in a thread, and asserts that each sample equals the one from the unpartitioned graph."""

    def __init__(self, graph: DistGraph, whole: LocalGraph):
        self.done, self.longest, self.error = 0, 0.0, None
        self._graph, self._whole, self._stop = graph, whole, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.monotonic()
                request = request_of(self.done)
                assert_same_sample(self._graph.sample_hops([request])[0], self._whole.sample_hops([request])[0])
                self.longest = max(self.longest, time.monotonic() - start)
                self.done += 1
                time.sleep(0.005)
        except BaseException as error:
            self.error = error

    def more(self, number: int, timeout: float) -> None:
        until, wanted = time.monotonic() + timeout, self.done + number
        while self.done < wanted:
            assert self.error is None and time.monotonic() < until, self.error
            time.sleep(0.01)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self.error is None and not self._thread.is_alive(), self.error


@pytest.mark.slow
def test_killing_one_of_two_holders_pauses_sampling_for_seconds(site) -> None:
    here = site()
    with here.server(2), here.server(1) as process:
        sampling = Sampling(here.graph(), here.whole)
        sampling.more(20, 60)
        process.kill()
        process.wait(5)
        sampling.more(20, 60)
        with here.server(1):
            sampling.more(50, 60)
        sampling.end()
    assert sampling.longest < 25


@pytest.mark.slow
def test_killing_the_only_holder_pauses_sampling_until_it_is_back(site) -> None:
    here = site({1: (1, 2, 3)})
    with here.server(1) as process:
        sampling = Sampling(here.graph(server_wait=40), here.whole)
        sampling.more(20, 60)
        process.kill()
        process.wait(5)
        time.sleep(1.5)
        done = sampling.done
        with here.server(1):
            sampling.more(20, 60)
            sampling.end()
    assert sampling.longest > 1 and done < sampling.done


def test_a_part_that_no_server_holds_is_not_awaited_for_ever() -> None:
    with pytest.raises(ServiceError, match=r"part 1: no graph server that holds it came back within 0.05 s"):
        PartHolders(2, {0}, {}, 0, server_wait=0.05).wait_for([0, 1])


@pytest.mark.slow
def test_a_permanently_lost_holder_is_named(site) -> None:
    here = site({1: (1, 2, 3)})
    with here.server(1):
        graph = here.graph(server_wait=2)
        graph.sample_hops([request_of(1)])
    start = time.monotonic()
    with pytest.raises(ServiceError) as caught:
        graph.sample_hops([request_of(2)])
    assert 2 < time.monotonic() - start < stretched(25)
    first, cause = str(caught.value).splitlines()
    assert first == "parts 1, 2, 3: no graph server that holds them came back within 2 s (run.server_wait)"
    assert cause.startswith(f"graph server of node1 (h1) at {here.endpoints[1]}, parts 1,2,3: no answer within")
    assert "see logs/server.log of node1" in cause


@pytest.mark.slow
def test_a_run_starts_without_the_holder_of_replicas(site) -> None:
    here = site({1: (1, 2), 2: (1, 2, 3)})
    with here.server(2):
        start = time.monotonic()
        graph = here.graph()
        assert time.monotonic() - start < stretched(25)
        request = request_of(1)
        assert_same_sample(graph.sample_hops([request])[0], here.whole.sample_hops([request])[0])


def test_peers_connect_on_first_use_and_another_partition_is_refused(site, tmp_path) -> None:
    here = site({1: (1, 2, 3)})
    with here.server(1):
        local = LocalGraph(open_parts(here.parts, [0]))
        fitting = Peers(here.cluster, 0, manifest_digest(here.parts), here.keys)
        request = request_of(1)
        sample = DistGraph(local, fitting.hosts).sample_hops([request])[0]
        assert_same_sample(sample, here.whole.sample_hops([request])[0])
        other = Peers(here.cluster, 0, "a7" * 32, here.keys)
        with pytest.raises(ServiceError, match=r"manifest.json of node1 \(h1\) differs: .* there, a7a7a7a7a7a7 here"):
            DistGraph(local, other.hosts).sample_hops([request])
        fitting.close()
        other.close()


def test_a_new_version_of_cluster_json_changes_the_peers(site, capsys) -> None:
    here = site({1: (1, 2, 3)})
    peers = Peers(here.cluster, 0, manifest_digest(here.parts), here.keys)
    graph = DistGraph(LocalGraph(open_parts(here.parts, [0])), peers.hosts, server_wait=20)
    here.endpoints[1] = free_endpoint()
    here.write_cluster(1)
    peers.follow(graph.set_remotes)
    assert peers.topology()[0] == 1 and peers.topology()[1][0].endpoint != here.endpoints[1]
    here.cluster.write_text("{")
    peers.follow(graph.set_remotes)
    assert "is not a cluster.json" in capsys.readouterr().err
    here.write_cluster(2)
    peers.follow(graph.set_remotes)
    assert peers.topology()[0] == 2 and [place.endpoint for place in peers.topology()[1]] == [here.endpoints[1]]
    with here.server(1):
        request = request_of(1)
        assert_same_sample(graph.sample_hops([request])[0], here.whole.sample_hops([request])[0])
    peers.close()


@pytest.mark.slow
def test_batches_stay_the_same_when_a_server_behind_the_server_is_killed(site) -> None:
    here = site({1: (0, 1), 2: (2, 3), 3: (2, 3)})
    manifest = here.whole.store.manifest
    whole = SubgraphSampler(DistGraph(here.whole, {}), manifest, SETTINGS, {})
    with here.server(1), here.server(2) as process, here.server(3):
        place = ServerAddress("node1 (h1)", 1, "h1", here.endpoints[1], (0, 1))
        client = HostClient(place, 30, here.keys, route=True)
        for key in range(12):
            if key == 4:
                process.kill()
            seeds = SeedSet({HOMO_NODE: request_of(key).nodes})
            work = BatchWork(SETTINGS, seeds, key, {})
            there = client.submit(BatchRequest(work, ClientName(7, "test"))).result().subgraph
            here_too = whole.sample(seeds, key).subgraph
            np.testing.assert_array_equal(there.nodes[HOMO_NODE].ids, here_too.nodes[HOMO_NODE].ids)
            np.testing.assert_array_equal(there.edges[HOMO_EDGE].edge, here_too.edges[HOMO_EDGE].edge)
        client.close()
