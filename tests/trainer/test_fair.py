"""Tests of one graph server with twenty clients: equal shares, bounded memory, and buffers that are freed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from fair_kit import BatchRequests, ClientProcesses, ReceivedBatch, running_clients, shares
from partitions import random_graph, store_of, write_store
from service_kit import serve_process, wait_for, write_cluster
from waiting import wait_until

NODES, EDGES = 20_000, 300_000
COLUMNS = {"x": 64, "wide": 512}  # float32
CLIENTS = 20
BUFFER_MB = 64
BATCH_MB = 12  #: the largest reply: the buffer may be exceeded by what the estimate of one batch lacks
MARGIN_MB = 40  #: memory besides the buffer: batches being made, socket buffers, and freed memory that malloc keeps
FREED_WITHIN = 40.0  #: seconds on a busy machine; the server frees the buffer after eight


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fair") / "parts"
    edge_index, num_nodes = random_graph(1, NODES, EDGES)
    rng = np.random.default_rng(2)
    attrs = {name: rng.standard_normal((num_nodes, width), np.float32) for name, width in COLUMNS.items()}
    write_store(folder, store_of(edge_index, num_nodes, attrs=attrs))
    return folder


class Server:
    def __init__(self, endpoint: str, pid: int, stats: Path):
        self.endpoint, self.pid, self._stats = endpoint, pid, stats

    @property
    def stats(self) -> dict:
        return json.loads(self._stats.read_text())

    @property
    def memory(self) -> float:
        """Anonymous memory of the server process in MB."""
        # without the parts: mapped files, which the kernel may drop
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("RssAnon:"))

    def held(self, names: Collection[str]) -> int:
        stats = self.stats
        assert stats["buffer_limit"] == BUFFER_MB * 1e6
        assert stats["buffer_bytes"] < (BUFFER_MB + BATCH_MB) * 1e6
        return sum(one["buffer_bytes"] for one in stats["clients"] if one["name"].split()[0] in names)


@contextmanager
def server_of(parts: Path, folder: Path) -> Iterator[Server]:
    cluster = write_cluster(folder / "cluster.json", (0, "tcp://127.0.0.1:1", [0]))
    # with one thread, clients wait for the server and not for a CPU
    options = {"batch_threads": 1, "buffer_mb": BUFFER_MB, "stats_file": folder / "stats.json"}
    with serve_process(folder, parts, [0], "tcp://127.0.0.1:0", cluster, **options) as (process, ready):
        yield Server(wait_for(ready, process)["endpoint"], process.pid, folder / "stats.json")


@pytest.fixture
def server(parts: Path, tmp_path: Path) -> Iterator[Server]:
    with server_of(parts, tmp_path) as made:
        yield made


def window(clients: ClientProcesses, batches: int, seconds: float = 120.0) -> list[ReceivedBatch]:
    """Return at least ``batches`` batches that are received while all clients are active."""
    clients.await_all(3)
    start = time.monotonic()
    wait_until(lambda: len(clients.received(start)) >= batches, seconds)
    return clients.received(start)


@pytest.mark.slow
@pytest.mark.quiet
def test_twenty_clients_have_equal_shares(server: Server) -> None:
    with running_clients(server.endpoint, [BatchRequests(f"client{k}") for k in range(CLIENTS)]) as clients:
        share = shares(window(clients, 60 * CLIENTS), range(CLIENTS))
    assert all(abs(each - 1) < 0.1 for each in share.values()), share


@pytest.mark.slow
@pytest.mark.quiet
def test_shares_are_equal_in_bytes_for_any_batch_size(server: Server) -> None:
    # Every fourth client requests batches four times as large, and more of them at the same time.
    requests = [BatchRequests(f"client{k}", *((400, 4) if k % 4 == 0 else (100, 3))) for k in range(CLIENTS)]
    with running_clients(server.endpoint, requests) as clients:
        received = window(clients, 120 * CLIENTS)
    share = shares(received, range(CLIENTS), nbytes=True)
    assert all(abs(each - 1) < 0.1 for each in share.values()), share
    batches = shares(received, range(CLIENTS))
    assert batches[0] < 0.5 * batches[1]


@pytest.mark.slow
@pytest.mark.quiet
def test_clients_that_hang_or_die_cost_no_more_than_the_buffer(server: Server) -> None:
    # Without the buffer's limit, the server would make 36 batches of 11 MB for the six hanging clients.
    hanging, killed, others = range(6), range(6, 9), range(9, CLIENTS)
    requests = [BatchRequests(f"client{k}", 200, *((6, "wide") if k in hanging else (2, "x"))) for k in range(CLIENTS)]
    before = server.memory
    with running_clients(server.endpoint, requests) as clients:
        clients.send(signal.SIGSTOP, hanging)
        start = time.monotonic()
        peak, held = watched(server, 6, [f"client{k}" for k in hanging])
        assert held > 10e6, "hanging clients occupy some of the buffer"
        assert peak - before < BUFFER_MB + MARGIN_MB
        share = shares(clients.received(start), [*killed, *others])
        assert all(abs(each - 1) < 0.1 for each in share.values()), share
        clients.send(signal.SIGKILL, killed)
        away = [f"client{k}" for k in (*hanging, *killed)]
        wait_until(lambda: server.held(away) == 0, FREED_WITHIN)
        clients.await_all(3, of=others)
        clients.send(signal.SIGCONT, hanging)
        clients.await_all(3, of=[*hanging, *others])
        assert server.memory - before < BUFFER_MB + MARGIN_MB
    wait_until(lambda: server.stats["buffer_bytes"] == 0, FREED_WITHIN)
    print(f"memory of {before:.0f} MB has grown by {peak - before:.0f} MB at most, {held / 1e6:.0f} MB held")


def watched(server: Server, seconds: float, names: Collection[str]) -> tuple[float, float]:
    """Return the peak memory of the server in MB, and the peak bytes that its buffer holds for clients ``names``."""
    peak = held = 0.0
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        held = max(held, server.held(names))
        peak = max(peak, server.memory)
        time.sleep(0.05)
    return peak, held
