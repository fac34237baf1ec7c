"""``python -m trainer serve``: runs a graph server as a process."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from trainer.core.errors import ServiceError, SettingsError
from trainer.core.files import allow_many_files, write_whole
from trainer.core.remote_settings import SERVER_WAIT, Topology
from trainer.core.slabs import give_back_freed_memory
from trainer.sampler.dist_graph import DistGraph
from trainer.sampler.local_graph import LocalGraph
from trainer.service.messages import HelloInfo
from trainer.service.server import GraphServer
from trainer.service.server_peers import Peer, Peers
from trainer.service.service_keys import read_key_file
from trainer.service.warm_up import warm_up, warm_up_batches
from trainer.store.digest_check import checked_digests
from trainer.store.manifest import manifest_digest
from trainer.store.part_store import open_parts

_DIGESTS_NOTE = "digests.json"  #: file in the ready file's folder; lists files that a restarted server need not compare

_GLANCE = 0.5  #: seconds between checks of the server's threads and of cluster.json


@dataclass(frozen=True)
class ServeJob:
    parts: Path
    part_ids: tuple[int, ...]
    bind: str  #: tcp://address:port
    cluster: Path  #: cluster.json; read again whenever it changes
    node_rank: int
    ready_file: Path
    key_file: Path | None = None
    threads: int = 2  #: threads that answer from the parts of this server
    batch_threads: int = 1  #: threads that make whole batches, with requests to other servers
    buffer_mb: int = 512  #: megabytes of batches that clients have not acknowledged
    stats_file: Path | None = None
    server_wait: float = SERVER_WAIT  #: seconds to wait for unreachable servers
    topology: Topology = "partitioned"  #: replicated: only rows are requested from other servers
    digests: bool = True  #: compare files with their digests before serving


def serve(job: ServeJob) -> None:
    """Serve parts of a partition folder until SIGINT, or for ``GNNFLEET_SAVE_ON_TERM`` seconds after SIGTERM.

    In these seconds, ranks that got SIGTERM as well save a checkpoint. Until then they need batches.

    Writes ``job.ready_file`` (``{"endpoint", "pid"}``, atomically) once the server answers requests. Raises
    ``SettingsError``, ``PartitionError`` or ``ServiceError`` if the server cannot start, and ``ServiceError`` if one of
    its threads ends with an error. Must be called in the main thread, because it handles both signals.
    """
    stopping, interrupted = _catch_signals()
    keys = None if job.key_file is None else read_key_file(job.key_file)
    digest = manifest_digest(job.parts)
    peers = Peers(job.cluster, job.node_rank, digest, keys)
    node = peers.cluster.node(job.node_rank)
    if set(node.parts) != set(job.part_ids):
        raise SettingsError(
            f"{job.cluster}: node {job.node_rank} has parts {sorted(node.parts)}, not {sorted(job.part_ids)};"
            " correct --own"
        )
    store = open_parts(job.parts, job.part_ids, job.topology)
    graph = LocalGraph(store)
    routed = DistGraph(graph, peers.hosts, server_wait=job.server_wait, turn=job.node_rank)
    info = HelloInfo(node.node_rank, node.host, tuple(sorted(job.part_ids)), digest)
    server = GraphServer(
        graph, job.bind, info, job.threads, keys, routed=routed, batch_threads=job.batch_threads,
        buffer_bytes=job.buffer_mb * 1_000_000, topology=peers.topology, stats_file=job.stats_file,
        peers=lambda: _states(peers.hosts, routed.lost()),
    )  # fmt: skip
    allow_many_files()
    compared = checked_digests(store, job.ready_file.with_name(_DIGESTS_NOTE)) if job.digests else nullcontext()
    with compared:  # ranks of this host start once this server is ready, so they do not compare the same files
        warm_up(graph)  # before serving: clients of a restarted server would wait for the compiler
        warm_up_batches(graph)
    give_back_freed_memory()  # used by the compiler if kernels were not cached on disk
    server.start()
    try:
        write_whole(job.ready_file, json.dumps({"endpoint": server.endpoint, "pid": os.getpid()}))
    except OSError as error:
        raise SettingsError(f"ready file {job.ready_file} cannot be written: {error.strerror}") from error
    print(f"serving parts {','.join(map(str, info.part_ids))} at {server.endpoint}", flush=True)
    while server.running and not stopping.wait(_GLANCE):
        peers.follow(routed.set_remotes)
    if not stopping.is_set():
        raise ServiceError(f"graph server at {server.endpoint} stopped because of an error; see the traceback above")
    if linger := float(os.environ.get("GNNFLEET_SAVE_ON_TERM") or 0):
        interrupted.wait(linger)
    done = server.stats()
    print(
        f"stopping after {done.requests:,} requests ({done.errors:,} errors), {done.malformed:,} malformed messages, "
        f"{done.refused:,} refused connections; {done.bytes_in:,} bytes received, {done.bytes_out:,} sent",
        flush=True,
    )
    server.stop()
    peers.close()


def _states(hosts: Mapping[int, Peer], lost: Collection[int]) -> list[dict[str, str]]:
    return [
        {"name": peer.client.place.name, "state": "down" if node_rank in lost else "up"}
        for node_rank, peer in hosts.items()
    ]


def _catch_signals() -> tuple[threading.Event, threading.Event]:
    """Return events that are set on SIGTERM or SIGINT, and on SIGINT."""
    stopping, interrupted = threading.Event(), threading.Event()

    def interrupt(*_: object) -> None:
        interrupted.set()
        stopping.set()

    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, interrupt)
    return stopping, interrupted
