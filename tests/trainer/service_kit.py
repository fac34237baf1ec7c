"""Test kit: a graph whose rows and neighbours are computed from ids, and graph servers for it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import numpy as np

from forked import Forked, fork
from launcher.plan.service_key import new_key_pair
from ports import free_port
from trainer.core.errors import PartitionError
from trainer.core.files import write_whole
from trainer.core.schema import HOMO_EDGE, HOMO_NODE
from trainer.sampler.types import HopRequest, HopSample, RowRequest
from trainer.service.client import HostClient
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.server import GraphServer
from trainer.service.service_keys import ServiceKeys
from waiting import DEADLINE

INFO = HelloInfo(node_rank=1, host="10.0.0.2", part_ids=(1, 3), manifest_digest="d1" * 32)


class ArithmeticGraph:
    """A graph in which node v has the neighbours v*10, v*10+1, … and the row (v, v+0.5).

    Reading an attribute can fail (``raises``), be slow (``sleep1``) or return large rows (``wide``).
    """

    def __init__(self):
        self.hops: list[list[HopRequest]] = []  #: requests of each call

    def sample_hops(self, requests):
        self.hops.append(list(requests))
        return [self._hop(request) for request in requests]

    def gather(self, requests):
        return [{name: self._column(name, request.ids) for name in request.attrs} for request in requests]

    def has_edges(self, edge_type, src, dst):
        return src // 10 == dst

    def _hop(self, request: HopRequest) -> HopSample:
        if request.edge_type != HOMO_EDGE:
            raise PartitionError(f"no edge type {request.edge_type}; there are {[HOMO_EDGE]}")
        counts = (request.nodes % (request.fanout + 1)).astype(np.int32)
        start = np.repeat(np.cumsum(counts) - counts, counts)
        src = np.repeat(request.nodes * 10, counts) + np.arange(counts.sum()) - start
        return HopSample(counts, src, src + request.key if request.with_edge else None)

    def _column(self, name, nodes):
        if name == "x":
            return np.stack([nodes, nodes + 0.5], axis=1).astype(np.float32)
        if name == "wide":  # 4 KiB per row
            return np.repeat(nodes.astype(np.float32)[:, None], 1024, axis=1)
        if name.startswith("sleep"):
            time.sleep(float(name.removeprefix("sleep")))
            return nodes
        if name == "raises":
            raise ValueError("row 7 is broken")
        if name == "objects":
            return nodes.astype(object)
        raise PartitionError(f"no node attribute {name!r}; there are ['x']")


def rows_of(graph, ids, attrs=("x",), of=HOMO_NODE):
    return graph.gather([RowRequest(of, ids, tuple(attrs))])[0]


def assert_same_sample(there, here) -> None:
    np.testing.assert_array_equal(there.counts, here.counts)
    np.testing.assert_array_equal(there.src, here.src)
    assert (there.edge is None) == (here.edge is None)
    if here.edge is not None:
        np.testing.assert_array_equal(there.edge, here.edge)


@contextlib.contextmanager
def serving(graph=None, keys=None, **options):
    endpoint = options.pop("endpoint", "tcp://127.0.0.1:0")
    server = GraphServer(graph or ArithmeticGraph(), endpoint, INFO, options.pop("threads", 2), keys, **options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def place_of(endpoint, node_rank=INFO.node_rank, host=INFO.host, parts=INFO.part_ids):
    return ServerAddress(f"node{node_rank} ({host})", node_rank, host, endpoint, tuple(parts))


@contextlib.contextmanager
def client_of(endpoint, deadline=5.0, keys=None, parts=INFO.part_ids, **options):
    client = HostClient(place_of(endpoint, parts=parts), deadline, keys, **options)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def server_process(endpoint):
    process = Forked(_serve, (endpoint,), server_environment())
    try:
        until = time.monotonic() + DEADLINE
        while process.output != "ready\n":
            assert process.poll() is None and time.monotonic() < until, process.output
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE)


def server_environment() -> dict[str, str]:
    repository = Path(__file__).resolve().parents[2]
    return {**os.environ, "PYTHONPATH": f"{repository}:{repository / 'tests'}"}  # the kits import from both


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def new_keys() -> ServiceKeys:
    return ServiceKeys(**new_key_pair())


def write_cluster(path, *nodes, num_parts=None):
    """Write cluster.json from (node_rank, endpoint, parts) triples."""
    entries = [{"node_rank": k, "host": f"host{k}", "endpoint": e, "parts": list(p), "ranks": [k]} for k, e, p in nodes]
    count = sum(len(entry["parts"]) for entry in entries) if num_parts is None else num_parts
    path.write_text(json.dumps({"run_id": "r", "num_parts": count, "nodes": entries}))
    return path


@contextlib.contextmanager
def serve_process(folder, parts, own, bind, cluster, key_file=None, node_rank=None, **more):
    """Start ``python -m trainer serve``. Yield the process and the path of its ready file.

    parts: the partition folder. own: the numbers of the parts that the server holds. node_rank: by default, that of
    the node that has these parts in the cluster file. more: further options of ``serve``.
    """
    if node_rank is None:
        nodes = json.loads(Path(cluster).read_text())["nodes"]
        node_rank = next((node["node_rank"] for node in nodes if set(node["parts"]) == set(own)), 0)
    ready = folder / f"ready{node_rank}.json"
    options = {"parts": parts, "own": ",".join(map(str, own)), "bind": bind, "cluster": cluster, "ready-file": ready}
    options |= {"node-rank": node_rank, **{name.replace("_", "-"): value for name, value in more.items()}}
    if key_file is not None:
        options["key-file"] = key_file
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    process = fork(["-m", "trainer", "serve", *arguments], server_environment())
    try:
        yield process, ready
    finally:
        if process.poll() is not None:
            print(f"the graph server has ended with status {process.poll()}:\n{process.output}")
        process.kill()
        process.communicate(timeout=DEADLINE)


def wait_for(ready, process) -> dict:
    until = time.monotonic() + DEADLINE
    while not ready.exists():
        assert process.poll() is None, process.output
        assert time.monotonic() < until, "no ready file within 60 s"
        time.sleep(0.02)
    return json.loads(ready.read_text())


def _serve(endpoint: str) -> None:
    GraphServer(ArithmeticGraph(), endpoint, INFO, 2).start()
    print("ready", flush=True)
    time.sleep(3 * DEADLINE)


def admit_guest(key_file: str | Path, name: str, public: str) -> Path:
    """Make servers that use ``key_file`` admit the certificate ``public`` within a second.

    ``public``: in base64 (DER). Returns the new file ``clients/<name>.key`` beside ``key_file``. Deleting it revokes
    the admission.
    """
    path = Path(key_file).parent / "clients" / f"{name}.key"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_whole(path, f"{public}\n")
    return path


def write_key_file(path: str | Path, keys: ServiceKeys) -> None:
    fields: dict[str, object] = {"public": keys.public, "secret": keys.secret}
    optional = {"server": keys.server, "endpoints": list(keys.endpoints), "name": keys.name}
    fields |= {name: value for name, value in optional.items() if value}
    write_whole(Path(path), json.dumps(fields), mode=0o600)
