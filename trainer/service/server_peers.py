"""The other graph servers of a run: connected on first use, followed as cluster.json changes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.core.arrays import Ids
from trainer.core.errors import ServiceError, SettingsError
from trainer.core.schema import EdgeType
from trainer.sampler.replicas import PendingAnswer
from trainer.sampler.types import HopRequest, RowRequest
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.cluster import Cluster, greeting_problem, read_cluster
from trainer.service.service_keys import ServiceKeys
from trainer.service.wire.messages import ServerAddress

_DEADLINE = 120.0  #: seconds of silence of a peer that is there


class Peer:
    """A host for ``DistGraph`` that is greeted along with the first request, so it may start whenever it likes.

    Raises ``ServiceError`` for answers of a server that holds other parts or another partition.
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

    def submit_hello(self) -> PendingAnswer:
        return _CheckedHello(self, self.client.submit_hello())

    def submit_sample(self, requests: Sequence[HopRequest]) -> PendingAnswer:
        return self._greeted(self.client.submit_sample(requests))

    def submit_gather(self, requests: Sequence[RowRequest]) -> PendingAnswer:
        return self._greeted(self.client.submit_gather(requests))

    def submit_has_edges(self, edge_type: EdgeType, src: Ids, dst: Ids) -> PendingAnswer:
        return self._greeted(self.client.submit_has_edges(edge_type, src, dst))

    def submit_edges(self, part_id: int, edge_type: EdgeType, first: int, count: int) -> PendingAnswer:
        return self._greeted(self.client.submit_edges(part_id, edge_type, first, count))

    def check_hello(self, info: Any) -> None:
        """Raises ``ServiceError`` for a server that is not the one we look for."""
        if problem := greeting_problem(self.client, info, self._manifest_digest):
            raise ServiceError(problem)
        self._checked = True

    def _greeted(self, pending: PendingAnswer) -> PendingAnswer:
        return pending if self._checked else _GreetedAnswer(self.submit_hello(), pending)


class _CheckedHello:
    """A greeting that is looked into."""

    def __init__(self, peer: Peer, pending: PendingAnswer):
        self._peer, self._pending = peer, pending

    def result(self, timeout: float | None = None) -> Any:
        info = self._pending.result(timeout)
        self._peer.check_hello(info)
        return info


class _GreetedAnswer:
    """An answer that counts only if the greeting was right."""

    def __init__(self, greeting: PendingAnswer, pending: PendingAnswer):
        self._greeting, self._pending = greeting, pending

    @property
    def received(self) -> int | None:
        """Bytes of the answer, where it tells them."""
        return getattr(self._pending, "received", None)

    def result(self, timeout: float | None = None) -> Any:
        self._greeting.result(timeout)
        return self._pending.result(timeout)


class Peers:
    """All peers of one node, by its cluster.json as it is now. ``follow`` is called by one thread."""

    def __init__(self, path: str | Path, node_rank: int, manifest_digest: str, keys: ServiceKeys | None):
        """Connects to nobody yet. Raises ``SettingsError`` as ``read_cluster`` does."""
        self._path, self._node_rank = Path(path), node_rank
        self._manifest_digest, self._keys = manifest_digest, keys
        self._stamp = _stamp(self._path)
        self.cluster = read_cluster(path)
        self.hosts = self._connect(self.cluster, {})
        self._retired: list[tuple[float, Peer]] = []

    def topology(self) -> tuple[int, tuple[ServerAddress, ...]]:
        """Version and servers of the cluster.json read last."""
        cluster = self.cluster
        return cluster.version, cluster.servers

    def follow(self, tell: Callable[[Mapping[int, Peer]], None]) -> None:
        """Look at cluster.json; ``tell`` of the peers of a higher version. A file that is wrong changes nothing."""
        self._retire()
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            cluster = read_cluster(self._path)
        except SettingsError as error:
            print(f"{error}; going on with version {self.cluster.version}", file=sys.stderr, flush=True)
            return
        if cluster.version <= self.cluster.version:
            return
        hosts = self._connect(cluster, self.hosts)
        until = time.monotonic() + 2 * _DEADLINE
        self._retired += [(until, peer) for rank, peer in self.hosts.items() if hosts.get(rank) is not peer]
        self.cluster, self.hosts = cluster, hosts
        tell(hosts)
        names = ", ".join(place.name for place in cluster.servers)
        print(f"cluster.json version {cluster.version}: graph servers are {names}", flush=True)

    def close(self) -> None:
        """End all connections."""
        for peer in [*self.hosts.values(), *(peer for _, peer in self._retired)]:
            peer.client.close()

    def _connect(self, cluster: Cluster, known: Mapping[int, Peer]) -> dict[int, Peer]:
        """The peers by node rank; those that are where they were stay."""
        hosts = {}
        for place in cluster.peers_of(self._node_rank):
            peer = known.get(place.node_rank)
            if peer is None or peer.client.place != place:
                client = HostClient(place, _DEADLINE, self._keys, gone_after=GONE_AFTER)
                peer = Peer(client, self._manifest_digest)
            hosts[place.node_rank] = peer
        return hosts

    def _retire(self) -> None:
        """Close those that are asked no more, once nobody can be waiting for them."""
        while self._retired and time.monotonic() >= self._retired[0][0]:
            self._retired.pop(0)[1].client.close()


def _stamp(path: Path) -> tuple[int, int, int]:
    """Changes with every rewriting of the file; zeros where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
