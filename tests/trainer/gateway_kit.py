"""Graph servers of a partition folder in this process, and their clients."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from load_kit import parts_of
from partitions import write_store
from trainer.core.ranks import Ranks
from trainer.graph.connect import _open_gateway
from trainer.graph.open import Graph
from trainer.graph.seed_order import RankLayout
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.remote_graph import Gateway
from trainer.service.server import GraphServer
from trainer.service.service_keys import ServiceKeys
from trainer.store.manifest import manifest_digest
from trainer.store.part_store import open_parts

HALVES = ((0, 1), (2, 3))  #: two servers with two parts each


class Servers:
    """Graph servers of one folder. Server k holds the parts ``held[k]`` and requests other parts from its peers."""

    def __init__(self, folder: Path, held: Sequence[Sequence[int]], keys: ServiceKeys | None = None):
        self.folder, self.held, self.keys = folder, held, keys
        self.version, self.listed = 1, tuple(range(len(held)))  #: topology version and servers that HELLO reports
        self.servers: dict[int, GraphServer] = {}
        self.places: dict[int, ServerAddress] = {}
        self._clients: list[HostClient] = []
        self._routed: dict[int, DistGraph] = {}

    def start(self, number: int) -> None:
        """Start server ``number``. A restarted server gets the endpoint that it had before."""
        parts = tuple(self.held[number])
        endpoint = self.places[number].endpoint if number in self.places else "tcp://127.0.0.1:0"
        local = LocalGraph(open_parts(self.folder, parts))
        routed = self._routed[number] = DistGraph(local, {}, server_wait=10)
        info = HelloInfo(number, f"s{number}", parts, manifest_digest(self.folder))
        server = GraphServer(
            local, endpoint, info, 1, self.keys, routed=routed, batch_threads=2, topology=lambda: self._topology()
        )
        server.start()
        self.servers[number] = server
        self.places[number] = ServerAddress(f"node{number} (s{number})", number, f"s{number}", server.endpoint, parts)

    def join(self) -> None:
        for number in self.servers:
            others = {of: HostClient(place, 20, self.keys, gone_after=1) for of, place in self.places.items()}
            others.pop(number)
            self._clients += others.values()
            self._routed[number].set_remotes(others)

    def stop(self, number: int) -> None:
        self.servers.pop(number).stop()

    def close(self) -> None:
        for number in list(self.servers):
            self.stop(number)
        for client in self._clients:
            client.close()

    def _topology(self) -> tuple[int, tuple[ServerAddress, ...]]:
        return self.version, tuple(self.places[number] for number in self.listed if number in self.places)


@contextmanager
def serving_parts(
    folder: Path, held: Sequence[Sequence[int]] = HALVES, keys: ServiceKeys | None = None
) -> Iterator[Servers]:
    servers = Servers(folder, held, keys)
    try:
        for number in range(len(held)):
            servers.start(number)
        servers.join()
        yield servers
    finally:
        servers.close()


def cluster_file(path: Path, servers: Servers, clients: dict[int, list[int]], num_parts: int = 4) -> Path:
    """Write a cluster.json with the nodes of ``servers`` and with client nodes.

    clients: ranks by node_rank.
    """
    nodes = [
        {"node_rank": place.node_rank, "host": place.host, "role": "server", "endpoint": place.endpoint,
         "parts": list(place.parts), "ranks": []}
        for place in servers.places.values()
    ]  # fmt: skip
    nodes += [
        {"node_rank": node, "host": f"c{node}", "role": "client", "endpoint": None, "parts": [], "ranks": ranks}
        for node, ranks in clients.items()
    ]
    path.write_text(json.dumps({"run_id": "r", "num_parts": num_parts, "nodes": nodes}))
    return path


def written(folder: Path, data, num_parts: int = 4) -> Path:
    write_store(folder, parts_of(data, num_parts).store)
    return folder


def client_graph(
    servers: Servers, home: int = 0, ranks: Ranks | None = None, placed: RankLayout | None = None, **options
) -> Graph:
    numbers = [home, *(number for number in servers.places if number != home)]
    places = [servers.places[number] for number in numbers]
    gateway = Gateway(places, options.pop("deadline", 20.0), servers.keys, **{"server_wait": 10.0, **options})
    return _open_gateway(gateway, 10.0, ranks or Ranks(), placed)


@contextmanager
def worker_graphs(servers: Servers) -> Iterator[list[Graph]]:
    """Yield one graph per host in worker mode. Host k holds the parts of server k."""
    with ExitStack() as stack:
        graphs = []
        for number, parts in enumerate(servers.held):
            clients = {of: HostClient(place, 20, servers.keys) for of, place in servers.places.items() if of != number}
            graph = Graph(open_parts(servers.folder, parts), None, clients)
            graphs.append(stack.enter_context(Graph(graph.store, DistGraph(LocalGraph(graph.store), clients), clients)))
        yield graphs
