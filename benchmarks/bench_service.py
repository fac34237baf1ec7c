"""Measures requests over the loopback to a graph server in another process, compared with torch.distributed.rpc."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch.distributed import rpc

from launcher.plan.service_key import new_key_pair
from table import Row, median_seconds, show
from trainer.core.schema import HOMO_NODE
from trainer.sampler.types import RowRequest
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.server import GraphServer
from trainer.service.service_keys import ServiceKeys

DIM = 100
SPAWN = multiprocessing.get_context("spawn")


class Rows:
    """A graph with one feature matrix, float32 [n, 100]."""

    def __init__(self, num_nodes: int):
        self.x = np.random.default_rng(0).random((num_nodes, DIM), np.float32)

    def gather(self, requests: list[RowRequest]) -> list[dict[str, np.ndarray]]:
        return [{"x": self.x[request.ids]} for request in requests]


def run(small: bool) -> list[Row]:
    num_nodes = 20_000 if small else 200_000
    few, many = np.arange(8), np.random.default_rng(1).integers(0, num_nodes, num_nodes // 4)
    keys = ServiceKeys(**new_key_pair())
    with our_server(num_nodes, None) as gather:
        ours = measure(gather, few, many)
    with our_server(num_nodes, keys) as gather:
        encrypted = measure(gather, few, many)
    with rpc_server(num_nodes) as gather:
        theirs = measure(gather, few, many)
    other, size = "torch.distributed.rpc", f"{len(many) * DIM * 4 / 1e6:.0f} MB"
    return [
        Row("gather 8 rows, 1 thread", ours["latency"], "µs", other, theirs["latency"]),
        Row("… encrypted", encrypted["latency"], "µs", "plain", ours["latency"]),
        Row("gather 8 rows, 1 thread", 1e6 / ours["latency"], "requests/s", other, 1e6 / theirs["latency"], "more"),
        Row("gather 8 rows, 4 threads", ours["rate"], "requests/s", other, theirs["rate"], "more"),
        Row(f"gather {size}, 1 thread", ours["large"], "MB/s", other, theirs["large"], "more"),
        Row("… encrypted", encrypted["large"], "MB/s", "plain", ours["large"], "more"),
        Row(f"gather {size}, 4 threads", ours["large4"], "MB/s", other, theirs["large4"], "more"),
    ]


def measure(gather: Callable[[np.ndarray], object], few: np.ndarray, many: np.ndarray) -> dict[str, float]:
    """Measure requests for the rows of ``few`` and of ``many`` nodes.

    Returns ``latency`` in µs and ``rate`` in requests/s (four threads) for ``few``; ``large`` and ``large4`` in MB/s
    (one and four threads) for ``many``.
    """

    def times(count: int, nodes: np.ndarray) -> None:
        for _ in range(count):
            gather(nodes)

    def four(count: int, nodes: np.ndarray) -> None:
        list(pool.map(lambda _: times(count, nodes), range(4)))

    megabytes = len(many) * DIM * 4 / 1e6
    with ThreadPoolExecutor(4) as pool:
        return {
            "latency": median_seconds(lambda: times(300, few)) / 300 * 1e6,
            "rate": 4 * 300 / median_seconds(lambda: four(300, few)),
            "large": 5 * megabytes / median_seconds(lambda: times(5, many), 3),
            "large4": 8 * megabytes / median_seconds(lambda: four(2, many), 3),
        }


@contextmanager
def our_server(num_nodes: int, keys: ServiceKeys | None) -> Iterator[Callable[[np.ndarray], object]]:
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=_serve, args=(num_nodes, keys, there), daemon=True)
    process.start()
    client = HostClient(ServerAddress("loopback", 1, "loopback", here.recv(), (0,)), 30.0, keys)
    try:
        yield lambda nodes: client.gather([RowRequest(HOMO_NODE, nodes, ("x",))])
    finally:
        client.close()
        process.kill()
        process.join()


def _serve(num_nodes: int, keys: ServiceKeys | None, out: Connection) -> None:
    server = GraphServer(Rows(num_nodes), "tcp://127.0.0.1:0", HelloInfo(1, "loopback", (0,), ""), 2, keys)
    server.start()
    out.send(server.endpoint)
    time.sleep(600)


@contextmanager
def rpc_server(num_nodes: int) -> Iterator[Callable[[np.ndarray], object]]:
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        process = SPAWN.Process(target=_rpc_serve, args=(num_nodes, meeting), daemon=True)
        process.start()
        _rpc_join("client", 0, meeting)
        try:
            yield lambda nodes: rpc.rpc_sync("server", _rpc_gather, args=(torch.from_numpy(nodes),))
        finally:
            rpc.shutdown(graceful=False)
            process.kill()
            process.join()


def _rpc_join(name: str, rank: int, meeting: str) -> None:
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.filterwarnings("ignore", category=UserWarning)  # torch's warnings about its own process groups
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=meeting,
        _transports=["uv"],
        _channels=["basic"],  # TCP, as between hosts
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def _rpc_serve(num_nodes: int, meeting: str) -> None:
    global _rpc_rows
    _rpc_rows = torch.from_numpy(Rows(num_nodes).x)
    _rpc_join("server", 1, meeting)
    time.sleep(600)


def _rpc_gather(nodes: torch.Tensor) -> torch.Tensor:
    return _rpc_rows[nodes]


def main() -> None:
    show("service", run("--small" in sys.argv))


if __name__ == "__main__":
    main()
