"""Access to the whole graph through graph servers, for nodes that have no parts."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import secrets
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from trainer.core import rounding
from trainer.core.arrays import Array, Ids
from trainer.core.batch_cost import Cost, CostMeter
from trainer.core.errors import PartitionError, ServerGone, ServiceError, SettingsError, first_wait
from trainer.core.remote_settings import WireRows
from trainer.core.schema import AnyType, EdgeType, NodeType
from trainer.sampler.requests import Endpoints, Gather, GraphAccess, GraphRequest
from trainer.sampler.subgraph_sampler import BatchWork, SampledBatch
from trainer.sampler.types import RowRequest
from trainer.service.batch_scheduler import MAX_QUEUED
from trainer.service.channel import GONE_AFTER
from trainer.service.client import HostClient
from trainer.service.messages import (
    MAX_SEEDS,
    BatchRequest,
    ClientName,
    Hello,
    HelloInfo,
    ManifestText,
    ServerAddress,
    SharedSlice,
    ToGlobal,
)
from trainer.service.service_keys import ServiceKeys
from trainer.store.manifest import AttrSpec, Manifest, parse_manifest
from trainer.wire.request import A, Request


class _ServerChoice:
    """Graph servers in order of preference, the home server first, and which of them are unreachable. Thread-safe."""

    def __init__(self, home: HostClient, *others: HostClient):
        self._clients = [home, *others]
        self._gone: dict[HostClient, ServerGone] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def all(self) -> tuple[HostClient, ...]:
        with self._changed:
            return tuple(self._clients)

    @property
    def gone(self) -> tuple[HostClient, ...]:
        with self._changed:
            return tuple(self._gone)

    def pick(self, until: float) -> HostClient | None:
        """Return the first reachable server. Waits for one until ``time.monotonic()`` is ``until``.

        Returns None if no server became reachable, or ``close`` was called.
        """
        with self._changed:
            while not self._closed:
                for client in self._clients:
                    if client not in self._gone:
                        return client
                if not self._changed.wait(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)):
                    break
            return None

    def mark_gone(self, client: HostClient, error: ServerGone) -> None:
        with self._changed:
            self._gone.setdefault(client, error)

    def mark_back(self, client: HostClient) -> None:
        with self._changed:
            if self._gone.pop(client, None):
                self._changed.notify_all()

    def add(self, client: HostClient) -> None:
        with self._changed:
            self._clients.append(client)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def error(self, waited: float) -> ServiceError:
        """Return an error with one line per unreachable server. ``waited``: seconds waited for them."""
        with self._changed:
            text = "\n".join(f"{error}; it was not back within {waited:g} s" for error in self._gone.values())
            return ServiceError(text, wait=first_wait(self._gone.values()))


_AT_ONCE = 1 << 20  #: ids or edges per request: servers limit the sizes of requests and replies

_BYTES_AT_ONCE = 1 << 25  #: bytes of rows per request


_BATCHES_UNDER_WAY = MAX_QUEUED // 2  #: half the server's limit, as it may still count batches of a broken connection

_BACK_EVERY = 0.5  #: seconds between probes of unreachable servers

_LEARN_EVERY = 10.0  #: seconds between requests for the list of servers

_PROBE_TIMEOUT = 2.0  #: seconds that the replies to all probes may take

_PROBE_LEAST = 0.3  #: seconds for each in any case: a connection is made only while somebody waits for its reply


def client_name(role: str = "") -> ClientName:
    """Return the random number and the name by which servers identify this process.

    ``role``: a text such as ``run-7/rank3``.
    """
    words = f"{role} on {socket.gethostname()} (pid {os.getpid()})".strip()
    return ClientName(secrets.randbits(64), words[:200])


class Gateway(GraphAccess):
    """Access to the whole graph through graph servers, for a process without parts. Thread-safe.

    Requests go to the home server, which is the first of ``places``. While it is unreachable, they go to the next
    server. All methods raise ``ServiceError`` with the servers' names if all servers are unreachable for
    ``server_wait`` seconds, or a reachable server does not reply within ``deadline + server_wait`` seconds.
    """

    def __init__(
        self, places: Sequence[ServerAddress], deadline: float, keys: ServiceKeys | None = None, *,
        server_wait: float = 60.0, client: ClientName | None = None, wire_rows: WireRows = "stored",
    ):  # fmt: skip
        """Make a gateway, which connects in ``open``.

        ``places``: the servers, the home server first. ``deadline``: seconds that a reply may take. ``server_wait``:
        seconds for which all servers may be unreachable. ``wire_rows``: dtype to which servers round floating-point
        rows for sending.
        """
        self.home = places[0]
        self.deadline, self.server_wait = deadline, server_wait
        self.client = client or client_name()
        self._keys, self._wire_rows = keys, wire_rows
        self._choice = _ServerChoice(*map(self._connect, places))
        self._verified: set[HostClient] = set()
        self._version = 0
        self._room = threading.BoundedSemaphore(_BATCHES_UNDER_WAY)
        self._meter = CostMeter()
        self._closed = threading.Event()
        self._manifest: Manifest | None = None
        self.digest = ""  #: sha256 of manifest.json, hex

    def open(self, patience: float | None = None) -> Manifest:
        """Fetch the manifest of the partition from a server.

        Waits ``patience`` seconds (default: ``server_wait``) for a reachable server.
        """
        threading.Thread(
            target=_probe_servers, args=(weakref.ref(self), self._closed), name="server-probe", daemon=True
        ).start()
        text = self._fetch(ManifestText(), patience, known=False)[0]
        self.digest = hashlib.sha256(text).hexdigest()
        self._manifest = parse_manifest(text, f"manifest.json of {self.home.name}")
        self._add_servers(self._ask(Hello()))
        return self._manifest

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of the partition. ``open`` must have been called before."""
        assert self._manifest is not None
        return self._manifest

    @property
    def servers(self) -> tuple[ServerAddress, ...]:
        return tuple(client.place for client in self._choice.all)

    def sample_batch(self, work: BatchWork) -> SampledBatch:
        """Return a batch that a server makes. Raises ``SettingsError`` for more seeds than a server accepts."""
        if (number := sum(map(len, work.seeds.nodes.values()))) > MAX_SEEDS:
            raise SettingsError(
                f"a batch of {number} seeds; a graph server accepts at most {MAX_SEEDS}; use smaller batches"
            )
        with self._room:
            sampled, client, _ = self._fetch(BatchRequest(work, self.client))
        return replace(sampled, cost=sampled.cost.of_host(client.node_rank))

    def ask(self, request: GraphRequest[A]) -> A:
        answer, _, received = self._fetch(request)
        self._meter.add(Cost(remote_bytes=received))
        return answer

    def gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        if sum(len(request.ids) * self._row_bytes(request) for request in requests) <= _BYTES_AT_ONCE:
            return self._gather(requests)
        found: list[Mapping[str, Array]] = []
        for request in requests:
            number = max(1, _BYTES_AT_ONCE // self._row_bytes(request))
            starts = range(0, max(len(request.ids), 1), number)
            pieces = [self._gather([replace(request, ids=request.ids[at : at + number])])[0] for at in starts]
            found.append({name: np.concatenate([piece[name] for piece in pieces]) for name in request.attrs})
        return found

    def endpoints(self, edge_type: EdgeType, edges: Ids) -> tuple[Ids, Ids]:
        if edge_type not in self.manifest.edges:
            raise PartitionError(f"no edge type {edge_type}; there are {list(self.manifest.edges)}")
        found = [self.ask(Endpoints(edge_type, some)) for some in _pieces(edges)]
        src, dst = (np.concatenate(nodes) for nodes in zip(*found, strict=True))
        return src, dst

    def take_cost(self) -> Cost:
        return self._meter.take()

    def seeds(self, of: NodeType, split: str) -> Ids:
        return self._shared(of, split, self.manifest.nodes[of].splits[split]).astype(np.int64)

    def graph_attr(self, name: str) -> Array:
        spec: AttrSpec = self.manifest.graph_attrs[name]
        if not spec.shape:
            return self._ask(SharedSlice(None, name, 0, 1)).reshape(())
        return self._shared(None, name, spec.shape[0])

    def to_global(self, of: NodeType, orig_ids: Ids) -> Ids:
        found = [self._ask(ToGlobal(of, some)) for some in _pieces(orig_ids)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def close(self) -> None:
        """Close all connections. Waiting threads raise ``ServiceError``."""
        self._closed.set()
        self._choice.close()
        for client in self._choice.all:
            client.close()

    def probe_servers(self, learn: bool) -> None:
        """Send HELLO to all unreachable servers, and use those that answer again.

        With ``learn``, also sends HELLO to a reachable server. New servers that a reply lists are added.
        """
        reachable = self._choice.pick(0) if learn else None
        asked = []
        for client in (*self._choice.gone, *([reachable] if reachable else [])):
            with contextlib.suppress(ServiceError):
                asked.append((client, client.greet()))  # all at once, as servers that are stuck use up the time
        until = time.monotonic() + _PROBE_TIMEOUT
        for client, pending in asked:
            try:
                info = pending.result(max(_PROBE_LEAST, until - time.monotonic()))
                self._check(client, info)
            except ServiceError:
                continue  # still unreachable
            self._add_servers(info)
            self._choice.mark_back(client)

    def _ask(self, request: Request[A]) -> A:
        return self._fetch(request)[0]

    def _fetch(
        self, request: Request[A], patience: float | None = None, known: bool = True
    ) -> tuple[A, HostClient, int]:  # fmt: skip
        """Send a request to the first reachable server; if it is lost, to the next.

        Returns the answer, which server has answered, and the number of bytes received.

        ``patience``: seconds to wait for a reachable server (default: ``server_wait``). With ``known``, checks at the
        first use of a server that it serves the partition of ``manifest``.
        """
        patience = self.server_wait if patience is None else patience
        until, lost = time.monotonic() + patience, False
        while (client := self._choice.pick(until)) and not (lost and time.monotonic() > until):
            try:
                if known and client not in self._verified:
                    self._check(client, client.greet().result(self.deadline))
                pending = client.submit(request)
                answer = pending.result(self.deadline + self.server_wait)
                return answer, client, pending.received
            except ServerGone as error:
                client.check_open()
                self._choice.mark_gone(client, error)
                until, lost = until if lost else time.monotonic() + patience, True
        self._choice.all[0].check_open()
        raise self._choice.error(patience)

    def _check(self, client: HostClient, info: HelloInfo) -> None:
        if self.digest and info.manifest_digest != self.digest:
            raise ServiceError(
                f"{client.name}: holds another partition than {self.home.name}: the digest of its manifest.json is "
                f"{info.manifest_digest[:12]} instead of {self.digest[:12]}; all servers must serve the same partition"
            )
        if self.digest:
            self._verified.add(client)

    def _add_servers(self, info: HelloInfo) -> None:
        if info.version <= self._version:
            return
        self._version = info.version
        known = {client.endpoint for client in self._choice.all} | {self.home.endpoint}
        for place in info.servers:
            if place.endpoint not in known:
                self._choice.add(self._connect(place))

    def _connect(self, place: ServerAddress) -> HostClient:
        return HostClient(
            place, self.deadline, self._keys, route=True, gone_after=GONE_AFTER, wire_rows=self._wire_rows
        )  # fmt: skip

    def _gather(self, requests: Sequence[RowRequest]) -> list[Mapping[str, Array]]:
        answers = self._ask(Gather(requests))
        number = sum(len(request.ids) for request in requests)
        size = sum(len(request.ids) * self._width(request.of, name) for request in requests for name in request.attrs)
        self._meter.add(Cost(remote_bytes=size, rows=number, remote_rows=number))
        return answers

    def _row_bytes(self, request: RowRequest) -> int:
        """Return the size in bytes of the id and the requested attributes of one node or edge.

        Raises ``PartitionError`` for an unknown type.
        """
        specs = self.manifest.nodes if isinstance(request.of, str) else self.manifest.edges
        if request.of not in specs:
            raise PartitionError(f"no type {request.of!r}; there are {list(specs)}")
        attrs = specs[request.of].attrs  # type: ignore[index]
        return 8 + sum(_width(attrs[name]) if name in attrs else 8 for name in request.attrs)

    def _width(self, of: AnyType, name: str) -> int:
        spec = self.manifest.attrs_of(of).get(name)
        if spec is None:
            return np.dtype(np.int64).itemsize
        return rounding.row_bytes(name, spec.stored, spec.shape, spec.travels_as(self._wire_rows))

    def _shared(self, of: NodeType | None, name: str, rows: int) -> Array:
        number = _AT_ONCE if of is not None else max(1, _BYTES_AT_ONCE // _width(self.manifest.graph_attrs[name]))
        starts = range(0, max(rows, 1), number)
        pieces = [self._ask(SharedSlice(of, name, at, min(number, rows - at))) for at in starts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _pieces(ids: Ids) -> list[Ids]:
    return [ids[at : at + _AT_ONCE] for at in range(0, max(len(ids), 1), _AT_ONCE)]


def _width(spec: AttrSpec) -> int:
    return max(1, spec.stored.itemsize * math.prod(spec.shape[1:]))


def _probe_servers(of: weakref.ref[Gateway], closed: threading.Event) -> None:
    learn_at = time.monotonic() + _LEARN_EVERY
    while not closed.wait(_BACK_EVERY):
        gateway = of()
        if gateway is None:
            return
        learn = time.monotonic() >= learn_at
        learn_at = time.monotonic() + _LEARN_EVERY if learn else learn_at
        try:
            gateway.probe_servers(learn)
        except Exception:  # without this thread no server would be used again after an interruption
            traceback.print_exc()
        del gateway
