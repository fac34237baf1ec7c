"""Connections of a graph server to the other graph servers of a run.

They are opened at first use, and updated when cluster.json changes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic

from trainer.core.errors import ServiceError, SettingsError
from trainer.sampler.replicas import PendingAnswer
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.cluster import Cluster, hello_problem, read_cluster
from trainer.service.messages import HelloInfo, ServerAddress
from trainer.service.service_keys import ServiceKeys
from trainer.wire.request import A, Request

_DEADLINE = 120.0  #: seconds that a reply of a reachable peer may take


class Peer:
    """Another graph server, for use by ``DistGraph``.

    Waiting for a reply raises ``ServiceError`` if the server has other parts or another partition than expected.
    """

    def __init__(self, client: HostClient, manifest_digest: str):
        self.client = client
        self._manifest_digest = manifest_digest
        self._checked = False

    @property
    def part_ids(self) -> Sequence[int]:
        return self.client.part_ids

    @property
    def name(self) -> str:
        return self.client.name

    def greet(self) -> PendingAnswer[HelloInfo]:
        hello = self.client.greet()
        return _Greeted(self, hello, hello)

    def submit(self, request: Request[A]) -> PendingAnswer[A]:
        pending = self.client.submit(request)
        return pending if self._checked else _Greeted(self, self.client.greet(), pending)

    def check_hello(self, info: HelloInfo) -> None:
        """Raise ``ServiceError`` if another server than expected has answered HELLO."""
        if problem := hello_problem(self.client, info, self._manifest_digest):
            raise ServiceError(problem)
        self._checked = True


@dataclass(frozen=True)
class _Greeted(Generic[A]):
    """An answer of a server whose HELLO is checked first."""

    peer: Peer
    greeting: PendingAnswer[HelloInfo]
    pending: PendingAnswer[A]

    @property
    def received(self) -> int:
        return self.pending.received

    def result(self, timeout: float | None = None) -> A:
        self.peer.check_hello(self.greeting.result(timeout))
        return self.pending.result(timeout)


class Peers:
    """The other graph servers that the latest cluster.json lists. ``follow`` must be called by one thread only."""

    def __init__(self, path: str | Path, node_rank: int, manifest_digest: str, keys: ServiceKeys | None):
        """Read cluster.json, without connecting to the servers. Raises the errors of ``read_cluster``."""
        self._path, self._node_rank = Path(path), node_rank
        self._manifest_digest, self._keys = manifest_digest, keys
        self._stamp = _stamp(self._path)
        self.cluster = read_cluster(path)
        self.hosts = self._connect(self.cluster, {})
        self._retired: list[tuple[float, Peer]] = []

    def topology(self) -> tuple[int, tuple[ServerAddress, ...]]:
        """Return the version of the cluster.json read last, and all servers that it lists."""
        cluster = self.cluster
        return cluster.version, cluster.servers

    def follow(self, on_change: Callable[[Mapping[int, Peer]], None]) -> None:
        """Read cluster.json again if it changed, and call ``on_change`` with the new peers if its version is higher.

        Prints a message if the file is invalid.
        """
        while self._retired and time.monotonic() >= self._retired[0][0]:
            self._retired.pop(0)[1].client.close()
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            cluster = read_cluster(self._path)
        except SettingsError as error:
            print(f"{error}; continuing with version {self.cluster.version}", file=sys.stderr, flush=True)
            return
        if cluster.version <= self.cluster.version:
            return
        hosts = self._connect(cluster, self.hosts)
        until = time.monotonic() + 2 * _DEADLINE
        self._retired += [(until, peer) for rank, peer in self.hosts.items() if hosts.get(rank) is not peer]
        self.cluster, self.hosts = cluster, hosts
        on_change(hosts)
        names = ", ".join(place.name for place in cluster.servers)
        print(f"cluster.json version {cluster.version}: graph servers are {names}", flush=True)

    def close(self) -> None:
        for peer in [*self.hosts.values(), *(peer for _, peer in self._retired)]:
            peer.client.close()

    def _connect(self, cluster: Cluster, known: Mapping[int, Peer]) -> dict[int, Peer]:
        hosts = {}
        for place in cluster.peers_of(self._node_rank):
            peer = known.get(place.node_rank)
            if peer is None or peer.client.place != place:
                client = HostClient(place, _DEADLINE, self._keys, gone_after=GONE_AFTER)
                peer = Peer(client, self._manifest_digest)
            hosts[place.node_rank] = peer
        return hosts


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return a value that changes when the file is replaced or modified; zeros if the file does not exist."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
