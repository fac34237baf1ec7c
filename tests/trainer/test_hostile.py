"""Tests of a graph server that gets hostile messages: right answers for others, and bounded memory."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest

from hostile_kit import Attack, attacking, valid_requests
from raw_peer import RawPeer
from service_kit import (
    assert_same_sample,
    free_endpoint,
    new_keys,
    place_of,
    rows_of,
    server_environment,
    wait_for,
    write_cluster,
    write_key_file,
)
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.partition.make import PartitionSpec, make_partition
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.sampler.subgraph_sampler import BatchWork, SubgraphSampler
from trainer.sampler.types import HopRequest, SampleSettings, SeedSet
from trainer.service.client import HostClient
from trainer.service.messages import BatchRequest, ClientName, ServerAddress, Stats
from trainer.service.service_keys import ServiceKeys
from trainer.store.part_store import open_parts
from trainer.wire.frames import encode

NODES = 2000
NAME = ClientName(7, "honest")
OPTIONS = {"num_nodes": str(NODES), "avg_degree": "8", "num_classes": "4", "num_features": "8", "train": "200"}
PATIENCE = 30.0  #: seconds that the honest client may wait for one answer, on a busy machine
ROOM = 400 << 20  #: bytes by which the server's memory may grow
LOG = 10 << 20  #: bytes that the server may log


@dataclass(frozen=True)
class Target:
    place: ServerAddress
    keys: ServiceKeys | None
    key_file: Path | None
    process: psutil.Process
    log: Path
    graph: DistGraph  #: the same graph, opened in this process

    def client(self, deadline: float) -> HostClient:
        return HostClient(self.place, deadline, self.keys, route=True)


@dataclass
class Honest:
    """A client thread that sends requests and checks all replies, until the context ends."""

    target: Target
    waits: list[float] = field(default_factory=list)  #: seconds until all replies of a round were received
    most_memory: int = 0  #: largest memory of the server, in bytes
    wrong: list[BaseException] = field(default_factory=list)

    def __enter__(self) -> Honest:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(60)

    @property
    def p99(self) -> float:
        return float(np.percentile(self.waits, 99))

    def _run(self) -> None:
        client = self.target.client(PATIENCE)
        chance = np.random.default_rng(1)
        try:
            while not self._done.wait(0.01):
                begun = time.monotonic()
                ask_and_compare(client, self.target.graph, chance.integers(0, NODES, 300))
                self.waits.append(time.monotonic() - begun)
                self.most_memory = max(self.most_memory, self.target.process.memory_info().rss)
        except BaseException as error:
            self.wrong.append(error)
        finally:
            client.close()


def ask_and_compare(client: HostClient, graph: DistGraph, nodes: np.ndarray) -> None:
    request = HopRequest(HOMO_EDGE, nodes, 5, 2, 3, with_edge=True)
    assert_same_sample(client.sample_hops([request])[0], graph.sample_hops([request])[0])
    np.testing.assert_array_equal(rows_of(client, nodes)["x"], rows_of(graph, nodes)["x"])
    work = BatchWork(SampleSettings({HOMO_EDGE: (4, 3)}), SeedSet({HOMO_NODE: nodes[:50]}), 9, {HOMO_NODE: ("x",)})
    received = client.submit(BatchRequest(work, NAME)).result()
    expected = SubgraphSampler(graph, graph.local.store.manifest, work.settings, work.attrs).sample(
        work.seeds, work.key
    )
    np.testing.assert_array_equal(received.subgraph.edges[HOMO_EDGE].src, expected.subgraph.edges[HOMO_EDGE].src)
    for name, rows in expected.rows[HOMO_NODE].items():
        np.testing.assert_array_equal(received.rows[HOMO_NODE][name], rows)


@contextlib.contextmanager
def target(folder: Path, keys: ServiceKeys | None = None) -> Iterator[Target]:
    parts, endpoint, ready, log = folder / "parts", free_endpoint(), folder / "ready", folder / "log"
    make_partition(PartitionSpec("synthetic", str(parts), None, OPTIONS, 2, "random"), say=lambda _: None)
    cluster = write_cluster(folder / "cluster.json", (0, endpoint, (0, 1)))
    argv = ["--parts", parts, "--own", "0,1", "--bind", endpoint, "--cluster", cluster, "--ready-file", ready]
    key_file = folder / "service.key" if keys else None
    if keys is not None:
        write_key_file(key_file, keys)
        argv += ["--key-file", key_file]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer", "serve", *map(str, argv)],
            stdout=out, stderr=subprocess.STDOUT, env={**server_environment(), "NODE_RANK": "0"},
        )  # fmt: skip
    try:
        wait_for(ready, process)
        place = place_of(endpoint, 0, "host0", (0, 1))
        yield Target(
            place, keys, key_file, psutil.Process(process.pid), log, DistGraph(LocalGraph(open_parts(parts)), {})
        )
    finally:
        process.kill()
        process.wait(10)


def storm(victim: Target, insiders: int, strangers: int, seed: int) -> Honest:
    """Attack from three processes while an honest client works, then check the server.

    insiders, strangers: number of messages over connections with and without the key.
    """
    endpoint, half = victim.place.endpoint, insiders // 2
    key_file = str(victim.key_file) if victim.keys else None
    attacks = [
        Attack(endpoint, seed, half, key_file),
        Attack(endpoint, seed + 1, half, key_file, reads=False),
        Attack(endpoint, seed + 2, strangers, stranger=True, server_key=victim.keys.public if victim.keys else ""),
    ]
    before = victim.process.memory_info().rss
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(Honest(victim))
        running = [stack.enter_context(attacking(attack)) for attack in attacks]
        sent = [json.loads(process.communicate(timeout=1500)[0]) for process in running]
    assert not honest.wrong, honest.wrong
    with contextlib.closing(victim.client(60.0)) as client:
        ask_and_compare(client, victim.graph, np.arange(NODES))
        stats = client.ask(Stats())
    grown = (honest.most_memory - before) >> 20
    print(sent, f"{len(honest.waits)} rounds, p99 {honest.p99:.3f} s, at most {max(honest.waits):.2f} s,", stats)
    print(f"memory: {grown} MiB more")
    assert len(honest.waits) > 5 and max(honest.waits) < PATIENCE
    assert honest.most_memory - before < ROOM
    assert victim.log.stat().st_size < LOG
    assert stats.malformed > sum(one["connections"] for one in sent[:2]) // 20
    assert stats.refused > sent[2]["connections"] // 4
    return honest


@pytest.mark.slow
def test_a_flood_does_no_harm(tmp_path) -> None:
    with target(tmp_path, new_keys()) as victim:  # the slow test below also floods a server without encryption
        storm(victim, insiders=1_000, strangers=300, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_a_million_hostile_messages_do_no_harm(tmp_path, encrypted: bool) -> None:
    with target(tmp_path, new_keys() if encrypted else None) as victim:
        assert storm(victim, insiders=800_000, strangers=200_000, seed=2).p99 < 1.0


@pytest.mark.slow
def test_a_hundred_busy_clients_that_are_killed_do_no_harm(tmp_path) -> None:
    # Each client sends about a hundred requests for batches and rows and never reads the replies.
    asked = [encode(request) for request in valid_requests(NODES)[-9:]] * 12
    with target(tmp_path, new_keys()) as victim, Honest(victim) as honest:
        before = victim.process.memory_info().rss
        for _ in range(2):
            with contextlib.ExitStack() as crowd:
                peers = [crowd.enter_context(RawPeer(victim.place.endpoint, victim.keys)) for _ in range(50)]
                for peer in peers:
                    peer.sock.settimeout(0.2)
                    with contextlib.suppress(OSError):  # the server has stopped reading from this connection
                        for parts in asked:
                            peer.send(*parts)
                for peer in peers:
                    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset on close
        with contextlib.closing(victim.client(60.0)) as client:
            ask_and_compare(client, victim.graph, np.arange(300))
    assert not honest.wrong, honest.wrong
    assert honest.most_memory - before < ROOM


@pytest.mark.slow
def test_unread_replies_do_not_fill_the_memory(tmp_path) -> None:
    with target(tmp_path, new_keys()) as victim, Honest(victim) as honest:
        before, until = victim.process.memory_info().rss, time.monotonic() + 5
        greedy = Attack(victim.place.endpoint, 1, 3000, str(victim.key_file), glutton=True)
        with attacking(greedy), attacking(greedy), contextlib.closing(victim.client(60.0)) as client:
            while time.monotonic() < until and client.ask(Stats()).bytes_out < 2 * ROOM:
                time.sleep(0.1)
        assert not honest.wrong, honest.wrong
        assert len(honest.waits) > 5
        assert honest.most_memory - before < ROOM
