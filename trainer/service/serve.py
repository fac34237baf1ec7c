"""``python -m trainer serve``: the graph server as a process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.arrays import Ids
from trainer.errors import DataError, ServiceError, SettingsError
from trainer.partition.format import manifest_digest
from trainer.sample.one_hop import LocalGraph
from trainer.sample.types import HopRequest, RowRequest, TimeBound
from trainer.schema import EdgeType
from trainer.service.cluster import read_cluster
from trainer.service.keys import read_key_file
from trainer.service.limits import allow_many_files
from trainer.service.protocol import HelloInfo
from trainer.service.server import GraphServer
from trainer.store.part import Part, open_parts

_GLANCE = 0.5  #: seconds between looks at the server's own thread


def serve(
    parts: str | Path,
    part_ids: Sequence[int],
    bind: str,
    cluster: str | Path,
    ready_file: str | Path,
    key_file: str | Path | None = None,
    threads: int = 2,
) -> None:
    """Serve parts ``part_ids`` of a partition folder at ``bind`` until SIGTERM or SIGINT.

    ``ready_file`` appears, whole, once requests are answered: ``{"endpoint", "pid"}``.
    Raises ``SettingsError``, ``PartitionError`` or ``ServiceError`` when it cannot start. Call it in
    the main thread: it takes over both signals.
    """
    stopping = _catch_signals()
    keys = None if key_file is None else read_key_file(key_file)
    node = read_cluster(cluster).owner_of(set(part_ids))
    if node is None:
        raise SettingsError(f"no node of {cluster} owns exactly the parts {sorted(part_ids)}")
    store = open_parts(parts, part_ids)
    graph = LocalGraph(store)
    info = HelloInfo(node.node_rank, node.host, tuple(sorted(part_ids)), manifest_digest(parts))
    server = GraphServer(graph, bind, info, threads, keys)
    allow_many_files()
    server.start()
    warm_up(graph)
    _write_ready(Path(ready_file), server.endpoint)
    print(f"serving parts {','.join(map(str, info.part_ids))} at {server.endpoint} with {threads} threads", flush=True)
    while server.running and not stopping.wait(_GLANCE):
        pass
    if not stopping.is_set():
        raise ServiceError(f"graph server at {server.endpoint} stopped by itself; its traceback stands above")
    print(f"stopping; {server.stats()}", flush=True)
    server.stop()


def warm_up(graph: LocalGraph) -> None:
    """Run once every kernel that a request for these parts can need, so that none waits for the compiler.

    Cold, that takes 7 s, and 1.3 s for each further dtype of weights or times; then Numba has it on disk.
    """
    done: set[tuple[np.dtype[Any], ...]] = set()
    for part in graph.store.parts.values():
        first = {of: np.array([nodes.start]) for of, nodes in part.nodes.items() if nodes.num_nodes}
        rows = [RowRequest(of, ids, ("orig_id", "in_degree", *part.nodes[of].attrs)) for of, ids in first.items()]
        edges = {of: np.array([edges.start]) for of, edges in part.edges.items() if edges.num_edges}
        rows += [RowRequest(of, ids, ("orig_id", *part.edges[of].attrs)) for of, ids in edges.items()]
        graph.gather(rows)
        for edge_type in part.edges:
            if edge_type[2] in first:
                _warm_hops(graph, part, edge_type, first[edge_type[2]], done)


def _warm_hops(
    graph: LocalGraph, part: Part, edge_type: EdgeType, nodes: Ids, done: set[tuple[np.dtype[Any], ...]]
) -> None:  # fmt: skip
    whole = HopRequest(edge_type, nodes, -1, 1, 0, with_edge=True, trees=nodes)
    chosen = replace(whole, exclude=(nodes, nodes))
    graph.sample_hops([whole, replace(whole, fanout=1), replace(whole, fanout=1, replace=True), chosen])
    graph.has_edges(edge_type, nodes, nodes)
    graph.sample_hops([replace(whole, sources=nodes[:0])])
    edges, target = part.edges[edge_type], part.nodes[edge_type[2]]
    for name, spec in graph.store.manifest.edges[edge_type].attrs.items():
        kinds = edges.attrs[name].dtype, edges.indices.dtype, target.orig_id.dtype
        usual = spec.dtype in ("float16", "float32")  # as the kernel compiled above
        if kinds in done or usual or len(spec.shape) != 1 or spec.dtype == "bfloat16" or spec.stored.kind not in "biuf":
            continue
        done.add(kinds)
        with suppress(DataError):  # no weights, then
            graph.sample_hops([replace(whole, fanout=1, weight=name)])
        if spec.stored.kind in "iu":
            graph.sample_hops([replace(whole, fanout=1, bound=TimeBound(nodes, name, "edge"))])


def _catch_signals() -> threading.Event:
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping


def _write_ready(path: Path, endpoint: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"endpoint": endpoint, "pid": os.getpid()}))
        temporary.replace(path)
    except OSError as error:
        raise SettingsError(f"ready file {path} cannot be written: {error.strerror}") from error
