"""Many small client processes of one graph server. They do not import torch.

``fair_kit.py ENDPOINT CLIENTS`` starts one client for each entry of the JSON list CLIENTS, and kills the clients when
stdin is closed. Each received batch is one line on stdout: client, time, bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from service_kit import place_of, server_environment
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.subgraph_sampler import BatchWork
from trainer.sampler.types import SampleSettings, SeedSet
from trainer.service.remote_graph import Gateway, client_name

SETTINGS = SampleSettings({HOMO_EDGE: (5, 5)})


@dataclass(frozen=True)
class BatchRequests:
    name: str
    seeds: int = 100
    under_way: int = 2  #: batches requested at the same time
    attr: str = "x"  #: node attribute


@dataclass(frozen=True)
class ReceivedBatch:
    client: int
    at: float  #: ``time.monotonic``, the same clock in all processes of a machine
    nbytes: int


class ClientProcesses:
    def __init__(self, endpoint: str, clients: Sequence[BatchRequests]):
        self.clients = clients
        argv = [sys.executable, __file__, endpoint, json.dumps([asdict(one) for one in clients])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=server_environment())
        assert self._process.stdout is not None
        self.pids: list[int] = json.loads(self._process.stdout.readline())
        self._received: list[ReceivedBatch] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            client, at, nbytes = line.split()
            self._received.append(ReceivedBatch(int(client), float(at), int(nbytes)))

    def received(self, since: float = 0.0, until: float = float("inf")) -> list[ReceivedBatch]:
        return [one for one in list(self._received) if since <= one.at < until]

    def await_all(self, batches: int = 1, seconds: float = 240.0, of: Sequence[int] | None = None) -> None:
        """Wait until each of the clients ``of`` (default: all) has received ``batches`` more batches."""
        start, waiting = time.monotonic(), set(range(len(self.clients)) if of is None else of)
        while waiting:
            assert time.monotonic() < start + seconds, f"no batches for clients {sorted(waiting)}"
            time.sleep(0.1)
            counts = Counter(one.client for one in self.received(start))
            waiting -= {client for client, count in counts.items() if count >= batches}

    def send(self, signum: int, clients: Sequence[int]) -> None:
        for client in clients:
            os.kill(self.pids[client], signum)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@contextlib.contextmanager
def running_clients(endpoint: str, clients: Sequence[BatchRequests]) -> Iterator[ClientProcesses]:
    """Start the clients and wait until each has received its first batch."""
    processes = ClientProcesses(endpoint, clients)
    try:
        processes.await_all()
        yield processes
    finally:
        processes.close()


def shares(received: Sequence[ReceivedBatch], clients: Sequence[int], nbytes: bool = False) -> dict[int, float]:
    """Return the number of batches (``nbytes``: of bytes) that each client received, divided by the clients' mean."""
    had = dict.fromkeys(clients, 0)
    for one in received:
        if one.client in had:
            had[one.client] += one.nbytes if nbytes else 1
    equal = sum(had.values()) / len(had)
    return {client: count / equal for client, count in had.items()}


def run_client(number: int, endpoint: str, requests: BatchRequests) -> None:
    gateway = Gateway([place_of(endpoint)], 60.0, server_wait=60.0, client=client_name(requests.name))
    num_nodes = gateway.open(60.0).nodes[HOMO_NODE].num_nodes
    for thread in range(requests.under_way):
        rng = np.random.default_rng((number, thread))
        threading.Thread(target=_request_batches, args=(number, gateway, requests, num_nodes, rng)).start()


def _request_batches(
    number: int, gateway: Gateway, requests: BatchRequests, num_nodes: int, rng: np.random.Generator
) -> None:
    attrs = {HOMO_NODE: (requests.attr,)}
    while True:
        seeds = SeedSet({HOMO_NODE: rng.integers(0, num_nodes, requests.seeds)})
        made = gateway.sample_batch(BatchWork(SETTINGS, seeds, int(rng.integers(1 << 60)), attrs))
        nbytes = sum(array.nbytes for rows in made.rows.values() for array in rows.values())
        os.write(1, f"{number} {time.monotonic()} {nbytes}\n".encode())  # shorter than PIPE_BUF, so lines are not mixed


def main(endpoint: str, clients: str) -> None:
    pids = []
    gate, opener = os.pipe()
    for number, requests in enumerate(json.loads(clients)):
        if (pid := os.fork()) == 0:
            os.close(opener)
            os.read(gate, 1)  # returns once all clients are forked and their pids are printed
            return run_client(number, endpoint, BatchRequests(**requests))
        pids.append(pid)
    os.write(1, (json.dumps(pids) + "\n").encode())
    os.close(opener)
    sys.stdin.read()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
